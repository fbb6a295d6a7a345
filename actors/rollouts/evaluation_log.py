"""The record of a running evaluation: known answers, and new ones as they end.

Invariants:
- An answer is durable in `results.jsonl` before it counts as ended; answers that end within 10 ms share one fsync.
- The only writer of the file is the dispatcher that runs the evaluation. Without folders nothing is recorded.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

from headrace.actors.rollouts.answers import AnswerLog, answer_id, answer_without_record, folder_name
from headrace.actors.runtime.batching import Batcher
from headrace.actors.runtime.resources import ResourceOwner
from headrace.buffer.types import Cause, GroupId, Outcome, Purpose, RolloutOrder

if TYPE_CHECKING:
    from headrace.actors.rollouts.answers import Answer
    from headrace.actors.rollouts.evaluation_folders import EvaluationFolders
    from headrace.actors.training.replay import Evaluated
    from headrace.buffer.tasks import TaskId
    from headrace.buffer.types import RolloutId


def evaluation_order(tag: str, task_id: TaskId, sample: int) -> RolloutOrder:
    """Return the order for the first attempt of one answer."""
    return RolloutOrder(
        rollout_id=answer_id(tag, task_id, sample),
        group_id=GroupId(tag),
        attempt=1,
        task_id=task_id,
        purpose=Purpose.EVALUATION,
    )


class Recording(ResourceOwner):
    """Record of one evaluation tag, as an async context manager."""

    def __init__(self, folders: EvaluationFolders | None, tag: str) -> None:
        super().__init__()
        self._folders = folders
        self._tag = tag
        self._log: AnswerLog | None = None

    async def __aenter__(self) -> Self:
        if self._folders is not None:
            self._log = await asyncio.to_thread(AnswerLog, self._folders.results(self._tag))
        self._append: Batcher[Answer, None] = await self._stack.enter_async_context(Batcher(self._append_many))
        return self

    def get(self, rollout_id: RolloutId) -> Answer | None:
        """Return a known answer of `results.jsonl`."""
        return self._log.get(rollout_id) if self._log else None

    def recover(self, order: RolloutOrder, known: Evaluated) -> Answer:
        """Return an answer that is in the ledger but not in `results.jsonl`, from its folder if possible."""
        stored = self._folders.read(self._tag, folder_name(order)) if self._folders else None
        if stored is not None and (stored.rollout_id, stored.reward) == (order.rollout_id, known.reward):
            return stored
        outcome = Outcome(
            reward=known.reward,
            solved=known.solved,
            trainable=False,
            cause=Cause.SOLVED if known.solved else Cause.FAILED,
            detail="recovered from the ledger without details",
        )
        return answer_without_record(order, outcome)

    async def add(self, answer: Answer) -> None:
        """Add an answer, which is durable when this returns. Idempotent. Raises OSError."""
        if self._log is not None:
            await self._append(answer)

    async def _append_many(self, answers: list[Answer]) -> list[None]:
        assert self._log is not None
        await asyncio.to_thread(self._log.append, answers)
        return [None] * len(answers)
