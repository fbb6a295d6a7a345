"""The command `headrace status`: the state of runs, of one run's parts, or of a cluster's nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer
from rich.table import Table

from headrace.actors.cli.cluster_access import ClusterOptions, run_id_of
from headrace.actors.cli.output import Json, engine_table, say, show, with_records, write_json
from headrace.actors.cli.remote_runs import absent_lines, show_run, show_runs
from headrace.actors.cluster.runs.contract import RunsApi
from headrace.actors.errors import ConfigError
from headrace.buffer.core.outages import utc

if TYPE_CHECKING:
    from headrace.actors.cluster.runs.contract import RunsClient


@with_records
def status(
    cluster: ClusterOptions,
    run_dir: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="Run directory, or id or name on a cluster; by default all runs."),
    ] = None,
    runs_dir: Annotated[Path, typer.Option(help="Folder to search for runs.")] = Path("runs"),
    engines: Annotated[
        bool, typer.Option("--engines", help="The run's engines, with the reason why one does not serve.")
    ] = False,
    running: Annotated[
        bool,
        typer.Option(
            "--running", help="Rollouts that have not ended or were interrupted, the oldest against its cohort first."
        ),
    ] = False,
    parked: Annotated[
        bool, typer.Option("--parked", help="Tasks that are no longer issued, with hosts and the last failure.")
    ] = False,
    events: Annotated[
        bool,
        typer.Option("--events", help="On a cluster: the run's events as JSON lines, until it has ended."),
    ] = False,
    after: Annotated[int, typer.Option(min=0, help="With --events: leave out those up to this number.")] = 0,
    nodes: Annotated[
        bool, typer.Option("--nodes", help="The nodes of a cluster; over --url it needs a key of an admin.")
    ] = False,
    json: Json = None,
) -> None:
    """Show the state of runs, or of a part of one. Without --address or --url, it reads run directories only, also
    those of runs that are over, killed or copied."""
    shown = {"engines": engines, "running": running, "parked": parked, "events": events, "nodes": nodes}
    chosen = [name for name, is_chosen in shown.items() if is_chosen]
    if len(chosen) > 1:
        raise ConfigError(f"--{chosen[0]} and --{chosen[1]}: one at a time; leave one out")
    if nodes:
        _show_nodes(cluster, json)
    elif not chosen:
        _show_states(cluster, run_dir, runs_dir, json)
    elif run_dir is None:
        raise ConfigError(f"--{chosen[0]} needs a run: name its directory, or its id on a cluster")
    elif events:

        async def print_all(client: RunsClient) -> None:
            async for event in client.events(await run_id_of(client, str(run_dir)), after=after):
                typer.echo(orjson.dumps(event))

        cluster.ask(print_all)
    elif engines:
        _show_engines(cluster, run_dir, json)
    elif cluster:
        raise ConfigError(f"--{chosen[0]} reads the run's directory: name that on its control node, without a cluster")
    elif parked:
        _show_parked(run_dir, json)
    else:
        _show_running(run_dir, json)


def _show_states(cluster: ClusterOptions, run_dir: Path | None, runs_dir: Path, json: Path | None) -> None:
    from headrace.actors.engines.members_file import read_roster
    from headrace.actors.errors import RunMissing
    from headrace.actors.record.files.run_state import RunState
    from headrace.actors.run.launch import reopen
    from headrace.actors.run.run_status import status_of

    if cluster:
        if run_dir is None:
            show_runs(cluster, json=json)
        else:
            show_run(cluster, str(run_dir), json=json)
        return
    paths = [run_dir] if run_dir is not None else [path.parent for path in sorted(runs_dir.glob("*/config.json"))]
    found = []
    for path in paths:
        try:
            found.append(reopen(path))
        except RunMissing as error:
            if run_dir is not None:
                raise
            say(str(error))
    states = [status_of(config, directory) for config, directory in found]
    if write_json(states if run_dir is None else states[0], json):
        return
    table = Table("run", "state", "version", "reward", "held-out", box=None)
    for state in states:
        held_out = "  ".join(f"{tag} {success:.0%}" for tag, success in state["held_out"].items())
        reward = "-" if state["reward"] is None else f"{state['reward']:.2f}"
        stands = f"{state['steps']} of {state['total_steps']}, {state['state']}"
        table.add_row(state["run"], stands, state["version"] or "-", reward, held_out or "-")
    show(table)
    for state in states:
        say(*(f"{state['run']}: {line}" for line in absent_lines(state)))
        if state["held"]:
            say(f"{state['run']} is holding back orders: {state['held']}")
        if state["ledger_copy"] and state["ledger_copy"]["error"]:
            copied = state["ledger_copy"]
            newest = copied["version"] or "none"
            say(
                f"{state['run']}: the ledger was not copied to storage for checkpoint {copied['failed']} "
                f"({copied['error']}); the newest copy is {newest}"
            )
        if state["parked"]:
            say(f"{state['run']} has {state['parked']} parked tasks: headrace status {state['run']} --parked")
        if state["checkpoints_left_out"]:
            names = ", ".join(state["checkpoints_left_out"])
            say(f"{state['run']} has damaged checkpoints: {names}; remove them once you have inspected them")
    # Engines end with their run, so their last state is of no interest afterwards.
    ended = states[0]["state"] in (RunState.FINISHED, RunState.DRAINED) if states else False
    if run_dir is not None and not ended and (engines := read_roster(found[0][1].engines).engines):
        show(engine_table(engines))


def _show_engines(cluster: ClusterOptions, run: Path, json: Path | None) -> None:
    """Show the engines of a run: state, version, load (running+waiting), URL, and why one is not serving."""
    from headrace.actors.engines.members_file import read_roster
    from headrace.actors.run.launch import reopen

    if cluster:
        engines, known = cluster.call_on(RunsApi.engines, run), {}
    else:
        roster = read_roster(reopen(run)[1].engines)
        engines, known = roster.engines, {"time_s": roster.time_s}
    if not write_json(known | {"engines": engines}, json):
        show(engine_table(engines))


def _show_running(run: Path, json: Path | None) -> None:
    """Show in which part each rollout is that has not ended, and for how long; of a killed run, the last known part."""
    from headrace.actors.record.files.run_directory import RunDirectory
    from headrace.actors.telemetry.slow.in_flight import in_flight

    directory = RunDirectory.at(run)
    rows = in_flight(directory, driven=directory.is_driven())
    if write_json([row.to_json() for row in rows], json):
        return
    for line in [row.line() for row in rows] or ["no rollout is running or was interrupted"]:
        typer.echo(line)


def _show_parked(run: Path, json: Path | None) -> None:
    from headrace.actors.run.launch import reopen
    from headrace.buffer.audit.condition import read_condition

    found = read_condition(reopen(run)[1].path).parked
    if write_json(found, json):
        return
    if not found:
        say("no task is parked")
        return
    table = Table("task", "parked", "hosts", "last failure", box=None)
    for task in found:
        table.add_row(task.task_id, utc(task.parked_at_s), ", ".join(task.hosts) or "-", task.last_failure)
    show(table)


def _show_nodes(cluster: ClusterOptions, json: Path | None) -> None:
    """Show the nodes of a cluster: role, free disk and memory as the node's agent reports them, and the runs with
    actors there."""
    nodes = cluster.call(RunsApi.nodes)
    if write_json(nodes, json):
        return
    table = Table("address", "role", "cpus", "gpus", "free disk", "free memory", "runs", "node", box=None)
    for node in nodes:
        free = (_mebibytes(node.free_disk_bytes), _mebibytes(node.free_memory_bytes))
        runs = " ".join(node.runs) or "-"
        table.add_row(node.address, node.role or "-", f"{node.cpus:g}", f"{node.gpus:g}", *free, runs, node.node)
    show(table)


def _mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count >> 20} MiB"
