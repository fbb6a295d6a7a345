"""A learner whose work runs in one thread: the `Learner` protocol around a blocking trainer.

Invariants:
- A process has one open learner; a second `open` raises LearnerAlreadyOpen.
- All work, including the import of torch, runs in one dedicated thread in the order of the calls, and never blocks the
  event loop.
- A cancelled call loses its result, but the thread finishes any work that has begun. A later `step` with the same
  batch, `snapshot` or `save` then returns that result.
- Importing this module does not import torch.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from headrace.buffer.trajectories.types import Batch, CheckpointRef, StepReport
from headrace.policies.errors import LearnerAlreadyOpen, LearnerNotOpen
from headrace.policies.learner import LearnerState, WeightsSnapshot
from headrace.policies.learners.progress import LearnerProgress
from headrace.policies.learners.ranks.contract import StartRanks

if TYPE_CHECKING:
    from headrace.policies.learners.config import LearnerConfig
    from headrace.policies.learners.megatron_trainer import MegatronTrainer

Answer = TypeVar("Answer")


class Trainer(Protocol):
    """Blocking part of a learner, for one incarnation. Its methods are called from one thread, `interrupt` from any."""

    @property
    def progress(self) -> LearnerProgress: ...

    def step(self, batch: Batch) -> StepReport:
        """See `Learner.step`. A repeated call with the last batch returns the same report."""

    def snapshot(self) -> WeightsSnapshot: ...

    def save(self, configuration: Mapping[str, Any] | None = None) -> CheckpointRef: ...

    def interrupt(self) -> None:
        """Make work of other processes, for which the thread waits, fail soon."""

    def close(self) -> None: ...


class OneThreadLearner:
    """Implementation of `headrace.policies.learner.Learner`. `start` opens a trainer, from a checkpoint or None and the
    epoch; after an error it may be called again."""

    _process_slot: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, start: Callable[[CheckpointRef | None, int], Trainer]) -> None:
        self._start = start
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")
        self._trainer: Trainer | None = None

    async def open(self, resume: CheckpointRef | None, *, epoch: int) -> LearnerState:
        """See `Learner.open`. Raises LearnerAlreadyOpen, ModelInvalid, LearnerSettingsInvalid, CheckpointUnreadable or
        RankFailed; after an error it may be called again."""

        def work() -> LearnerState:
            if not self._process_slot.acquire(blocking=False):
                raise LearnerAlreadyOpen("this process already has an open learner: close it or spawn a second process")
            try:
                self._trainer = self._start(resume, epoch)
            except BaseException:
                self._process_slot.release()
                raise
            return self._trainer.progress.state

        return await self._in_thread(work)

    async def step(self, batch: Batch) -> StepReport:
        """See `Learner.step`. Raises LearnerNotOpen, NonFiniteRun, RowUnusable or RankFailed."""
        return await self._in_thread(lambda: self._opened().step(batch))

    async def snapshot(self) -> WeightsSnapshot:
        """Return the current weights. Raises LearnerNotOpen or RankFailed."""
        return await self._in_thread(lambda: self._opened().snapshot())

    async def save(self, configuration: Mapping[str, Any] | None = None) -> CheckpointRef:
        """See `Learner.save`. Raises LearnerNotOpen, RankFailed, or OSError. In the last case no checkpoint is left
        behind, and the next save tries again, unless the error ended training processes."""
        return await self._in_thread(lambda: self._opened().save(configuration))

    async def close(self) -> None:
        """Finish running work, or kill the training processes if there are any, and allow another learner in this
        process. Idempotent."""
        if self._trainer is not None:
            self._trainer.interrupt()
        await self._in_thread(self._close)

    async def _in_thread(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _opened(self) -> Trainer:
        if self._trainer is None:
            raise LearnerNotOpen("the learner is not open: call open() first (close() unloads the model)")
        return self._trainer

    def _close(self) -> None:
        if self._trainer is None:
            return
        self._trainer.close()
        self._trainer = None
        self._process_slot.release()


class MegatronLearner(OneThreadLearner):
    """Learner by megatron-core, on a GPU or on the CPU. With several ranks the work runs in their processes, and
    the learner's thread waits for them."""

    def __init__(self, config: LearnerConfig, start: StartRanks | None = None) -> None:
        """`start` starts the learner's ranks; without it there is one, in this process."""

        def open_it(resume: CheckpointRef | None, epoch: int) -> MegatronTrainer:
            from headrace.policies.learners.megatron_trainer import open_trainer

            return open_trainer(config, resume, epoch, start=start)

        super().__init__(open_it)
