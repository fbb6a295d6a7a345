"""Content of requests: what is too large or has another form is refused before anything is called.

Invariants:
- At most `MAX_BODY_BYTES` of a body are read, whatever its headers say.
- A body is strict JSON (no NaN, no lone surrogates, integers of 64 bits) of at most `MAX_DEPTH` levels, so that every
  accepted document can be stored and sent on.
- An unknown key is refused by its name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import orjson
from pydantic import BaseModel, ValidationError

from headrace.actors.cluster.api.refusals import ApiRefusal
from headrace.actors.cluster.runs.contract import unknown_run
from headrace.actors.cluster.runs.operations import Operation
from headrace.actors.cluster.runs.records import RUN_ID, RunId

if TYPE_CHECKING:
    from fastapi import Request

MAX_BODY_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 32


async def read_bytes(request: Request, most: int) -> bytes:
    """Read a body of at most `most` bytes. Raises ApiRefusal."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise ApiRefusal(413, "body_too_large", f"the body has more than {most >> 10} KiB: send less")
        chunks.append(chunk)
    return b"".join(chunks)


async def read_body(request: Request, model: type[BaseModel]) -> BaseModel:
    """Read and check the body of a request; an empty one is an empty object. Raises ApiRefusal."""
    data = await read_bytes(request, MAX_BODY_BYTES) or b"{}"
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiRefusal(400, "body_invalid", f"the body is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise ApiRefusal(400, "body_invalid", "the body must be a JSON object")
    if _is_deeper(document, MAX_DEPTH):
        raise ApiRefusal(400, "body_invalid", f"the body is nested more than {MAX_DEPTH} levels deep: flatten it")
    try:
        # From text, so that a list can be a tuple.
        return model.model_validate_json(data)
    except ValidationError as error:
        raise ApiRefusal(400, "body_invalid", _problem(error)) from error


async def read_content(request: Request, operation: Operation) -> BaseModel:
    """Read and check the query or the body of a request; an empty query value has its default. Raises ApiRefusal."""
    if not operation.has_query:
        check_query(request)
        return await read_body(request, operation.request)
    check_query(request, *operation.request.model_fields)
    given = {name: text for name, text in request.query_params.items() if text}
    try:
        return operation.request.model_validate_strings(given)
    except ValidationError as error:
        raise ApiRefusal(400, "query_invalid", _problem(error)) from error


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
    if not RUN_ID.fullmatch(run):
        raise unknown_run(run)
    return RunId(run)


def check_query(request: Request, *known: str) -> None:
    """Raise ApiRefusal for an unknown or repeated query parameter."""
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        if name not in known:
            raise ApiRefusal(
                400, "query_invalid", f"unknown query parameter {name[:64]!r}: known are {', '.join(known) or 'none'}"
            )
        if names.count(name) > 1:
            raise ApiRefusal(400, "query_invalid", f"the query parameter {name} came twice: keep one")
