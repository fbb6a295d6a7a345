"""The async shell around the session core that executes an agent's turn: budgets, prompt, engine call and record.

Invariants:
- A finished turn is in the session's log before anybody receives its answer. It is recorded in full, or up to the point
  at which it was cut off.
- A request that is repeated because its answer was lost gets the same answer, or waits for it while the turn is
  running; the signs are those of `Session.replay` and `Retry`. Any other equal request is a turn of its own.
- A turn that nobody is waiting for any more is aborted on its engine. The number of turns that a session can run
  concurrently is bounded.
- When a turn is interrupted (wall time, agent gone, session closed) after `held_after_s` without a sampled token, the
  delay is our fault: the session is marked, so that its outcome is infra, never an exhausted budget.
- An agent that never lets a turn end gets the final answer at last: turns that were cut off count against
  `budgets.max_turns`, and refused and abandoned requests have a bound that is `FRUITLESS_PER_TURN` times as high.
- Closing a session cancels its running turns and aborts them on their engines before the report is made.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Tracer, get_current_span

from headrace.buffer.primitives.single_flight import SingleFlight
from headrace.buffer.trajectories.breakdown import RENDER
from headrace.policies.engine import MAX_GRAMMAR_CHARACTERS, Completion, FinishReason, GenerateRequest, RequestId
from headrace.policies.errors import GrammarMissing, GrammarRefused
from headrace.policies.tokens.pieces import BoundedCache
from headrace.serve.gateway.capture.events import Delivered, Event, Exhausted, Failed, Recorded, Replayed, Spent
from headrace.serve.gateway.capture.matching import options_digest
from headrace.serve.gateway.capture.rows import SessionReport, report_of
from headrace.serve.gateway.capture.session import Session, TurnPlan, begins_in_reasoning
from headrace.serve.gateway.capture.session_log import SessionLog
from headrace.serve.gateway.capture.session_usage import UsageClock
from headrace.serve.gateway.capture.trie import Match, path
from headrace.serve.gateway.conversation import AnswerTokens, AnswerWithTokens, TurnAnswer, TurnRequest
from headrace.serve.gateway.errors import (
    BadRequest,
    ContextExceeded,
    InfraError,
    LogBroken,
    SessionUnknown,
    TooManyRequests,
)
from headrace.serve.gateway.http.engines import EnginePool, join_pieces
from headrace.serve.gateway.http.prompts import Prompts
from headrace.serve.gateway.http.routing import RoutingKey
from headrace.serve.gateway.parsing.base import OutputParser
from headrace.serve.gateway.parsing.grammars import Reasons, grammar_of
from headrace.serve.gateway.parsing.parser_choice import ParserAlarm
from headrace.serve.gateway.parsing.scanner import THINK
from headrace.serve.gateway.rendering.render import Renderer
from headrace.serve.gateway.rendering.work import Renders
from headrace.serve.tracing import span_names
from headrace.serve.tracing.foreign_spans import AgentTrace
from headrace.serve.tracing.tracing import context_from

MAX_RUNNING_TURNS = 64
MAX_KEYS = 1024
MAX_FAILED_REQUESTS = 64
MAX_FAILURES = 100
"""Failures recorded per session. A single failure decides the outcome; an agent that retries a dead engine forever must
not fill the disk."""
FRUITLESS_PER_TURN = 4
"""Refused and abandoned requests that a session may have for each turn of its budget. Agents that compact their history
or correct a request need a few; each of them may cost a render or a prefill."""
MAX_VERSIONS = 64
MAX_REASON_CHARACTERS = 500
"""Longest reason of a grammar that an agent is told; it may repeat the agent's schema."""


class TurnKey(NamedTuple):
    """Identity of a turn: requests of one session with equal keys are the same turn."""

    parent: str
    parts: tuple[bytes, ...]
    options: str
    untrained: bool
    number: int = 0
    """Number of the sample, for equal requests that run at the same time."""


