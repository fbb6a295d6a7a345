"""The E2B server under a burst of creates: time until the last sandbox has run a command, latencies, leaks.

Invariants:
- The server is a process of its own, with its defaults but for the number of sandboxes; the client is plain HTTP, in
  this process, on the same processors.
- All creates are sent at once. None is repeated: a refused one counts as not up.
- After the burst every sandbox is deleted, and what is left is counted among the processes, not in the server's table.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil

_START_S: Final = 60.0
_KEY: Final = {"X-API-KEY": "any"}
_LIFE_S: Final = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    url: str
    process: psutil.Process

    def sandboxes_alive(self) -> int:
        """Return the number of first processes of sandboxes: the children of the launcher."""
        return sum(len(launcher.children()) for launcher in self.process.children())


async def measure(*, burst: int, small: int = 100, execs: int = 300) -> dict[str, Any]:
    """Return `up` (sandboxes of the burst that ran a command), `leaked`, `burst_s`, `small_burst_s`, `burst_ratio`
    (burst_s over what `small_burst_s` predicts for as many), exec_p50_ms and exec_p99_ms through the server, one at a
    time."""
    figures: dict[str, Any] = {}
    async with _server(small) as server, _client() as client:
        small_s, _ = await _burst(server, client, small)
        boxes = await asyncio.gather(*(_create(server, client) for _ in range(8)))
        times = []
        for number in range(execs):
            began = time.perf_counter()
            await _exec(server, client, boxes[number % len(boxes)])
            times.append((time.perf_counter() - began) * 1e3)
        cuts = statistics.quantiles(times, n=100)
        figures |= {"exec_p50_ms": round(statistics.median(times), 2), "exec_p99_ms": round(cuts[98], 2)}
    async with _server(burst) as server, _client() as client:
        burst_s, up = await _burst(server, client, burst)
        figures |= {"up": up, "leaked": server.sandboxes_alive(), "burst_s": round(burst_s, 2)}
    ratio = burst_s / (small_s * burst / small)
    return {**figures, "small_burst_s": round(small_s, 2), "burst_ratio": round(ratio, 3), "burst": burst}


@asynccontextmanager
async def _server(most: int) -> AsyncIterator[_Server]:
    with tempfile.TemporaryDirectory(prefix="headrace-e2b-") as folder:
        address = Path(folder) / "address.json"
        program = Path(sys.executable).with_name("headrace")
        command = (program, "serve", "sandbox", "--max-sandboxes", str(most + 16))
        process = await asyncio.create_subprocess_exec(*command, "--json", address, stdout=asyncio.subprocess.DEVNULL)
        try:
            async with asyncio.timeout(_START_S):
                while not address.exists() or not address.read_text():
                    if process.returncode is not None:
                        raise RuntimeError(f"the server ended with status {process.returncode}")
                    await asyncio.sleep(0.05)
            yield _Server(url=json.loads(address.read_text())["url"], process=psutil.Process(process.pid))
        finally:
            if process.returncode is None:
                process.terminate()
            await asyncio.wait_for(process.wait(), _START_S)


def _client() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def _burst(server: _Server, client: aiohttp.ClientSession, number: int) -> tuple[float, int]:
    """Create sandboxes at once, run a command in each, and delete them. Return the seconds until the last command has
    ended, and the number of sandboxes in which one ran."""

    async def run() -> dict[str, str] | None:
        try:
            box = await _create(server, client)
            await _exec(server, client, box)
        except (aiohttp.ClientError, RuntimeError) as error:
            print(f"a sandbox of the burst failed: {error}", file=sys.stderr)
            return None
        return box

    began = time.perf_counter()
    boxes = [box for box in await asyncio.gather(*(run() for _ in range(number))) if box is not None]
    seconds = time.perf_counter() - began

    async def delete(box: dict[str, str]) -> None:
        async with client.delete(f"{server.url}/sandboxes/{box['sandboxID']}", headers=_KEY) as response:
            await response.read()

    await asyncio.gather(*(delete(box) for box in boxes))
    return seconds, len(boxes)


async def _create(server: _Server, client: aiohttp.ClientSession) -> dict[str, str]:
    body = {"templateID": "base", "timeout": _LIFE_S}
    async with client.post(f"{server.url}/v2/sandboxes", json=body, headers=_KEY) as response:
        document: dict[str, str] = await response.json()
        if response.status != 201:
            raise RuntimeError(f"create returned {response.status}: {document}")
        return document


async def _exec(server: _Server, client: aiohttp.ClientSession, box: dict[str, str]) -> None:
    body = json.dumps({"process": {"cmd": "/bin/bash", "args": ["-l", "-c", "true"]}, "stdin": False}).encode()
    headers = {
        "E2b-Sandbox-Id": box["sandboxID"],
        "X-Access-Token": box["envdAccessToken"],
        "Content-Type": "application/connect+json",
        "Connect-Protocol-Version": "1",
    }
    data = struct.pack(">BI", 0, len(body)) + body
    async with client.post(f"{server.url}/process.Process/Start", data=data, headers=headers) as response:
        answer = (await response.read()).replace(b" ", b"")
        if b'"exitCode":0' not in answer:
            raise RuntimeError(f"the command returned {answer[-300:]!r}")
