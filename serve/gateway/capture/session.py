"""The pure core of a session: one agent's conversations as tokens, and the choice of the tokens to train on.

Invariants:
- The prompt of a turn that continues another is that turn's prompt and output plus a bridge, token for token. Sampled
  ids are stored raw and are never rendered again.
- The prompt of a turn that resumes another within one message is that turn's prompt and output plus the ids of the
  inserted text, which are tokenized separately.
- A request whose history is unknown starts a new row with a full render; existing rows do not change.
- `sampled_tokens == trained_tokens + sum(masked)`: each sampled token is trained in exactly one row, or masked for one
  of the reasons in `Masked`. Drift never causes masking.
- This module uses no clock and does no I/O: `now` is an argument, ids come from a Renderer, and completions come from
  the caller. Every change to the session is an event (events.py) that can be stored and replayed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from hashlib import blake2b
from typing import Annotated, NewType

from pydantic import AfterValidator, ConfigDict, Field

from headrace.buffer.trajectories.token_kinds import KindRuns, TokenKind
from headrace.policies.engine import MAX_TOKEN_CHARACTERS, Completion, FinishReason, Grammar
from headrace.policies.tokens.chat_template import Ending
from headrace.serve.gateway.capture.events import (
    Accepted,
    Delivered,
    Event,
    Exhausted,
    Failed,
    LineageOrigin,
    Recorded,
    Replayed,
    Spent,
    Status,
)
from headrace.serve.gateway.capture.matching import options_digest
from headrace.serve.gateway.capture.trie import Match, SampledNode, Trie, path
from headrace.serve.gateway.conversation import (
    Block,
    Reasoning,
    Role,
    Text,
    ToolCall,
    TurnAnswer,
    TurnEnd,
    TurnRequest,
    WarningText,
    without_warnings,
)
from headrace.serve.gateway.errors import ContextExceeded
from headrace.serve.gateway.parsing.base import OutputParser, ParsedCall, ParsedOutput
from headrace.serve.gateway.parsing.scanner import END_THINK, THINK
from headrace.serve.gateway.rendering.render import Renderer, TokenIds
from headrace.serve.gateway.rendering.work import RendererCall, RenderWork

SessionId = NewType("SessionId", str)

SESSION_NAME = r"^[A-Za-z0-9._:/-]+$"
_STRICT = ConfigDict(extra="forbid")
_MOST = 2**31 - 1
"""Largest position or id, since both are int32."""
_Positive = Annotated[int, Field(ge=1, le=_MOST)]
FINAL_TEXT = "The budget of this session is used up, so I stop here."
RENDERED_TOKENS_FACTOR = 8
"""Messages that have this many times more tokens than fit are refused without being rendered. The factor is above 1
because templates write call arguments as JSON of their own, which can be several times shorter than the agent's (which
may contain blanks and `\\u` escapes)."""


class TrainedPart(StrEnum):
    """Part of a session's turns that is trained."""

    MAIN = "main"
    """The turns of the agent's conversations."""
    SIDE = "side"
    """Side calls: conversations without tools, beside agents that have tools."""
    ABANDONED = "abandoned"
    """Turns that the agent continued without, or that did not reach it."""


