"""The evaluator actor: owns nothing; an evaluation whose evaluator dies is run again.

Invariant: clean sandboxes carry the evaluator's label; one that starts releases those of the one before it.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self

from opentelemetry import trace

from headrace.actors.evaluation.baselines import Baselines
from headrace.actors.evaluation.evaluation import EvaluationRequest, Verdict, evaluate
from headrace.actors.evaluation.simulated import simulated_verdict
from headrace.actors.evaluation.verdict import solved
from headrace.actors.places.leases import LEASE_S, Leases
from headrace.actors.runtime.batching import Batcher
from headrace.actors.runtime.operations import Operations
from headrace.actors.runtime.resources import ResourceOwner
from headrace.actors.runtime.retry import until_back
from headrace.buffer.tasks import EvaluatorKind
from headrace.sandboxes.pool.boot import LeaseRequest
from headrace.serve.observing import span_names as names
from headrace.serve.observing.tracing import context_from

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headrace.actors.places.sandbox_pool import SandboxPool
    from headrace.actors.record.actor_telemetry import ActorTelemetry
    from headrace.actors.runtime.operations import Results
    from headrace.sandboxes.base import Sandbox, SandboxId, SandboxSpec
    from headrace.sandboxes.errors import SandboxError

tracer = trace.get_tracer("headrace.actors.evaluation.evaluator")

HOLDER = "evaluator"


class _CleanSandboxes(ResourceOwner):
    """Clean sandboxes from the pool, in batch calls."""

    def __init__(self, pool: SandboxPool, lease_s: float) -> None:
        super().__init__()
        self._pool = pool
        self._lease_s = lease_s
        self.judged = 0
        """Clean sandboxes in which all that was wanted was done."""

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        await until_back(lambda: self._pool.release_holder(HOLDER))
        self._freeze: Batcher[SandboxId, None] = await enter(Batcher(self._freeze_many))
        self._leases = await enter(Leases(self._pool, HOLDER, lease_s=self._lease_s))
        return self

    async def freeze(self, sandbox: SandboxId) -> None:
        """End the agent's processes, keep its files, and give its place in the pool back."""
        await self._freeze(sandbox)

    @asynccontextmanager
    async def clean(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        with tracer.start_as_current_span(names.SANDBOX_BOOT):
            ref = (await self._leases.lease(LeaseRequest(spec=spec))).ref
        try:
            yield await self._leases.attach(ref)
            self.judged += 1
        finally:
            await asyncio.shield(self._leases.release(ref.id))

    async def _freeze_many(self, ids: list[SandboxId]) -> list[SandboxError | None]:
        return await until_back(lambda: self._pool.freeze(ids))


class Evaluator(ResourceOwner):
    """Scores rollouts in clean sandboxes leased from the pool."""

    def __init__(self, pool: SandboxPool, observing: ActorTelemetry, *, lease_s: float = LEASE_S) -> None:
        super().__init__()
        self._rooms = _CleanSandboxes(pool, lease_s)
        self._baselines = Baselines()
        self._observing = observing
        self._simulated = 0
        """Simulated verdicts so far."""

    async def __aenter__(self) -> Self:
        self._stack.enter_context(self._observing.spans("evaluator"))
        await self._stack.enter_async_context(self._rooms)
        self._evaluations: Operations[EvaluationRequest, Verdict] = await self._stack.enter_async_context(
            Operations(self._evaluate, unclaimed=_nothing_to_give_back)
        )
        return self

    async def begin(self, requests: dict[str, EvaluationRequest]) -> Results[Verdict]:
        """Begin these evaluations, by key; see `operations.Operator`."""
        return await self._evaluations.begin(requests)

    async def fetch(self, keys: list[str]) -> Results[Verdict]:
        """Verdicts as they come; no failure of one disturbs another. An actor that is gone for good is a result too."""
        return await self._evaluations.fetch(keys)

    async def withdraw(self, keys: list[str]) -> None:
        """Break these evaluations off. Idempotent."""
        await self._evaluations.withdraw(keys)

    async def judged_steps(self) -> int:
        """Steps of evaluations that ended well, since this evaluator started."""
        return self._rooms.judged + self._simulated

    async def _evaluate(self, request: EvaluationRequest) -> Verdict:
        if request.task.evaluator.kind is EvaluatorKind.NONE:
            return solved()
        if request.task.evaluator.kind is EvaluatorKind.SIMULATED:
            verdict = await simulated_verdict(request)
            self._simulated += 1
            return verdict
        with tracer.start_as_current_span(names.CHECK, context=context_from(request.traceparent)):
            return await evaluate(request, self._rooms, self._baselines)


async def _nothing_to_give_back(_: Verdict) -> None:
    """A verdict holds nothing."""
