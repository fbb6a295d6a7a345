"""The `headrace` command line: one line per expected error, `--verbose` for its traceback, documented exit codes."""

from __future__ import annotations

import sys
import traceback
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from headrace.actors.cli.cluster import node_app, stop
from headrace.actors.cli.cluster_access import ClusterOptions, access_for
from headrace.actors.cli.data import data_app
from headrace.actors.cli.image import ImageFolder, check_image, image_app
from headrace.actors.cli.init import init
from headrace.actors.cli.ledger import repair, unpark
from headrace.actors.cli.logs import logs
from headrace.actors.cli.output import (
    Host,
    Json,
    KeyFile,
    Port,
    Quiet,
    Steadily,
    addressed,
    console,
    result_console,
    say,
    show,
    with_records,
    write_json,
)
from headrace.actors.cli.remote_runs import recover_run, show_change, submit_run
from headrace.actors.cli.run_engines import add_engine, remove_engine
from headrace.actors.cli.serve import serve_app
from headrace.actors.cli.simulation import check, simulate, tune
from headrace.actors.cli.status import status
from headrace.actors.cli.trace import trace_app
from headrace.actors.cluster.runs.contract import RunsApi
from headrace.actors.record.files.disk_space import lacks_space
from headrace.actors.run import exit_codes
from headrace.actors.run.exit_codes import EXIT_BAD_INPUT, EXIT_DIRTY, EXIT_DRAINED, EXIT_FAILED
from headrace.actors.run.restarts import RestartLoop, RestartPolicy, saved_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.actors.derivation.rules import Derived
    from headrace.actors.record.files.run_directory import RunDirectory
    from headrace.actors.run.config import RunConfig
    from headrace.actors.run.summary import RunSummary

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, epilog=exit_codes.HELP)
ledger_app = typer.Typer(no_args_is_help=True, help="Check, repair and export the ledger of a run.")
engine_app = typer.Typer(no_args_is_help=True, help="Add engines to a live run, and remove them.")
app.add_typer(ledger_app, name="ledger")
app.add_typer(data_app, name="data")
app.add_typer(engine_app, name="engine")
app.add_typer(image_app, name="image")
app.add_typer(serve_app, name="serve")
app.add_typer(node_app, name="node")
app.add_typer(trace_app, name="trace")

Restarts = Annotated[
    int,
    typer.Option(
        min=0, metavar="N", help="Resume up to N times after transient failures (exit code 75, or death by a signal)."
    ),
]


class RunEnded(Exception):
    """A run failed after it had started."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@contextmanager
def ending_a_run() -> Iterator[None]:
    """Convert errors raised in the block to failures of a started run. Raises RunEnded."""
    try:
        yield
    except Exception as error:
        raise RunEnded(error) from error


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


@app.callback()
def root(
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show tracebacks of errors; accepted at any position.")
    ] = False,
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Asynchronous rollout service for reinforcement learning of LLM agents."""


@app.command()
@with_records
def run(
    recipe: Annotated[Path, typer.Argument(help="TOML file; `headrace init` writes one.")],
    cluster: ClusterOptions,
    name: Annotated[str, typer.Option(help="Name of the run; by default the recipe's name and a number.")] = "",
    runs_dir: Annotated[Path, typer.Option(help="Folder for run directories.")] = Path("runs"),
    seed: Annotated[int | None, typer.Option(min=0, help="Random seed; same as --set service.seed=N.")] = None,
    sandbox: Annotated[
        str | None, typer.Option(help="Same as --set sandbox.provider=NAME (local, remote, e2b, simulated).")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key of the recipe (table.key=value); may be repeated.")
    ] = None,
    on: Annotated[
        list[Path] | None,
        typer.Option("--on", metavar="FILE", help="Machine file, merged over the recipe; may be repeated."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the resolved run, and start nothing.")
    ] = False,
    json: Json = None,
    quiet: Quiet = False,
    restarts: Restarts = 0,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once the run is submitted to the cluster; it goes on there.")
    ] = False,
    quotas: Annotated[
        Path | None,
        typer.Option(help="Quotas and grants, set by a cluster's first run (guide 'Control API of a cluster')."),
    ] = None,
) -> None:
    """Train a policy: start all parts, run the rollouts and the learner, evaluate, and write the run directory. With
    `--address`, `--url` or `cluster.address` in the recipe, the run is submitted to a cluster and needs no process
    here: an interrupt ends only this command."""
    from headrace.actors.record.files.run_directory import free_folder
    from headrace.actors.run.launch import RunRequest, drive, prepare

    settings = list(overrides or ())
    if seed is not None:
        settings.append(f"service.seed={seed}")
    if sandbox is not None:
        settings.append(f"sandbox.provider={sandbox}")
    if cluster and cluster.address is not None:
        settings.append(f"cluster.address={cluster.address}")
    if dry_run:
        show_dry_run(recipe, on or (), settings, json=json)
        return
    if (access := access_for(recipe, settings, cluster, quotas, on or ())) is not None:
        raise typer.Exit(
            submit_run(access, recipe, name=name, overrides=settings, on=on or (), detach=detach, json=json)
        )
    chosen = name or free_folder(runs_dir, recipe.stem).name
    request = RunRequest(recipe=recipe, runs_dir=runs_dir, name=chosen, overrides=settings, on=on or ())
    derived: list[Derived] = []
    config, directory = prepare(request, derived.extend)
    say(f"run {directory.path}")
    if not quiet:
        say(*(one.line for one in derived))
    if restarts:
        raise typer.Exit(resume_with_restarts(config, directory, restarts, json=json, quiet=quiet))
    with ending_a_run():
        summary = drive(config, directory, quiet=quiet)
    _report(summary, json)


