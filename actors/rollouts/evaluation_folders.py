"""Folders of evaluation rollouts, each with the conversation, the patch, the evaluator log and metadata.

Invariants:
- A folder appears all at once, under a generated name; a later attempt at the same rollout replaces it entirely.
- Every file has a size cap, and a truncated file says so. Text from agents is treated as data: it never names a file
  and is never executed.
- A folder is written before its line in `results.jsonl`, so that readers of that file can find it. It survives killed
  processes but is not fsynced: after a power cut a folder may be missing, but a line never is.
- An answer is durable in `results.jsonl` before it counts as finished; answers that finish within 10 ms share one
  fsync.
- Only the dispatcher that runs the evaluation writes `results.jsonl`. Nothing is recorded if no folders are configured.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import orjson

from headrace.actors.rollouts.answers import (
    Answer,
    AnswerLog,
    answer_id,
    answer_without_record,
    folder_name,
    json_bytes,
)
from headrace.actors.rollouts.rollout_reports import RolloutReports
from headrace.actors.rollouts.summary import About
from headrace.actors.runtime.actors.batching import Batcher
from headrace.actors.training.replay import Evaluated
from headrace.buffer.primitives.durable_files import publish_folder
from headrace.buffer.primitives.exit_stack import ResourceOwner
from headrace.buffer.tasks.task import TaskId
from headrace.buffer.trajectories.types import Cause, GroupId, Outcome, Purpose, RolloutId, RolloutOrder
from headrace.serve.gateway.capture.rows import TranscriptTurn

MAX_CONVERSATION_BYTES, MAX_PATCH_BYTES, MAX_LOG_BYTES = 8 << 20, 4 << 20, 1 << 20
TRUNCATED = b"\n[cut here: over the cap]\n"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFolders:
    """Paths of a run's evaluations, each in a folder named after its tag, and the model that they evaluate. If
    `is_one`, `root` itself is the folder of the only evaluation. Picklable."""

    root: Path
    about: About
    is_one: bool = False

    def results(self, tag: str) -> Path:
        return self._folder(tag) / "results.jsonl"

    def summary(self, tag: str) -> Path:
        return self._folder(tag) / "summary.json"

    def rollout(self, tag: str, folder: str) -> Path:
        return self._folder(tag) / "rollouts" / folder

    def _folder(self, tag: str) -> Path:
        return self.root if self.is_one else self.root / tag

    def write(self, tag: GroupId, answer: Answer, reports: RolloutReports) -> Answer:
        """Write the folder of an attempt and return the answer, which names no folder if writing failed."""
        target = self.rollout(tag, answer.folder)
        staged = target.with_name(f".{target.name}.{answer.attempt}")
        metadata = answer.to_json() | reports.metadata()
        files = {"metadata.json": json_bytes(metadata, option=orjson.OPT_INDENT_2) + b"\n"}
        if (session := reports.session) is not None:
            files["conversation.jsonl"] = conversation_lines(session.conversation)
        if (verdict := reports.verdict) is not None:
            log = "\n".join(part for part in (f"{verdict.cause}: {verdict.detail}", verdict.log) if part)
            files["evaluator.log"] = _capped(log, MAX_LOG_BYTES)
            if verdict.patch:
                files["patch.diff"] = _capped(verdict.patch, MAX_PATCH_BYTES)
        try:
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(parents=True)
            for name, data in files.items():
                (staged / name).write_bytes(data)
            if target.exists():
                shutil.rmtree(target)
            publish_folder(staged, target)
        except OSError as error:
            logger.warning("the folder of %s could not be written: %s", answer.rollout_id, error)
            return replace(answer, folder="")
        return answer

    def read(self, tag: str, folder: str) -> Answer | None:
        """Read a rollout's answer from its folder. Returns None if the folder is missing or unreadable."""
        try:
            return Answer.from_json(orjson.loads((self.rollout(tag, folder) / "metadata.json").read_bytes()))
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            return None


def conversation_lines(turns: Iterable[TranscriptTurn]) -> bytes:
    """Return one JSON object per turn, in sampling order; the last line gives the number of omitted turns."""
    lines, size, left_out = [], 0, 0
    for turn in turns:
        line = json_bytes(turn.to_json()) + b"\n"
        if left_out or size + len(line) > MAX_CONVERSATION_BYTES:
            left_out += 1
            continue
        lines.append(line)
        size += len(line)
    if left_out:
        lines.append(json_bytes({"left_out_turns": left_out}) + b"\n")
    return b"".join(lines)


def _capped(text: str, most_bytes: int) -> bytes:
    data = text.encode("utf-8", "replace")
    return data if len(data) <= most_bytes else data[:most_bytes] + TRUNCATED


def evaluation_order(tag: str, task_id: TaskId, sample: int) -> RolloutOrder:
    """Return the order for the first attempt of one answer."""
    return RolloutOrder(
        rollout_id=answer_id(tag, task_id, sample),
        group_id=GroupId(tag),
        attempt=1,
        task_id=task_id,
        purpose=Purpose.EVALUATION,
    )


class AnswerRecording(ResourceOwner):
    """Recording of the answers under one evaluation tag, as an async context manager."""

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
        """Return the answer if it is already in `results.jsonl`, otherwise None."""
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
        """Add an answer, which is durable once this method returns. Idempotent. Raises OSError."""
        if self._log is not None:
            await self._append(answer)

    async def _append_many(self, answers: list[Answer]) -> list[None]:
        assert self._log is not None
        await asyncio.to_thread(self._log.append, answers)
        return [None] * len(answers)
