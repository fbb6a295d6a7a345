"""The learner loop of a trainer of the user, which calls it over the control API.

Invariants:
- A batch is taken from the buffer only while a trainer that holds the current version asks for one: without a trainer
  nothing becomes older than it has to.
- A trainer that comes back without its state is the end of this process: its successor opens a new epoch at the last
  checkpoint, and tells the trainer to load that.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any, Final, cast

import orjson

from headrace.actors.engines.group import EngineGroup
from headrace.actors.errors import ActorError
from headrace.actors.record.files.absences import Absences
from headrace.actors.runtime.actors.runtime import end_actor
from headrace.actors.training.external_learner import ExternalLearner, TrainerOrder
from headrace.actors.training.learner import LearnerLoop, LearnerStatus, Stage, TrainingEnd
from headrace.actors.training.trainer_calls import Commit, Release, Take, TrainerCall
from headrace.buffer.errors import ReplayError
from headrace.buffer.trajectories.types import Batch, BatchItem, RolloutId, StepReport
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.errors import TrainerRefused, TrainerStateLost
from headrace.policies.learner import Learner
from headrace.policies.learners.config import LearnerConfig

LEARNER: Final = "learner"
"""Name of the learner's actor in its run."""
LOOK_S: Final = 1.0
"""Interval at which a loop without a trainer looks whether the run is drained."""
UNSAVED_S: Final = 20.0
"""Time for a trainer to ask for an order when its state is to be saved because the run or the node ends."""
AWAY_S: Final = 10.0
"""A trainer that has been waited for longer is listed as absent."""
TRAINER: Final = "the user's trainer"
"""Name of the trainer among the absent parts of its run."""

logger = logging.getLogger(__name__)


class ExternalTrainerLoop(LearnerLoop):
    """Actor between the run and the trainer of the user."""

    async def call(self, call: TrainerCall) -> bytes:
        """Return the JSON answer to a call of the trainer. Raises LeaseLost, TrainerRefused, ModelInvalid."""
        if isinstance(call, Take):
            order = await self._take(call)
            return await asyncio.to_thread(_order_document, order)
        if isinstance(call, Commit):
            version = await self._trainer.commit(call.lease, call.metrics, skipped=call.skipped)
            return orjson.dumps({"version": str(version)})
        if isinstance(call, Release):
            refused = {RolloutId(rollout): reason for rollout, reason in call.refused.items()}
            await self._trainer.release(call.lease, call.reason, refused)
        else:
            version = PolicyVersion.parse(call.version)
            if call.path is None and not await cast("EngineGroup", self._engines).holding(version):
                raise TrainerRefused(
                    f"no engine reports version {version}: push the weights with weight_version {version} first, and "
                    "let the engines continue"
                )
            await self._trainer.weights(version, call.path)
        return b"{}"

    async def _take(self, call: Take) -> TrainerOrder:
        version = None if call.version is None else PolicyVersion.parse(call.version)
        try:
            return await self._trainer.take(version, timeout_s=call.timeout_s)
        except TrainerStateLost as error:
            logger.warning("%s", error)
            if (lease := self._stepping) is not None:
                # The death of a trainer is no failure of its batch.
                with suppress(ActorError, ReplayError):
                    await self._replay.step_interrupted(lease)
            end_actor()

    async def _make_learner(self) -> Learner:
        assert isinstance(self._learner_config, LearnerConfig)
        self._trainer = ExternalLearner(self._learner_config)
        return self._trainer

    async def _train(self) -> TrainingEnd:
        end = await super()._train()
        self._trainer.end()
        return end

    async def _next_batch(self) -> Batch | None:
        """See `LearnerLoop`. Waits for a trainer, unless the run is drained or this node is."""
        if not await self._trainer.wanted(0.0):
            with self._in(Stage.ABSENT):
                while not await self._trainer.wanted(LOOK_S):
                    if self._is_to_end:
                        return None
        return await super()._next_batch()

    async def _push_behind(self, report: StepReport, pushes: asyncio.TaskGroup) -> None:
        if not report.skipped:
            with self._in(Stage.ABSENT):
                await self._trainer.named()
        await super()._push_behind(report, pushes)

    async def _save(self) -> None:
        """Let the trainer save, if there is something to save. If the run or this node is to end and no trainer asks
        for an order, the steps since the last checkpoint are undone when the run continues."""
        if not self._trainer.has_unsaved:
            return
        with self._in(Stage.ABSENT):
            began_s = asyncio.get_running_loop().time()
            while not await self._trainer.wanted(LOOK_S):
                if self._is_to_end and asyncio.get_running_loop().time() - began_s > UNSAVED_S:
                    logger.error(
                        "no trainer saves %s: the steps since the last checkpoint will be undone", self._version
                    )
                    return
        await super()._save()

    @property
    def _is_to_end(self) -> bool:
        return self._draining.is_set() or bool(self._rest_s)

    async def _step(self, batch: Batch) -> StepReport | None:
        report = await super()._step(batch)
        if report is not None:
            self._trainer.durable()
        return report

    async def _engines_are_ahead(self, epoch: int) -> bool:
        """Return False: a trainer need not repeat undone steps exactly."""
        return False


def note_trainer(absences: Absences, learner: LearnerStatus | None) -> None:
    """List a trainer that does not ask for batches among the absent parts of its run."""
    if learner is not None and learner.stage is Stage.ABSENT and learner.stage_s > AWAY_S:
        absences.lost(TRAINER)
    else:
        absences.back(TRAINER)


def _order_document(order: TrainerOrder) -> bytes:
    """Return the answer to `take`. The arrays of a row are aligned: `tokens`, `loss_mask` (true where sampled) and
    `logprobs` of the behaviour policy; `versions` are `[start, end, version, stale_kv]`; `advantages` are null unless
    turns have advantages of their own."""
    document: dict[str, Any] = {
        "order": order.order.value,
        "version": None if order.version is None else str(order.version),
        "directory": None if order.directory is None else str(order.directory),
    }
    if order.batch is not None:
        batch = order.batch
        items = [_item_document(item) for item in batch.items]
        document |= {"lease": order.lease, "batch": {"batch_id": batch.lease.batch_id, "items": items}}
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def _item_document(item: BatchItem) -> dict[str, Any]:
    return {
        "rollout_id": item.rollout_id,
        "group_id": item.group_id,
        "attempt": item.attempt,
        "reward": item.reward,
        "advantage": item.advantage,
        "staleness": item.staleness,
        "temperature": item.trajectory.temperature,
        "rows": [
            {
                "tokens": row.tokens_T,
                "loss_mask": row.loss_mask_T,
                "logprobs": row.logprobs_T,
                "versions": [span.to_json() for span in row.versions],
                "advantages": item.row_advantages(number),
            }
            for number, row in enumerate(item.trajectory.rows)
        ],
    }
