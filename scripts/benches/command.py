"""The command `scripts/bench NAME --json`: each bench prints one JSON object on standard output, and logs to stderr."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headrace.actors.cli.output import say, write_json
from headrace.actors.run.exit_codes import EXIT_DIRTY, exit_code

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

Json = Annotated[bool, typer.Option("--json", help="Print JSON (the only format).")]
QUICKSTART = Path(__file__).resolve().parents[2] / "scripts" / "recipes" / "quickstart.toml"


@app.command()
def sandbox(json: Json = True, repeats: Annotated[int, typer.Option(min=1, help="Number of repetitions.")] = 5) -> None:
    """Measure the CPU time of creating and destroying a sandbox, the latency of an exec, boots per second by
    concurrency, clones, and idle memory (local provider, all guarantees on), and the same for bwrap and runc if they
    are installed."""
    from benches.sandbox_costs import measure
    from benches.sandbox_peers import measure_peers

    figures = asyncio.run(measure(repeats=repeats))
    _print({**figures, "peers": asyncio.run(measure_peers())})


@app.command()
def e2b(json: Json = True, creates: Annotated[int, typer.Option(min=100, help="Creates at once.")] = 1000) -> None:
    """Measure the E2B server: many creates at once with a command in each, a tenth as many, and the latency of a
    command."""
    from benches.server.e2b_costs import measure

    _print(asyncio.run(measure(burst=creates)))


@app.command()
def builds(json: Json = True, repeats: Annotated[int, typer.Option(min=1, help="Number of builds.")] = 10) -> None:
    """Measure image builds of six small layers without a cache and with one, a layer of 64 MiB, and 16 builds at
    once."""
    from benches.server.builds import measure

    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        _print(asyncio.run(measure(Path(folder), repeats)))


@app.command()
def rollout(
    json: Json = True, rollouts: Annotated[int, typer.Option(min=50, help="Number of measured rollouts.")] = 500
) -> None:
    """Measure the CPU time that all processes of a quickstart over Ray spend on one rollout, by purpose, with tracing,
    and then without."""
    from benches.rollout_costs import measure_both

    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder, redirect_stdout(sys.stderr):
        figures = measure_both(Path(folder), QUICKSTART, rollouts=rollouts)
    _print(figures)


@app.command()
def tracing(
    json: Json = True,
    pairs: Annotated[int | None, typer.Option(min=1, help="Number of alternated pairs of each part.")] = None,
    quick: Annotated[bool, typer.Option(help="Measure fewer rollouts and turns in each pair.")] = False,
    parts: Annotated[str, typer.Option(help="Comma-separated parts to measure; all by default.")] = "",
) -> None:
    """Measure what tracing costs: one span with its file; and in alternated pairs with and without, CPU of a
    short quickstart over Ray (over that of its sandboxes, so that the machine's speed cancels out), of a gateway with
    agent-sized turns; the stored bytes of a turn; and the time of simulated steps with a stopped collector beside a
    running one. Exit code 3: a figure is out of bounds."""
    from benches.tracing.figures import PARTS, measure, misses

    wanted = tuple(parts.split(",")) if parts else PARTS
    if unknown := [part for part in wanted if part not in PARTS]:
        raise typer.BadParameter(f"{unknown[0]} is not one of {', '.join(PARTS)}", param_hint="--parts")
    with redirect_stdout(sys.stderr):
        figures = measure(wanted, QUICKSTART, pairs=pairs, quick=quick)
    _print({**figures, "misses": misses(figures)})
    if misses(figures):
        raise typer.Exit(EXIT_DIRTY)


@app.command()
def orchestration(
    json: Json = True, rollouts: Annotated[int, typer.Option(min=200, help="Number of measured rollouts.")] = 2048
) -> None:
    """Measure Ray's CPU time and calls per rollout, with the real dispatcher, worker, pool, evaluator and buffer and an
    agent that returns immediately; then 1,024 rollouts of 20 simulated turns, 512 of them in flight, with a learner;
    then the memory of the whole service with 2,000 rollouts in flight."""
    from benches.load import measure_load, measure_memory
    from benches.orchestration import measure

    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        figures = measure(Path(folder), rollouts=rollouts)
        for turn_ms in (200, 20):
            figures[f"turns_of_{turn_ms}_ms"] = measure_load(Path(folder) / f"turns-{turn_ms}", turn_s=turn_ms / 1000)
        _print(figures | {"memory": measure_memory(Path(folder))})


@app.command()
def gateway(json: Json = True) -> None:
    """Measure processor time and memory of agent-sized turns, bridges compared with full re-renders, latency compared
    with a direct connection, and 2,000 simultaneous first turns."""
    from benches.gateway.figures import measure

    _print(asdict(asyncio.run(measure())))


@app.command()
def hostile(json: Json = True) -> None:
    """Measure what other sessions notice of one that sends bodies which take long to parse, to count or to render: the
    longest stall of a turn (`hostile_stall_ms`), and the memory of the gateway with its processes above its base."""
    from benches.gateway.figures import measure_hostile_session

    _print(asyncio.run(measure_hostile_session()))


@app.command()
def push(
    json: Json = True,
    parts: Annotated[str, typer.Option(help="Comma-separated parts to measure; all by default.")] = "",
) -> None:
    """Measure weight pushes into embedded engines. `bandwidth`: 1 GB and 100 MB against a plain gloo broadcast that is
    copied into parameters, with the seconds of every phase; `stall`: the time that gates are closed for a push of 1 GB
    by group and by disk with 64 turns in flight; `overlap`: throughput of the quickstart's model with a push every
    10 s, relative to that without pushes, for pushes in two waves, in one wave, and after draining. Needs 5 GB of
    memory and 1 GB in the temporary folder."""
    from benches.push.figures import PARTS, measure

    wanted = parts.split(",") if parts else list(PARTS)
    if unknown := [part for part in wanted if part not in PARTS]:
        raise typer.BadParameter(f"{unknown[0]} is not one of {', '.join(PARTS)}", param_hint="--parts")
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        _print(measure(wanted, Path(folder)))


@app.command()
def learner(
    json: Json = True, repeats: Annotated[int, typer.Option(min=1, help="Number of compared steps.")] = 8
) -> None:
    """Measure a step of the Megatron learner beside a plain PyTorch loop of the same model and batch: throughput, peak
    memory of rows and of the head, padding, and the time that a save takes. Exit code 3: a figure is out of bounds."""
    from benches.learner.figures import measure, misses

    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        figures = measure(Path(folder), repeats=repeats)
    _print({**figures, "misses": misses(figures)})
    if misses(figures):
        raise typer.Exit(EXIT_DIRTY)


@app.command()
def collapse(
    json: Json = True,
    runs: Annotated[int, typer.Option(min=1, help="Number of runs from each of the two starts.")] = 100,
    before: Annotated[int, typer.Option(min=0, help="Number of runs from each start with the earlier settings.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first run.")] = 1,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Override of the recipe.")] = None,
) -> None:
    """Emulate quickstarts in one process each, from the usual start and from one whose answers to one family are 95 %
    invalid, and count those that end below 90 %. Exit code 3: there is one with the recipe's settings."""
    from benches.learner.collapse import measure

    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        said = partial(print, file=sys.stderr)
        figures = measure(Path(folder), runs=runs, before=before, seed=seed, overrides=overrides or (), say=said)
    _print(figures)
    if figures["below_90"]:
        raise typer.Exit(EXIT_DIRTY)


@app.command()
def replay(
    json: Json = True,
    slots: Annotated[int, typer.Option(min=1, help="Maximum number of rollouts in flight.")] = 64,
    max_staleness: Annotated[int, typer.Option(min=0, help="Staleness bound, in optimizer updates.")] = 4,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer updates; the first half is a warm-up.")] = 24,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the plan.")] = 0,
    minute_s: Annotated[float, typer.Option(min=0.01, help="Real seconds per simulated minute.")] = 0.6,
    preset: Annotated[str, typer.Option(help="Preset of the plan, as for `headrace simulate`.")] = "swe64",
) -> None:
    """Run a simulated plan in scaled time with the real service over Ray, and the same plan in virtual time. Exit code
    3: the ledger shows that the bound was violated, or that a rollout was lost or trained twice."""
    from benches.scaled_replay import replay as replay_plan
    from headrace.actors.simulation.virtual.plan import make_plan

    plan = make_plan(preset, {"slots": slots, "max_staleness": max_staleness, "steps": steps, "seed": seed})
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        replayed = replay_plan(plan, Path(folder), minute_s=minute_s)
    _print(replayed.to_json())
    if replayed.problems():
        raise typer.Exit(EXIT_DIRTY)


