"""The figures of the gateway bench, each with its counterpart without the gateway or without bridges."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benches.gateway.engine import ScriptedEngine
from benches.gateway.load import Bench
from benches.gateway.model import write_model
from benches.gateway.process import raise_open_files
from benches.gateway.rendering import measure_rendering
from benches.gateway.workload import answers


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayFigures:
    """Output of `scripts/bench gateway`. Processor times are of the gateway's own process, all threads.

    Agent-sized turns (18 tools, system prompt of 30 KB, 4 KB of tool output, 20 turns, `tokens_per_session` at the end;
    Anthropic's API, streaming, every answer with a call, session log on): `cpu_ms_per_turn` is the median of
    `cpu_ms_by_batch`; `direct_cpu_ms_per_turn` is the time of agent and engine alone, and `full_rerender_ms_per_turn`
    that of our renderer without caches and bridges. `cpu_ms_per_session`: to finish a session.
    `memory_mb_per_trajectory`: growth of the resident memory by an unfinished session.

    `rerender_ratio`: rendering and tokenizing of 90 turns up to `rerender_tokens` by bridges, over the same with a full
    re-render of every turn.

    `added_p50_ms`, `added_p99_ms`: 64 agents with prompts of at most 4 KB, 200 ms in the engine, 300 ms between turns;
    the percentile through the gateway less that of the direct connection (`direct_p50_ms`, `direct_p99_ms`).

    `loop_block_max_ms`: the longest callback of the event loop (`loop`), in processor time of its thread, while 2,000
    agents take their first turn at once; `collection_max_ms`: the longest garbage collection meanwhile, in any thread,
    by the wall clock; `burst_s`: until all have their answer. `memory_mb_2000_sessions`: resident memory when all have
    grown to `tokens_2000_sessions` each."""

    cpu_ms_per_turn: float
    cpu_ms_by_batch: tuple[float, ...]
    direct_cpu_ms_per_turn: float
    full_rerender_ms_per_turn: float
    cpu_ms_per_session: float
    memory_mb_per_trajectory: float
    tokens_per_session: float
    rerender_ratio: float
    rerender_tokens: int
    added_p50_ms: float
    added_p99_ms: float
    direct_p50_ms: float
    direct_p99_ms: float
    loop_block_max_ms: float
    collection_max_ms: float
    burst_s: float
    memory_mb_2000_sessions: float
    tokens_2000_sessions: float
    loop: str
    wall_s: float


async def measure() -> GatewayFigures:
    """Measure all figures; takes about four minutes on two cores. Raises MeasurementBroken."""
    raise_open_files()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        scripted = answers(write_model(Path(folder)))
        rendering = measure_rendering(Path(folder), scripted)
        async with ScriptedEngine(scripted) as engine:
            bench = Bench(Path(folder), engine)
            turns = await bench.agent_sized()
            direct, through = await bench.latencies()
            burst = await bench.burst()
    return GatewayFigures(
        cpu_ms_per_turn=statistics.median(turns.cpu_ms),
        cpu_ms_by_batch=turns.cpu_ms,
        direct_cpu_ms_per_turn=turns.direct_cpu_ms,
        full_rerender_ms_per_turn=rendering.full_ms_per_turn,
        cpu_ms_per_session=turns.session_cpu_ms,
        memory_mb_per_trajectory=turns.memory_mb,
        tokens_per_session=turns.tokens,
        rerender_ratio=rendering.ratio,
        rerender_tokens=rendering.tokens,
        added_p50_ms=through.p50_ms - direct.p50_ms,
        added_p99_ms=through.p99_ms - direct.p99_ms,
        direct_p50_ms=direct.p50_ms,
        direct_p99_ms=direct.p99_ms,
        loop_block_max_ms=burst.callback_ms,
        collection_max_ms=burst.collection_ms,
        burst_s=burst.burst_s,
        memory_mb_2000_sessions=burst.memory_mb,
        tokens_2000_sessions=burst.tokens,
        loop="asyncio",
        wall_s=time.perf_counter() - started,
    )
