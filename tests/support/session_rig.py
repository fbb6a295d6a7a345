"""Test rig of a session core without a gateway: requests in, prompts and reports out, completions set by the test.

`ByteChat` is a renderer whose ids can be read by eye (bytes, and a token for each role), `LineParser` a parser of lines
`CALL name {json}` and `THINK text`: the core knows neither templates nor markup.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.buffer.trajectories.token_kinds import KindRuns, TokenKind, to_runs
from headrace.buffer.trajectories.types import VersionSpan
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import Completion, FinishReason
from headrace.policies.tokens.chat_template import Ending
from headrace.serve.gateway.capture.events import Delivered, Event, Status
from headrace.serve.gateway.capture.session import Session, TurnPlan
from headrace.serve.gateway.conversation import (
    Message,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
    TurnAnswer,
    TurnRequest,
    WarningText,
    say,
)
from headrace.serve.gateway.parsing.base import CallSyntax, OutputParser, ParsedBlock, ParsedCall, ParsedOutput
from headrace.serve.gateway.rendering.render import Renderer, TokenIds
from headrace.serve.gateway.rendering.work import RendererCall

END = 256
OPENINGS = {Role.SYSTEM: 257, Role.USER: 258, Role.ASSISTANT: 259, Role.TOOL: 260}
TOOLS = 261


class ByteChat:
    """Bytes between a role's opening token and `END`. `bridges` can be switched off, as a template would."""

    vocab_size, stop_ids, opens_reasoning, template = 262, (END,), False, ""

    continues = True

    def __init__(self, *, bridges: bool = True, marks_bodies: bool = True) -> None:
        self.bridges, self.marks_bodies = bridges, marks_bodies

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], ending: Ending = Ending.TURN) -> TokenIds:
        ids = array("i", [TOOLS, *",".join(tool.name for tool in tools).encode(), END] if tools else [])
        for message in messages:
            ids.extend(self._one(message))
        if ending is Ending.OPEN:
            return ids[:-1]
        return array("i", [*ids, OPENINGS[Role.ASSISTANT]]) if ending is Ending.TURN else ids

    def bridge(
        self,
        last_id: int,
        calls: Sequence[ToolCall],
        messages: Sequence[Message],
        ending: Ending = Ending.TURN,
    ) -> TokenIds:
        closing = [] if last_id == END else [END]
        return array("i", [*closing, *self.render(messages, (), ending)])

    def insert(self, text: str) -> TokenIds:
        return array("i", [*text.encode()])

    def insert_kinds(self, ids: TokenIds, message: Message) -> KindRuns:
        kinds = [
            kind
            for block in message.blocks
            if isinstance(block, Text)
            for kind in [TokenKind.WARNING if isinstance(block, WarningText) else TokenKind.OBSERVATION]
            * len(block.text.encode())
        ]
        return to_runs(np.array(kinds, dtype=np.uint8))

    def render_kinds(
        self, ids: TokenIds, messages: Sequence[Message], tools: Sequence[ToolSpec], *, observed_from: int
    ) -> KindRuns:
        """Bodies are bytes; those of the tools and of the policy are scaffold."""
        kinds = [TokenKind.SCAFFOLD] * len(ids)
        at = len(ids) - 1 - sum(map(len, map(self._one, messages)))
        for index, message in enumerate(messages):
            length = len(self._one(message))
            if message.role is not Role.ASSISTANT:
                kind = TokenKind.PROMPT if index < observed_from else TokenKind.OBSERVATION
                kinds[at + 1 : at + length - 1] = [kind] * (length - 2)
            at += length
        return to_runs(np.array(kinds, dtype=np.uint8))

    def bridge_kinds(self, ids: TokenIds, calls: Sequence[ToolCall], messages: Sequence[Message]) -> KindRuns:
        return self.render_kinds(ids, messages, (), observed_from=0)

    def _one(self, message: Message) -> list[int]:
        words = [
            f"CALL {block.name} {block.arguments}" if isinstance(block, ToolCall) else block.text
            for block in message.blocks
        ]
        return [OPENINGS[message.role], *"".join(words).encode(), END]

    def count_tokens(self, texts: Iterable[str], *, stop_at: int) -> int:
        return min(stop_at, sum(len(text.encode()) for text in texts))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(item for item in ids if item < 256).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def visible(self, text: str) -> str:
        return text


