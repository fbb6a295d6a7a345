"""The baseline of a push: plain broadcasts of the same bytes between two processes, copied into parameters.

Invariants:
- Rank 0 has the file in memory and broadcasts slices of it; rank 1 receives each into one buffer and copies every
  tensor into a parameter of its own. No HTTP, no check, no fused storage, no swap, and no allocation during a round.
- Both split the tensors into buckets in rank 0's memory order.
- Every line on standard input starts one round; rank 1 answers with its seconds from the barrier before the first byte
  to the end of the last copy. At the end of the input it reports the parameters that differ from the file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.policies.processes.parent_death import die_with_parent
from headrace.policies.tensors import Bucket

if TYPE_CHECKING:
    from torch import Tensor

ROUND_TIMEOUT_S = 120.0


class PlainPair:
    """Handle of both processes, which are connected and idle between rounds."""

    def __init__(self, processes: list[asyncio.subprocess.Process]) -> None:
        self._processes = processes

    async def round_s(self) -> float:
        """Transfer everything once; return the seconds."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            await process.stdin.drain()
        return float((await self._answer())["seconds"])

    async def check(self) -> None:
        """End the rounds. Raises RuntimeError when a parameter of rank 1 differs from the file."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        wrong = (await self._answer())["wrong"]
        if wrong:
            raise RuntimeError(f"the plain broadcast sent incorrect weights: {wrong[:3]} ({len(wrong)} in total)")

    async def _answer(self) -> dict[str, Any]:
        """Return the next line of rank 1."""
        receiver = self._processes[1]
        assert receiver.stdout is not None
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            line = await receiver.stdout.readline()
        if not line:
            raise RuntimeError("the plain broadcast died: see its traceback above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@asynccontextmanager
async def open_pair(snapshot: Path, meeting: Path, bucket_bytes: int) -> AsyncIterator[PlainPair]:
    """Start both processes, check the received weights, and end them. `meeting` is the file for their rendezvous, which
    must not exist yet."""
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
    """Run one of the two processes until the end of its input."""
    import torch
    from torch import distributed

    from headrace.policies.push.weights import arranged, plan_buckets, read_snapshot
    from headrace.policies.tensors import read_specs

    torch.set_num_threads(1)
    held = read_specs(snapshot)
    specs = {name: held[name] for name in arranged(held)}
    buckets = plan_buckets(specs, bucket_bytes)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    if rank == 0:
        whole = read_snapshot({snapshot: None})
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
    """Return the names of the parameters that differ from those of the file."""
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
