"""Stall detector of a run: a pure state machine over the progress signs of its actors.

Invariants:
- Progress is a count that exceeds the same actor's last report: an actor that restarts and returns to where it was, or
  that fails faster and faster, makes none. The time at which each count last grew is kept for the diagnosis.
- Intermediate counts (turns, tokens) are progress for `result_s` after the last result: a run in which all rollouts
  fail after their turns and are retried forever is stalled too.
- Work under way (a learner's stage, an engine's start, a boot, a push) has a timeout of its own, and its time does not
  count as silence. Work that restarts repeatedly without progress delays a stall by at most twice its timeout.
- A learner that dies repeatedly at the same step ends the run, however busy the rest of the run is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf

from headrace.buffer.trajectories.versions import PolicyVersion

MAX_FRUITLESS_EPOCHS = 8
"""Number of consecutive learners that may end without getting beyond the highest step reached."""
WARNING_SHARE = 0.5
"""Share of `stall_s` after which a warning is logged."""
MAX_EXCUSED_TIMEOUTS = 2.0
"""Multiple of its timeout for which work under way may delay a stall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSigns:
    """Signs of progress at one moment. `counts` grow with progress; an actor that does not answer has none. `under_way`
    has the timeout (seconds) of each kind of work in progress."""

    counts: Mapping[str, int] = field(default_factory=dict)
    intermediate: Collection[str] = ()
    """Names of counts that are not results, but may lead to one."""
    under_way: Mapping[str, float] = field(default_factory=dict)
    version: PolicyVersion | None = None
    """Version of the learner."""


class _Silence:
    """Seconds without an event, excluding up to `excused_s` with work under way."""

    def __init__(self) -> None:
        self.seconds = self._excused_s = 0.0

    def goes_on(self, seconds: float, excused_s: float) -> None:
        excused = min(seconds, max(0.0, excused_s - self._excused_s))
        self._excused_s += excused
        self.seconds += seconds - excused

    def ends(self) -> None:
        self.seconds = self._excused_s = 0.0


class StallDetector:
    """Stall detector of one run, starting at `now_s` (seconds of any clock). `result_s` is the longest time for which
    intermediate counts are progress without a result."""

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
        """Return the reason why the run should end, or None while it is making progress."""
        if (version := signs.version) is not None:
            if version.step > self._highest_step:
                self._highest_step, self._epoch = version.step, version.epoch
            if version.epoch - self._epoch > MAX_FRUITLESS_EPOCHS:
                return f"{MAX_FRUITLESS_EPOCHS} learners died before they finished step {self._highest_step + 1}"
        excused_s = MAX_EXCUSED_TIMEOUTS * max(signs.under_way.values(), default=0.0)
        for silence in (self._silence, self._without_result):
            silence.goes_on(now_s - self._looked_s, excused_s)
        self._looked_s = now_s
        for name, number in signs.counts.items():
            if number > self._reported.get(name, 0):
                self._counts_moved_s[name] = now_s
                if name not in signs.intermediate:
                    self._result_s = now_s
                    self._without_result.ends()
                if self._without_result.seconds <= self._longest_without_s:
                    self._moved_s = now_s
                    self._silence.ends()
                    self._warned = False
            self._reported[name] = number
        if self._silence.seconds <= self._stall_s:
            return None
        return f"{self._what_is_missing(now_s)} for {self._stall_s:g} s (service.stall_s); {self._last_progress(now_s)}"

    def warning(self, now_s: float) -> str | None:
        """Return a warning, once, when half of `stall_s` has passed without progress."""
        if self._warned or self._silence.seconds <= WARNING_SHARE * self._stall_s:
            return None
        self._warned = True
        return f"{self._what_is_missing(now_s)} for {now_s - self._moved_s:.0f} s; {self._last_progress(now_s)}"

    def _what_is_missing(self, now_s: float) -> str:
        if max(self._counts_moved_s.values(), default=self._moved_s) <= self._moved_s:
            return "no progress"
        return (
            f"no rollout has had a result for {now_s - self._result_s:.0f} s, and turns alone have not counted as "
            "progress"
        )

    def _last_progress(self, now_s: float) -> str:
        """Describe when each count grew last, the latest first."""
        clocks = sorted(self._counts_moved_s.items(), key=lambda clock: -clock[1])
        if not clocks:
            return "there has been no progress since the start"
        return "last progress: " + ", ".join(f"{name} {now_s - moved_s:.0f} s ago" for name, moved_s in clocks)
