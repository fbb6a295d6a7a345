"""Additive increase, multiplicative decrease of the rollouts in flight."""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_left
from collections.abc import Callable

import pytest

from headrace.actors.record.files.utilisation import Station
from headrace.actors.rollouts.pacing import ENOUGH_ENDS, AdaptiveLimit, LatencyWatch, PacingConfig, Pressure
from headrace.actors.runtime.actors.runtime import InlineRuntime
from headrace.actors.runtime.simulated.durations import DurationsConfig
from headrace.actors.simulation.virtual.plan import SimulationPlan
from headrace.actors.simulation.virtual.plan_service import open_service
from headrace.actors.simulation.virtual.virtual_time import run_virtual

CONFIG = PacingConfig(enabled=True, start=16, least=4, increase=2, decrease=0.5, interval_s=10.0)
QUIET = Pressure(engine_queue=0.5)
QUEUED = Pressure(engine_queue=2.0)


def test_the_limit_grows_while_it_is_reached_and_nothing_is_overloaded() -> None:
    limit = AdaptiveLimit(CONFIG, most=20, now_s=0.0)
    assert [limit.look(QUIET, limit.limit, 10.0 * n) for n in range(1, 5)] == [18, 20, 20, 20]
    assert limit.look(QUIET, 3, 100.0) == 20


def test_an_unused_limit_does_not_grow() -> None:
    limit = AdaptiveLimit(CONFIG, most=64, now_s=0.0)
    assert [limit.look(QUIET, 15, 10.0 * n) for n in range(1, 4)] == [16, 16, 16]


def test_an_overload_shrinks_the_limit_once_per_interval_down_to_the_minimum() -> None:
    limit = AdaptiveLimit(CONFIG, most=64, now_s=0.0)
    assert [limit.look(QUEUED, 16, seconds) for seconds in (10.0, 11.0, 19.0, 20.0, 30.0, 40.0)] == [8, 8, 8, 4, 4, 4]
    assert "engines have 2.00 times" in limit.reason


def test_an_overload_names_the_service_that_slowed_down() -> None:
    limit = AdaptiveLimit(CONFIG, most=64, now_s=0.0)
    limit.look(Pressure(latencies_s=(("simulator", 1.0),)), 0, 1.0)
    assert limit.look(Pressure(latencies_s=(("simulator", 2.9),)), 0, 10.0) == 16
    assert limit.look(Pressure(latencies_s=(("simulator", 3.1),)), 0, 20.0) == 8
    assert limit.reason == "simulator takes 3.1 s, at best 1 s"


def test_a_latency_of_zero_is_not_a_baseline() -> None:
    """Nothing was seen in the service: later it is overloaded all the same."""
    limit = AdaptiveLimit(CONFIG, most=64, now_s=0.0)
    for seconds, looked_s in ((0.0, 1.0), (1.0, 2.0), (3.1, 10.0)):
        limit.look(Pressure(latencies_s=(("boot", seconds),)), 0, looked_s)
    assert limit.limit == 8


def begun_at(rate: float, until_s: float) -> list[float]:
    chance, begun = random.Random(3), [0.0]
    while begun[-1] < until_s:
        begun.append(begun[-1] + chance.expovariate(rate))
    return begun


def paced(begun: list[float], seconds_at: Callable[[float], float], until_s: int) -> list[str]:
    """What each look at rollouts that begin at these times says is overloaded; each takes 2 s to boot, then a minute,
    then so long in the evaluator."""
    watch, limit, said = LatencyWatch(), AdaptiveLimit(CONFIG, most=64, now_s=0.0), []
    evaluations = [(start + 62.0, start + 62.0 + seconds_at(start)) for start in begun]
    ends = sorted(end for _, end in evaluations)
    for now in range(200, until_s):
        booting = sum(start <= now < start + 2.0 for start in begun)
        evaluating = sum(start <= now < end for start, end in evaluations)
        in_use = {Station.BOOT: booting, Station.EVALUATOR: evaluating, Station.SANDBOX: 9 * (now % 2)}
        watch.sample(float(now), in_use, bisect_left(ends, now))
        limit.look(Pressure(latencies_s=watch.latencies_s), 0, float(now))
        said.append(limit.reason)
    return said


def test_a_low_rollout_rate_is_not_mistaken_for_an_overload() -> None:
    """One rollout ends in ten seconds, at random times: the times in the stations are always the same."""
    assert set(paced(begun_at(0.1, 5_000.0), lambda _: 5.0, 5_000)) == {""}


def test_an_overload_is_detected_despite_noise() -> None:
    said = paced(begun_at(0.5, 2_000.0), lambda start: 5.0 if start < 1_000 else 30.0, 2_000)
    assert set(said[: 1_000 - 200]) == {""}
    assert "evaluator takes" in said[-1]
    assert "boot" not in said[-1]


def test_latencies_need_enough_finished_rollouts_and_expire_after_one_window() -> None:
    watch = LatencyWatch()
    told = []
    for now in range(60):
        watch.sample(float(now), {Station.EVALUATOR: 4.0, Station.BOOT: 0.0}, min(now, 24))
        told.append(watch.latencies_s)
    first = ENOUGH_ENDS
    assert not any(told[:first])
    assert dict(told[first]) == {"evaluator": pytest.approx(4.0)}
    assert all(told[first : first + 10])
    assert not any(told[first + 10 :]), "what ended since is not enough"


def test_the_limit_settles_at_the_capacity_of_a_service() -> None:
    """A service that answers 16 calls a second: more at once wait, and 48 wait three times too long."""
    limit, seen = AdaptiveLimit(CONFIG, most=512, now_s=0.0), []
    for look in range(1, 400):
        latency_s = max(1.0, limit.limit / 16)
        seen.append(limit.look(Pressure(latencies_s=(("evaluator", latency_s),)), limit.limit, look * 10.0))
    settled = seen[100:]
    assert 24 <= min(settled) <= max(settled) <= 50
    assert len(set(settled)) > 2, "it keeps asking for more"


def test_without_pacing_all_slots_are_used() -> None:
    limit = AdaptiveLimit(PacingConfig(), most=64, now_s=0.0)
    assert limit.look(QUEUED, 64, 100.0) == 64


def test_the_limit_never_exceeds_the_slots() -> None:
    limit = AdaptiveLimit(CONFIG, most=2, now_s=0.0)
    assert limit.limit == 2
    assert limit.look(QUEUED, 2, 10.0) == 2


def test_a_dispatcher_has_fewer_in_flight_while_engines_are_overloaded() -> None:
    """In virtual time: overloaded for ten minutes, then not; rollouts take half a minute."""
    plan = SimulationPlan(
        slots=16,
        batch_size=16,
        group_size=4,
        durations=DurationsConfig(mean_s=30.0, median_s=30.0, cap_s=60.0),
        learner_s=1.0,
        push_s=0.1,
        pacing=True,
    )

    async def history() -> list[int]:
        seen = []
        loop = asyncio.get_running_loop()
        async with open_service(plan, InlineRuntime(), clock=loop.time) as service, asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(work()) for work in (service.actors.dispatcher.run, service.actors.learner.run)
            ]
            for look in range(120):
                await asyncio.sleep(10.0)
                await service.actors.dispatcher.pace(QUEUED if look < 60 else QUIET)
                seen.append((await service.actors.dispatcher.status()).in_flight)
            for task in running:
                task.cancel()
        return seen

    seen = run_virtual(history())
    assert max(seen[30:60]) <= PacingConfig().least
    assert min(seen[30:60]) > 0
    assert max(seen[90:]) == 16
