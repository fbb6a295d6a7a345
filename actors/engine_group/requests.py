"""What operators ask of the engines of a live run: files in `<run>/engines/requests`.

A run may sit on a Ray that nobody outside can reach, so the run directory carries the question and the answer.

Invariants:
- A question is one file `ID.json`, an answer one file `ID.done.json`, each written whole; whoever may write into the
  run directory may ask.
- A question is answered once, in the order of asking, and is idempotent: asked again it comes to the same. Its name
  begins with a number that grows, so that the order does not depend on a clock.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import orjson

from headrace.actors.engine_group.errors import EngineGroupError
from headrace.buffer.primitives.durable_files import write_private

if TYPE_CHECKING:
    from pathlib import Path

ANSWERED = ".done.json"
LOOK_S = 0.2
"""How often the one who asks looks for the answer."""
KEPT_S = 3600.0
"""How long an answer waits for the one who asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """`what` is the URL of a server to add, or the name of an engine to remove."""

    request_id: str
    kind: Literal["add", "remove"]
    what: str


class RequestBox:
    """The group's side."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._answered_s: dict[str, float] = {}
        """When this process first saw an answer, by the monotonic clock."""

    def open(self) -> list[EngineRequest]:
        """What is not answered yet, oldest first. Answers that nobody fetched in an hour are dropped."""
        if not self._directory.exists():
            return []
        asked: list[EngineRequest] = []
        for path in sorted(self._directory.glob("*.json")):
            if path.name.endswith(ANSWERED):
                self._drop_if_old(path)
            elif (request := _read(path)) is not None:
                asked.append(request)
        return asked

    def _drop_if_old(self, answer: Path) -> None:
        now_s = time.monotonic()
        if now_s - self._answered_s.setdefault(answer.name, now_s) > KEPT_S:
            del self._answered_s[answer.name]
            answer.unlink(missing_ok=True)

    def answer(self, request: EngineRequest, *, engine_id: str, error: str = "") -> None:
        """`error` says why it could not be done."""
        answer = orjson.dumps({"engine_id": engine_id, "error": error})
        write_private(self._directory / f"{request.request_id}{ANSWERED}", answer)
        (self._directory / f"{request.request_id}.json").unlink(missing_ok=True)


def _read(path: Path) -> EngineRequest | None:
    """None for what is no question: it is left where it is."""
    try:
        document = orjson.loads(path.read_bytes())
        request = EngineRequest(**document)
    except (OSError, TypeError, orjson.JSONDecodeError):
        return None
    return request if request.request_id == path.stem and request.kind in ("add", "remove") else None


def _next_number(directory: Path) -> int:
    """Above those of all questions that wait; two that are asked at once may share one."""
    numbers = [path.name.split("-", 1)[0] for path in directory.glob("*.json")]
    return 1 + max((int(number) for number in numbers if number.isdecimal()), default=0)


def ask_group(directory: Path, kind: Literal["add", "remove"], what: str, *, timeout_s: float) -> str:
    """The operator's side, blocking: the engine's name, once it is done. Raises EngineGroupError with the group's
    reason, or when nobody answered."""
    directory.mkdir(parents=True, exist_ok=True)
    request = EngineRequest(request_id=f"{_next_number(directory):06d}-{uuid.uuid4().hex}", kind=kind, what=what)
    question = directory / f"{request.request_id}.json"
    write_private(question, orjson.dumps(asdict(request)))
    answer = directory / f"{request.request_id}{ANSWERED}"
    deadline_s = time.monotonic() + timeout_s
    while not answer.exists():
        if time.monotonic() > deadline_s:
            question.unlink(missing_ok=True)
            raise EngineGroupError(f"the engines of this run did not answer within {timeout_s:g} s")
        time.sleep(LOOK_S)
    document = orjson.loads(answer.read_bytes())
    answer.unlink(missing_ok=True)
    if document["error"]:
        raise EngineGroupError(document["error"])
    engine_id: str = document["engine_id"]
    return engine_id
