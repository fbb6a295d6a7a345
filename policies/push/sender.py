"""Sender process, the only one that shares process groups with engines, and its client.

Invariants:
- Commands and replies are JSON objects, one per line, on stdin and stdout, and one command runs at a time. Nothing else
  is written to stdout.
- The process is killed when a command misses its deadline or is cancelled, because a collective cannot be cancelled.
  The next command starts a new process with a higher `incarnation` and without a snapshot or groups.
- The process ends when its stdin closes or its parent dies.

Commands: ping; load {files, bucket_bytes, checksums} -> {buckets, checksums}, where `files` has the SHA-256 of each;
open_group {name, host, world_size, backend, timeout_s} -> {port}; join_group {name}; broadcast {name, bucket} ->
{seconds}; close_group {name}; inspect {path, digests, checksums} -> {specs, checksums, stamps}, which verifies a
directory and holds nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from pydantic import Field

from headrace.buffer.primitives.sections import Section
from headrace.policies.errors import GroupFailed, ModelInvalid, SenderFailed, SenderTimeout
from headrace.policies.processes.nccl import nccl_environment
from headrace.policies.processes.parent_death import die_with_parent
from headrace.policies.tensors import Bucket
from headrace.sandboxes.host.child_environment import child_environment

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import TCPStore

    from headrace.policies.push.process_group import WeightGroup
    from headrace.policies.push.weights import WeightSnapshot

Json = dict[str, Any]
LINE_LIMIT_BYTES = 256 * 1024 * 1024
ERROR_KINDS: Mapping[str, type[Exception]] = {"group": GroupFailed, "model": ModelInvalid}


class SenderConfig(Section):
    """Settings of a sender process."""

    log_path: Path | None = None
    """File that receives stderr; None uses the stderr of this process."""
    start_timeout_s: float = Field(default=60.0, gt=0)
    """Time limit from start to the first reply; importing torch takes seconds."""
    devices: tuple[str, ...] = ()
    """CUDA devices of the sender, as CUDA_VISIBLE_DEVICES names them; if empty, it sees those of this process."""


class SenderProcess:
    """Client of a sender: `async with SenderProcess(config) as sender: await sender.call("ping", {}, timeout_s=1)`."""

    def __init__(self, config: SenderConfig) -> None:
        self.config = config
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self.incarnation = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def __aenter__(self) -> Self:
        async with self._turn:
            await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self.kill())

    async def call(self, op: str, arguments: Mapping[str, object], *, timeout_s: float) -> Json:
        """Execute one command. Raises SenderTimeout (the sender was killed), SenderFailed (the sender died),
        GroupFailed or ModelInvalid (errors of the command)."""
        async with self._turn:
            if self._process is not None and self._process.returncode is not None:
                await self.kill()
            if self._process is None:
                await self._start()
            try:
                async with asyncio.timeout(timeout_s):
                    reply = await self._exchange({"op": op, **arguments})
            except TimeoutError as error:
                await self.kill()
                raise SenderTimeout(f"sender did not finish {op} within {timeout_s} s and was killed") from error
            except (SenderFailed, asyncio.CancelledError):
                await self.kill()
                raise
        if "error" in reply:
            raise ERROR_KINDS.get(reply.get("kind", ""), SenderFailed)(reply["error"])
        return reply

    async def kill(self) -> None:
        """Kill and reap the process. Idempotent; the next call starts a new one."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def _start(self) -> None:
        self.incarnation += 1
        command = [sys.executable, "-m", "headrace.policies.push.sender", "--parent-pid", str(os.getpid())]
        log: IO[bytes] | None = None
        if self.config.log_path is not None:
            self.config.log_path.parent.mkdir(parents=True, exist_ok=True)
            log = self.config.log_path.open("ab")
        pipe = asyncio.subprocess.PIPE
        environment = child_environment(OMP_NUM_THREADS="1", **nccl_environment())
        if self.config.devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.config.devices)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=log, env=environment, limit=LINE_LIMIT_BYTES
            )
        finally:
            if log is not None:
                log.close()
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                await self._exchange({"op": "ping"})
        except TimeoutError as error:
            await self.kill()
            raise SenderTimeout(f"sender did not start within start_timeout_s={self.config.start_timeout_s}") from error
        except (SenderFailed, asyncio.CancelledError):
            await self.kill()
            raise

    async def _exchange(self, command: Json) -> Json:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(command).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        except (ConnectionError, ValueError, RuntimeError) as error:
            # uvloop raises RuntimeError for a pipe whose other end is closed.
            raise SenderFailed(f"sender died during {command['op']}: {error!r}") from error
        if not line.endswith(b"\n"):
            raise SenderFailed(f"sender died during {command['op']}")
        reply: Json = json.loads(line)
        return reply