@dataclass(slots=True, eq=False)
class LiveSession:
    """A session with its log, its trace context and its running turns. `unlogged` holds events that could not be
    written; they are written, in order, as soon as the log works again. `rendering` prevents a session from having more
    than one long text rendered at a time."""

    core: Session
    token: str
    log: SessionLog | None
    running: SingleFlight[TurnAnswer]
    usage: UsageClock
    closed: bool = False
    fruitless: int = 0
    """Requests that were refused, or whose agent left, since this process serves the session."""
    unlogged: list[Event] = field(default_factory=list)
    rendering: asyncio.Lock = field(default_factory=asyncio.Lock)
    delivering: Counter[str] = field(default_factory=Counter)
    """Ids of the turns whose answers are being sent."""
    failed: FailedRequests = field(default_factory=lambda: FailedRequests())
    keys: BoundedCache[str, bool] = field(default_factory=lambda: BoundedCache(MAX_KEYS))
    """Idempotency keys of earlier requests."""
    context: Context = field(init=False)
    agent_trace: AgentTrace = field(init=False)

    def __post_init__(self) -> None:
        self.context = context_from(self.core.spec.traceparent)
        self.agent_trace = AgentTrace(get_current_span(self.context).get_span_context(), time.time())

    @property
    def attempt(self) -> tuple[str, int] | None:
        """Rollout id and attempt that the session works for; None if they are not known."""
        spec = self.core.spec
        return (spec.rollout, spec.attempt) if spec.rollout else None

    def record(self, event: Event) -> None:
        """Log an event, then apply it. Raises LogBroken, in which case the event is not applied."""
        self.flush()
        if self.log is not None:
            self.log.append(self.core.spec.session_id, event)
        self.core.apply(event)

    def flush(self) -> None:
        """Write the unlogged events. Raises LogBroken if some of them still cannot be written."""
        while self.unlogged and self.log is not None:
            self.log.append(self.core.spec.session_id, self.unlogged[0])
            del self.unlogged[0]

    def fail(self, failure: str) -> None:
        """Record a failure that reaches the agent, unless `MAX_FAILURES` have been recorded already."""
        if len(self.core.failures) < MAX_FAILURES:
            self.record_anyway(Failed(failure=failure))

    def record_anyway(self, event: Event) -> None:
        """Record an event like `record`, but only in memory while the log cannot be written."""
        try:
            self.record(event)
        except LogBroken:
            self.unlogged.append(event)
            self.core.apply(event)

    def exhaust(self, budget: Exhausted) -> None:
        if not self.core.exhausted:
            self.record(Spent(budget=budget))


@dataclass(frozen=True, slots=True)
class Retry:
    """What a request says of earlier attempts at it: clients of Stainless count them in `x-stainless-retry-count`, and
    others repeat an `Idempotency-Key`."""

    retried: bool = False
    key: str = ""

    def repeats(self, keys: BoundedCache[str, bool]) -> bool:
        """Return whether the request repeats an earlier one, and remember its key."""
        known = bool(self.key) and keys.get(self.key) is not None
        if self.key:
            keys.put(self.key, value=True, size=1)
        return self.retried or known


FIRST = Retry()


class FailedRequests:
    """The latest requests that ended in an error, for which a retry may come."""

    def __init__(self) -> None:
        self._number: Counter[TurnKey] = Counter()

    def add(self, key: TurnKey) -> None:
        self._number[key] = self._number.pop(key, 0) + 1
        if len(self._number) > MAX_FAILED_REQUESTS:
            del self._number[next(iter(self._number))]

    def take(self, key: TurnKey) -> bool:
        """Return whether such a request has failed, and forget one that has."""
        if not self._number[key]:
            del self._number[key]
            return False
        self._number[key] -= 1
        return True


