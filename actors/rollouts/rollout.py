"""A single rollout, from booting the sandbox to the verdict.

Invariants:
- Every started rollout ends exactly once, with a result: success, failure and infrastructure error are all data.
- A failure is classified at the boundary where it arises; a failure that the policy did not cause never becomes a
  reward.
- The session log takes precedence over the evaluator: if an engine or gateway failure reached the agent, the outcome is
  infra.
- Every lease is released, even if the rollout is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from opentelemetry import trace
from pydantic import Field

from headrace.actors.agents.programs.agent import AgentReport, StopReason
from headrace.actors.evaluation.graders.evaluation import EvaluationRequest, Verdict
from headrace.actors.evaluation.graders.history import prepare
from headrace.actors.evaluation.graders.rewards import with_judgement, with_rewards
from headrace.actors.evaluation.graders.verdict import NO_SANDBOX, invalid, task_resources
from headrace.actors.rollouts.attempt_time import AttemptTime
from headrace.actors.runtime.pools.leases import lease_attributes
from headrace.actors.services.figures import ServiceTime, current_service_time
from headrace.buffer.primitives.sections import Section
from headrace.buffer.primitives.shielding import shielded
from headrace.buffer.tasks.parts import least
from headrace.buffer.tasks.task import Task
from headrace.buffer.trajectories.breakdown import ATTACH, RELEASE
from headrace.buffer.trajectories.sanitizer import clean_text
from headrace.buffer.trajectories.step_scores import StepScores
from headrace.buffer.trajectories.types import Cause, Outcome, RolloutOrder, RolloutResult, Trajectory
from headrace.policies.errors import PolicyError
from headrace.sandboxes.base import HostFolder, Sandbox, SandboxId, SandboxRef, SandboxSpec
from headrace.sandboxes.errors import QueueTimeout, SandboxError
from headrace.sandboxes.pool.boot import Lease, LeaseRequest
from headrace.serve.gateway.capture.events import Exhausted
from headrace.serve.gateway.capture.rows import SessionReport
from headrace.serve.gateway.errors import ServeError
from headrace.serve.gateway.http.client import OpenedSession
from headrace.serve.tracing import span_names as names
from headrace.serve.tracing.tracing import current_trace_id, traceparent_of

CANCELLED = Outcome(reward=None, trainable=False, cause=Cause.CANCELLED)
ANSWER_S = 5.0
"""Time allowed for a pool to report that a deadline has passed."""
USAGE_S = 2.0
"""Time allowed for reading what a sandbox has used."""
RESULT_CHARACTERS = 500
"""Maximum characters of an agent's final message that are stored in its span."""
logger = logging.getLogger(__name__)
tracer = trace.get_tracer("headrace.actors.rollouts.rollout")


class RolloutConfig(Section):
    """Deadlines of one rollout: one for each phase, and one for the whole."""

    queue_timeout_s: float = Field(default=60.0, gt=0)
    """Deadline for obtaining a slot in the pool."""
    boot_timeout_s: float = Field(default=30.0, gt=0)
    """Deadline for booting the agent's sandbox, including retries."""
    prepare_timeout_s: float = Field(default=30.0, gt=0)
    """Deadline for attaching to the sandbox and writing the task files; also for closing the session."""
    agent_timeout_s: float = Field(default=60.0, gt=0)
    """Deadline for the agent, from its start; once it has passed, the outcome is `budget`, but the evaluator still
    runs."""
    evaluate_timeout_s: float = Field(default=90.0, gt=0)
    """Deadline for the whole evaluation; for a repository at least four times `evaluator.timeout_s` of its task."""
    lease_s: float = Field(default=60.0, gt=0)  # derived in a run, see `clocks`
    """Term of sandbox leases: a worker that does not renew its leases within this time loses them. Workers renew four
    times per term. A pool must be able to restart in less than this time."""

    @property
    def guard_s(self) -> float:
        """Deadline for the whole rollout, the sum of its phases; once it has passed, the outcome is infra, whatever the
        phase. Attaching to the sandbox, writing the task's files and closing the session each get the preparation's
        timeout."""
        before_s = self.queue_timeout_s + self.boot_timeout_s + ANSWER_S
        return before_s + 3 * self.prepare_timeout_s + self.agent_timeout_s + self.evaluate_timeout_s


