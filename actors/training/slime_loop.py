"""The learner loop with slime, whose processes may send their weights to the engines themselves.

Invariants:
- The engine group asks for each part of such a push, during the loop's own push or for a late engine in between.
- If training processes fail in a push, this process ends, as after any failure of theirs. If that was the transport's
  fault, the run goes on with the next one (`PushDemotion`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import cast

from headrace.actors.record.files.metrics import PushDemotion
from headrace.actors.runtime.actors.recording import record
from headrace.actors.runtime.actors.runtime import end_actor
from headrace.actors.training.learner import ENDING_STAGES, LearnerLoop
from headrace.actors.training.slime_learner import SlimeLearner, SlimeTrainer, holds, trainer_of
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.cancellation import outlast
from headrace.policies.errors import EngineUnavailable, RankFailed
from headrace.policies.learner import WeightsSnapshot
from headrace.policies.push.contract import GroupMember

logger = logging.getLogger(__name__)


class SlimeLoop(LearnerLoop):
    """Actor that owns the slime learner; implements `LearnerActor`."""

    async def holds_weights(self, version: PolicyVersion) -> bool:
        """Return True if slime's processes can send the weights of this version now."""
        return self._stage not in ENDING_STAGES and holds(self._slime, version)

    async def connect_engines(self, version: PolicyVersion, engines: Sequence[GroupMember], timeout_s: float) -> None:
        """Connect slime's processes with these engines; see `LiveTrainer`."""
        await self._transfer(version, lambda trainer: trainer.connect(engines, self._engines, timeout_s))

    async def update_engines(self, version: PolicyVersion, timeout_s: float) -> None:
        """Have slime's processes send their weights; see `LiveTrainer`."""
        await self._transfer(version, lambda trainer: trainer.send(timeout_s))

    async def give_up_push(self, reason: str) -> None:
        """Make the call for which slime's processes are waited fail; they end."""
        logger.error("the push is given up: %s", reason)
        trainer_of(self._slime).group.interrupt(reason)

    async def _transfer(self, version: PolicyVersion, work: Callable[[SlimeTrainer], None]) -> None:
        running = asyncio.ensure_future(self._slime.send(version, work))
        # The engine group that asked may be gone: what becomes of the ranks counts even so.
        cancelled = await outlast(running)
        if isinstance(error := running.exception(), RankFailed):
            if not trainer_of(self._slime).group.lost_process:
                await self._demote("nccl", str(error))
            logger.error("this process ends, and its successor opens a new epoch", exc_info=error)
            end_actor()
        if cancelled is not None:
            raise cancelled
        running.result()

    async def _send(self, snapshot: WeightsSnapshot) -> None:
        try:
            await super()._send(snapshot)
        except EngineUnavailable as error:
            if not snapshot.transport:
                raise
            await self._demote(snapshot.transport, str(error))
            if snapshot.live:
                # What slime's processes push with is decided when they start.
                end_actor()
            await self._send(await self._slime.snapshot())

    async def _demote(self, failed: str, reason: str) -> None:
        transport = await asyncio.to_thread(trainer_of(self._slime).transports.demote, failed, reason)
        demotion = PushDemotion(transport=transport, version=str(self._version), reason=reason)
        logger.error("%s", demotion.line())
        await record(self._replay, demotion)

    @property
    def _slime(self) -> SlimeLearner:
        return cast("SlimeLearner", self._learner)