def resume_with_restarts(
    config: RunConfig,
    directory: RunDirectory,
    restarts: int,
    *,
    json: Path | None,
    quiet: bool,
    once: Sequence[str] = (),
) -> int:
    """Resume a run with up to `restarts` restarts and return the exit code. Only the first attempt is given the options
    in `once`."""
    command = [sys.executable, "-c", "from headrace.actors.cli.app import main; main()", "resume", str(directory.path)]
    if json is not None:
        command += ["--json", str(json)]
    if quiet:
        command.append("--quiet")
    full = partial(lacks_space, directory, config.service.min_free_bytes)
    loop = RestartLoop(RestartPolicy(restarts), say, partial(saved_step, directory), full)
    return loop.run([*command, *once], command)


def show_dry_run(recipe: Path, on: Sequence[Path], overrides: Sequence[str], *, json: Path | None) -> None:
    """Check a recipe and print every key of the run that no default sets. With `json`, write all keys. Raises
    ConfigError."""
    from headrace.actors.run.launch import dry_run
    from headrace.actors.run.overlays import DEFAULT, described

    checked = dry_run(recipe, on, overrides)
    keys = list(described(checked.config, checked.origins))
    table = Table(box=None, pad_edge=False)
    for column in ("key", "value", "set by"):
        table.add_column(column, overflow="fold")
    for key, value, origin in keys:
        if origin != DEFAULT:
            table.add_row(key, repr(value), origin)
    show(table, result_console())
    train, held_out = checked.tasks
    say(f"{len(keys)} keys, {train} training tasks, {held_out} held-out tasks: the recipe is valid")
    for deviation in getattr(checked.config.learner, "deviations", ()):
        say(f"learner: {deviation}")
    for reason in checked.absent:
        say(f"not on this machine: {reason}")
    document = {
        "keys": {key: {"value": value, "set_by": origin} for key, value, origin in keys},
        "tasks": {"train": train, "heldout": held_out},
        "not_on_this_machine": checked.absent,
    }
    write_json(document, json)


@app.command()
@with_records
def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run, or its id on a cluster.")],
    cluster: ClusterOptions,
    json: Json = None,
    quiet: Quiet = False,
    restarts: Restarts = 0,
    retry_batch: Annotated[
        bool,
        typer.Option("--retry-batch", help="Retry a batch that stopped the learner; use this once the cause is fixed."),
    ] = False,
    from_start: Annotated[
        bool,
        typer.Option(
            "--from-start", help="Discard all steps and checkpoints, and train again from the initial policy."
        ),
    ] = False,
    from_storage: Annotated[
        bool,
        typer.Option(
            "--from-storage",
            help="With --address: continue a run whose control node has lost its disk, from its storage.",
        ),
    ] = False,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a key that does not define the run (table.key=value); may be repeated."),
    ] = None,
) -> None:
    """Resume a run from its last checkpoint and its ledger, after reporting what is kept, restarted and lost."""
    from headrace.actors.run.launch import change, drive, reopen
    from headrace.actors.run.resume import ResumePreparation

    if from_storage:
        recover_run(cluster, str(run_dir), json=json)
        return
    if cluster:
        show_change(cluster.call_on(RunsApi.resume, run_dir, tuple(changes or ())), json)
        return
    if changes:
        change(run_dir, changes)
    config, directory = reopen(run_dir)
    resuming = ResumePreparation(config, directory, say=say, from_start=from_start, retry_batch=retry_batch)
    if restarts:
        once = ["--from-start"] * from_start + ["--retry-batch"] * retry_batch
        raise typer.Exit(resume_with_restarts(config, directory, restarts, json=json, quiet=quiet, once=once))
    with ending_a_run():
        summary = drive(config, directory, quiet=quiet, before=resuming.prepare)
    _report(summary, json, resume=resuming.report)


