"""The load of the gateway bench: agent-sized turns, small turns with pauses, and 2,000 agents at once.

Invariants:
- Agents and engine share this process; the gateway has its own, and only its processor time counts.
- Sessions are opened before the measurement and finished after it: all tokens sampled in a session must be trained, in
  one row.
- The session log is on.
- Agents echo answers as Claude Code does: arguments are parsed and re-serialized, id and signature are unchanged.
- An answer that is not a complete turn with a call ends the measurement.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import aiohttp
import orjson
from opentelemetry.trace import NonRecordingSpan

from benches.gateway.engine import ScriptedEngine
from benches.gateway.process import ADMIN_TOKEN, GatewayProcess, gateway_process
from benches.gateway.relay import RelayProcess, relay_process
from benches.gateway.workload import OUTPUT_CHARACTERS, TURNS, Texts, outputs, request_head
from headrace.serve.gateway.capture.session import Budgets, SessionId, SessionSpec
from headrace.serve.gateway.http.client import GatewayClient
from headrace.serve.tracing.tracing import attempt_context, traceparent_of

AT_ONCE: Final = 40
BATCHES: Final = 5
SMALL_AGENTS: Final = 64
SMALL_TURNS: Final = 4
ROUNDS: Final = 6
ENGINE_S: Final = 0.2
PAUSE_S: Final = 0.3
MANY: Final = 2000
LONG_AGENTS: Final = 8
LONG_TOKENS: Final = 128_000
LONG_CONTEXT: Final = 262_144
LONG_CHARACTERS: Final = 560_000
"""Characters of a tool's output that make a prompt of at least `LONG_TOKENS`."""
TASK_CHARACTERS: Final = 500
_OPEN_AT_ONCE: Final = 50
_MANY_OUTPUTS: Final = (42_000, 42_000)
"""Characters of tool output that fill a session to 36,000 tokens after its first turn."""


class MeasurementBroken(Exception):
    """The gateway gave an invalid answer, so that the figures of this run are meaningless."""


class MeasuredAgent:
    """Conversation with the API, whose requests go to `url`. `prompt_tokens` and `sampled_tokens` are those of the last
    answer; `seed` determines the texts of its tools."""

    def __init__(self, http: aiohttp.ClientSession, url: str, head: Mapping[str, Any], task: str, *, seed: int) -> None:
        self.seed = seed
        self._http = http
        self.url = f"{url}/v1/messages"
        self._head = orjson.dumps({**head, "messages": []}).removesuffix(b"]}")
        self._messages = [orjson.dumps({"role": "user", "content": task})]
        self.prompt_tokens = 0
        self.sampled_tokens = 0

    async def turn(self, output: str) -> float:
        """Take a turn and append the `output` of its tool call; return the seconds from the request to the last byte of
        the answer. Raises MeasurementBroken."""
        data = b"%b%b]}" % (self._head, b",".join(self._messages))
        headers = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
        started = time.perf_counter()
        async with self._http.post(self.url, data=data, headers=headers) as response:
            body, status = await response.read(), response.status
        latency_s = time.perf_counter() - started
        if status != 200:
            raise MeasurementBroken(f"the gateway answered {status}: {body[:500].decode(errors='replace')}")
        blocks: list[dict[str, Any]] = []
        for line in body.splitlines():
            if not line.startswith(b"data: "):
                continue
            match orjson.loads(line[6:]):
                case {"type": "content_block_start", "content_block": block}:
                    blocks.append(block)
                case {"delta": {"type": "text_delta", "text": text}}:
                    blocks[-1]["text"] = text
                case {"delta": {"type": "thinking_delta", "thinking": text}}:
                    blocks[-1]["thinking"] = text
                case {"delta": {"type": "signature_delta", "signature": text}}:
                    blocks[-1]["signature"] = text
                case {"delta": {"type": "input_json_delta", "partial_json": text}}:
                    blocks[-1]["input"] = orjson.loads(text)
                case {"type": "message_start", "message": {"usage": usage}}:
                    self.prompt_tokens = usage["input_tokens"]
                case {"type": "message_delta", "usage": usage}:
                    self.sampled_tokens = usage["output_tokens"]
        if b"event: message_stop" not in body or not blocks or blocks[-1]["type"] != "tool_use":
            raise MeasurementBroken(
                f"expected a complete turn with a tool call, got: {body[-500:].decode(errors='replace')}"
            )
        result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": output}
        self._messages.append(orjson.dumps({"role": "assistant", "content": blocks}))
        self._messages.append(orjson.dumps({"role": "user", "content": [result]}))
        return latency_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCost:
    """Cost of an agent-sized turn: `cpu_ms` by batch, and `relay_cpu_ms` of a relay, batch by batch in turn with it;
    `direct_cpu_ms` is the time of agent and engine without a gateway. `session_cpu_ms` is the time to open and finish a
    session."""

    cpu_ms: tuple[float, ...]
    relay_cpu_ms: tuple[float, ...]
    direct_cpu_ms: float
    memory_mb: float
    session_cpu_ms: float
    tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Latency percentiles of a turn, including the engine."""

    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Figures of 2,000 agents that start at once: `callback_ms` and `collection_ms` are the longest during their first
    turns; `memory_mb` and `tokens` are those of all sessions at full size."""

    callback_ms: float
    collection_ms: float
    burst_s: float
    memory_mb: float
    tokens: float


