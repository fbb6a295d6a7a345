"""Signs of progress of real runs, simulated runs and evaluations, for the stall detector.

Invariants:
- Only successes count: a recorded turn, a scored rollout, a judging step without an error.
- Turns, tokens and judging steps are intermediate: they count only while results keep arriving (`RESULT_ROLLOUTS`).
- Opening a learner is work under way, not progress: a learner that crashes repeatedly opens repeatedly.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from headrace.actors.engines.registry import EngineState
from headrace.actors.run import clocks
from headrace.actors.run.stall_detector import ProgressSigns, StallDetector
from headrace.actors.run.supervision import StatusSnapshot
from headrace.actors.training.learner import ENDING_STAGES, Stage

if TYPE_CHECKING:
    from headrace.actors.run.config import RunConfig

RESULT_ROLLOUTS = 2.0
"""Multiple of the longest rollout's duration within which at least one rollout must have a result; after that, turns
alone do not count as progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkClocks:
    """Timeout of each kind of work, in seconds."""

    stage_s: float
    engine_start_s: float
    boot_s: float
    push_s: float


def work_clocks(config: RunConfig) -> WorkClocks:
    """Return the timeouts of a run's work. The timeout of a push depends on the size of the model's weights."""
    weights = config.model.path.glob("*.safetensors") if not config.engines.is_simulated else ()
    return WorkClocks(
        stage_s=config.training.stage_timeout_s,
        engine_start_s=config.engines.start_timeout_s,
        boot_s=max(config.rollout.boot_timeout_s, config.sandbox.pool.create_timeout_s),
        push_s=clocks.push_s(config, sum(path.stat().st_size for path in weights)),
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