@app.command()
def longagents(
    json: Json = True,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer updates.")] = 12,
    answers: Annotated[
        int | None, typer.Option(min=1, help="Answers per evaluation; the recipe's number by default.")
    ] = None,
) -> None:
    """Run with the clocks of claude_code.toml in scaled time (a minute becomes a second): agents that run for 10 to
    30 minutes through the real gateway, and steps of 4 minutes. Exit code 3: the run did not end, stalled, or lost a
    rollout to infrastructure."""
    from benches.long_agents import measure_long_agents, prepare_long_agents
    from headrace.actors.record.files.run_directory import RunDirectory

    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        directory = RunDirectory(path=Path(folder) / "long-agents")
        figures = measure_long_agents(directory, prepare_long_agents(directory, steps=steps, answers=answers))
    _print(figures.to_json())
    if not figures.completed or figures.stalls or figures.infra or figures.problems:
        raise typer.Exit(EXIT_DIRTY)


@app.command()
def outage(
    json: Json = True,
    steps: Annotated[int, typer.Option(min=7, help="Optimizer updates.")] = 12,
    gate_waits: Annotated[
        float,
        typer.Option(
            min=1, help="Length of the engines' outage, as a multiple of the time that a turn waits for an engine."
        ),
    ] = 20,
    buffer_away_s: Annotated[float, typer.Option(min=1, help="Length of the buffer's outage, in seconds.")] = 30,
) -> None:
    """Run in scaled time with an outage of the engines, then of the buffer, and a sandbox host that breaks every
    command. Exit code 3: a task was charged or parked, a rollout was lost, too many attempts began during the outage,
    or the run did not end."""
    from benches.outage import Outages, measure_outage, prepare_outage
    from headrace.actors.record.files.run_directory import RunDirectory

    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        directory = RunDirectory(path=Path(folder) / "outage")
        config = prepare_outage(directory, steps=steps)
        wait_s = config.engines.simulated.gate_wait_s
        outages = Outages(gate_wait_s=wait_s, gate_waits=gate_waits, buffer_away_s=buffer_away_s)
        # Ray reports dead processes on standard output, which is reserved for the figures.
        with redirect_stdout(sys.stderr):
            figures = measure_outage(directory, config, outages, say=typer.echo)
    _print(figures.to_json())
    if not figures.holds:
        raise typer.Exit(EXIT_DIRTY)


