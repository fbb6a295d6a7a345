"""Bodies and parameters of requests: what is too large or has another form is refused before anything is called.

Invariants:
- At most `MAX_BODY_BYTES` of a body are read, whatever its headers say.
- A body is strict JSON (no NaN, no lone surrogates, integers of 64 bits) of at most `MAX_DEPTH` levels, so that every
  accepted document can be stored and sent on.
- An unknown key is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.actors.cluster.api.refusals import Refusal
from headrace.actors.cluster.runs.records import RunId
from headrace.actors.errors import RunUnknown

if TYPE_CHECKING:
    from fastapi import Request

MAX_BODY_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 32
_RUN_ID: Final = re.compile(r"[0-9a-f]{32}")
_NUMBER: Final = re.compile(r"[0-9]{1,15}")

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")]
B = TypeVar("B", bound=BaseModel)


class Body(BaseModel):
    """Base of the bodies: frozen, unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SubmitBody(Body):
    """Body of `POST /v1/runs`."""

    name: Name
    recipe: dict[str, dict[str, Any]]


class ResumeBody(Body):
    """Body of `POST /v1/runs/RUN/resume`."""

    changes: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=256)] = Field(
        default_factory=list
    )


class AddEngineBody(Body):
    """Body of `POST /v1/runs/RUN/engines`."""

    url: Annotated[str, Field(min_length=1, max_length=2048)]
    timeout_s: Annotated[float, Field(ge=1, le=600)] = 120.0


class DrainNodeBody(Body):
    """Body of `POST /v1/nodes/NODE/drain`."""

    deadline_s: Annotated[float, Field(ge=0, le=3600)] = 60.0


async def read_bytes(request: Request, most: int) -> bytes:
    """Read a body of at most `most` bytes. Raises Refusal."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise Refusal(413, "body_too_large", f"the body has more than {most >> 10} KiB: send less")
        chunks.append(chunk)
    return b"".join(chunks)


async def read_body(request: Request, model: type[B]) -> B:
    """Read and check the body of a request; an empty one is an empty object. Raises Refusal."""
    try:
        document = orjson.loads(await read_bytes(request, MAX_BODY_BYTES) or b"{}")
    except orjson.JSONDecodeError as error:
        raise Refusal(400, "body_invalid", f"the body is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise Refusal(400, "body_invalid", "the body must be a JSON object")
    if _is_deeper(document, MAX_DEPTH):
        raise Refusal(400, "body_invalid", f"the body is nested more than {MAX_DEPTH} levels deep: flatten it")
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise Refusal(400, "body_invalid", _problem(error)) from error


def _is_deeper(document: Any, levels: int) -> bool:
    layer = [document]
    for _ in range(levels):
        layer = [below for value in layer for below in _children(value)]
    return bool(layer)


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    key = ".".join(str(part) for part in first["loc"])[:200]
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}: remove it or check its spelling"
    return f"{key} is missing: set it" if first["type"] == "missing" else f"{key}: {first['msg']}"


def run_id_of(request: Request) -> RunId:
    """Return the id in the path. Raises RunUnknown if it cannot be one."""
    run = request.path_params["run"]
    if not _RUN_ID.fullmatch(run):
        raise unknown_run(run)
    return RunId(run)


def unknown_run(run: str) -> RunUnknown:
    """Return the error for a run that does not exist, or not for this caller: both have the same text."""
    return RunUnknown(f"there is no run {run[:64]!r}: runs have ids of 32 hexadecimal digits; GET /v1/runs lists yours")


def check_query(request: Request, *known: str) -> None:
    """Raise Refusal for an unknown or repeated query parameter."""
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        if name not in known:
            raise Refusal(
                400, "query_invalid", f"unknown query parameter {name[:64]!r}: known are {', '.join(known) or 'none'}"
            )
        if names.count(name) > 1:
            raise Refusal(400, "query_invalid", f"the query parameter {name} came twice: keep one")


def whole_number(text: str, what: str, default: int, *, most: int) -> int:
    """Return the number in a header or query parameter, or `default` if it is empty. Raises Refusal."""
    if not text:
        return default
    if not _NUMBER.fullmatch(text) or int(text) > most:
        raise Refusal(400, "query_invalid", f"{what} must be a whole number of at most {most}")
    return int(text)
