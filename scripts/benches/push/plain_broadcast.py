"""The yardstick of a push: the same bytes by plain broadcasts between two processes, copied into parameters.

Invariants:
- Rank 0 has the file in memory and broadcasts slices of it; rank 1 receives each into one buffer and copies every
  tensor into a parameter of its own. No HTTP, no check, no fused storage, no swap; nothing is allocated on the way.
- Both cut the tensors into buckets in the order in which rank 0 has them in memory.
- Every line on standard input is one round; rank 1 answers with its seconds from the barrier before the first byte to
  the end of the last copy. At the end of the input it tells which of its parameters are not those of the file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.policies.processes.parent_death import die_with_parent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from torch import Tensor

    from headrace.policies.push.tensors import Bucket

ROUND_TIMEOUT_S = 120.0


class PlainPair:
    """Both processes, formed and idle between rounds."""

    def __init__(self, processes: list[asyncio.subprocess.Process]) -> None:
        self._processes = processes

    async def round_s(self) -> float:
        """One transfer of everything."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            await process.stdin.drain()
        return float((await self._told())["seconds"])

    async def check(self) -> None:
        """No more rounds. Raises RuntimeError where rank 1 does not have what is in the file."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        wrong = (await self._told())["wrong"]
        if wrong:
            raise RuntimeError(f"the plain broadcast brought other weights: {wrong[:3]} ({len(wrong)} in all)")

    async def _told(self) -> dict[str, Any]:
        """The next line of rank 1."""
        receiver = self._processes[1]
        assert receiver.stdout is not None
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            line = await receiver.stdout.readline()
        if not line:
            raise RuntimeError("the plain broadcast died: see its traceback above")
        told: dict[str, Any] = json.loads(line)
        return told


@asynccontextmanager
async def open_pair(snapshot: Path, meeting: Path, bucket_bytes: int) -> AsyncIterator[PlainPair]:
    """Start both, end both, and check what came. `meeting` is the file in which they find each other; it must not be
    there yet."""
    command = [sys.executable, "-m", "benches.push.plain_broadcast", str(snapshot), str(meeting)]
    options = ["--bucket-bytes", str(bucket_bytes), "--parent-pid", str(os.getpid())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    pipe = asyncio.subprocess.PIPE
    async with AsyncExitStack() as stack:
        processes = []
        for rank in range(2):
            process = await asyncio.create_subprocess_exec(
                *command, *options, "--rank", str(rank), stdin=pipe, stdout=pipe, env=environment
            )
            stack.push_async_callback(end, process)
            processes.append(process)
        pair = PlainPair(processes)
        yield pair
        await pair.check()


async def end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def run(snapshot: Path, meeting: Path, rank: int, bucket_bytes: int) -> None:
    """The life of one of the two processes."""
    import torch
    from torch import distributed

    from headrace.policies.models.qwen3_config import storage_place
    from headrace.policies.push.tensors import read_specs
    from headrace.policies.push.weights import plan_buckets, read_snapshot

    torch.set_num_threads(1)
    held = read_specs(snapshot)
    specs = {name: held[name] for name in sorted(held, key=storage_place)}
    buckets = plan_buckets(specs, bucket_bytes)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    if rank == 0:
        whole = read_snapshot(snapshot, None)
        flats = [whole.flat(bucket) for bucket in buckets]
    else:
        buffer = torch.zeros(max(bucket.size_bytes for bucket in buckets), dtype=torch.uint8)
        parameters = {name: torch.zeros(spec.shape) for name, spec in specs.items()}
    for _ in sys.stdin:
        distributed.barrier()
        started_s = time.perf_counter()
        for index, bucket in enumerate(buckets):
            if rank == 0:
                distributed.broadcast(flats[index], src=0)
            else:
                receive(bucket, buffer, parameters)
        tell({"seconds": time.perf_counter() - started_s})
    if rank == 1:
        tell({"wrong": differing(parameters, snapshot)})


def receive(bucket: Bucket, buffer: Tensor, parameters: dict[str, Tensor]) -> None:
    from torch import distributed

    from headrace.policies.push.weights import unflatten

    flat = buffer[: bucket.size_bytes]
    distributed.broadcast(flat, src=0)
    for name, tensor in unflatten(bucket, flat):
        parameters[name].copy_(tensor)


def differing(parameters: dict[str, Tensor], snapshot: Path) -> list[str]:
    """Names of the parameters that are not equal to those of the file."""
    import torch
    from safetensors import safe_open

    with safe_open(snapshot, "pt") as file:
        return [
            name for name, parameter in parameters.items() if not torch.equal(parameter, file.get_tensor(name).float())
        ]


def tell(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="benches.push.plain_broadcast")
    parser.add_argument("snapshot", type=Path)
    parser.add_argument("meeting", type=Path)
    for name in ("--rank", "--bucket-bytes", "--parent-pid"):
        parser.add_argument(name, type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent_pid)
    run(arguments.snapshot, arguments.meeting, arguments.rank, arguments.bucket_bytes)


if __name__ == "__main__":
    main()