class Stations(Protocol):
    """Services that a rollout uses; the worker batches calls to them."""

    @property
    def folders(self) -> tuple[HostFolder, ...]:
        """Host folders that are mounted in the agent's sandbox."""

    @property
    def agent_name(self) -> str:
        """Name of the agent's kind."""

    @property
    def needs_sandbox(self) -> bool:
        """Whether the agent acts in a sandbox."""

    @property
    def keeps_time(self) -> bool:
        """Whether the agent ends by itself at its deadline."""

    async def lease(self, request: LeaseRequest) -> Lease: ...

    async def attach(self, ref: SandboxRef) -> Sandbox: ...

    async def release(self, sandbox: SandboxId) -> None: ...

    async def open_session(self, order: RolloutOrder, task: Task, traceparent: str) -> OpenedSession: ...

    async def finish_session(self, session: OpenedSession, *, conversation: bool = False) -> SessionReport:
        """Close a session. If `conversation` is set, the report includes every turn as text."""

    async def run_agent(
        self, order: RolloutOrder, task: Task, sandbox: Sandbox | None, session: OpenedSession, agent_s: float
    ) -> AgentReport:
        """Run the agent, whose deadline is `agent_s`, in a sandbox if it needs one."""

    async def evaluate(self, task: Task, request: EvaluationRequest) -> Verdict: ...


class InfraFailure(Exception):
    """A phase failed for a reason that the policy did not cause; the message names the phase and the cause. `engine` is
    set if the engine or the gateway failed."""

    def __init__(self, message: str, *, engine: bool = False) -> None:
        super().__init__(message)
        self.engine = engine


