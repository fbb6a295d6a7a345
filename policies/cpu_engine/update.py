"""The CPU engine's weight updater: sessions, process groups, reception into staging memory, and the swap between steps.

Invariants:
- `begin` lets running requests finish, unless a pause holds them, and no request is admitted before `end`.
- A bucket is checked against the model's shapes before it is received, and received in a separate thread: the torch
  thread and the event loop are not blocked.
- The reply to a bucket means that it has been received. It is loaded while the next one is being received; a loading
  error is reported with the next reply, at the latest with the reply to the bucket that carries the version.
- The weights change all at once, with the bucket that carries a version. Buckets without a following version are
  dropped at `end`, so a sender that dies between two buckets has no effect. A failed reception changes nothing, but the
  group is lost.
- `checksums` are computed on request from the live weights, converted back to the dtype in which they were sent: they
  reveal transfer errors as well as tensors loaded into the wrong position.
- The memory is allocated at the first update and reused: an engine holds two sets of weights and two buckets (one is
  received while the other is loaded). Only an abandoned transfer occupies a third set, until its collective ends.
- A bucket of fp32 tensors in storage order is received in place; all others are received into a buffer.
- A writer takes the memory out and returns it when done. Memory of an abandoned writer is never reused.
- A set becomes live only once it has every parameter. Parameters that a push omits are copied from the live set, but
  after a lost transfer (`torn`) a push must send all: the sender may assume that lost parameters were received.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from headrace.policies.cpu_engine.requests import InitGroup, UpdateFromDisk, UpdateVersion, UpdateWeights
from headrace.policies.cpu_engine.thread import EngineThread
from headrace.policies.errors import GroupFailed, ModelInvalid, RequestInvalid
from headrace.policies.models.qwen import QwenWeights, load_files
from headrace.policies.models.qwen_config import EMBEDDING, TIED_HEAD, QwenConfig
from headrace.policies.push.process_group import (
    WeightGroup,
    destroy_group,
    finish_broadcast,
    form_group,
    join_store,
    start_broadcast,
)
from headrace.policies.push.weights import DTYPES, checksum, split, unflatten
from headrace.policies.tensors import Bucket

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running. Retract or finish them, "
    "then call /flush_cache."
)


class Staging:
    """One engine's staging memory. It has one writer at a time, but the torch thread may call `recycle`
    concurrently."""

    def __init__(self, config: QwenConfig) -> None:
        self._config = config
        self._spare: QwenWeights | None = None
        self._exchanging = threading.Lock()
        self._buffers: list[Tensor] = []
        self._largest_bytes = 0
        self._torn = False

    def start(self) -> None:
        """Begin an update; parameters staged by an earlier one are discarded."""
        self._torn = False
        if self._spare is not None:
            self._spare.forget()

    def tear(self) -> None:
        """Discard the staged parameters after a transfer was lost."""
        self.start()
        self._torn = True

    def take_buffer(self, size_bytes: int) -> Tensor:
        """Return a buffer of at least this size."""
        self._largest_bytes = max(self._largest_bytes, size_bytes)
        if self._buffers and self._buffers[-1].numel() >= size_bytes:
            return self._buffers.pop()
        self._buffers.clear()
        return torch.empty(self._largest_bytes, dtype=torch.uint8)

    def put_buffer(self, buffer: Tensor) -> None:
        self._buffers.append(buffer)

    def take_spare(self) -> QwenWeights:
        with self._exchanging:
            spare, self._spare = self._spare, None
        return QwenWeights.allocate(self._config) if spare is None else spare

    def put_spare(self, spare: QwenWeights) -> None:
        with self._exchanging:
            self._spare = spare

    def recycle(self, old: QwenWeights) -> None:
        """Make the previously live set the spare one, unless a writer has allocated another in the meantime."""
        old.forget()
        with self._exchanging:
            if self._spare is None:
                self._spare = old

    def complete(self, spare: QwenWeights, live: QwenWeights) -> None:
        """Copy the parameters that a push omitted. Raises ModelInvalid if a transfer was lost."""
        missing = spare.missing()
        if missing and self._torn:
            raise ModelInvalid(
                f"parameter {missing[0]} ({len(missing)} in all) was not sent again after a transfer failed"
            )
        spare.complete(live)


def place_of(spare: QwenWeights, bucket: Bucket) -> Tensor | None:
    """Return the memory in which this bucket can be received in place; None if it cannot."""
    if set(bucket.dtypes) != {"float32"}:
        return None
    place = spare.place(bucket.names)
    return None if place is None else place.view(torch.uint8)


def load_bucket(spare: QwenWeights, bucket: Bucket, buffer: Tensor | None) -> None:
    """Load a received bucket into the spare set; without a buffer it was received in place. Raises ModelInvalid."""
    if buffer is None:
        for name in bucket.names:
            spare.accept(name, torch.float32)
        return
    for name, tensor in unflatten(bucket, buffer[: bucket.size_bytes]):
        if name in spare.slots:
            spare.load(name, tensor)


def start_thread(function: Callable[[], T]) -> Future[T]:
    """Run a function in a daemon thread. Unlike an executor's thread, it does not keep the process from exiting if it
    hangs."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - raised in the awaiting coroutine
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
    """Loading of a bucket from its buffer into the spare set. It owns both until it is done, but other parts of the set
    may be received in the meantime."""

    future: Future[None]
    spare: QwenWeights
    buffer: Tensor | None