@app.command()
def months(
    json: Json = True,
    days: Annotated[
        int, typer.Option(min=1, help="Length of the long run in days of 360 steps with 64 rollouts each.")
    ] = 90,
    folder: Annotated[Path | None, typer.Option(help="Folder for the runs (needs about 2 GB for 90 days).")] = None,
) -> None:
    """Measure the cost of resuming a months-long run, compared with a day-long one: the time from the start of `resume`
    to the first order, the longest gap of any actor while each is restarted, the longest wait of an offer during a
    checkpoint, and the buffer's memory; with files in the current format and in the previous one. Exit code 3: a figure
    exceeds its limit."""
    from benches.long_runs.months_bench import measure

    with tempfile.TemporaryDirectory(prefix="headrace-months-", dir=folder) as place:
        figures = measure(Path(place), days=days, say=Console(stderr=True).print)
    _print(figures)
    if figures["problems"]:
        raise typer.Exit(EXIT_DIRTY)


@app.command()
def cluster(
    json: Json = True,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer updates of each run.")] = 40,
    repeats: Annotated[int, typer.Option(min=1, help="Number of runs on the cluster, and locally.")] = 3,
    quickstart: Annotated[
        bool, typer.Option("--quickstart", help="Run the quickstart too, with sandbox servers on two nodes.")
    ] = False,
) -> None:
    """Compare the simulated recipe on a Ray cluster of namespace hosts (a head and three nodes; needs root) with a
    local Ray: wall time, and CPU time of Ray itself for each rollout. Exit code 3: a figure exceeds its limit."""
    from benches.cluster.figures import measure, misses

    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        figures = measure(Path(folder), steps=steps, repeats=repeats, quickstart=quickstart, say=say)
    _print({**figures, "misses": misses(figures)})
    if misses(figures):
        raise typer.Exit(EXIT_DIRTY)


