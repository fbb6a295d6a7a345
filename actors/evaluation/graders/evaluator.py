"""The evaluator actor, which is stateless: an evaluation is repeated if the actor dies.

Invariant: clean sandboxes are leased under a single holder, so a new evaluator releases those of its predecessor.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Self

from opentelemetry import trace

from headrace.actors.evaluation.graders.answer import score_answer
from headrace.actors.evaluation.graders.baselines import Baselines
from headrace.actors.evaluation.graders.evaluation import EvaluationRequest, Verdict, evaluate, verdict_of_environment
from headrace.actors.evaluation.graders.functions import score_by_function
from headrace.actors.evaluation.graders.rewards import score_task
from headrace.actors.evaluation.graders.verdict import failed, solved
from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.record.files.parts import PartClock, add_segment, in_part, in_span, part_clock
from headrace.actors.runtime.actors.batching import Batcher
from headrace.actors.runtime.actors.operations import NO_ATTEMPTS, Attempts, Operations, Results, until_back
from headrace.actors.runtime.pools.leases import LEASE_S, Leases, lease_attributes
from headrace.actors.runtime.pools.sandbox_pool import SandboxPool
from headrace.actors.runtime.simulated.tasks import is_slow, is_solved
from headrace.buffer.core.task_catalog import TaskCatalog
from headrace.buffer.primitives.exit_stack import ResourceOwner
from headrace.buffer.primitives.shielding import shielded
from headrace.buffer.primitives.timed_span import interval_clock, unix_s
from headrace.buffer.tasks.evaluators import (
    AnswerEvaluator,
    EnvironmentEvaluator,
    FunctionEvaluator,
    NoEvaluator,
    SimulatedEvaluator,
    SumEvaluator,
)
from headrace.buffer.tasks.task import Task
from headrace.buffer.trajectories.breakdown import (
    BOOT,
    EVALUATE_BOOT,
    EVALUATE_CHECK,
    EVALUATE_FREEZE,
    EVALUATE_QUEUE,
    OTHER,
    QUEUE,
    RELEASE,
)
from headrace.sandboxes.base import Sandbox, SandboxId, SandboxRef, SandboxSpec
from headrace.sandboxes.errors import SandboxError
from headrace.sandboxes.pool.boot import LeaseRequest, placed
from headrace.serve.tracing import span_names as names
from headrace.serve.tracing.tracing import context_from, describe, traceparent_of

tracer = trace.get_tracer("headrace.actors.evaluation.graders.evaluator")

HOLDER = "evaluator"
_OF_POOL = {QUEUE: EVALUATE_QUEUE, BOOT: EVALUATE_BOOT}
"""Parts of an evaluation for those of a lease."""


class _CleanSandboxes(ResourceOwner):
    """The agent's sandbox, and leases of clean ones from the pool, with batched calls."""

    def __init__(self, pool: SandboxPool, lease_s: float) -> None:
        super().__init__()
        self._pool = pool
        self._lease_s = lease_s
        self.judged = 0
        """Number of evaluation steps that have succeeded, each in a sandbox of its own."""

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        await until_back(lambda: self._pool.release_holder(HOLDER))
        self._freeze: Batcher[SandboxId, None] = await enter(Batcher(self._freeze_many))
        self._leases = await enter(Leases(self._pool, HOLDER, lease_s=self._lease_s))
        return self

    async def freeze(self, sandbox: SandboxId) -> None:
        """Kill the agent's processes, keep its files, and free its slot in the pool."""
        with in_part(EVALUATE_FREEZE):
            await self._freeze(sandbox)

    @asynccontextmanager
    async def clean(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        with in_span(tracer, names.SANDBOX_BOOT, EVALUATE_BOOT) as span:
            clock = interval_clock()
            began_s = clock()
            span.set_attribute(names.SANDBOX_IMAGE, spec.image)
            lease = await self._leases.lease(LeaseRequest(spec=spec, traceparent=traceparent_of(span)))
            for each in placed(lease, began_s, clock()):
                add_segment(each._replace(part=_OF_POOL[each.part]))
            ref = lease.ref
            if span.is_recording():
                span.set_attributes(lease_attributes(lease))
        trace.get_current_span().set_attribute(names.SANDBOX_HOST, ref.host)
        try:
            with in_part(EVALUATE_BOOT):
                sandbox = await self._leases.attach(ref)
            # Collecting and applying are measured inside.
            with in_part(EVALUATE_CHECK):
                yield sandbox
            self.judged += 1
        finally:
            with in_part(RELEASE):
                await shielded(self._leases.release(ref.id))

    @asynccontextmanager
    async def live(self, ref: SandboxRef) -> AsyncIterator[Sandbox]:
        trace.get_current_span().set_attribute(names.SANDBOX_HOST, ref.host)
        with in_part(EVALUATE_CHECK):
            yield await self._leases.attach(ref)
        self.judged += 1

    async def _freeze_many(self, ids: list[SandboxId]) -> list[SandboxError | None]:
        return await until_back(lambda: self._pool.freeze(ids))


class Evaluator(ResourceOwner):
    """Actor that scores rollouts in clean sandboxes leased from the pool."""

    def __init__(
        self, pool: SandboxPool, observing: ActorTelemetry, tasks: TaskCatalog, *, lease_s: float = LEASE_S
    ) -> None:
        super().__init__()
        self._catalog = tasks
        self._sandboxes = _CleanSandboxes(pool, lease_s)
        self._baselines = Baselines(observing.run_dir and observing.run_dir / "untouched")
        self._observing = observing
        self._unboxed = 0
        """Number of verdicts without a sandbox so far."""

    async def __aenter__(self) -> Self:
        self._stack.enter_context(self._observing.spans("evaluator"))
        await self._stack.enter_async_context(self._sandboxes)
        self._tasks = self._catalog.load()
        self._evaluations: Operations[EvaluationRequest, Verdict] = await self._stack.enter_async_context(
            Operations(self._evaluate, unclaimed=_nothing_to_give_back)
        )
        return self

    async def begin(self, requests: dict[str, EvaluationRequest], attempts: Attempts = NO_ATTEMPTS) -> Results[Verdict]:
        """Start the requested evaluations, which are identified by key; see `operations.Operator`."""
        return await self._evaluations.begin(requests, attempts)

    async def fetch(self, keys: list[str]) -> Results[Verdict]:
        """Return verdicts as they arrive. A failed evaluation does not affect the others; the loss of an actor is
        returned as a result too."""
        return await self._evaluations.fetch(keys)

    async def withdraw(self, keys: list[str]) -> None:
        """Cancel evaluations. Idempotent."""
        await self._evaluations.withdraw(keys)

    async def judged_steps(self) -> int:
        """Return the number of evaluation steps that have succeeded since this evaluator started."""
        return self._sandboxes.judged + self._unboxed

    async def _evaluate(self, request: EvaluationRequest) -> Verdict:
        task = self._tasks.get((request.purpose, request.task_id))
        if task is None:
            raise LookupError(f"task {request.task_id!r}: this evaluator does not know it; add it to its TaskCatalog")
        if request.part:
            assert isinstance(task.evaluator, SumEvaluator)
            [spec] = [part.evaluator for part in task.evaluator.parts if part.name == request.part]
            task = replace(task, evaluator=spec)
        now = interval_clock()
        began_s = now()
        with part_clock(now) as parts:
            verdict = await score_task(task, request, partial(self._score, parts=parts))
        path = parts.path(began_s, now(), idle=OTHER)
        return replace(verdict, path=tuple(each.moved(-began_s) for each in path), ended_at_s=unix_s())

    async def _score(self, task: Task, request: EvaluationRequest, *, parts: PartClock) -> Verdict:
        match task.evaluator:
            case NoEvaluator():
                return solved()
            case AnswerEvaluator() as spec:
                verdict = score_answer(spec.answer, request.episode)
            case EnvironmentEvaluator():
                verdict = verdict_of_environment(request)
            case FunctionEvaluator() as spec:
                with in_part(EVALUATE_CHECK):
                    verdict = await score_by_function(spec, task, request)
            case SimulatedEvaluator() as spec:
                with in_part(EVALUATE_CHECK):
                    verdict = await simulated_verdict(spec, task, request)
            case spec:
                attributes = {names.EVALUATOR_KIND: spec.kind}
                with tracer.start_as_current_span(
                    names.CHECK, context_from(request.traceparent), attributes=attributes
                ) as span:
                    verdict = await evaluate(task, request, self._sandboxes, self._baselines)
                    if span.is_recording():
                        span.set_attribute(names.CHECK_S, parts.seconds(EVALUATE_CHECK))
                        describe(span, verdict)
                    return verdict
        self._unboxed += 1
        return verdict


async def _nothing_to_give_back(_: Verdict) -> None:
    """A verdict holds no resources."""


async def simulated_verdict(spec: SimulatedEvaluator, task: Task, request: EvaluationRequest) -> Verdict:
    """Return a verdict, drawn only from the attempt's name and its task, after the simulated evaluation time."""
    settings = spec.verdict
    slow = is_slow(task, settings.slow_share, request.key)
    await asyncio.sleep(settings.seconds * (settings.slow_factor if slow else 1.0))
    return solved() if is_solved(task, settings.success, request.key) else failed("")