@dataclass(frozen=True, slots=True)
class RunningAttempt:
    """One attempt at a rollout while it runs. `time` measures it, also if it is cancelled."""

    order: RolloutOrder
    task: Task
    stations: Stations
    config: RolloutConfig
    time: AttemptTime = field(default_factory=AttemptTime)

    def __str__(self) -> str:
        return f"rollout {self.order.rollout_id} attempt {self.order.attempt}"

    @property
    def key(self) -> str:
        """Name of the attempt, which makes its boots and evaluations idempotent."""
        return f"{self.order.rollout_id}.{self.order.attempt}"

    async def run(self) -> RolloutResult:
        """Run the attempt to its end. Raises only CancelledError: every failure becomes a result, even a bug in
        headrace."""
        labels = {"image": self.task.image, "agent": self.stations.agent_name, "family": self.task.family}
        self.time.labels |= {name: value for name, value in labels.items() if value}
        with self.time.measured():
            try:
                async with asyncio.timeout(self.config.guard_s):
                    result = await self._run()
            except TimeoutError:
                result = self._failed(f"the whole rollout took more than {self.config.guard_s:g} s")
            except InfraFailure as error:
                result = self._failed(str(error), engine=error.engine)
            except Exception as error:
                logger.exception("%s failed outside its phases", self)
                result = self._failed(f"{type(error).__name__}: {error}")
        return replace(result, breakdown=self.time.breakdown())

    async def _run(self) -> RolloutResult:
        async with self._sandbox() as (ref, sandbox):
            if sandbox is not None:
                async with self._phase(names.PREPARE, "prepare", self.config.prepare_timeout_s):
                    await prepare(self.task, sandbox)
            report, record = await self._converse(sandbox)
            _check_agent(report, record)
            verdict, scores = await self._evaluate(ref, report, record)
        return self._result(
            outcome_of(report, record.exhausted, verdict), record.trajectory, turns=record.turns, scores=scores
        )

    @asynccontextmanager
    async def _phase(self, span: str, phase: str, timeout_s: float, *, part: str = "") -> AsyncIterator[None]:
        """Apply the span, clock and deadline of one phase to the block. Every error raised inside becomes an
        InfraFailure that names the phase."""
        with self.time.clock(tracer, span, phase, part or phase):
            try:
                async with asyncio.timeout(timeout_s):
                    yield
            except TimeoutError as error:
                service = current_service_time().interrupted
                waited = f" while it waited for service {service}" if service else ""
                raise InfraFailure(f"{phase}: no result within {timeout_s:g} s{waited}") from error
            except InfraFailure:
                raise
            except Exception as error:
                engine = isinstance(error, ServeError | PolicyError)
                text = f"{phase}: {type(error).__name__}: {error}{place_of(error)}"
                raise InfraFailure(text, engine=engine) from error

    @asynccontextmanager
    async def _sandbox(self) -> AsyncIterator[tuple[SandboxRef, Sandbox | None]]:
        """Lease the agent's sandbox, if it needs one, and release it in every case."""
        if not self.stations.needs_sandbox:
            yield NO_SANDBOX, None
            return
        ref = await self._lease()
        try:
            async with self._phase(names.PREPARE, "prepare", self.config.prepare_timeout_s, part=ATTACH):
                sandbox = await self.stations.attach(ref)
            yield ref, sandbox
        finally:
            with self.time.part(RELEASE):
                await shielded(self.stations.release(ref.id))

    async def _lease(self) -> SandboxRef:
        spec = SandboxSpec(
            image=self.task.image,
            idempotency_key=self.key,
            labels={"purpose": self.order.purpose, "rollout": self.order.rollout_id},
            folders=self.stations.folders,
            **task_resources(self.task),
        )
        clocks = {"queue_timeout_s": self.config.queue_timeout_s, "boot_timeout_s": self.config.boot_timeout_s}
        # The pool enforces the deadlines of queue and boot; this one is for a pool that does not answer.
        async with self._phase(names.SANDBOX_BOOT, "boot", sum(clocks.values()) + ANSWER_S):
            span = trace.get_current_span()
            span.set_attribute(names.SANDBOX_IMAGE, self.task.image)
            request = LeaseRequest(spec=spec, avoid=self.order.avoid, traceparent=traceparent_of(span), **clocks)
            asked_s = self.time.now_s()
            try:
                lease = await self.stations.lease(request)
            except SandboxError as error:
                self.time.booted(error, asked_s)
                if isinstance(error, QueueTimeout):
                    raise InfraFailure(f"queue: {error}") from error
                # A provider of several hosts does not know the host of every error.
                self.time.host = "" if error.host == "remote" else error.host
                raise
            self.time.booted(lease, asked_s)
            if span.is_recording():
                span.set_attributes(lease_attributes(lease))
        self.time.host = lease.ref.host
        self.time.split("queue", lease.queue_s)
        self.time.labels |= {"sandbox": str(lease.ref.id), "warm": lease.warm, "boot_tries": lease.tries}
        return lease.ref

    async def _converse(self, sandbox: Sandbox | None) -> tuple[AgentReport, SessionReport]:
        """Run the agent in a session, which is closed in every case."""
        with self.time.services() as in_services:
            report, session = await self._run_agent(sandbox, in_services)
        self.time.split_services(in_services.seconds)
        async with self._phase(names.FINISH, "agent", self.config.prepare_timeout_s):
            record = await self._finish_session(session)
            trace.get_current_span().set_attributes(_session_attributes(record))
            return report, record

    async def _run_agent(self, sandbox: Sandbox | None, in_services: ServiceTime) -> tuple[AgentReport, OpenedSession]:
        """Open a session and run the agent in it. The session stays open only if the agent reports."""
        stations = self.stations
        async with self._phase(f"{names.AGENT} {stations.agent_name}", "agent", self.config.guard_s):
            span = trace.get_current_span()
            with self.time.session_opens():
                session = await stations.open_session(self.order, self.task, traceparent_of(span))
            if session.gateway:
                self.time.labels["gateway"] = session.gateway
            agent_s = least(self.config.agent_timeout_s, self.task.limits.agent_s) or self.config.agent_timeout_s
            try:
                try:
                    # An agent that keeps its own time has some more to close its episode.
                    async with asyncio.timeout(agent_s + (ANSWER_S if stations.keeps_time else 0.0)) as clock:
                        try:
                            report = await stations.run_agent(self.order, self.task, sandbox, session, agent_s)
                        finally:
                            await self._measure(sandbox)
                except TimeoutError:
                    if not clock.expired():
                        raise
                    # Running out of time uses up a budget; it is not a failure.
                    report = AgentReport(stop=StopReason.TIME, turns=0)
                if report.stop is StopReason.TIME and in_services.interrupted:
                    raise InfraFailure(
                        f"agent: its deadline passed while it waited for service {in_services.interrupted}; raise "
                        "rollout.agent_timeout_s or find out why the service is slow"
                    )
                span.set_attributes(_agent_attributes(stations.agent_name, report))
            except BaseException:
                with suppress(ServeError):
                    # A worker that ends cancels twice, and closes its connections.
                    await shielded(self._finish_session(session))
                raise
        return report, session

    async def _finish_session(self, session: OpenedSession) -> SessionReport:
        asked_s = self.time.now_s()
        report = await self.stations.finish_session(session)
        self.time.session_ended(report, asked_s)
        return report

    async def _measure(self, sandbox: Sandbox | None) -> None:
        """Read what the agent's sandbox has used. Without the figures a rollout is worth as much."""
        if sandbox is None:
            return
        with suppress(SandboxError, TimeoutError):
            async with asyncio.timeout(USAGE_S):
                usage = await sandbox.usage()
            self.time.labels["cpu_s"] = usage.cpu_s
            if usage.cpu_waited_s is not None:
                self.time.labels["cpu_waited_s"] = usage.cpu_waited_s
            if usage.memory_peak_bytes is not None:
                self.time.labels["memory_bytes"] = usage.memory_peak_bytes

    async def _evaluate(
        self, ref: SandboxRef, report: AgentReport, record: SessionReport
    ) -> tuple[Verdict, StepScores | None]:
        """Return the verdict, with the judge's share of the reward, and the judge's scores of steps."""
        evaluate_s = least(self.config.evaluate_timeout_s, self.task.limits.evaluate_s)
        scores = None
        with self.time.services() as in_services:
            async with self._phase(names.EVALUATE, "evaluate", evaluate_s or self.config.evaluate_timeout_s):
                if report.stop is StopReason.INVALID:
                    verdict = with_rewards(invalid("an answer was not an action"), self.task.evaluator.rewards)
                else:
                    request = EvaluationRequest(
                        key=self.key,
                        task_id=self.task.id,
                        purpose=self.order.purpose,
                        sandbox=ref,
                        episode=report.episode,
                        traceparent=traceparent_of(trace.get_current_span()),
                        agent_user=report.user,
                    )
                    began_s = self.time.now_s()
                    verdict = await self.stations.evaluate(self.task, request)
                    self.time.evaluated(verdict.path, began_s, verdict.ended_at_s)
                if report.judgement is not None and verdict.reward is not None:
                    scores = report.judgement.of_tokens(verdict.reward, record.lineages)
                verdict = with_judgement(verdict, report.judgement)
        self.time.split_services(in_services.seconds)
        return verdict, scores

    def _failed(self, detail: str, *, engine: bool = False) -> RolloutResult:
        logger.warning("%s is infra: %s", self, detail)
        return self._result(Outcome.infra(clean_text(detail)), None, engine_failed=engine)

    def cancelled(self) -> RolloutResult:
        """Return the result of the cancelled attempt, which is often a straggler, with where its time went."""
        breakdown = self.time.breakdown()
        turns = int(breakdown.labels.get("turns", 0))  # type: ignore[arg-type]
        return self._result(CANCELLED, None, turns=turns, breakdown=breakdown)

    def _result(self, outcome: Outcome, trajectory: Trajectory | None, **more: Any) -> RolloutResult:
        return RolloutResult(
            rollout_id=self.order.rollout_id,
            attempt=self.order.attempt,
            outcome=outcome,
            trajectory=trajectory,
            phases_s=tuple(self.time.seconds),
            trace_id=current_trace_id(),
            host=self.time.host,
            **more,
        )


