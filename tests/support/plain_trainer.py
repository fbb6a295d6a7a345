"""A trainer of one rank that sends its weights as slime's `UpdateWeightFromDistributed` does (624b824), in a process of
its own: same calls in the same order, one group over all engines, one broadcast for each tensor of a bucket, no limit
on anything. The product's link to slime is not part of it: a `PlainTrainer` is what pushes have as their `Trainer`.

The process and this one exchange JSON lines: orders, calls of engines, their answers."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.errors import PushError, SenderFailed, SenderTimeout
from headrace.policies.push.transfer import first_error

if TYPE_CHECKING:
    from headrace.policies.engine import EngineId
    from headrace.policies.push.contract import Answering, GroupMember

BUCKET = 4
"""Tensors of a bucket."""


class PlainTrainer:
    """Implementation of `Trainer`. It holds the weights of a model directory as one version."""

    push: Answering | None = None

    def __init__(self, model: Path, version: PolicyVersion, backend: str = "gloo") -> None:
        self._arguments = (str(model), backend)
        self._version = version
        self._connected: list[GroupMember] = []
        self.connections = 0
        """Number of times that groups were formed."""
        self._process: asyncio.subprocess.Process | None = None
        self.given_up: list[str] = []
        """Reasons for which pushes were given up."""

    async def start(self) -> None:
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable, "-m", "support.plain_trainer", *self._arguments]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment)
        await self._read()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def end(self) -> None:
        """Kill the process."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def connect_engines(self, version: PolicyVersion, engines: Sequence[GroupMember], timeout_s: float) -> None:
        self._holds(version)
        if list(engines) != self._connected:
            before = [engine.engine_id for engine in self._connected]
            named = [(engine.engine_id, engine.ranks) for engine in engines]
            await self._do({"op": "connect", "engines": named, "left": before}, timeout_s)
            self.connections += 1
            self._connected = list(engines)

    async def update_engines(self, version: PolicyVersion, timeout_s: float) -> None:
        self._holds(version)
        await self._do({"op": "update", "engines": [engine.engine_id for engine in self._connected]}, timeout_s)
        self._connected = [replace(engine, holds=version) for engine in self._connected]

    async def give_up_push(self, reason: str) -> None:
        self.given_up.append(reason)
        await self.end()

    def _holds(self, version: PolicyVersion) -> None:
        if version != self._version:
            raise SenderFailed(f"it holds {self._version}")

    async def _do(self, order: dict[str, Any], timeout_s: float) -> None:
        """Give an order, and pass on the calls of engines until it is done. As the product, end a process that fails
        or is late."""
        try:
            async with asyncio.timeout(timeout_s), first_error(), asyncio.TaskGroup() as tasks:
                await self._write(order)
                while "call" in (line := await self._read()):
                    tasks.create_task(self._answer(*line["call"]))
        except TimeoutError as error:
            await self.end()
            raise SenderTimeout(f"the trainer's process did not {order['op']} within {timeout_s} s") from error
        except (SenderFailed, ConnectionError) as error:
            await self.end()
            raise SenderFailed(f"the trainer's process has ended: {error}") from error

    async def _answer(self, engine_id: EngineId, method: str, arguments: dict[str, Any]) -> None:
        assert self.push is not None
        try:
            await self.push.answer(engine_id, method, arguments)
        except PushError as error:
            await self._write({"error": str(error)})
        else:
            await self._write({"answer": None})

    async def _write(self, line: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        await self._process.stdin.drain()

    async def _read(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise SenderFailed("no answer")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Rank:
    """The process."""

    def __init__(self, model: Path, backend: str) -> None:
        from safetensors.torch import load_file

        files = sorted(model.glob("*.safetensors"))
        self.weights = {name: value for file in files for name, value in load_file(file).items()}
        self.backend = backend
        self.group: Any = None

    def connect(self, engines: Sequence[tuple[str, int]], left: Sequence[str]) -> None:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import (
            GroupName,
            PrefixStore,
            _new_process_group_helper,
            default_pg_timeout,
        )
        from torch.distributed.rendezvous import rendezvous

        if self.group is not None:
            answered = [call(name, "destroy_weights_update_group", group_name="slime-pp_0") for name in left]
            dist.destroy_process_group(self.group)
            collect(len(answered))
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        size, offset = 1 + sum(count for _, count in engines), 1
        asked: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": port, "world_size": size}
        for name, count in engines:
            more = {"rank_offset": offset, "group_name": "slime-pp_0", "backend": self.backend}
            call(name, "init_weights_update_group", **asked, **more)
            offset += count
        store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, size))
        prefixed = PrefixStore("slime-pp_0", store)
        given: Any = dist.Backend(self.backend)
        name_of = GroupName("slime-pp_0")
        self.group, _ = _new_process_group_helper(
            size, rank, [], given, prefixed, group_name=name_of, timeout=default_pg_timeout
        )
        dist.distributed_c10d._world.pg_group_ranks[self.group] = {each: each for each in range(size)}
        collect(len(engines))

    def update(self, engines: Sequence[str]) -> None:
        import torch.distributed as dist

        for method in ("pause_generation", "flush_cache"):
            for name in engines:
                call(name, method)
            collect(len(engines))
        names = list(self.weights)
        for at in range(0, len(names), BUCKET):
            bucket = {name: self.weights[name] for name in names[at : at + BUCKET]}
            for name in engines:
                call(
                    name,
                    "update_weights_from_distributed",
                    names=list(bucket),
                    dtypes=[str(value.dtype) for value in bucket.values()],
                    shapes=[list(value.shape) for value in bucket.values()],
                    group_name="slime-pp_0",
                    weight_version="1",
                    load_format=None,
                )
            works = [dist.broadcast(value, 0, group=self.group, async_op=True) for value in bucket.values()]
            for work in works:
                work.wait()
            collect(len(engines))
        for name in engines:
            call(name, "continue_generation")
        collect(len(engines))


def call(engine: str, method: str, **arguments: Any) -> str:
    say({"call": [engine, method, arguments]})
    return engine


def collect(count: int) -> None:
    """Wait for as many answers. Raises RuntimeError, as `ray.get` would."""
    for _ in range(count):
        answer = json.loads(sys.stdin.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])


def say(line: dict[str, Any]) -> None:
    os.write(1, json.dumps(line).encode() + b"\n")


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if sys.argv[2] == "lazy":
        from support import lazy_backend

        lazy_backend.register(queued=True)
    rank = Rank(Path(sys.argv[1]), sys.argv[2])
    say({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        getattr(rank, order.pop("op"))(**order)
        say({"done": True})


if __name__ == "__main__":
    main()
