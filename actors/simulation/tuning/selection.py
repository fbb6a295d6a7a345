"""The rule that chooses one setting among the trials.

The preference: of the settings at most `within` (3 %) slower than the fastest, those with the least loss (waste, plus
the share of the slowest decile that training misses, plus the shift of the mean reward; differences below one
percentage point are ignored); among these, the one with the lowest mean staleness, and then the one with the fewest
slots.

Invariants:
- A choice does not depend on the order of the trials.
- A setting that other seeds do not confirm is not recommended; the recorded one is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from headrace.actors.simulation.tuning.trial import Trial

WITHIN: Final = 0.03
EQUAL_LOSS: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted step time of one setting: mean, minimum and maximum over seeds."""

    step_s: float
    least_s: float
    greatest_s: float


def choose(trials: Sequence[Trial], *, within: float = WITHIN) -> Trial:
    """Choose a trial by the preference above. Raises ValueError without trials."""
    fastest_s = min(trial.step_s for trial in trials)
    fast = [trial for trial in trials if trial.step_s <= fastest_s * (1 + within)]
    least = min(trial.loss for trial in fast)
    harmless = [trial for trial in fast if trial.loss <= least + EQUAL_LOSS]
    return min(
        harmless,
        key=lambda trial: (round(trial.mean_staleness, 2), trial.candidate.slots, trial.step_s, trial.candidate),
    )


def is_worth_it(recorded: Trial, chosen: Trial, before: Prediction, after: Prediction) -> bool:
    """Return True if the chosen setting beats the recorded one on other seeds: it is faster by more than the variation
    between seeds, or it has less loss, or it is as fast and less stale."""
    faster = after.greatest_s < before.least_s
    loses_less = chosen.loss < recorded.loss - EQUAL_LOSS
    fresher = after.step_s <= before.step_s and round(chosen.mean_staleness, 2) < round(recorded.mean_staleness, 2)
    return faster or loses_less or fresher


def pareto_front(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that no other trial dominates in step time, staleness, waste and bias."""

    def costs(trial: Trial) -> tuple[float, float, float, float]:
        return (trial.step_s, trial.mean_staleness, trial.waste, trial.length_bias + abs(trial.reward_bias))

    def dominates(other: Trial, trial: Trial) -> bool:
        pairs = list(zip(costs(other), costs(trial), strict=True))
        return all(left <= right for left, right in pairs) and any(left < right for left, right in pairs)

    return [trial for trial in trials if not any(dominates(other, trial) for other in trials)]