@app.command()
def control(
    json: Json = True,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the run.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer updates.")] = 30,
) -> None:
    """Run the negative control: the quickstart with rewards shuffled within the batch must not learn."""
    from headrace.actors.run.launch import RunRequest, drive, prepare

    overrides = [
        f"training.steps={steps}",
        "training.rewards=shuffled",
        "evaluation.every_steps=0",
        f"service.seed={seed}",
    ]
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        request = RunRequest(recipe=QUICKSTART, runs_dir=Path(folder), name="control", overrides=overrides)
        summary = drive(*prepare(request))
    document = summary.to_json()
    _print({key: document[key] for key in ("base_success", "final_success", "steps", "rollouts", "train_wall_s")})


@app.command()
def recipe(
    name: Annotated[str, typer.Argument(help="Recipe in scripts/recipes, without .toml.")],
    json: Json = True,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of both runs.")] = 0,
    control: Annotated[bool, typer.Option(help="Run the control too, whose rewards are shuffled.")] = True,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key of both runs (table.key=value); may be repeated.")
    ] = None,
) -> None:
    """Run the recipe of a published system on the CPUs of this machine, and its control. Exit code 3: the policy did
    not learn, the control did, or something was lost."""
    from benches.recipe import NAMES, measure

    if name not in NAMES:
        raise typer.BadParameter(f"{name} is not one of {', '.join(NAMES)}", param_hint="NAME")
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder, redirect_stdout(sys.stderr):
        figures = measure(name, Path(folder), seed=seed, control=control, overrides=tuple(overrides or ()))
    _print(figures.to_json())
    if figures.problems or figures.misses:
        raise typer.Exit(EXIT_DIRTY)


