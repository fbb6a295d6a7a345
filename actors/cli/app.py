"""The command line: one line per expected error, `--verbose` for its traceback, documented exit codes."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer
from rich.table import Table

from headrace.actors.cli.check import check
from headrace.actors.cli.data import data_app
from headrace.actors.cli.engine import serve
from headrace.actors.cli.ledger import drop_batch, retry_lost
from headrace.actors.cli.output import (
    EXIT_BAD_INPUT,
    EXIT_DIRTY,
    EXIT_DRAINED,
    EXIT_FAILED,
    Json,
    Quiet,
    Steadily,
    console,
    result_console,
    say,
    show,
    write_json,
)
from headrace.actors.cli.restarts import Restarts, RunEnded, ending_a_run, resume_again_and_again
from headrace.actors.cli.run_engines import add_engine, engine_table, list_engines, remove_engine
from headrace.actors.cli.simulation import simulate, tune
from headrace.actors.cli.tasks import tasks_app
from headrace.actors.run import exit_codes

if TYPE_CHECKING:
    from headrace.actors.run.summary import RunSummary

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, epilog=exit_codes.HELP)
ledger_app = typer.Typer(no_args_is_help=True, help="Check, repair and export the ledger of a run.")
engine_app = typer.Typer(no_args_is_help=True, help="Inference engines.")
sandbox_app = typer.Typer(no_args_is_help=True, help="Sandboxes for other programs.")
app.add_typer(ledger_app, name="ledger")
app.add_typer(tasks_app, name="tasks")
app.add_typer(data_app, name="data")
app.add_typer(engine_app, name="engine")
app.add_typer(sandbox_app, name="sandbox")


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


@app.callback()
def root(
    verbose: Annotated[bool, typer.Option("--verbose", help="Show tracebacks of errors; may stand anywhere.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Asynchronous rollout service for reinforcement learning of LLM agents."""


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="TOML file, e.g. scripts/recipes/quickstart.toml.")],
    name: Annotated[str, typer.Option(help="Name of the run; recipe and number when empty.")] = "",
    runs_dir: Annotated[Path, typer.Option(help="Where run directories are made.")] = Path("runs"),
    seed: Annotated[int | None, typer.Option(min=0, help="Same as --set service.seed=N.")] = None,
    sandbox: Annotated[
        str | None, typer.Option(help="Same as --set sandbox.provider=NAME (local, subprocess).")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="table.key=value, may be repeated.")] = None,
    json: Json = None,
    quiet: Quiet = False,
    restarts: Restarts = 0,
) -> None:
    """Train: boot everything, run rollouts and learner, evaluate, write the run directory."""
    from headrace.actors.record.run_directory import free_folder
    from headrace.actors.run.launch import RunRequest, drive, prepare

    settings = list(overrides or ())
    if seed is not None:
        settings.append(f"service.seed={seed}")
    if sandbox is not None:
        settings.append(f"sandbox.provider={sandbox}")
    chosen = name or free_folder(runs_dir, recipe.stem).name
    config, directory = prepare(RunRequest(recipe=recipe, runs_dir=runs_dir, name=chosen, overrides=settings))
    _say_unprotected(config.sandbox.provider)
    say(f"run {directory.path}")
    if restarts:
        raise typer.Exit(resume_again_and_again(directory, restarts, json=json, quiet=quiet))
    with ending_a_run():
        summary = drive(config, directory, quiet=quiet)
    _report(summary, json)


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")],
    json: Json = None,
    quiet: Quiet = False,
    restarts: Restarts = 0,
    retry_batch: Annotated[
        bool, typer.Option("--retry-batch", help="Try a batch again that ended the learner, once the cause is removed.")
    ] = False,
    from_start: Annotated[
        bool,
        typer.Option("--from-start", help="Undo all steps and train from the start policy again, without checkpoints."),
    ] = False,
) -> None:
    """Continue a run from its last checkpoint and its ledger, after saying what is kept, restarted and lost."""
    from headrace.actors.run.launch import drive, reopen
    from headrace.actors.run.resume import Resuming

    config, directory = reopen(run_dir)
    resuming = Resuming(config, directory, say=say, from_start=from_start, retry_batch=retry_batch)
    if restarts:
        once = ["--from-start"] * from_start + ["--retry-batch"] * retry_batch
        raise typer.Exit(resume_again_and_again(directory, restarts, json=json, quiet=quiet, once=once))
    with ending_a_run():
        summary = drive(config, directory, quiet=quiet, before=resuming.tell)
    _report(summary, json, resume=resuming.told)


