"""The signs of progress of a run, for its stall detector: real, simulated and evaluating runs are judged by these.

Invariants:
- Only what succeeded counts: a turn that was recorded, a rollout that was scored, a judging step that ended well.
- Turns, tokens and judging steps lead to a result, or to nothing: they count while results come (`RESULT_ROLLOUTS`).
- The opening of a learner counts as work under way and not as progress: one that dies again and again opens again and
  again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.actors.engine_group.registry import EngineState
from headrace.actors.run import clocks
from headrace.actors.run.stall_detector import ProgressSigns, StallDetector
from headrace.actors.training.learner import ENDING_STAGES, Stage

if TYPE_CHECKING:
    from headrace.actors.run.config import RunConfig
    from headrace.actors.run.supervision import Look

RESULT_ROLLOUTS = 2.0
"""Some rollout has a result in so many times the longest that one may take; turns alone are no progress after that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkClocks:
    """The longest that each kind of work may take, in seconds."""

    stage_s: float
    engine_start_s: float
    boot_s: float
    push_s: float


def work_clocks(config: RunConfig) -> WorkClocks:
    """Those of a run. The weights of a push are those of the model."""
    weights = config.model.path.glob("*.safetensors") if not config.engines.is_simulated else ()
    return WorkClocks(
        stage_s=config.training.stage_timeout_s,
        engine_start_s=config.engines.start_timeout_s,
        boot_s=max(config.rollout.boot_timeout_s, config.sandbox.pool.create_timeout_s),
        push_s=clocks.push_s(config, sum(path.stat().st_size for path in weights)),
    )


def stall_detector(config: RunConfig, now_s: float) -> StallDetector:
    """That of a run, from `now_s` (seconds of any clock)."""
    return StallDetector(now_s, config.service.stall_s, RESULT_ROLLOUTS * config.rollout.guard_s)


def signs_of(look: Look, longest: WorkClocks) -> ProgressSigns:
    """What one look at the parts says of progress."""
    results, on_the_way = _results(look), _on_the_way(look)
    return ProgressSigns(
        counts=results | on_the_way,
        on_the_way=on_the_way.keys(),
        under_way=_under_way(look, longest),
        version=None if look.learner is None else look.learner.version,
    )


def _results(look: Look) -> dict[str, int]:
    counts: dict[str, int] = {}
    if look.learner is not None:
        counts |= {"stages": look.learner.stages, "trained tokens": look.learner.tokens}
        if look.learner.version is not None:
            counts["steps"] = look.learner.version.step
    if look.dispatcher is not None:
        counts |= {"scored rollouts": look.dispatcher.scored, "answers": look.dispatcher.answered}
    return counts


def _on_the_way(look: Look) -> dict[str, int]:
    counts: dict[str, int] = {}
    if look.gateway is not None:
        counts |= {"turns": look.gateway.turns, "sampled tokens": look.gateway.sampled_tokens}
    for number, worker in enumerate(look.workers):
        if worker is not None and worker.ended_turns is not None:
            counts[f"turns of worker {number}"] = worker.ended_turns
    if look.judged_steps is not None:
        counts["judged steps"] = look.judged_steps
    return counts


def _under_way(look: Look, longest: WorkClocks) -> dict[str, float]:
    found: dict[str, float] = {}
    if look.learner is not None and look.learner.stage in ENDING_STAGES:
        found[f"learner {look.learner.stage}"] = longest.stage_s
    pushes = look.learner is not None and look.learner.stage is Stage.PUSHING
    if pushes or (look.gateway is not None and look.gateway.closed):
        found["push"] = longest.push_s
    if any(engine.state is EngineState.STARTING for engine in look.engines):
        found["engine start"] = longest.engine_start_s
    if look.pool is not None and look.pool.booting:
        found["boots and image work"] = longest.boot_s
    return found
