"""Records of metrics on their way to the actor that writes them."""

from __future__ import annotations

from contextlib import suppress

from headrace.actors.errors import ActorGone
from headrace.actors.record.files.metrics import Metric, MetricsWriter, line_of
from headrace.actors.runtime.actors.operations import until_back


async def record(writer: MetricsWriter, *records: Metric, deadline_s: float | None = None) -> None:
    """Send records to their writer, and wait for it while it restarts, for at most `deadline_s` (None:
    `cluster.absent_s`). After that the records are lost: nothing is restored from them."""
    lines = [line_of(each) for each in records]
    with suppress(ActorGone):
        await until_back(lambda: writer.record(lines), deadline_s=deadline_s)
