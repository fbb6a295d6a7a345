"""Schemas and parsing of the control plane's request bodies.

Unknown fields are ignored (newer SDKs send more); known fields that this server does not support are refused by name.
"""

from __future__ import annotations

import hashlib
import logging
import re
from datetime import UTC, datetime
from typing import Annotated, Any, Final, TypeVar

import orjson
from aiohttp import web
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from headrace.serve.sandbox_servers.e2b_state.errors import ApiError, unsupported

logger = logging.getLogger(__name__)

NOT_GRANTED: Final = "headrace-not-granted"
"""Header of an answer with what the request asked for and did not get."""
MAX_TIMEOUT_S: Final = 24 * 3600
MAX_BODY_BYTES: Final = 1 << 20
_IDEMPOTENCY_KEY: Final = re.compile(r"[a-z0-9-]{1,255}")


def _no_null(value: Any) -> Any:
    return {} if value is None else value


def check_environment(env: dict[str, str]) -> dict[str, str]:
    """Check that an environment can be passed to execve(2). Raises ValueError."""
    for name, value in env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise ValueError(f"{name[:40]!r} is not a valid environment variable, or its value contains a NUL byte")
    return env


Seconds = Annotated[int, Field(ge=0, le=MAX_TIMEOUT_S, strict=True)]
Texts = Annotated[dict[str, str], BeforeValidator(_no_null)]
Environment = Annotated[Texts, AfterValidator(check_environment)]
B = TypeVar("B", bound=BaseModel)


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Egress(_Body):
    """What a client asks of a sandbox's way out: body of PUT .../network, and `network` of a create."""

    allow_out: Annotated[list[str] | None, Field(alias="allowOut")] = None
    rules: dict[str, Any] | None = None
    egress_proxy: Annotated[dict[str, Any] | None, Field(alias="egressProxy")] = None
    allow_internet_access: bool | None = None
    allow_public_traffic: Annotated[bool | None, Field(alias="allowPublicTraffic")] = None


class AutoResume(_Body):
    """Part of a create's body."""

    enabled: Annotated[bool, Field(strict=True)] = False


class NewSandbox(_Body):
    """Body of POST /sandboxes and /v2/sandboxes."""

    template_id: Annotated[str, Field(alias="templateID", min_length=1, max_length=1024)]
    timeout: Seconds | None = None
    auto_pause: Annotated[bool, Field(alias="autoPause", strict=True)] = False
    metadata: Texts = Field(default_factory=dict)
    env_vars: Annotated[Environment, Field(alias="envVars")] = Field(default_factory=dict)
    auto_resume: Annotated[AutoResume | None, Field(alias="autoResume")] = None
    secure: bool | None = None
    network: Annotated[Egress, BeforeValidator(_no_null)] = Egress()
    allow_internet_access: bool | None = None
    volume_mounts: Annotated[list[Any] | None, Field(alias="volumeMounts")] = None
    mcp: dict[str, Any] | None = None
    iam: dict[str, Any] | None = None


class Timeout(_Body):
    """Body of POST .../timeout."""

    timeout: Seconds


class Connect(_Body):
    """Body of POST .../connect and .../resume."""

    timeout: Seconds | None = None
    auto_pause: Annotated[bool | None, Field(alias="autoPause", strict=True)] = None
    memory: bool | None = None


class Refresh(_Body):
    """Body of POST .../refreshes."""

    duration: Annotated[int, Field(ge=0, le=3600, strict=True)] = 60


class Pause(_Body):
    """Body of POST .../pause."""

    memory: bool | None = None


class NewSnapshot(_Body):
    """Body of POST .../snapshots."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")] | None = None


def without_network(request: web.Request, wanted: Egress) -> dict[str, str]:
    """Return the headers of an answer to a request for a way out, which no sandbox has: a client that wants the
    internet, as old SDKs always do, is told that there is none. Raises ApiError for destinations that are named."""
    for name, value in (("allowOut", wanted.allow_out), ("rules", wanted.rules), ("egressProxy", wanted.egress_proxy)):
        if value:
            raise unsupported(f"network.{name}: a sandbox reaches no network")
    if not wanted.allow_internet_access:
        return {}
    logger.warning("%s %s: allow_internet_access: a sandbox reaches no network", request.method, request.path)
    return {NOT_GRANTED: "allow_internet_access"}


async def read_body(request: web.Request, kind: type[B]) -> B:
    """Parse the body of a request. Raises ApiError 400."""
    data = bytearray()
    async for part in request.content.iter_chunked(1 << 16):
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise ApiError(400, f"invalid request body: more than {MAX_BODY_BYTES} bytes")
    try:
        return kind.model_validate_json(bytes(data) or b"{}")
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise ApiError(400, f"invalid request body: {place or 'body'}: {problem['msg']}") from error


def idempotency_key(request: web.Request) -> str:
    """Return the client's idempotency key, or "" if there is none. Raises ApiError 400."""
    key = request.headers.get("Idempotency-Key", "")
    if key and not _IDEMPOTENCY_KEY.fullmatch(key):
        raise ApiError(400, "Idempotency-Key: must be 1 to 255 lowercase letters, digits and hyphens")
    return key


def digest(body: NewSandbox) -> str:
    """Return a digest of a body, used to detect a key that is reused with a different body."""
    document = orjson.dumps(body.model_dump(), option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(document).hexdigest()


_FIRST_S: Final = -62_135_596_800.0
"""0001-01-01T00:00:00Z"""
_LAST_S: Final = 253_402_300_799.0
"""9999-12-31T23:59:59Z"""


def timestamp(seconds: float) -> str:
    """Format a time as RFC 3339 in UTC, for the API and the protobuf JSON mapping. A time outside the range of years
    that RFC 3339 can express, which a file may have, is replaced with the nearest one inside it."""
    within = min(max(seconds, _FIRST_S), _LAST_S)
    return datetime.fromtimestamp(within, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
