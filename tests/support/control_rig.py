"""A control API over runs without services, called in process or over HTTP."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from headrace.actors.control.app import make_app
from headrace.actors.control.keys import KeyFile
from support.runs_without_services import FoundRuns, RunsWithoutServices

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from headrace.actors.runs.quotas import Quotas

KEYS = {"alice-read": "read alice", "alice": "operate alice", "bob": "operate bob", "root": "admin root"}
"""Keys of the rig, with role and owner."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return orjson.loads(self.body)

    @property
    def code(self) -> str:
        """Code of the error."""
        return str(self.document["error"]["code"])


class ControlRig:
    """The API, with `call` for requests in this process."""

    def __init__(self, folder: Path, quotas: Quotas | None = None) -> None:
        self.key_file = write_keys(folder / "control-keys")
        self.runs = RunsWithoutServices(quotas=quotas)
        self.found = FoundRuns(self.runs)
        self.app = make_app(self.found, KeyFile(self.key_file))

    async def call(
        self, method: str, target: str, body: bytes | Any = b"", *, key: str = "alice", **headers: str
    ) -> Answer:
        """Return the whole answer to a request; underscores in names of headers are dashes."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        sent = {"authorization": f"Bearer {key}"} if key else {}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        path, _, query = target.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in sent.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        # In two pieces, as from a network.
        received = [data[: len(data) // 2], data[len(data) // 2 :]]
        answered: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if not received:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": received.pop(0), "more_body": bool(received)}

        async def send(message: Any) -> None:
            answered.append(message)

        await self.app(scope, receive, send)
        names = {name.decode(): value.decode() for name, value in answered[0]["headers"]}
        content = b"".join(message.get("body", b"") for message in answered[1:])
        return Answer(answered[0]["status"], names, content)


def write_keys(path: Path) -> Path:
    """Write a file with the digests of `KEYS`."""
    path.touch(mode=0o600)
    path.write_text("".join(f"{hashlib.sha256(key.encode()).hexdigest()} {use}\n" for key, use in KEYS.items()))
    return path
