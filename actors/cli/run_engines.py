"""The commands `headrace engine list|add|remove`, which show and change a run's engines through its directory, or
through the cluster that has it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headrace.actors.cli import remote_runs
from headrace.actors.cli.output import Json, engine_table, say, show, write_json
from headrace.actors.cli.remote_runs import Address, KeyPath, Owner, Url, access

if TYPE_CHECKING:
    from headrace.actors.record.files.run_directory import RunDirectory

__all__ = ["add_engine", "list_engines", "remove_engine"]

Run = Annotated[Path, typer.Option("--run", metavar="RUN", help="Directory of the run, or its id on a cluster.")]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout-s",
        min=1,
        help="Seconds to wait for the change; a push in progress and the catch-up push come first.",
    ),
]


def list_engines(
    run: Run,
    json: Json = None,
    address: Address = None,
    owner: Owner = "",
    url: Url = None,
    key_file: KeyPath = None,
) -> None:
    """List the engines of a run: state, version, load (running+waiting), URL, and why an engine is not serving."""
    from headrace.actors.engines.members_file import read_roster

    if (cluster := access(url, key_file, address, owner)) is not None:
        remote_runs.show_engines(cluster, str(run), json=json)
        return
    directory = _directory(run)
    roster = read_roster(directory.engines)
    if json is not None:
        write_json({"time_s": roster.time_s, "engines": [asdict(engine) for engine in roster.engines]}, json)
    else:
        show(engine_table(roster.engines))


def add_engine(
    url: Annotated[str, typer.Argument(help="Base URL of a server, http://host:port.")],
    run: Run,
    timeout_s: Timeout = 120.0,
    json: Json = None,
    address: Address = None,
    owner: Owner = "",
    api_url: Url = None,
    key_file: KeyPath = None,
) -> None:
    """Attach a server to a live run; it starts serving once it has the latest weights. Idempotent."""
    cluster = access(api_url, key_file, address, owner)
    if cluster is not None:
        remote_runs.add_engine(cluster, str(run), url, timeout_s=timeout_s, json=json)
    else:
        _ask(run, "add", url, timeout_s, json)


def remove_engine(
    engine: Annotated[str, typer.Argument(help="Engine id, as shown by `headrace engine list`.")],
    run: Run,
    timeout_s: Timeout = 120.0,
    json: Json = None,
    address: Address = None,
    owner: Owner = "",
    url: Url = None,
    key_file: KeyPath = None,
) -> None:
    """Remove an engine from a live run permanently; turns in progress there end or continue on other engines.
    Idempotent."""
    cluster = access(url, key_file, address, owner)
    if cluster is not None:
        remote_runs.remove_engine(cluster, str(run), engine, timeout_s=timeout_s, json=json)
    else:
        _ask(run, "remove", engine, timeout_s, json)


def _ask(run: Path, kind: Literal["add", "remove"], what: str, timeout_s: float, json: Path | None) -> None:
    from headrace.actors.engines.requests import ask_group
    from headrace.actors.errors import RunMissing

    directory = _directory(run)
    if not directory.is_driven():
        raise RunMissing(f"{directory.path} is not live, so its engines cannot be changed; run `headrace resume` first")
    engine_id = ask_group(directory.engine_requests, kind, what, timeout_s=timeout_s)
    if json is not None:
        done: dict[str, Any] = {"engine_id": engine_id, "done": kind}
        write_json(done, json)
    else:
        say(f"{engine_id}: {'added' if kind == 'add' else 'removed'}")


def _directory(path: Path) -> RunDirectory:
    """Open the directory of a run. Raises RunMissing."""
    from headrace.actors.run.launch import reopen

    return reopen(path)[1]