def _agent_attributes(agent: str, report: AgentReport) -> dict[str, str | int]:
    """Return span attributes with an agent's end."""
    attributes: dict[str, str | int] = {
        names.OPERATION: names.AGENT,
        names.AGENT_NAME: agent,
        names.AGENT_STOP: report.stop.value,
    }
    if report.exit_code is not None:
        result = report.result[:RESULT_CHARACTERS]
        attributes |= {names.AGENT_EXIT_CODE: report.exit_code, names.AGENT_RESULT: result}
    if report.stop is StopReason.ERROR:
        attributes[names.AGENT_LOG_TAIL] = report.log_tail[-names.MAX_TEXT_CHARACTERS :]
    return attributes


def _session_attributes(record: SessionReport) -> dict[str, int]:
    """Return span attributes with a session's token counts."""
    attributes = {
        names.SAMPLED_TOKENS: record.sampled_tokens,
        names.TRAINED_TOKENS: record.trained_tokens,
        names.ROWS: len(record.lineages),
        names.LOST_CALLS: record.lost_calls,
    }
    attributes |= {f"{names.MASKED_TOKENS}.{reason}": tokens for reason, tokens in record.masked.items()}
    attributes |= {f"{names.UNHONOURED}.{kind}": turns for kind, turns in record.unhonoured.items()}
    return attributes | {f"{names.DRIFT}.{kind}": turns for kind, turns in record.drift.items()}