def flight_of(live: LiveSession, key: TurnKey, *, repeats: bool) -> TurnKey:
    """Return the key of the run that answers a request. One that repeats another waits for the same run; any other has
    its own, also beside an equal one: whoever asks twice wants two samples. After an equal one whose agent is gone it
    is next."""
    equal = [each for each in live.running if isinstance(each, TurnKey) and each._replace(number=0) == key]
    if not equal:
        return key
    gone = next((each for each in equal if live.running.is_abandoned(each)), None)
    if repeats or gone is not None:
        return gone or equal[-1]
    return key._replace(number=equal[-1].number + 1)


class Turns:
    """Runs turns on an engine pool. `recorded` counts turns, and `sampled_tokens` all recorded tokens, since the start;
    `tokens_by_version` counts the tokens of the latest `MAX_VERSIONS` versions, and `lost_calls` pieces of call markup
    that could not be parsed."""

    def __init__(
        self,
        pool: EnginePool,
        renderer: Renderer,
        renders: Renders,
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
        self.prompts = Prompts(renderer, renders)

    def now(self) -> float:
        """Return the time on this gateway's clock."""
        return self._clock()

    async def answer(
        self,
        live: LiveSession,
        request: TurnRequest,
        *,
        untrained: bool,
        asked_s: float | None = None,
        retry: Retry = FIRST,
    ) -> TurnAnswer:
        """Return the answer for the agent, whose request began to arrive at `asked_s` (by default: now).

        Raises:
            ContextExceeded, SessionUnknown, BadRequest: errors for the agent.
            InfraError: an error for the agent; the caller marks the session.
        """
        if live.closed:
            raise SessionUnknown("This session is closed.")
        if live.fruitless >= FRUITLESS_PER_TURN * live.core.spec.budgets.max_turns:
            live.exhaust(Exhausted.TURNS)
            return live.core.final_answer()
        try:
            match = live.core.match(request, untrained=untrained)
        except ContextExceeded:
            live.fruitless += 1
            live.exhaust(Exhausted.CONTEXT)
            raise
        for event in live.core.accepted(match):
            live.record(event)
        asked_s, parent = self._clock() if asked_s is None else asked_s, match.parent.turn_id if match.parent else ""
        live.usage.asked(parent, asked_s)
        asked = TurnKey(parent, match.parts, options_digest(request), untrained)
        # What repeats a request that failed has lost no answer: an earlier, equal one had its own.
        repeats = retry.repeats(live.keys) and not live.failed.take(asked)
        try:
            return await self._answer(live, match, request, asked, repeats=repeats, asked_s=asked_s)
        except (InfraError, TooManyRequests):
            live.failed.add(asked)
            raise

    async def _answer(
        self, live: LiveSession, match: Match, request: TurnRequest, asked: TurnKey, *, repeats: bool, asked_s: float
    ) -> TurnAnswer:
        key = flight_of(live, asked, repeats=repeats)
        if key not in live.running:
            # Answers that need no engine: one that was lost on its way to the agent, or the final one.
            node = live.core.replay(match, request, repeats=repeats, delivering=live.delivering)
            if node is not None and node.answer is not None:
                live.record(Replayed(turn_id=node.turn_id))
                return node.answer
            if (budget := live.core.spent(self._clock(), running=len(live.running))) is not Exhausted.NONE:
                live.exhaust(budget)
                return live.core.final_answer()
            if len(live.running) >= MAX_RUNNING_TURNS:
                raise TooManyRequests(f"This session already has {MAX_RUNNING_TURNS} running requests.")
        try:
            return await live.running(key, lambda: self._run(live, match, request, asked_s))
        except (BadRequest, ContextExceeded):
            live.fruitless += 1
            raise
        except asyncio.CancelledError:
            live.fruitless += 1
            # Cancelled through the single flight by `close`, not as the task of this request.
            task = asyncio.current_task()
            if live.closed and task is not None and not task.cancelling():
                raise SessionUnknown("This session was closed while the turn was running.") from None
            raise

    def with_tokens(self, live: LiveSession, answer: TurnAnswer) -> AnswerWithTokens:
        """Return the answer with its tokens, which are those of its turn in the session's trie."""
        node = live.core.trie.by_turn(answer.turn_id)
        if node is None:
            return AnswerWithTokens.of(answer, None)
        whole = live.core.trie.path_ids(node)
        tokens = AnswerTokens(
            prompt_ids=whole[: node.parent.length],
            ids=node.ids,
            logprobs=node.logprobs,
            pieces=[*map(self._renderer.token_bytes, node.ids)],
        )
        return AnswerWithTokens.of(answer, tokens)

    def delivered(self, live: LiveSession, answer: TurnAnswer) -> None:
        """Record that the last byte of the answer has been sent."""
        # The final answer belongs to no turn: an agent may request it for ever.
        if not live.closed and live.core.trie.by_turn(answer.turn_id) is not None:
            now = self._clock()
            live.record_anyway(Delivered(turn_id=answer.turn_id))
            live.usage.delivered(answer.turn_id, answer.calls, now)

    async def _run(self, live: LiveSession, match: Match, request: TurnRequest, asked_s: float) -> TurnAnswer:
        if live.closed:
            # Closed while this call waited for an abandoned run of the same turn to end.
            raise SessionUnknown("This session is closed.")
        core = live.core
        if (budget := core.spent(self._clock(), running=len(live.running) - 1)) is not Exhausted.NONE:
            # Spent by that run: otherwise an agent that leaves and asks again at once would go on for ever.
            live.exhaust(budget)
            return core.final_answer()
        turn_id, turn = core.next_turn_id(), live.usage.next_turn()
        with self._tracer.start_as_current_span(span_names.TURN, context=live.context, kind=SpanKind.SERVER) as span:
            began_s = self._clock()
            try:
                match, delta = await self.prompts.render(live, match, request)
                plan = core.plan(match, request, delta, await self.prompts.kinds(live, match, request, delta))
                rendered_s = self._clock()
                live.usage.add(RENDER, asked_s, rendered_s, turn=turn)
                plan, completion = await self._sample_as_asked(live, turn_id, turn, plan)
            except ContextExceeded:
                live.exhaust(Exhausted.CONTEXT)
                raise
            if completion is None:
                return core.final_answer()
            live.usage.answered(turn_id, self._clock(), turn=turn)
            event = core.recorded(turn_id, plan, completion, self._renderer, self._parser)
            live.record(event)
            if plan.spends and completion.finish is FinishReason.LENGTH:
                live.exhaust(Exhausted.TOKENS)
            self._count(completion, event)
            if span.is_recording():
                span.set_attributes(
                    {
                        span_names.OPERATION: "chat",
                        span_names.PROVIDER: "headrace",
                        span_names.CONVERSATION_ID: str(core.spec.session_id),
                        span_names.TURN_NUMBER: core.turns,
                        span_names.RENDER_S: rendered_s - began_s,
                        span_names.INPUT_TOKENS: event.answer.prompt_tokens,
                        span_names.CACHE_READ_TOKENS: completion.cached_tokens,
                        span_names.OUTPUT_TOKENS: event.answer.completion_tokens,
                        span_names.MAX_TOKENS: plan.max_new_tokens,
                        span_names.TEMPERATURE: core.spec.sampling.temperature,
                        span_names.FINISH_REASONS: [event.answer.end.value],
                        span_names.RERENDERED: plan.match.parent is None and core.turns > 1,
                    }
                )
            return event.answer

    async def _sample_as_asked(
        self, live: LiveSession, turn_id: str, turn: int, plan: TurnPlan
    ) -> tuple[TurnPlan, Completion | None]:
        """Return the plan with the grammar of the request's constraint, if it could be honoured, and what `_sample`
        returns. Raises BadRequest for a constraint that the grammar refuses, or that nothing can honour in a session
        that does not serve such turns."""
        constraint = plan.request.constraint
        if constraint is None:
            return plan, await self._sample(live, turn_id, turn, plan)
        name = constraint.field
        may_reason = Reasons.MAY if THINK in self._renderer.template else Reasons.NEVER
        reasons = Reasons.ALREADY if begins_in_reasoning(plan, self._renderer) else may_reason
        grammar = grammar_of(plan.request, constraint, self._parser.call_syntax, reasons)
        if grammar is not None:
            if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
                raise BadRequest(f"{name}: the schemas have more than {MAX_GRAMMAR_CHARACTERS} characters.", name)
            constrained = replace(plan, grammar=grammar)
            try:
                return constrained, await self._sample(live, turn_id, turn, constrained)
            except GrammarRefused as error:
                raise BadRequest(f"{name} cannot be honoured: {error.reason[:MAX_REASON_CHARACTERS]}", name) from None
            except GrammarMissing:
                pass
        if not live.core.spec.serve_unhonoured:
            raise BadRequest(
                f"{name} cannot be honoured: the model's engine has no grammar for it. Leave it out, or open the "
                "session with serve_unhonoured.",
                name,
            )
        return plan, await self._sample(live, turn_id, turn, plan)

    async def _sample(self, live: LiveSession, turn_id: str, turn: int, plan: TurnPlan) -> Completion | None:
        """Return the completion, or None if the wall-time budget ran out first."""
        spec, parent = live.core.spec, plan.match.parent
        request = GenerateRequest(
            request_id=RequestId(f"{spec.session_id}-{self._incarnation}-{turn_id}"),
            input_ids=plan.prompt_ids,
            max_new_tokens=plan.max_new_tokens,
            temperature=spec.sampling.temperature,
            top_p=spec.sampling.top_p,
            top_k=spec.sampling.top_k,
            stop=plan.request.stop,
            stop_token_ids=self._renderer.stop_ids,
            grammar=plan.grammar,
        )
        # The prefix is cached per conversation, not per session: conversations of one session share little.
        root = path(parent)[0][0].parts if parent else plan.match.parts
        lineage = RoutingKey(session=spec.session_id, head=root[0])
        pieces: list[Completion] = []
        completed, overdue, started_at = False, False, self._clock()
        try:
            async with asyncio.timeout(live.core.wall_left_s(self._clock())):
                completion = await self._pool.sample(lineage, request, pieces, live.usage, turn)
            completed = True
            return completion
        except (GrammarRefused, GrammarMissing):
            # Not a failure of ours, however long the engine took to say so.
            completed = True
            raise
        except TimeoutError:
            overdue = True
            live.exhaust(Exhausted.WALL)
            return None
        finally:
            now = self._clock()
            held_s = now - started_at
            if not completed and any(piece.output_ids for piece in pieces):
                # Also when the rollout's own clock, which ends at the same time, closed the session first.
                by_clock = overdue or live.core.wall_left_s(now) <= 0
                cut = live.core.aborted(turn_id, plan, join_pieces(pieces), self._renderer, by_clock=by_clock)
                live.record_anyway(cut)
            elif not completed and held_s >= self._held_after_s:
                live.fail(f"held: no engine sampled a token of the turn in {held_s:.1f} s")

    def _count(self, completion: Completion, event: Recorded) -> None:
        for span in completion.spans:
            self.tokens_by_version[str(span.version)] += span.end - span.start
        self.recorded += 1
        self.sampled_tokens += len(completion.output_ids)
        self.lost_calls += event.lost_calls
        self.parser_alarm.saw(calls=len(event.answer.calls), lost_calls=event.lost_calls)
        while len(self.tokens_by_version) > MAX_VERSIONS:
            del self.tokens_by_version[next(iter(self.tokens_by_version))]

    async def close(self, live: LiveSession) -> SessionReport:
        """Cancel the running turns, if any, and return the session's report."""
        live.closed = True
        live.running.cancel_all()
        await live.running.ended()
        with suppress(LogBroken):
            live.flush()
        self._pool.router.forget(live.core.spec.session_id)
        self.prompts.forget(live)
        return replace(report_of(live.core), usage=live.usage.usage(self._clock(), at_s=time.time()))
