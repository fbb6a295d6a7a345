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
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from headrace.policies.learner_errors import LearnerAlreadyOpen, LearnerNotOpen
from headrace.policies.simulated import SimulatedLearnerConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.buffer.types import Batch, CheckpointRef, StepReport
    from headrace.policies.learner import LearnerState, WeightsSnapshot
    from headrace.policies.megatron_trainer import MegatronTrainer

Answer = TypeVar("Answer")


class LearnerConfig(BaseModel):
    """Settings of `MegatronLearner`. The defaults are those of the quickstart's 333k-parameter policy."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_dir: Path
    """Hugging Face directory of the start policy: config.json (Qwen3), model.safetensors, tokenizer files."""
    checkpoint_dir: Path
    """Where `<epoch>.<step>/` directories are written; belongs to this learner."""
    snapshot_dir: Path
    """Where weights for the sender are written; holds the last two."""
    learning_rate: float = Field(default=5e-4, gt=0)
    """AdamW's, constant after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises linearly."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled decay."""
    clip_grad_norm: float = Field(default=1.0, gt=0)
    """Largest norm of the whole gradient."""
    eps_low: float = Field(default=0.2, gt=0, le=1)
    """A token with negative advantage stops training once current / behaviour is below 1 - eps_low."""
    eps_high: float = Field(default=0.28, gt=0)
    """A token with positive advantage stops training once current / behaviour is above 1 + eps_high."""
    weight_cap: float = Field(default=2.0, gt=0)
    """Largest importance weight of a token."""
    token_budget: int = Field(default=16384, gt=0)
    """Most padded tokens (rows x longest row) of a micro-batch."""
    max_skipped_in_a_row: int = Field(default=3, gt=0)
    """Steps in a row with a non-finite gradient that end the run."""
    keep_checkpoints: int = Field(default=3, gt=0)
    """Newest checkpoints that are kept."""
    seed: int = 0
    """Of torch and Megatron. The model has no dropout, so steps do not depend on it."""
    kind: Literal["megatron", "simulated"] = "megatron"
    """`simulated` takes time instead of computing; of the keys above it knows none."""
    simulated: SimulatedLearnerConfig = SimulatedLearnerConfig()
    """Settings of the simulated learner."""


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
            from headrace.policies.megatron_trainer import open_trainer

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
