"""What a run does with a node that is drained: it takes its engines there out of service, its rollouts end there or are
issued elsewhere, and a learner there saves a checkpoint.

Invariants:
- Nothing is lost: a rollout that has not ended in time is cancelled, which is no failure, and issued again.
- Actors stay where they are. Whoever drains the node ends it afterwards, and Ray starts them elsewhere.
- A learner on the node rests for a while after its checkpoint, so that the end of the node undoes no step.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from headrace.actors.runtime.actors.operations import until_back

if TYPE_CHECKING:
    from headrace.actors.engines.group import EngineGroup
    from headrace.actors.rollouts.dispatcher import Dispatcher, RolloutsLeft
    from headrace.actors.training.learner import LearnerLoop

REST_S: Final = 90.0
"""Time for which a learner takes no batch after the drain: longer than the 30 s that Ray gives a node after SIGTERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLeft:
    """What a run had on a drained node: its engines by name, its workers, what became of their rollouts, and whether
    the learner is there."""

    engines: tuple[str, ...] = ()
    workers: int = 0
    ended: int = 0
    cancelled: int = 0
    learner: bool = False

    @property
    def is_nothing(self) -> bool:
        return not (self.engines or self.workers or self.learner)

    def line(self) -> str:
        """Describe it in one line."""
        rollouts = f"{self.ended} rollouts ended, {self.cancelled} are issued elsewhere"
        parts = [f"{self.workers} workers there get no orders, {rollouts}"]
        parts += [f"engines out of service: {', '.join(self.engines)}"] if self.engines else []
        parts += ["the learner has saved and rests"] if self.learner else []
        return "; ".join(parts)


async def leave_node(
    node: str,
    host: str,
    *,
    dispatcher: Dispatcher,
    engines: EngineGroup | None,
    learner: LearnerLoop | None,
    deadline_s: float,
) -> RunLeft:
    """Leave a node (its Ray id and address); return once no rollout runs there. Actors that are restarted meanwhile are
    asked again, within what is left of the time. Simulated engines are on no node: they are None."""
    ends_s = asyncio.get_running_loop().time() + deadline_s

    async def leave() -> RolloutsLeft:
        left_s = max(0.0, ends_s - asyncio.get_running_loop().time())
        return await dispatcher.leave_node(node, deadline_s=left_s)

    async with asyncio.TaskGroup() as leaving:
        rollouts = leaving.create_task(until_back(leave))
        vacating = engines and leaving.create_task(until_back(partial(engines.vacate, node, host)))
        resting = learner and leaving.create_task(until_back(partial(learner.rest, node, REST_S + deadline_s)))
    left = rollouts.result()
    return RunLeft(
        engines=tuple(vacating.result()) if vacating else (),
        workers=left.workers,
        ended=left.ended,
        cancelled=left.cancelled,
        learner=bool(resting and resting.result()),
    )
