"""The Megatron learner: megatron-core on a GPU or on the CPU, behind the Learner protocol.

Invariants:
- One open learner per process; a second `open` raises LearnerAlreadyOpen.
- All torch work, from the import on, runs in one dedicated thread in the order it was asked for; the event loop never
  waits for it.
- A cancelled await abandons the answer, not the work: what runs is finished by its thread, what had not begun is
  dropped. `step` with the same batch again, `snapshot` and `save` return the answer that was abandoned.
- Importing this module does not import torch.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar, TypeVar

from headrace.policies.learner_errors import LearnerAlreadyOpen, LearnerNotOpen

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.buffer.types import Batch, CheckpointRef, StepReport
    from headrace.policies.learner import LearnerState, WeightsSnapshot
    from headrace.policies.learners.config import LearnerConfig
    from headrace.policies.learners.megatron_trainer import MegatronTrainer

Answer = TypeVar("Answer")


class MegatronLearner:
    """See `headrace.policies.learner.Learner` for the contract."""

    _process_slot: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, config: LearnerConfig) -> None:
        self._config = config
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")
        self._trainer: MegatronTrainer | None = None

    async def open(self, resume: CheckpointRef | None, *, epoch: int) -> LearnerState:
        """Raises LearnerAlreadyOpen, ModelInvalid or CheckpointUnreadable; after an error it may be called
        again."""
        return await self._in_thread(lambda: self._open(resume, epoch))

    async def step(self, batch: Batch) -> StepReport:
        """Raises LearnerNotOpen, NonFiniteRun, RowUnusable or RowOverBudget (`headrace.buffer.packing`)."""
        return await self._in_thread(lambda: self._opened().step(batch))

    async def snapshot(self) -> WeightsSnapshot:
        """The current weights in fp32. Raises LearnerNotOpen."""
        return await self._in_thread(lambda: self._opened().snapshot())

    async def save(self) -> CheckpointRef:
        """Raises LearnerNotOpen; an OSError when the disk refuses, then no checkpoint exists and the next save tries
        again."""
        return await self._in_thread(lambda: self._opened().save())

    async def close(self) -> None:
        """Finish what is under way, end the process group and free the process for another learner. Idempotent."""
        await self._in_thread(self._close)

    async def _in_thread(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _open(self, resume: CheckpointRef | None, epoch: int) -> LearnerState:
        if not self._process_slot.acquire(blocking=False):
            raise LearnerAlreadyOpen("this process already has an open learner: close it or spawn a second process")
        try:
            from headrace.policies.learners.megatron_trainer import open_trainer

            self._trainer = open_trainer(self._config, resume, epoch)
        except BaseException:
            self._process_slot.release()
            raise
        return self._trainer.state()

    def _opened(self) -> MegatronTrainer:
        if self._trainer is None:
            raise LearnerNotOpen("call open first; after close the learner has no model")
        return self._trainer

    def _close(self) -> None:
        if self._trainer is None:
            return
        self._trainer.close()
        self._trainer = None
        self._process_slot.release()