_Side: TypeAlias = tuple[GatewayProcess, GatewayClient, aiohttp.ClientSession]
"""A gateway, its administrator's client, and the agents' session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """A batch of conversations: CPU milliseconds of the gateway per turn, and tokens of a session at its end."""

    cpu_ms: float
    ids: list[SessionId]
    tokens: float


class Bench:
    """Measurements with one tokenizer directory and one engine."""

    def __init__(self, tokenizer_dir: Path, engine: ScriptedEngine) -> None:
        self._tokenizer_dir = tokenizer_dir
        self._engine = engine
        self._agents = self._sessions = self._relays = 0

    async def agent_sized(self, spans_dir: Path | None = None) -> TurnCost:
        """Run batches of conversations of `TURNS` turns; all remain unfinished until the last has ended. With
        `spans_dir` the gateway writes spans."""
        self._engine.delay_s = 0.0
        async with self.gateway(spans_dir=spans_dir) as side, self._relay() as relay:
            gateway, client, http = side
            await finish(client, (await self._batch(side, AT_ONCE)).ids)
            await self._relayed(relay, http)
            before = await gateway.probe()
            batches, relayed = [], []
            for _ in range(BATCHES):
                batches.append(await self._batch(side, AT_ONCE))
                relayed.append(await self._relayed(relay, http))
            unfinished = [session_id for batch in batches for session_id in batch.ids]
            full = await gateway.probe()
            await finish(client, unfinished)
            finish_s = (await gateway.probe()).cpu_s - full.cpu_s
            direct = self._direct(http, AT_ONCE, request_head())
            started_s = time.process_time()
            await run_agents(direct, [OUTPUT_CHARACTERS] * TURNS)
            direct_s = time.process_time() - started_s
        return TurnCost(
            cpu_ms=tuple(batch.cpu_ms for batch in batches),
            relay_cpu_ms=tuple(relayed),
            direct_cpu_ms=1000 * direct_s / (AT_ONCE * TURNS),
            memory_mb=(full.memory_mb - before.memory_mb) / len(unfinished),
            session_cpu_ms=1000 * finish_s / len(unfinished),
            tokens=batches[-1].tokens,
        )

    async def alternated(
        self, order: Iterable[bool], spans_dir: Path, *, agents: int
    ) -> AsyncIterator[tuple[float, bool]]:
        """Run batches of `agents` conversations of `TURNS` turns with two gateways side by side, in this order: with
        the one that writes spans to `spans_dir` (True), or the one without. Yield the CPU milliseconds of a turn, and
        which gateway it was."""
        self._engine.delay_s = 0.0
        async with self.gateway(spans_dir=spans_dir) as traced, self.gateway() as untraced:
            sides = {True: traced, False: untraced}
            for side in sides.values():
                await finish(side[1], (await self._batch(side, agents)).ids)
            for on in order:
                batch = await self._batch(sides[on], agents)
                await finish(sides[on][1], batch.ids)
                yield batch.cpu_ms, on

    async def _batch(self, side: _Side, agents: int) -> _Batch:
        """Run a batch of conversations, whose sessions stay open."""
        gateway, client, http = side
        opened, ids = await self.open(http, client, agents, request_head())
        started = await gateway.probe()
        await run_agents(opened, [OUTPUT_CHARACTERS] * TURNS)
        cpu_s = (await gateway.probe()).cpu_s - started.cpu_s
        return _Batch(
            cpu_ms=1000 * cpu_s / (agents * TURNS),
            ids=ids,
            tokens=statistics.mean(agent.prompt_tokens + agent.sampled_tokens for agent in opened),
        )

    async def _relayed(self, relay: RelayProcess, http: aiohttp.ClientSession) -> float:
        """Run a batch of conversations through a relay; return its CPU milliseconds per turn."""
        agents = self._at_relay(relay, http, AT_ONCE, request_head())
        started_s = relay.cpu_s
        await run_agents(agents, [OUTPUT_CHARACTERS] * TURNS)
        return 1000 * (relay.cpu_s - started_s) / (AT_ONCE * TURNS)

    def _relay(self) -> AbstractAsyncContextManager[RelayProcess]:
        return relay_process(str(self._tokenizer_dir), self._engine.url)

    def _at_relay(
        self, relay: RelayProcess, http: aiohttp.ClientSession, number: int, head: Mapping[str, Any]
    ) -> list[MeasuredAgent]:
        first, self._relays = self._relays, self._relays + number
        return [self._agent(http, f"{relay.url}/s/{first + index}", head) for index in range(number)]

    async def latencies(self) -> tuple[Latencies, Latencies, Latencies]:
        """Measure direct latencies, those of a relay and the gateway's, in turn, so that a slow moment of the machine
        affects all. Tracing is on."""
        self._engine.delay_s = ENGINE_S
        head = request_head(system_characters=300, tools=1)
        direct: list[float] = []
        relayed: list[float] = []
        through: list[float] = []
        with tempfile.TemporaryDirectory(prefix="headrace-bench-") as spans:
            async with self.gateway(spans_dir=Path(spans)) as (_, client, http), self._relay() as relay:
                await _paced(self._direct(http, SMALL_AGENTS, head), turns=2)
                await _paced(self._at_relay(relay, http, SMALL_AGENTS, head), turns=2)
                await _paced((await self.open(http, client, SMALL_AGENTS, head))[0], turns=2)
                for _ in range(ROUNDS):
                    direct += await _paced(self._direct(http, SMALL_AGENTS, head), SMALL_TURNS)
                    relayed += await _paced(self._at_relay(relay, http, SMALL_AGENTS, head), SMALL_TURNS)
                    agents, ids = await self.open(http, client, SMALL_AGENTS, head)
                    through += await _paced(agents, SMALL_TURNS)
                    await finish(client, ids)
        return _latencies(direct), _latencies(relayed), _latencies(through)

    async def long_prompts(self) -> float:
        """Return the longest callback, in milliseconds, while `LONG_AGENTS` send prompts of 128,000 tokens at once."""
        self._engine.delay_s = ENGINE_S
        async with self.gateway(watch=True) as (gateway, client, http):
            agents, _ = await self.open(http, client, LONG_AGENTS, request_head(), context_tokens=LONG_CONTEXT)
            await run_agents(agents, [1])
            await gateway.probe()
            # What the tool of the first turn printed makes the second one long.
            await run_agents(agents, [LONG_CHARACTERS, 1])
            probe = await gateway.probe()
        if (least := min(agent.prompt_tokens for agent in agents)) < LONG_TOKENS:
            raise MeasurementBroken(f"a long prompt has {least} tokens only")
        return probe.callback_ms

    async def burst(self) -> Burst:
        """Start 2,000 agents at once, then grow all their sessions to 36,000 tokens."""
        self._engine.delay_s = ENGINE_S
        async with self.gateway(watch=True) as (gateway, client, http):
            agents, _ = await self.open(http, client, MANY, request_head())
            await gateway.probe()
            started = time.perf_counter()
            await run_agents(agents, _MANY_OUTPUTS[:1])
            burst_s, burst = time.perf_counter() - started, await gateway.probe()
            self._engine.delay_s = 0.0
            for first in range(0, MANY, AT_ONCE):
                await run_agents(agents[first : first + AT_ONCE], [*_MANY_OUTPUTS[1:], 1])
            grown = await gateway.probe()
        return Burst(
            callback_ms=burst.callback_ms,
            collection_ms=burst.collection_ms,
            burst_s=burst_s,
            memory_mb=grown.memory_mb,
            tokens=statistics.mean(agent.prompt_tokens + agent.sampled_tokens for agent in agents),
        )

    @asynccontextmanager
    async def gateway(self, *, watch: bool = False, spans_dir: Path | None = None) -> AsyncIterator[_Side]:
        """Run a gateway in front of the engine; `watch` times its callbacks, and with `spans_dir` it writes spans."""
        with tempfile.TemporaryDirectory(prefix="headrace-bench-") as log_dir:
            async with (
                gateway_process(
                    self._tokenizer_dir, Path(log_dir), self._engine.url, watch=watch, spans_dir=spans_dir
                ) as gateway,
                GatewayClient(gateway.url, ADMIN_TOKEN) as client,
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=300)
                ) as http,
            ):
                yield gateway, client, http

    async def open(
        self,
        http: aiohttp.ClientSession,
        client: GatewayClient,
        number: int,
        head: Mapping[str, Any],
        *,
        context_tokens: int = 131_072,
    ) -> tuple[list[MeasuredAgent], list[SessionId]]:
        """Open sessions, and return an agent for each, and their ids."""
        budgets = Budgets(max_context_tokens=context_tokens)
        ids = [SessionId(f"measured-{self._sessions + index}") for index in range(number)]
        self._sessions += number
        # Each session belongs to an attempt with a trace of its own, as in a run.
        parents = {each: NonRecordingSpan(attempt_context("bench", each, 1)) for each in ids}
        specs = [
            SessionSpec(session_id=each, budgets=budgets, traceparent=traceparent_of(span))
            for each, span in parents.items()
        ]
        opened = [
            session
            for first in range(0, number, _OPEN_AT_ONCE)
            for session in await asyncio.gather(*map(client.open, specs[first : first + _OPEN_AT_ONCE]))
        ]
        return [self._agent(http, session.base_url, head) for session in opened], ids

    def _direct(self, http: aiohttp.ClientSession, number: int, head: Mapping[str, Any]) -> list[MeasuredAgent]:
        return [self._agent(http, self._engine.url, head) for _ in range(number)]

    def _agent(self, http: aiohttp.ClientSession, url: str, head: Mapping[str, Any]) -> MeasuredAgent:
        self._agents += 1
        return MeasuredAgent(http, url, head, Texts(self._agents).prose(TASK_CHARACTERS), seed=self._agents)


async def run_agents(agents: Sequence[MeasuredAgent], printed: Sequence[int]) -> None:
    """Run all agents concurrently at full speed. `printed`: characters of tool output, turn by turn."""

    async def run(agent: MeasuredAgent) -> None:
        for output in outputs(agent.seed, printed):
            await agent.turn(output)

    async with asyncio.TaskGroup() as group:
        for agent in agents:
            group.create_task(run(agent))


async def _paced(agents: Sequence[MeasuredAgent], turns: int) -> list[float]:
    """Return the seconds of every turn, with `PAUSE_S` after each and random starting times."""
    starts = random.Random(0)
    latencies_s: list[float] = []

    async def run(agent: MeasuredAgent, start: float) -> None:
        await asyncio.sleep(start * (ENGINE_S + PAUSE_S))
        for output in outputs(agent.seed, [60] * turns):
            latencies_s.append(await agent.turn(output))
            await asyncio.sleep(PAUSE_S)

    async with asyncio.TaskGroup() as group:
        for agent in agents:
            group.create_task(run(agent, starts.random()))
    return latencies_s


def _latencies(turns_s: Sequence[float]) -> Latencies:
    percentiles = statistics.quantiles(turns_s, n=100)
    return Latencies(p50_ms=1000 * percentiles[49], p99_ms=1000 * percentiles[98])


async def finish(client: GatewayClient, ids: Sequence[SessionId]) -> None:
    for report in await asyncio.gather(*map(client.finish, ids)):
        if report.trajectory is None or len(report.trajectory.rows) != 1:
            raise MeasurementBroken(f"a session did not end with one row: {report}")
        if report.failures or not report.trained_tokens == report.sampled_tokens > 0:
            raise MeasurementBroken(f"{report.sampled_tokens} sampled, {report.trained_tokens} trained: {report}")
