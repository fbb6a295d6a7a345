"""The search over candidates by successive halving, with a final round on other seeds.

The first round simulates a few steps of all candidates, the second many steps of the best candidates (K. Jamieson and
A. Talwalkar, AISTATS 2016).

Invariants:
- Predictions for the chosen setting use different seeds from those used to choose it, since the best of many is also
  the luckiest.
- The same recording, space and seed give the same result with any number of processes.
- All candidates get the same tasks, durations and rewards, so that differences are due to the settings.
- The recorded setting is in every round, as the baseline.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from headrace.actors.errors import ConfigError
from headrace.actors.simulation.tuning.candidates import Candidate
from headrace.actors.simulation.tuning.selection import WITHIN, Prediction, choose, is_worth_it, pareto_front
from headrace.actors.simulation.tuning.trial import FailedTrial, Trial, run_trial
from headrace.actors.simulation.virtual.plan import SimulationPlan

LEAST_STEPS: Final = 8
"""Minimum number of steps in a trial, half of which are the warm-up."""
SURVIVORS: Final = 1 / 3
MOST_SURVIVORS: Final = 16
CONFIRMATIONS: Final = 3
"""Number of additional seeds in the final round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Effort of a search: `steps` per trial in the second round, a quarter of that (at least 8) in the first.
    `processes` run trials in parallel. `within` is the tolerance of `choose`."""

    steps: int
    processes: int
    within: float = WITHIN


@dataclass(frozen=True, slots=True)
class Job:
    """One trial to run."""

    candidate: Candidate
    base: SimulationPlan
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Result of a search. `finals` ran all steps; `screened` ran only those of the first round."""

    recorded: Trial
    chosen: Trial
    recorded_prediction: Prediction
    chosen_prediction: Prediction
    finals: tuple[Trial, ...]
    screened: tuple[Trial, ...]
    failed: tuple[FailedTrial, ...]


def search(
    candidates: Sequence[Candidate], base: SimulationPlan, effort: Effort, say: Callable[[int, int, int], None]
) -> SearchResult:
    """Search for the best candidate. `candidates[0]` is the recorded one; `say` is called with (round, trials done,
    total trials). Raises ConfigError if the recorded one cannot be simulated."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=effort.processes, mp_context=context, initializer=_quiet) as pool:
        screening = max(LEAST_STEPS, effort.steps // 4)
        first = _round(pool, [Job(item, base, screening) for item in candidates], lambda *now: say(1, *now))
        trials = [trial for trial in first if isinstance(trial, Trial)]
        kept = [candidates[0], *survivors(trials, candidates[0])]
        second = _round(pool, [Job(item, base, effort.steps) for item in kept], lambda *now: say(2, *now))
        finals = tuple(trial for trial in second if isinstance(trial, Trial))
        failed = tuple(trial for trial in (*first, *second) if isinstance(trial, FailedTrial))
        recorded = next((trial for trial in finals if trial.candidate == candidates[0]), None)
        if recorded is None:
            reason = next(trial.reason for trial in failed if trial.candidate == candidates[0])
            raise ConfigError(f"tune: the recorded setting {candidates[0].label()} cannot be simulated: {reason}")
        chosen = choose(finals, within=effort.within)
        others = [base.model_copy(update={"seed": base.seed + 1 + number}) for number in range(CONFIRMATIONS)]
        jobs = [Job(trial.candidate, other, effort.steps) for other in others for trial in (recorded, chosen)]
        third = _round(pool, jobs, lambda *now: say(3, *now))
    before, after = _prediction(third[0::2]), _prediction(third[1::2])
    if not is_worth_it(recorded, chosen, before, after):
        chosen, after = recorded, before
    return SearchResult(
        recorded=recorded,
        chosen=chosen,
        recorded_prediction=before,
        chosen_prediction=after,
        finals=finals,
        screened=tuple(trial for trial in trials if trial.candidate not in set(kept)),
        failed=failed,
    )


def _prediction(trials: Sequence[Trial | FailedTrial]) -> Prediction:
    """Return the prediction of trials with several seeds. Raises ConfigError if one failed."""
    times_s = [trial.step_s for trial in trials if isinstance(trial, Trial)]
    for trial in trials:
        if isinstance(trial, FailedTrial):
            raise ConfigError(f"tune: {trial.candidate.label()} fails with another seed: {trial.reason}")
    return Prediction(step_s=fmean(times_s), least_s=min(times_s), greatest_s=max(times_s))


def _quiet() -> None:
    """Hide warnings about failures, which the plan simulates on purpose."""
    logging.getLogger("headrace").setLevel(logging.ERROR)


def _round(
    pool: ProcessPoolExecutor, jobs: Sequence[Job], say: Callable[[int, int], None]
) -> list[Trial | FailedTrial]:
    futures = [pool.submit(run_trial, job.candidate, job.base, job.steps) for job in jobs]
    results = []
    for done, future in enumerate(futures, start=1):
        results.append(future.result())
        say(done, len(futures))
    return results


def survivors(trials: Sequence[Trial], recorded: Candidate) -> list[Candidate]:
    """Return the fastest third and the Pareto front, fastest first, at most MOST_SURVIVORS including the recorded
    one."""
    by_speed = sorted(trials, key=lambda trial: (trial.step_s, trial.candidate))
    fastest = by_speed[: max(1, round(SURVIVORS * len(by_speed)))]
    front = pareto_front(trials)
    kept = [trial.candidate for trial in by_speed if trial in fastest or trial in front]
    others = [candidate for candidate in kept if candidate != recorded]
    return others[: MOST_SURVIVORS - 1]
