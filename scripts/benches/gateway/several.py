"""What two gateway processes behind one address cost beside one: `headrace serve gateway --processes 1` and `2`, in
turn.

Invariants:
- Agents use the URLs that the gateway returns, so no request passes the address in front.
- The processor time is that of all processes of a gateway: the one in front, those that serve, and those that render.
- Batches of both alternate, so that a slow moment of the machine affects both.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import orjson
import psutil

from benches.gateway.load import AT_ONCE, Bench, finish, run_agents
from benches.gateway.workload import OUTPUT_CHARACTERS, TURNS, request_head
from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.serve.gateway.http.client import GatewayClient

PAIRS: Final = 4
_START_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralProcesses:
    """`ratio`: turns per CPU second of the gateway's processes times their number, for two over one, median of the
    pairs; `min_share` is the smallest share of the turns that one of the two served in a pair. `wall_ratio` is that of
    the turns per second, and `generator_cpu_share` the processor time of agents and engine over the wall time, on the
    same cores."""

    ratio: float
    min_share: float
    wall_ratio: float
    generator_cpu_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    cpu_s: float
    wall_s: float
    generator_s: float
    share: float


class _Program:
    """A running `headrace serve gateway`."""

    def __init__(self, url: str, token: str, pid: int, processes: int) -> None:
        self.url = url
        self.token = token
        self.processes = processes
        self._process = psutil.Process(pid)

    def cpu_s(self) -> float:
        tree = [self._process, *self._process.children(recursive=True)]
        times = [each.cpu_times() for each in tree]
        return float(sum(one.user + one.system for one in times))

    async def batch(self, bench: Bench, http: aiohttp.ClientSession) -> _Batch:
        """Run a batch of conversations."""
        async with GatewayClient(self.url, self.token) as client:
            agents, ids = await bench.open(http, client, AT_ONCE, request_head())
            ports = Counter(urlsplit(agent.url).port for agent in agents)
            cpu_s, wall_s, generator_s = self.cpu_s(), time.perf_counter(), time.process_time()
            await run_agents(agents, [OUTPUT_CHARACTERS] * TURNS)
            taken = _Batch(
                cpu_s=self.cpu_s() - cpu_s,
                wall_s=time.perf_counter() - wall_s,
                generator_s=time.process_time() - generator_s,
                share=min(ports.values()) / AT_ONCE if len(ports) == self.processes else 0.0,
            )
            await finish(client, ids)
        return taken


async def measure_several(bench: Bench, tokenizer_dir: Path, engine_url: str) -> SeveralProcesses:
    """Measure both gateways side by side. Raises MeasurementBroken."""
    async with AsyncExitStack() as stack:
        one, two = [
            await stack.enter_async_context(_program(tokenizer_dir, engine_url, processes)) for processes in (1, 2)
        ]
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=300))
        )
        for program in (one, two):
            await program.batch(bench, http)
        pairs = [(await one.batch(bench, http), await two.batch(bench, http)) for _ in range(PAIRS)]
    return SeveralProcesses(
        ratio=statistics.median(2 * single.cpu_s / double.cpu_s for single, double in pairs),
        min_share=min(double.share for _, double in pairs),
        wall_ratio=statistics.median(single.wall_s / double.wall_s for single, double in pairs),
        generator_cpu_share=statistics.median(double.generator_s / double.wall_s for _, double in pairs),
    )


@asynccontextmanager
async def _program(tokenizer_dir: Path, engine_url: str, processes: int) -> AsyncIterator[_Program]:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        token = Path(folder) / "token"
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("headrace")), "serve", "gateway", "--engine", engine_url,
            "--tokenizer", str(tokenizer_dir), "--state", str(Path(folder) / "state"),
            "--admin-token-file", str(token), "--processes", str(processes),
            "--max-context-tokens", "131072", "--json", "-", stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            async with asyncio.timeout(_START_S):
                url = orjson.loads(await process.stdout.readline())["url"]
            yield _Program(url, token.read_text().strip(), process.pid, processes)
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
