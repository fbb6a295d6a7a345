"""What is kept of an evaluation rollout: a folder with the conversation, what the agent left, the evaluator's log and
the metadata.

Invariants:
- A folder appears whole, under a name made by us; a later attempt of the rollout replaces it whole.
- Every file has a cap, and says where it was cut. What agents wrote is data: it names no file and runs nowhere.
- It is there before the answer is told, so that whoever reads `results.jsonl` finds it; it survives a killed process,
  and is not fsynced: after a power cut a folder may be missing, never a line.
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
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from headrace.actors.rollouts.recorded_stations import Kept
    from headrace.actors.rollouts.summary import About
    from headrace.buffer.types import GroupId
    from headrace.serve.capture.rows import TranscriptTurn

MAX_CONVERSATION_BYTES, MAX_PATCH_BYTES, MAX_LOG_BYTES = 8 << 20, 4 << 20, 1 << 20
CUT = b"\n[cut here: over the cap]\n"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFolders:
    """Where the evaluations of a run lie, each in a folder named by its tag, and what is evaluated. `is_one`: `root`
    is itself the folder of the only one. Picklable."""

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

    def write(self, tag: GroupId, answer: Answer, kept: Kept) -> Answer:
        """Keep what an attempt left; the answer, without a folder when the disk refused it."""
        target = self.rollout(tag, answer.folder)
        try:
            _replace(target, answer.attempt, dict(_files(answer, kept)))
        except OSError as error:
            logger.warning("nothing is kept of %s: %s", answer.rollout_id, error)
            return replace(answer, folder="")
        return answer

    def read(self, tag: str, folder: str) -> Answer | None:
        """The answer that a folder tells of; None when there is none, or none that can be read."""
        try:
            return Answer.from_json(orjson.loads((self.rollout(tag, folder) / "metadata.json").read_bytes()))
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            return None


def _replace(target: Path, attempt: int, files: dict[str, bytes]) -> None:
    staged = target.with_name(f".{target.name}.{attempt}")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    for name, data in files.items():
        (staged / name).write_bytes(data)
    if target.exists():
        shutil.rmtree(target)
    publish_folder(staged, target)


def _files(answer: Answer, kept: Kept) -> Iterator[tuple[str, bytes]]:
    report, verdict = kept.session, kept.verdict
    metadata = answer.to_json() | kept.told()
    yield "metadata.json", json_bytes(metadata, option=orjson.OPT_INDENT_2) + b"\n"
    if report is not None:
        yield "conversation.jsonl", conversation_lines(report.conversation)
    if verdict is not None:
        log = "\n".join(part for part in (f"{verdict.cause}: {verdict.detail}", verdict.log) if part)
        yield "evaluator.log", _capped(log, MAX_LOG_BYTES)
        if verdict.patch:
            yield "patch.diff", _capped(verdict.patch, MAX_PATCH_BYTES)


def conversation_lines(turns: Iterable[TranscriptTurn]) -> bytes:
    """One JSON object a turn, in the order sampled; the last line says how many were left out."""
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
    return data if len(data) <= most_bytes else data[:most_bytes] + CUT
