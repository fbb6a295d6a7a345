"""A control API over runs without services, called in process or over HTTP."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from headrace.actors.cluster.api.app import make_app
from headrace.actors.cluster.api.keys import KeyFile
from headrace.actors.cluster.runs.quotas import Quotas
from support.runs_without_services import RECIPE, RunsWithoutServices

KEYS = {
    "alice-read": "read alice",
    "alice": "operate alice",
    "alice-code": "code alice",
    "bob": "operate bob",
    "root": "admin root",
}
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
        self.app = make_app(self.runs, KeyFile(self.key_file), secrets.token_bytes(32))

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


VALID = (
    {"name": "a", "recipe": RECIPE},
    {
        "name": "b",
        "recipe": {**RECIPE, "training": {"steps": 3}, "tasks": {"train": "/t.jsonl", "heldout": "/h.jsonl"}},
    },
    {"changes": ["training.steps=3", "buffer.max_staleness=2"]},
    {"url": "http://10.0.0.1:30000", "timeout_s": 5},
    {"version": "1.4", "timeout_s": 5},
    {"lease": "a" * 32, "metrics": {"loss": 0.5}, "skipped": False},
    {"lease": "a" * 32, "reason": "out of memory", "refused": {"r-1": "too long"}},
    {"version": "1.4", "directory": "/storage/weights/1.4"},
)
ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1 << 62, 10**40, 1e308, "", "\0", "x" * 3000, "é\u2028", [], {}, [[]], {"": {}}),
    *({"a": {"b": {}}}, ["a=b", "=", "a.b.c.d=[", "training=1", "engines.count={}"], "http://[", "-" * 200),
)


def malformed(chance: random.Random) -> bytes:
    """Return a valid body with values replaced, keys changed, or bytes cut, repeated and overwritten."""
    body = orjson.loads(orjson.dumps(chance.choice(VALID)))
    for _ in range(chance.randint(1, 3)):
        table = body
        while isinstance(table, dict) and table:
            key = chance.choice(list(table))
            if not isinstance(table[key], dict) or chance.random() < 0.3:
                _damage(table, key, chance)
                break
            table = table[key]
    data = bytearray(_dumped(body))
    for _ in range(chance.choice((0, 0, 1, 3))):
        begin = chance.randrange(len(data) or 1)
        piece = bytes(data[begin : begin + chance.randint(1, 9)])
        data[begin : begin + len(piece)] = chance.choice(
            (b"", piece * 3, os.fsencode("\udcff"), b"[" * 2000, b"\\ud800")
        )
    return bytes(data)


def _damage(table: dict[str, Any], key: str, chance: random.Random) -> None:
    match chance.randrange(3):
        case 0:
            table[key] = copy.deepcopy(chance.choice(ODD))
        case 1:
            table[f"{key}{chance.choice(('x', '.', chr(0), 'é'))}"] = table.pop(key)
        case 2:
            table[chance.choice(("a", "learner", "engines", "model", "cluster"))] = copy.deepcopy(chance.choice(ODD))


def _dumped(body: Any) -> bytes:
    return json.dumps(body).encode()
