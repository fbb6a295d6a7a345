"""Commands for the runs of a cluster, over its control API (`--url`), which needs no Ray here, or over Ray on one of
its nodes (`--address`). They need no run directory.

Invariants:
- No command ends a run unless it was asked to: one that shows the progress of a run and is interrupted only detaches.
- A run is named by its id, or by its name: then the newest run of that name is meant.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, Protocol, TypeAlias, TypeVar

import orjson
import typer
from rich.table import Table

from headrace.actors.cli.output import EXIT_DRAINED, EXIT_FAILED, EXPECTED, engine_table, say, show, write_json
from headrace.actors.cluster.runs.records import ActualState
from headrace.actors.errors import ConfigError, RunUnknown
from headrace.actors.record.files.absences import Absent
from headrace.actors.record.files.log_lines import event_of
from headrace.actors.record.files.log_warnings import SHOWN, WarningLines
from headrace.buffer.core.outages import utc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence

    from headrace.actors.cluster.runs.client import RunsClient
    from headrace.actors.cluster.runs.records import Recipe, RunEvent, RunRecord
    from headrace.actors.record.files.log_lines import Wanted
    from headrace.actors.run.placement import ClusterSection

T = TypeVar("T")

Url = Annotated[
    str | None,
    typer.Option(
        "--url", envvar="HEADRACE_URL", help="Control API of a cluster, http://host:port (docs/control_api.md)."
    ),
]
KeyPath = Annotated[
    Path | None,
    typer.Option("--key-file", envvar="HEADRACE_KEY_FILE", help="File with your key for --url, readable by you only."),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address", help="Ray cluster, HOST:PORT of its head, or `auto` on one of its nodes (docs/cluster.md)."
    ),
]
Owner = Annotated[str, typer.Option("--owner", help="Owner of the runs, with --address; by default your user name.")]
Event: TypeAlias = "Mapping[str, Any]"
LOGS_S: Final = 2.0
"""Interval between two looks for new lines of logs."""
_RUN_ID: Final = re.compile(r"[0-9a-f]{32}")


class Access(Protocol):
    """A way to the runs of a cluster. `options` are those with which a command takes it."""

    @property
    def options(self) -> str: ...

    def ask(self, work: Callable[[RunsClient], Awaitable[T]]) -> T:
        """Return the result of `work` with a client. Raises ConfigError and the errors of the client."""
        ...

    def document(self, recipe: Path, overrides: Sequence[str]) -> Recipe:
        """Return the tables of a recipe, as they are submitted. Raises ConfigError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCluster:
    """The runs of one owner, over Ray from a node of the cluster at `address`. `section` starts the actor that
    supervises runs, for a submission."""

    address: str
    owner: str
    quotas: Path | None = None
    section: ClusterSection | None = None

    @property
    def options(self) -> str:
        return f"--address {self.address} --owner {self.owner}"

    def ask(self, work: Callable[[RunsClient], Awaitable[T]]) -> T:
        """See `Access.ask`. Raises StartFailed as well."""
        from headrace.actors.cluster.nodes.connection import connected
        from headrace.actors.cluster.runs.client import ClusterClient, find_runs, start_runs

        async def asked() -> T:
            section = self.section
            runs = await (find_runs() if section is None else start_runs(section, quotas=self.quotas))
            return await work(ClusterClient(runs, self.owner))

        with connected(self.address):
            return asyncio.run(asked())

    def document(self, recipe: Path, overrides: Sequence[str]) -> Recipe:
        """See `Access.document`. Paths are relative to the recipe: this is a node of the cluster."""
        from headrace.actors.cluster.runs.client import document_of_recipe

        return document_of_recipe(recipe, overrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """A control API and the file with the user's key."""

    url: str
    key_file: Path | None

    @property
    def options(self) -> str:
        return f"--url {self.url}"

    def document(self, recipe: Path, overrides: Sequence[str]) -> Recipe:
        """See `Access.document`. Paths must be absolute: this machine is no node of the cluster."""
        return recipe_document(recipe, overrides)

    def ask(self, work: Callable[[RunsClient], Awaitable[T]]) -> T:
        """See `Access.ask`."""
        from headrace.actors.cluster.api.client import ControlClient, read_key

        if self.key_file is None:
            raise ConfigError("--key-file is missing: name the file with your key for --url (or set HEADRACE_KEY_FILE)")
        key = read_key(self.key_file)

        async def asked() -> T:
            async with ControlClient(self.url, key) as client:
                return await work(client)

        return asyncio.run(asked())


def access(url: str | None, key_file: Path | None, address: str | None, owner: str) -> Access | None:
    """Return the way to the runs that the options name; None for the runs of this machine. Raises ConfigError."""
    if address is not None:
        if url is not None:
            raise ConfigError("--url and --address name two ways to the runs: use one")
        return OnCluster(address=address, owner=owner or user_here())
    return None if url is None else Api(url=url, key_file=key_file)


def user_here() -> str:
    """Return the name of this process' user, who may have no account on this machine (in a container)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid-{os.getuid()}"


def required_access(url: str | None, key_file: Path | None, address: str | None, owner: str) -> Access:
    """Return the way to the runs that the options name. Raises ConfigError if they name none."""
    if (found := access(url, key_file, address, owner)) is None:
        raise ConfigError("this is for runs of a cluster: name it with --address or --url")
    return found


def submission_access(
    recipe: Path,
    overrides: Sequence[str],
    url: str | None,
    key_file: Path | None,
    address: str | None,
    owner: str,
    quotas: Path | None,
) -> Access | None:
    """Return the way to the cluster on which a recipe is to run, by the options or by its own `cluster.address`; None
    to run it here. Raises ConfigError."""
    from headrace.actors.run.config import read_recipe
    from headrace.actors.run.placement import LOCAL, cluster_section

    if url is not None:
        return access(url, key_file, address, owner)
    given = read_recipe(recipe, overrides).get("cluster", {})
    section = cluster_section(given if address is None or not isinstance(given, dict) else given | {"address": address})
    if section.address == LOCAL:
        return None
    return OnCluster(
        address=section.address, owner=owner or user_here(), quotas=quotas and quotas.resolve(), section=section
    )


def submit_run(
    api: Access, recipe: Path, *, name: str, overrides: Sequence[str], detach: bool, json: Path | None = None
) -> int:
    """Submit a recipe, and unless `detach` show the run's events until it has ended. Return the exit code. Raises
    ConfigError for a recipe that cannot run elsewhere."""
    document = dict(api.document(recipe, overrides))
    document["telemetry"] = {"recipe": recipe.stem, **document.get("telemetry", {})}
    key = uuid.uuid4().hex
    record = api.ask(lambda client: client.submit(name or recipe.stem, document, key))
    say(f"run {record.run_id} ({record.name}): {_state(record)}")
    if detach:
        _write(record, json)
        return 0
    return follow_run(api, record.run_id, json=json)


def recipe_document(recipe: Path, overrides: Sequence[str]) -> Recipe:
    """Return the tables of a recipe for a run on a cluster. Raises ConfigError, also for paths that are relative: they
    would mean nothing there."""
    from headrace.actors.run.config import named_paths, read_recipe

    document = read_recipe(recipe, overrides)
    for name, above, key in named_paths(document):
        if not Path(above[key]).is_absolute():
            raise ConfigError(
                f"{recipe}: {name} {above[key]!r} is relative: on a cluster, write an absolute path of its nodes "
                f"(--set {name}=/...)"
            )
    for table, keys in document.items():
        if not isinstance(keys, dict):
            raise ConfigError(f"{recipe}: {table} must be a table; write its keys below [{table}]")
    try:
        orjson.dumps(document)
    except orjson.JSONEncodeError as error:
        raise ConfigError(f"{recipe}: has a value that JSON cannot express ({error}): change it") from error
    return document


def follow_run(api: Access, run: str, *, json: Path | None = None) -> int:
    """Show the events of a run and the warnings of its actors until it has ended, and return its exit code. An
    interrupt ends only this command."""

    async def follow(client: RunsClient) -> RunRecord:
        _cancel_on_signals()
        run_id = await _run_id(client, run)
        warnings = _RemoteWarnings(client, run_id, WarningLines(f"headrace logs {run_id} {api.options}"))
        showing = asyncio.create_task(warnings.keep_showing())
        try:
            async for event in client.events(run_id):
                say(_line(event))
        finally:
            showing.cancel()
        await warnings.show()
        say(*warnings.lines.left_out())
        return await client.run(run_id)

    try:
        record = api.ask(follow)
    except (KeyboardInterrupt, asyncio.CancelledError):
        say(f"detached; the run goes on: headrace events {run} {api.options}")
        raise KeyboardInterrupt from None
    say(f"run {record.run_id} ({record.name}): {_state(record)}")
    _write(record, json)
    if record.exit_code is not None:
        return record.exit_code
    # It ended without a service that could tell one.
    return EXIT_FAILED if record.actual is ActualState.FAILED else EXIT_DRAINED


@dataclass(slots=True)
class _RemoteWarnings:
    """What the actors of a run warn of. While the logs cannot be read, nothing is shown."""

    client: RunsClient
    run_id: str
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


def show_events(api: Access, run: str, *, after: int = 0) -> None:
    """Print the events of a run after number `after`, one JSON object a line, until it has ended."""

    async def print_all(client: RunsClient) -> None:
        async for event in client.events(await _run_id(client, run), after=after):
            typer.echo(orjson.dumps(event))

    api.ask(print_all)


def show_runs(api: Access, *, json: Path | None = None) -> None:
    """Show all runs that the key may see."""
    records = api.ask(lambda client: client.runs())
    if json is not None:
        write_json([asdict(record) for record in records], json)
    else:
        show(_runs_table(records))


def show_run(api: Access, run: str, *, json: Path | None = None) -> None:
    """Show the state of a run and its engines; as JSON, the document of `headrace status --json RUN`."""
    if json is not None:
        write_json(api.ask(_on(run, lambda client, run_id: client.status(run_id))), json)
        return

    async def both(client: RunsClient, run_id: str) -> tuple[RunRecord, dict[str, Any]]:
        return await client.run(run_id), await client.status(run_id)

    record, status = api.ask(_on(run, both))
    show(_runs_table([record]))
    for key in ("steps", "version", "reward", "held", "head"):
        if status.get(key):
            say(f"{key}: {status[key]}")
    say(*absent_lines(status))


def absent_lines(status: Mapping[str, Any]) -> list[str]:
    """Return a line for each part that a run waits for, from its status."""
    now_s = time.time()
    return [f"absent: {Absent(**one).line(now_s)}" for one in status.get("absent", ())]


def show_report(api: Access, run: str, *, json: Path | None = None) -> None:
    """Print the report of a run as JSON."""
    write_json(api.ask(_on(run, lambda client, run_id: client.report(run_id))), json or Path("-"))


def drain_run(api: Access, run: str, *, json: Path | None = None) -> None:
    """Let a run save a checkpoint and end."""
    _change(api, json, _on(run, lambda client, run_id: client.drain(run_id)))


def stop_run(api: Access, run: str, *, json: Path | None = None) -> None:
    """End a run at once."""
    _change(api, json, _on(run, lambda client, run_id: client.stop(run_id)))


def resume_run(api: Access, run: str, *, changes: Sequence[str] = (), json: Path | None = None) -> None:
    """Queue an ended run again, with changed keys."""
    _change(api, json, _on(run, lambda client, run_id: client.resume(run_id, tuple(changes))))


def recover_run(api: Access, run: str, *, json: Path | None = None) -> None:
    """Continue a run whose control node has lost its disk from its storage."""
    from headrace.actors.cluster.runs.client import ClusterClient

    async def recover(client: RunsClient) -> RunRecord:
        if not isinstance(client, ClusterClient) or not _RUN_ID.fullmatch(run):
            raise ConfigError("--from-storage needs --address, on a node of the cluster, and the whole id of the run")
        return await client.recover(run)

    _change(api, json, recover)


def upgrade_run(api: Access, run: str, *, json: Path | None = None) -> None:
    """Let a live run start again under what is installed."""
    _change(api, json, _on(run, lambda client, run_id: client.upgrade(run_id)))


def show_engines(api: Access, run: str, *, json: Path | None = None) -> None:
    """Show the engines of a run."""
    engines = api.ask(_on(run, lambda client, run_id: client.engines(run_id)))
    if json is not None:
        write_json({"engines": [asdict(engine) for engine in engines]}, json)
    else:
        show(engine_table(engines))


def add_engine(api: Access, run: str, url: str, *, timeout_s: float, json: Path | None = None) -> None:
    """Attach a server to a live run."""
    name = api.ask(_on(run, lambda client, run_id: client.add_engine(run_id, url, timeout_s)))
    _write_engine(name, "add", json)


def remove_engine(api: Access, run: str, engine: str, *, timeout_s: float, json: Path | None = None) -> None:
    """Remove an engine from a live run."""
    name = api.ask(_on(run, lambda client, run_id: client.remove_engine(run_id, engine, timeout_s)))
    _write_engine(name, "remove", json)


def print_logs(api: Access, run: str, wanted: Wanted, *, follow: bool, render: Callable[[Event], str]) -> None:
    """Print the wanted lines of a run's logs up to now, or with `follow` until the run has ended, as `render` returns
    each: those of a rollout in the order of time, others one actor after another."""

    async def print_pages(client: RunsClient, run_id: str) -> None:
        cursor = ""
        while True:
            is_last = not follow or not (await client.run(run_id)).is_live
            async for events, after in _pages(client, run_id, wanted, cursor):
                cursor = after
                for event in events:
                    typer.echo(render(event))
            if is_last:
                return
            await asyncio.sleep(LOGS_S)

    api.ask(_on(run, print_pages))


async def _pages(
    client: RunsClient, run_id: str, wanted: Wanted, cursor: str
) -> AsyncGenerator[tuple[list[Event], str], None]:
    """Yield the wanted events after a cursor, with the next cursor; those of a rollout at once, in the order of
    time."""
    found: list[Event] = []
    page = await client.logs(run_id, actor=wanted.actor, after=cursor)
    while page.lines:
        parsed = (event_of(line.encode()) for line in page.lines)
        found += [event for event in parsed if event is not None and wanted.has(event)]
        if wanted.rollout is None:
            yield found, page.cursor
            found = []
        page = await client.logs(run_id, actor=wanted.actor, after=page.cursor)
    yield sorted(found, key=lambda event: float(event["time"])), page.cursor


def _on(run: str, work: Callable[[RunsClient, str], Awaitable[T]]) -> Callable[[RunsClient], Awaitable[T]]:
    """Return `work` for the run that the user named."""

    async def on_run(client: RunsClient) -> T:
        return await work(client, await _run_id(client, run))

    return on_run


async def _run_id(client: RunsClient, run: str) -> str:
    """Return the id of the run that the user named. Raises RunUnknown."""
    if _RUN_ID.fullmatch(run):
        return run
    named = [record for record in await client.runs() if record.name == run]
    if not named:
        raise RunUnknown(f"there is no run {run!r}: `headrace status` lists the runs that your key may see")
    return max(named, key=lambda record: record.submitted_s).run_id


def _change(api: Access, json: Path | None, work: Callable[[RunsClient], Awaitable[RunRecord]]) -> None:
    record = api.ask(work)
    say(f"run {record.run_id} ({record.name}): {_state(record)}, should be {record.desired}")
    _write(record, json)


def _state(record: RunRecord) -> str:
    return f"{record.actual} ({record.reason})" if record.reason else record.actual.value


def _write(record: RunRecord, json: Path | None) -> None:
    if json is not None:
        write_json(asdict(record), json)


def _write_engine(name: str, done: str, json: Path | None) -> None:
    if json is not None:
        write_json({"engine_id": name, "done": done}, json)
    else:
        say(f"{name}: {'added' if done == 'add' else 'removed'}")


def _runs_table(records: Iterable[RunRecord]) -> Table:
    table = Table("run", "name", "owner", "state", "submitted", "why", box=None)
    for record in records:
        submitted = utc(record.submitted_s)
        table.add_row(record.run_id, record.name, record.owner, record.actual.value, submitted, record.reason)
    return table


def _line(event: RunEvent) -> str:
    return f"{utc(event.time_s)}  {event.state:9} {event.text}"
