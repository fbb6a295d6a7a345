"""Requests of operators to the engine group of a live run, as files in `<run>/engines/requests`.

The operator may have no access to the run's Ray cluster, so requests and answers are exchanged in the run directory.

Invariants:
- A request is one file `ID.json`, an answer one file `ID.done.json`, each written atomically. Anybody who may write
  into the run directory may make requests.
- Requests are answered once, in order, and are idempotent. An ID begins with an increasing number, so that the order
  does not depend on a clock.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import orjson

from headrace.actors.errors import EngineGroupError
from headrace.buffer.primitives.durable_files import write_private
from headrace.policies.engine import EngineId
from headrace.policies.errors import PolicyError

ANSWERED = ".done.json"
LOOK_S = 0.2
"""Interval at which the operator's side looks for the answer."""
KEPT_S = 3600.0
"""Time after which an answer that nobody has read is removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """Request of an operator. `what` is the URL of a server to add, or the name of an engine to remove."""

    request_id: str
    kind: Literal["add", "remove"]
    what: str


class RequestBox:
    """The engine group's view of the requests."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._answered_s: dict[str, float] = {}
        """Monotonic time at which this process first saw each answer."""

    def open(self) -> list[EngineRequest]:
        """Return the unanswered requests, oldest first, and remove answers that nobody has read for an hour."""
        if not self._directory.exists():
            return []
        requests: list[EngineRequest] = []
        now_s = time.monotonic()
        for path in sorted(self._directory.glob("*.json")):
            if path.name.endswith(ANSWERED):
                if now_s - self._answered_s.setdefault(path.name, now_s) > KEPT_S:
                    del self._answered_s[path.name]
                    path.unlink(missing_ok=True)
                continue
            # A file that is not a request is left alone.
            with suppress(OSError, TypeError, orjson.JSONDecodeError):
                request = EngineRequest(**orjson.loads(path.read_bytes()))
                if request.request_id == path.stem and request.kind in ("add", "remove"):
                    requests.append(request)
        return requests

    async def answer_all(
        self, *, add: Callable[[str], Awaitable[str]], remove: Callable[[EngineId], Awaitable[None]]
    ) -> None:
        """Carry out the open requests, and answer them."""
        for request in self.open():
            engine_id, problem = request.what, ""
            try:
                if request.kind == "add":
                    engine_id = await add(request.what)
                else:
                    await remove(EngineId(request.what))
            except (EngineGroupError, PolicyError) as error:
                problem = str(error)
            self.answer(request, engine_id=engine_id, error=problem)

    def answer(self, request: EngineRequest, *, engine_id: str, error: str = "") -> None:
        """Answer a request; `error` is the reason why it failed."""
        answer = orjson.dumps({"engine_id": engine_id, "error": error})
        write_private(self._directory / f"{request.request_id}{ANSWERED}", answer)
        (self._directory / f"{request.request_id}.json").unlink(missing_ok=True)


def ask_group(directory: Path, kind: Literal["add", "remove"], what: str, *, timeout_s: float) -> str:
    """Make a request, wait for its answer (blocking), and return the engine's name. Raises EngineGroupError with the
    group's reason, or if the group does not answer in time."""
    directory.mkdir(parents=True, exist_ok=True)
    # Two concurrent operators may take the same number; the rest of the ID differs.
    numbers = [path.name.split("-", 1)[0] for path in directory.glob("*.json")]
    number = 1 + max((int(number) for number in numbers if number.isdecimal()), default=0)
    request = EngineRequest(request_id=f"{number:06d}-{uuid.uuid4().hex}", kind=kind, what=what)
    path = directory / f"{request.request_id}.json"
    write_private(path, orjson.dumps(asdict(request)))
    answer = directory / f"{request.request_id}{ANSWERED}"
    deadline_s = time.monotonic() + timeout_s
    while not answer.exists():
        if time.monotonic() > deadline_s:
            path.unlink(missing_ok=True)
            raise EngineGroupError(f"the run's engine group did not answer within {timeout_s:g} s: is it running?")
        time.sleep(LOOK_S)
    document = orjson.loads(answer.read_bytes())
    answer.unlink(missing_ok=True)
    if document["error"]:
        raise EngineGroupError(document["error"])
    engine_id: str = document["engine_id"]
    return engine_id
