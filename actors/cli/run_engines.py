"""The commands `headrace engine add|remove`, which change a run's engines through its directory, or
through the cluster that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from headrace.actors.cli.cluster_access import ClusterOptions
from headrace.actors.cli.output import Json, say, with_records, write_json
from headrace.actors.cluster.runs.contract import EngineChange, RunsApi

Run = Annotated[Path, typer.Option("--run", metavar="RUN", help="Directory of the run, or its id on a cluster.")]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout-s",
        min=1,
        help="Seconds to wait for the change; a push in progress and the catch-up push come first.",
    ),
]


@with_records
def add_engine(
    url: Annotated[str, typer.Argument(help="Base URL of a server, http://host:port.")],
    run: Run,
    cluster: ClusterOptions,
    timeout_s: Timeout = 120.0,
    json: Json = None,
) -> None:
    """Attach a server to a live run; it starts serving once it has the latest weights. Idempotent."""
    if cluster:
        _say(cluster.call_on(RunsApi.add_engine, run, url, timeout_s), json)
    else:
        _say(_ask(run, "add", url, timeout_s), json)


@with_records
def remove_engine(
    engine: Annotated[str, typer.Argument(help="Engine id, as shown by `headrace status RUN --engines`.")],
    run: Run,
    cluster: ClusterOptions,
    timeout_s: Timeout = 120.0,
    json: Json = None,
) -> None:
    """Remove an engine from a live run permanently; turns in progress there end or continue on other engines.
    Idempotent."""
    if cluster:
        _say(cluster.call_on(RunsApi.remove_engine, run, engine, timeout_s), json)
    else:
        _say(_ask(run, "remove", engine, timeout_s), json)


def _ask(run: Path, kind: Literal["add", "remove"], what: str, timeout_s: float) -> EngineChange:
    from headrace.actors.engines.requests import ask_group
    from headrace.actors.errors import RunMissing
    from headrace.actors.run.launch import reopen

    directory = reopen(run)[1]
    if not directory.is_driven():
        raise RunMissing(f"{directory.path} is not live, so its engines cannot be changed; run `headrace resume` first")
    return EngineChange(engine_id=ask_group(directory.engine_requests, kind, what, timeout_s=timeout_s), done=kind)


def _say(change: EngineChange, json: Path | None) -> None:
    if not write_json(change, json):
        say(f"{change.engine_id}: {'added' if change.done == 'add' else 'removed'}")