class Sender:
    """Implementation of the commands, running inside the process."""

    def __init__(self) -> None:
        self._snapshot: WeightSnapshot | None = None
        self._buckets: tuple[Bucket, ...] = ()
        self._flat: dict[int, Tensor] = {}
        self._stores: dict[str, tuple[TCPStore, Json]] = {}
        self._groups: dict[str, WeightGroup] = {}

    def handle(self, command: Json) -> Json:
        """Execute a command. Raises GroupFailed, ModelInvalid, or KeyError for an unknown command."""
        handlers = {
            "ping": lambda _: {},
            "load": self._load,
            "open_group": self._open_group,
            "join_group": self._join_group,
            "broadcast": self._broadcast,
            "close_group": self._close_group,
            "inspect": inspect,
        }
        return handlers[command["op"]](command)

    def _load(self, command: Json) -> Json:
        from headrace.policies.push.weights import plan_buckets, read_snapshot

        self._flat.clear()
        # Only one snapshot is held, and its memory is reused: allocating pages costs more than reading the file.
        last, self._snapshot = self._snapshot, None
        memory = None if last is None else last.data
        self._snapshot = read_snapshot({Path(path): digest for path, digest in command["files"].items()}, memory)
        self._buckets = plan_buckets(self._snapshot.specs, command["bucket_bytes"])
        sums = self._snapshot.checksums() if command["checksums"] else {}
        return {"buckets": [asdict(bucket) for bucket in self._buckets], "checksums": sums}

    def _open_group(self, command: Json) -> Json:
        from headrace.policies.push.process_group import host_store

        store = host_store(command["host"], command["world_size"], command["timeout_s"])
        self._stores[command["name"]] = (store, command)
        return {"port": store.port}

    def _join_group(self, command: Json) -> Json:
        from headrace.policies.push.process_group import form_group

        store, asked = self._stores.pop(command["name"])
        self._groups[command["name"]] = form_group(
            store,
            name=asked["name"],
            rank=0,
            world_size=asked["world_size"],
            backend=asked["backend"],
            timeout_s=asked["timeout_s"],
        )
        return {}

    def _broadcast(self, command: Json) -> Json:
        from headrace.policies.push.process_group import finish_broadcast, start_broadcast

        group, index = self._groups[command["name"]], command["bucket"]
        started_s = time.perf_counter()
        work = start_broadcast(group, self._flattened(index, group))
        if index + 1 < len(self._buckets):
            # The second buffer: the next bucket is copied to the device while this one is being sent.
            self._flattened(index + 1, group)
        finish_broadcast(group, work)
        self._flat.pop(index)
        return {"seconds": time.perf_counter() - started_s}

    def _flattened(self, index: int, group: WeightGroup) -> Tensor:
        if index not in self._flat:
            if self._snapshot is None:
                raise ModelInvalid("no snapshot is loaded")
            flat = self._snapshot.flat(self._buckets[index])
            self._flat[index] = flat.cuda() if group.backend == "nccl" else flat
        return self._flat[index]

    def _close_group(self, command: Json) -> Json:
        from headrace.policies.push.process_group import destroy_group

        self._stores.pop(command["name"], None)
        self._flat.clear()
        group = self._groups.pop(command["name"], None)
        if group is not None:
            destroy_group(group)
        return {}


def inspect(command: Json) -> Json:
    """Verify a snapshot's directory. Raises ModelInvalid."""
    from headrace.policies.push.inspection import inspect_directory

    return asdict(inspect_directory(Path(command["path"]), command["digests"], checksums=command["checksums"]))


def answer(sender: Sender, line: str) -> Json:
    """Return the reply to one line. This is the only place where the process handles errors."""
    try:
        return sender.handle(json.loads(line))
    except GroupFailed as error:
        return {"error": str(error), "kind": "group"}
    except ModelInvalid as error:
        return {"error": str(error), "kind": "model"}
    except (KeyError, IndexError, ValueError, TypeError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}", "kind": "sender"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="headrace.policies.push.sender")
    parser.add_argument("--parent-pid", type=int, required=True)
    die_with_parent(parser.parse_args().parent_pid)
    import torch

    torch.set_num_threads(1)
    # Output of libraries to stdout goes to stderr, so that it does not mix with replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sender = Sender()
    for line in sys.stdin:
        replies.write(json.dumps(answer(sender, line)) + "\n")
        replies.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
