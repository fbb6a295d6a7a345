"""Whether a run still makes progress: a plain state machine over what its parts report.

Invariants:
- Progress is a count that grew over what the same part reported last: a part that dies and comes back to where it was,
  or that fails faster and faster, makes none. Each count has a clock of its own, for the diagnosis.
- Work under way (a learner's stage, an engine's start, a boot, a push) ends by a clock of its own, and while it goes on
  its silence is no stall. Work that begins again and again without any progress holds a stall up for twice its clock
  at most.
- A learner that dies again and again at the same step ends the run too, however busy the rest of it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.buffer.versions import PolicyVersion

MAX_FRUITLESS_EPOCHS = 8
"""Learners that may follow each other without one getting beyond the highest step reached."""
WARNING_SHARE = 0.5
"""Of the time after which a run is stalled: then the run says that nothing moves."""
OWN_CLOCKS = 2.0
"""For so many times its own clock work under way may hold up a stall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What the parts of a run report at one moment. `counts` grow with progress; a part that does not answer has none.
    `under_way` has the clock (seconds) of each kind of work that goes on now."""

    counts: Mapping[str, int] = field(default_factory=dict)
    under_way: Mapping[str, float] = field(default_factory=dict)
    version: PolicyVersion | None = None
    """The learner's."""


class StallDetector:
    """Stall detector of one run, from `now_s` (seconds of any clock)."""

    def __init__(self, now_s: float, stall_s: float) -> None:
        self._stall_s = stall_s
        self._moved_s = now_s
        self._reported: dict[str, int] = {}
        self._counts_moved_s: dict[str, float] = {}
        self._highest_step = -1
        self._epoch = 0
        self._allowed_s = stall_s
        self._warned = False

    def stalled(self, now_s: float, signs: Signs) -> str | None:
        """Why the run should end, None while it makes progress."""
        if (version := signs.version) is not None:
            if version.step > self._highest_step:
                self._highest_step, self._epoch = version.step, version.epoch
            if version.epoch - self._epoch > MAX_FRUITLESS_EPOCHS:
                return f"{MAX_FRUITLESS_EPOCHS} learners died before step {self._highest_step + 1} was done"
        for name, number in signs.counts.items():
            if number > self._reported.get(name, 0):
                self._counts_moved_s[name] = self._moved_s = now_s
                self._warned = False
            self._reported[name] = number
        self._allowed_s = self._stall_s + OWN_CLOCKS * max(signs.under_way.values(), default=0.0)
        if now_s - self._moved_s <= self._allowed_s:
            return None
        return f"nothing moved for {self._stall_s:g} s (service.stall_s); {self._last_progress(now_s)}"

    def warning(self, now_s: float) -> str | None:
        """Once in a silence, when half the time that is left to the run is over."""
        silent_s = now_s - self._moved_s
        if self._warned or silent_s <= WARNING_SHARE * self._allowed_s:
            return None
        self._warned = True
        return f"nothing moved for {silent_s:.0f} s; {self._last_progress(now_s)}"

    def _last_progress(self, now_s: float) -> str:
        """The clock of each count, the latest first."""
        clocks = sorted(self._counts_moved_s.items(), key=lambda clock: -clock[1])
        if not clocks:
            return "nothing ever moved"
        return "last progress: " + ", ".join(f"{name} {now_s - moved_s:.0f} s ago" for name, moved_s in clocks)
