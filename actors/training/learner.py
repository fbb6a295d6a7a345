"""The learner loop: take, step, commit, push, checkpoint.

Invariants:
- A new incarnation opens a new epoch from the newest complete checkpoint, and pushes its weights before it takes a
  batch. Engines may already serve weights that the learner will reproduce by repeating the undone steps; they keep
  those weights until it has caught up, and the tokens that they sample in the meantime are as fresh as before the
  crash.
- A step is committed durably before its weights are pushed. A checkpoint's directory is renamed before its ledger row
  is written.
- The next step runs while the weights of the last one are being sent, unless the trainer's own processes send them; at
  most one push runs at a time.
- A batch is never given back after its step has begun, unless the learner says that it trained nothing. If the learner
  refuses rows of known rollouts, which changes nothing, those rollouts are filtered and the batch is dissolved. Any
  other failed step is retried: in place after a refused row, otherwise by a new process. After `buffer.batch_tries`
  tries the run ends with an error that names the batch and the reason.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from opentelemetry import trace
from opentelemetry.trace import Link, Span
from pydantic import Field, field_validator

from headrace.actors.engines.group import EngineGroup
from headrace.actors.errors import ActorError, first_cause
from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.record.files.collapse import ADVICE, CollapseWatch
from headrace.actors.record.files.logprob_drift import mismatch_alarm
from headrace.actors.record.files.metrics import BatchPart, StepMetric
from headrace.actors.runtime.actors.nodes import this_node
from headrace.actors.runtime.actors.operations import until_back
from headrace.actors.runtime.actors.recording import record
from headrace.actors.runtime.actors.runtime import end_actor
from headrace.actors.runtime.simulated.engines import SimulatedEngineGroup
from headrace.actors.training.replay import Replay
from headrace.actors.training.slime_learner import SlimeLearner
from headrace.buffer.core.classification import stale_kv_tokens
from headrace.buffer.errors import BatchUntrainable, CheckpointLate, DataExhausted, ReplayError, StaleEpoch
from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.buffer.primitives.sections import Section
from headrace.buffer.primitives.single_flight import SingleFlight
from headrace.buffer.trajectories.types import Batch, BatchItem, BatchLease, CheckpointRef, GroupId, StepReport
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.errors import BatchReleased, LearnerNotOpen, NonFiniteRun, RankFailed, RowUnusable
from headrace.policies.learner import Learner, WeightsSnapshot
from headrace.policies.learners.checkpoints import set_aside, usable_checkpoint
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.learners.progress import trained_tokens
from headrace.policies.learners.simulated import SimulatedLearner, SimulatedLearnerConfig
from headrace.policies.learners.slime.arguments import SlimeTerms
from headrace.serve.tracing import span_names as names
from headrace.serve.tracing.tracing import attempt_context

logger = logging.getLogger(__name__)
tracer = trace.get_tracer("headrace.actors.training.learner")

TAKE_POLL_S = 5.0


class RewardControl(StrEnum):
    """Rewards that the learner trains on."""

    TRUE = "true"
    """The evaluator's rewards."""
    SHUFFLED = "shuffled"
    """The negative control: rewards and advantages are shuffled within the batch, so that nothing can be learned."""


class Stage(StrEnum):
    """Stage of the learner loop."""

    WAITING = "waiting"
    """Waiting for a batch, or for `run` to be called."""
    OPENING = "opening"
    """Loading a checkpoint."""
    STEPPING = "stepping"
    """Running an optimizer step and committing it."""
    PUSHING = "pushing"
    """Waiting for the previous push, or taking the snapshot of the next one."""
    SAVING = "saving"
    """Writing a checkpoint."""
    ABSENT = "absent"
    """Waiting for a trainer of the user to ask for a batch."""


ENDING_STAGES = frozenset({Stage.OPENING, Stage.STEPPING, Stage.SAVING})
"""Stages that end on their own, unless the learner hangs."""
_FRUITLESS_STAGES = frozenset({Stage.OPENING, Stage.ABSENT})
"""Stages whose end is no progress: a learner that dies repeatedly opens repeatedly."""


