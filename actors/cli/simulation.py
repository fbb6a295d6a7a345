"""The commands that run in virtual time: `headrace simulate` and `headrace tune`."""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, TaskID

from headrace.actors.cli.output import Json, Quiet, console, say, show, write_json
from headrace.actors.run.exit_codes import EXIT_DIRTY


def simulate(
    preset: Annotated[str, typer.Option(help="Preset of durations and sizes: swe64.")] = "swe64",
    slots: Annotated[int | None, typer.Option(help="Maximum number of rollouts in flight.")] = None,
    max_staleness: Annotated[int | None, typer.Option(help="Hard staleness bound, in optimizer updates.")] = None,
    accept: Annotated[str | None, typer.Option(metavar="RULE", help="Acceptance rule of a group.")] = None,
    mode: Annotated[str | None, typer.Option(help="Training mode: sync, one-step-off or async.")] = None,
    push: Annotated[str | None, typer.Option(help="Push mode: overlap, pause or drain.")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Number of optimizer updates, of which up to 30 are warm-up.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed for durations, rewards and task order.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a key of the plan (key=value; guide 'Simulating a run'); repeatable."),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(help="Recipe whose batch, group, staleness bound, mode, slots and workers replace the preset's."),
    ] = None,
    on: Annotated[
        list[Path] | None,
        typer.Option("--on", metavar="FILE", help="Machine file, merged over the recipe; may be repeated."),
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Folder to create for the ledger.")] = None,
    faults: Annotated[
        int | None,
        typer.Option(
            metavar="SEED", help="Instead, simulate a small run under the fault storm that this seed generates.", min=0
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Run the dispatcher, buffer, pool and learner loop over simulated engines in virtual time; exit code 3 if the
    ledger shows a violated bound or a lost rollout."""
    from headrace.actors.errors import ConfigError
    from headrace.actors.simulation.virtual.plan import make_plan, plan_keys, told
    from headrace.actors.simulation.virtual.simulate import simulate as simulate_plan

    if faults is not None:
        show_storm(faults, json=json)
        return
    changes = {"slots": slots, "max_staleness": max_staleness, "rule": accept, "mode": mode, "push": push}
    if on and recipe is None:
        raise ConfigError("--on: machine files are merged over a recipe; name one with --recipe")
    given = {} if recipe is None else plan_keys(recipe, on or ())
    given |= {key: value for key, value in changes.items() if value is not None}
    plan = make_plan(preset, given | {"steps": steps, "seed": seed}, overrides or ())
    if recipe is not None:
        say(*told(recipe, preset, plan))
    simulated = simulate_plan(plan, keep)
    if not write_json(simulated.to_json(), json):
        say(*simulated.lines())
    if not simulated.clean:
        raise typer.Exit(EXIT_DIRTY)


def show_storm(seed: int, *, json: Path | None) -> None:
    """Simulate a small run under a fault storm; exit code 3 for problems."""
    from headrace.actors.simulation.virtual.faults import simulate_faults

    if "--verbose" not in sys.argv:
        # The actors log every injected fault, a full disk even with tracebacks.
        logging.disable()
    storm = simulate_faults(seed)
    if not write_json(storm.to_json(), json):
        say(*storm.lines())
    if storm.problems:
        raise typer.Exit(EXIT_DIRTY)


def tune(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|TRACES", help="Directory of a run, or a JSONL or CSV file of durations.")
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for tuning.png, .html, .json and .toml.")] = None,
    steps: Annotated[int, typer.Option(min=8, help="Simulated steps per setting in the last round.")] = 48,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for the simulations.")] = 0,
    slots: Annotated[list[int] | None, typer.Option(min=1, help="Number of slots to try; may be repeated.")] = None,
    max_staleness: Annotated[
        list[int] | None, typer.Option(min=1, help="Staleness bound to try; may be repeated.")
    ] = None,
    accept: Annotated[
        list[str] | None, typer.Option(metavar="RULE", help="Acceptance rule to try; may be repeated.")
    ] = None,
    within: Annotated[
        float | None,
        typer.Option(
            min=0, help="Relative slowdown up to which a setting counts as equal to the fastest; by default 0.03."
        ),
    ] = None,
    processes: Annotated[int, typer.Option(min=0, help="Number of parallel simulations; 0 for one per core.")] = 0,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Set a plan key that records lack (key=value; guide 'Tuning on recorded runs')."),
    ] = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Find the best acceptance rule, staleness bound and number of slots for recorded durations by simulating in
    virtual time."""
    from headrace.actors.simulation.tuning.candidates import Space, describe
    from headrace.actors.simulation.tuning.command import TuneRequest, prepare_tuning, run_tuning
    from headrace.actors.simulation.tuning.selection import WITHIN

    space = Space(slots=tuple(slots or ()), bounds=tuple(max_staleness or ()), rules=tuple(accept or ()))
    request = TuneRequest(
        source=source,
        out=out,
        steps=steps,
        seed=seed,
        within=WITHIN if within is None else within,
        space=space,
        overrides=tuple(overrides or ()),
        processes=processes,
    )
    prepared = prepare_tuning(request)
    say(describe(prepared.candidates))
    screen = console()
    with Progress(console=screen, disable=quiet or not screen.is_terminal, transient=True) as progress:
        rounds: dict[int, TaskID] = {}

        def advance(number: int, done: int, of: int) -> None:
            if number not in rounds:
                rounds[number] = progress.add_task(f"round {number}", total=of)
            progress.update(rounds[number], completed=done)

        tuned = run_tuning(prepared, advance)
    write_json(tuned.to_json(), json)
    show(tuned.table())
    say(*tuned.lines())
    # The TOML to paste goes to standard output, unless the JSON does.
    if json is None or str(json) != "-":
        typer.echo(tuned.toml(), nl=False)


Recipe = Annotated[Path, typer.Argument(help="TOML file; `headrace init` writes one.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the records of the rollout; by default nothing is kept.")]


def check(
    recipe: Recipe,
    task: Annotated[
        str, typer.Option(metavar="ID|N", help="Id of a task, or number of a training task, counted from 1.")
    ] = "1",
    out: Out = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key of the recipe (table.key=value); may be repeated.")
    ] = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Run one rollout of one task, and print its text, the trained tokens, the verdict and the time of each phase; exit
    code 3 if it got no reward because a part of the system failed."""
    from headrace.actors.cli.held_out.check import prepare_check, read_check
    from headrace.actors.cli.held_out.command import drive_evaluation

    folder = Path(tempfile.mkdtemp(prefix="headrace-check-") if out is None else out).resolve()
    hint = "with --out FOLDER, the logs of its actors are kept"
    try:
        evaluation = prepare_check(recipe, task, overrides or (), folder)
        drive_evaluation(evaluation, quiet=quiet)
        checked = read_check(evaluation)
        if not checked.is_rated:
            out, hint = folder, ""
    finally:
        if out is None:
            shutil.rmtree(folder)
    write_json(checked.to_json(), json)
    say(*checked.lines(), f"-- {hint or f'the logs of its actors are in {evaluation.directory.logs}'}")
    if not checked.is_rated:
        raise typer.Exit(EXIT_DIRTY)
