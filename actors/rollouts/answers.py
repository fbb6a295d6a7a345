"""What one evaluation rollout came to, and `results.jsonl`, which holds one line for each.

Invariants:
- A line is durable when `append` returns, and stands once: who was killed in between asks again, and what is known is
  not written again. A line that a power cut tore is cut off when the file is opened.
- An answer without a reward says nothing about the policy (infra, a broken evaluator); it is a line all the same.
- Text that agents had a part in is data: bounded, and never a path.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

import orjson

from headrace.actors.errors import ConfigError
from headrace.buffer.types import Cause, RolloutId

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from headrace.buffer.tasks import TaskId
    from headrace.buffer.types import Outcome, RolloutOrder, RolloutResult, Trajectory

MAX_DETAIL_CHARACTERS = 2000
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,80}")
"""Without a dot, which only a digested name has."""
_UNPLAIN = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One attempt of an evaluation rollout. `versions` are (policy version, sampled tokens) pairs, oldest first;
    `sampled_tokens` counts those that stand in a row; `phases_s` are (phase, seconds) pairs; `folder` is the name of
    the rollout's folder."""

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
        """`versions` and `phases_s` are objects, in their order."""
        return asdict(self) | {"versions": dict(self.versions), "phases_s": dict(self.phases_s)}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        """The inverse of `to_json`; other keys are ignored. Raises KeyError, TypeError, ValueError."""
        # Older lines have no `solved`: it was a reward above 0.
        document = {"solved": (document["reward"] or 0.0) > 0} | document
        known = {name: document[name] for name in cls.__dataclass_fields__}
        pairs = {name: tuple(document[name].items()) for name in ("versions", "phases_s")}
        return cls(**known | pairs | {"cause": Cause(document["cause"])})


def answer_id(tag: str, task_id: TaskId, sample: int) -> RolloutId:
    """The rollout of one sampled answer. A task id that is no plain name is digested: gateways refuse it in an id."""
    return RolloutId(f"{tag}/{plain_name(task_id)}/{sample}")


def plain_name(text: str) -> str:
    """A name for files and ids, another for each text: the text itself where it is plain, else words of it for people
    and its digest."""
    if _PLAIN.fullmatch(text):
        return text
    words = _UNPLAIN.sub("-", text).strip("-")[:40]
    return f"{words}.{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def sample_of(rollout_id: RolloutId) -> int:
    return int(rollout_id.rpartition("/")[2])


def folder_name(order: RolloutOrder) -> str:
    return f"{plain_name(order.task_id)}-{sample_of(order.rollout_id)}"


def answer_of(order: RolloutOrder, result: RolloutResult) -> Answer:
    """What an attempt came to."""
    versions = _tokens_by_version(result.trajectory)
    return _answer(
        order,
        result.outcome,
        turns=result.turns,
        sampled_tokens=sum(tokens for _, tokens in versions),
        versions=versions,
        phases_s=_by_phase(result.phases_s),
        trace_id=result.trace_id,
    )


def untold_answer(order: RolloutOrder, outcome: Outcome) -> Answer:
    """An attempt of which only the outcome is known: its worker died, or an older run recorded no more."""
    return _answer(order, outcome, turns=0, sampled_tokens=0, versions=(), phases_s=(), trace_id="")


def _answer(order: RolloutOrder, outcome: Outcome, **told: Any) -> Answer:
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
        **told,
    )


def _tokens_by_version(trajectory: Trajectory | None) -> tuple[tuple[str, int], ...]:
    tokens: dict[Any, int] = {}
    for row in trajectory.rows if trajectory else ():
        for span in row.versions:
            tokens[span.version] = tokens.get(span.version, 0) + span.end - span.start
    return tuple((str(version), tokens[version]) for version in sorted(tokens))


def _by_phase(phases_s: Iterable[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    """A phase that was entered twice counts once, with both times."""
    total: dict[str, float] = {}
    for phase, seconds in phases_s:
        total[phase] = total.get(phase, 0.0) + seconds
    return tuple(total.items())


class AnswerLog:
    """`results.jsonl` of one evaluation, for its one writer."""

    def __init__(self, path: Path) -> None:
        """Read what is there. Raises OSError, ConfigError."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._known = {answer.rollout_id: answer for answer in _recover(path)}

    def get(self, rollout_id: RolloutId) -> Answer | None:
        return self._known.get(rollout_id)

    def append(self, answers: Iterable[Answer]) -> None:
        """Write those that are not there yet, durably, with one fsync. Raises OSError."""
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
    """JSON of data in which text of agents may hold what is no Unicode."""
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
    """The complete lines of a results.jsonl; none when there is no such file. Raises ConfigError for a whole line that
    is no answer."""
    if not path.exists():
        return ()
    lines = path.read_bytes().split(b"\n")[:-1]
    return tuple(_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1))


def _parse(line: bytes, where: str) -> Answer:
    try:
        return Answer.from_json(orjson.loads(line))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{where}: is no answer ({error!r}); move the file away, or choose another --out") from error


def _recover(path: Path) -> tuple[Answer, ...]:
    """Cut a torn last line off, and read the others."""
    if path.exists():
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with path.open("r+b") as file:
                file.truncate(whole)
                os.fsync(file.fileno())
    return read_answers(path)
