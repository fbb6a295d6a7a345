"""One turn of an agent: budgets, prompt, engine, record. The thin async shell around the session core.

Invariants:
- A finished turn is in the session's log before anybody is answered with it; a turn is recorded whole, or as what was
  sampled before it was cut.
- The same request of one session is one turn: asked again while it runs it waits for the same answer, asked again
  because the answer was lost it gets the same answer.
- A turn that nobody waits for any more is aborted on its engine. Turns of one session run side by side, a bounded
  number of them.
- A turn that is broken off (wall, agent gone, session closed) after `held_after_s` without one sampled token was held
  up by us: the session is marked, so that its outcome is infra and never a budget that the agent used up.
- Closing a session ends its running turns and aborts them on their engines before the report is made.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from headrace.policies.engine import FinishReason, GenerateRequest, RequestId
from headrace.policies.tokens.tokenizer_errors import TemplateRefused
from headrace.serve.capture.events import Delivered, Exhausted, Failed, Spent
from headrace.serve.capture.matching import wishes_of
from headrace.serve.capture.rows import report_of
from headrace.serve.capture.trie import path
from headrace.serve.errors import BadRequest, ContextExceeded, LogBroken, SessionUnknown
from headrace.serve.gateway.daemon_thread import DaemonThread
from headrace.serve.gateway.engines import join_pieces
from headrace.serve.gateway.routing import Lineage
from headrace.serve.observing import span_names
from headrace.serve.observing.tracing import context_from
from headrace.serve.parsing.alarm import ParserAlarm

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

    from headrace.buffer.primitives.single_flight import SingleFlight
    from headrace.policies.engine import Completion
    from headrace.serve.capture.events import Event, Recorded
    from headrace.serve.capture.rows import SessionReport
    from headrace.serve.capture.session import Session, TurnPlan
    from headrace.serve.capture.session_log import SessionLog
    from headrace.serve.capture.trie import Match
    from headrace.serve.conversation import TurnAnswer, TurnRequest
    from headrace.serve.gateway.engines import EnginePool
    from headrace.serve.parsing.base import OutputParser
    from headrace.serve.rendering.render import Renderer, TokenIds

MAX_RUNNING_TURNS = 64
FAILURES_KEPT = 100
"""Of one session. One decides about its outcome; an agent that asks a dead engine for ever need not fill the disk."""
VERSIONS_KEPT = 64
LONG_TEXT_CHARACTERS = 16_384
"""Longer new text, and descriptions of tools, are rendered in a thread: it takes milliseconds that all would wait."""


class TurnKey(NamedTuple):
    """What makes two requests the same turn."""

    parent: str
    parts: tuple[bytes, ...]
    wishes: str
    untrained: bool


@dataclass(slots=True, eq=False)
class LiveSession:
    """A session and what the shell needs beside it: its log, its trace context and its running turns. `unkept` are
    events that happened while nothing could be written; they are written, in order, as soon as anything can be.
    `rendering`: of the one thread for long texts a session has one place at a time."""

    core: Session
    token: str
    log: SessionLog | None
    running: SingleFlight[TurnAnswer]
    closed: bool = False
    unkept: list[Event] = field(default_factory=list)
    rendering: asyncio.Lock = field(default_factory=asyncio.Lock)
    context: Context = field(init=False)

    def __post_init__(self) -> None:
        self.context = context_from(self.core.spec.traceparent)

    def happened(self, event: Event) -> None:
        """Keep an event, then apply it. Raises LogBroken, with nothing applied."""
        self.keep_unkept()
        if self.log is not None:
            self.log.append(self.core.spec.session_id, event)
        self.core.apply(event)

    def keep_unkept(self) -> None:
        """Raises LogBroken: some are still not written."""
        while self.unkept and self.log is not None:
            self.log.append(self.core.spec.session_id, self.unkept[0])
            del self.unkept[0]

    def fail(self, failure: str) -> None:
        """Remember a failure that reaches the agent, unless there are plenty."""
        if len(self.core.failures) < FAILURES_KEPT:
            self.noted(Failed(failure=failure))

    def noted(self, event: Event) -> None:
        """As `happened`, but in memory alone while nothing can be written."""
        try:
            self.happened(event)
        except LogBroken:
            self.unkept.append(event)
            self.core.apply(event)

    def exhaust(self, budget: Exhausted) -> None:
        if not self.core.exhausted:
            self.happened(Spent(budget=budget))


class Turns:
    """Runs turns over an engine pool. `recorded` counts turns and `sampled_tokens` every recorded token since the
    start, `tokens_by_version` those of the last `VERSIONS_KEPT` versions seen, `lost_calls` call markup that gave no
    call."""

    def __init__(
        self,
        pool: EnginePool,
        renderer: Renderer,
        parser: OutputParser,
        clock: Callable[[], float],
        tracer: Tracer,
        *,
        held_after_s: float,
        incarnation: str,
    ) -> None:
        self.recorded = 0
        self.sampled_tokens = 0
        self.lost_calls = 0
        self.parser_alarm = ParserAlarm()
        self.tokens_by_version: Counter[str] = Counter()
        self._pool = pool
        self._renderer = renderer
        self._parser = parser
        self._clock = clock
        self._tracer = tracer
        self._held_after_s = held_after_s
        self._incarnation = incarnation
        self._thread = DaemonThread("render")

    def aclose(self) -> None:
        """After the last session was closed. Does not wait for a render under way."""
        self._thread.stop()

    async def answer(self, live: LiveSession, request: TurnRequest, *, untrained: bool) -> TurnAnswer:
        """The agent's answer.

        Raises:
            ContextExceeded, SessionUnknown, BadRequest: for the agent.
            InfraError: for the agent; the boundary above marks the session.
        """
        match = self._match(live, request, untrained=untrained)
        key = TurnKey(
            parent=match.parent.turn_id if match.parent else "",
            parts=match.parts,
            wishes=wishes_of(request),
            untrained=untrained,
        )
        if (known := self._known(live, key, match, request)) is not None:
            return known
        try:
            return await live.running(key, lambda: self._run(live, match, request))
        except asyncio.CancelledError:
            if live.closed and not _current_task().cancelling():
                raise SessionUnknown("This session was closed while the turn was running.") from None
            raise

    def _known(self, live: LiveSession, key: TurnKey, match: Match, request: TurnRequest) -> TurnAnswer | None:
        """An answer for which no engine is asked: one that was lost on its way, or the final one."""
        if key in live.running:
            return None
        if (node := live.core.replay(match, request, self._clock())) is not None:
            return node.answer
        if (budget := live.core.spent(self._clock(), running=len(live.running))) is not Exhausted.NONE:
            live.exhaust(budget)
            return live.core.final_answer()
        if len(live.running) >= MAX_RUNNING_TURNS:
            raise BadRequest(f"This session has {MAX_RUNNING_TURNS} requests running already.")
        return None

    async def count_tokens(self, live: LiveSession, request: TurnRequest) -> int:
        """How long the prompt of this request would be. Raises BadRequest, SessionUnknown."""
        match = live.core.match(request)
        match, delta = await self._render(live, match, request)
        return len(live.core.trie.prompt_ids(match, delta))

    def delivered(self, live: LiveSession, answer: TurnAnswer) -> None:
        """The last byte of the answer has left. The final answer is nobody's turn: an agent may ask for it for ever."""
        if not live.closed and live.core.trie.by_turn(answer.turn_id) is not None:
            live.noted(Delivered(turn_id=answer.turn_id, at=self._clock()))

    def _match(self, live: LiveSession, request: TurnRequest, *, untrained: bool) -> Match:
        if live.closed:
            raise SessionUnknown("This session is closed.")
        try:
            match = live.core.match(request, untrained=untrained)
        except ContextExceeded:
            live.exhaust(Exhausted.CONTEXT)
            raise
        for event in live.core.accepted(match):
            live.happened(event)
        return match

    async def _run(self, live: LiveSession, match: Match, request: TurnRequest) -> TurnAnswer:
        if live.closed:
            # While this waited for the end of the same turn, which its agent had left.
            raise SessionUnknown("This session is closed.")
        turn_id = live.core.next_turn_id()
        with self._tracer.start_as_current_span(span_names.TURN, context=live.context) as span:
            with self._tracer.start_as_current_span(span_names.RENDER):
                plan = await self._plan(live, match, request)
            completion = await self._sample(live, turn_id, plan)
            if completion is None:
                return live.core.final_answer()
            event = live.core.recorded(turn_id, plan, completion, self._renderer, self._parser)
            live.happened(event)
            if plan.spends and completion.finish is FinishReason.LENGTH:
                live.exhaust(Exhausted.TOKENS)
            self._count(completion, event)
            _describe(span, live, plan, event.answer)
            return event.answer

    async def _plan(self, live: LiveSession, match: Match, request: TurnRequest) -> TurnPlan:
        try:
            match, delta = await self._render(live, match, request)
            return live.core.plan(match, request, delta)
        except ContextExceeded:
            live.exhaust(Exhausted.CONTEXT)
            raise

    async def _render(self, live: LiveSession, match: Match, request: TurnRequest) -> tuple[Match, TokenIds]:
        """What is new of the request, as ids. A history that the template cannot continue is rendered again, as a row
        of its own."""
        if match.parent is not None and match.prompt is None:
            if self._renderer.bridges:
                with suppress(TemplateRefused):
                    return match, await self._delta(live, match, request)
            match = live.core.trie.as_root(match, request)
        try:
            return match, await self._delta(live, match, request)
        except TemplateRefused as error:
            raise BadRequest(f"These messages cannot be rendered: {error}", "messages") from None

    async def _delta(self, live: LiveSession, match: Match, request: TurnRequest) -> TokenIds:
        shows_tools = match.parent is None and bool(request.tools)
        is_long = shows_tools or sum(message.characters for message in match.rest) > LONG_TEXT_CHARACTERS
        if match.prompt is None and is_long:
            async with live.rendering:
                return await self._thread.run(lambda: live.core.delta(match, request, self._renderer))
        return live.core.delta(match, request, self._renderer)

    async def _sample(self, live: LiveSession, turn_id: str, plan: TurnPlan) -> Completion | None:
        """The completion; None when the wall budget ended meanwhile."""
        pieces: list[Completion] = []
        recorded, asked_at = False, self._clock()
        try:
            async with asyncio.timeout(live.core.wall_left_s(self._clock())):
                completion = await self._pool.sample(_lineage(live, plan.match), self._ask(live, turn_id, plan), pieces)
            recorded = True
            return completion
        except TimeoutError:
            live.exhaust(Exhausted.WALL)
            return None
        finally:
            if not recorded:
                self._cut(live, turn_id, plan, pieces, held_s=self._clock() - asked_at)

    def _cut(self, live: LiveSession, turn_id: str, plan: TurnPlan, pieces: list[Completion], *, held_s: float) -> None:
        """A turn was broken off: keep what was sampled, and say whose doing it was."""
        if any(piece.output_ids for piece in pieces):
            live.noted(live.core.aborted(turn_id, plan, join_pieces(pieces)))
        elif held_s >= self._held_after_s:
            live.fail(f"held: no engine sampled a token of the turn in {held_s:.1f} s")

    def _ask(self, live: LiveSession, turn_id: str, plan: TurnPlan) -> GenerateRequest:
        sampling = live.core.spec.sampling
        return GenerateRequest(
            request_id=RequestId(f"{live.core.spec.session_id}-{self._incarnation}-{turn_id}"),
            input_ids=plan.prompt_ids,
            max_new_tokens=plan.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop=plan.request.stop,
            stop_token_ids=self._renderer.stop_ids,
        )

    def _count(self, completion: Completion, event: Recorded) -> None:
        for span in completion.spans:
            self.tokens_by_version[str(span.version)] += span.end - span.start
        self.recorded += 1
        self.sampled_tokens += len(completion.output_ids)
        self.lost_calls += event.lost_calls
        self.parser_alarm.saw(calls=len(event.answer.calls), lost_calls=event.lost_calls)
        while len(self.tokens_by_version) > VERSIONS_KEPT:
            del self.tokens_by_version[next(iter(self.tokens_by_version))]

    async def close(self, live: LiveSession) -> SessionReport:
        """End the running turns, if any, and report."""
        live.closed = True
        live.running.cancel_all()
        await live.running.ended()
        with suppress(LogBroken):
            live.keep_unkept()
        self._pool.router.forget(live.core.spec.session_id)
        return report_of(live.core)


def _lineage(live: LiveSession, match: Match) -> Lineage:
    """Where the turn's prefix is cached: the conversations of one session share little."""
    root = path(match.parent)[0][0].parts if match.parent else match.parts
    return Lineage(session=live.core.spec.session_id, head=root[0])


def _current_task() -> asyncio.Task[object]:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("not in a task")
    return task


def _describe(span: Span, live: LiveSession, plan: TurnPlan, answer: TurnAnswer) -> None:
    if span.is_recording():
        span.set_attributes(
            {
                span_names.OPERATION: "chat",
                span_names.CONVERSATION_ID: str(live.core.spec.session_id),
                span_names.TURN_NUMBER: live.core.turns,
                span_names.INPUT_TOKENS: answer.prompt_tokens,
                span_names.OUTPUT_TOKENS: answer.completion_tokens,
                span_names.MAX_TOKENS: plan.max_new_tokens,
                span_names.TEMPERATURE: live.core.spec.sampling.temperature,
                span_names.FINISH_REASONS: [answer.end.value],
                span_names.RERENDERED: plan.match.parent is None and live.core.turns > 1,
            }
        )
