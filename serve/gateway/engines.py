"""The way from a turn to an engine: admission, one retry elsewhere, continuation after an engine's own abort, and
aborts.

Invariants:
- A turn waits, bounded, while no engine serves; a closed gate never fails a turn that another engine could serve.
- Time in which a push has an engine counts neither against a turn that waits for one nor against a call that the push
  holds up: a push has deadlines of its own, and its gates open by themselves when it is gone.
- An engine failure resamples the turn once; nothing of the failed call is kept. Tokens an engine handed over with an
  abort of its own are kept, and sampling goes on from them: the version spans tell who sampled what.
- Whoever leaves a running call (agent gone, budget over, deadline) aborts it on its engine. Aborts sent while the gate
  is closed are sent again when it opens: SGLang loses those that arrive for a request which came in during a pause.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from headrace.policies.cancellation import outlast
from headrace.policies.engine import Completion, FinishReason, RequestId
from headrace.policies.errors import EngineDown, EngineError
from headrace.serve.errors import InfraError, NoEngineOpen
from headrace.serve.gateway.routing import Router
from headrace.serve.observing import span_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.trace import Span, Tracer
    from opentelemetry.util.types import AttributeValue

    from headrace.policies.engine import Engine, EngineId, GenerateRequest
    from headrace.serve.gateway.routing import EngineRoute, Lineage, RoutingTable

MAX_FAILURES = 1
MAX_CONTINUATIONS = 16
DOWN_S = 1.0
"""How long an engine at whose address nobody listens is left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDeadlines:
    """`gate_wait_s`: how long a turn waits while no engine serves. `call_s`: one generate call. `abort_grace_s`: how
    long an aborted call may take to hand over its partial tokens. Closed gates stop the first two."""

    gate_wait_s: float
    call_s: float
    abort_grace_s: float


@dataclass(slots=True)
class _Client:
    url: str
    engine: Engine
    aborts_to_repeat: set[RequestId] = field(default_factory=set)


class EnginePool:
    """The engines of one gateway. `connect` makes the client of a route; `clock` is monotonic, in seconds."""

    def __init__(
        self,
        deadlines: EngineDeadlines,
        connect: Callable[[EngineRoute], Engine],
        clock: Callable[[], float],
        tracer: Tracer,
        *,
        max_imbalance: int = 8,
    ) -> None:
        self.router = Router(max_imbalance=max_imbalance)
        self._deadlines = deadlines
        self._connect = connect
        self._clock = clock
        self._tracer = tracer
        self._clients: dict[EngineId, _Client] = {}
        self.silent: Counter[EngineId] = Counter()
        """Calls in a row that an engine answered neither in time nor when they were aborted: one that only takes longer
        than `call_s` hands over what it has."""
        self._changed = asyncio.Event()

    async def replace_table(self, table: RoutingTable) -> bool:
        """Take a newer table and connect to its engines; False, and nothing done, when the table is not newer."""
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
        # The clocks of those that wait for an engine stop here.
        self._notify()

    async def open_gate(self, engine_id: EngineId, cache_namespace: str | None) -> None:
        """Let turns through again, and repeat the aborts asked for meanwhile, all at once: whoever opens waits only for
        seconds. What was not sent by then is sent at the next opening."""
        self.router.open_gate(engine_id, self._clock(), cache_namespace)
        self._notify()
        client = self._clients.get(engine_id)
        if client is None:
            return
        async with asyncio.TaskGroup() as tasks:
            for request_id in client.aborts_to_repeat:
                tasks.create_task(self._repeat_abort(client, request_id))

    async def aclose(self) -> None:
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            await client.engine.aclose()

    async def sample(self, lineage: Lineage, ask: GenerateRequest, pieces: list[Completion]) -> Completion:
        """Sample one turn. Completions, whole or partial, are appended to `pieces` as they come, so that the caller
        knows what was sampled also when this raises.

        Raises:
            NoEngineOpen: no engine served.
            InfraError: engines failed twice.
        """
        failures, avoid = 0, None
        deadline = self._clock() + self._deadlines.gate_wait_s
        while True:
            engine_id, deadline = await self._admission(lineage, avoid, deadline)
            request = replace(_continue(ask, pieces, failures), cache_namespace=self.router.namespace(engine_id))
            outcome = await self._call(engine_id, request, pieces)
            if isinstance(outcome, EngineDown) and self._clock() < deadline:
                # It never got the request, so this is no try of the turn: wait for an engine that is there.
                self.router.mark_down(engine_id, self._clock() + DOWN_S)
                continue
            deadline = self._clock() + self._deadlines.gate_wait_s
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
            if len(pieces) > MAX_CONTINUATIONS:
                raise InfraError(f"engine {engine_id} aborted the turn {len(pieces)} times")

    async def _admission(self, lineage: Lineage, avoid: EngineId | None, deadline: float) -> tuple[EngineId, float]:
        """The engine, and the deadline of this wait, later by the time in which a push had one."""
        while True:
            now = self._clock()
            engine_id = self.router.choose(lineage, now, avoid)
            if engine_id is not None:
                return engine_id, deadline
            has_push = bool(self.router.closed(now))
            if now >= deadline and not has_push:
                raise NoEngineOpen(
                    f"no engine took the turn within gateway.gate_wait_s = {self._deadlines.gate_wait_s:g}"
                )
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
        self, engine_id: EngineId, request: GenerateRequest, pieces: list[Completion]
    ) -> Completion | EngineError:
        self.router.begin(engine_id)
        try:
            attributes: dict[str, AttributeValue] = {
                span_names.ENGINE_ID: str(engine_id),
                span_names.INPUT_TOKENS: len(request.input_ids),
            }
            with self._tracer.start_as_current_span(span_names.ENGINE, attributes=attributes) as span:
                outcome = await self._call_or_abort(self._clients[engine_id], engine_id, request, pieces)
                _describe(span, outcome)
                return outcome
        finally:
            self.router.end(engine_id)

    async def _call_or_abort(
        self, client: _Client, engine_id: EngineId, request: GenerateRequest, pieces: list[Completion]
    ) -> Completion | EngineError:
        async with asyncio.TaskGroup() as group:
            call = group.create_task(_outcome(client.engine, request))
            try:
                await self._until_answered_or_late(engine_id, call)
                if not call.done():
                    await self._abort_late(client, engine_id, request.request_id, call)
                    return EngineError(f"no answer within gateway.turn_timeout_s = {self._deadlines.call_s:g}")
                outcome = call.result()
            except asyncio.CancelledError:
                # The session may be finished, or its wall time end, while its agent leaves: the tokens count all the
                # same.
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

    async def _until_answered_or_late(self, engine_id: EngineId, call: asyncio.Task[Completion | EngineError]) -> None:
        """Wait for the call, `call_s` at most; the time of closed gates does not count."""
        began, closed_s = self._clock(), self.router.closed_s(engine_id, self._clock())
        while not call.done():
            now = self._clock()
            held_s = self.router.closed_s(engine_id, now) - closed_s
            left_s = self._deadlines.call_s - (now - began - held_s)
            if left_s <= 0:
                return
            await asyncio.wait({call}, timeout=left_s + self.router.opens_in_s(engine_id, now))

    async def _abort_late(
        self,
        client: _Client,
        engine_id: EngineId,
        request_id: RequestId,
        call: asyncio.Task[Completion | EngineError],
    ) -> None:
        """End a call that took too long. Counts those of engines that do not answer that either."""
        if await self._abort(client, engine_id, request_id, call) is None:
            self.silent[engine_id] += 1
        else:
            self.silent.pop(engine_id, None)

    async def _abort(
        self, client: _Client, engine_id: EngineId, request_id: RequestId, call: asyncio.Task[Completion | EngineError]
    ) -> Completion | None:
        """End a running call on its engine; what it had sampled, if it says so in time."""
        if self.router.is_closed(engine_id, self._clock()):
            client.aborts_to_repeat.add(request_id)
        try:
            async with asyncio.TaskGroup() as group:
                telling = group.create_task(self._send_abort(client.engine, request_id))
                # Not asyncio.timeout: aiohttp swallows its cancellation when a timeout of its own is due with it.
                await asyncio.wait({telling, call}, timeout=self._deadlines.abort_grace_s)
                telling.cancel()
            outcome = call.result() if call.done() else None
        finally:
            call.cancel()
        return outcome if isinstance(outcome, Completion) else None

    async def _repeat_abort(self, client: _Client, request_id: RequestId) -> None:
        with suppress(EngineError):
            await client.engine.abort(request_id)
            client.aborts_to_repeat.discard(request_id)

    async def _send_abort(self, engine: Engine, request_id: RequestId) -> None:
        # An engine that cannot be told is dead or will be quarantined by the EngineGroup, which asks it itself.
        with suppress(EngineError):
            await engine.abort(request_id)


