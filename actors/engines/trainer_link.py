"""Connection of a push with the learner whose processes perform it: calls to the learner, and the calls of its weight
updater to engines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from headrace.actors.errors import ActorError
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId
from headrace.policies.errors import PolicyError, PushError, SenderFailed
from headrace.policies.push.contract import Answering, GroupMember, LiveTrainer


class LearnerActor(LiveTrainer, Protocol):
    """Actor of a learner that sends its weights itself."""

    async def holds_weights(self, version: PolicyVersion) -> bool:
        """Return True if the weights are of this version and can be sent now."""


class TrainerLink:
    """Implementation of `Trainer` by the learner's actor; without one every call fails."""

    def __init__(self, learner: LearnerActor | None) -> None:
        self._learner = learner
        self.push: Answering | None = None

    async def holds(self, version: PolicyVersion) -> bool:
        """Return True if the learner can send the weights of this version now."""
        if self._learner is None:
            return False
        try:
            return await self._learner.holds_weights(version)
        except (ActorError, PolicyError):
            return False

    async def connect_engines(self, version: PolicyVersion, engines: Sequence[GroupMember], timeout_s: float) -> None:
        await self._asked(lambda learner: learner.connect_engines(version, engines, timeout_s))

    async def update_engines(self, version: PolicyVersion, timeout_s: float) -> None:
        await self._asked(lambda learner: learner.update_engines(version, timeout_s))

    async def give_up_push(self, reason: str) -> None:
        await self._asked(lambda learner: learner.give_up_push(reason))

    async def answer(self, engine_id: EngineId, method: str, arguments: Mapping[str, Any]) -> None:
        """Answer a call of the updater. Raises PushError."""
        if self.push is None:
            raise PushError(f"{method} of {engine_id}: no push of a trainer's live weights has begun")
        await self.push.answer(engine_id, method, arguments)

    async def _asked(self, call: Callable[[LearnerActor], Awaitable[None]]) -> None:
        if self._learner is None:
            raise SenderFailed("live weights need the learner that holds them, and there is none")
        try:
            await call(self._learner)
        except (ActorError, PolicyError) as error:
            raise SenderFailed(f"the learner: {type(error).__name__}: {error}") from error
