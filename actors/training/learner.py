"""The learner loop: take, step, commit, push, checkpoint.

Invariants:
- A new incarnation opens a new epoch from the newest complete checkpoint, and pushes its weights before it takes
  anything. Engines that serve weights which the undone steps, trained again, lead to keep them until the learner is
  there: what they sample meanwhile is as fresh as before the crash.
- Order of a step: commit durable, then push. Order of a checkpoint: directory renamed, then the ledger row.
- The next step runs while the weights of the last one are sent; at most one push is under way.
- A batch is never given back after its step began. A step that fails is tried again, a refused row in place, all else
  by a new process; after `buffer.batch_tries` the run ends with the batch and the reason.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Self

from opentelemetry import trace
from pydantic import BaseModel, ConfigDict, Field

from headrace.actors.errors import ActorError, first_cause
from headrace.actors.record.metrics import StepMetric
from headrace.actors.runtime.retry import until_back
from headrace.actors.runtime.runtime import end_actor
from headrace.buffer.core.classification import stale_kv_tokens
from headrace.buffer.errors import BatchUntrainable, DataExhausted, ReplayError, StaleEpoch
from headrace.buffer.packing import RowOverBudget
from headrace.buffer.primitives.single_flight import SingleFlight
from headrace.policies.learner_errors import LearnerNotOpen, NonFiniteRun, RowUnusable
from headrace.policies.learners.checkpoints import usable_checkpoint
from headrace.policies.learners.simulated import SimulatedLearner, SimulatedLearnerConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from types import TracebackType

    from headrace.actors.engine_group.group import EngineGroup
    from headrace.actors.record.actor_telemetry import ActorTelemetry
    from headrace.actors.simulated.engines import SimulatedEngineGroup
    from headrace.actors.training.replay import Replay
    from headrace.buffer.types import Batch, BatchLease, CheckpointRef, StepReport
    from headrace.buffer.versions import PolicyVersion
    from headrace.policies.learner import Learner, WeightsSnapshot
    from headrace.policies.learners.config import LearnerConfig

logger = logging.getLogger(__name__)
tracer = trace.get_tracer("headrace.actors.training.learner")

TAKE_POLL_S = 5.0


class RewardControl(StrEnum):
    """What the learner is told about rewards."""

    TRUE = "true"
    """The evaluator's rewards."""
    SHUFFLED = "shuffled"
    """The negative control: rewards and advantages are shuffled over the batch; nothing must be learned."""


class Stage(StrEnum):
    """What the learner is doing."""

    WAITING = "waiting"
    """For a batch, or for being run."""
    OPENING = "opening"
    """Loading a checkpoint."""
    STEPPING = "stepping"
    """An optimizer step, with its commit."""
    PUSHING = "pushing"
    """Waiting for the push before, or taking the snapshot of the next one."""
    SAVING = "saving"
    """Writing a checkpoint."""


ENDING_STAGES = frozenset({Stage.OPENING, Stage.STEPPING, Stage.SAVING})
"""Stages that end by themselves, unless the learner hangs."""