async def _outcome(engine: Engine, request: GenerateRequest) -> Completion | EngineError:
    """The completion, or the error as a value: a raised one would cancel the group that waits for it."""
    try:
        completion = await engine.generate(request)
    except EngineError as error:
        return error
    if len(completion.output_ids) != len(completion.logprobs):
        return EngineError(f"{len(completion.output_ids)} output ids but {len(completion.logprobs)} log-probabilities")
    if sum(span.end - span.start for span in completion.spans) != len(completion.output_ids):
        return EngineError("the version spans do not cover the output")
    return completion


def _continue(ask: GenerateRequest, pieces: list[Completion], failures: int) -> GenerateRequest:
    """The request for what is still missing of the turn, under an id of its own."""
    done = array("i", (token for piece in pieces for token in piece.output_ids))
    suffix = f"-{len(pieces)}-{failures}" if pieces or failures else ""
    return replace(
        ask,
        request_id=RequestId(ask.request_id + suffix),
        input_ids=array("i", ask.input_ids) + done if done else ask.input_ids,
        max_new_tokens=ask.max_new_tokens - len(done),
    )


def join_pieces(pieces: list[Completion]) -> Completion:
    """One completion out of consecutive ones; the prompt is the first one's."""
    if len(pieces) == 1:
        return pieces[0]
    spans, offset = [], 0
    for piece in pieces:
        spans += [replace(span, start=span.start + offset, end=span.end + offset) for span in piece.spans]
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


def _describe(span: Span, outcome: Completion | EngineError) -> None:
    if isinstance(outcome, EngineError):
        span.record_exception(outcome)
        return
    if span.is_recording():
        span.set_attributes(
            {
                span_names.OUTPUT_TOKENS: len(outcome.output_ids),
                span_names.CACHED_TOKENS: outcome.cached_tokens,
                span_names.RETRACTIONS: outcome.retractions,
                span_names.VERSIONS: [str(part.version) for part in outcome.spans],
                span_names.FINISH_REASONS: [outcome.finish.value],
            }
        )