@app.command()
def staleness(
    json: Json = True,
    bounds: Annotated[str, typer.Option(help="Comma-separated bounds, in optimizer updates.")] = "0,2,8",
    corrections: Annotated[str, typer.Option(help="Comma-separated corrections; all by default.")] = "",
    steps: Annotated[int, typer.Option(min=2, help="Optimizer updates.")] = 40,
    late_s: Annotated[float, typer.Option(min=0.1, help="Mean seconds of an agent's last tool call.")] = 20.0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the runs.")] = 0,
) -> None:
    """Run the quickstart with late agents under several staleness bounds, each with PPO's clip and the cap of the
    ratio, with the cap alone, and with neither: final success, staleness and log-ratios. Takes half an hour."""
    from benches.staleness import CORRECTIONS, measure

    wanted = [name.strip() for name in corrections.split(",")] if corrections else list(CORRECTIONS)
    if unknown := [name for name in wanted if name not in CORRECTIONS]:
        raise typer.BadParameter(f"{unknown[0]} is not one of {', '.join(CORRECTIONS)}", param_hint="--corrections")
    try:
        limits = [int(bound) for bound in bounds.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{bounds} is not a list of numbers", param_hint="--bounds") from error
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        figures = measure(
            Path(folder), bounds=limits, corrections=wanted, steps=steps, late_s=late_s, seed=seed, say=say
        )
    _print(figures)


@app.command()
def cheats(
    json: Json = True,
    repositories: Annotated[str, typer.Option(help="Comma-separated repositories; all by default.")] = "",
) -> None:
    """Grade cheating and honest patches for small repositories, with tests of every kind, in local sandboxes. Exit code
    3: a cheat was rewarded, or an honest patch was rejected."""
    from benches.cheating.cheat_bench import all_pairs, measure

    pairs = all_pairs()
    known = {repository.name for repository, _ in pairs}
    wanted = [name.strip() for name in repositories.split(",")] if repositories else known
    if unknown := [name for name in wanted if name not in known]:
        raise typer.BadParameter(f"{unknown[0]} is not one of {', '.join(sorted(known))}", param_hint="--repositories")
    figures = asyncio.run(measure([pair for pair in pairs if pair[0].name in wanted], say))
    _print(figures)
    if figures["cheats_paid"] or figures["honest_refused"]:
        raise typer.Exit(EXIT_DIRTY)


@app.command()
def releases(
    json: Json = True,
    state: Annotated[
        Path, typer.Option(help="Folder of archives, packages and verdicts; a bench with the same folder goes on.")
    ] = Path("releases"),
    sample: Annotated[int | None, typer.Option(min=1, help="Number of verdicts of this start; all by default.")] = None,
    seed: Annotated[int, typer.Option(help="Order of the projects.")] = 0,
) -> None:
    """Grade releases of PyPI projects as repository tasks, and compare each verdict with plain pytest on the host. Exit
    code 3: a verdict differs, or too many are none."""
    from benches.cheating.releases import measure

    figures = asyncio.run(measure(state, sample, say, seed))
    _print(figures)
    if figures["false_refusals"] or figures["false_rewards"] or figures["ungradable"] > 0.02:
        raise typer.Exit(EXIT_DIRTY)


@app.command()
def verdicts(
    json: Json = True,
    runs: Annotated[int, typer.Option(min=3, help="Number of simulated runs.")] = 300,
    seed: Annotated[int | None, typer.Option(min=0, help="First seed; drawn and printed by default.")] = None,
) -> None:
    """Simulate runs with a planted cause of slowness, or with none, and measure whether the verdicts name the part and
    the common factor. Exit code 3: a recall or the share of false factors misses its bound."""
    from benches.verdicts.scores import misses
    from benches.verdicts.verdict_bench import measure

    figures = measure(runs=runs, seed=seed, say=say)
    _print({**figures, "misses": misses(figures)})
    if misses(figures):
        raise typer.Exit(EXIT_DIRTY)


@app.command()
def scrape(
    json: Json = True,
    rollouts: Annotated[int, typer.Option(min=64, help="Number of simulated rollouts.")] = 50_000,
    run: Annotated[Path | None, typer.Option(help="Directory of a run to measure instead.")] = None,
) -> None:
    """Measure what a scrape of `/metrics` takes with a long ledger: the first one, later ones, and memory."""
    from benches.scrape import measure

    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder, redirect_stdout(sys.stderr):
        figures = measure(Path(folder), rollouts=rollouts, run_dir=run)
    _print(figures)


@app.command()
def slow(
    json: Json = True,
    rollouts: Annotated[int, typer.Option(min=1000, help="Number of rollouts.")] = 50_000,
    turns: Annotated[int, typer.Option(min=1, help="Turns of a rollout.")] = 90,
) -> None:
    """Generate a long simulated run, and measure the time and memory of `headrace trace slow` over it. Exit code 3: it
    takes longer than its bound (on an idle machine)."""
    from benches.verdicts.scale import measure, misses

    with tempfile.TemporaryDirectory(prefix="headrace-slow-") as folder:
        figures = measure(Path(folder), rollouts=rollouts, turns=turns, say=say)
    _print({**figures, "misses": misses(figures)})
    if misses(figures):
        raise typer.Exit(EXIT_DIRTY)


def _print(document: dict[str, Any]) -> None:
    write_json(document, Path("-"))


def main() -> None:
    from headrace.actors.cli.output import EXPECTED

    try:
        # In this mode typer returns the code of a `typer.Exit`.
        sys.exit(app(standalone_mode=False))
    except EXPECTED as error:
        Console(stderr=True).print(f"bench: {error}", style="red", markup=False)
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()
