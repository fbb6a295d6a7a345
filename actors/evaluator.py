"""The evaluator actor: owns nothing; an evaluation whose evaluator dies is run again.

Invariant: clean sandboxes carry the evaluator's label; one that starts releases those of the one before it.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self

from opentelemetry import trace

from headrace.actors.batching import Batcher
from headrace.actors.errors import ActorError
from headrace.actors.evaluators.evaluation import EvaluationRequest, Verdict, evaluate
from headrace.actors.leases import Leases
from headrace.actors.owning import Owning
from headrace.actors.retry import until_back
from headrace.buffer.tasks import EvaluatorKind
from headrace.buffer.types import Cause
from headrace.serve import span_names as names
from headrace.serve.tracing import context_from

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headrace.actors.observing import Observing
    from headrace.actors.sandbox_pool import SandboxPool
    from headrace.sandboxes.base import Sandbox, SandboxId, SandboxSpec
    from headrace.sandboxes.errors import SandboxError

tracer = trace.get_tracer("headrace.actors.evaluator")

HOLDER = "evaluator"


class _Rooms(Owning):
    """Clean sandboxes from the pool, in batch calls."""

    def __init__(self, pool: SandboxPool) -> None:
        super().__init__()
        self._pool = pool

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        await until_back(lambda: self._pool.release_holder(HOLDER))
        self._freeze: Batcher[SandboxId, None] = await enter(Batcher(self._freeze_many))
        self._leases = await enter(Leases(self._pool, HOLDER))
        return self

    async def freeze(self, sandbox: SandboxId) -> None:
        """End the agent's processes, keep its files, and give its place in the pool back."""
        await self._freeze(sandbox)

    @asynccontextmanager
    async def clean(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        with tracer.start_as_current_span(names.SANDBOX_BOOT):
            ref = await self._leases.lease(spec)
        try:
            yield await self._leases.attach(ref)
        finally:
            await asyncio.shield(self._leases.release(ref.id))

    async def _freeze_many(self, ids: list[SandboxId]) -> list[SandboxError | None]:
        return await until_back(lambda: self._pool.freeze(ids))


class Evaluator(Owning):
    """Scores rollouts in clean sandboxes leased from the pool."""

    def __init__(self, pool: SandboxPool, observing: Observing) -> None:
        super().__init__()
        self._rooms = _Rooms(pool)
        self._observing = observing

    async def __aenter__(self) -> Self:
        self._stack.enter_context(self._observing.spans("evaluator"))
        await self._stack.enter_async_context(self._rooms)
        return self

    async def evaluate(self, requests: list[EvaluationRequest]) -> list[Verdict | ActorError]:
        """Verdicts in the order of the requests; no failure of one disturbs another. An actor that is gone for good is
        a result too."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._evaluate(request)) for request in requests]
        return [task.result() for task in running]

    async def _evaluate(self, request: EvaluationRequest) -> Verdict | ActorError:
        if request.task.evaluator.kind is EvaluatorKind.NONE:
            return Verdict(reward=1.0, cause=Cause.SOLVED)
        with tracer.start_as_current_span(names.CHECK, context=context_from(request.traceparent)):
            try:
                return await evaluate(request, self._rooms)
            except ActorError as error:
                return error