def with_main(train: tuple[TrainedPart, ...]) -> tuple[TrainedPart, ...]:
    """Return the parts to train. Raises ValueError if the main turns are not among them."""
    if TrainedPart.MAIN not in train:
        raise ValueError("must contain main")
    return train


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The recipe's sampling parameters, which apply to every turn whatever the agent sends."""

    __pydantic_config__ = _STRICT
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=_MOST)] = -1

    @property
    def exact(self) -> bool:
        """True when the engine's log-probabilities are those of the sampled distribution."""
        return self.temperature > 0 and self.top_p == 1.0 and self.top_k == -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Limits of one agent. `max_context_tokens` covers prompt plus output; `max_sampled_tokens` covers all turns
    together (None: no limit); `wall_s` starts when the session is opened. `final_text` is the normal answer that ends
    an agent whose budget is spent; if it is "", the agent gets an empty, truncated answer instead."""

    __pydantic_config__ = _STRICT
    max_turns: _Positive = 64
    max_tokens_per_turn: _Positive = 4096
    max_context_tokens: _Positive = 32768
    max_sampled_tokens: _Positive | None = None
    wall_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3600.0
    final_text: Annotated[str, Field(max_length=4096)] = FINAL_TEXT


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """Specification of a session to open, as the gateway also reads it from JSON. `session_id` is chosen by the caller
    and can be open only once at a time; `traceparent` is the rollout's agent span, `rollout` and `attempt` are those
    that it works for (empty: unknown, as for sessions of other programs). `train_truncated` says whether turns that
    were cut off by the context limit are trained; `train_cut` says the same of turns that were cut off when `wall_s`
    was over, which then count as turns. `train` says which turns are trained besides the main ones: those of side
    calls, and those that the agent continued without. `marks_warnings` says whether the agent may mark parts of
    observations as warnings, which objectives on observations leave out. `serve_unhonoured` serves requests freely
    whose constraint no engine can honour; otherwise they are refused."""

    __pydantic_config__ = _STRICT
    session_id: Annotated[SessionId, Field(min_length=1, max_length=200, pattern=SESSION_NAME)]
    sampling: Sampling = field(default_factory=Sampling)
    budgets: Budgets = field(default_factory=Budgets)
    traceparent: Annotated[str, Field(max_length=64)] = ""
    train_truncated: bool = True
    train_cut: bool = False
    train: Annotated[tuple[TrainedPart, ...], AfterValidator(with_main)] = (TrainedPart.MAIN,)
    marks_warnings: bool = False
    serve_unhonoured: bool = False
    rollout: Annotated[str, Field(max_length=256)] = ""
    attempt: Annotated[int, Field(ge=0, le=_MOST)] = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnPlan:
    """Prompt and limit of an engine request. `truncates` is true if `max_new_tokens` is set by the context limit rather
    than by the request or a budget; `spends` is true if it is set by what is left of `max_sampled_tokens`. `kinds` are
    those of `delta`, None if they are not known. `grammar` is that of the request's constraint, None if there is no
    constraint or it is not honoured."""

    match: Match
    request: TurnRequest
    delta: TokenIds
    prompt_ids: TokenIds
    max_new_tokens: int
    truncates: bool
    spends: bool = False
    kinds: KindRuns | None = None
    grammar: Grammar | None = None


class Session:
    """One agent's conversations. A turn calls `match`, `accepted`, `replay`, `delta` and `plan`, then an engine, and
    then `recorded` or `aborted`. It passes the resulting event to `apply`, and applies `Delivered` once the answer has
    been sent. With `keeps_answers`, the answers of accepted turns remain available, for an export."""

    def __init__(self, spec: SessionSpec, opened_at: float, *, keeps_answers: bool = False) -> None:
        self.spec = spec
        self.opened_at = opened_at
        self.trie = Trie(keeps_answers=keeps_answers)
        self.turns = 0
        self.begun_turns = 0
        """Recorded turns, those that were cut off included: an agent that leaves its turns for ever must end too."""
        self.exhausted = Exhausted.NONE
        self.failures: list[str] = []
        self.drift: Counter[str] = Counter()
        self.sampled_tokens = 0
        self.lost_calls = 0
        self.unhonoured: Counter[str] = Counter()
        self._salt = blake2b(spec.session_id.encode(), digest_size=4).hexdigest()
        self._turn_numbers = 0

    def wall_left_s(self, now: float) -> float:
        return self.opened_at + self.spec.budgets.wall_s - now

    def spent(self, now: float, *, running: int = 0) -> Exhausted:
        """Return the budget that does not allow another turn while `running` turns are in progress; NONE if the turn
        may begin."""
        budgets = self.spec.budgets
        if self.begun_turns + running >= budgets.max_turns:
            return Exhausted.TURNS
        if budgets.max_sampled_tokens is not None and self.sampled_tokens >= budgets.max_sampled_tokens:
            return Exhausted.TOKENS
        if self.wall_left_s(now) <= 0:
            return Exhausted.WALL
        return Exhausted.NONE

    def final_answer(self) -> TurnAnswer:
        """Return the normal answer that ends an agent whose budget is spent; none of it is sampled."""
        text = self.spec.budgets.final_text
        blocks = (Text(text),) if text else ()
        end = TurnEnd.STOP if text else TurnEnd.LENGTH
        return TurnAnswer(turn_id=f"t{self._salt}end", blocks=blocks, end=end)

    def match(self, request: TurnRequest, *, untrained: bool = False) -> Match:
        """Find the known part of the request. Does not change the session.

        Raises:
            ContextExceeded: the messages cannot fit, however they are rendered.
        """
        self._check_size(request)
        match = self.trie.match(request, untrained=untrained)
        if match.parent is not None and match.prompt is None and len(self.trie.roots) > 1:
            # If the template could not continue its parent, the request was recorded as a root of its own.
            whole = self.trie.as_root(match, request)
            match = whole if whole.prompt is not None else match
        return match

    def fresh(self, request: TurnRequest) -> Match:
        """Return the request as a new root, whatever is known of it. Raises ContextExceeded like `match`."""
        self._check_size(request)
        return Match(
            parent=None,
            rest=request.messages,
            parts=(),
            prompt=None,
            echoes=(),
            elsewhere=(),
            origin=LineageOrigin(),
            opened=len(request.messages[-1].text) if request.continues else None,
        )

    def accepted(self, match: Match) -> list[Accepted]:
        """Return the events for turns that the request echoes for the first time, which shows that they reached the
        agent."""
        first = {echo.node: echo for echo in reversed((*match.echoes, *match.elsewhere))}
        return [
            Accepted(turn_id=node.turn_id, drift=echo.drift)
            for node, echo in reversed(first.items())
            if node.status is not Status.ACCEPTED
        ]

    def replay(
        self, match: Match, request: TurnRequest, *, repeats: bool, delivering: Collection[str] = ()
    ) -> SampledNode | None:
        """Return a finished turn that answers this exact request and was lost: its last byte was not sent, and nobody
        is sending it (`delivering` are the ids of turns that are being sent); or the request says itself that it
        `repeats` an earlier one. Otherwise an equal request asks for another sample."""
        options = options_digest(request)
        for node in reversed(match.prompt.children if match.prompt else []):
            if node.answer is None or node.options != options:
                continue
            lost = node.status is Status.FINISHED and node.turn_id not in delivering
            if lost or (repeats and node.status in (Status.FINISHED, Status.DELIVERED)):
                return node
        return None

    def render_work(self, match: Match, request: TurnRequest, ending: Ending | None = None) -> RenderWork:
        """Return the work whose result are the new ids, for `plan`; it may take a long time for a first turn. By
        default, the ids end with the opening of the policy's turn, or with the open message. The match's prompt must
        not be known. The work raises:

            TemplateRefused: the template cannot render these messages.
            ContextExceeded: the messages alone have far more tokens than fit; they were not rendered.
        """
        most = self.spec.budgets.max_context_tokens
        return RenderWork(
            messages=match.rest,
            tools=request.tools,
            ending=ending or (Ending.TURN if match.opened is None else Ending.OPEN),
            max_tokens=most * RENDERED_TOKENS_FACTOR,
            refusal=partial(_too_long, len(request.messages), most),
            after=None if match.parent is None else (match.parent.last_id, match.parent.calls),
            inserts=match.resumes,
        )

    def delta(self, match: Match, request: TurnRequest, renderer: Renderer, ending: Ending | None = None) -> TokenIds:
        """Return the new ids. Raises what `render_work` names."""
        return match.prompt.ids if match.prompt is not None else self.render_work(match, request, ending)(renderer)

    def kinds(
        self, match: Match, request: TurnRequest, delta: TokenIds, renderer: Renderer
    ) -> KindRuns | RendererCall | None:
        """Return the kinds of the ids that `delta` returned, for `plan`, or the call that finds them, which takes
        longer than `delta`; None if the renderer does not mark bodies, or not those of these messages."""
        if match.prompt is not None:
            return match.prompt.kinds
        if not renderer.marks_bodies:
            return None
        rest = match.rest if self.spec.marks_warnings else without_warnings(match.rest)
        if match.resumes:
            observed: KindRuns = ((TokenKind.OBSERVATION, len(delta)),) if len(delta) else ()
            if any(isinstance(block, WarningText) for block in rest[-1].blocks):
                return RendererCall("insert_kinds", (delta, rest[-1]), otherwise=observed)
            return observed
        if match.opened is not None:
            # The agent wrote the beginning of the policy's message, which has no kind.
            return None
        if match.parent is not None:
            return RendererCall("bridge_kinds", (delta, match.parent.calls, rest))
        observed_from = len(match.rest)
        if match.echoes or match.elsewhere:
            # A history that is rendered again: its earlier observations are in the rows of the turns that it repeats.
            turns = [index for index, message in enumerate(match.rest) if message.role is Role.ASSISTANT]
            observed_from = turns[-1] + 1 if turns else observed_from
        return RendererCall("render_kinds", (delta, rest, request.tools), {"observed_from": observed_from})

    def plan(self, match: Match, request: TurnRequest, delta: TokenIds, kinds: KindRuns | None = None) -> TurnPlan:
        """Return the turn's prompt and the number of tokens that it may sample.

        Raises:
            ContextExceeded: the prompt leaves no room for one token.
        """
        ids = self.trie.prompt_ids(match, delta)
        budgets = self.spec.budgets
        left = budgets.max_context_tokens - len(ids)
        if left < 1:
            raise ContextExceeded(
                f"This model's maximum context length is {budgets.max_context_tokens} tokens. However, your messages "
                f"resulted in {len(ids)} tokens. Please reduce the length of the messages.",
                "messages",
                tokens=len(ids),
                limit=budgets.max_context_tokens,
            )
        limits = [budgets.max_tokens_per_turn, request.max_tokens or left]
        most = min(left, *limits)
        budget = most + 1
        if budgets.max_sampled_tokens is not None:
            budget = max(1, budgets.max_sampled_tokens - self.sampled_tokens)
        return TurnPlan(
            match=match,
            request=request,
            delta=delta,
            prompt_ids=ids,
            max_new_tokens=min(most, budget),
            truncates=left <= min(*limits, budget),
            spends=budget <= most,
            kinds=kinds,
        )

    def next_turn_id(self) -> str:
        """Return a new turn id, unique within the session."""
        self._turn_numbers += 1
        return f"t{self._salt}{self._turn_numbers}"

    def recorded(
        self, turn_id: str, plan: TurnPlan, completion: Completion, renderer: Renderer, parser: OutputParser
    ) -> Recorded:
        """Return the event for a finished turn, with the answer for the agent."""
        request, cut = plan.request, cut_at_stop(completion, plan.request.stop, renderer)
        text = cut.text if request.keeps_stop else cut.text.removesuffix(cut.stop_string)
        tools = request.tools if request.calls_allowed else ()
        if request.separates_reasoning:
            parsed = parser.parse(text, tools, in_reasoning=begins_in_reasoning(plan, renderer))
        else:
            parsed = ParsedOutput((Text(text),) if text else ())
        blocks: list[Block] = []
        for block in parsed.blocks:
            if isinstance(block, ParsedCall):
                blocks.append(ToolCall(f"call_{turn_id}_{len(blocks)}", block.name, block.arguments))
            elif visible := renderer.visible(block.text):
                blocks.append(Text(visible) if isinstance(block, Text) else Reasoning(visible, turn_id))
        # A turn that was cut by the session's token budget is a normal answer, as for every spent budget: some agents
        # take a truncated one for a failure of theirs.
        cut_is_normal = plan.spends and bool(self.spec.budgets.final_text)
        end = TurnEnd.STOP_STRING if cut.stop_string else TurnEnd.STOP
        stopped = completion.finish is FinishReason.STOP or bool(cut.stop_string)
        if not stopped and not cut_is_normal:
            end = TurnEnd.LENGTH
        elif any(isinstance(block, ParsedCall) for block in parsed.blocks):
            end = TurnEnd.CALLS
        answer = TurnAnswer(
            turn_id=turn_id,
            blocks=tuple(blocks),
            end=end,
            stop_string=cut.stop_string,
            prompt_tokens=len(plan.prompt_ids),
            completion_tokens=len(completion.output_ids),
            cached_tokens=completion.cached_tokens,
        )
        truncated = plan.truncates and completion.finish is FinishReason.LENGTH and not stopped
        return self._event(plan, cut, answer, truncated=truncated, lost_calls=parsed.lost_calls)

    def aborted(
        self, turn_id: str, plan: TurnPlan, completion: Completion, renderer: Renderer, *, by_clock: bool = False
    ) -> Recorded:
        """Return the event for a turn that was cut off after some tokens. They are recorded, and trained only if the
        session's wall time cut them (`by_clock`) and the session trains such turns."""
        answer = TurnAnswer(turn_id=turn_id, blocks=(), end=TurnEnd.LENGTH)
        cut = cut_at_stop(completion, plan.request.stop, renderer)
        return self._event(plan, cut, answer, status=Status.CUT if by_clock else Status.ABORTED)

    def _event(
        self,
        plan: TurnPlan,
        cut: TurnCut,
        answer: TurnAnswer,
        *,
        status: Status = Status.FINISHED,
        truncated: bool = False,
        lost_calls: int = 0,
    ) -> Recorded:
        match, constraint = plan.match, plan.request.constraint
        return Recorded(
            parent=match.parent.turn_id if match.parent else "",
            parts=match.parts,
            delta=plan.delta,
            origin=match.origin,
            options=options_digest(plan.request),
            answer=answer,
            ids=cut.completion.output_ids,
            logprobs=cut.completion.logprobs,
            spans=cut.completion.spans,
            status=status,
            truncated=truncated,
            lost_calls=lost_calls,
            opened=match.opened,
            resumes=match.resumes,
            dropped=cut.dropped,
            border=cut.border,
            kinds=plan.kinds,
            constraint="" if constraint is None else constraint.kind.value,
            honoured=constraint is None or plan.grammar is not None,
        )

    def apply(self, event: Event) -> None:
        """Apply an event, either a new one or one from the log."""
        match event:
            case Recorded():
                self.trie.add(event)
                self.sampled_tokens += len(event.ids) + event.dropped
                self.lost_calls += event.lost_calls
                self.begun_turns += 1
                self.turns += not event.status.is_partial or (event.status is Status.CUT and self.spec.train_cut)
                self.unhonoured[event.constraint] += not event.honoured
                number = event.answer.turn_id.removeprefix(f"t{self._salt}")
                self._turn_numbers = max(self._turn_numbers, int(number) if number.isdigit() else 0)
            case Accepted(turn_id=turn_id, drift=drift):
                if (node := self.trie.by_turn(turn_id)) is not None:
                    self.trie.accept(node)
                    self.drift[drift] += 1
            case Delivered(turn_id=turn_id):
                if (node := self.trie.by_turn(turn_id)) is not None and node.status is not Status.ACCEPTED:
                    node.status = Status.DELIVERED
            case Replayed(turn_id=turn_id):
                if (node := self.trie.by_turn(turn_id)) is not None:
                    node.replays += 1
            case Failed(failure=failure):
                self.failures.append(failure)
            case Spent(budget=budget):
                self.exhausted = self.exhausted or budget

    def _check_size(self, request: TurnRequest) -> None:
        # Rendering takes seconds for megabytes that cannot fit anyway, in which no other session would be served.
        limit, characters = self.spec.budgets.max_context_tokens, request.characters
        if len(request.messages) > limit or characters > limit * MAX_TOKEN_CHARACTERS:
            raise _too_long(len(request.messages), limit, characters)


