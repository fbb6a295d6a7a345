"""Each phase of a rollout has a clock of its own: in virtual time, over a pool of simulated sandboxes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from headrace.actors.agents.programs.agent import AgentReport, StopReason
from headrace.actors.evaluation.graders.evaluation import EvaluationRequest, Verdict
from headrace.actors.rollouts import rollout
from headrace.actors.rollouts.rollout import RolloutConfig, RunningAttempt
from headrace.actors.simulation.virtual.virtual_time import run_virtual
from headrace.buffer.tasks.evaluators import NoEvaluator
from headrace.buffer.tasks.task import Task, TaskId
from headrace.buffer.trajectories.types import Cause, GroupId, Outcome, RolloutId, RolloutOrder
from headrace.sandboxes.base import HostFolder, Sandbox, SandboxId, SandboxRef, SandboxSpec
from headrace.sandboxes.pool.boot import Lease, LeaseRequest
from headrace.sandboxes.pool.pool import Pool, PoolConfig
from headrace.sandboxes.simulated.provider import SimulatedProvider, SimulationConfig
from headrace.serve.gateway.capture.rows import SessionReport, report_of
from headrace.serve.gateway.capture.session import Session, SessionId, SessionSpec
from headrace.serve.gateway.http.client import OpenedSession
from headrace.serve.tracing import span_names as names
from support.recorded_spans import attributes_of, recorded_spans

CONFIG = RolloutConfig(
    queue_timeout_s=10,
    boot_timeout_s=20,
    prepare_timeout_s=5,
    agent_timeout_s=40,
    evaluate_timeout_s=30,
)
EVER_S = 1e6
TASK = Task(id=TaskId("t"), family="f", instruction="i", evaluator=NoEvaluator())


class Places:
    """Stations over a pool, each of which takes its time."""

    def __init__(self, pool: Pool, provider: SimulatedProvider, **takes_s: float) -> None:
        self.pool, self.provider, self.takes_s = pool, provider, takes_s
        self.report = AgentReport(stop=StopReason.FINISHED, turns=1)
        self.turns, self.sampled_tokens = 1, 1

    @property
    def folders(self) -> tuple[HostFolder, ...]:
        return ()

    agent_name = "shell"
    needs_sandbox = True
    keeps_time = False

    async def _take(self, what: str) -> None:
        await asyncio.sleep(self.takes_s.get(what, 1.0))

    async def lease(self, request: LeaseRequest) -> Lease:
        return await self.pool.lease_one(request)

    async def attach(self, ref: SandboxRef) -> Sandbox:
        await self._take("prepare")
        return await self.provider.attach(ref)

    async def release(self, sandbox: SandboxId) -> None:
        await self.pool.release([sandbox])

    async def open_session(self, order: RolloutOrder, task: Task, traceparent: str) -> OpenedSession:
        await self._take("open")
        return OpenedSession(session_id=SessionId(order.rollout_id), base_url="")

    async def finish_session(self, session: OpenedSession) -> SessionReport:
        empty = report_of(Session(SessionSpec(session_id=session.session_id), opened_at=0.0))
        return replace(empty, turns=self.turns, sampled_tokens=self.sampled_tokens)

    async def run_agent(
        self, order: RolloutOrder, task: Task, sandbox: Sandbox | None, session: OpenedSession, agent_s: float
    ) -> AgentReport:
        await self._take("agent")
        return self.report

    async def evaluate(self, task: Task, request: EvaluationRequest) -> Verdict:
        await self._take("evaluate")
        return Verdict(reward=1.0, solved=True, cause=Cause.SOLVED)


def order() -> RolloutOrder:
    return RolloutOrder(rollout_id=RolloutId("r"), group_id=GroupId("g"), attempt=1, task_id=TASK.id)


def simulated(
    check: Callable[[Any, Places], None],
    *,
    boot_s: float = 2.0,
    taken: int = 0,
    prepared: Callable[[Places], None] = lambda _: None,
    **takes_s: float,
) -> None:
    """Run one rollout, after `taken` places were taken for good."""

    async def main() -> None:
        provider = SimulatedProvider(SimulationConfig(boot_s=boot_s, boot_sigma=0))
        config = PoolConfig(max_live=2, evaluation_reserve=1)
        async with Pool({"host": provider}, config, clock=asyncio.get_running_loop().time) as pool:
            await pool.lease([SandboxSpec(ttl_s=EVER_S)] * taken)
            places = Places(pool, provider, **takes_s)
            prepared(places)
            check(await RunningAttempt(order(), TASK, places, CONFIG).run(), places)
            assert len(provider.living) == taken

    run_virtual(main())


def test_every_phase_is_timed() -> None:
    def check(result: Any, _: Places) -> None:
        assert (result.outcome.reward, result.outcome.cause) == (1.0, Cause.SOLVED)
        assert [name for name, _ in result.phases_s] == [
            *("queue", "boot", "prepare", "prepare", "agent", "agent", "evaluate")
        ]

    simulated(check)


@pytest.mark.parametrize(
    ("phase", "settings"),
    [
        ("queue", {"taken": 1}),
        ("boot", {"boot_s": EVER_S}),
        ("prepare", {"prepare": EVER_S}),
        ("evaluate", {"evaluate": EVER_S}),
    ],
)
def test_a_phase_timeout_is_an_infra_failure_naming_the_phase(phase: str, settings: dict[str, Any]) -> None:
    """F12."""

    def check(result: Any, _: Places) -> None:
        assert (result.outcome.reward, result.outcome.cause) == (None, Cause.INFRA)
        assert result.outcome.detail.startswith(f"{phase}: ")

    simulated(check, **settings)


def test_the_agent_deadline_counts_from_the_start_of_the_agent() -> None:
    """F1."""

    def check(result: Any, _: Places) -> None:
        assert (result.outcome.reward, result.outcome.cause) == (1.0, Cause.SOLVED)

    simulated(check, boot_s=18, prepare=4, open=30, agent=39)


def test_the_span_of_a_failed_agent_has_the_end_of_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    log = "".join(f"line {number}\n" for number in range(1000)) + "the reason"

    def failing(places: Places) -> None:
        places.report = AgentReport(stop=StopReason.ERROR, turns=1, exit_code=2, log_tail=log)

    with recorded_spans(monkeypatch, rollout) as recorded:
        simulated(lambda result, _: None, prepared=failing)
        tail = attributes_of(recorded.one(names.AGENT))[names.AGENT_LOG_TAIL]
    assert tail == log[-names.MAX_TEXT_CHARACTERS :]


def test_an_agent_out_of_time_is_scored() -> None:
    """F1."""

    def check(result: Any, _: Places) -> None:
        assert (result.outcome.reward, result.outcome.cause) == (1.0, Cause.BUDGET)

    simulated(check, agent=EVER_S)


def test_phases_without_their_own_deadline_have_an_overall_timeout() -> None:
    def check(result: Any, _: Places) -> None:
        assert (result.outcome.reward, result.outcome.cause) == (None, Cause.INFRA)

    simulated(check, open=EVER_S)


WITHOUT_A_TURN = [
    (
        AgentReport(stop=StopReason.ERROR, turns=0, exit_code=127, log_tail="no such\nmodel"),
        0,
        "127 before .* such model",
    ),
    (
        AgentReport(stop=StopReason.FINISHED, turns=0, exit_code=0, result="no such command"),
        0,
        "0 before .* such command",
    ),
    (AgentReport(stop=StopReason.ERROR, turns=0, exit_code=1), 5, "1 before"),
    (AgentReport(stop=StopReason.TIME, turns=0), 0, "agent_timeout_s"),
    (AgentReport(stop=StopReason.TIME, turns=0), 5, None),
    (AgentReport(stop=StopReason.FINISHED, turns=0), 0, None),
]


@pytest.mark.parametrize(("report", "sampled_tokens", "infra"), WITHOUT_A_TURN)
def test_an_agent_that_never_got_a_turn_is_an_infra_failure(
    report: AgentReport, sampled_tokens: int, infra: str | None
) -> None:
    """Whatever the evaluator would say: the policy had no part in it. A policy that used the time up for one turn had,
    and an agent that is no program may need none."""
    outcome = outcome_after(report, turns=0, sampled_tokens=sampled_tokens)
    assert (outcome.cause is Cause.INFRA) == (outcome.reward is None) == (infra is not None)
    assert re.search(infra or "^$", outcome.detail)


@pytest.mark.parametrize("exit_code", [1, 126, 127, 137])
def test_after_a_turn_every_exit_code_is_scored(exit_code: int) -> None:
    """Commands of the policy run as the agent's user, and can end it."""
    report = AgentReport(stop=StopReason.ERROR, turns=1, exit_code=exit_code)
    assert outcome_after(report, turns=1, sampled_tokens=5).reward == 1.0


def outcome_after(report: AgentReport, *, turns: int, sampled_tokens: int) -> Outcome:
    outcomes: list[Outcome] = []

    async def main() -> None:
        provider = SimulatedProvider(SimulationConfig())
        async with Pool({"host": provider}, PoolConfig(), clock=asyncio.get_running_loop().time) as pool:
            places = Places(pool, provider)
            places.report, places.turns, places.sampled_tokens = report, turns, sampled_tokens
            outcomes.append((await RunningAttempt(order(), TASK, places, CONFIG).run()).outcome)

    run_virtual(main())
    return outcomes[0]
