"""HTTP server of the CPU engine, with SGLang's routes.

Invariants:
- Every reply is JSON, or empty if SGLang's is; a bad request gets a 400 with the reason and changes nothing.
- Bodies are parsed in the event loop's thread; the torch thread receives only valid values.
- The requests of a client that disconnects are dropped.
- If the server has a key, every request but /health must carry it; the others get a 401 and have no effect.
- Weights are read from named folders only, whatever path a request names.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hmac import compare_digest
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from aiohttp import web
from aiohttp.typedefs import Middleware
from pydantic import BaseModel, ValidationError

from headrace.policies.cpu_engine.grammars import Grammars
from headrace.policies.cpu_engine.replies import Json, generation_json, loads_json
from headrace.policies.cpu_engine.requests import (
    InitGroup,
    ModelLimits,
    UpdateFromDisk,
    UpdateVersion,
    UpdateWeights,
    parse_generate,
)
from headrace.policies.cpu_engine.thread import EngineThread
from headrace.policies.engine import PauseMode
from headrace.policies.errors import EngineUnavailable, GroupFailed, RequestInvalid
from headrace.policies.models.qwen_config import ARCHITECTURES

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from headrace.policies.cpu_engine.update import WeightUpdater

logger = logging.getLogger(__name__)
Body = TypeVar("Body", bound=BaseModel)
MAX_BODY_BYTES = 64 * 1024 * 1024
HEALTH_GENERATE_TIMEOUT_S = 20.0
FROM_TENSOR_REFUSED = (
    "update_weights_from_tensor is not supported: its tensors are pickled, and this engine does not unpickle data "
    "from the network; use update_weights_from_distributed or update_weights_from_disk"
)
KEY_REFUSED = "missing or wrong key: send `Authorization: Bearer KEY` with the key in the server's --key-file"
MEMORY_REFUSED = (
    "{path} is not supported: this engine cannot release memory and continue later; stop its process instead"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineServerSettings:
    """Properties of the server. `weights_folders` are those from which it may load weights, the model first; `key` is
    the one that requests must carry, None for none."""

    model_path: str
    family: str
    limits: ModelLimits
    max_running: int
    weights_folders: tuple[Path, ...]
    key: str | None = field(default=None, repr=False)


def json_response(body: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def outcome(message: str, *, success: bool = True) -> web.Response:
    """Return a reply of the weight routes in SGLang's format."""
    return json_response({"success": success, "message": message}, 200 if success else 400)


