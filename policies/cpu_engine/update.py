"""Weight updates of the CPU engine: sessions, process groups, reception into staging memory, the swap between two
steps.

Invariants:
- Nothing generates while a session is open: `begin` lets what runs finish (after a `retract` nothing runs), `end`
  lets requests in.
- A bucket is checked against the model's own shapes before anything is received, and received in a thread of its own:
  the torch thread and the event loop stay live.
- Weights change in one piece: with the bucket that carries a version, else at `end`. A failed reception changes nothing
  and costs the group, which is discarded.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from headrace.policies.errors import GroupFailed, ModelInvalid, RequestInvalid
from headrace.policies.push.weights import DTYPES, Bucket, checksums, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from headrace.policies.cpu_engine.thread import EngineThread
    from headrace.policies.push.process_group import WeightGroup

T = TypeVar("T")


class InitGroup(BaseModel):
    """Body of /init_weights_update_group."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    master_address: str
    """Host of rank 0's store."""
    master_port: int = Field(gt=0, lt=65536)
    """Port of rank 0's store."""
    rank_offset: int = Field(gt=0, lt=65536)
    """Our rank: this engine is one process."""
    world_size: int = Field(gt=1, le=65536)
    """Ranks in the group."""
    group_name: str = "weight_update_group"
    """Its name, also the store's prefix."""
    backend: str = "nccl"
    """This engine takes gloo only."""


class UpdateWeights(BaseModel):
    """Body of /update_weights_from_distributed."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    names: tuple[str, ...] = Field(min_length=1)
    """Hugging Face parameter names."""
    dtypes: tuple[str, ...]
    """Torch dtype names."""
    shapes: tuple[tuple[int, ...], ...]
    """One shape for each name."""
    group_name: str = "weight_update_group"
    """The group to receive from."""
    flush_cache: bool = True
    """Nothing is cached between requests here, so there is nothing to flush."""
    abort_all_requests: bool = False
    """Abort what waits."""
    weight_version: str | None = None
    """The label from the swap on."""
    load_format: str | None = None
    """None: one broadcast a tensor; flattened_bucket: one for all."""


async def in_thread(function: Callable[[], T]) -> T:
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
    return await asyncio.wrap_future(future)


class WeightUpdater:
    """One engine's update state. Methods raise RequestInvalid or GroupFailed with the text of the 400."""

    def __init__(self, engine: EngineThread, *, group_timeout_s: float) -> None:
        self._engine = engine
        self._group_timeout_s = group_timeout_s
        self._groups: dict[str, WeightGroup] = {}
        self._forming: set[str] = set()
        self._open = False
        self._staged: dict[str, Tensor] = {}
        self._receiving = asyncio.Lock()

    async def begin(self) -> None:
        """Open the session; returns when nothing runs."""
        if self._open:
            raise RequestInvalid("A weight update session is already open; call /end_weight_update first.")
        self._open = True
        try:
            await asyncio.wrap_future(self._engine.hold())
        except asyncio.CancelledError:
            self._open = False
            self._engine.release()
            raise

    async def end(self) -> None:
        """Apply what no version announced, close the session, let requests in."""
        if not self._open:
            raise RequestInvalid("No weight update session is open; call /begin_weight_update first.")
        async with self._receiving:
            if self._staged:
                await self._apply(None)
            self._open = False
        await asyncio.wrap_future(self._engine.release())

    async def init_group(self, body: InitGroup) -> None:
        """Join a group; blocks until rank 0 is there, at most `group_timeout_s`."""
        from headrace.policies.push.process_group import form_group, join_store

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
        try:
            self._groups[body.group_name] = await in_thread(join)
        finally:
            self._forming.discard(body.group_name)

    async def destroy_group(self, name: str) -> None:
        from headrace.policies.push.process_group import destroy_group

        group = self._groups.pop(name, None)
        if group is None:
            raise RequestInvalid(f"group {name} does not exist")
        await in_thread(lambda: destroy_group(group))

    async def update(self, body: UpdateWeights) -> None:
        """Receive one bucket; swap when it carries a version."""
        if not self._open:
            raise RequestInvalid("No weight update session is open; call /begin_weight_update first.")
        group = self._groups.get(body.group_name)
        if group is None:
            raise RequestInvalid(f"Failed to receive weights: group {body.group_name} does not exist")
        bucket = self._checked(body)
        if body.abort_all_requests:
            await asyncio.wrap_future(self._engine.abort(None))
        async with self._receiving:
            try:
                self._staged |= await in_thread(lambda: receive(group, bucket, body.load_format))
            except (GroupFailed, asyncio.CancelledError):
                # A collective cannot be cancelled: its thread may still be in there, so nobody may use the group again.
                self._groups.pop(body.group_name, None)
                self._staged = {}
                raise
            if body.weight_version is not None:
                await self._apply(body.weight_version)

    async def checksums(self) -> dict[str, str]:
        named = self._engine.runner.model.weights.named
        return await in_thread(lambda: checksums(named))

    async def _apply(self, version: str | None) -> None:
        from headrace.policies.qwen3 import Qwen3Weights

        runner = self._engine.runner
        named, self._staged = {**runner.model.weights.named, **self._staged}, {}
        try:
            weights = await in_thread(lambda: Qwen3Weights.build(runner.model.config, named))
        except ModelInvalid as error:
            raise RequestInvalid(f"the weights were refused and the old ones kept: {error}") from error
        await asyncio.wrap_future(self._engine.submit(lambda: runner.swap(weights, version)))

    def _checked(self, body: UpdateWeights) -> Bucket:
        if not len(body.names) == len(body.dtypes) == len(body.shapes):
            raise RequestInvalid("names, dtypes and shapes must have the same length")
        if body.load_format not in (None, "flattened_bucket"):
            raise RequestInvalid(f"load_format {body.load_format} is not supported; use flattened_bucket or null")
        known = self._engine.runner.model.config.shapes()
        dtypes = tuple(dtype.removeprefix("torch.") for dtype in body.dtypes)
        for name, dtype, shape in zip(body.names, dtypes, body.shapes, strict=True):
            if known.get(name) != shape:
                raise RequestInvalid(
                    f"parameter {name} of shape {shape} does not fit: this model has {known.get(name)}"
                )
            if dtype not in DTYPES:
                raise RequestInvalid(f"parameter {name}: dtype {dtype} is not one of {sorted(DTYPES)}")
        return Bucket(names=body.names, dtypes=dtypes, shapes=body.shapes)


def receive(group: WeightGroup, bucket: Bucket, load_format: str | None) -> dict[str, Tensor]:
    """Block until the bucket is here. Raises GroupFailed."""
    import torch

    from headrace.policies.push.process_group import finish_broadcast, start_broadcast

    if load_format == "flattened_bucket":
        flat = torch.empty(bucket.size_bytes, dtype=torch.uint8)
        finish_broadcast(group, start_broadcast(group, flat))
        return unflatten(bucket, flat)
    tensors: dict[str, Any] = {}
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        tensors[name] = torch.empty(shape, dtype=DTYPES[dtype])
        finish_broadcast(group, start_broadcast(group, tensors[name]))
    return tensors