@app.command("eval")
def evaluate(
    source: Annotated[Path, typer.Argument(metavar="RECIPE|RUN", help="A recipe's model, or a run's checkpoint.")],
    checkpoint: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Of a run, e.g. 1.30; the newest when left out.")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Answers per task; evaluation.samples by default.")] = None,
    tasks: Annotated[Path | None, typer.Option(help="JSONL of tasks; the held-out ones when left out.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many tasks.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Output folder; goes on with an interrupted evaluation of the same request.")
    ] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where the output folder of a recipe is made.")] = Path("runs"),
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="table.key=value of a recipe; of a run, only evaluation.sampling.")
    ] = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Evaluate a policy on held-out tasks without training; keeps what every answer left (docs/evaluation.md)."""
    from headrace.actors.held_out.command import Asked, drive_evaluation, prepare_evaluation

    evaluation = prepare_evaluation(
        Asked(
            source=source,
            checkpoint=checkpoint,
            samples=samples,
            tasks=tasks,
            limit=limit,
            out=out,
            runs_dir=runs_dir,
            overrides=tuple(overrides or ()),
        )
    )
    _say_unprotected(evaluation.config.sandbox.provider)
    summary = drive_evaluation(evaluation, quiet=quiet)
    if json is not None:
        write_json(summary.to_json(evaluation.about) | {"out": str(evaluation.out)}, json)
    say(*summary.lines())
    say(f"see {evaluation.out}")
    if summary.success is None:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def status(
    run_dir: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="A run; all runs when left out.")] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where runs are looked for.")] = Path("runs"),
    json: Json = None,
) -> None:
    """Tell what run directories say; touches no process."""
    from headrace.actors.engine_group.members_file import read_roster
    from headrace.actors.errors import RunMissing
    from headrace.actors.run.launch import reopen
    from headrace.actors.run.run_status import RunState, status_of

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
    if json is not None:
        write_json(states if run_dir is None else states[0], json)
        return
    table = Table("run", "state", "version", "reward", "held-out", box=None)
    for state in states:
        held_out = "  ".join(f"{tag} {success:.0%}" for tag, success in state["held_out"].items())
        reward = "-" if state["reward"] is None else f"{state['reward']:.2f}"
        stands = f"{state['steps']} of {state['total_steps']}, {state['state']}"
        table.add_row(state["run"], stands, state["version"] or "-", reward, held_out or "-")
    show(table)
    for state in states:
        if state["held"]:
            say(f"{state['run']} holds its orders: {state['held']}")
        if state["parked"]:
            say(f"{state['run']} has {state['parked']} parked tasks: headrace tasks parked {state['run']}")
        if state["checkpoints_left_out"]:
            names = ", ".join(state["checkpoints_left_out"])
            say(f"{state['run']} has damaged checkpoints: {names}; remove them once you have looked at them")
    # Engines end with their run: how they were then is no news.
    ended = states[0]["state"] in (RunState.FINISHED, RunState.DRAINED) if states else False
    if run_dir is not None and not ended and (engines := read_roster(found[0][1].engines).engines):
        show(engine_table(engines))


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")], json: Json = None
) -> None:
    """Tell what the scheduling did: staleness, what became of short and long rollouts, full stations, parked tasks."""
    from headrace.actors.run.launch import reopen
    from headrace.actors.run.report import report_of

    told = report_of(reopen(run_dir)[1])
    if json is not None:
        write_json(told.to_json(), json)
    else:
        show(told.tables())


@app.command()
def doctor(json: Json = None) -> None:
    """Tell which sandbox guarantees this machine gives, and which are missing."""
    from headrace.actors.runtime.runtime import check_ray_folder
    from headrace.sandboxes.doctor import probe

    check_ray_folder()
    guarantees = probe()
    if json is not None:
        write_json([{"name": g.name, "present": g.present, "detail": g.detail} for g in guarantees], json)
        return
    table = Table("guarantee", "", "detail", box=None)
    for guarantee in guarantees:
        table.add_row(guarantee.name, "[green]yes[/]" if guarantee.present else "[yellow]no[/]", guarantee.detail)
    show(table, result_console(), markup=True)


app.command()(check)
app.command()(simulate)
app.command()(tune)


@ledger_app.command()
def verify(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")], json: Json = None
) -> None:
    """Recompute conservation, staleness and the hash chain of a run; exit code 3 when something does not add up."""
    from headrace.actors.run.launch import reopen
    from headrace.buffer.audit.verify import verify as verify_ledger

    report = verify_ledger(reopen(run_dir)[1].path, Steadily("groups checked"))
    document = asdict(report) | {"clean": report.clean}
    if json is not None:
        write_json(document, json)
    else:
        for key, value in document.items():
            console().print(f"{key:>22}  {value}", highlight=False)
    if not report.clean:
        raise typer.Exit(EXIT_DIRTY)


@ledger_app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")],
    out: Annotated[Path, typer.Option(help="Folder to make, one Parquet file a table.")],
    json: Json = None,
) -> None:
    """Write the ledger and its trajectories as Parquet files; the run may go on meanwhile."""
    from headrace.actors.run.launch import reopen
    from headrace.buffer.audit.export import export as export_ledger

    report = export_ledger(reopen(run_dir)[1].path, out)
    if json is not None:
        write_json(asdict(report), json)
        return
    for name, rows in report.rows.items():
        console().print(f"{name:>14}  {rows} rows", highlight=False)
    if report.unreadable:
        console().print(f"[yellow]{report.unreadable} trajectories could not be read[/]; see `headrace ledger verify`")


ledger_app.command("drop-batch")(drop_batch)
ledger_app.command("retry-lost")(retry_lost)
engine_app.command()(serve)
engine_app.command("list")(list_engines)
engine_app.command("add")(add_engine)
engine_app.command("remove")(remove_engine)


@app.command("gateway")
def serve_gateway(
    engine: Annotated[str, typer.Option(help="Base URLs of SGLang servers, with commas between.")],
    tokenizer: Annotated[Path, typer.Option(help="Directory with the policy's tokenizer.json and chat template.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes a free port.")] = 0,
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    admin_token_file: Annotated[Path, typer.Option(help="Holds the admin token; made when it is missing.")] = Path(
        "gateway-admin-token"
    ),
    advertise_url: Annotated[
        str | None, typer.Option(help="Base of the URLs handed to agents that are not on this host.")
    ] = None,
    state: Annotated[Path | None, typer.Option(help="Folder of the session logs; in memory when left out.")] = None,
    parser: Annotated[
        str, typer.Option(help="How calls are read: auto, hermes, qwen3_coder, none, sglang:NAME.")
    ] = "auto",
    max_context_tokens: Annotated[
        int | None, typer.Option(min=1, help="What a session may have; by default what the engines take.")
    ] = None,
    json: Json = None,
) -> None:
    """Stand before engines as a token-exact proxy: Anthropic Messages, OpenAI Chat Completions and Responses for
    agents; what was sampled, token for token, for you. POST /sessions opens, POST /sessions/ID/finish tells."""
    from headrace.serve.gateway.standalone import StandaloneOptions, serve_gateway

    options = StandaloneOptions(
        engine_urls=tuple(url.strip().rstrip("/") for url in engine.split(",") if url.strip()),
        tokenizer_dir=tokenizer,
        admin_token_file=admin_token_file,
        host=host,
        port=port,
        advertise_url=advertise_url,
        state=state,
        parser=parser,
        max_context_tokens=max_context_tokens,
    )
    serve_gateway(options, lambda url: _announce(url, json))


@sandbox_app.command("serve")
def serve_sandboxes(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes a free port.")] = 0,
    host: Annotated[str, typer.Option(help="Address to bind; anything but loopback needs --keys.")] = "127.0.0.1",
    image_map: Annotated[Path | None, typer.Option(help="TOML or JSON file: template name = image reference.")] = None,
    metadata_image_key: Annotated[str, typer.Option(help="Metadata key that names the image of a create.")] = "",
    keys: Annotated[Path | None, typer.Option(help="File of API keys, lines `name:key[:max_sandboxes]`.")] = None,
    state: Annotated[Path | None, typer.Option(help="Folder of the sandbox table; in memory when left out.")] = None,
    keep_sandboxes: Annotated[
        bool, typer.Option("--keep-sandboxes", help="Leave them at the end, for the next server of the same --state.")
    ] = False,
    provider: Annotated[str, typer.Option(help="Where sandboxes run: local.")] = "local",
    api: Annotated[str, typer.Option(help="What to serve, with commas: e2b, exec, dropin.")] = "e2b,exec,dropin",
    lease_s: Annotated[float, typer.Option(help="Seconds that a drop-in container lives unheard of.")] = 900,
    host_url: Annotated[
        list[str] | None, typer.Option(help="Lend the sandboxes of this exec server instead; may be repeated.")
    ] = None,
    host_key: Annotated[Path | None, typer.Option(help="File that holds the key of those servers.")] = None,
    json: Json = None,
) -> None:
    """Lend sandboxes: E2B's API (E2B_API_URL and E2B_SANDBOX_URL are the printed URL), ours for the provider `remote`,
    and a drop-in for swe_exec_server and swe_env_pool_server."""
    from headrace.actors.evaluation.foreign_patch import apply_patch
    from headrace.serve.exec.server import ServeOptions, serve

    options = ServeOptions(
        host=host,
        port=port,
        provider=provider,
        image_map=image_map,
        metadata_image_key=metadata_image_key,
        keys=keys,
        state=state,
        keep_sandboxes=keep_sandboxes,
        apis=api,
        lease_s=lease_s,
        host_urls=tuple(host_url or ()),
        host_key=host_key,
        apply_patch=apply_patch,
    )
    serve(options, lambda url: _announce(url, json))


def main() -> None:
    """Entry point: one line per expected error."""
    from headrace.actors.cli.expected import EXPECTED

    verbose = "--verbose" in sys.argv[1:]
    try:
        # Without its own handling of errors, typer returns the code of a `typer.Exit`.
        sys.exit(app([part for part in sys.argv[1:] if part != "--verbose"], standalone_mode=False))
    except typer.Abort:
        sys.exit(EXIT_FAILED)
    except typer.TyperException as error:
        console().print(
            f"headrace: {error.format_message()}", style="red", highlight=False, soft_wrap=True, markup=False
        )
        sys.exit(EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(130)
    except RunEnded as end:
        _say_error(end.cause, verbose=verbose or not isinstance(end.cause, EXPECTED))
        sys.exit(exit_codes.exit_code_of_run(end.cause))
    except EXPECTED as error:
        _say_error(error, verbose=verbose)
        sys.exit(exit_codes.exit_code(error))


def _say_error(error: Exception, *, verbose: bool) -> None:
    """One line; with its traceback when that is asked for, or when nobody expected the error."""
    if verbose:
        traceback.print_exception(error)
    console().print(f"headrace: {error}", style="red", highlight=False, soft_wrap=True, markup=False)


def _announce(url: str, json: Path | None) -> None:
    """Say where a server listens, in one line."""
    started = {"url": url, "pid": os.getpid()}
    if json is None or str(json) == "-":
        typer.echo(url if json is None else orjson.dumps(started).decode())
    else:
        write_json(started, json)


def _report(summary: RunSummary, json: Path | None, **more: object) -> None:
    if json is not None:
        write_json(summary.to_json() | more, json)
    say(*summary.lines())
    if not summary.completed:
        raise typer.Exit(EXIT_DRAINED)


def _say_unprotected(provider: str) -> None:
    if provider == "subprocess":
        from headrace.sandboxes.unprotected.provider import WARNING

        console().print(WARNING, style="yellow", highlight=False)