@web.middleware
async def classify(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Convert errors to HTTP statuses."""
    try:
        return await handler(request)
    except (RequestInvalid, GroupFailed) as error:
        body: Json = {"error": {"message": str(error)}}
        if "weight" in request.path:
            body |= {"success": False, "message": str(error)}
        if request.path == "/update_weights_from_disk":
            body["num_paused_requests"] = 0
        return json_response(body, 400)
    except EngineUnavailable as error:
        return json_response({"error": {"message": str(error)}}, 503)
    except web.HTTPException as error:
        return json_response({"error": {"message": error.reason}}, error.status)
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        return json_response({"error": {"message": "internal error; see the engine's log"}}, 500)


def key_check(key: str | None) -> Middleware:
    """Return the middleware that refuses requests without the server's key."""
    expected = f"Bearer {key}".encode()

    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if key is not None and request.path != "/health":
            given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not compare_digest(given, expected):
                raise web.HTTPUnauthorized(reason=KEY_REFUSED)
        return await handler(request)

    return check


def named_folder(path: Path, folders: Sequence[Path]) -> Path:
    """Return the resolved directory if it and all its files lie in one of the folders, also behind symbolic links.
    Raises RequestInvalid."""
    roots = [folder.resolve() for folder in folders]
    directory = path.resolve()
    if directory == roots[0]:
        # The model that the engine was started with; the files of a model cache are links to elsewhere.
        return directory
    files = directory.iterdir() if directory.is_dir() else ()
    for entry in (directory, *files):
        if not any(entry.resolve().is_relative_to(root) for root in roots[1:]):
            shown = ", ".join(map(str, folders))
            raise RequestInvalid(
                f"{entry} is in none of the folders from which this engine may load weights ({shown}): name its folder "
                "with --weights when the engine is started"
            )
    return directory


async def read_json(request: web.Request) -> Any:
    try:
        data = await request.read()
    except web.RequestPayloadError as error:
        raise RequestInvalid(f"the body cannot be decoded: {' '.join(str(error).split())}") from error
    if not data.strip():
        return {}
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RequestInvalid(f"the body is not valid JSON: {error}") from error


async def read_body(request: web.Request, model: type[Body]) -> Body:
    try:
        return model.model_validate(await read_json(request))
    except ValidationError as error:
        first = error.errors()[0]
        raise RequestInvalid(f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}") from error


async def read_object(request: web.Request) -> Json:
    body = await read_json(request)
    if not isinstance(body, dict):
        raise RequestInvalid("the body must be one JSON object")
    return body


class EngineServer:
    """HTTP handlers of one engine."""

    def __init__(
        self,
        engine: EngineThread,
        updater: WeightUpdater,
        tokenizer: Tokenizer,
        grammars: Grammars,
        settings: EngineServerSettings,
    ) -> None:
        self._engine = engine
        self._updater = updater
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._settings = settings
        self._model_path = settings.model_path

    def application(self) -> web.Application:
        middlewares = [classify, key_check(self._settings.key)]
        application = web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)
        post, get = application.router.add_post, application.router.add_get
        post("/generate", self.generate)
        post("/abort_request", self.abort)
        post("/pause_generation", self.pause)
        post("/continue_generation", self.resume)
        post("/begin_weight_update", self.begin)
        post("/end_weight_update", self.end)
        post("/init_weights_update_group", self.init_group)
        post("/destroy_weights_update_group", self.destroy_group)
        post("/update_weights_from_distributed", self.update)
        post("/update_weights_from_disk", self.update_from_disk)
        post("/update_weights_from_tensor", self.update_from_tensor)
        post("/update_weight_version", self.update_version)
        post("/release_memory_occupation", self.refuse_memory)
        post("/resume_memory_occupation", self.refuse_memory)
        post("/weights_checker", self.check_weights)
        post("/flush_cache", self.flush)
        get("/flush_cache", self.flush)
        get("/model_info", self.model_info)
        get("/get_model_info", self.model_info)
        get("/server_info", self.server_info)
        get("/get_server_info", self.server_info)
        get("/v1/loads", self.loads)
        get("/health", self.health)
        get("/health_generate", self.health_generate)
        get("/ready", self.ready)
        return application

    async def generate(self, request: web.Request) -> web.Response:
        parsed = parse_generate(await read_json(request), self._settings.limits, self._encode)
        samplings, states = [prompt.sampling for prompt in parsed.prompts], None
        if any(sampling.grammar is not None for sampling in samplings):
            # Apart from the event loop: compiling a large schema takes a second.
            states = await asyncio.to_thread(self._grammars.compile_for, samplings)
        started_s = time.monotonic()
        generations, futures = self._engine.generate(parsed.prompts, states)
        try:
            # All futures are awaited, even if one fails: the torch thread resolves each of them.
            results = await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
        except asyncio.CancelledError:
            self._engine.drop(generations)
            raise
        replies = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            if result.refusal:
                raise RequestInvalid(f"Failed to compile a grammar that is followed to its end: {result.refusal}")
            version = result.versions[-1] if result.versions else self._engine.runner.version
            latency_s = time.monotonic() - started_s
            replies.append(
                generation_json(result, self._decode, version=version, latency_s=latency_s, now_s=time.time())
            )
        return json_response(replies if parsed.listed else replies[0])

    async def abort(self, request: web.Request) -> web.Response:
        body = await read_object(request)
        request_id, everything = body.get("rid"), body.get("abort_all", False)
        if request_id is not None and not isinstance(request_id, str):
            raise RequestInvalid("rid must be a string")
        if everything is True or request_id:
            await asyncio.wrap_future(self._engine.abort(None if everything is True else request_id))
        return web.Response()

    async def pause(self, request: web.Request) -> web.Response:
        name = (await read_object(request)).get("mode", "abort")
        if not isinstance(name, str) or name not in set(PauseMode):
            raise RequestInvalid(f"Invalid pause mode {name!r}: must be one of abort, retract, in_place")
        await asyncio.wrap_future(self._engine.pause(PauseMode(name)))
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        await read_object(request)
        await asyncio.wrap_future(self._engine.resume())
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def begin(self, request: web.Request) -> web.Response:
        selector = (await read_object(request)).get("selector", "all")
        if selector not in ("target", "draft", "all"):
            raise RequestInvalid(f"selector must be target, draft or all, got {selector!r}")
        await self._updater.begin()
        return outcome("Weight update session opened.")

    async def end(self, request: web.Request) -> web.Response:
        await read_object(request)
        await self._updater.end()
        return outcome("Weight update session closed.")

    async def init_group(self, request: web.Request) -> web.Response:
        await self._updater.init_group(await read_body(request, InitGroup))
        return outcome("Succeeded to initialize custom process group.")

    async def destroy_group(self, request: web.Request) -> web.Response:
        name = (await read_object(request)).get("group_name", "weight_update_group")
        if not isinstance(name, str):
            raise RequestInvalid("group_name must be a string")
        await self._updater.destroy_group(name)
        return outcome("Succeeded to destroy custom process group.")

    async def update(self, request: web.Request) -> web.Response:
        await self._updater.update(await read_body(request, UpdateWeights))
        return outcome("Succeeded to update parameter online.")

    async def update_from_disk(self, request: web.Request) -> web.Response:
        body = await read_body(request, UpdateFromDisk)
        folders = self._settings.weights_folders
        directory = await asyncio.to_thread(named_folder, Path(body.model_path), folders)
        held = await self._updater.update_from_disk(body, directory)
        self._model_path = body.model_path
        message = "Succeeded to update model weights."
        if body.weight_version is not None:
            message += f" Weight version updated to {body.weight_version}."
        return json_response({"success": True, "message": message, "num_paused_requests": held})

    async def update_from_tensor(self, request: web.Request) -> web.Response:
        raise RequestInvalid(FROM_TENSOR_REFUSED)

    async def update_version(self, request: web.Request) -> web.Response:
        body = await read_body(request, UpdateVersion)
        await self._updater.relabel(body)
        message = f"Weight version updated to {body.new_version}"
        return json_response({"success": True, "message": message, "new_version": body.new_version})

    async def refuse_memory(self, request: web.Request) -> web.Response:
        raise RequestInvalid(MEMORY_REFUSED.format(path=request.path.removeprefix("/")))

    async def check_weights(self, request: web.Request) -> web.Response:
        action = (await read_object(request)).get("action")
        if action != "checksum":
            raise RequestInvalid(f"action must be checksum, got {action!r}")
        sums = await self._updater.checksums()
        return json_response({"success": True, "message": "Success.", "ranks": [{"checksums": sums}]})

    async def flush(self, request: web.Request) -> web.Response:
        scheduler = self._engine.scheduler
        if await asyncio.wrap_future(self._engine.submit(lambda: scheduler.running or scheduler.runnable)):
            return web.Response(text="Flush cache failed.\n", status=400)
        return web.Response(text="Cache flushed.\n")

    async def model_info(self, request: web.Request) -> web.Response:
        return json_response(
            {
                "model_path": self._model_path,
                "tokenizer_path": self._settings.model_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self._engine.runner.version,
                "model_type": self._settings.family,
                "architectures": [ARCHITECTURES[self._settings.family]],
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        settings = self._settings
        context_tokens = settings.limits.context_tokens
        return json_response(
            {
                "model_path": self._model_path,
                "device": "cpu",
                "tp_size": 1,
                "status": "ready",
                "version": f"headrace-cpu {distribution_version('headrace')}",
                "weight_version": self._engine.runner.version,
                "context_length": context_tokens,
                "max_req_input_len": context_tokens - 1,
                "max_total_num_tokens": context_tokens * settings.max_running,
                "max_running_requests": settings.max_running,
            }
        )

    async def loads(self, request: web.Request) -> web.Response:
        scheduler, settings = self._engine.scheduler, self._settings

        def read() -> Json:
            used = sum(item.token_count for item in scheduler.running)
            total = settings.limits.context_tokens * settings.max_running
            return loads_json(len(scheduler.running), len(scheduler.waiting), used, total, settings.max_running)

        return json_response(await asyncio.wrap_future(self._engine.submit(read)))

    async def health(self, request: web.Request) -> web.Response:
        """Answer 200 if the torch thread responds, even when paused, as SGLang does without health generation."""
        await asyncio.wrap_future(self._engine.submit(lambda: None))
        return web.Response()

    async def health_generate(self, request: web.Request) -> web.Response:
        """Generate one token. As in SGLang, a paused engine answers 503 after a timeout."""
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}
        prompts = parse_generate(body, self._settings.limits, self._encode).prompts
        generations, futures = self._engine.generate(prompts)
        try:
            async with asyncio.timeout(HEALTH_GENERATE_TIMEOUT_S):
                await asyncio.wrap_future(futures[0])
        except TimeoutError:
            return web.Response(status=503)
        finally:
            self._engine.drop(generations)
        return web.Response()

    async def ready(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self._engine.scheduler.paused else 200)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=True).ids

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
