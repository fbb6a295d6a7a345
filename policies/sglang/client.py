"""Client of one inference server that speaks SGLang's HTTP contract: SGLang (see dialects.py), or our CPU engine.

Invariants:
- Every call has a deadline and raises EngineError only; a generation whose caller gives up is aborted on the server.
- What kills an SGLang server is refused here: an id outside the vocabulary, a flush within an update, an update from
  an unknown group (0.5.15), memory that is released while requests run or taken back twice.
- The server's dialect is read from it once; a generation asks for it only where a reply lacks its version spans.
"""

from __future__ import annotations

import asyncio
import base64
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from headrace.policies.engine import Completion, EngineInfo, FinishReason, PauseMode
from headrace.policies.errors import (
    EngineDown,
    EngineError,
    EngineReplyInvalid,
    EngineTimeout,
    EngineUnavailable,
    RequestInvalid,
    UnknownGroup,
)
from headrace.policies.sglang.dialects import EMBEDDED_PREFIX, Dialect, dialect_of
from headrace.policies.sglang.replies import generate_body, mark_stale, parse_completion, read, read_version, wire_id
from headrace.policies.sglang.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import aiohttp

    from headrace.buffer.versions import PolicyVersion
    from headrace.policies.engine import EngineId, GenerateRequest, RequestId
    from headrace.policies.push.tensors import Bucket

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
    in_place: bool = False
    """Pushes may arrive in place: output sampled on keys and values of older weights is flagged `stale_kv`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Numbers of requests (`waiting` counts retracted ones), and of tokens in the cache of keys and values."""

    running: int
    waiting: int
    used_tokens: int = 0