class LearnerLoopConfig(Section):
    """Config of the learner loop: its length and its checkpoints."""

    steps: int = Field(default=40, ge=1)
    """Optimizer updates of the whole run, counted over all epochs."""
    save_every: int = Field(default=10, ge=1)
    """Optimizer updates between checkpoints; the last one is always saved."""
    stage_timeout_s: float = Field(default=1800.0, gt=0)  # derived in a run, see `clocks`
    """A step, a save or an opening that takes longer is considered hung: the learner is killed, and a new one continues
    from the last checkpoint."""
    rewards: RewardControl = RewardControl.TRUE
    """`shuffled` is a negative control: rewards are shuffled over the batch, so that nothing can be learned."""

    @field_validator("rewards", mode="before")
    @classmethod
    def _word_true(cls, value: object) -> object:
        """Take the boolean that `rewards = true` is in TOML for the word."""
        return RewardControl.TRUE if value is True else value


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerStatus:
    """State of the learner. `idle_share` is the share of this incarnation's time spent waiting for a batch."""

    version: PolicyVersion | None
    last: StepReport | None
    idle_share: float
    tokens: int
    process_id: int
    stage: Stage = Stage.WAITING
    stage_s: float = 0.0
    """Seconds spent in this stage so far."""
    stages: int = 0
    """Number of stages that have ended, excluding openings and absences."""
    collapsed: tuple[str, ...] = ()
    """Families and sources of tasks that have collapsed, one line each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnd:
    """Outcome of the loop: `used_up` is true if the buffer has no further batch; otherwise all steps are done or the
    loop was drained."""

    version: PolicyVersion
    used_up: bool


@dataclass(slots=True)
class _Clock:
    """Time of the loop, in seconds: waiting for a batch, stepping and committing, waiting for the previous push."""

    idle_s: float = 0.0
    step_s: float = 0.0
    push_s: float = 0.0

    @property
    def idle_share(self) -> float:
        total = self.idle_s + self.step_s + self.push_s
        return self.idle_s / total if total else 0.0

    def since(self, earlier: _Clock) -> _Clock:
        """Return the time between an earlier reading and this one."""
        return _Clock(self.idle_s - earlier.idle_s, self.step_s - earlier.step_s, self.push_s - earlier.push_s)


def step_span(batch: Batch, run_id: str) -> AbstractContextManager[Span]:
    """Open the span of a step on this batch, which links to the root span of each member."""
    attributes: dict[str, str | int] = {names.STEP_BATCH: batch.lease.batch_id, names.STEP_ROLLOUTS: len(batch.items)}
    links = []
    for item in batch.items:
        named: dict[str, str | int] = {
            names.ROLLOUT_ID: item.rollout_id,
            names.ATTEMPT: item.attempt,
            names.STALENESS: item.staleness,
        }
        if item.group_batch:
            named[names.GROUP_BATCH] = item.group_batch
        links.append(Link(attempt_context(run_id, item.rollout_id, item.attempt), named))
    return tracer.start_as_current_span(names.STEP, attributes=attributes, links=links)


class LearnerLoop:
    """Actor that owns the only learner in its process."""

    def __init__(
        self,
        config: LearnerLoopConfig,
        learner: LearnerConfig | SlimeTerms | SimulatedLearnerConfig,
        *,
        replay: Replay,
        engines: EngineGroup | SimulatedEngineGroup,
        observing: ActorTelemetry,
        configuration: Mapping[str, Any] | None = None,
    ) -> None:
        """`configuration` is the resolved one of the run, which its checkpoints record."""
        self._config, self._learner_config, self._configuration = config, learner, configuration
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
        self._alarms = 0
        self._collapses = CollapseWatch()
        self._catching_up = False
        self._stepping: BatchLease | None = None
        self._draining = asyncio.Event()
        self._rest_s = 0.0
        self._at_rest = asyncio.Event()
        self._opening = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._stack.enter_context(self._observing.spans("learner"))
        self._learner = await self._make_learner()
        self._stack.push_async_callback(self._learner.close)
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._running: SingleFlight[TrainingEnd] = SingleFlight(tasks)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel_all()
        await self._stack.aclose()

    async def _make_learner(self) -> Learner:
        if isinstance(self._learner_config, SimulatedLearnerConfig):
            return SimulatedLearner(self._learner_config)
        for deviation in getattr(self._learner_config, "deviations", ()):  # slime has objectives of its own
            logger.warning("learner: %s", deviation)
        # In a thread: importing megatron-core takes seconds, and an actor that does not answer counts as hung.
        return await asyncio.to_thread(_make_learner, self._learner_config)

    async def run(self) -> TrainingEnd:
        """Train until `steps` updates are done, the data set has been used up, or `drain` has been called. A call made
        while another is running waits for the same outcome.

        Raises NonFiniteRun (too many consecutive skipped steps), LedgerBehind (the ledger lacks the
        checkpoint's batches), EngineUnavailable (no engine accepted a push), ActorGone.
        """
        try:
            return await self._running("run", self._train)
        except (StaleEpoch, RankFailed, BaseExceptionGroup) as error:
            cause = first_cause(error)
            if isinstance(cause, RankFailed):
                logger.exception("a training process failed: this process ends, and its successor opens a new epoch")
                end_actor()
            if not isinstance(cause, StaleEpoch):
                raise
            logger.warning("a newer learner was opened: this process ends, and its successor opens a new epoch")
            end_actor()

    async def _train(self) -> TrainingEnd:
        await self.open()
        assert self._version is not None
        used_up = False
        self._pushing: asyncio.Task[None] | None = None
        try:
            async with asyncio.TaskGroup() as pushes:
                while self._version.step < self._config.steps and not self._draining.is_set():
                    if self._rest_s:
                        await self._rest()
                        continue
                    start = _now()
                    try:
                        batch = await self._next_batch()
                    except DataExhausted:
                        used_up = True
                        break
                    self._clock.idle_s += _now() - start
                    if batch is None or (report := await self._step(batch)) is None:
                        continue
                    await self._push_behind(report, pushes)
                    if report.version.step % self._config.save_every == 0 and not report.skipped:
                        await self._save()
        except BaseExceptionGroup:
            # A step that another error interrupted, for example of a push, does not count as a try of its batch.
            if (lease := self._stepping) is not None:
                with suppress(ActorError, ReplayError):
                    await self._replay.step_interrupted(lease)
            raise
        finally:
            self._at_rest.set()
        await self._save()
        return TrainingEnd(version=self._version, used_up=used_up)

    async def _next_batch(self) -> Batch | None:
        """Return the next batch, or None if there is none yet. Raises DataExhausted."""
        assert self._version is not None
        return await until_back(partial(self._replay.take, self._version, timeout_s=TAKE_POLL_S))

    async def open(self) -> None:
        """Open a new epoch from the newest checkpoint and push its weights; does nothing if this incarnation has
        already done so."""
        async with self._opening:
            if self._version is not None:
                return
            checkpoint, version = await self._open_epoch()
            with self._in(Stage.OPENING):
                await self._learner.open(checkpoint, epoch=version.epoch)
            self._saved_at = version.step if checkpoint is not None else -1
            self._catching_up = await self._engines_are_ahead(version.epoch)
            if not self._catching_up and (snapshot := await self._learner.snapshot()) is not None:
                await self._send(snapshot)
            self._version = version

    async def drain(self) -> None:
        """Make `run` save and return after the current step."""
        self._draining.set()

    async def rest(self, node: str, seconds: float) -> bool:
        """If this process is on the node, which will end, save a checkpoint after the current step, return True, and
        take no batch for `seconds`: the end of the node would undo what is trained after the checkpoint."""
        if not node or this_node() != node:
            return False
        self._rest_s = seconds
        self._at_rest.clear()
        if "run" in self._running:
            await self._at_rest.wait()
        return True

    async def _rest(self) -> None:
        await self._save()
        self._at_rest.set()
        logger.info("the node is drained: no step for %.0f s", self._rest_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._rest_s):
                await self._draining.wait()
        self._rest_s = 0.0

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
            collapsed=self._collapses.lines(),
        )

    @contextmanager
    def _in(self, stage: Stage) -> Iterator[None]:
        self._stage, self._stage_since_s = stage, _now()
        try:
            yield
            self._stages += stage not in _FRUITLESS_STAGES
        finally:
            self._stage, self._stage_since_s = Stage.WAITING, _now()

    async def _open_epoch(self) -> tuple[CheckpointRef | None, PolicyVersion]:
        """Open an epoch at the newest checkpoint of the surviving path. Those that a replaced learner finished after it
        had been replaced are set aside."""
        while True:
            checkpoint = await self._newest_checkpoint()
            try:
                return checkpoint, await until_back(partial(self._replay.open_epoch, checkpoint))
            except CheckpointLate as error:
                assert checkpoint is not None
                aside = set_aside(Path(checkpoint.path), str(error))
                logger.error("%s; it is kept as %s", aside.reason, aside.kept_as)

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
                "checkpoint %s is damaged (%s): it is kept as %s, and the learner continues from the previous one, %s",
                damaged.name,
                damaged.reason,
                damaged.kept_as,
                "none" if usable.checkpoint is None else usable.checkpoint.version,
            )
        return usable.checkpoint

    async def _engines_are_ahead(self, epoch: int) -> bool:
        """Return whether the engines serve weights that this learner will reach by repeating steps. Also reports their
        version to the buffer, whose process may be new."""
        served = await until_back(self._engines.served_version)
        if served is None or not await until_back(lambda: self._replay.lies_ahead(served)):
            return False
        await until_back(lambda: self._replay.served(served, epoch=epoch))
        return True

    async def _step(self, batch: Batch) -> StepReport | None:
        """Train and commit a batch; None if the learner refused some rows. Raises BatchUntrainable, NonFiniteRun."""
        start = _now()
        with self._in(Stage.STEPPING), step_span(batch, self._observing.run_id) as span:
            self._stepping = batch.lease
            report = await self._tried(batch)
            if report is None:
                self._stepping = None
                return None
            span.set_attributes({names.STEP_NUMBER: report.version.step, names.STEP_VERSION: str(report.version)})
        await until_back(lambda: self._replay.commit(batch.lease, report))
        self._stepping = None
        self._clock.step_s += _now() - start
        self._version, self._last = report.version, report
        self._tokens += int(report.metrics.get("tokens", 0))
        step = _record_of(batch, report, self._clock.since(self._recorded), self._collapses)
        self._recorded = replace(self._clock)
        await record(self._replay, step)
        if not isinstance(self._learner_config, SimulatedLearnerConfig):
            alarm = mismatch_alarm(report, self._learner_config.mismatch_alarm)
            if alarm is not None:
                self._alarms += 1
                await record(self._replay, alarm)
                # Not for each of them: every step of a run may have one.
                if self._alarms.bit_count() == 1:
                    logger.error("%s", alarm.line())
        return report

    async def _tried(self, batch: Batch) -> StepReport | None:
        """Run the step, again if it failed. Returns None if the learner gave back the batch, or named rollouts that it
        cannot train: they are filtered, and the others can be batched again. Raises BatchUntrainable, NonFiniteRun."""
        trained = batch
        if self._config.rewards is RewardControl.SHUFFLED:
            trained = shuffle_rewards(batch, seed=self._learner_config.seed)
        while True:
            try:
                return await self._learner.step(trained)
            except (NonFiniteRun, LearnerNotOpen):
                # The batch did not cause these.
                raise
            except BatchReleased as error:
                logger.info("batch %s: %s", batch.lease.batch_id, error)
                await until_back(partial(self._replay.give_back, batch.lease, {}))
                return None
            except Exception as error:
                if isinstance(error, RowUnusable) and error.refused:
                    logger.error("batch %s is dissolved: the learner refused %s", batch.lease.batch_id, error)
                    await until_back(partial(self._replay.give_back, batch.lease, error.refused))
                    return None
                # A refused row changed nothing; after any other error the state of the process is uncertain.
                in_place = isinstance(error, RowUnusable)
                reason = f"{type(error).__name__}: {error} ({longest_row(batch)})"
                verdict = await until_back(partial(self._replay.step_failed, batch.lease, reason, again=in_place))
                if verdict:
                    # This try counts, so it must not be reported as interrupted.
                    self._stepping = None
                    raise BatchUntrainable(verdict) from error
                logger.exception("the step on batch %s failed and is tried again", batch.lease.batch_id)
                if not in_place:
                    end_actor()

    async def _push_behind(self, report: StepReport, pushes: asyncio.TaskGroup) -> None:
        """Start sending the new weights and return; waits only for the previous push."""
        if report.skipped:
            return
        start = _now()
        with self._in(Stage.PUSHING):
            if self._pushing is not None:
                await self._pushing
            self._clock.push_s += _now() - start
            if self._catching_up and await self._engines_are_ahead(report.version.epoch):
                return
            self._catching_up = False
            if (snapshot := await self._learner.snapshot()) is not None:
                self._pushing = pushes.create_task(self._send(snapshot))
                if snapshot.live:
                    await self._pushing

    async def _send(self, snapshot: WeightsSnapshot) -> None:
        in_flight = (await until_back(self._replay.status)).inventory.in_flight
        await until_back(lambda: self._engines.push(snapshot, rollouts_in_flight=in_flight))
        await until_back(lambda: self._replay.served(snapshot.version, epoch=snapshot.version.epoch))

    async def _save(self) -> None:
        assert self._version is not None
        if self._version.step == self._saved_at:
            return
        start = _now()
        with self._in(Stage.SAVING):
            checkpoint = await self._learner.save(self._configuration)
        await until_back(lambda: self._replay.checkpointed(checkpoint))
        self._saved_at = self._version.step
        self._clock.step_s += _now() - start


def _make_learner(config: LearnerConfig | SlimeTerms) -> Learner:
    if isinstance(config, SlimeTerms):
        return SlimeLearner(config)
    from headrace.policies.learners.one_thread import MegatronLearner

    if config.ranks == 1:
        return MegatronLearner(config)
    from headrace.actors.training.megatron_ranks import MegatronRanks

    return MegatronLearner(config, MegatronRanks)


def _now() -> float:
    """Return the time of the event loop, which may be virtual."""
    return asyncio.get_running_loop().time()


def longest_row(batch: Batch) -> str:
    """Describe the longest row of a batch, on which a step is most likely to run out of memory."""
    rows = [(len(row.tokens_T), item.rollout_id) for item in batch.items for row in item.trajectory.rows]
    tokens, largest = max(rows, key=lambda row: row[0])
    return f"the longest row has {tokens} tokens, in rollout {largest}"


def shuffle_rewards(batch: Batch, *, seed: int) -> Batch:
    """Return the batch with its rewards permuted over its items, together with the advantages of the rollout and of its
    turns; the permutation depends only on the seed and the batch."""
    givers = list(batch.items)
    random.Random(f"{seed} {batch.lease.batch_id}").shuffle(givers)
    items = tuple(
        replace(item, reward=giver.reward, advantage=giver.advantage, turn_advantages=giver.turn_advantages)
        for item, giver in zip(batch.items, givers, strict=True)
    )
    return replace(batch, items=items)


def _record_of(batch: Batch, report: StepReport, spent: _Clock, collapses: CollapseWatch) -> StepMetric:
    families, sources = parts_of(batch, lambda item: item.family), parts_of(batch, lambda item: item.source)
    parts = {name: asdict(part) for name, part in (families | sources).items()}
    for collapse in collapses.see(report.version.step, parts):
        logger.warning("%s: %s", collapse.line(), ADVICE)
    drift = report.drift
    return StepMetric(
        batch_id=batch.lease.batch_id,
        step=report.version.step,
        version=str(report.version),
        skipped=report.skipped,
        reward=sum(item.reward for item in batch.items) / len(batch.items),
        metrics=report.metrics,
        staleness=Counter(str(item.staleness) for item in batch.items),
        stale_kv_tokens=sum(stale_kv_tokens(item.trajectory) for item in batch.items),
        mismatch=None if drift is None else drift.mismatch,
        ratio_by_staleness={} if drift is None else {str(key): ratios for key, ratios in drift.by_staleness.items()},
        stale_kv=None if drift is None else drift.stale_kv,
        step_s=spent.step_s,
        idle_s=spent.idle_s,
        push_s=spent.push_s,
        sources=sources,
        families=families,
        collapsed=collapses.lines(),
    )


def parts_of(batch: Batch, name_of: Callable[[BatchItem], str]) -> dict[str, BatchPart]:
    """Return the parts of a batch by name, without what has none."""
    by_name: dict[str, list[BatchItem]] = {}
    for item in batch.items:
        by_name.setdefault(name_of(item), []).append(item)
    parts = {}
    for name, items in sorted((name, items) for name, items in by_name.items() if name):
        rewards: dict[GroupId, set[float]] = {}
        for item in items:
            rewards.setdefault(item.group_id, set()).add(item.reward)
        parts[name] = BatchPart(
            rollouts=len(items),
            rows=sum(len(item.trajectory.rows) for item in items),
            tokens=sum(map(trained_tokens, items)),
            share=len(items) / len(batch.items),
            reward=fmean(item.reward for item in items),
            staleness=fmean(item.staleness for item in items),
            invalid=sum(item.invalid for item in items),
            groups=len(rewards),
            flat_groups=sum(len(of) == 1 and max(of) <= 0 for of in rewards.values()),
        )
    return parts