@app.command("eval")
def evaluate(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE|RUN", help="Recipe (evaluates its model) or run directory (evaluates a checkpoint)."
        ),
    ],
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help='Checkpoint of the run, e.g. 1.30, or "best"; by default the newest.'),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Answers per task; by default evaluation.samples.")] = None,
    tasks: Annotated[Path | None, typer.Option(help="JSONL file of tasks; by default the held-out tasks.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Evaluate only the first N tasks.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Output folder; resumes an interrupted evaluation of the same request.")
    ] = None,
    runs_dir: Annotated[Path, typer.Option(help="Parent of the default output folder of a recipe.")] = Path("runs"),
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a key (table.key=value); for a run, only keys of evaluation.sampling."),
    ] = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Evaluate a policy on held-out tasks without training, and store a record of every answer (guide 'Evaluation')."""
    from headrace.actors.cli.held_out.command import EvalRequest, drive_evaluation, prepare_evaluation
    from headrace.actors.rollouts.summary import summary_document, summary_lines

    evaluation = prepare_evaluation(
        EvalRequest(
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
    summary = drive_evaluation(evaluation, quiet=quiet)
    write_json(summary_document(summary, evaluation.about) | {"out": str(evaluation.out)}, json)
    say(*summary_lines(summary))
    say(f"see {evaluation.out}")
    if summary.success is None:
        raise typer.Exit(EXIT_FAILED)


@app.command()
@with_records
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run, or its id on a cluster.")],
    cluster: ClusterOptions,
    json: Json = None,
) -> None:
    """Report the scheduling of a run: staleness, outcomes by rollout duration, saturated stations, parked tasks."""
    from headrace.actors.run.launch import reopen
    from headrace.actors.run.report import report_of
    from headrace.actors.telemetry.slow.reading import read_times
    from headrace.actors.telemetry.slow.terminal_text import CAUSES, printable
    from headrace.actors.telemetry.slow.verdicts import explain

    if cluster:
        write_json(cluster.call_on(RunsApi.report, run_dir), json or Path("-"))
        return
    directory = reopen(run_dir)[1]
    told, causes = report_of(directory), explain(read_times(directory.path)).causes[:CAUSES]
    if write_json(told.to_json() | {"slowness": causes}, json):
        return
    show(told.tables())
    for cause in causes:
        typer.echo(f"slow rollouts: {printable(cause.line())}")


@app.command()
def doctor(
    image: Annotated[
        str,
        typer.Option(help="Boot this named image, run commands as root and user, measure; exit code 3 if any fails."),
    ] = "",
    image_folder: ImageFolder = None,
    json: Json = None,
) -> None:
    """Show what this machine can run (sizes of models, sandboxes, providers), and which guarantees sandboxes have on
    it; or check one of its images."""
    from headrace.actors.derivation.capacity import capacity
    from headrace.actors.derivation.host import this_host
    from headrace.actors.runtime.actors.runtime import check_ray_folder
    from headrace.sandboxes.doctor import probe
    from headrace.sandboxes.errors import WITHOUT_NAMESPACES

    if image:
        check_image(image, image_folder, json)
        return
    check_ray_folder()
    guarantees = probe()
    missing = any(guarantee.required and not guarantee.present for guarantee in guarantees)
    runs = capacity(this_host(), has_namespaces=not missing)
    rows = [{"name": g.name, "present": g.present, "detail": g.detail} for g in guarantees]
    if write_json({"can_run": runs, "guarantees": rows}, json):
        return
    table = Table("this machine can run", "", box=None)
    for what, how_much in runs.items():
        table.add_row(what, how_much)
    show(table, result_console())
    table = Table("guarantee", "", "detail", box=None)
    for guarantee in guarantees:
        table.add_row(guarantee.name, "[green]yes[/]" if guarantee.present else "[yellow]no[/]", guarantee.detail)
    show(table, result_console(), markup=True)
    if missing:
        say(f"local sandboxes do not start on this machine: {WITHOUT_NAMESPACES}")


for command in (init, status, stop, logs, check, simulate, tune):
    app.command()(command)


@ledger_app.command()
def verify(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")], json: Json = None
) -> None:
    """Check that every rollout of a run is accounted for, that the staleness bound holds and that the hash chain is
    intact; exit code 3 if any check fails."""
    from headrace.actors.run.launch import reopen
    from headrace.buffer.audit.verify import verify as verify_ledger

    report = verify_ledger(reopen(run_dir)[1].path, Steadily("groups checked"))
    document = asdict(report) | {"clean": report.clean}
    if not write_json(document, json):
        for key, value in document.items():
            console().print(f"{key:>22}  {value}", highlight=False)
    if not report.clean:
        raise typer.Exit(EXIT_DIRTY)


@ledger_app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")],
    out: Annotated[Path, typer.Option(help="Folder to create, with one Parquet file per table.")],
    json: Json = None,
) -> None:
    """Export the ledger and its trajectories as Parquet files; also works while the run is live."""
    from headrace.actors.run.launch import reopen
    from headrace.buffer.audit.export import export as export_ledger

    report = export_ledger(reopen(run_dir)[1].path, out)
    if write_json(report, json):
        return
    for name, rows in report.rows.items():
        console().print(f"{name:>14}  {rows} rows", highlight=False)
    if report.unreadable:
        console().print(f"[yellow]{report.unreadable} trajectories could not be read[/]; see `headrace ledger verify`")


ledger_app.command()(repair)
ledger_app.command()(unpark)
engine_app.command("add")(add_engine)
engine_app.command("remove")(remove_engine)


@app.command()
def observe(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")],
    host: Host = "127.0.0.1",
    port: Port = 0,
    key_file: KeyFile = None,
    json: Json = None,
) -> None:
    """Serve the page of a run: what it does, which rollouts were slow and why, each rollout with its text. It reads the
    run directory only, so the run may be going on, over, killed, or a copy. Prints the URL with the token that the page
    needs (without it if --key-file has one); stops on SIGTERM or SIGINT."""
    import asyncio

    from headrace.actors.telemetry.page.server import ObserveOptions
    from headrace.actors.telemetry.page.server import observe as serve_page

    address_file, announce = addressed(json)
    options = ObserveOptions(host=host, port=port, key_file=key_file, address_file=address_file)
    asyncio.run(serve_page(run_dir, options, announce))


_EXTRAS = {"serve gateway": "gateway", "serve sandbox": "sandbox", "image": "sandbox"}
"""Extras of this package that a command needs; others need `run`."""
_LEARNER = frozenset(("torch", "megatron", "einops", "matplotlib"))
_SERVICES = ("ray", "fastapi", "safetensors", "bm25s", "starlette", "tokenizers", "jinja2", "e2b_dockerfile_utils")
_OPTIONAL = frozenset((*_SERVICES, *_LEARNER))


def main() -> None:
    """Run the command line; an expected error prints one line."""
    from headrace.actors.cli.output import EXPECTED

    verbose = "--verbose" in sys.argv[1:]
    try:
        # Outside standalone mode typer returns the code of a `typer.Exit` instead of exiting.
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
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in _OPTIONAL:
            raise
        words = [word for word in sys.argv[1:] if not word.startswith("-")]
        extra = _EXTRAS.get(" ".join(words[: 2 if words[:1] == ["serve"] else 1]))
        extra = extra or ("run,cpu" if module in _LEARNER else "run")
        say(f"headrace: this command needs the module {module}: pip install 'headrace[{extra}]'")
        sys.exit(EXIT_BAD_INPUT)
    except RunEnded as end:
        _say_error(end.cause, verbose=verbose or not isinstance(end.cause, EXPECTED))
        sys.exit(exit_codes.exit_code_of_run(end.cause))
    except EXPECTED as error:
        _say_error(error, verbose=verbose)
        sys.exit(exit_codes.exit_code(error))


def _say_error(error: Exception, *, verbose: bool) -> None:
    """Print an error in one line, after its traceback if `verbose`."""
    if verbose:
        traceback.print_exception(error)
    console().print(f"headrace: {error}", style="red", highlight=False, soft_wrap=True, markup=False)


def _report(summary: RunSummary, json: Path | None, **more: object) -> None:
    write_json(summary.to_json() | more, json)
    say(*summary.lines())
    if not summary.completed:
        raise typer.Exit(EXIT_DRAINED)
