"""The figures of the gateway bench, each with its counterpart without the gateway or without bridges.

Invariants:
- Rendering with bridges and the full re-render both use this gateway's own renderer. The full re-render reuses nothing
  from one turn to the next: neither token ids of texts nor the tools' JSON.
- The costs of both are processor times of this process, including all threads.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from benches.gateway.engine import ScriptedEngine
from benches.gateway.hostile import measure_hostile
from benches.gateway.load import Bench
from benches.gateway.model import write_model
from benches.gateway.process import raise_open_files
from benches.gateway.several import measure_several
from benches.gateway.workload import OUTPUT_CHARACTERS, TURNS, Answer, Texts, answers, outputs, request_head
from headrace.policies.tokens.tokenizer import ChatTokenizer
from headrace.serve.gateway.conversation import Message, Reasoning, Role, Text, ToolCall, ToolResult, ToolSpec, say
from headrace.serve.gateway.rendering.render import Renderer
from headrace.serve.gateway.rendering.template_renderer import TemplateRenderer, load_renderer

LONG_TURNS: Final = 90
LONG_OUTPUT_CHARACTERS: Final = 3_150
"""Characters of output per turn that bring the conversation to about 96,000 tokens after 90 turns."""
REPEATS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """Costs of rendering. `ratio`: cost of bridges relative to full re-renders, for the long conversation, which ends
    with `tokens`. `full_ms_per_turn`: a full re-render, on average over the turns of an agent-sized conversation."""

    ratio: float
    tokens: int
    full_ms_per_turn: float


def measure_rendering(tokenizer_dir: Path, answers: Sequence[Answer]) -> Rendering:
    long = _Conversation(answers, outputs(3, [LONG_OUTPUT_CHARACTERS] * (LONG_TURNS - 1)))
    agent_sized = _Conversation(answers, outputs(4, [OUTPUT_CHARACTERS] * (TURNS - 1)))
    uncached = ChatTokenizer(tokenizer_dir, cache_bytes=0)
    _full(uncached, agent_sized)  # fills the tokenizers library's own cache of words, for both sides
    bridged = [_timed(partial(_bridged, load_renderer(tokenizer_dir), long)) for _ in range(REPEATS)]
    full = [_timed(partial(_full, uncached, long)) for _ in range(REPEATS)]
    agent_sized_full = [_timed(partial(_full, uncached, agent_sized)) for _ in range(REPEATS)]
    return Rendering(
        ratio=_median_s(bridged) / _median_s(full),
        tokens=bridged[0][1],
        full_ms_per_turn=1000 * _median_s(agent_sized_full) / TURNS,
    )


def _bridged(renderer: Renderer, conversation: _Conversation) -> int:
    ids = renderer.render(conversation.first, conversation.tools)
    for answer, echo, result in conversation.turns:
        ids.extend(answer.ids)
        ids.extend(renderer.bridge(ids[-1], echo.calls, [result]))
    return len(ids)


def _full(tokenizer: ChatTokenizer, conversation: _Conversation) -> int:
    messages = list(conversation.first)
    ids = TemplateRenderer(tokenizer).render(messages, conversation.tools)
    for _, echo, result in conversation.turns:
        messages += [echo, result]
        ids = TemplateRenderer(tokenizer).render(messages, conversation.tools)
    return len(ids)


def _timed(work: Callable[[], int]) -> tuple[float, int]:
    """Return the processor seconds and the result of the work."""
    started = time.process_time()
    tokens = work()
    return time.process_time() - started, tokens


def _median_s(timed: Sequence[tuple[float, int]]) -> float:
    return statistics.median(seconds for seconds, _ in timed)


class _Conversation:
    """Conversation to render. `first` are the messages of the first turn; `turns` contains each sampled turn with its
    echo and the results that follow."""

    def __init__(self, answers: Sequence[Answer], printed: Sequence[str]) -> None:
        head = request_head()
        self.tools = [ToolSpec(tool["name"], tool["description"], tool["input_schema"]) for tool in head["tools"]]
        self.first = [
            say(Role.SYSTEM, "\n\n".join(block["text"] for block in head["system"])),
            say(Role.USER, Texts(5).prose(1000)),
        ]
        self.turns: list[tuple[Answer, Message, Message]] = []
        for number, output in enumerate(printed):
            answer = answers[number % len(answers)]
            reasoning, _, rest = answer.text.removeprefix("<think>\n").partition("\n</think>\n\n")
            text, _, call = rest.partition("\n<tool_call>\n")
            arguments = call.partition('"arguments":')[2].removesuffix("}\n</tool_call>")
            name = "Edit" if "old_string" in arguments else "Bash"
            blocks = (Reasoning(reasoning, f"turn{number}"), Text(text), ToolCall(f"call_{number}", name, arguments))
            result = Message(Role.TOOL, (ToolResult(f"call_{number}", output),))
            self.turns.append((answer, Message(Role.ASSISTANT, blocks), result))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayFigures:
    """Output of `scripts/bench gateway`. Processor times are those of the gateway's own process, including all threads.

    Agent-sized turns (18 tools, system prompt of 30 KB, 4 KB of tool output, 20 turns, `tokens_per_session` at the end;
    Anthropic's API, streaming, every answer with a call, session log and tracing on): `cpu_ms_per_turn` is the median
    of `cpu_ms_by_batch`, and `untraced_cpu_ms_per_turn` the same without tracing; `direct_cpu_ms_per_turn` is the time
    of the agent and the engine alone, and `full_rerender_ms_per_turn` that of our renderer without caches and bridges.
    `cpu_ms_per_session` is the time to finish a session, and `memory_mb_per_trajectory` the resident memory that each
    unfinished session adds.

    `rerender_ratio`: time to render and tokenize 90 turns, up to `rerender_tokens`, with bridges, relative to the time
    with a full re-render of every turn.

    `relay_cpu_ms_per_turn` is the time of a relay (relay.py), and `cpu_over_relay` the median ratio of the gateway's
    batches, with tracing, to the relay's batches in between.

    `added_p50_ms`, `added_p99_ms`: 64 agents with prompts of at most 4 KB, 200 ms in the engine, 300 ms between turns;
    the percentile through the gateway, with tracing, minus that of the direct connection (`direct_p50_ms`,
    `direct_p99_ms`). `relay_added_p50_ms` is that of the relay, and `added_p50_over_relay` the ratio.

    `loop_block_max_ms`: the longest callback of the event loop (`loop`), in processor time of its thread, while 2,000
    agents take their first turn at once, and `loop_block_long_max_ms` while 8 agents send prompts of 128,000 tokens at
    once; `collection_max_ms`: the longest garbage collection in the meantime, in any
    thread, in wall time; `burst_s`: the time until all have their answers. `memory_mb_2000_sessions`: resident memory
    when all have grown to `tokens_2000_sessions` each.

    `two_process_ratio`, `two_process_min_share`, `two_process_wall_ratio` and `generator_cpu_share` compare two gateway
    processes behind one address with one (several.py)."""

    cpu_ms_per_turn: float
    cpu_ms_by_batch: tuple[float, ...]
    untraced_cpu_ms_per_turn: float
    relay_cpu_ms_per_turn: float
    cpu_over_relay: float
    direct_cpu_ms_per_turn: float
    full_rerender_ms_per_turn: float
    cpu_ms_per_session: float
    memory_mb_per_trajectory: float
    tokens_per_session: float
    rerender_ratio: float
    rerender_tokens: int
    added_p50_ms: float
    relay_added_p50_ms: float
    added_p50_over_relay: float
    added_p99_ms: float
    direct_p50_ms: float
    direct_p99_ms: float
    loop_block_max_ms: float
    loop_block_long_max_ms: float
    collection_max_ms: float
    burst_s: float
    memory_mb_2000_sessions: float
    tokens_2000_sessions: float
    two_process_ratio: float
    two_process_min_share: float
    two_process_wall_ratio: float
    generator_cpu_share: float
    loop: str
    wall_s: float


async def measure() -> GatewayFigures:
    """Measure all figures; takes about five minutes on two cores. Raises MeasurementBroken."""
    raise_open_files()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        scripted = answers(write_model(Path(folder)))
        rendering = measure_rendering(Path(folder), scripted)
        async with ScriptedEngine(scripted) as engine:
            bench = Bench(Path(folder), engine)
            turns = await bench.agent_sized(Path(folder) / "spans")
            untraced = await bench.agent_sized()
            direct, relayed, through = await bench.latencies()
            burst = await bench.burst()
            long_ms = await bench.long_prompts()
            several = await measure_several(bench, Path(folder), engine.url)
    ratios = [own / relay for own, relay in zip(turns.cpu_ms, turns.relay_cpu_ms, strict=True)]
    added_ms, relay_added_ms = through.p50_ms - direct.p50_ms, relayed.p50_ms - direct.p50_ms
    return GatewayFigures(
        cpu_ms_per_turn=statistics.median(turns.cpu_ms),
        cpu_ms_by_batch=turns.cpu_ms,
        untraced_cpu_ms_per_turn=statistics.median(untraced.cpu_ms),
        relay_cpu_ms_per_turn=statistics.median(turns.relay_cpu_ms),
        cpu_over_relay=statistics.median(ratios),
        direct_cpu_ms_per_turn=turns.direct_cpu_ms,
        full_rerender_ms_per_turn=rendering.full_ms_per_turn,
        cpu_ms_per_session=turns.session_cpu_ms,
        memory_mb_per_trajectory=turns.memory_mb,
        tokens_per_session=turns.tokens,
        rerender_ratio=rendering.ratio,
        rerender_tokens=rendering.tokens,
        added_p50_ms=added_ms,
        relay_added_p50_ms=relay_added_ms,
        added_p50_over_relay=added_ms / relay_added_ms,
        added_p99_ms=through.p99_ms - direct.p99_ms,
        direct_p50_ms=direct.p50_ms,
        direct_p99_ms=direct.p99_ms,
        loop_block_max_ms=burst.callback_ms,
        loop_block_long_max_ms=long_ms,
        collection_max_ms=burst.collection_ms,
        burst_s=burst.burst_s,
        memory_mb_2000_sessions=burst.memory_mb,
        tokens_2000_sessions=burst.tokens,
        two_process_ratio=several.ratio,
        two_process_min_share=several.min_share,
        two_process_wall_ratio=several.wall_ratio,
        generator_cpu_share=several.generator_cpu_share,
        loop="asyncio",
        wall_s=time.perf_counter() - started,
    )


async def measure_hostile_session() -> dict[str, Any]:
    """Measure what other sessions notice of a hostile one; takes about a minute."""
    raise_open_files()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        scripted = answers(write_model(Path(folder)))
        async with ScriptedEngine(scripted) as engine:
            return (await measure_hostile(Bench(Path(folder), engine))).to_json()
