"""The engine pool of a gateway: admission of turns, one retry on another engine, continuation and aborts.

Invariants:
- A turn waits, for a bounded time, while no engine is available; a closed gate never fails a turn that another engine
  could serve.
- Time during which a push holds an engine counts neither against a turn that is waiting for the engine nor against a
  call that the push delays: a push has its own deadlines, and its gates open by themselves if it disappears.
- After an engine failure, the failed call is discarded and the turn is resampled once. If an engine aborts a call by
  itself, the tokens that it returns are retained and sampling resumes after them; the version spans record which
  weights sampled which tokens.
- The position in a grammar does not survive an abort: a turn with a grammar is then sampled again from its beginning.
- A call that is abandoned (agent disconnected, budget spent, deadline passed) is aborted on its engine. Aborts sent
  while the gate is closed are repeated when it opens: SGLang loses an abort of a request that arrived during a pause.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from opentelemetry.trace import SpanKind, Tracer
from opentelemetry.util.types import AttributeValue

from headrace.buffer.primitives.timed_span import timed_span
from headrace.buffer.trajectories.breakdown import GATE
from headrace.policies.cancellation import outlast
from headrace.policies.engine import Completion, Engine, EngineId, FinishReason, GenerateRequest, RequestId
from headrace.policies.errors import EngineDown, EngineError, GrammarMissing, GrammarRefused, PromptTooLong
from headrace.serve.gateway.capture.session_usage import UsageClock
from headrace.serve.gateway.errors import ContextExceeded, InfraError, NoEngineOpen
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.gateway.http.routing import EngineRoute, Router, RoutingKey, RoutingTable
from headrace.serve.tracing import span_names

MAX_FAILURES = 1
MAX_CONTINUATIONS = 16
DOWN_S = 1.0
"""Time for which an engine is skipped after refusing a connection."""


@dataclass(slots=True)
class _Client:
    url: str
    engine: Engine
    aborts_to_repeat: set[RequestId] = field(default_factory=set)


class EnginePool:
    """One gateway's engines. `gate_wait_s` and `turn_timeout_s` do not count time while a gate is closed. `connect`
    creates the client for a route; `clock` is monotonic, in seconds."""

    def __init__(
        self,
        config: GatewayConfig,
        connect: Callable[[EngineRoute], Engine],
        clock: Callable[[], float],
        tracer: Tracer,
    ) -> None:
        self.router = Router(max_imbalance=config.max_imbalance)
        self._config = config
        self._connect = connect
        self._clock = clock
        self._tracer = tracer
        self._clients: dict[EngineId, _Client] = {}
        self.silent: Counter[EngineId] = Counter()
        """Number of consecutive calls per engine that were answered neither in time nor after being aborted. (An engine
        that is merely slower than `turn_timeout_s` returns its partial tokens on abort.)"""
        self._changed = asyncio.Event()

    async def replace_table(self, table: RoutingTable) -> bool:
        """Adopt a newer table and connect to its engines; return False, with no effect, if the table is not newer."""
        if not self.router.replace(table):
            return False
        urls = {route.engine_id: route.url for route in table.engines}
        gone = [engine_id for engine_id, client in self._clients.items() if urls.get(engine_id) != client.url]
        dropped = [self._clients.pop(engine_id) for engine_id in gone]
        for engine_id in gone:
            self.silent.pop(engine_id, None)
        for route in table.engines:
            if route.engine_id not in self._clients:
                self._clients[route.engine_id] = _Client(url=route.url, engine=self._connect(route))
        self._notify()
        for client in dropped:
            await client.engine.aclose()
        return True

    def close_gate(self, engine_id: EngineId, lease_s: float) -> None:
        now = self._clock()
        self.router.close_gate(engine_id, now + lease_s, now)
        # Wakes the turns that wait for an engine: their clocks stop while a push holds one.
        self._notify()

    async def open_gate(self, engine_id: EngineId, cache_namespace: str | None) -> None:
        """Let turns through again and repeat the aborts requested while the gate was closed."""
        self.router.open_gate(engine_id, self._clock(), cache_namespace)
        self._notify()
        client = self._clients.get(engine_id)
        if client is None:
            return

        async def repeat(request_id: RequestId) -> None:
            # An abort that fails here is repeated when the gate opens the next time.
            with suppress(EngineError):
                await client.engine.abort(request_id)
                client.aborts_to_repeat.discard(request_id)

        # Concurrently, since the caller waits for seconds only.
        async with asyncio.TaskGroup() as tasks:
            for request_id in client.aborts_to_repeat:
                tasks.create_task(repeat(request_id))

    async def aclose(self) -> None:
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            await client.engine.aclose()

    async def sample(
        self, lineage: RoutingKey, ask: GenerateRequest, pieces: list[Completion], usage: UsageClock, turn: int = 0
    ) -> Completion:
        """Sample a turn, and note in `usage` where the time of this number went. Completions, complete or partial, are
        appended to `pieces` as they arrive, so that the caller has the sampled tokens even if this method raises an
        exception.

        Raises:
            NoEngineOpen: no engine was available in time.
            ContextExceeded: the engine's own limit is below the session's.
            GrammarRefused, GrammarMissing: the engine cannot follow the grammar.
            InfraError: engines failed the turn twice.
        """
        failures, restarts, avoid = 0, 0, None
        deadline = self._clock() + self._config.gate_wait_s
        while True:
            waiting_s = self._clock()
            try:
                engine_id, deadline = await self._admission(lineage, avoid, deadline)
            finally:
                usage.add(GATE, waiting_s, self._clock(), turn=turn)
            done = array("i", (token for piece in pieces for token in piece.output_ids))
            # A continuation or a retry is a request of its own to the engine.
            suffix = f"-{restarts + len(pieces)}-{failures}" if restarts or pieces or failures else ""
            request = replace(
                ask,
                request_id=RequestId(ask.request_id + suffix),
                input_ids=array("i", ask.input_ids) + done if done else ask.input_ids,
                max_new_tokens=ask.max_new_tokens - len(done),
                cache_namespace=self.router.namespace(engine_id),
            )
            self.router.begin(engine_id)
            try:
                outcome = await self._call(engine_id, request, pieces, usage, turn)
            finally:
                self.router.end(engine_id)
            if isinstance(outcome, EngineDown) and self._clock() < deadline:
                # The engine never received the request, so this does not count as an attempt.
                self.router.mark_down(engine_id, self._clock() + DOWN_S)
                continue
            deadline = self._clock() + self._config.gate_wait_s
            if isinstance(outcome, PromptTooLong):
                # Another engine of the same model refuses it too, and it is no failure of ours.
                length = len(request.input_ids)
                limit = outcome.limit or length - 1
                if length <= limit:
                    # The prompt alone would fit: the engine counts the tokens to sample too.
                    length += request.max_new_tokens
                raise ContextExceeded(f"The engine refused {length} tokens.", "messages", tokens=length, limit=limit)
            if isinstance(outcome, GrammarRefused | GrammarMissing):
                raise outcome
            if isinstance(outcome, EngineError):
                failures, avoid = failures + 1, engine_id
                if failures > MAX_FAILURES:
                    raise InfraError(f"engine {engine_id} failed the turn after a retry: {outcome}")
                continue
            whole = join_pieces(pieces)
            if whole.finish is not FinishReason.ABORT:
                return whole
            if len(whole.output_ids) >= ask.max_new_tokens:
                return replace(whole, finish=FinishReason.LENGTH)
            if ask.grammar is not None:
                restarts += len(pieces)
                pieces.clear()
            if restarts + len(pieces) > MAX_CONTINUATIONS:
                raise InfraError(f"engine {engine_id} aborted the turn {restarts + len(pieces)} times")

    async def _admission(self, lineage: RoutingKey, avoid: EngineId | None, deadline: float) -> tuple[EngineId, float]:
        """Wait for an available engine; return it with the deadline, extended by the time during which a push held an
        engine."""
        while True:
            now = self._clock()
            engine_id = self.router.choose(lineage, now, avoid)
            if engine_id is not None:
                return engine_id, deadline
            has_push = bool(self.router.closed(now))
            if now >= deadline and not has_push:
                raise NoEngineOpen(f"no engine was available for the turn within {self._config.gate_wait_s:g} s")
            ends = [] if has_push else [deadline]
            if (opening := self.router.next_opening(now)) is not None:
                ends.append(opening)
            changed = self._changed
            with suppress(TimeoutError):
                async with asyncio.timeout(min(ends) - now):
                    await changed.wait()
            if has_push:
                deadline += self._clock() - now

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _call(
        self, engine_id: EngineId, request: GenerateRequest, pieces: list[Completion], usage: UsageClock, turn: int
    ) -> Completion | EngineError:
        """Call the engine and record the outcome in a span."""
        # The usage of tokens is recorded once, on the span of the turn.
        attributes: dict[str, AttributeValue] = {span_names.ENGINE_ID: str(engine_id)}
        outcome, timed = None, None
        try:
            with timed_span(
                self._tracer, span_names.ENGINE, self._clock, kind=SpanKind.CLIENT, attributes=attributes
            ) as timed:
                closed_s = self.router.closed_s(engine_id, timed.start_s)
                outcome = await self._call_or_abort(self._clients[engine_id], engine_id, request, pieces)
                if isinstance(outcome, EngineError):
                    timed.span.record_exception(outcome)
                elif timed.span.is_recording():
                    found: dict[str, AttributeValue | None] = {
                        span_names.ENGINE_QUEUE_S: outcome.queue_s,
                        span_names.ENGINE_PREFILL_S: outcome.prefill_s,
                        span_names.ENGINE_TOTAL_S: outcome.total_s,
                        span_names.HELD_S: self.router.closed_s(engine_id, self._clock()) - closed_s,
                        span_names.CACHED_TOKENS: outcome.cached_tokens,
                        span_names.RETRACTIONS: outcome.retractions,
                        span_names.VERSIONS: [str(part.version) for part in outcome.spans],
                        span_names.FINISH_REASONS: [outcome.finish.value],
                    }
                    # An engine need not report its times.
                    timed.span.set_attributes({name: each for name, each in found.items() if each is not None})
                return outcome
        finally:
            if timed is not None:
                held_s = self.router.closed_s(engine_id, timed.end_s) - closed_s
                completion = outcome if isinstance(outcome, Completion) else None
                usage.called(str(engine_id), completion, timed.start_s, timed.end_s, held_s=held_s, turn=turn)

    async def _call_or_abort(
        self, client: _Client, engine_id: EngineId, request: GenerateRequest, pieces: list[Completion]
    ) -> Completion | EngineError:
        async with asyncio.TaskGroup() as group:
            call = group.create_task(_outcome(client.engine, request))
            try:
                began, closed_s = self._clock(), self.router.closed_s(engine_id, self._clock())
                while not call.done():
                    # The call may take `turn_timeout_s`, not counting the time in which the engine's gate is closed.
                    now = self._clock()
                    held_s = self.router.closed_s(engine_id, now) - closed_s
                    left_s = self._config.turn_timeout_s - (now - began - held_s)
                    if left_s <= 0:
                        if await self._abort(client, engine_id, request.request_id, call) is None:
                            self.silent[engine_id] += 1
                        else:
                            self.silent.pop(engine_id, None)
                        return EngineError(f"no answer within gateway.turn_timeout_s = {self._config.turn_timeout_s:g}")
                    await asyncio.wait({call}, timeout=left_s + self.router.opens_in_s(engine_id, now))
                outcome = call.result()
            except asyncio.CancelledError:
                # The session may be finished, or its wall time may end, while its agent leaves: the sampled tokens
                # count all the same.
                abort = group.create_task(self._abort(client, engine_id, request.request_id, call))
                await outlast(abort)
                partial = abort.result()
                pieces += [partial] if partial else []
                raise
        self.silent.pop(engine_id, None)
        if isinstance(outcome, Completion):
            pieces.append(outcome)
            self.router.note(engine_id, outcome.spans)
        return outcome

    async def _abort(
        self, client: _Client, engine_id: EngineId, request_id: RequestId, call: asyncio.Task[Completion | EngineError]
    ) -> Completion | None:
        """Abort a running call on its engine; return its partial completion if that arrives in time."""
        if self.router.is_closed(engine_id, self._clock()):
            client.aborts_to_repeat.add(request_id)

        async def send() -> None:
            # An engine that does not take the abort is dead, or the EngineGroup's own probes will quarantine it.
            with suppress(EngineError):
                await client.engine.abort(request_id)

        try:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(send())
                # Not asyncio.timeout: aiohttp swallows its cancellation when a timeout of its own is due with it.
                await asyncio.wait({sending, call}, timeout=self._config.abort_grace_s)
                sending.cancel()
            outcome = call.result() if call.done() else None
        finally:
            call.cancel()
        return outcome if isinstance(outcome, Completion) else None


async def _outcome(engine: Engine, request: GenerateRequest) -> Completion | EngineError:
    """Return the completion, or the error as a value, since raising it would cancel the call's task group."""
    try:
        completion = await engine.generate(request)
    except EngineError as error:
        return error
    if len(completion.output_ids) != len(completion.logprobs):
        return EngineError(f"{len(completion.output_ids)} output ids but {len(completion.logprobs)} log-probabilities")
    if sum(span.end - span.start for span in completion.spans) != len(completion.output_ids):
        return EngineError("the version spans do not cover the output")
    return completion


def join_pieces(pieces: list[Completion]) -> Completion:
    """Join consecutive completions of one turn; the prompt figures come from the first one."""
    if len(pieces) == 1:
        return pieces[0]
    spans, offset = [], 0
    for piece in pieces:
        spans += [span.shifted(offset) for span in piece.spans]
        offset += len(piece.output_ids)
    return Completion(
        output_ids=tuple(token for piece in pieces for token in piece.output_ids),
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        spans=tuple(spans),
        finish=pieces[-1].finish,
        text="".join(piece.text for piece in pieces),
        prompt_tokens=pieces[0].prompt_tokens,
        cached_tokens=pieces[0].cached_tokens,
        retractions=sum(piece.retractions for piece in pieces),
    )