def _too_long(messages: int, most: int, characters: int) -> ContextExceeded:
    return ContextExceeded(
        f"This model's maximum context length is {most} tokens. However, your {messages} messages "
        f"have {characters} characters. Please reduce the length of the messages.",
        "messages",
        limit=most,
    )


def begins_in_reasoning(plan: TurnPlan, renderer: Renderer) -> bool:
    """Return whether a turn begins inside reasoning, which the template or the earlier part of the message has
    opened."""
    match, text = plan.match, ""
    if match.opened is not None and not match.resumes:
        text = plan.request.messages[-1].text
    elif match.resumes and match.parent is not None:
        first, ids = match.parent.opening_turn, list(plan.delta)
        for prompt, sampled in reversed(path(match.parent)):
            ids[:0] = sampled.ids
            if sampled is first:
                break
            ids[:0] = prompt.ids
        text = renderer.decode(ids)
        if before := first.parent.opened:
            text = renderer.decode(first.parent.ids)[-before:] + text
    opened, closed = text.rfind(THINK), text.rfind(END_THINK)
    return renderer.opens_reasoning if opened == closed else opened > closed


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCut:
    """A completion up to its end: its stop token, or the token that completes its first stop string, even if the engine
    went on. (Engines stop after whole tokens, some only after several, and a request for stop strings may reach an
    engine that ignores them.) What remains is a prefix of the sampled ids, with their log-probabilities and version
    spans. `text` is the sampled text without the stop token, up to and including `stop_string`
    ("" if there was none). `dropped` counts the ids after the stop string, and `border` is True if the stop string ends
    inside the last remaining token."""

    completion: Completion
    text: str
    stop_string: str
    dropped: int
    border: bool