class SGLangEngine:
    """An Engine and an EngineControl (push/contract.py). The session belongs to the caller, who closes it."""

    def __init__(self, engine_id: EngineId, url: str, session: aiohttp.ClientSession, config: SGLangConfig) -> None:
        self.engine_id = engine_id
        self._transport = Transport(engine_id, url, session, timeout_s=config.control_timeout_s)
        self._config = config
        self._known_dialect: Dialect | None = None
        self._pause_mode: PauseMode | None = None
        self._released = False
        self._groups: set[str] = set()

    @property
    def url(self) -> str:
        return self._transport.url

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. Raises RequestInvalid before anything is sent, else EngineError."""
        self._check_input(request)
        timeout_s = self._config.generate_timeout_s
        try:
            reply = await self._transport.post("/generate", generate_body(request), timeout_s=timeout_s)
        except (asyncio.CancelledError, EngineTimeout):
            # SGLang notices a closed connection only after seconds: tell it.
            with suppress(EngineError):
                await self.abort(request.request_id)
            raise
        completion = parse_completion(reply, self._config.foreign_version, spans_told=await self._spans_told(reply))
        self._check_output(request, completion)
        if self._config.in_place:
            return replace(completion, spans=mark_stale(completion, request.cache_namespace))
        return completion

    async def abort(self, request_id: RequestId) -> None:
        """End a request early; unknown ids are fine. Lost if the request arrived during a pause: close the gate before.
        (Since 0.5.21, by its source, SGLang ignores the second time what it was told once.)"""
        body = {"rid": wire_id(request_id)}
        await self._transport.call("POST", "/abort_request", body, timeout_s=self._config.abort_timeout_s)

    async def pause(self, mode: PauseMode) -> None:
        await self._transport.post("/pause_generation", {"mode": mode.value})
        self._pause_mode = mode

    async def resume(self) -> None:
        await self._transport.post("/continue_generation", {})
        self._pause_mode = None

    async def health(self) -> None:
        """Returns when the server lives, paused or not; raises EngineError otherwise."""
        try:
            await self._transport.call("GET", "/health")
        except EngineDown:
            raise
        except (EngineTimeout, EngineUnavailable):
            # Somebody else's server may generate a token to say that it is well, which it cannot while it is paused.
            if not await self._paused():
                raise

    async def info(self) -> EngineInfo:
        """What the server says about itself, from four cheap routes."""
        server, model = await self._transport.get("/server_info"), await self._transport.get("/model_info")
        dialect = self._learn(server)
        load = await self.load()
        version = read(server, "version", str)
        context = server.get("context_length") or read(server, "max_req_input_len", int) + SGLANG_RESERVED_TOKENS
        return EngineInfo(
            server_version=version,
            version=read_version(read(model, "weight_version", str), self._config.foreign_version),
            running=load.running,
            waiting=load.waiting,
            max_context_tokens=context,
            paused=await self._paused(),
            model_path=str(model.get("model_path") or ""),
            ranks=int(server.get("tp_size") or 1),
            update_session=dialect.update_session,
            version_spans=dialect.version_spans,
            snapshot_checksums=version.startswith(EMBEDDED_PREFIX),
        )

    async def dialect(self) -> Dialect:
        """How this server speaks; asked once."""
        return self._known_dialect or self._learn(await self._transport.get("/server_info"))

    async def load(self) -> EngineLoad:
        loads = read(await self._transport.get("/v1/loads"), "loads", list)
        return EngineLoad(
            running=sum(read(load, "num_running_reqs", int) for load in loads),
            waiting=sum(read(load, "num_waiting_reqs", int) for load in loads),
            used_tokens=sum(int(load.get("num_used_tokens") or 0) for load in loads),
        )

    async def begin_update(self) -> None:
        """Open a session, where there are sessions. Unless it is paused the server first lets running requests end.
        Raises SessionAlreadyOpen."""
        if (await self.dialect()).update_session:
            await self._transport.post("/begin_weight_update", {})

    async def end_update(self) -> None:
        """Close the session, where there are sessions. Raises NoSession."""
        if (await self.dialect()).update_session:
            await self._transport.post("/end_weight_update", {})

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
        await self._update("/init_weights_update_group", body)
        self._groups.add(name)

    async def leave_group(self, name: str) -> None:
        """Raises UnknownGroup."""
        self._groups.discard(name)
        await self._transport.post("/destroy_weights_update_group", {"group_name": name})

    async def update(self, bucket: Bucket, *, group: str, version: PolicyVersion | None) -> None:
        """Receive one flattened bucket; returns when it is loaded, so rank 0 must broadcast meanwhile.

        Raises NoSession, UnknownGroup, WeightsMixed."""
        if group not in self._groups and not (await self.dialect()).refuses_unknown_groups:
            raise UnknownGroup(400, f"{self.engine_id}: group {group} was not joined; this server ends when asked")
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": group,
            "load_format": "flattened_bucket",
        }
        await self._update("/update_weights_from_distributed", body | update_options(version))

    async def update_from_tensors(self, serialized: Sequence[bytes], *, version: PolicyVersion | None) -> None:
        """Take tensors that SGLang's own serializer packed, one piece for each rank: for a learner on the same machine,
        whose memory the server maps. On a CPU pack them with torch's sharing strategy `file_system`: a server that may
        not open what it is given ends. Raises NoSession, WeightsMixed."""
        body = {"serialized_named_tensors": [base64.b64encode(piece).decode() for piece in serialized]}
        await self._update("/update_weights_from_tensor", body | update_options(version))

    async def update_from_disk(self, model: Path, *, version: PolicyVersion) -> None:
        """Load a model directory that the server can read; needs no session. Raises WeightsMixed."""
        await self._update("/update_weights_from_disk", {"model_path": str(model)} | update_options(version))

    async def relabel(self, version: PolicyVersion) -> None:
        """Call the weights that are there another version; requests go on."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._transport.post("/update_weight_version", body)

    async def flush(self) -> None:
        """Forget all cached keys and values. Raises FlushRefused while requests hold some."""
        await self._transport.call("POST", "/flush_cache", {})

    async def release_memory(self) -> None:
        """Give the memory of weights and cache back until `resume_memory`; what was in it is lost. Pause it by retract
        or abort first. Raises RequestInvalid otherwise: a server that is asked while requests run ends."""
        if self._released or self._pause_mode not in (PauseMode.RETRACT, PauseMode.ABORT):
            raise RequestInvalid(f"{self.engine_id}: pause it by retract or abort, then release its memory once")
        await self._transport.call("POST", "/release_memory_occupation", {})
        self._released = True

    async def resume_memory(self) -> None:
        """Take the memory back; weights must come next. Raises RequestInvalid unless this client released it: a server
        that is asked without ends."""
        if not self._released:
            raise RequestInvalid(f"{self.engine_id}: no memory was released here")
        await self._transport.call("POST", "/resume_memory_occupation", {})
        self._released = False

    async def checksums(self) -> dict[str, str]:
        """Checksums by the server's own parameter names: SGLang fuses some, so that they compare among engines only."""
        reply = await self._transport.post("/weights_checker", {"action": "checksum"})
        ranks = read(reply, "ranks", list)
        sums: dict[str, str] = {}
        for index, rank in enumerate(ranks):
            prefix = "" if len(ranks) == 1 else f"rank{index}."
            sums |= {prefix + name: str(value) for name, value in read(rank, "checksums", dict).items()}
        return sums

    async def aclose(self) -> None:
        """Nothing of its own is open."""

    async def _update(self, path: str, body: object) -> None:
        await self._transport.post(path, body, timeout_s=self._config.update_timeout_s)

    def _learn(self, server: dict[str, Any]) -> Dialect:
        """From a reply of /server_info."""
        self._known_dialect = dialect_of(read(server, "version", str))
        return self._known_dialect

    async def _spans_told(self, reply: dict[str, Any]) -> bool:
        """Whether a reply without version spans is an error."""
        meta = reply.get("meta_info")
        if not isinstance(meta, dict) or "weight_versions" in meta or self._config.foreign_version is not None:
            return True
        return (await self.dialect()).version_spans

    async def _paused(self) -> bool:
        """As the server says; where it does not, what this client did last."""
        if not (await self.dialect()).ready_route:
            return self._pause_mode is not None
        try:
            await self._transport.call("GET", "/ready")
        except EngineUnavailable:
            return True
        return False

    def _check_input(self, request: GenerateRequest) -> None:
        limit = self._config.vocab_size
        if not len(request.input_ids) or request.max_new_tokens < 1:
            raise RequestInvalid("input_ids must not be empty and max_new_tokens must be at least 1")
        try:
            ids = np.asarray(request.input_ids, dtype=np.int32)
        except OverflowError as error:
            raise RequestInvalid(f"an input id is outside the vocabulary [0, {limit}) (vocab_size): {error}") from error
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


def update_options(version: PolicyVersion | None) -> dict[str, object]:
    """What every update says. The cache is flushed by a call of its own: within an update it ends older servers."""
    label = {} if version is None else {"weight_version": str(version)}
    return {"flush_cache": False, "abort_all_requests": False, **label}
