"""Stations that one worker's rollouts use: pool, policy, agent and evaluator, with batched calls.

Invariant: each incarnation of a worker is a separate lease holder.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, cast

from headrace.actors.agents.programs.agent import (
    Agent,
    AgentReport,
    agent_name,
    keeps_time,
    marks_warnings,
    needs_sandbox,
)
from headrace.actors.evaluation.by_service.scoring import score_by_service
from headrace.actors.evaluation.graders.evaluation import EvaluationRequest, Verdict
from headrace.actors.evaluation.graders.evaluator import Evaluator
from headrace.actors.evaluation.graders.rewards import score_task
from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.record.files.parts import in_part
from headrace.actors.rollouts.evaluation_folders import EvaluationFolders
from headrace.actors.rollouts.records import RolloutStore
from headrace.actors.rollouts.rollout import RolloutConfig
from headrace.actors.rollouts.rollout_reports import RolloutReports
from headrace.actors.rollouts.sessions import GatewaySessions, NoSessions, Sessions, SimulatedSessions
from headrace.actors.runtime.actors.operations import OperationCalls
from headrace.actors.runtime.pools.gateway import GatewayActor
from headrace.actors.runtime.pools.leases import Leases
from headrace.actors.runtime.pools.sandbox_pool import SandboxPool
from headrace.actors.runtime.simulated.engines import SimulatedEngineGroup
from headrace.actors.services.clients import ServiceClients
from headrace.actors.services.config import ServiceConfig
from headrace.actors.services.figures import ServiceFigures
from headrace.actors.services.service import Services
from headrace.buffer.core.source_names import source_name
from headrace.buffer.core.task_catalog import TaskCatalog
from headrace.buffer.primitives.exit_stack import ResourceOwner
from headrace.buffer.tasks.evaluators import OF_SERVICES
from headrace.buffer.tasks.parts import TaskLimits, least
from headrace.buffer.tasks.task import Task, TaskId
from headrace.buffer.trajectories.breakdown import EVALUATE_CHECK
from headrace.buffer.trajectories.types import Purpose, RolloutOrder
from headrace.sandboxes.base import HostFolder, Sandbox, SandboxId, SandboxRef
from headrace.sandboxes.pool.boot import Lease, LeaseRequest
from headrace.serve.gateway.capture.rows import SessionReport
from headrace.serve.gateway.capture.session import Budgets, Sampling, SessionId, SessionSpec, TrainedPart
from headrace.serve.gateway.http.client import OpenedSession


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTerms:
    """Terms of a session: `sampling` is enforced on its turns, and exceeding `budgets` ends it."""

    sampling: Sampling
    budgets: Budgets

    def to_json(self) -> dict[str, float | int | None]:
        """Return the terms as they appear in an evaluation's summary."""
        budgets = {name: getattr(self.budgets, name) for name in _TOKEN_BUDGETS}
        return asdict(self.sampling) | budgets


