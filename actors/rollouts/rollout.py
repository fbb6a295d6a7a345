"""One rollout, from boot to verdict, on one screen.

Invariants:
- Every started rollout ends exactly once, with a result: success, failure and infrastructure error are all data.
- A failure is classified at the boundary where it arose; what is not the policy's doing is never a reward.
- The session's log outranks the evaluator: when an engine or gateway failure reached the agent, the outcome is infra.
- Whatever was leased is released, also when the rollout is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from opentelemetry import trace
from pydantic import BaseModel, ConfigDict, Field

from headrace.actors.agents.agent import AgentReport, StopReason
from headrace.actors.evaluation.evaluation import EvaluationRequest, Verdict
from headrace.actors.evaluation.preparation import prepare
from headrace.buffer.sanitizer import clean_text
from headrace.buffer.types import Cause, Outcome, RolloutResult
from headrace.policies.errors import PolicyError
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.errors import QueueTimeout, SandboxError
from headrace.sandboxes.pool.boot import LeaseRequest
from headrace.serve.capture.events import Exhausted
from headrace.serve.errors import ServeError
from headrace.serve.observing import span_names as names
from headrace.serve.observing.tracing import traceparent_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from headrace.buffer.tasks import Task
    from headrace.buffer.types import RolloutOrder
    from headrace.sandboxes.base import HostFolder, Sandbox, SandboxId, SandboxRef
    from headrace.sandboxes.pool.boot import Lease
    from headrace.serve.capture.rows import SessionReport
    from headrace.serve.gateway.client import OpenedSession

ANSWER_S = 5.0
"""How much later than its own clocks a pool may say so."""
RESULT_CHARACTERS, LOG_CHARACTERS = 500, 4000
"""Of an agent's last words and of its log, kept in its span."""
logger = logging.getLogger(__name__)
tracer = trace.get_tracer("headrace.actors.rollouts.rollout")


class RolloutConfig(BaseModel):
    """Deadlines of one rollout; each phase has a clock of its own, and one guard covers them all."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    queue_timeout_s: float = Field(default=60.0, gt=0)
    """Waiting for a place in the pool."""
    boot_timeout_s: float = Field(default=30.0, gt=0)
    """Boot of the agent's sandbox, tries and waits between them together."""
    prepare_timeout_s: float = Field(default=30.0, gt=0)
    """Attaching to it and writing the task's files; later, closing the session."""
    agent_timeout_s: float = Field(default=60.0, gt=0)
    """The agent's own clock, from its start; when it is over the outcome is `budget` and the evaluator still runs."""
    evaluate_timeout_s: float = Field(default=90.0, gt=0)
    """Clean sandboxes, patch and check together; for a repository at least four times its task's
    `evaluator.timeout_s`."""
    lease_s: float = Field(default=60.0, gt=0)  # derived in a run, see `clocks`
    """A worker that does not renew the leases of its sandboxes for so long loses them; it does so four times in that
    time. A pool that restarts must be back in less."""
    guard_s: float = Field(default=300.0, gt=0)  # derived in a run, see `clocks`
    """Everything together: past this the rollout is infra, whatever it waits for."""


class Stations(Protocol):
    """Where a rollout goes; the worker batches what can be batched."""

    @property
    def folders(self) -> tuple[HostFolder, ...]:
        """What the agent's sandbox shows of the host."""
        ...

    async def lease(self, request: LeaseRequest) -> Lease: ...

    async def attach(self, ref: SandboxRef) -> Sandbox: ...

    async def release(self, sandbox: SandboxId) -> None: ...

    async def open_session(self, order: RolloutOrder, traceparent: str) -> OpenedSession: ...

    async def finish_session(self, session: OpenedSession, *, conversation: bool = False) -> SessionReport:
        """With `conversation`, the report holds every turn as text."""
        ...

    async def run_agent(
        self, order: RolloutOrder, task: Task, sandbox: Sandbox, session: OpenedSession
    ) -> AgentReport: ...

    async def evaluate(self, request: EvaluationRequest) -> Verdict: ...


class InfraFailure(Exception):
    """A phase failed for a reason that is not the policy's: carries phase and cause in its message. `engine`: engine or
    gateway failed."""

    def __init__(self, message: str, *, engine: bool = False) -> None:
        super().__init__(message)
        self.engine = engine


@dataclass(slots=True)
class Phases:
    """Seconds by phase, in the order in which they ended, and the host of the sandbox as soon as it is known."""

    seconds: list[tuple[str, float]] = field(default_factory=list)
    host: str = ""
    occupied: Counter[str] = field(default_factory=Counter)
    """How many rollouts are in each phase; shared by those of a worker."""

    def split(self, first: str, first_s: float) -> None:
        """The first part of what ended last has a name of its own."""
        name, seconds = self.seconds.pop()
        self.seconds += [(first, first_s), (name, max(0.0, seconds - first_s))]

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        start = loop.time()
        self.occupied[name] += 1
        try:
            yield
        finally:
            self.occupied[name] -= 1
            self.seconds.append((name, loop.time() - start))


