"""Schemas and parsing of request bodies: values of the wrong type or size are refused before they reach a provider."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Final, TypeVar

import orjson
from aiohttp import web
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

from headrace.buffer.primitives.sections import Section
from headrace.sandboxes.base import DEFAULT_MAX_OUTPUT_BYTES, MAX_REMOTE_OUTPUT_BYTES, FrozenMount, Network
from headrace.sandboxes.errors import SpecRefused
from headrace.serve.sandbox_servers.e2b_state.bodies import check_environment

MAX_BODY_BYTES: Final = 96 << 20
MAX_TIME_S: Final = 7 * 24 * 3600.0


def _decoded(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from error


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not contain a NUL byte")
    return text


Text = Annotated[str, AfterValidator(_no_nul)]
Bytes = Annotated[bytes, BeforeValidator(_decoded)]
Environment = Annotated[dict[str, str], AfterValidator(check_environment)]
Seconds = Annotated[float, Field(gt=0, le=MAX_TIME_S, allow_inf_nan=False)]
Limit = Annotated[int | None, Field(gt=0, le=1 << 60, strict=True)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,255}$")]
B = TypeVar("B", bound=BaseModel)


class Create(Section):
    """Body of a create request: a `SandboxSpec`."""

    image: Annotated[str, Field(min_length=1, max_length=4096)] = "host"
    cpu: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    memory_bytes: Limit = None
    disk_bytes: Limit = None
    pids: Limit = None
    network: Network = Network.NONE
    ttl_s: Seconds = 300.0
    idempotency_key: Annotated[str, Field(max_length=1024)] = ""
    labels: Annotated[dict[str, str], Field(max_length=64)] = Field(default_factory=dict)
    mounts: Annotated[tuple[FrozenMount, ...], Field(max_length=64)] = ()


class Exec(Section):
    command: Text
    user: Text = "root"
    env: Environment = Field(default_factory=dict)
    cwd: Text | None = None
    stdin: Bytes | None = None
    timeout_s: Seconds
    max_output_bytes: Annotated[int, Field(ge=0, le=MAX_REMOTE_OUTPUT_BYTES, strict=True)] = DEFAULT_MAX_OUTPUT_BYTES
    exec_id: Annotated[str | None, Field(min_length=1, max_length=1024)] = None


class Size(Section):
    rows: Annotated[int, Field(gt=0, lt=1 << 16, strict=True)]
    columns: Annotated[int, Field(gt=0, lt=1 << 16, strict=True)]


class Spawn(Section):
    """Body of a spawn request. `spawn_id` is the client's name for the process; repeating it does not start another
    process."""

    spawn_id: Name
    command: Text | list[Text]
    user: Text = "root"
    env: Environment = Field(default_factory=dict)
    cwd: Text | None = None
    stdin: bool = False
    terminal: Size | None = None
    timeout_s: Seconds | None = None


class Stdin(Section):
    """A piece of standard input. `offset` is the number of bytes before it; bytes that have already been written are
    skipped."""

    offset: Annotated[int, Field(ge=0, strict=True)]
    data: Bytes


class Signal(Section):
    number: Annotated[int, Field(gt=0, le=64, strict=True)]


class Renew(Section):
    ttl_s: Seconds


async def read_body(request: web.Request, kind: type[B]) -> B:
    """Parse the body of a request; an empty body is treated as `{}`. Raises SpecRefused, which names the field."""
    data = await read_bytes(request, MAX_BODY_BYTES)
    try:
        return kind.model_validate(orjson.loads(data or b"{}"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise SpecRefused(f"{where}: {first['msg']}") from error
    except ValueError as error:
        raise SpecRefused(f"the request body is not valid JSON: {error}") from error


async def read_bytes(request: web.Request, limit: int) -> bytes:
    """Read the body of a request. Raises SpecRefused if it exceeds the limit."""
    data = bytearray()
    async for chunk in request.content.iter_any():
        data += chunk
        if len(data) > limit:
            raise SpecRefused(f"the request body is larger than {limit} bytes")
    return bytes(data)


def whole_number(request: web.Request, name: str, most: int) -> int:
    """Return an integer parameter of the query that is at most `most`. Raises SpecRefused."""
    text = request.query.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise SpecRefused(f"{name}: must be a whole number, not {text[:20]!r}")
    return min(most, int(text))