class WeightUpdater:
    """Update state of one engine. Methods raise RequestInvalid or GroupFailed with the message of the 400 reply."""

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
        """Open the session. Returns once nothing is running."""
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
        """Drop buckets without a version, close the session, and admit requests."""
        self._in_session()
        try:
            async with self._receiving:
                await self._loaded()
                self._staging.start()
        finally:
            released = self._close()
        await asyncio.wrap_future(released)

    def _close(self) -> Future[None]:
        # A bucket that is still being received is refused later, because its session has ended.
        self._open, self._session = False, None
        return self._engine.release()

    async def init_group(self, body: InitGroup) -> None:
        """Join a group, waiting for rank 0 for at most `group_timeout_s`. If the group is formed after that, or after
        the caller has been cancelled, the engine leaves it again."""
        if body.backend == "nccl" or not torch.distributed.is_backend_available(body.backend):
            raise RequestInvalid(f"a CPU engine does not support backend {body.backend}; use gloo")
        if body.rank_offset >= body.world_size:
            raise RequestInvalid("rank_offset must be below world_size")
        if body.group_name in self._groups or body.group_name in self._forming:
            raise RequestInvalid(f"group {body.group_name} already exists")

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
            # `join` alone may take twice as long: once for the store, once for the group.
            async with asyncio.timeout(self._group_timeout_s):
                self._groups[body.group_name] = await asyncio.wrap_future(joining)
        except TimeoutError as error:
            joining.add_done_callback(leave_late)
            where = f"{body.master_address}:{body.master_port}"
            raise GroupFailed(
                f"group {body.group_name} was not formed at {where} within {self._group_timeout_s} s"
            ) from error
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
        """Receive one bucket, and swap the weights if it carries a version."""
        session = self._in_session()
        self._group(body.group_name)
        if not len(body.names) == len(body.dtypes) == len(body.shapes):
            raise RequestInvalid("names, dtypes and shapes must have the same length")
        if len(set(body.names)) != len(body.names):
            raise RequestInvalid("names contains a parameter twice")
        if body.load_format not in (None, "flattened_bucket"):
            raise RequestInvalid(f"load_format {body.load_format} is not supported; use flattened_bucket or null")
        dtypes = tuple(dtype.removeprefix("torch.") for dtype in body.dtypes)
        for name, dtype, shape in zip(body.names, dtypes, body.shapes, strict=True):
            # A trainer may send a tied head, which repeats the embedding: it is received and dropped.
            mine = self._shapes.get(EMBEDDING if name == TIED_HEAD and name not in self._shapes else name)
            if mine is None:
                raise RequestInvalid(f"parameter {name}: the snapshot has it, but this engine's model does not")
            if mine != shape:
                raise RequestInvalid(f"parameter {name}: the snapshot has shape {shape}, but this engine has {mine}")
            if dtype not in DTYPES:
                raise RequestInvalid(
                    f"parameter {name}: the snapshot has dtype {dtype}, but this engine takes {sorted(DTYPES)}"
                )
        bucket = Bucket(names=body.names, dtypes=dtypes, shapes=body.shapes)
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

    async def update_from_disk(self, body: UpdateFromDisk, directory: Path) -> int:
        """Load `directory`, which the caller has checked, swap the weights, and return the number of paused requests.
        As with `begin`, running requests finish first unless a pause holds them."""
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
                    await in_thread(lambda: load_directory(spare, self._config, directory))
                await asyncio.wrap_future(self._engine.hold())
                await self._apply(body.weight_version)
            held = len(scheduler.running) + len(scheduler.waiting) if scheduler.paused else 0
        finally:
            released = self._close()
        await asyncio.wrap_future(released)
        await self._flushed(body.flush_cache)
        return held

    async def relabel(self, body: UpdateVersion) -> None:
        """Change the version label of the current weights, starting with the next token."""
        if body.abort_all_requests:
            await asyncio.wrap_future(self._engine.abort(None))
        await asyncio.wrap_future(self._engine.submit(lambda: self._engine.runner.relabel(body.new_version)))

    async def checksums(self) -> dict[str, str]:
        # Not while a bucket is received: after the swap that follows, the weights that are live now are overwritten.
        async with self._receiving:
            live = self._engine.runner.model.weights
            return await in_thread(
                lambda: {name: checksum(live.slots[name], dtype) for name, dtype in live.dtypes.items()}
            )

    def _in_session(self, begun: object | None = None) -> object:
        """Return the open session. Raises RequestInvalid if there is none, or if it is not the session `begun`."""
        if self._session is None or begun not in (None, self._session):
            raise RequestInvalid("No weight update session is open; call /begin_weight_update first.")
        return self._session

    def _group(self, name: str) -> WeightGroup:
        if name not in self._groups:
            raise RequestInvalid(f"Failed to receive weights: group {name} does not exist")
        return self._groups[name]

    async def _receive(self, bucket: Bucket, body: UpdateWeights) -> None:
        """Receive one bucket and start loading it into the spare set."""
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
            # A collective cannot be cancelled. Its thread may still use the group and the memory: both are abandoned.
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
        """Wait until the last bucket has been loaded."""
        loading, self._loading = self._loading, None
        if loading is not None:
            async with self._writing(loading.spare):
                await asyncio.wrap_future(loading.future)
            if loading.buffer is not None:
                self._staging.put_buffer(loading.buffer)

    @asynccontextmanager
    async def _writing(self, spare: QwenWeights) -> AsyncIterator[QwenWeights]:
        """Return the spare set to staging once it has been written. After a cancellation it is abandoned, because its
        writer thread may still be running."""
        try:
            yield spare
        except ModelInvalid as error:
            self._staging.put_spare(spare)
            self._staging.tear()
            raise RequestInvalid(f"the weights were refused and the old ones are still in use: {error}") from error
        except BaseException:
            self._staging.tear()
            raise
        self._staging.put_spare(spare)

    async def _apply(self, version: str | None) -> None:
        """Swap the spare and live sets between two steps."""
        runner = self._engine.runner
        async with self._writing(self._staging.take_spare()) as spare:
            await in_thread(lambda: self._staging.complete(spare, runner.model.weights))
        spare = self._staging.take_spare()

        def exchange() -> None:
            # Both in the torch thread, so that a cancelled caller cannot leave the live set in staging.
            self._staging.recycle(runner.swap(spare, version))

        await asyncio.wrap_future(self._engine.submit(exchange))

    async def _flushed(self, wanted: bool) -> None:
        """Raise RequestInvalid, as SGLang does, if running requests prevent a flush that was requested."""
        scheduler = self._engine.scheduler
        if wanted and await asyncio.wrap_future(self._engine.submit(lambda: bool(scheduler.running))):
            raise RequestInvalid(NOT_FLUSHED)


def leave_late(joining: Future[WeightGroup]) -> None:
    """Leave a group that was formed after its caller had stopped waiting. Runs in the thread that formed it."""
    if joining.exception() is None:
        with suppress(GroupFailed):
            destroy_group(joining.result())


def receive(group: WeightGroup, pieces: list[Tensor]) -> None:
    """Receive all pieces, blocking. Raises GroupFailed, after destroying the group with its threads and sockets."""
    try:
        for piece in pieces:
            finish_broadcast(group, start_broadcast(group, piece))
    except GroupFailed:
        with suppress(GroupFailed):
            destroy_group(group)
        raise


def load_directory(spare: QwenWeights, config: QwenConfig, directory: Path) -> None:
    """Load a model directory of the same config. Raises ModelInvalid."""
    given = QwenConfig.read(directory / "config.json")
    different = [key for key, value in config if getattr(given, key) != value]
    if different:
        key = different[0]
        raise ModelInvalid(
            f"{directory}: config.json has {key} {getattr(given, key)}, but this engine has {getattr(config, key)}"
        )
    surplus = load_files(spare, directory)
    if surplus:
        raise ModelInvalid(f"{directory} has the parameter {surplus[0]}, but this engine's model does not")
