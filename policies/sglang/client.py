"""Client of one inference server that speaks SGLang's HTTP contract: SGLang >= 0.5.21, or our CPU engine.

Invariants:
- Every call has a deadline and raises EngineError only; a generation whose caller gives up is aborted on the server.
- Ids are checked against the vocabulary before they are sent: one bad id kills an SGLang server.
- What the server says is believed only where the contract's keys are there; versions come from its spans.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field

from headrace.buffer.versions import PolicyVersion
from headrace.policies.engine import Completion, EngineInfo, FinishReason, TokenSpan
from headrace.policies.errors import (
    EngineDown,
    EngineError,
    EngineRefused,
    EngineReplyInvalid,
    EngineTimeout,
    EngineUnavailable,
    RequestInvalid,
)

if TYPE_CHECKING:
    from headrace.policies.engine import EngineId, GenerateRequest, PauseMode, RequestId
    from headrace.policies.push.contract import BucketSpec

# SGLang takes a prompt of at most context - 6 tokens (0.5.23) when it does not tell its context.
SGLANG_RESERVED_TOKENS = 6


class SGLangConfig(BaseModel):
    """Deadlines and limits of one client."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: int = Field(gt=0)
    """Ids at or above it are refused before they are sent."""
    generate_timeout_s: float = Field(default=300.0, gt=0)
    """One generation, with its wait in the queue and through pauses."""
    control_timeout_s: float = Field(default=10.0, gt=0)
    """Every other call that has no deadline of its own."""
    update_timeout_s: float = Field(default=30.0, gt=0)
    """Formation of a group, and reception of one bucket."""
    abort_timeout_s: float = Field(default=2.0, gt=0)
    """The abort sent for a generation that was given up."""
    foreign_version: str | None = None
    """What a weight version that is not `epoch.step` is read as, for servers that nobody pushes to; None refuses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Numbers of requests (`waiting` counts retracted ones), and of tokens in the cache of keys and values."""

    running: int
    waiting: int
    used_tokens: int = 0


