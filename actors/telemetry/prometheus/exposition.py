"""The metrics of one run as text for Prometheus, and `/metrics` over HTTP.

Invariants:
- Everything is computed from the files of the run's directory, which are only read: no process of the run knows of it,
  and a new exposition of the same files has the same counts.
- After the first reading, each one reads what is new. They are in a thread, one at a time: the event loop goes on.
- A file or record of another version, or a damaged one, costs the metrics that it would give and no others. Without a
  ledger that can be read `headrace_ledger_readable` is 0.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Final

from aiohttp import web
from prometheus_client import disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from headrace.actors.engines.members_file import read_roster
from headrace.actors.record.files.run_directory import RunDirectory, identity_of
from headrace.actors.runtime.version import RUNNING
from headrace.actors.telemetry.prometheus import table
from headrace.actors.telemetry.prometheus.ledger import LedgerReader
from headrace.actors.telemetry.prometheus.records import NewestRecords
from headrace.actors.telemetry.prometheus.series import Series
from headrace.actors.telemetry.slow.in_flight import in_flight
from headrace.actors.telemetry.spans.store import SpanFolder
from headrace.buffer.errors import LedgerRefused
from headrace.buffer.trajectories.types import Purpose
from headrace.serve.tracing.span_files import NOT_WRITTEN, QUEUE_FULL, REMOVED

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

PATH: Final = "/metrics"
WAIT_S: Final = 8.0
"""Time that a request waits for a reading; the default time limit of a scrape is 10 s."""

logger = logging.getLogger(__name__)


class Exposition(Collector):
    """Metrics of a run. Its calls block on files, and one may run at a time."""

    def __init__(self, directory: RunDirectory, *, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives Unix time in seconds."""
        # The time at which this process made a counter is not that at which the run began to count.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._directory, self._clock = directory, clock
        self._records = NewestRecords(directory.metrics)
        self._ledger = LedgerReader(directory.path)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Read what is new. Return the text and its Content-Type: OpenMetrics if the header `accept` names it, else the
        plain format, which has no exemplars."""
        try:
            encode, content_type = choose_encoder(accept)
        except TypeError:
            # A version that is no number.
            encode, content_type = choose_encoder("")
        return encode(self), content_type

    def collect(self) -> Iterator[Metric]:
        """Read what is new, and yield the metrics."""
        began_s, of = time.monotonic(), (now := Series()).of
        self._ledger.update()
        try:
            self._records.update()
        except OSError as error:
            logger.warning("%s cannot be read (%s); its metrics stay as they were", self._directory.metrics, error)
        yield from self._records.collect()
        driven = self._directory.is_driven()
        of(table.RUN, identity_of(self._directory), self._directory.path.name, RUNNING).set(1)
        of(table.DRIVEN).set(driven)
        of(table.LEDGER_READABLE).set(self._ledger.series is not None)
        of(table.BAD_LINES).set(self._records.bad_lines)
        of(table.LEFT_OUT).set(self._records.left_out)
        self._add_running(now, driven=driven)
        for engine in sorted(read_roster(self._directory.engines).engines, key=lambda each: each.engine_id):
            of(table.ENGINE_STATE, engine.engine_id, engine.state).inc()
            for state, requests in (("running", engine.running), ("waiting", engine.waiting)):
                if requests is not None:
                    of(table.ENGINE_REQUESTS, engine.engine_id, state).inc(requests)
        lost = SpanFolder.of_run(self._directory.path).lost()
        for reason in sorted({*lost, QUEUE_FULL, NOT_WRITTEN, REMOVED}):
            of(table.SPANS_LOST, reason).inc(lost[reason])
        self._add_disks(now)
        of(table.READ_S).set(time.monotonic() - began_s)
        for series in (now, *(self._ledger.series or ())):
            yield from series.registry.collect()

    def _add_running(self, series: Series, *, driven: bool) -> None:
        """Add what is in flight, as `headrace status RUN --running` lists it: nothing while nobody drives the run."""
        try:
            rows = in_flight(self._directory, driven=True, now_s=self._clock()) if driven else []
        except (LedgerRefused, sqlite3.DatabaseError) as error:
            logger.debug("what is in flight is unknown: %s", error)
            return
        trained = [row for row in rows if row.purpose == Purpose.TRAIN]
        series.of(table.STUCK).set(sum(row.stuck for row in trained))
        series.of(table.OLDEST_S).set(max((row.age_s for row in trained), default=0.0))
        for row in sorted(rows, key=lambda row: row.part):
            if not row.interrupted:
                series.of(table.RUNNING, row.part, row.purpose).inc()

    def _add_disks(self, series: Series) -> None:
        """Add the room on the file systems of the run's folders; a folder that is away is left out."""
        for name, folder in (("state", self._directory.path), ("storage", self._directory.storage)):
            try:
                found = os.statvfs(folder)
            except OSError as error:
                logger.warning("%s cannot be measured: %s", folder, error)
                continue
            series.of(table.DISK_FREE, name).set(found.f_bavail * found.f_frsize)
            series.of(table.DISK_SIZE, name).set(found.f_blocks * found.f_frsize)


def metrics_handler(
    exposition: Exposition, *, wait_s: float = WAIT_S
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return a handler of aiohttp that answers with the metrics. It must be the only user of `exposition`. The first
    reading of a long run may take longer than a scrape: the request is answered 503, the reading goes on, and a later
    request gets the result."""
    reading: dict[str, asyncio.Task[tuple[bytes, str]]] = {}
    one_at_a_time = asyncio.Lock()

    async def render(accept: str) -> tuple[bytes, str]:
        async with one_at_a_time:
            return await asyncio.to_thread(exposition.render, accept)

    async def metrics(request: web.Request) -> web.StreamResponse:
        accept = ",".join(request.headers.getall("Accept", ()))
        if (task := reading.get(accept)) is None:
            task = reading[accept] = asyncio.create_task(render(accept))
            task.add_done_callback(lambda _: reading.pop(accept, None))
        try:
            body, content_type = await asyncio.wait_for(asyncio.shield(task), wait_s)
        except TimeoutError:
            text = f"the ledger is still being read after {wait_s:g} s; ask again\n"
            return web.Response(status=503, text=text, headers={"Retry-After": "10"})
        return web.Response(body=body, headers={"Content-Type": content_type})

    return metrics
