"""Signs of progress of real runs, simulated runs and evaluations, and the detector of stalls: a pure state machine over
them.

Invariants:
- Progress is a count that exceeds the same actor's last report: an actor that restarts and returns to where it was, or
  that fails faster and faster, makes none. The time at which each count last grew is kept for the diagnosis.
- Only successes count: a recorded turn, a scored rollout, a judging step without an error.
- Turns, tokens and judging steps are intermediate: they count for `result_s` after the last result (`RESULT_ROLLOUTS`).
  A run in which all rollouts fail after their turns and are retried forever is stalled too.
- Work under way (a learner's stage, an engine's start, a boot, a push) has a timeout of its own, and its time does not
  count as silence. Work that restarts repeatedly without progress delays a stall by at most twice its timeout.
- A learner that dies repeatedly at the same step ends the run, however busy the rest of the run is.
- Opening a learner is work under way, not progress: a learner that crashes repeatedly opens repeatedly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf

from headrace.actors.derivation import clocks
from headrace.actors.derivation.terms import Terms
from headrace.actors.engines.registry import EngineState
from headrace.actors.run.config import RunConfig
from headrace.actors.run.supervision import StatusSnapshot
from headrace.actors.training.learner import ENDING_STAGES, Stage
from headrace.buffer.trajectories.versions import PolicyVersion

RESULT_ROLLOUTS = 2.0
"""Multiple of the longest rollout's duration within which at least one rollout must have a result; after that, turns
alone do not count as progress."""
MAX_FRUITLESS_EPOCHS = 8
"""Number of consecutive learners that may end without getting beyond the highest step reached."""
WARNING_SHARE = 0.5
"""Share of `stall_s` after which a warning is logged."""
MAX_EXCUSED_TIMEOUTS = 2.0
"""Multiple of its timeout for which work under way may delay a stall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkClocks:
    """Timeout of each kind of work, in seconds."""

    stage_s: float
    engine_start_s: float
    boot_s: float
    push_s: float


def work_clocks(config: RunConfig) -> WorkClocks:
    """Return the timeouts of a run's work. The timeout of a push depends on the size of the model's weights."""
    terms = Terms.of(config)
    model_bytes = clocks.weights_bytes(terms)
    return WorkClocks(
        stage_s=config.training.stage_timeout_s,
        engine_start_s=config.engines.start_timeout_s,
        boot_s=max(config.rollout.boot_timeout_s, config.sandbox.pool.create_timeout_s),
        push_s=clocks.push_s(clocks.push_config(terms, model_bytes), model_bytes),
    )


def stall_detector(config: RunConfig, now_s: float) -> StallDetector:
    """Return the stall detector of a run, starting at `now_s` (seconds of any clock)."""
    return StallDetector(now_s, config.service.stall_s, RESULT_ROLLOUTS * config.rollout.guard_s)


def signs_of(status: StatusSnapshot, longest: WorkClocks) -> ProgressSigns:
    """Return the signs of progress in one snapshot."""
    learner, gateway = status.learner, status.gateway
    results: dict[str, int] = {}
    under_way: dict[str, float] = {}
    if learner is not None:
        results |= {"stages": learner.stages, "trained tokens": learner.tokens}
        if learner.version is not None:
            results["steps"] = learner.version.step
        if learner.stage in ENDING_STAGES:
            under_way[f"learner {learner.stage}"] = longest.stage_s
        if learner.stage is Stage.ABSENT:
            # However long it takes: nothing else goes on without batches being trained.
            under_way["trainer away"] = inf
    if status.dispatcher is not None:
        results |= {"scored rollouts": status.dispatcher.scored, "answers": status.dispatcher.answered}
    intermediate: dict[str, int] = {}
    if gateway is not None:
        intermediate |= {"turns": gateway.turns, "sampled tokens": gateway.sampled_tokens}
    for number, worker in enumerate(status.workers):
        if worker is not None and worker.ended_turns is not None:
            intermediate[f"turns of worker {number}"] = worker.ended_turns
    if status.judged_steps is not None:
        intermediate["judged steps"] = status.judged_steps
    if (learner is not None and learner.stage is Stage.PUSHING) or (gateway is not None and gateway.closed):
        under_way["push"] = longest.push_s
    if any(engine.state is EngineState.STARTING for engine in status.engines):
        under_way["engine start"] = longest.engine_start_s
    if status.pool is not None and status.pool.booting:
        under_way["boots and image work"] = longest.boot_s
    return ProgressSigns(
        counts=results | intermediate,
        intermediate=intermediate.keys(),
        under_way=under_way,
        version=None if learner is None else learner.version,
    )


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
