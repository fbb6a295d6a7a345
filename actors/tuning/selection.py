"""Which of the trials to take.

The default preference: among the settings at most `within` (3 %) slower than the fastest, those that lose least (waste,
plus the share of the slowest decile that training misses, plus the shift of the mean reward; differences below one
percentage point count as none); of these the one with the lowest mean staleness, then with the fewest slots.

Invariants:
- A choice depends on the trials alone, not on their order.
- What other seeds do not confirm is not recommended: the recorded setting stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.actors.tuning.trial import Trial

WITHIN: Final = 0.03
EQUAL_LOSS: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Of one setting: mean time of a step over seeds, and the least and the greatest."""

    step_s: float
    least_s: float
    greatest_s: float


def choose(trials: Sequence[Trial], *, within: float = WITHIN) -> Trial:
    """By the preference above. ValueError without trials."""
    fastest_s = min(trial.step_s for trial in trials)
    fast = [trial for trial in trials if trial.step_s <= fastest_s * (1 + within)]
    least = min(trial.loss for trial in fast)
    harmless = [trial for trial in fast if trial.loss <= least + EQUAL_LOSS]
    return min(
        harmless,
        key=lambda trial: (round(trial.mean_staleness, 2), trial.candidate.slots, trial.step_s, trial.candidate),
    )


def is_worth_it(recorded: Trial, chosen: Trial, before: Prediction, after: Prediction) -> bool:
    """Whether to leave the recorded setting for the chosen one, by what other seeds predict of both: faster beyond the
    spread of the seeds, or losing less, or as fast and fresher."""
    faster = after.greatest_s < before.least_s
    loses_less = chosen.loss < recorded.loss - EQUAL_LOSS
    fresher = after.step_s <= before.step_s and round(chosen.mean_staleness, 2) < round(recorded.mean_staleness, 2)
    return faster or loses_less or fresher


def pareto_front(trials: Sequence[Trial]) -> list[Trial]:
    """Those that no other beats: as good in step time, staleness, waste and bias, and better in one."""
    return [trial for trial in trials if not any(_beats(other, trial) for other in trials)]


def _figures(trial: Trial) -> tuple[float, float, float, float]:
    return (trial.step_s, trial.mean_staleness, trial.waste, trial.length_bias + abs(trial.reward_bias))


def _beats(other: Trial, trial: Trial) -> bool:
    pairs = list(zip(_figures(other), _figures(trial), strict=True))
    return all(left <= right for left, right in pairs) and any(left < right for left, right in pairs)