def cut_at_stop(completion: Completion, stop: Sequence[str], renderer: Renderer) -> TurnCut:
    """Return the completion up to the end of the first stop string in it."""
    ids = completion.output_ids
    closed = bool(ids) and ids[-1] in renderer.stop_ids
    text = renderer.decode(ids[:-1] if closed else ids)
    # The string that ends first is the one that an engine finds first; of several that end together, the longest.
    found = [(text.find(string) + len(string), -len(string), string) for string in stop if string in text]
    if not found:
        return TurnCut(completion=completion, text=text, stop_string="", dropped=0, border=False)
    end, _, string = min(found)

    def contains(length: int) -> bool:
        return string in renderer.decode(ids[:length])

    # From the end, where the stop string nearly always is: each probe decodes a prefix.
    most, step = len(ids), 1
    while step < most and contains(most - step):
        most, step = most - step, 2 * step
    length = bisect_left(range(most), True, lo=max(0, most - step), key=contains)
    if length < len(ids):
        completion = replace(
            completion,
            output_ids=ids[:length],
            logprobs=completion.logprobs[:length],
            spans=tuple(replace(span, end=min(span.end, length)) for span in completion.spans if span.start < length),
        )
    return TurnCut(
        completion=completion,
        text=text[:end],
        stop_string=string,
        dropped=len(ids) - length,
        border=len(renderer.decode(ids[:length])) != end,
    )
