"""Megatron learner: megatron-core on a GPU or on the CPU, behind the Learner protocol.

Invariants:
- A process has one open learner; a second `open` raises LearnerAlreadyOpen.
- All torch work, including the import, runs in one dedicated thread in the order of the calls, and never blocks the
  event loop. With several ranks it runs in their processes, and the thread waits for them.
- A cancelled call loses its result, but the thread finishes any work that has begun. A later `step` with the same
  batch, `snapshot` or `save` then returns that result.
- Importing this module does not import torch.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar, TypeVar

from headrace.policies.errors import LearnerAlreadyOpen, LearnerNotOpen

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.buffer.types import Batch, CheckpointRef, StepReport
    from headrace.policies.learner import LearnerState, WeightsSnapshot
    from headrace.policies.learners.config import LearnerConfig
    from headrace.policies.learners.megatron_trainer import MegatronTrainer
    from headrace.policies.learners.ranks.contract import StartRanks

Answer = TypeVar("Answer")


class MegatronLearner:
    """Implementation of `headrace.policies.learner.Learner`."""

    _process_slot: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, config: LearnerConfig, start: StartRanks | None = None) -> None:
        """`start` starts the learner's ranks; without it there is one, in this process."""
        self._config, self._start = config, start
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")
        self._trainer: MegatronTrainer | None = None

    async def open(self, resume: CheckpointRef | None, *, epoch: int) -> LearnerState:
        """See `Learner.open`. Raises LearnerAlreadyOpen, ModelInvalid, CheckpointUnreadable or RankFailed; after an
        error it may be called again."""

        def work() -> LearnerState:
            if not self._process_slot.acquire(blocking=False):
                raise LearnerAlreadyOpen("this process already has an open learner: close it or spawn a second process")
            try:
                from headrace.policies.learners.megatron_trainer import open_trainer

                self._trainer = open_trainer(self._config, resume, epoch, start=self._start)
            except BaseException:
                self._process_slot.release()
                raise
            return self._trainer.progress.state

        return await self._in_thread(work)

    async def step(self, batch: Batch) -> StepReport:
        """See `Learner.step`. Raises LearnerNotOpen, NonFiniteRun, RowUnusable or RankFailed."""
        return await self._in_thread(lambda: self._opened().step(batch))

    async def snapshot(self) -> WeightsSnapshot:
        """Return the current weights in `dtype`. Raises LearnerNotOpen or RankFailed."""
        return await self._in_thread(lambda: self._opened().snapshot())

    async def save(self) -> CheckpointRef:
        """See `Learner.save`. Raises LearnerNotOpen, RankFailed, or OSError. In the last case no checkpoint is left
        behind, and the next save tries again, unless the error ended several ranks."""
        return await self._in_thread(lambda: self._opened().save())

    async def close(self) -> None:
        """Finish running work, or kill the ranks if there are several, and allow another learner in this process.
        Idempotent."""
        if self._trainer is not None:
            self._trainer.interrupt()
        await self._in_thread(self._close)

    async def _in_thread(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _opened(self) -> MegatronTrainer:
        if self._trainer is None:
            raise LearnerNotOpen("the learner is not open: call open() first (close() unloads the model)")
        return self._trainer

    def _close(self) -> None:
        if self._trainer is None:
            return
        self._trainer.close()
        self._trainer = None
        self._process_slot.release()