class SGLangEngine:
    """An Engine and an EngineControl (push.py). The session belongs to the caller, who closes it."""

    def __init__(self, engine_id: EngineId, url: str, session: aiohttp.ClientSession, config: SGLangConfig) -> None:
        self.engine_id = engine_id
        self.url = url.rstrip("/")
        self._session = session
        self._config = config

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. Raises RequestInvalid before anything is sent, else EngineError."""
        self._check_input(request)
        try:
            reply = await self._post("/generate", generate_body(request), timeout_s=self._config.generate_timeout_s)
        except (asyncio.CancelledError, EngineTimeout):
            # SGLang notices a closed connection only after seconds: tell it.
            with suppress(EngineError):
                await self.abort(request.request_id)
            raise
        completion = parse_completion(reply, self._config.foreign_version)
        self._check_output(request, completion)
        return completion

    async def abort(self, request_id: RequestId) -> None:
        """End a request early; unknown ids are fine. Lost if the request arrived during a pause: repeat it then."""
        await self._call("POST", "/abort_request", {"rid": request_id}, self._config.abort_timeout_s)

    async def pause(self, mode: PauseMode) -> None:
        await self._post("/pause_generation", {"mode": mode.value})

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def info(self) -> EngineInfo:
        """What the server says about itself, from four cheap routes."""
        server, model = await self._get("/server_info"), await self._get("/model_info")
        load = await self.load()
        context = server.get("context_length") or read(server, "max_req_input_len", int) + SGLANG_RESERVED_TOKENS
        return EngineInfo(
            server_version=read(server, "version", str),
            version=read_version(read(model, "weight_version", str), self._config.foreign_version),
            running=load.running,
            waiting=load.waiting,
            max_context_tokens=context,
            paused=await self._paused(),
            model_path=read(model, "model_path", str),
            ranks=int(server.get("tp_size") or 1),
        )

    async def load(self) -> EngineLoad:
        loads = read(await self._get("/v1/loads"), "loads", list)
        return EngineLoad(
            running=sum(read(load, "num_running_reqs", int) for load in loads),
            waiting=sum(read(load, "num_waiting_reqs", int) for load in loads),
            used_tokens=sum(int(load.get("num_used_tokens") or 0) for load in loads),
        )

    async def begin_update(self) -> None:
        await self._post("/begin_weight_update", {})

    async def end_update(self) -> None:
        await self._post("/end_weight_update", {})

    async def join_group(self, name: str, *, host: str, port: int, rank: int, world_size: int, backend: str) -> None:
        """Returns when the group is formed, so rank 0 must join meanwhile."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": rank,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        await self._post("/init_weights_update_group", body, timeout_s=self._config.update_timeout_s)

    async def leave_group(self, name: str) -> None:
        await self._post("/destroy_weights_update_group", {"group_name": name})

    async def update(self, bucket: BucketSpec, *, group: str, version: PolicyVersion | None) -> None:
        """Receive one flattened bucket; returns when it is loaded, so rank 0 must broadcast meanwhile."""
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "abort_all_requests": False,
        }
        if version is not None:
            body["weight_version"] = str(version)
        await self._post("/update_weights_from_distributed", body, timeout_s=self._config.update_timeout_s)

    async def flush(self) -> None:
        await self._call("POST", "/flush_cache", {}, self._config.control_timeout_s)

    async def checksums(self) -> dict[str, str]:
        """Checksums by the server's own parameter names."""
        reply = await self._post("/weights_checker", {"action": "checksum"})
        ranks = read(reply, "ranks", list)
        sums: dict[str, str] = {}
        for index, rank in enumerate(ranks):
            prefix = "" if len(ranks) == 1 else f"rank{index}."
            sums |= {prefix + name: str(value) for name, value in read(rank, "checksums", dict).items()}
        return sums

    async def aclose(self) -> None:
        """Nothing of its own is open."""

    async def _paused(self) -> bool:
        try:
            await self._call("GET", "/ready", None, self._config.control_timeout_s)
        except EngineUnavailable:
            return True
        return False

    def _check_input(self, request: GenerateRequest) -> None:
        limit = self._config.vocab_size
        if not len(request.input_ids) or request.max_new_tokens < 1:
            raise RequestInvalid("input_ids must not be empty and max_new_tokens must be at least 1")
        ids = np.asarray(request.input_ids, dtype=np.int32)
        if (wrong := ids[(ids < 0) | (ids >= limit)]).size:
            raise RequestInvalid(f"input id {wrong[0]} is outside the vocabulary [0, {limit}) (vocab_size)")

    def _check_output(self, request: GenerateRequest, completion: Completion) -> None:
        """What could not be sent again as part of a prompt, or was not asked for, is no sample of this model."""
        ids, limit = completion.output_ids, self._config.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < limit:
            wrong = next(token for token in ids if not 0 <= token < limit)
            raise EngineReplyInvalid(f"/generate: output id {wrong} is not in the vocabulary [0, {limit}) (vocab_size)")
        if len(ids) > request.max_new_tokens:
            raise EngineReplyInvalid(f"/generate: {len(ids)} output ids, {request.max_new_tokens} were asked for")
        if not ids and completion.finish is not FinishReason.ABORT:
            raise EngineReplyInvalid(f"/generate: finish_reason {completion.finish} without one output id")

    async def _get(self, path: str) -> dict[str, Any]:
        return parse_object(path, await self._call("GET", path, None, self._config.control_timeout_s))

    async def _post(self, path: str, body: object, *, timeout_s: float | None = None) -> dict[str, Any]:
        return parse_object(path, await self._call("POST", path, body, timeout_s or self._config.control_timeout_s))

    async def _call(self, method: str, path: str, body: object, timeout_s: float) -> bytes:
        """The reply's bytes. The one place that turns transport errors and statuses into EngineError."""
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, timeout=timeout
            ) as response:
                status, payload = response.status, await response.read()
        except TimeoutError as error:
            raise EngineTimeout(f"{self.engine_id}: no answer to {path} within {timeout_s} s") from error
        except aiohttp.ClientConnectorError as error:
            raise EngineDown(f"{self.engine_id}: nothing listens at {self.url}: {error!r}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"{self.engine_id}: {path} at {self.url}: {error!r}") from error
        if status >= 500:
            raise EngineUnavailable(f"{self.engine_id}: {path} answered {status}: {error_text(payload)}")
        if status >= 400:
            raise EngineRefused(status, f"{self.engine_id}: {path}: {error_text(payload)}")
        return payload


def generate_body(request: GenerateRequest) -> dict[str, object]:
    """The /generate body of one request."""
    return {
        "rid": request.request_id,
        "input_ids": np.asarray(request.input_ids, dtype=np.int32),
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "stop": request.stop,
            "stop_token_ids": request.stop_token_ids,
        },
    }


