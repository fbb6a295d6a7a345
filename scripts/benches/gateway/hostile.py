"""What a hostile session does to the others: bodies that are legal JSON and take long to parse, to count or to render.

Invariants:
- The gateway has a process of its own, with its processes that render, and the attacker has one; the other agents and
  the engine share this one.
- Two other sessions go on meanwhile: one takes turns, and new ones take their first turn, with 18 tools.
- A stall is what a turn took beyond the median of the quiet time before the attacks.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import orjson
import psutil

from benches.gateway.load import Bench, MeasuredAgent
from benches.gateway.workload import request_head
from headrace.serve.gateway.capture.session import SessionId, SessionSpec
from headrace.serve.gateway.http.client import GatewayClient

AT_ONCE: Final = 2
LEAST_S: Final = 2.0
"""Time that each attack lasts at least."""
QUIET_S: Final = 3.0
SETTLE_S: Final = 2.0
LOOK_S: Final = 0.02

_USER: Final = {"role": "user", "content": "go"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileFigures:
    """`stall_ms`: the longest time that a turn of another session took beyond its usual time, by attack; `statuses`:
    the answers to each attack's requests. `peak_mb` and `after_mb` are the resident memory of the gateway and all its
    processes above what they had before the attacks, at its highest and after them."""

    stall_ms: dict[str, float]
    statuses: dict[str, list[int]]
    usual_ms: float
    usual_first_ms: float
    base_mb: float
    peak_mb: float
    after_mb: float

    def to_json(self) -> dict[str, Any]:
        return {
            "hostile_stall_ms": max(self.stall_ms.values()),
            "hostile_rss_mb": self.peak_mb,
            "hostile_rss_after_ratio": self.after_mb / self.base_mb,
            "hostile_base_mb": self.base_mb,
            "hostile_stall_ms_by_attack": self.stall_ms,
            "hostile_statuses": {name: dict(Counter(map(str, some))) for name, some in self.statuses.items()},
            "usual_turn_ms": self.usual_ms,
            "usual_first_turn_ms": self.usual_first_ms,
        }


def attacks() -> Iterator[tuple[str, bytes]]:
    """Yield bodies of Chat Completions by name."""

    def body(**fields: object) -> bytes:
        return orjson.dumps({"model": "policy", "messages": [_USER], **fields})

    def called(arguments: object, count: int = 1) -> list[object]:
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        results = [{"role": "tool", "tool_call_id": "a", "content": "x"}] * count
        return [_USER, {"role": "assistant", "tool_calls": [call] * count}, *results]

    nested: list[Any] = []
    for _ in range(200):
        nested = [nested]
    yield "nested arguments", body(messages=called([nested] * 10_000))
    yield "nested arguments as text", body(messages=called(orjson.dumps([nested] * 10_000).decode()))
    yield "tiny calls", body(messages=called("{}", 30_000))
    yield "one-letter messages", body(messages=[{"role": "user", "content": "a"}] * 450_000)
    yield "small tools", body(tools=[{"type": "function", "function": {"name": "t"}}] * 80_000)
    tool = {
        "name": "t",
        "parameters": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(60)}},
    }
    yield "large tools", body(tools=[{"type": "function", "function": tool}] * 1000)
    yield "objects", b'{"x": [' + b",".join([b"{}"] * 990_000) + b'], "messages": []}'
    yield "empty objects", b'{"messages": [' + b",".join([b"{}"] * 5_000_000) + b"]}"
    yield "numbers", b'{"x": [' + b",".join([b"1"] * 7_900_000) + b'], "messages": []}'
    for name, text in (
        ("words", "some words of text "),
        ("one letter", "x"),
        ("blanks", " "),
        ("lines", "\n"),
        ("signs", '"{,'),
    ):
        yield f"text of {name}", body(messages=[{"role": "user", "content": text * (15_000_000 // len(text.encode()))}])
    yield "most messages", body(messages=[{"role": "user", "content": "a"}] * 4096)
    yield "most calls", body(messages=called("{}", 4000))
    yield "most parts", body(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 16_384}])


async def measure_hostile(bench: Bench) -> HostileFigures:
    """Attack a gateway, and measure what other sessions notice."""
    async with bench.gateway() as (gateway, client, http):
        process = psutil.Process(gateway.pid)
        victims = _Victims(bench, client, http)
        memory = _Memory(process)
        async with _beside(victims.turns, victims.first_turns):
            await asyncio.sleep(QUIET_S)
            usual_s, usual_first_s = victims.take()
            base_mb = memory.now_mb()
            stall_ms: dict[str, float] = {}
            statuses: dict[str, list[int]] = {}
            async with _beside(memory.watch):
                for name, body in attacks():
                    victims.take()
                    statuses[name] = await _attack(client, name, body)
                    turns_s, first_s = victims.take()
                    stall_ms[name] = 1000 * max(
                        max(turns_s, default=0.0) - statistics.median(usual_s),
                        max(first_s, default=0.0) - statistics.median(usual_first_s),
                    )
            await asyncio.sleep(SETTLE_S)
        after_mb = memory.now_mb()
    return HostileFigures(
        stall_ms=stall_ms,
        statuses=statuses,
        usual_ms=1000 * statistics.median(usual_s),
        usual_first_ms=1000 * statistics.median(usual_first_s),
        base_mb=base_mb,
        peak_mb=memory.peak_mb - base_mb,
        after_mb=after_mb,
    )


async def _attack(client: GatewayClient, name: str, body: bytes) -> list[int]:
    """Send the body from one session, `AT_ONCE` times at once, for at least `LEAST_S`; return all answers' status. A
    process of its own sends it, so that it delays no other agent."""
    opened = await client.open(SessionSpec(session_id=SessionId(f"hostile-{name.replace(' ', '-')}")))
    url = f"{opened.base_url}/v1/chat/completions"
    attacker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benches.gateway.hostile", url),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await attacker.communicate(body)
    statuses: list[int] = orjson.loads(printed)
    return statuses


async def _send(url: str, body: bytes) -> list[int]:
    statuses: list[int] = []

    async def send(http: aiohttp.ClientSession) -> None:
        began_s = time.monotonic()
        while time.monotonic() - began_s < LEAST_S:
            async with http.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
                await response.read()
                statuses.append(response.status)

    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(send(http))
    return statuses


class _Victims:
    """Sessions that go on, and the seconds that their turns took since the last `take`."""

    def __init__(self, bench: Bench, client: GatewayClient, http: aiohttp.ClientSession) -> None:
        self._bench, self._client, self._http = bench, client, http
        self._turns_s: list[float] = []
        self._first_s: list[float] = []
        self._pending: set[tuple[bool, float]] = set()

    def take(self) -> tuple[list[float], list[float]]:
        """Return the times of turns and of first turns, and forget them. A turn that is still running counts with its
        time so far."""
        now_s = time.perf_counter()
        turns_s = [*self._turns_s, *(now_s - at_s for first, at_s in self._pending if not first)]
        first_s = [*self._first_s, *(now_s - at_s for first, at_s in self._pending if first)]
        self._turns_s, self._first_s = [], []
        return turns_s, first_s

    async def turns(self) -> None:
        while True:
            async with self._agent() as agent:
                await agent.turn("x")
                for _ in range(40):
                    self._turns_s.append(await self._timed(agent, first=False))

    async def first_turns(self) -> None:
        while True:
            async with self._agent() as agent:
                self._first_s.append(await self._timed(agent, first=True))

    async def _timed(self, agent: MeasuredAgent, *, first: bool) -> float:
        key = first, time.perf_counter()
        self._pending.add(key)
        seconds = await agent.turn("x")
        self._pending.discard(key)
        await asyncio.sleep(LOOK_S)
        return seconds

    @asynccontextmanager
    async def _agent(self) -> AsyncIterator[MeasuredAgent]:
        """Open a session for an agent, and finish it: open ones would count as memory that is not given back."""
        [agent], ids = await self._bench.open(self._http, self._client, 1, request_head())
        yield agent
        await self._client.finish(ids[0])


class _Memory:
    """Resident memory of a process and its children, in MB."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self.peak_mb = 0.0

    def now_mb(self) -> float:
        total = 0
        for process in (self._process, *self._process.children(recursive=True)):
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total / 2**20

    async def watch(self) -> None:
        while True:
            self.peak_mb = max(self.peak_mb, self.now_mb())
            await asyncio.sleep(LOOK_S)


class _beside:
    """Context manager that runs functions beside its block, and raises what they raise."""

    def __init__(self, *works: Callable[[], Awaitable[None]]) -> None:
        self._works = works

    async def __aenter__(self) -> None:
        self._tasks = [asyncio.ensure_future(work()) for work in self._works]

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result


if __name__ == "__main__":
    sys.stdout.buffer.write(orjson.dumps(asyncio.run(_send(sys.argv[1], sys.stdin.buffer.read()))))