class LineParser:
    """Lines, kept with their ends."""

    call_syntax: CallSyntax | None = None

    def parse(self, text: str, tools: Sequence[ToolSpec], *, in_reasoning: bool) -> ParsedOutput:
        blocks: list[ParsedBlock] = []
        for line in text.splitlines(keepends=True):
            if line.startswith("CALL ") and tools:
                name, _, arguments = line.removeprefix("CALL ").strip().partition(" ")
                blocks.append(ParsedCall(name, arguments))
            elif line.startswith("THINK "):
                blocks.append(Reasoning(line.removeprefix("THINK ")))
            else:
                blocks.append(Text(line))
        return ParsedOutput(tuple(blocks))


@dataclass
class Rig:
    """Driver of turns on a core; `events` are those of a log, `prompts` and `outputs` those of an engine, in order."""

    core: Session
    renderer: Renderer = field(default_factory=ByteChat)
    parser: OutputParser = field(default_factory=LineParser)
    tokenize: Callable[[str], Sequence[int]] = lambda text: tuple(text.encode())
    events: list[Event] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)

    def record(self, event: Event) -> None:
        self.events.append(event)
        self.core.apply(event)

    def plan(self, request: TurnRequest, *, untrained: bool = False) -> TurnPlan:
        """Plan a turn like the shell, including the fallback to a full render."""
        match = self.core.match(request, untrained=untrained)
        for event in self.core.accepted(match):
            self.record(event)
        if match.parent is not None and match.prompt is None and not (self.renderer.bridges or match.resumes):
            match = self.core.trie.as_root(match, request)
        delta = self.core.delta(match, request, self.renderer)
        kinds = self.core.kinds(match, request, delta, self.renderer)
        return self.core.plan(match, request, delta, kinds(self.renderer) if isinstance(kinds, RendererCall) else kinds)

    def turn(
        self,
        request: TurnRequest,
        output: str | Sequence[int],
        *,
        finish: FinishReason = FinishReason.STOP,
        deliver: bool = True,
        untrained: bool = False,
    ) -> TurnAnswer:
        """One whole turn. A text ends with the stop token where the finish says so; ids are taken as they are."""
        plan = self.plan(request, untrained=untrained)
        completion = self.completion(output, finish)
        self.prompts.append(list(plan.prompt_ids))
        self.outputs.append(list(completion.output_ids))
        event = self.core.recorded(self.core.next_turn_id(), plan, completion, self.renderer, self.parser)
        self.record(event)
        if deliver:
            self.record(Delivered(turn_id=event.answer.turn_id))
        return event.answer

    def cut(self, request: TurnRequest, ids: Sequence[int], *, by_clock: bool = False) -> None:
        """Play a turn that is cut."""
        plan, completion = self.plan(request), self.completion(ids, FinishReason.ABORT)
        self.record(self.core.aborted(self.core.next_turn_id(), plan, completion, self.renderer, by_clock=by_clock))

    def completion(self, output: str | Sequence[int], finish: FinishReason = FinishReason.STOP) -> Completion:
        number = len(self.outputs)
        if isinstance(output, str):
            ids = tuple(self.tokenize(output))
            if finish is FinishReason.STOP:
                ids = (*ids, self.renderer.stop_ids[0])
        else:
            ids = tuple(output)
        middle = len(ids) // 2
        spans = (
            VersionSpan(start=0, end=middle, version=PolicyVersion(1, number)),
            VersionSpan(start=middle, end=len(ids), version=PolicyVersion(1, number + 1), stale_kv=number % 2 == 1),
        )
        return Completion(
            output_ids=ids,
            logprobs=tuple(-0.5 - 0.25 * (number % 4) - index % 7 for index in range(len(ids))),
            spans=tuple(span for span in spans if span.end > span.start),
            finish=finish,
            text="",
            prompt_tokens=0,
            cached_tokens=0,
            retractions=0,
        )


def asks(*messages: Message, **fields: object) -> TurnRequest:
    return TurnRequest(messages=messages, **fields)  # type: ignore[arg-type]


def results(*pairs: tuple[str, str]) -> Message:
    return Message(Role.TOOL, tuple(ToolResult(call_id, text) for call_id, text in pairs))


def call(name: str, **arguments: object) -> str:
    """Return a call as LineParser parses it."""
    return f"CALL {name} {json.dumps(arguments)}\n"


def user(text: str) -> Message:
    return say(Role.USER, text)


def echo(answer: TurnAnswer) -> Message:
    """Return the answer as a faithful client echoes it."""
    return Message(Role.ASSISTANT, answer.blocks)


def statuses(core: Session) -> list[Status]:
    return [node.status for node in core.trie.sampled]
