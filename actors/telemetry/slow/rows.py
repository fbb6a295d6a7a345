"""One row per rollout: where its time went, and labels that may explain it.

Invariants:
- The parts of a row add up to its `total_s`, from its first issue to the end of its last attempt (or to now).
- No number is negative: where clocks disagree, times are clipped at 0 and `clock_s` says by how much.
- Waits after the end (`waits_s`) are reported, but are not part of a rollout's slowness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from headrace.buffer.trajectories.breakdown import OF_EVALUATION, Label, place_of

DISPATCH: Final = "dispatch"
"""Part from the ledger: the order's way to a worker and the result's way back."""
EARLIER_ATTEMPTS: Final = "earlier_attempts"
"""Part from the ledger: time before the last attempt was issued."""
STALENESS_WAIT: Final = "staleness_wait"
"""Part from the ledger: the same, where the attempts before ended because of the staleness bound."""
UNATTRIBUTED: Final = "unattributed"
"""An attempt that left neither a breakdown nor phases."""
RUNNING: Final = "running"
"""An attempt that has not ended: its breakdown comes with its result."""
LEDGER_PARTS: Final = (DISPATCH, EARLIER_ATTEMPTS, STALENESS_WAIT, UNATTRIBUTED, RUNNING)
SEAL_WAIT: Final = "seal_wait"
"""Wait after the end, until the group is sealed."""
BUFFER_WAIT: Final = "buffer_wait"
"""Wait after that, until a batch with the rollout is leased."""
TOLERANCE_S: Final = 1.0
"""Largest difference between the clocks of two hosts that is not reported."""


# Not frozen: a long run has tens of thousands, and a frozen one takes three times as long to make.
@dataclass(slots=True, kw_only=True)
class RolloutTime:
    """Times of one rollout, in seconds (`*_at_s`: Unix time); nothing changes them. `step` is that of the version at
    which its last attempt was issued, `trained_step` the step that trained it. `ended_at_s` is None while it runs;
    `finished` is false for a rollout that runs, or that was stopped before it ended by itself (cancelled, evicted),
    whose times are lower bounds."""

    rollout_id: str
    attempt: int
    task: str
    group: str
    step: int
    issued_at_s: float
    last_issued_at_s: float
    total_s: float
    parts_s: Mapping[str, float]
    labels: Mapping[str, Label] = field(default_factory=dict)
    waits_s: Mapping[str, float] = field(default_factory=dict)
    purpose: str = "train"
    agent: str = ""
    ended_at_s: float | None = None
    finished: bool = True
    ready_at_s: float | None = None
    """When the rollout's group was sealed with it, or it ended, whichever came later."""
    trained_step: int | None = None
    cause: str = ""
    began_at_s: float | None = None
    """When its last attempt began on the worker, by the ledger's clock; None while it runs."""
    within_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Begin and end of each part of the last attempt, in seconds since then."""
    clock_s: float = 0.0
    """Seconds by which the worker's clock and the ledger's disagree; 0 within `TOLERANCE_S`."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Something that the run did meanwhile, in Unix time."""

    kind: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A committed step: its rollouts, when its batch was leased, and when the step before it was committed."""

    step: int
    rollouts: tuple[str, ...]
    leased_at_s: float
    committed_at_s: float
    free_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimes:
    """Times of a run. `missing` has a sentence for each thing that the verdicts lack."""

    rows: tuple[RolloutTime, ...]
    steps: tuple[StepTime, ...] = ()
    meanwhile: tuple[Interval, ...] = ()
    missing: tuple[str, ...] = ()


def is_of_evaluation(part: str) -> bool:
    """Return whether a part belongs to the evaluator."""
    return part in OF_EVALUATION


@lru_cache(maxsize=4096)
def in_order(part: str) -> tuple[int, int, str]:
    """Return a key that sorts parts in the order of a rollout, those of the ledger first."""
    if part in LEDGER_PARTS:
        return (0, LEDGER_PARTS.index(part), part)
    if part == "agent":
        return (1, *place_of("own"))
    return (1, *place_of(part))
