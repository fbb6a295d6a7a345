"""One turn of an agent: budgets, prompt, engine, record. The thin async shell around the session core.

Invariants:
- One turn of a session runs at a time; further requests wait for it, a bounded number of them.
- A turn is recorded whole or not at all; what was sampled without being recorded is counted as aborted.
- A turn that is broken off (wall, agent gone, session closed) after `held_after_s` without one sampled token was held
  up by us: the session is marked, so that its outcome is infra and never a budget that the agent used up.
- Closing a session ends its running turn and aborts it on the engine before the report is made.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.policies.engine import GenerateRequest, RequestId
from headrace.policies.tokenizer_errors import TemplateRefused
from headrace.serve import span_names
from headrace.serve.conversation import TurnAnswer, TurnEnd
from headrace.serve.errors import BadRequest, SessionUnknown
from headrace.serve.session import Exhausted, SessionReport
from headrace.serve.tracing import context_from

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

    from headrace.policies.engine import Completion
    from headrace.serve.conversation import TurnRequest
    from headrace.serve.engines import EnginePool
    from headrace.serve.render import Renderer
    from headrace.serve.session import Session, TurnPlan

MAX_WAITING_TURNS = 16
VERSIONS_KEPT = 64
SPENT = TurnAnswer(text="", end=TurnEnd.LENGTH)
"""The normal final answer that ends an agent whose budget is spent."""


@dataclass(slots=True, eq=False)
class LiveSession:
    """A session and what the shell needs beside it: its lock, its trace context and the scope of its running turn."""

    core: Session
    token: str
    closed: bool = False
    waiting: int = 0
    turn_numbers: int = 0
    scope: asyncio.Timeout | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    context: Context = field(init=False)

    def __post_init__(self) -> None:
        self.context = context_from(self.core.spec.traceparent)


class Turns:
    """Runs turns over an engine pool. `sampled_tokens` counts every recorded token since the start,
    `tokens_by_version` those of the last `VERSIONS_KEPT` versions seen."""

    def __init__(
        self,
        pool: EnginePool,
        renderer: Renderer,
        clock: Callable[[], float],
        tracer: Tracer,
        *,
        held_after_s: float,
    ) -> None:
        self._held_after_s = held_after_s
        self.sampled_tokens = 0
        self.tokens_by_version: Counter[str] = Counter()
        self._pool = pool
        self._renderer = renderer
        self._clock = clock
        self._tracer = tracer

    async def run(self, live: LiveSession, request: TurnRequest) -> TurnAnswer:
        """The agent's answer.

        Raises:
            ContextExceeded, SessionUnknown, BadRequest: for the agent.
            InfraError: for the agent; the boundary above marks the session.
        """
        if live.waiting >= MAX_WAITING_TURNS:
            raise BadRequest(f"This session has {MAX_WAITING_TURNS} requests waiting already.")
        live.waiting += 1
        try:
            async with live.lock:
                return await self._run_alone(live, request)
        finally:
            live.waiting -= 1

    async def _run_alone(self, live: LiveSession, request: TurnRequest) -> TurnAnswer:
        if live.closed:
            raise SessionUnknown("This session is closed.")
        if live.core.spent(self._clock()):
            return SPENT
        with self._tracer.start_as_current_span(span_names.TURN, context=live.context) as span:
            with self._tracer.start_as_current_span(span_names.RENDER):
                plan = self._plan(live, request)
            completion = await self._sample(live, plan)
            if completion is None:
                return SPENT
            answer = live.core.record(plan, completion)
            self._count(completion)
            _describe(span, live, plan, answer)
            return answer

    def _plan(self, live: LiveSession, request: TurnRequest) -> TurnPlan:
        try:
            return live.core.plan(request, self._renderer)
        except TemplateRefused as error:
            raise BadRequest(f"These messages cannot be rendered: {error}", "messages") from None

    async def _sample(self, live: LiveSession, plan: TurnPlan) -> Completion | None:
        """The completion; None when the wall budget ended meanwhile."""
        pieces: list[Completion] = []
        recorded, asked_at = False, self._clock()
        try:
            async with asyncio.timeout(live.core.wall_left_s(self._clock())) as live.scope:
                completion = await self._pool.sample(live.core.spec.session_id, self._ask(live, plan), pieces)
            recorded = True
            return completion
        except TimeoutError:
            if live.closed:
                raise SessionUnknown("This session was closed while the turn was running.") from None
            live.core.exhaust(Exhausted.WALL)
            return None
        finally:
            live.scope = None
            if not recorded:
                self._cut(live, pieces, held_s=self._clock() - asked_at)

    def _cut(self, live: LiveSession, pieces: list[Completion], *, held_s: float) -> None:
        """A turn was broken off: count what was sampled, and say whose doing it was."""
        sampled = sum(len(piece.output_ids) for piece in pieces)
        live.core.cut(sampled)
        if not sampled and held_s >= self._held_after_s:
            live.core.fail(f"held: no engine sampled a token of the turn in {held_s:.1f} s")

    def _ask(self, live: LiveSession, plan: TurnPlan) -> GenerateRequest:
        live.turn_numbers += 1
        sampling = live.core.spec.sampling
        return GenerateRequest(
            request_id=RequestId(f"{live.core.spec.session_id}-{live.token[:8]}-{live.turn_numbers}"),
            input_ids=plan.prompt_ids,
            max_new_tokens=plan.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop=plan.request.stop,
            stop_token_ids=self._renderer.stop_ids,
        )

    def _count(self, completion: Completion) -> None:
        for span in completion.spans:
            self.tokens_by_version[str(span.version)] += span.end - span.start
        self.sampled_tokens += len(completion.output_ids)
        while len(self.tokens_by_version) > VERSIONS_KEPT:
            del self.tokens_by_version[next(iter(self.tokens_by_version))]

    async def close(self, live: LiveSession) -> SessionReport:
        """End the running turn, if any, and report."""
        live.closed = True
        if live.scope is not None and not live.scope.expired():
            live.scope.reschedule(0.0)
        async with live.lock:
            self._pool.router.forget(live.core.spec.session_id)
            return live.core.report()


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
                span_names.RERENDERED: not plan.extends and live.core.turns > 1,
            }
        )