class LearnerLoopConfig(BaseModel):
    """How long the loop runs and how often it saves."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(default=40, ge=1)
    """Optimizer updates of the whole run, counted over all epochs."""
    save_every: int = Field(default=10, ge=1)
    """Optimizer updates between checkpoints; the last one is always saved."""
    stage_timeout_s: float = Field(default=1800.0, gt=0)  # derived in a run, see `clocks`
    """A step, a save or an opening that takes longer is hung: the learner is killed, and a new one goes on from the
    last checkpoint."""
    rewards: RewardControl = RewardControl.TRUE
    """`shuffled` is the negative control of `scripts/bench control`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerStatus:
    """`idle_share` is the share of the loop's time spent waiting for a batch, of this incarnation."""

    version: PolicyVersion | None
    last: StepReport | None
    idle_share: float
    tokens: int
    process_id: int
    stage: Stage = Stage.WAITING
    stage_s: float = 0.0
    """Seconds in this stage so far."""
    stages: int = 0
    """Stages that ended, openings left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnd:
    """How the loop ended: `used_up` when the buffer has no further batch, else with all steps done or drained."""

    version: PolicyVersion
    used_up: bool


@dataclass(slots=True)
class _Clock:
    """Where the loop's time went, in seconds: waiting for a batch, stepping and committing, waiting for the push
    before."""

    idle_s: float = 0.0
    step_s: float = 0.0
    push_s: float = 0.0

    @property
    def idle_share(self) -> float:
        total = self.idle_s + self.step_s + self.push_s
        return self.idle_s / total if total else 0.0

    def since(self, earlier: _Clock) -> _Clock:
        """The time between an earlier reading and this one."""
        return _Clock(self.idle_s - earlier.idle_s, self.step_s - earlier.step_s, self.push_s - earlier.push_s)


class LearnerLoop:
    """Owns the one learner of its process."""

    def __init__(
        self,
        config: LearnerLoopConfig,
        learner: LearnerConfig | SimulatedLearnerConfig,
        *,
        replay: Replay,
        engines: EngineGroup | SimulatedEngineGroup,
        observing: ActorTelemetry,
    ) -> None:
        self._config = config
        self._learner_config = learner
        self._replay = replay
        self._engines = engines
        self._observing = observing
        self._stack = AsyncExitStack()
        self._clock, self._recorded = _Clock(), _Clock()
        self._version: PolicyVersion | None = None
        self._last: StepReport | None = None
        self._tokens = 0
        self._stage, self._stage_since_s = Stage.WAITING, 0.0
        self._stages = 0
        self._on_the_way_back = False
        self._stepping: BatchLease | None = None
        self._draining = asyncio.Event()
        self._opening = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._stack.enter_context(self._observing.spans("learner"))
        self._metrics = self._observing.metrics()
        self._learner = await _make_learner(self._learner_config)
        self._stack.push_async_callback(self._learner.close)
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._running: SingleFlight[TrainingEnd] = SingleFlight(tasks)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.cancel_all()
        await self._stack.aclose()

    async def run(self) -> TrainingEnd:
        """Train until `steps` updates are done, the data set is used up, or `drain` was called. A call that comes while
        another runs waits for the same end.

        Raises NonFiniteRun (K skipped steps in a row), LedgerBehind (the ledger does not know the checkpoint's
        batches), EngineUnavailable (no engine took a push), ActorGone.
        """
        try:
            return await self._running("run", self._train)
        except (StaleEpoch, BaseExceptionGroup) as error:
            if not isinstance(first_cause(error), StaleEpoch):
                raise
            logger.warning("a newer learner was opened: this one ends, and the next opens a newer one")
            end_actor()

    async def _train(self) -> TrainingEnd:
        await self.open()
        assert self._version is not None
        used_up = False
        self._pushing: asyncio.Task[None] | None = None
        async with self._excusing_batch(), asyncio.TaskGroup() as pushes:
            while self._version.step < self._config.steps and not self._draining.is_set():
                try:
                    batch = await self._take()
                except DataExhausted:
                    used_up = True
                    break
                if batch is None:
                    continue
                report = await self._step(batch)
                await self._push_behind(report, pushes)
                if report.version.step % self._config.save_every == 0 and not report.skipped:
                    await self._save()
        await self._save()
        return TrainingEnd(version=self._version, used_up=used_up)

    async def open(self) -> None:
        """Open a new epoch from the newest checkpoint and push its weights; nothing when this incarnation has done
        so."""
        async with self._opening:
            if self._version is None:
                self._version = await self._open()

    async def drain(self) -> None:
        """End `run` after the step under way: save and return."""
        self._draining.set()

    async def status(self) -> LearnerStatus:
        return LearnerStatus(
            version=self._version,
            last=self._last,
            idle_share=self._clock.idle_share,
            tokens=self._tokens,
            process_id=os.getpid(),
            stage=self._stage,
            stage_s=_now() - self._stage_since_s,
            stages=self._stages,
        )

    @contextmanager
    def _in(self, stage: Stage) -> Iterator[None]:
        self._stage, self._stage_since_s = stage, _now()
        try:
            yield
            # A learner that dies again and again opens again and again.
            self._stages += stage is not Stage.OPENING
        finally:
            self._stage, self._stage_since_s = Stage.WAITING, _now()

    async def _open(self) -> PolicyVersion:
        checkpoint = await self._newest_checkpoint()
        version = await until_back(lambda: self._replay.open_epoch(checkpoint))
        with self._in(Stage.OPENING):
            await self._learner.open(checkpoint, epoch=version.epoch)
        self._saved_at = version.step if checkpoint is not None else -1
        self._on_the_way_back = await self._engines_are_ahead()
        if not self._on_the_way_back:
            await self._send(await self._learner.snapshot())
        return version

    async def _newest_checkpoint(self) -> CheckpointRef | None:
        folder = self._learner_config.checkpoint_dir
        if folder is None:
            return None
        if isinstance(self._learner_config, SimulatedLearnerConfig):
            usable = usable_checkpoint(folder)
        else:
            # In a thread: it reads all of the files.
            usable = await asyncio.to_thread(usable_checkpoint, folder)
        for damaged in usable.set_aside:
            logger.error(
                "checkpoint %s is damaged (%s): it is kept as %s, and the learner goes on from the one before, %s",
                damaged.name,
                damaged.reason,
                damaged.kept_as,
                "none" if usable.checkpoint is None else usable.checkpoint.version,
            )
        return usable.checkpoint

    async def _engines_are_ahead(self) -> bool:
        """Whether the engines serve what this learner is on its way back to. The buffer is told: it may be new."""
        served = await until_back(self._engines.served_version)
        if served is None or not await until_back(lambda: self._replay.lies_ahead(served)):
            return False
        await until_back(lambda: self._replay.served(served))
        return True

    async def _take(self) -> Batch | None:
        version = self._version
        assert version is not None
        start = _now()
        batch = await until_back(lambda: self._replay.take(version, timeout_s=TAKE_POLL_S))
        self._clock.idle_s += _now() - start
        return batch

    async def _step(self, batch: Batch) -> StepReport:
        start = _now()
        with self._in(Stage.STEPPING), tracer.start_as_current_span("step"):
            self._stepping = batch.lease
            report = await self._tried(batch)
        await until_back(lambda: self._replay.commit(batch.lease, report))
        self._stepping = None
        self._clock.step_s += _now() - start
        self._version, self._last = report.version, report
        self._tokens += int(report.metrics.get("tokens", 0))
        self._metrics.append(_record_of(batch, report, self._clock.since(self._recorded)))
        self._recorded = replace(self._clock)
        return report

    async def _tried(self, batch: Batch) -> StepReport:
        """The step, again if the learner refused a row. Raises BatchUntrainable, NonFiniteRun."""
        while True:
            try:
                return await self._learner.step(self._controlled(batch))
            except (NonFiniteRun, LearnerNotOpen):
                # No fault of this batch.
                raise
            except Exception as error:
                # Nothing was changed by a row that was refused; after anything else the process is in doubt.
                in_place = isinstance(error, RowUnusable | RowOverBudget)
                reason = f"{type(error).__name__}: {error} ({_largest_row(batch)})"
                verdict = await self._failed(batch.lease, reason, again=in_place)
                if verdict:
                    raise BatchUntrainable(verdict) from error
                logger.exception("the step on batch %s failed and is tried again", batch.lease.batch_id)
                if not in_place:
                    end_actor()

    async def _failed(self, lease: BatchLease, reason: str, *, again: bool) -> str:
        """Have the failure of a step kept; why the batch is not tried again, empty when it is."""
        verdict = await until_back(lambda: self._replay.step_failed(lease, reason, again=again))
        if verdict:
            # It counts: this try is not excused.
            self._stepping = None
        return verdict

    @asynccontextmanager
    async def _excusing_batch(self) -> AsyncIterator[None]:
        """A step that another error broke off, for example of a push, does not count as a try of its batch."""
        try:
            yield
        except BaseExceptionGroup:
            if (lease := self._stepping) is not None:
                with suppress(ActorError, ReplayError):
                    await self._replay.step_interrupted(lease)
            raise

    def _controlled(self, batch: Batch) -> Batch:
        if self._config.rewards is RewardControl.TRUE:
            return batch
        return shuffle_rewards(batch, seed=self._learner_config.seed)

    async def _push_behind(self, report: StepReport, pushes: asyncio.TaskGroup) -> None:
        """Start sending the new weights and return; waits only for the push before."""
        if report.skipped:
            return
        start = _now()
        with self._in(Stage.PUSHING):
            if self._pushing is not None:
                await self._pushing
            self._clock.push_s += _now() - start
            if self._on_the_way_back and await self._engines_are_ahead():
                return
            self._on_the_way_back = False
            self._pushing = pushes.create_task(self._send(await self._learner.snapshot()))

    async def _send(self, snapshot: WeightsSnapshot) -> None:
        in_flight = (await until_back(self._replay.status)).inventory.in_flight
        await until_back(lambda: self._engines.push(snapshot, rollouts_in_flight=in_flight))
        await until_back(lambda: self._replay.served(snapshot.version))

    async def _save(self) -> None:
        assert self._version is not None
        if self._version.step == self._saved_at:
            return
        start = _now()
        with self._in(Stage.SAVING):
            checkpoint = await self._learner.save()
        await until_back(lambda: self._replay.checkpointed(checkpoint))
        self._saved_at = self._version.step
        self._clock.step_s += _now() - start


async def _make_learner(config: LearnerConfig | SimulatedLearnerConfig) -> Learner:
    if isinstance(config, SimulatedLearnerConfig):
        return SimulatedLearner(config)
    # In a thread: importing megatron-core takes seconds, and who does not answer meanwhile counts as hung.
    return await asyncio.to_thread(_make_megatron_learner, config)


def _make_megatron_learner(config: LearnerConfig) -> Learner:
    from headrace.policies.learners.megatron import MegatronLearner

    return MegatronLearner(config)


def _now() -> float:
    """Of the event loop, which may be one of virtual time."""
    return asyncio.get_running_loop().time()


def _largest_row(batch: Batch) -> str:
    """What a step is most likely to have failed on for want of memory."""
    sizes = {item.rollout_id: max(len(row.tokens_T) for row in item.trajectory.rows) for item in batch.items}
    largest = max(sizes, key=lambda rollout_id: sizes[rollout_id])
    return f"the longest row has {sizes[largest]} tokens, of {largest}"


def shuffle_rewards(batch: Batch, *, seed: int) -> Batch:
    """The batch with (reward, advantage) pairs permuted over its items; the same permutation for the same seed and
    batch."""
    pairs = [(item.reward, item.advantage) for item in batch.items]
    random.Random(f"{seed} {batch.lease.batch_id}").shuffle(pairs)
    items = tuple(
        replace(item, reward=reward, advantage=advantage)
        for item, (reward, advantage) in zip(batch.items, pairs, strict=True)
    )
    return replace(batch, items=items)


def _record_of(batch: Batch, report: StepReport, spent: _Clock) -> StepMetric:
    return StepMetric(
        batch_id=batch.lease.batch_id,
        step=report.version.step,
        version=str(report.version),
        skipped=report.skipped,
        reward=sum(item.reward for item in batch.items) / len(batch.items),
        metrics=report.metrics,
        staleness=Counter(str(item.staleness) for item in batch.items),
        stale_kv_tokens=sum(stale_kv_tokens(item.trajectory) for item in batch.items),
        step_s=spent.step_s,
        idle_s=spent.idle_s,
        push_s=spent.push_s,
    )
