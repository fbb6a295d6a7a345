"""Clocks of a turn in the engine pool, in virtual time: pushes stop them, and a slow engine does not count as
silent."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable

import pytest
from opentelemetry import trace

from headrace.actors.simulation.virtual.virtual_time import run_virtual
from headrace.buffer.trajectories.types import VersionSpan
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import Completion, EngineId, FinishReason, GenerateRequest, RequestId
from headrace.serve.gateway.capture.session import SessionId
from headrace.serve.gateway.capture.session_usage import UsageClock
from headrace.serve.gateway.errors import InfraError, NoEngineOpen
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.gateway.http.engines import EnginePool
from headrace.serve.gateway.http.routing import EngineRoute, RoutingKey, RoutingTable

A = EngineId("a")
GATE_WAIT_S, CALL_S = 20.0, 30.0
LINEAGE = RoutingKey(session=SessionId("s"))


def completion(tokens: int, finish: FinishReason) -> Completion:
    return Completion(
        output_ids=tuple(range(tokens)),
        logprobs=(-1.0,) * tokens,
        spans=(VersionSpan(start=0, end=tokens, version=PolicyVersion(1, 1)),) if tokens else (),
        finish=finish,
        text="",
        prompt_tokens=1,
        cached_tokens=0,
        retractions=0,
    )


class TimedEngine:
    """Engine that answers after `turn_s`. When aborted, it returns `partial` tokens, or nothing if that is None."""

    def __init__(self, turn_s: float, partial: int | None = 1) -> None:
        self._turn_s = turn_s
        self._partial = partial
        self._aborted = asyncio.Event()
        self.calls = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        self.calls += 1
        self._aborted.clear()
        try:
            async with asyncio.timeout(self._turn_s):
                await self._aborted.wait()
        except TimeoutError:
            return completion(3, FinishReason.STOP)
        if self._partial is None:
            await asyncio.Event().wait()
        return completion(self._partial or 0, FinishReason.ABORT)

    async def abort(self, request_id: RequestId) -> None:
        self._aborted.set()

    async def aclose(self) -> None: ...


def in_pool(engine: TimedEngine, act: Callable[[EnginePool], Awaitable[None]], *, admitted: bool = True) -> None:
    async def run() -> None:
        config = GatewayConfig(gate_wait_s=GATE_WAIT_S, turn_timeout_s=CALL_S, abort_grace_s=2.0)
        clock = asyncio.get_running_loop().time
        pool = EnginePool(config, lambda _: engine, clock, trace.get_tracer("test"))  # type: ignore[arg-type,return-value]
        await pool.replace_table(table(1, admitted=admitted))
        await act(pool)

    run_virtual(run())


def table(version: int, *, admitted: bool) -> RoutingTable:
    return RoutingTable(version=version, engines=(EngineRoute(engine_id=A, url="http://a:1", admitted=admitted),))


async def turn(pool: EnginePool) -> Completion:
    ask = GenerateRequest(request_id=RequestId("r"), input_ids=array("i", [1]), max_new_tokens=9)
    return await pool.sample(LINEAGE, ask, [], UsageClock(since_s=0.0))


async def push(pool: EnginePool, seconds: float) -> None:
    """Hold the gate with a lease and renew it, as a push does."""
    lease_s = 6.0
    for _ in range(int(seconds / 2)):
        pool.close_gate(A, lease_s)
        await asyncio.sleep(2.0)
    await pool.open_gate(A, None)


def test_a_push_longer_than_the_wait_for_an_engine_fails_no_turn() -> None:
    async def act(pool: EnginePool) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(push(pool, 15 * GATE_WAIT_S))
            await asyncio.sleep(1.0)
            answered = tasks.create_task(turn(pool))
        assert answered.result().finish is FinishReason.STOP

    in_pool(TimedEngine(1.0), act)


def test_a_turn_waits_for_an_engine_until_its_deadline() -> None:
    async def act(pool: EnginePool) -> None:
        began = asyncio.get_running_loop().time()
        with pytest.raises(NoEngineOpen):
            await turn(pool)
        assert asyncio.get_running_loop().time() - began == GATE_WAIT_S

    in_pool(TimedEngine(1.0), act, admitted=False)


def test_a_gate_opens_when_its_lease_expires_and_the_turn_continues() -> None:
    async def act(pool: EnginePool) -> None:
        pool.close_gate(A, 3 * GATE_WAIT_S)
        await turn(pool)
        assert asyncio.get_running_loop().time() == pytest.approx(3 * GATE_WAIT_S + 1.0)

    in_pool(TimedEngine(1.0), act)


def test_a_push_does_not_use_up_the_wait_for_an_engine() -> None:
    async def act(pool: EnginePool) -> None:
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(push(pool, 40.0))
            with pytest.raises(NoEngineOpen):
                await turn(pool)
        assert asyncio.get_running_loop().time() - began == pytest.approx(40.0 + GATE_WAIT_S)

    in_pool(TimedEngine(1.0), act, admitted=False)


def test_a_push_stops_the_clock_of_a_call_that_it_delays() -> None:
    engine = TimedEngine(CALL_S - 1.0 + 100.0)

    async def act(pool: EnginePool) -> None:
        async with asyncio.TaskGroup() as tasks:
            answered = tasks.create_task(turn(pool))
            await asyncio.sleep(5.0)
            tasks.create_task(push(pool, 100.0))
        assert answered.result().finish is FinishReason.STOP
        assert engine.calls == 1

    in_pool(engine, act)


@pytest.mark.parametrize(("partial", "silent"), [(1, 0), (0, 0), (None, 2)])
def test_an_engine_that_answers_an_abort_does_not_count_as_silent(partial: int | None, silent: int) -> None:
    """Every turn exceeds its timeout; the engine is hung only if it does not end them when aborted either."""

    async def act(pool: EnginePool) -> None:
        with pytest.raises(InfraError, match="turn_timeout_s"):
            await turn(pool)
        assert pool.silent[A] == silent

    in_pool(TimedEngine(10 * CALL_S, partial), act)
