"""Weight updates of the CPU engine: sessions, process groups, reception into staging memory, the swap between two
steps.

Invariants:
- `begin` lets what runs finish, unless a pause keeps it from running, and nothing new enters before `end`.
- A bucket is checked against the model's own shapes before anything is received, and received in a thread of its own:
  the torch thread and the event loop stay live.
- The reply to a bucket means that it is here. It is loaded while the next one arrives; a value that cannot be loaded is
  told with the next reply, at the latest with that of the bucket that carries the version.
- Weights change in one piece, with the bucket that carries a version. What no version announced is dropped at `end`: a
  sender that died between two buckets leaves nothing behind. A failed reception changes nothing and costs the group.
- `checksums` are worked out when they are asked for, from the weights that run, brought back to the dtype they were
  sent in: they show what was spoiled on the way here as well as what was loaded to the wrong place.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from headrace.policies.cpu_engine.staging import Staging, load_bucket, place_of
from headrace.policies.errors import GroupFailed, ModelInvalid, RequestInvalid
from headrace.policies.models.qwen3 import load_file
from headrace.policies.models.qwen3_config import Qwen3Config
from headrace.policies.push.process_group import (
    destroy_group,
    finish_broadcast,
    form_group,
    join_store,
    start_broadcast,
)
from headrace.policies.push.tensors import Bucket
from headrace.policies.push.weights import DTYPES, checksum, split

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from torch import Tensor

    from headrace.policies.cpu_engine.bodies import InitGroup, UpdateFromDisk, UpdateVersion, UpdateWeights
    from headrace.policies.cpu_engine.thread import EngineThread
    from headrace.policies.models.qwen3 import Qwen3Weights
    from headrace.policies.push.process_group import WeightGroup

T = TypeVar("T")
NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running. Retract or finish them, "
    "then call /flush_cache."
)


def start_thread(function: Callable[[], T]) -> Future[T]:
    """Run in a daemon thread: unlike an executor's it never keeps a process from ending while a transfer hangs."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - handed to the awaiting coroutine
            future.set_exception(error)
        else:
            future.set_result(result)

    future.set_running_or_notify_cancel()
    threading.Thread(target=work, name="transfer", daemon=True).start()
    return future


async def in_thread(function: Callable[[], T]) -> T:
    return await asyncio.wrap_future(start_thread(function))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """A bucket on its way from its buffer to the spare set; both are its own until it is done. Other parts of the set
    may be received meanwhile."""

    future: Future[None]
    spare: Qwen3Weights
    buffer: Tensor | None


