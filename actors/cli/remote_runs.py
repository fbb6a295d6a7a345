"""Commands for the runs of a cluster. They need no run directory.

Invariants:
- No command ends a run unless it was asked to: one that shows the progress of a run and is interrupted only detaches.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import typer
from rich.table import Table

from headrace.actors.cli.cluster_access import run_id_of
from headrace.actors.cli.output import EXPECTED, say, show, write_json
from headrace.actors.cluster.runs.contract import RunsApi
from headrace.actors.cluster.runs.records import RUN_ID, ActualState, RunId
from headrace.actors.errors import ConfigError
from headrace.actors.record.files.absences import Absent
from headrace.actors.record.files.log_lines import event_of
from headrace.actors.record.files.log_warnings import SHOWN, WarningLines
from headrace.actors.run.exit_codes import EXIT_DRAINED, EXIT_FAILED
from headrace.buffer.core.outages import utc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence

    from headrace.actors.cli.cluster_access import ClusterOptions
    from headrace.actors.cluster.runs.contract import RunsClient
    from headrace.actors.cluster.runs.records import RunRecord
    from headrace.actors.record.files.log_lines import Wanted

Event: TypeAlias = "Mapping[str, Any]"
LOGS_S: Final = 2.0
"""Interval between two looks for new lines of logs."""


def submit_run(
    cluster: ClusterOptions,
    recipe: Path,
    *,
    name: str,
    overrides: Sequence[str],
    on: Sequence[Path] = (),
    detach: bool,
    json: Path | None = None,
) -> int:
    """Submit a recipe with machine files, and unless `detach` show the run's events until it has ended. Return the exit
    code. Raises ConfigError for a recipe that cannot run elsewhere."""
    document = dict(cluster.document(recipe, overrides, on))
    document["telemetry"] = {"recipe": recipe.stem, **document.get("telemetry", {})}
    key = uuid.uuid4().hex
    record = cluster.call(RunsApi.submit, name or recipe.stem, document, key)
    say(f"run {record.run_id} ({record.name}): {_state(record)}")
    if detach:
        write_json(record, json)
        return 0
    return follow_run(cluster, record.run_id, json=json)


def follow_run(cluster: ClusterOptions, run: str, *, json: Path | None = None) -> int:
    """Show the events of a run and the warnings of its actors until it has ended, and return its exit code. An
    interrupt ends only this command."""

    async def follow(client: RunsClient) -> RunRecord:
        _cancel_on_signals()
        run_id = await run_id_of(client, run)
        warnings = _RemoteWarnings(client, run_id, WarningLines(f"headrace logs {run_id} {cluster}"))
        showing = asyncio.create_task(warnings.keep_showing())
        try:
            async for event in client.events(run_id):
                say(f"{utc(event.time_s)}  {event.state:9} {event.text}")
        finally:
            showing.cancel()
        await warnings.show()
        say(*warnings.lines.left_out())
        return await client.ask(RunsApi.run, run_id)

    try:
        record = cluster.ask(follow)
    except (KeyboardInterrupt, asyncio.CancelledError):
        say(f"detached; the run goes on: headrace status {run} --events {cluster}")
        raise KeyboardInterrupt from None
    say(f"run {record.run_id} ({record.name}): {_state(record)}")
    write_json(record, json)
    if record.exit_code is not None:
        return record.exit_code
    # It ended without a service that could tell one.
    return EXIT_FAILED if record.actual is ActualState.FAILED else EXIT_DRAINED


@dataclass(slots=True)
class _RemoteWarnings:
    """What the actors of a run warn of. While the logs cannot be read, nothing is shown."""

    client: RunsClient
    run_id: RunId
    lines: WarningLines
    cursor: str = ""

    async def show(self) -> None:
        """Show what is new."""
        with suppress(*EXPECTED):
            async for events, cursor in _pages(self.client, self.run_id, SHOWN, self.cursor):
                self.cursor = cursor
                say(*self.lines.told(events, time.monotonic()))

    async def keep_showing(self) -> NoReturn:
        """Show what is new, until cancelled."""
        while True:
            await self.show()
            await asyncio.sleep(LOGS_S)


def _cancel_on_signals() -> None:
    """Cancel the current task on Ctrl-C and SIGTERM, which Ray handles otherwise."""
    task = asyncio.current_task()
    assert task is not None
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)


def show_runs(cluster: ClusterOptions, *, json: Path | None = None) -> None:
    """Show all runs that the key may see."""
    records = cluster.call(RunsApi.runs)
    if not write_json(records, json):
        show(_runs_table(records))


def show_run(cluster: ClusterOptions, run: str, *, json: Path | None = None) -> None:
    """Show the state of a run; as JSON, the document of `headrace status --json RUN`."""
    status = cluster.call_on(RunsApi.status, run)
    if write_json(status, json):
        return
    show(_runs_table([cluster.call_on(RunsApi.run, run)]))
    for key in ("steps", "version", "reward", "held", "head"):
        if status.get(key):
            say(f"{key}: {status[key]}")
    say(*absent_lines(status))


def absent_lines(status: Mapping[str, Any]) -> list[str]:
    """Return a line for each part that a run waits for, from its status."""
    now_s = time.time()
    return [f"absent: {Absent(**one).line(now_s)}" for one in status.get("absent", ())]


def recover_run(cluster: ClusterOptions, run: str, *, json: Path | None = None) -> None:
    """Continue a run whose control node has lost its disk from its storage."""
    from headrace.actors.cluster.runs.client import ClusterClient

    async def recover(client: RunsClient) -> RunRecord:
        if not isinstance(client, ClusterClient) or not RUN_ID.fullmatch(run):
            raise ConfigError("--from-storage needs --address, on a node of the cluster, and the whole id of the run")
        return await client.recover(RunId(run))

    show_change(cluster.ask(recover), json)


def show_change(record: RunRecord, json: Path | None) -> None:
    """Show a run that was changed."""
    say(f"run {record.run_id} ({record.name}): {_state(record)}, should be {record.desired}")
    write_json(record, json)


def print_logs(
    cluster: ClusterOptions, run: str, wanted: Wanted, *, follow: bool, render: Callable[[Event], str]
) -> None:
    """Print the wanted lines of a run's logs up to now, or with `follow` until the run has ended, as `render` returns
    each: those of a rollout in the order of time, others one actor after another."""

    async def print_pages(client: RunsClient) -> None:
        run_id, cursor = await run_id_of(client, run), ""
        while True:
            is_last = not follow or not (await client.ask(RunsApi.run, run_id)).is_live
            async for events, after in _pages(client, run_id, wanted, cursor):
                cursor = after
                for event in events:
                    typer.echo(render(event))
            if is_last:
                return
            await asyncio.sleep(LOGS_S)

    cluster.ask(print_pages)


async def _pages(
    client: RunsClient, run_id: RunId, wanted: Wanted, cursor: str
) -> AsyncGenerator[tuple[list[Event], str], None]:
    """Yield the wanted events after a cursor, with the next cursor; those of a rollout at once, in the order of
    time."""
    found: list[Event] = []
    page = await client.ask(RunsApi.logs, run_id, wanted.actor, cursor)
    while page.lines:
        parsed = (event_of(line.encode()) for line in page.lines)
        found += [event for event in parsed if event is not None and wanted.has(event)]
        if wanted.rollout is None:
            yield found, page.cursor
            found = []
        page = await client.ask(RunsApi.logs, run_id, wanted.actor, page.cursor)
    yield sorted(found, key=lambda event: float(event["time"])), page.cursor


def _state(record: RunRecord) -> str:
    return f"{record.actual} ({record.reason})" if record.reason else record.actual.value


def _runs_table(records: Iterable[RunRecord]) -> Table:
    table = Table("run", "name", "owner", "state", "submitted", "why", box=None)
    for record in records:
        submitted = utc(record.submitted_s)
        table.add_row(record.run_id, record.name, record.owner, record.actual.value, submitted, record.reason)
    return table