def place_of(error: Exception) -> str:
    """Return where in a user's own code an error was raised, such as " (parts.py:12)"; empty for all other code."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        if not file.startswith((sys.prefix, sys.base_prefix, "<")) and not module.startswith("headrace."):
            place = f" ({Path(file).name}:{line})"
    return place


def _check_agent(report: AgentReport, record: SessionReport) -> None:
    """Raise InfraFailure for failures that the policy did not cause, even if the agent handled them."""
    if record.failures:
        raise InfraFailure(f"agent: was served a failure: {record.failures[0]}", engine=True)
    if report.exit_code is not None and record.turns == 0:
        output = " ".join((report.result or report.log_tail[-400:]).split())
        raise InfraFailure(f"agent: ended with exit code {report.exit_code} before its first turn: {output}")
    if report.stop is StopReason.TIME and record.sampled_tokens == 0:
        raise InfraFailure(
            "agent: its deadline passed before the policy had sampled a token; raise rollout.agent_timeout_s"
        )


def outcome_of(report: AgentReport, exhausted: Exhausted, verdict: Verdict) -> Outcome:
    """Return the outcome of a scored rollout: the verdict's outcome, or `budget` if the agent used up a budget. A full
    context counts only if it stopped the agent."""
    if verdict.reward is None:
        return Outcome(reward=None, trainable=False, cause=verdict.cause, detail=verdict.detail)
    finished = report.stop is StopReason.FINISHED
    spent = exhausted is not Exhausted.NONE and not (finished and exhausted is Exhausted.CONTEXT)
    by_itself = finished or report.stop is StopReason.ERROR
    cause = Cause.BUDGET if (spent or not by_itself) and verdict.cause is not Cause.INVALID else verdict.cause
    return Outcome(reward=verdict.reward, solved=verdict.solved, trainable=True, cause=cause, detail=verdict.detail)