_TOKEN_BUDGETS = ("max_tokens_per_turn", "max_context_tokens", "max_sampled_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceParts:
    """What the rollouts of one source of tasks run with; picklable."""

    agent: Agent
    sampling: Sampling
    budgets: Budgets
    train_truncated: bool
    train_cut: bool
    train: tuple[TrainedPart, ...]
    serve_unhonoured: bool
    rollout: RolloutConfig
    evaluation_terms: SessionTerms | None = None
    """Terms of evaluation sessions; None to use the training terms."""

    def terms(self, purpose: Purpose) -> SessionTerms:
        """Return the session terms for this purpose."""
        if purpose is Purpose.EVALUATION and self.evaluation_terms is not None:
            return self.evaluation_terms
        return SessionTerms(sampling=self.sampling, budgets=self.budgets)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """Configuration of a worker and the actors that it calls; picklable."""

    pool: SandboxPool
    evaluator: Evaluator
    replay: RolloutStore
    sources: Mapping[str, SourceParts]
    """Parts of each source of tasks, by name; those of a run without sources have an empty name."""
    tasks: TaskCatalog
    gateways: Sequence[GatewayActor]
    """Gateways of the worker's node; none if the agent uses no policy or a simulated one. Their addresses and tokens
    are requested from them: the arguments of an actor are stored by Ray, and a gateway may be on another node after a
    loss."""
    lease_s: float
    """Term of sandbox leases (`rollout.lease_s`)."""
    observing: ActorTelemetry
    evaluations: EvaluationFolders | None = None
    """Folders for the conversations, patches and logs of evaluation rollouts; None to store nothing."""
    simulated_engines: SimulatedEngineGroup | None = None
    """Engines for the simulated agent, in place of a gateway."""
    services: Mapping[str, ServiceConfig] = field(default_factory=dict)
    """Services by name; each retriever has its `url`, also those that the run has started."""

    def source_of(self, task_id: TaskId) -> str:
        """Return the name of a task's source. Raises LookupError if it is not one of this worker's."""
        name = "" if "" in self.sources else source_name(task_id)
        if name not in self.sources:
            raise LookupError(f"task {task_id!r}: this worker has no source {name!r}; add it to WorkerParts.sources")
        return name


class WorkerStations(ResourceOwner):
    """What the rollouts of one worker share, as an async context manager; `of` gives the stations of a source."""

    def __init__(self, parts: WorkerParts, holder: str) -> None:
        super().__init__()
        self._parts = parts
        self.holder = holder

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        sessions: SimulatedSessions | GatewaySessions | NoSessions = NoSessions()
        if self._parts.simulated_engines is not None:
            sessions = SimulatedSessions(self._parts.simulated_engines, self.holder)
        elif self._parts.gateways:
            sessions = GatewaySessions(self._parts.gateways)
        self.sessions: Sessions = await enter(sessions)
        self.leases = await enter(Leases(self._parts.pool, self.holder, lease_s=self._parts.lease_s))
        self.evaluations: OperationCalls[EvaluationRequest, Verdict] = await enter(
            OperationCalls(self._parts.evaluator, unclaimed=_nothing_to_give_back)
        )
        self._clients = await enter(ServiceClients(self._parts.services))
        self._by_source = {name: SourceStations(self, own) for name, own in self._parts.sources.items()}
        return self

    def of(self, task_id: TaskId) -> SourceStations:
        """Return the stations for the rollouts of a task."""
        return self._by_source[self._parts.source_of(task_id)]

    @property
    def services(self) -> Services:
        """Clients of the recipe's services, for environments and evaluators."""
        return self._clients

    @property
    def service_figures(self) -> dict[str, ServiceFigures]:
        """Figures of each service, over all rollouts of this worker."""
        return self._clients.figures()

    @property
    def turns(self) -> int | None:
        """Number of turns in progress at simulated engines; None for other engines."""
        return self.sessions.turns if isinstance(self.sessions, SimulatedSessions) else None

    @property
    def ended_turns(self) -> int | None:
        """Number of turns that have ended at simulated engines; None for other engines."""
        return self.sessions.ended_turns if isinstance(self.sessions, SimulatedSessions) else None


class SourceStations:
    """Implementation of `rollout.Stations` for the rollouts of one source of tasks."""

    def __init__(self, shared: WorkerStations, parts: SourceParts) -> None:
        self._shared, self._parts = shared, parts

    def recorded(self) -> RecordedStations:
        """Return stations for one rollout that store its reports."""
        return RecordedStations(self._shared, self._parts)

    @property
    def config(self) -> RolloutConfig:
        """Deadlines of the source's rollouts."""
        return self._parts.rollout

    @property
    def folders(self) -> tuple[HostFolder, ...]:
        return self._parts.agent.folders

    async def lease(self, request: LeaseRequest) -> Lease:
        return await self._shared.leases.lease(request)

    async def attach(self, ref: SandboxRef) -> Sandbox:
        return await self._shared.leases.attach(ref)

    async def release(self, sandbox: SandboxId) -> None:
        await self._shared.leases.release(sandbox)

    async def open_session(self, order: RolloutOrder, task: Task, traceparent: str) -> OpenedSession:
        terms = self._parts.terms(order.purpose)
        spec = SessionSpec(
            # Includes the incarnation: a session of a dead worker may still be open when its evaluation is repeated.
            session_id=SessionId(f"{order.rollout_id}.{order.attempt}.{self._shared.holder[:8]}"),
            sampling=terms.sampling,
            budgets=lowered(terms.budgets, task.limits),
            traceparent=traceparent,
            train_truncated=self._parts.train_truncated,
            train_cut=self._parts.train_cut,
            train=self._parts.train,
            serve_unhonoured=self._parts.serve_unhonoured,
            marks_warnings=marks_warnings(self._parts.agent),
            rollout=order.rollout_id,
            attempt=order.attempt,
        )
        return await self._shared.sessions.open(order, spec)

    @property
    def agent_name(self) -> str:
        return agent_name(self._parts.agent)

    @property
    def needs_sandbox(self) -> bool:
        return needs_sandbox(self._parts.agent)

    @property
    def keeps_time(self) -> bool:
        return keeps_time(self._parts.agent)

    async def run_agent(
        self, order: RolloutOrder, task: Task, sandbox: Sandbox | None, session: OpenedSession, agent_s: float
    ) -> AgentReport:
        budgets = lowered(self._parts.terms(order.purpose).budgets, task.limits)
        given = replace(
            self._shared.sessions.given(session, context_tokens=budgets.max_context_tokens),
            agent_s=agent_s,
            turn_tokens=budgets.max_tokens_per_turn,
            services=self._shared.services,
        )
        # Only agents that say that they need no sandbox get None.
        return await self._parts.agent.run(session=given, sandbox=cast("Sandbox", sandbox), task=task)

    async def finish_session(self, session: OpenedSession, *, conversation: bool = False) -> SessionReport:
        return await self._shared.sessions.finish(session, conversation=conversation)

    async def evaluate(self, task: Task, request: EvaluationRequest) -> Verdict:
        if not any(isinstance(spec, OF_SERVICES) for spec in task.evaluators):
            return await self._score(task, request)
        with in_part(EVALUATE_CHECK):
            return await score_task(task, request, self._score)

    async def _score(self, task: Task, request: EvaluationRequest) -> Verdict:
        if isinstance(task.evaluator, OF_SERVICES):
            # Scored here and not by the evaluator, since the limits and figures of services are the workers'.
            return await score_by_service(task.evaluator, task, request, self._shared.services)
        # Includes the sandbox: if a reset worker repeats an attempt, that is another evaluation.
        key = f"{request.key}.{request.sandbox.id or uuid.uuid4().hex}"
        return await self._shared.evaluations(key, request)


class RecordedStations(SourceStations):
    """Stations of an evaluation rollout, which store the reports of its agent, session and evaluator in `reports`.
    Recording does not change the rollout; the gateway and the evaluator only report more."""

    def __init__(self, shared: WorkerStations, parts: SourceParts) -> None:
        super().__init__(shared, parts)
        self.reports = RolloutReports()

    async def finish_session(self, session: OpenedSession, *, conversation: bool = True) -> SessionReport:
        self.reports.session = await super().finish_session(session, conversation=conversation)
        return self.reports.session

    async def run_agent(
        self, order: RolloutOrder, task: Task, sandbox: Sandbox | None, session: OpenedSession, agent_s: float
    ) -> AgentReport:
        self.reports.agent = await super().run_agent(order, task, sandbox, session, agent_s)
        return self.reports.agent

    async def evaluate(self, task: Task, request: EvaluationRequest) -> Verdict:
        self.reports.verdict = await super().evaluate(task, replace(request, keep=True))
        return self.reports.verdict


def lowered(budgets: Budgets, limits: TaskLimits) -> Budgets:
    """Return the budgets of a session on a task, whose limits can only lower them."""
    own = {
        "max_turns": limits.turns,
        "max_tokens_per_turn": limits.turn_tokens,
        "max_context_tokens": limits.context_tokens,
        "max_sampled_tokens": limits.sampled_tokens,
        "wall_s": limits.agent_s,
    }
    changes: dict[str, Any] = {name: least(getattr(budgets, name), limit) for name, limit in own.items() if limit}
    return replace(budgets, **changes)


async def _nothing_to_give_back(_: Verdict) -> None:
    """A verdict holds no resources."""