class WeightUpdater:
    """One engine's update state. Methods raise RequestInvalid or GroupFailed with the text of the 400."""

    def __init__(self, engine: EngineThread, *, group_timeout_s: float) -> None:
        self._engine = engine
        self._config = engine.runner.model.config
        self._shapes = self._config.shapes()
        self._group_timeout_s = group_timeout_s
        self._groups: dict[str, WeightGroup] = {}
        self._forming: set[str] = set()
        self._open = False
        self._session: object | None = None
        self._staging = Staging(self._config)
        self._receiving = asyncio.Lock()
        self._loading: Loading | None = None

    async def begin(self) -> None:
        """Open the session; returns when nothing runs."""
        if self._open:
            raise RequestInvalid("A weight update session is already open; call /end_weight_update first.")
        self._open, self._session = True, object()
        self._staging.start()
        try:
            await asyncio.wrap_future(self._engine.hold())
        except asyncio.CancelledError:
            self._close()
            raise

    async def end(self) -> None:
        """Drop what no version announced, close the session, let requests in."""
        self._in_session()
        try:
            async with self._receiving:
                await self._loaded()
                self._staging.start()
        finally:
            released = self._close()
        await asyncio.wrap_future(released)

    def _close(self) -> Future[None]:
        """A bucket that is still on its way finds its session gone."""
        self._open, self._session = False, None
        return self._engine.release()

    async def init_group(self, body: InitGroup) -> None:
        """Join a group; blocks until rank 0 is there, at most `group_timeout_s`. What is formed after that, or after
        the caller gave up, is left again."""
        if body.backend != "gloo":
            raise RequestInvalid(f"backend {body.backend} is not there on a CPU engine; use gloo")
        if body.rank_offset >= body.world_size:
            raise RequestInvalid("rank_offset must be below world_size")
        if body.group_name in self._groups or body.group_name in self._forming:
            raise RequestInvalid(f"group {body.group_name} exists already")

        def join() -> WeightGroup:
            store = join_store(body.master_address, body.master_port, body.world_size, self._group_timeout_s)
            return form_group(
                store,
                name=body.group_name,
                rank=body.rank_offset,
                world_size=body.world_size,
                backend=body.backend,
                timeout_s=self._group_timeout_s,
            )

        self._forming.add(body.group_name)
        joining = start_thread(join)
        try:
            # The store and the group each take that long at most.
            async with asyncio.timeout(self._group_timeout_s):
                self._groups[body.group_name] = await asyncio.wrap_future(joining)
        except TimeoutError as error:
            joining.add_done_callback(leave_late)
            where = f"{body.master_address}:{body.master_port}"
            raise GroupFailed(f"no group {body.group_name} at {where} within {self._group_timeout_s} s") from error
        except asyncio.CancelledError:
            joining.add_done_callback(leave_late)
            raise
        finally:
            self._forming.discard(body.group_name)

    async def destroy_group(self, name: str) -> None:
        group = self._groups.pop(name, None)
        if group is None:
            raise RequestInvalid(f"group {name} does not exist")
        await in_thread(lambda: destroy_group(group))

    async def update(self, body: UpdateWeights) -> None:
        """Receive one bucket; swap when it carries a version."""
        session = self._in_session()
        self._group(body.group_name)
        bucket = self._checked(body)
        if body.abort_all_requests:
            await asyncio.wrap_future(self._engine.abort(None))
        async with self._receiving:
            self._in_session(session)
            await self._receive(bucket, body)
            self._in_session(session)
            if body.weight_version is not None:
                await self._loaded()
                await self._apply(body.weight_version)
        await self._flushed(body.flush_cache)

    async def update_from_disk(self, body: UpdateFromDisk) -> int:
        """Load a directory and swap; returns how many requests a pause held meanwhile. As with `begin`, what runs
        finishes first unless a pause keeps it from running."""
        if self._open:
            raise RequestInvalid("A weight update session is open; call /end_weight_update first.")
        if body.abort_all_requests:
            await asyncio.wrap_future(self._engine.abort(None))
        scheduler = self._engine.scheduler
        self._open = True
        try:
            async with self._receiving:
                self._staging.start()
                async with self._writing(self._staging.take_spare()) as spare:
                    await in_thread(lambda: load_directory(spare, self._config, Path(body.model_path)))
                await asyncio.wrap_future(self._engine.hold())
                await self._apply(body.weight_version)
            held = len(scheduler.running) + len(scheduler.waiting) if scheduler.paused else 0
        finally:
            released = self._close()
        await asyncio.wrap_future(released)
        await self._flushed(body.flush_cache)
        return held

    async def relabel(self, body: UpdateVersion) -> None:
        """Another version for the same weights, from the next token on."""
        if body.abort_all_requests:
            await asyncio.wrap_future(self._engine.abort(None))
        await asyncio.wrap_future(self._engine.submit(lambda: self._engine.runner.relabel(body.new_version)))

    async def checksums(self) -> dict[str, str]:
        # Not while a bucket is received: after the swap that follows, the weights that run now are written to.
        async with self._receiving:
            live = self._engine.runner.model.weights
            return await in_thread(
                lambda: {name: checksum(live.slots[name], dtype) for name, dtype in live.dtypes.items()}
            )

    def _in_session(self, begun: object | None = None) -> object:
        """The session that is open; it must be the one that was `begun`, if any was."""
        if self._session is None or begun not in (None, self._session):
            raise RequestInvalid("No weight update session is open; call /begin_weight_update first.")
        return self._session

    def _group(self, name: str) -> WeightGroup:
        if name not in self._groups:
            raise RequestInvalid(f"Failed to receive weights: group {name} does not exist")
        return self._groups[name]

    async def _receive(self, bucket: Bucket, body: UpdateWeights) -> None:
        """One bucket from the wire, and on its way to the spare set."""
        group = self._group(body.group_name)
        try:
            spare = self._staging.take_spare() if self._loading is None else self._loading.spare
            place, buffer = place_of(spare, bucket), None
            if place is None:
                buffer = self._staging.take_buffer(bucket.size_bytes)
            flat = place if buffer is None else buffer[: bucket.size_bytes]
            assert flat is not None
            pieces = [flat] if body.load_format == "flattened_bucket" else split(flat, bucket)
            await in_thread(lambda: receive(group, pieces))
        except BaseException:
            # A collective cannot be cancelled: its thread may still be in there. Group and memory are left to it.
            self._groups.pop(body.group_name, None)
            self._loading = None
            self._staging.tear()
            raise
        if self._loading is not None:
            await self._loaded()
            spare = self._staging.take_spare()
        future = start_thread(lambda: load_bucket(spare, bucket, buffer))
        self._loading = Loading(future=future, spare=spare, buffer=buffer)

    async def _loaded(self) -> None:
        """Wait for the bucket that came last."""
        loading, self._loading = self._loading, None
        if loading is not None:
            async with self._writing(loading.spare):
                await asyncio.wrap_future(loading.future)
            if loading.buffer is not None:
                self._staging.put_buffer(loading.buffer)

    @asynccontextmanager
    async def _writing(self, spare: Qwen3Weights) -> AsyncIterator[Qwen3Weights]:
        """Put the spare set back when it is written; after a cancellation its writer may go on, and it is left to
        him."""
        try:
            yield spare
        except ModelInvalid as error:
            self._staging.put_spare(spare)
            self._staging.tear()
            raise RequestInvalid(f"the weights were refused and the old ones kept: {error}") from error
        except BaseException:
            self._staging.tear()
            raise
        self._staging.put_spare(spare)

    async def _apply(self, version: str | None) -> None:
        """Exchange the spare set and the live one between two steps."""
        runner = self._engine.runner
        async with self._writing(self._staging.take_spare()) as spare:
            await in_thread(lambda: self._staging.complete(spare, runner.model.weights))
        spare = self._staging.take_spare()

        def exchange() -> None:
            # In the torch thread from beginning to end: a caller who gave up cannot leave the live set in staging.
            self._staging.recycle(runner.swap(spare, version))

        await asyncio.wrap_future(self._engine.submit(exchange))

    async def _flushed(self, wanted: bool) -> None:
        """SGLang flushes with every update, and says so when running requests keep it from that."""
        scheduler = self._engine.scheduler
        if wanted and await asyncio.wrap_future(self._engine.submit(lambda: bool(scheduler.running))):
            raise RequestInvalid(NOT_FLUSHED)

    def _checked(self, body: UpdateWeights) -> Bucket:
        if not len(body.names) == len(body.dtypes) == len(body.shapes):
            raise RequestInvalid("names, dtypes and shapes must have the same length")
        if len(set(body.names)) != len(body.names):
            raise RequestInvalid("names holds a parameter twice")
        if body.load_format not in (None, "flattened_bucket"):
            raise RequestInvalid(f"load_format {body.load_format} is not supported; use flattened_bucket or null")
        dtypes = tuple(dtype.removeprefix("torch.") for dtype in body.dtypes)
        for name, dtype, shape in zip(body.names, dtypes, body.shapes, strict=True):
            if name not in self._shapes:
                raise RequestInvalid(f"parameter {name}: the snapshot has it, this engine's model does not")
            if self._shapes[name] != shape:
                raise RequestInvalid(
                    f"parameter {name}: the snapshot has shape {shape}, this engine {self._shapes[name]}"
                )
            if dtype not in DTYPES:
                raise RequestInvalid(
                    f"parameter {name}: the snapshot has dtype {dtype}, this engine takes {sorted(DTYPES)}"
                )
        return Bucket(names=body.names, dtypes=dtypes, shapes=body.shapes)


def leave_late(joining: Future[WeightGroup]) -> None:
    """Called in the thread that formed the group, after whoever wanted it gave up."""
    if joining.exception() is None:
        with suppress(GroupFailed):
            destroy_group(joining.result())


def receive(group: WeightGroup, pieces: list[Tensor]) -> None:
    """Block until all pieces are here. Raises GroupFailed; the group is gone then, with its threads and sockets."""
    try:
        for piece in pieces:
            finish_broadcast(group, start_broadcast(group, piece))
    except GroupFailed:
        with suppress(GroupFailed):
            destroy_group(group)
        raise


def load_directory(spare: Qwen3Weights, config: Qwen3Config, directory: Path) -> None:
    """Load a model directory of the same config. Raises ModelInvalid."""
    given = Qwen3Config.read(directory / "config.json")
    different = [key for key, value in config if getattr(given, key) != value]
    if different:
        key = different[0]
        raise ModelInvalid(
            f"{directory}: config.json has {key} {getattr(given, key)}, this engine {getattr(config, key)}"
        )
    surplus = load_file(spare, directory / "model.safetensors")
    if surplus:
        raise ModelInvalid(f"{directory}: model.safetensors has {surplus[0]}, this engine's model does not")
