"""Scores of verdicts about runs with planted causes. Pure.

Invariants:
- A rollout is affected if the planted part took at least half of the planted excess longer than the run's median of
  that part (for retries: if an earlier attempt of it failed). Nothing of the verdict enters.
- A run counts as explained if its verdicts name the planted part for most affected rollouts that they call slow; a run
  in which they call none slow is missed.
- Runs without a cause enter only `false_factors`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benches.verdicts.planted import Cause

LEAST_PHASE_RECALL: Final = 0.95
LEAST_FACTOR_RECALL: Final = 0.9
MOST_FALSE_FACTORS: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class RunScore:
    """Verdicts about one run. `affected` rollouts are counted among those that ended, `called_slow` of them are called
    slow, and `named` of these with the planted part. `wrong_parts` counts the parts that were named instead; `factors`
    are all common factors, with whether it is the planted one."""

    seed: int
    cause: Cause
    rollouts: int
    slow: int
    affected: int = 0
    called_slow: int = 0
    named: int = 0
    wrong_parts: Counter[str]
    factors: tuple[tuple[str, bool], ...] = ()
    redrawn: int = 0
    """Runs of this seed that were drawn before and that the cause hardly affected."""

    @property
    def explains_part(self) -> bool:
        return self.named * 2 > self.called_slow

    @property
    def explains_factor(self) -> bool:
        return any(planted for _, planted in self.factors)


def summarize(scores: Sequence[RunScore]) -> dict[str, Any]:
    """Return the figures over all runs, and by cause."""
    planted = [score for score in scores if score.cause is not Cause.NONE]
    free = [score for score in scores if score.cause is Cause.NONE]
    by_cause: dict[str, list[RunScore]] = defaultdict(list)
    for score in scores:
        by_cause[score.cause].append(score)
    called = sum(score.called_slow for score in planted)
    return {
        "phase_recall": _share([score.explains_part for score in planted]),
        "phase_recall_of_rollouts": sum(score.named for score in planted) / called if called else None,
        "factor_recall": _share([score.explains_factor for score in planted]),
        "false_factors": _share([bool(score.factors) for score in free]),
        "wrong_factors": _share([any(not planted for _, planted in score.factors) for score in planted]),
        "runs": len(scores),
        "redrawn": sum(score.redrawn for score in scores),
        "causes": {str(cause): _of_cause(runs) for cause, runs in by_cause.items()},
    }


def misses(figures: Mapping[str, Any]) -> list[str]:
    """Return the figures that miss their bounds; one that no run gives misses none."""
    least = {"phase_recall": LEAST_PHASE_RECALL, "factor_recall": LEAST_FACTOR_RECALL}
    missed = [
        f"{name} {figures[name]:.3f} is below {bound:g}"
        for name, bound in least.items()
        if figures[name] is not None and figures[name] < bound
    ]
    false = figures["false_factors"]
    if false is not None and false > MOST_FALSE_FACTORS:
        missed.append(f"false_factors {false:.3f} is above {MOST_FALSE_FACTORS:g}")
    return missed


def _of_cause(scores: Sequence[RunScore]) -> dict[str, Any]:
    """Return the figures of the runs with one cause, and what was named in place of it."""
    wrong_parts: Counter[str] = Counter()
    wrong_factors: Counter[str] = Counter()
    for score in scores:
        wrong_parts += score.wrong_parts
        wrong_factors.update(name for name, planted in score.factors if not planted)
    return {
        "runs": len(scores),
        "phase_recall": _share([score.explains_part for score in scores]),
        "factor_recall": _share([score.explains_factor for score in scores]),
        "rollouts": sum(score.rollouts for score in scores),
        "slow": sum(score.slow for score in scores),
        "affected": sum(score.affected for score in scores),
        "called_slow": sum(score.called_slow for score in scores),
        "named": sum(score.named for score in scores),
        "without_slow": sum(score.called_slow == 0 for score in scores),
        "wrong_parts": dict(wrong_parts.most_common(5)),
        "wrong_factors": dict(wrong_factors.most_common(5)),
    }


def _share(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None
