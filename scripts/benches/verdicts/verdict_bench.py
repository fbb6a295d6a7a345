"""`scripts/bench verdicts`: seeded runs in virtual time with one planted cause each, or none, and whether the verdicts
about their slow rollouts name it.

Invariants:
- Seeds are drawn from the operating system unless one is given, and printed: the first one repeats all runs.
- A run whose planted cause affected fewer than three rollouts, such as a slow image that was hardly booted, is drawn
  again; `redrawn` counts them.
- A third of the runs has no cause; the others have the causes in turn.
- Verdicts are those of `headrace trace slow`: from the ledger and metrics of a run, which know nothing of its cause.
"""

from __future__ import annotations

import logging
import secrets
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from benches.verdicts.moments import MOMENTS, Plant, plant_moment
from benches.verdicts.planted import CAUSES, STEPS_OF_MOMENTS, Cause, Planted, planted_run
from benches.verdicts.scores import RunScore, summarize
from benches.verdicts.truth import affected_rollouts
from headrace.actors.simulation.virtual.simulate import run_plan
from headrace.actors.telemetry.slow.factors import LEAST_SUPPORT
from headrace.actors.telemetry.slow.reading import read_times
from headrace.actors.telemetry.slow.verdicts import SlowReport, explain
from headrace.buffer.audit.evidence import read_evidence

PROCESSES: Final = 2
MOST_DRAWS: Final = 10
ABLATIONS: Final[Mapping[str, Mapping[str, bool]]] = {
    "verdicts": {},
    "without_cohort": {"of_recipe": True},
    "longest_part": {"first_part_only": True},
}
"""Variants of the verdicts: as they are; against the recipe instead of the cohort; the longest part of a slow rollout
instead of that with the most excess. Without the critical path they cannot be computed: a ledger has seconds by part,
and no longer the intervals."""


def measure(*, runs: int, seed: int | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Simulate and judge `runs` runs, and return the figures with the seeds."""
    first = secrets.randbits(31) if seed is None else seed
    seeds = range(first, first + runs)
    causes = [Cause.NONE if number % 3 == 2 else CAUSES[(number - number // 3) % len(CAUSES)] for number in range(runs)]
    scores: dict[str, list[RunScore]] = {name: [] for name in ABLATIONS}
    # Forked processes would share the locks of the parent's threads.
    processes = ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn"), initializer=_without_warnings)
    with processes as pool:
        judged = [pool.submit(judge_run, run_seed, cause) for run_seed, cause in zip(seeds, causes, strict=True)]
        for number, done in enumerate(as_completed(judged), start=1):
            if number % 25 == 0:
                say(f"{number} of {runs} runs")
            done.result()
        for each in judged:
            for name, score in each.result().items():
                scores[name].append(score)
    figures = {name: summarize(found) for name, found in scores.items()}
    short = ("phase_recall", "factor_recall", "false_factors")
    return {
        **figures["verdicts"],
        "seed": first,
        "seeds": [seeds[0], seeds[-1]],
        "ablations": {name: {key: figures[name][key] for key in short} for name in ABLATIONS if name != "verdicts"},
    }


def _without_warnings() -> None:
    """Silence the warnings about attempts that fail on purpose."""
    logging.disable(logging.WARNING)


def judge_run(seed: int, cause: Cause) -> dict[str, RunScore]:
    """Simulate one run and score the verdicts of each variant about it. A run whose cause has affected fewer rollouts
    than a factor needs is drawn again."""
    truth: Planted | Plant
    affected: AbstractSet[str]
    for draw in range(MOST_DRAWS):
        truth = planted = planted_run(seed, cause, draw)
        if cause in MOMENTS:
            planted = planted_run(seed, Cause.NONE, draw, steps=STEPS_OF_MOMENTS)
        with tempfile.TemporaryDirectory(prefix="headrace-verdicts-") as scratch:
            folder = Path(scratch) / "run"
            run_plan(planted.plan, folder)
            times, affected = read_times(folder), affected_rollouts(planted, read_evidence(folder))
        if cause in MOMENTS:
            truth = moment = plant_moment(times, cause, seed, draw)
            times, affected = moment.times, moment.affected
        if cause is not Cause.NONE and len(affected) < LEAST_SUPPORT:
            continue
        reports = {name: explain(times, **changes) for name, changes in ABLATIONS.items()}
        return {name: score_of(seed, cause, truth, affected, report, draw) for name, report in reports.items()}
    raise RuntimeError(f"seed {seed}: {MOST_DRAWS} runs with cause {cause} affected too few rollouts")


def score_of(
    seed: int, cause: Cause, truth: Planted | Plant, affected: AbstractSet[str], report: SlowReport, redrawn: int = 0
) -> RunScore:
    """Compare the verdicts about a run with its planted cause."""
    called = [verdict for verdict in report.verdicts if verdict.rollout_id in affected]
    named = [verdict for verdict in called if any(map(truth.is_part, verdict.causes))]
    factors = dict.fromkeys(
        (cause.factor.text(), truth.is_factor(cause.factor)) for cause in report.causes if cause.factor is not None
    )
    return RunScore(
        seed=seed,
        cause=cause,
        rollouts=report.rollouts,
        slow=len(report.verdicts),
        affected=len(affected),
        called_slow=len(called),
        named=len(named),
        wrong_parts=Counter(verdict.part for verdict in called if verdict not in named),
        factors=tuple(factors),
        redrawn=redrawn,
    )
