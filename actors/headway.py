"""Whether a run gets anywhere: a plain state machine over what learner and dispatcher say of themselves.

Invariants:
- Headway is a number that grew over what the same part said last: a part that dies and comes back to where it was, or
  that fails faster and faster, makes none.
- A learner that dies again and again at the same step ends the run too, however busy the rest of it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.actors.dispatcher import DispatcherStatus
    from headrace.actors.learner import LearnerStatus

MAX_FRUITLESS_EPOCHS = 8
"""Learners that may follow each other without one getting beyond the highest step reached."""


class Headway:
    """Of one run, from `now_s` (seconds of any clock)."""

    def __init__(self, now_s: float, stall_s: float) -> None:
        self._stall_s = stall_s
        self._moved_s = now_s
        self._said: dict[str, int] = {}
        self._highest_step = -1
        self._epoch = 0

    def stalled(self, now_s: float, learner: LearnerStatus | None, dispatcher: DispatcherStatus | None) -> str | None:
        """Why the run should end, None while it gets somewhere. A part that does not answer is None."""
        numbers: dict[str, int] = {}
        if learner is not None:
            numbers["tokens"] = learner.tokens
            if learner.version is not None:
                numbers["step"] = learner.version.step
                if learner.version.step > self._highest_step:
                    self._highest_step, self._epoch = learner.version.step, learner.version.epoch
                if learner.version.epoch - self._epoch > MAX_FRUITLESS_EPOCHS:
                    return f"{MAX_FRUITLESS_EPOCHS} learners died before step {self._highest_step + 1} was done"
        if dispatcher is not None:
            numbers |= {"scored": dispatcher.scored, "answered": dispatcher.answered}
        if any(number > self._said.get(name, 0) for name, number in numbers.items()):
            self._moved_s = now_s
        self._said |= numbers
        if now_s - self._moved_s > self._stall_s:
            return f"nothing moved for {self._stall_s:g} s (service.stall_s)"
        return None
