"""Answers from evaluation rollouts, and the file `results.jsonl` with one line per answer.

Invariants:
- A line is durable once `append` returns, and is written only once: when a restarted writer repeats a call, known lines
  are skipped. A line left incomplete by a power cut is removed when the file is opened.
- An answer without a reward (infra, a broken evaluator) says nothing about the policy, but still gets a line.
- Text that agents can influence is treated as data: it is bounded and never used as a path.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import orjson

from headrace.actors.errors import ConfigError
from headrace.buffer.tasks.task import TaskId
from headrace.buffer.trajectories.types import Cause, Outcome, RolloutId, RolloutOrder, RolloutResult
from headrace.buffer.trajectories.versions import PolicyVersion

MAX_DETAIL_CHARACTERS = 2000
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,80}")
"""Excludes the dot, so that a plain name never equals a digested one."""
_UNPLAIN = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result of one evaluation attempt. `versions` are (policy version, sampled tokens) pairs, oldest first;
    `sampled_tokens` counts tokens in rows; `phases_s` are (phase, seconds) pairs; `folder` is the folder name of the
    rollout."""

    rollout_id: RolloutId
    task_id: TaskId
    sample: int
    attempt: int
    cause: Cause
    reward: float | None
    solved: bool
    detail: str
    turns: int
    sampled_tokens: int
    versions: tuple[tuple[str, int], ...]
    phases_s: tuple[tuple[str, float], ...]
    trace_id: str
    folder: str

    def to_json(self) -> dict[str, Any]:
        """Return the answer as a JSON object; `versions` and `phases_s` become ordered objects."""
        return asdict(self) | {"versions": dict(self.versions), "phases_s": dict(self.phases_s)}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        """Parse the result of `to_json`, ignoring unknown keys. Raises KeyError, TypeError, ValueError."""
        known = {name: document[name] for name in cls.__dataclass_fields__}
        pairs = {name: tuple(document[name].items()) for name in ("versions", "phases_s")}
        return cls(**known | pairs | {"cause": Cause(document["cause"])})


def answer_id(tag: str, task_id: TaskId, sample: int) -> RolloutId:
    """Return the rollout id of an answer. A task id that is not a plain name is replaced by a digest, since gateways
    would refuse it."""
    return RolloutId(f"{tag}/{plain_name(task_id)}/{sample}")


def plain_name(text: str) -> str:
    """Return a unique name for files and ids: the text itself if it is a plain name, otherwise its first words and its
    digest."""
    if _PLAIN.fullmatch(text):
        return text
    words = _UNPLAIN.sub("-", text).strip("-")[:40]
    return f"{words}.{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def sample_of(rollout_id: RolloutId) -> int:
    return int(rollout_id.rpartition("/")[2])


def folder_name(order: RolloutOrder) -> str:
    return f"{plain_name(order.task_id)}-{sample_of(order.rollout_id)}"


def answer_of(order: RolloutOrder, result: RolloutResult) -> Answer:
    """Return the answer of an attempt."""
    tokens: Counter[PolicyVersion] = Counter()
    for row in result.trajectory.rows if result.trajectory else ():
        for span in row.versions:
            tokens[span.version] += span.end - span.start
    phases_s: dict[str, float] = {}
    for phase, seconds in result.phases_s:
        # Some phases are entered twice.
        phases_s[phase] = phases_s.get(phase, 0.0) + seconds
    return _answer(
        order,
        result.outcome,
        turns=result.turns,
        sampled_tokens=tokens.total(),
        versions=tuple((str(version), tokens[version]) for version in sorted(tokens)),
        phases_s=tuple(phases_s.items()),
        trace_id=result.trace_id,
    )


def answer_without_record(order: RolloutOrder, outcome: Outcome) -> Answer:
    """Return the answer of an attempt whose outcome is all that is known, e.g. because its worker died."""
    return _answer(order, outcome, turns=0, sampled_tokens=0, versions=(), phases_s=(), trace_id="")


def _answer(order: RolloutOrder, outcome: Outcome, **details: Any) -> Answer:
    return Answer(
        rollout_id=order.rollout_id,
        task_id=order.task_id,
        sample=sample_of(order.rollout_id),
        attempt=order.attempt,
        cause=outcome.cause,
        reward=outcome.reward,
        solved=outcome.solved,
        detail=outcome.detail[:MAX_DETAIL_CHARACTERS],
        folder=folder_name(order),
        **details,
    )


class AnswerLog:
    """The `results.jsonl` file of one evaluation, opened by its only writer."""

    def __init__(self, path: Path) -> None:
        """Open the file, truncate an incomplete last line, and read the other lines. Raises OSError, ConfigError."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            data = path.read_bytes()
            complete = data.rfind(b"\n") + 1
            if complete < len(data):
                with path.open("r+b") as file:
                    file.truncate(complete)
                    os.fsync(file.fileno())
        self._known = {answer.rollout_id: answer for answer in read_answers(path)}

    def get(self, rollout_id: RolloutId) -> Answer | None:
        return self._known.get(rollout_id)

    def append(self, answers: Iterable[Answer]) -> None:
        """Write new answers durably, with one fsync. Raises OSError."""
        new = {answer.rollout_id: answer for answer in answers if answer.rollout_id not in self._known}
        if not new:
            return
        with self._path.open("ab") as file:
            file.write(b"".join(line_of(answer) for answer in new.values()))
            file.flush()
            os.fsync(file.fileno())
        self._known |= new


def line_of(answer: Answer) -> bytes:
    return json_bytes(answer.to_json()) + b"\n"


def json_bytes(document: object, *, option: int = 0) -> bytes:
    """Encode JSON that contains text from agents, which may not be valid Unicode."""
    try:
        return orjson.dumps(document, option=option)
    except TypeError:
        return orjson.dumps(_readable(document), option=option)


def _readable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_readable(key): _readable(item) for key, item in value.items()}
    return [_readable(item) for item in value] if isinstance(value, list | tuple) else value


def read_answers(path: Path) -> tuple[Answer, ...]:
    """Return the answers in the complete lines of results.jsonl; empty if the file is missing. Raises ConfigError for a
    complete line that is not an answer."""
    if not path.exists():
        return ()
    answers = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            answers.append(Answer.from_json(orjson.loads(line)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{path}:{number}: not a valid answer ({error!r}); move the file away, or choose another --out"
            ) from error
    return tuple(answers)