@asynccontextmanager
async def boundary(span: str, phase: str, phases: Phases, timeout_s: float) -> AsyncIterator[None]:
    """A span, a clock and a deadline for one phase; whatever fails inside becomes an InfraFailure that names the
    phase."""
    with tracer.start_as_current_span(span), phases.clock(phase):
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError as error:
            raise InfraFailure(f"{phase}: nothing came within {timeout_s:g} s") from error
        except InfraFailure:
            raise
        except Exception as error:
            engine = isinstance(error, ServeError | PolicyError)
            raise InfraFailure(f"{phase}: {type(error).__name__}: {error}", engine=engine) from error


async def run_rollout(
    order: RolloutOrder, task: Task, stations: Stations, config: RolloutConfig, occupied: Counter[str] | None = None
) -> RolloutResult:
    """Run one attempt to its end. Never raises but for cancellation: a failure is a result, a defect of ours too.
    `occupied` counts the rollouts in each phase."""
    phases = Phases(occupied=Counter() if occupied is None else occupied)
    try:
        async with asyncio.timeout(config.guard_s):
            return await _run(order, task, stations, config, phases)
    except TimeoutError:
        return _failed(order, phases, f"the whole rollout took more than {config.guard_s:g} s")
    except InfraFailure as error:
        return _failed(order, phases, str(error), engine=error.engine)
    except Exception as error:
        logger.exception("rollout %s attempt %d met an error outside its phases", order.rollout_id, order.attempt)
        return _failed(order, phases, f"{type(error).__name__}: {error}")


async def _run(
    order: RolloutOrder, task: Task, stations: Stations, config: RolloutConfig, phases: Phases
) -> RolloutResult:
    async with _sandbox(order, task, stations, config, phases) as (ref, sandbox):
        async with boundary(names.PREPARE, "prepare", phases, config.prepare_timeout_s):
            await prepare(task, sandbox)
        report, record = await _converse(order, task, stations, config, phases, sandbox)
        _check_agent(report, record)
        async with boundary(names.EVALUATE, "evaluate", phases, config.evaluate_timeout_s):
            verdict = await _evaluate(order, task, stations, ref, report)
    return RolloutResult(
        rollout_id=order.rollout_id,
        attempt=order.attempt,
        outcome=outcome_of(report, record.exhausted, verdict),
        trajectory=record.trajectory,
        phases_s=tuple(phases.seconds),
        turns=record.turns,
        trace_id=_trace_id(),
        host=phases.host,
    )


async def _lease(
    order: RolloutOrder, task: Task, stations: Stations, config: RolloutConfig, phases: Phases
) -> SandboxRef:
    """The pool keeps the clocks of queue and boot; our own notices a pool that says nothing."""
    spec = SandboxSpec(
        image=task.image,
        idempotency_key=f"{order.rollout_id}.{order.attempt}",
        labels={"purpose": order.purpose, "rollout": order.rollout_id},
        folders=stations.folders,
    )
    clocks = {"queue_timeout_s": config.queue_timeout_s, "boot_timeout_s": config.boot_timeout_s}
    timeout_s = config.queue_timeout_s + config.boot_timeout_s + ANSWER_S
    async with boundary(names.SANDBOX_BOOT, "boot", phases, timeout_s):
        try:
            lease = await stations.lease(LeaseRequest(spec=spec, avoid=order.avoid, **clocks))
        except QueueTimeout as error:
            raise InfraFailure(f"queue: {error}") from error
        except SandboxError as error:
            # The provider of several hosts does not know for all errors on which of them they happened.
            phases.host = "" if error.host == "remote" else error.host
            raise
    phases.host = lease.ref.host
    phases.split("queue", lease.queue_s)
    return lease.ref


@asynccontextmanager
async def _sandbox(
    order: RolloutOrder, task: Task, stations: Stations, config: RolloutConfig, phases: Phases
) -> AsyncIterator[tuple[SandboxRef, Sandbox]]:
    """The agent's sandbox, released at the end whatever happens."""
    ref = await _lease(order, task, stations, config, phases)
    try:
        async with boundary(names.PREPARE, "prepare", phases, config.prepare_timeout_s):
            sandbox = await stations.attach(ref)
        yield ref, sandbox
    finally:
        await asyncio.shield(stations.release(ref.id))


