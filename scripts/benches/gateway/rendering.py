"""The rendering part of the gateway bench: a conversation with bridges, and with a full re-render of every turn.

Invariants:
- Both use this gateway's own renderer. The full re-render reuses nothing from one turn to the next: no ids of texts, no
  JSON of tools.
- Both are processor time of this process, all threads.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from benches.gateway.workload import OUTPUT_CHARACTERS, TURNS, Texts, outputs, request_head
from headrace.policies.tokens.tokenizer import ChatTokenizer
from headrace.serve.conversation import Message, Reasoning, Role, Text, ToolCall, ToolResult, ToolSpec, say
from headrace.serve.rendering.template_renderer import TemplateRenderer, load_renderer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benches.gateway.workload import Answer
    from headrace.serve.rendering.render import Renderer

LONG_TURNS: Final = 90
LONG_OUTPUT_CHARACTERS: Final = 3_150
"""Output per turn with which the conversation has about 96,000 tokens after 90 turns."""
REPEATS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """Costs of rendering. `ratio`: bridges over full re-renders, for the long conversation, which ends with `tokens`.
    `full_ms_per_turn`: a full re-render, on average over the turns of an agent-sized conversation."""

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
