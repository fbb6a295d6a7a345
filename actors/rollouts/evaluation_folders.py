"""Folders of evaluation rollouts, each with conversation, patch, evaluator log and metadata.

Invariants:
- A folder appears complete, under a generated name; a later attempt of the rollout replaces all of it.
- Every file has a size cap and marks truncation. Text of agents is data: it never names a file, and is never run.
- A folder is written before its line in `results.jsonl`, so readers of that file find it. It survives killed processes,
  but is not fsynced: after a power cut a folder may be missing, but never a line.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import orjson

from headrace.actors.rollouts.answers import Answer, json_bytes
from headrace.buffer.primitives.durable_files import publish_folder

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from headrace.actors.rollouts.recorded_stations import RolloutReports
    from headrace.actors.rollouts.summary import About
    from headrace.buffer.types import GroupId
    from headrace.serve.capture.rows import TranscriptTurn

MAX_CONVERSATION_BYTES, MAX_PATCH_BYTES, MAX_LOG_BYTES = 8 << 20, 4 << 20, 1 << 20
TRUNCATED = b"\n[cut here: over the cap]\n"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFolders:
    """Paths of the evaluations of a run, each in a folder named by its tag, and their model. `is_one`: `root` is the
    folder of the only evaluation. Picklable."""

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
        """Write the folder of an attempt; return the answer, without a folder if the disk refused it."""
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
        """Read the answer of a rollout from its folder; None if that is missing or unreadable."""
        try:
            return Answer.from_json(orjson.loads((self.rollout(tag, folder) / "metadata.json").read_bytes()))
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            return None


def conversation_lines(turns: Iterable[TranscriptTurn]) -> bytes:
    """Return one JSON object per turn, in sampling order; the last line counts omitted turns."""
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
