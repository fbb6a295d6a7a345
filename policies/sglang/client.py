"""Client of one inference server with SGLang's HTTP API: SGLang (see dialects.py), or the embedded CPU engine.

Invariants:
- Every call has a deadline and raises only EngineError. If a caller is cancelled, its generation is aborted on the
  server.
- Requests that would kill an SGLang server are refused here: an id outside the vocabulary, a flush within an update, an
  update from an unknown group (0.5.15), releasing memory while requests run, or resuming memory twice.
- The server's dialect is read once; a generation needs it only if a reply lacks version spans.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import numpy as np
from pydantic import Field

from headrace.buffer.primitives.sections import Section
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import (
    Completion,
    EngineId,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    PauseMode,
    RequestId,
)
from headrace.policies.errors import (
    EngineDown,
    EngineError,
    EngineReplyInvalid,
    EngineTimeout,
    EngineUnavailable,
    RequestInvalid,
    UnknownGroup,
)
from headrace.policies.sglang.replies import generate_body, mark_stale, parse_completion, read, read_version, wire_id
from headrace.policies.sglang.transport import Transport
from headrace.policies.sglang.versions import EMBEDDED_PREFIX, SGLangApi, dialect_of
from headrace.policies.tensors import Bucket

# If SGLang does not report its context, it accepts prompts of at most context - 6 tokens (0.5.23).
SGLANG_RESERVED_TOKENS = 6


class SGLangConfig(Section):
    """Deadlines and limits of one client."""

    vocab_size: int = Field(gt=0)
    """Size of the vocabulary; ids outside it are refused before they are sent."""
    generate_timeout_s: float = Field(default=300.0, gt=0)
    """Time limit for one generation, including its waiting time and pauses."""
    control_timeout_s: float = Field(default=10.0, gt=0)
    """Time limit for calls without a separate one."""
    update_timeout_s: float = Field(default=30.0, gt=0)
    """Time limit for forming a group, and for receiving one bucket."""
    read_timeout_s: float = Field(default=21.0, gt=0)
    """Time limit for reading a model directory."""
    abort_timeout_s: float = Field(default=2.0, gt=0)
    """Time limit for aborting a generation whose caller was cancelled."""
    foreign_version: str | None = None
    """Version to use in place of labels that are not `epoch.step`, for servers that get no pushes; None refuses such
    labels."""
    in_place: bool = False
    """True if pushes may be in place: output sampled with keys and values from older weights is marked `stale_kv`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of an engine: requests (`waiting` includes retracted ones), and tokens in its cache."""

    running: int
    waiting: int
    used_tokens: int = 0

    @property
    def requests(self) -> int:
        return self.running + self.waiting


class SGLangEngine:
    """Client that implements Engine, and what pushes need. The caller closes the session. `key` is that
    of the server, None if it has none."""

    def __init__(
        self,
        engine_id: EngineId,
        url: str,
        session: aiohttp.ClientSession,
        config: SGLangConfig,
        *,
        key: str | None = None,
    ) -> None:
        self.engine_id = engine_id
        self._transport = Transport(engine_id, url, session, timeout_s=config.control_timeout_s, key=key)
        self._config = config
        self._known_dialect: SGLangApi | None = None
        self._pause_mode: PauseMode | None = None
        self._groups: set[str] = set()

    @property
    def url(self) -> str:
        return self._transport.url

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. Raises RequestInvalid before anything is sent, or EngineError."""
        limit, timeout_s = self._config.vocab_size, self._config.generate_timeout_s
        if not len(request.input_ids) or request.max_new_tokens < 1:
            raise RequestInvalid("input_ids must not be empty and max_new_tokens must be at least 1")
        try:
            input_ids = np.asarray(request.input_ids, dtype=np.int32)
        except OverflowError as error:
            raise RequestInvalid(f"an input id is outside the vocabulary [0, {limit}) (vocab_size): {error}") from error
        if (outside := input_ids[(input_ids < 0) | (input_ids >= limit)]).size:
            raise RequestInvalid(f"input id {outside[0]} is outside the vocabulary [0, {limit}) (vocab_size)")
        try:
            reply = await self._transport.post("/generate", generate_body(request), timeout_s=timeout_s)
        except (asyncio.CancelledError, EngineTimeout):
            # SGLang notices a closed connection only after seconds, so the abort is sent explicitly.
            with suppress(EngineError):
                await self.abort(request.request_id)
            raise
        meta, foreign_version = reply.get("meta_info"), self._config.foreign_version
        lacks_spans = isinstance(meta, dict) and "weight_versions" not in meta and foreign_version is None
        expects_spans = not lacks_spans or (await self.dialect()).version_spans
        completion = parse_completion(reply, foreign_version, expects_spans=expects_spans)
        # Such ids could not be sent again as part of a prompt, and are not a sample of this model.
        output_ids = completion.output_ids
        if output_ids and not 0 <= min(output_ids) <= max(output_ids) < limit:
            wrong = next(token for token in output_ids if not 0 <= token < limit)
            raise EngineReplyInvalid(f"/generate: output id {wrong} is not in the vocabulary [0, {limit}) (vocab_size)")
        if (count := len(output_ids)) > request.max_new_tokens:
            raise EngineReplyInvalid(
                f"/generate: {count} output ids, but at most {request.max_new_tokens} were requested"
            )
        if not output_ids and completion.finish is not FinishReason.ABORT:
            raise EngineReplyInvalid(f"/generate: finish_reason {completion.finish} but no output ids")
        if self._config.in_place:
            return replace(completion, spans=mark_stale(completion, request.cache_namespace))
        return completion

    async def abort(self, request_id: RequestId) -> None:
        """Abort a request; does nothing for an unknown id. The abort is lost if the request arrived during a pause:
        close the gate before pausing."""
        # Since 0.5.21, according to its source, SGLang ignores the second abort of a request.
        body = {"rid": wire_id(request_id)}
        await self._transport.call("POST", "/abort_request", body, timeout_s=self._config.abort_timeout_s)

    async def pause(self, mode: PauseMode) -> None:
        await self._transport.post("/pause_generation", {"mode": mode.value})
        self._pause_mode = mode

    async def resume(self) -> None:
        await self._transport.post("/continue_generation", {})
        self._pause_mode = None

    async def health(self) -> None:
        """Check that the server is alive (it may be paused). Raises EngineError otherwise."""
        try:
            await self._transport.call("GET", "/health")
        except EngineDown:
            raise
        except (EngineTimeout, EngineUnavailable):
            # An attached server may generate a token for its health check, which fails while it is paused.
            if not await self.is_paused():
                raise

    async def info(self) -> EngineInfo:
        """Return the server's info, from four cheap routes."""
        server, model = await self._transport.get("/server_info"), await self._transport.get("/model_info")
        version = read(server, "version", str)
        dialect = self._known_dialect = dialect_of(version)
        load = await self.load()
        # A server names one of these or both: the KV cache may be too small for the model's context.
        lengths = [read(server, "context_length", int)] if server.get("context_length") else []
        if not lengths or server.get("max_req_input_len"):
            lengths.append(read(server, "max_req_input_len", int) + SGLANG_RESERVED_TOKENS)
        return EngineInfo(
            server_version=version,
            version=read_version(read(model, "weight_version", str), self._config.foreign_version),
            running=load.running,
            waiting=load.waiting,
            max_context_tokens=min(lengths),
            paused=await self.is_paused(),
            model_path=str(model.get("model_path") or ""),
            ranks=int(server.get("tp_size") or 1),
            update_session=dialect.update_session,
            version_spans=dialect.version_spans,
            snapshot_checksums=version.startswith(EMBEDDED_PREFIX),
        )

    async def dialect(self) -> SGLangApi:
        """Return the server's dialect, which is read only once."""
        if self._known_dialect is None:
            self._known_dialect = dialect_of(read(await self._transport.get("/server_info"), "version", str))
        return self._known_dialect

    async def load(self) -> EngineLoad:
        loads = read(await self._transport.get("/v1/loads"), "loads", list)
        return EngineLoad(
            running=sum(read(load, "num_running_reqs", int) for load in loads),
            waiting=sum(read(load, "num_waiting_reqs", int) for load in loads),
            used_tokens=sum(int(load.get("num_used_tokens") or 0) for load in loads),
        )

    async def begin_update(self) -> None:
        """Open an update session, if the dialect has sessions. Unless it is paused, the server first finishes running
        requests. Raises SessionAlreadyOpen."""
        if (await self.dialect()).update_session:
            await self._transport.post("/begin_weight_update", {})

    async def end_update(self) -> None:
        """Close the update session, if the dialect has sessions. Raises NoSession."""
        if (await self.dialect()).update_session:
            await self._transport.post("/end_weight_update", {})

    async def join_group(self, name: str, *, host: str, port: int, rank: int, world_size: int, backend: str) -> None:
        """Join a group. Returns once it has been formed, so rank 0 must join concurrently."""
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
        """Leave a group. Raises UnknownGroup."""
        self._groups.discard(name)
        await self._transport.post("/destroy_weights_update_group", {"group_name": name})

    async def update(
        self, bucket: Bucket, *, group: str, version: PolicyVersion | None, flattened: bool = True
    ) -> None:
        """Receive one bucket, its tensors one by one or `flattened` to a single one. Returns once it has been received
        (with NCCL perhaps before, but what the engine does next waits for it), so rank 0 must broadcast concurrently.

        Raises NoSession, UnknownGroup, WeightsMixed."""
        if group not in self._groups and not (await self.dialect()).refuses_unknown_groups:
            raise UnknownGroup(400, f"{self.engine_id}: group {group} was not joined; this update would end the server")
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": group,
            "load_format": "flattened_bucket" if flattened else None,
        }
        await self._update("/update_weights_from_distributed", body | update_options(version))

    async def update_from_disk(self, model: Path, *, version: PolicyVersion) -> None:
        """Load a model directory that the server can read, without a session. Raises WeightsMixed."""
        body = {"model_path": str(model)} | update_options(version)
        await self._transport.post("/update_weights_from_disk", body, timeout_s=self._config.read_timeout_s)

    async def pull(self, target: Path, *, source: Path, version: int) -> None:
        """Have every host of the server bring its copy of the model, in `target`, to this version of the stream of
        deltas in `source`; rollouts continue. Needs slime's SGLang (its docker/patch/latest/sglang-pull_weights.patch).
        Raises EngineRefused, also for a checksum that differs or a delta whose base is missing."""
        body = {"local_checkpoint_dir": str(target), "source_dir": str(source), "target_version": version}
        await self._transport.post("/pull_weights", body, timeout_s=self._config.read_timeout_s)

    async def relabel(self, version: PolicyVersion) -> None:
        """Change the version of the current weights; requests continue."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._transport.post("/update_weight_version", body)

    async def flush(self) -> None:
        """Flush all cached keys and values. Raises FlushRefused while requests are using any."""
        await self._transport.call("POST", "/flush_cache", {})

    async def checksums(self) -> dict[str, str]:
        """Return checksums, keyed by the server's own parameter names. SGLang's can only be compared among engines of
        one kind: it fuses parameters, and its hash depends on its version and device (see push/compatibility.py)."""
        reply = await self._transport.post("/weights_checker", {"action": "checksum"})
        ranks = read(reply, "ranks", list)
        sums: dict[str, str] = {}
        for index, rank in enumerate(ranks):
            prefix = "" if len(ranks) == 1 else f"rank{index}."
            sums |= {prefix + name: str(value) for name, value in read(rank, "checksums", dict).items()}
        return sums

    async def aclose(self) -> None:
        """Do nothing: the session belongs to the caller."""

    async def _update(self, path: str, body: object) -> None:
        await self._transport.post(path, body, timeout_s=self._config.update_timeout_s)

    async def is_paused(self) -> bool:
        """Return True if the server is paused: by its own report, which does not wait for a step of the engine, or else
        by this client's last call."""
        if not (await self.dialect()).ready_route:
            return self._pause_mode is not None
        try:
            await self._transport.call("GET", "/ready")
        except EngineUnavailable:
            return True
        return False


def update_options(version: PolicyVersion | None) -> dict[str, object]:
    """Return the options of every update. The cache is flushed by a separate call, because a flush within an update
    crashes older servers."""
    label = {} if version is None else {"weight_version": str(version)}
    return {"flush_cache": False, "abort_all_requests": False, **label}
