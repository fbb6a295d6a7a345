"""Whether a run still makes progress: a plain state machine over what its parts report.

Invariants:
- Progress is a count that grew over what the same part reported last: a part that dies and comes back to where it was,
  or that fails faster and faster, makes none. Each count has a clock of its own, for the diagnosis.
- What happens on the way to a result (turns, tokens) is progress for `result_s` after the last result: rollouts that
  all fail after their turns, and are begun again and again, end the run too.
- Work under way (a learner's stage, an engine's start, a boot, a push) ends by a clock of its own, and while it goes on
  its silence is no stall, then or when it has just ended. Work that begins again and again without any progress holds a
  stall up for twice its clock at most.
- A learner that dies again and again at the same step ends the run too, however busy the rest of it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from headrace.buffer.versions import PolicyVersion

MAX_FRUITLESS_EPOCHS = 8
"""Learners that may follow each other without one getting beyond the highest step reached."""
WARNING_SHARE = 0.5
"""Of the time after which a run is stalled: then the run says that nothing moves."""
OWN_CLOCKS = 2.0
"""For so many times its own clock work under way may hold up a stall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSigns:
    """What the parts of a run report at one moment. `counts` grow with progress; a part that does not answer has none.
    `under_way` has the clock (seconds) of each kind of work that goes on now."""

    counts: Mapping[str, int] = field(default_factory=dict)
    on_the_way: Collection[str] = ()
    """Names of counts that are no results: they lead to one, or to nothing."""
    under_way: Mapping[str, float] = field(default_factory=dict)
    version: PolicyVersion | None = None
    """The learner's."""


class _Silence:
    """How long something has not happened, in seconds. Time with work under way is left out, `excused_s` at most."""

    def __init__(self) -> None:
        self.seconds = self._excused_s = 0.0

    def goes_on(self, seconds: float, excused_s: float) -> None:
        excused = min(seconds, max(0.0, excused_s - self._excused_s))
        self._excused_s += excused
        self.seconds += seconds - excused

    def ends(self) -> None:
        self.seconds = self._excused_s = 0.0


class StallDetector:
    """Stall detector of one run, from `now_s` (seconds of any clock). `result_s`: the longest that turns may go on
    without a result."""

    def __init__(self, now_s: float, stall_s: float, result_s: float = inf) -> None:
        self._stall_s, self._longest_without_s = stall_s, result_s
        self._looked_s = self._moved_s = self._result_s = now_s
        self._silence, self._without_result = _Silence(), _Silence()
        self._reported: dict[str, int] = {}
        self._counts_moved_s: dict[str, float] = {}
        self._highest_step = -1
        self._epoch = 0
        self._warned = False

    def stalled(self, now_s: float, signs: ProgressSigns) -> str | None:
        """Why the run should end, None while it makes progress."""
        if (version := signs.version) is not None:
            if version.step > self._highest_step:
                self._highest_step, self._epoch = version.step, version.epoch
            if version.epoch - self._epoch > MAX_FRUITLESS_EPOCHS:
                return f"{MAX_FRUITLESS_EPOCHS} learners died before step {self._highest_step + 1} was done"
        excused_s = OWN_CLOCKS * max(signs.under_way.values(), default=0.0)
        for silence in (self._silence, self._without_result):
            silence.goes_on(now_s - self._looked_s, excused_s)
        self._looked_s = now_s
        for name, number in signs.counts.items():
            if number > self._reported.get(name, 0):
                self._grew(name, now_s, is_result=name not in signs.on_the_way)
            self._reported[name] = number
        if self._silence.seconds <= self._stall_s:
            return None
        return f"{self._what_is_missing(now_s)} for {self._stall_s:g} s (service.stall_s); {self._last_progress(now_s)}"

    def warning(self, now_s: float) -> str | None:
        """Once in a silence, when half the time that is left to the run is over."""
        if self._warned or self._silence.seconds <= WARNING_SHARE * self._stall_s:
            return None
        self._warned = True
        return f"{self._what_is_missing(now_s)} for {now_s - self._moved_s:.0f} s; {self._last_progress(now_s)}"

    def _grew(self, name: str, now_s: float, *, is_result: bool) -> None:
        self._counts_moved_s[name] = now_s
        if is_result:
            self._result_s = now_s
            self._without_result.ends()
        if self._without_result.seconds <= self._longest_without_s:
            self._moved_s = now_s
            self._silence.ends()
            self._warned = False

    def _what_is_missing(self, now_s: float) -> str:
        if max(self._counts_moved_s.values(), default=self._moved_s) <= self._moved_s:
            return "nothing moved"
        return f"no rollout had a result for {now_s - self._result_s:.0f} s, and turns alone were no progress"

    def _last_progress(self, now_s: float) -> str:
        """The clock of each count, the latest first."""
        clocks = sorted(self._counts_moved_s.items(), key=lambda clock: -clock[1])
        if not clocks:
            return "nothing ever moved"
        return "last progress: " + ", ".join(f"{name} {now_s - moved_s:.0f} s ago" for name, moved_s in clocks)