def parse_completion(reply: dict[str, Any], foreign_version: str | None = None) -> Completion:
    """A Completion from a /generate reply; a request aborted in the queue lacks some keys. Raises
    EngineReplyInvalid."""
    meta = read(reply, "meta_info", dict)
    ids = tuple(read(reply, "output_ids", list))
    if not {*map(type, ids)} <= {int}:
        raise EngineReplyInvalid(f"/generate: output_ids are not all whole numbers: {ids[:8]}")
    try:
        logprobs = tuple(map(float, map(itemgetter(0), read(meta, "output_token_logprobs", list))))
        finish = FinishReason(read(meta, "finish_reason", dict)["type"])
        spans = _read_spans(meta, len(ids), foreign_version)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineReplyInvalid(f"/generate: {error!r} in meta_info (SGLang >= 0.5.21 is needed)") from error
    if len(logprobs) != len(ids) or not all(map(math.isfinite, logprobs)) or not covers(spans, len(ids)):
        raise EngineReplyInvalid(f"/generate: ids, logprobs and spans do not fit: {len(ids)}, {len(logprobs)}, {spans}")
    return Completion(
        output_ids=ids,
        logprobs=logprobs,
        spans=spans,
        finish=finish,
        text=read(reply, "text", str),
        prompt_tokens=_count(meta, "prompt_tokens"),
        cached_tokens=_count(meta, "cached_tokens"),
        retractions=_count(meta, "num_retractions"),
    )


def _count(meta: dict[str, Any], key: str) -> int:
    """A number that may be missing."""
    return 0 if meta.get(key) is None else int(read(meta, key, int))


def covers(spans: tuple[TokenSpan, ...], length: int) -> bool:
    """The spans follow one another from 0 to `length`."""
    edges = [0, *(span.end for span in spans)]
    follow = all(span.start == edge <= span.end for span, edge in zip(spans, edges, strict=False))
    return follow and edges[-1] == length


def _read_spans(meta: dict[str, Any], length: int, foreign_version: str | None) -> tuple[TokenSpan, ...]:
    """The server's own spans; where its versions mean nothing to us and it has none, one over the whole output."""
    if foreign_version is not None and "weight_versions" not in meta:
        return (TokenSpan(start=0, end=length, version=PolicyVersion.parse(foreign_version)),)[: bool(length)]
    return tuple(
        TokenSpan(
            start=int(span["start"]), end=int(span["end"]), version=read_version(span["version"], foreign_version)
        )
        for span in read(meta, "weight_versions", list)
    )


def read_version(text: str, foreign_version: str | None = None) -> PolicyVersion:
    """Raises EngineReplyInvalid for a label that is not one of ours, unless `foreign_version` stands for those."""
    try:
        return PolicyVersion.parse(text)
    except (ValueError, AttributeError) as error:
        if foreign_version is not None:
            return PolicyVersion.parse(foreign_version)
        raise EngineReplyInvalid(
            f"weight_version {text!r} is not epoch.step: start the server with --weight-version 1.0"
        ) from error


def read(source: dict[str, Any], key: str, kind: type[Any]) -> Any:
    """`source[key]` if it is there and of this type. Raises EngineReplyInvalid."""
    value = source.get(key) if isinstance(source, dict) else None
    if not isinstance(value, kind):
        raise EngineReplyInvalid(f"the reply lacks {key} of type {kind.__name__}")
    return value


def parse_object(path: str, payload: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise EngineReplyInvalid(f"{path} did not answer JSON: {payload[:200]!r}") from error
    if not isinstance(body, dict):
        raise EngineReplyInvalid(f"{path} did not answer one JSON object: {payload[:200]!r}")
    return body


def error_text(payload: bytes) -> str:
    """The message of an error body, in any of its forms."""
    try:
        body = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return payload[:500].decode(errors="replace")
    if isinstance(body, dict):
        inner = body.get("error")
        message = inner.get("message") if isinstance(inner, dict) else body.get("message")
        return str(message if message is not None else body)[:500]
    return str(body)[:500]