async def _converse(
    order: RolloutOrder, task: Task, stations: Stations, config: RolloutConfig, phases: Phases, sandbox: Sandbox
) -> tuple[AgentReport, SessionReport]:
    """The agent's session from opening to closing; a rollout that breaks off closes it too."""
    async with boundary(names.AGENT, "agent", phases, config.guard_s):
        session = await stations.open_session(order, traceparent_of(trace.get_current_span()))
        try:
            report = await _run_agent(order, task, stations, config, sandbox, session)
            trace.get_current_span().set_attributes(_told(report))
        except BaseException:
            with suppress(ServeError):
                await asyncio.shield(stations.finish_session(session))
            raise
    async with boundary(names.FINISH, "agent", phases, config.prepare_timeout_s):
        record = await stations.finish_session(session)
        trace.get_current_span().set_attributes(_recorded(record))
        return report, record


def _told(report: AgentReport) -> dict[str, str | int]:
    """How the agent ended, for its span; the end of its log only where it says that it failed."""
    told: dict[str, str | int] = {names.AGENT_STOP: report.stop.value}
    if report.exit_code is not None:
        told |= {names.AGENT_EXIT_CODE: report.exit_code, names.AGENT_RESULT: report.result[:RESULT_CHARACTERS]}
    if report.stop is StopReason.ERROR:
        told[names.AGENT_LOG_TAIL] = report.log_tail[-LOG_CHARACTERS:]
    return told


def _recorded(record: SessionReport) -> dict[str, int]:
    """What became of the session's tokens, for its span."""
    told = {
        names.SAMPLED_TOKENS: record.sampled_tokens,
        names.TRAINED_TOKENS: record.trained_tokens,
        names.ROWS: len(record.lineages),
        names.LOST_CALLS: record.lost_calls,
    }
    told |= {f"{names.MASKED_TOKENS}.{reason}": tokens for reason, tokens in record.masked.items()}
    return told | {f"{names.DRIFT}.{kind}": turns for kind, turns in record.drift.items()}


async def _run_agent(
    order: RolloutOrder, task: Task, stations: Stations, config: RolloutConfig, sandbox: Sandbox, session: OpenedSession
) -> AgentReport:
    """The agent under its own clock: running out of time is a budget, not a failure."""
    try:
        async with asyncio.timeout(config.agent_timeout_s) as clock:
            return await stations.run_agent(order, task, sandbox, session)
    except TimeoutError:
        if not clock.expired():
            raise
        return AgentReport(stop=StopReason.TIME, turns=0)


async def _evaluate(
    order: RolloutOrder, task: Task, stations: Stations, ref: SandboxRef, report: AgentReport
) -> Verdict:
    if report.stop is StopReason.INVALID:
        return Verdict(reward=0.0, cause=Cause.INVALID, detail="an answer was no command line")
    key = f"{order.rollout_id}.{order.attempt}"
    return await stations.evaluate(
        EvaluationRequest(key=key, task=task, sandbox=ref, traceparent=traceparent_of(trace.get_current_span()))
    )


def _check_agent(report: AgentReport, record: SessionReport) -> None:
    """Raises InfraFailure for what the policy had no part in, however the agent took it."""
    if record.failures:
        raise InfraFailure(f"agent: served a failure: {record.failures[0]}", engine=True)
    if report.exit_code is not None and record.turns == 0:
        said = " ".join((report.result or report.log_tail[-400:]).split())
        raise InfraFailure(f"agent: ended with exit code {report.exit_code} before its first turn: {said}")
    if report.stop is StopReason.TIME and record.sampled_tokens == 0:
        raise InfraFailure(
            "agent: its time was over before the policy had sampled a token; see rollout.agent_timeout_s"
        )


def outcome_of(report: AgentReport, exhausted: Exhausted, verdict: Verdict) -> Outcome:
    """The outcome of a scored rollout: the verdict's, or `budget` when the agent ran out of something. A
    full context counts only where it ended the agent."""
    if verdict.reward is None:
        return Outcome(reward=None, trainable=False, cause=verdict.cause, detail=verdict.detail)
    finished = report.stop is StopReason.FINISHED
    spent = exhausted is not Exhausted.NONE and not (finished and exhausted is Exhausted.CONTEXT)
    by_itself = finished or report.stop is StopReason.ERROR
    cause = Cause.BUDGET if (spent or not by_itself) and verdict.cause is not Cause.INVALID else verdict.cause
    return Outcome(reward=verdict.reward, solved=verdict.solved, trainable=True, cause=cause, detail=verdict.detail)


def _failed(order: RolloutOrder, phases: Phases, detail: str, *, engine: bool = False) -> RolloutResult:
    logger.warning("rollout %s attempt %d is infra: %s", order.rollout_id, order.attempt, detail)
    return RolloutResult(
        rollout_id=order.rollout_id,
        attempt=order.attempt,
        outcome=Outcome.infra(clean_text(detail)),
        trajectory=None,
        phases_s=tuple(phases.seconds),
        trace_id=_trace_id(),
        host=phases.host,
        engine_failed=engine,
    )


def _trace_id() -> str:
    context = trace.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""
