"""Utilisation of stations, and the bottleneck of a run."""

from __future__ import annotations

import random

import pytest

from headrace.actors.record.files.utilisation import (
    Station,
    StationLoad,
    UtilisationMeter,
    bottleneck,
    mean_in_flight,
    mean_loads,
    service_shares,
)


def load(station: Station | str, in_use: float, capacity: float | None) -> StationLoad:
    return StationLoad(station=station, in_use=in_use, capacity=capacity, mean_s=None)


def test_service_times_follow_from_littles_law() -> None:
    """Rollouts of 4 s at the engine and 1 s at the evaluator, begun at random times, sampled once a second."""
    chance = random.Random(7)
    begun = sorted(chance.uniform(0, 20_000) for _ in range(40_000))
    meter = UtilisationMeter()
    for second in range(1000, 19_000):
        engine = sum(1 for start in _between(begun, second - 4, second))
        evaluator = sum(1 for start in _between(begun, second - 5, second - 4))
        finished = len(_between(begun, 0, second - 5))
        meter.sample(float(second), {Station.ENGINE: engine, Station.EVALUATOR: evaluator}, finished)
    engine_load, evaluator_load = meter.loads({Station.ENGINE: 10})
    assert engine_load.mean_s == pytest.approx(4.0, rel=0.02)
    assert evaluator_load.mean_s == pytest.approx(1.0, rel=0.02)
    assert engine_load.utilisation == pytest.approx(0.8, rel=0.02)
    assert evaluator_load.utilisation is None


def _between(times: list[float], start: float, end: float) -> list[float]:
    from bisect import bisect_left

    return times[bisect_left(times, start) : bisect_left(times, end)]


def test_samples_are_weighted_by_the_time_since_the_previous_one() -> None:
    meter = UtilisationMeter()
    meter.sample(0.0, {Station.BOOT: 100.0}, 0)
    assert meter.loads({}) == ()
    meter.sample(1.0, {Station.BOOT: 4.0}, 1)
    meter.sample(4.0, {Station.BOOT: 0.0}, 2)
    assert meter.loads({}) == (StationLoad(station=Station.BOOT, in_use=1.0, capacity=None, mean_s=2.0),)
    meter.reset()
    meter.sample(6.0, {Station.BOOT: 3.0}, 0)
    assert meter.loads({})[0].mean_s is None, "a dispatcher that began anew has finished nothing"


def test_the_fullest_station_is_the_bottleneck() -> None:
    loads = [
        load(Station.SANDBOX, 62.0, 64.0),
        load(Station.ENGINE, 60.0, 128.0),
        load(Station.LEARNER, 0.4, 1.0),
        load(Station.QUEUE, 500.0, None),
    ]
    assert bottleneck(loads, 64.0) == loads[0]
    assert bottleneck([*loads, load(Station.BOOT, 8.0, 8.0)], 64.0) == load(Station.BOOT, 8.0, 8.0)


def test_a_phase_lock_on_a_service_without_a_capacity_is_reported() -> None:
    """The user simulator answers one call at a time: nothing is full, and nearly all rollouts wait for it."""
    loads = [
        load(Station.SANDBOX, 32.0, 64.0),
        load(Station.ENGINE, 1.0, 128.0),
        load(Station.SIMULATOR, 30.0, None),
        load(Station.LEARNER, 0.1, 1.0),
    ]
    assert bottleneck(loads, 32.0) == loads[2]
    assert bottleneck(loads, 64.0) is None


def test_means_are_weighted_over_records() -> None:
    def record(seconds: float, in_use: float, mean_s: float | None, **more: float) -> dict:
        sandbox = {"in_use": in_use, "capacity": 10, "mean_s": mean_s}
        return {"seconds": seconds, "stations": {"sandbox": sandbox}, **more}

    records = [record(30.0, 10.0, 1.0, in_flight=8.0), record(10.0, 2.0, 3.0), record(40.0, 6.0, None, in_flight=1.0)]
    (sandbox,) = mean_loads(records)
    assert sandbox.utilisation == pytest.approx(0.7)
    assert sandbox.mean_s == pytest.approx(1.5), "over what was measured"
    assert mean_in_flight(records) == pytest.approx(4.0)
    assert mean_loads([]) == ()
    assert mean_in_flight([]) == 0.0


def test_the_mean_number_of_rollouts_in_flight_is_measured() -> None:
    meter = UtilisationMeter()
    meter.sample(0.0, {}, 0, in_flight=100.0)
    meter.sample(1.0, {}, 0, in_flight=8.0)
    meter.sample(4.0, {}, 0, in_flight=4.0)
    assert meter.in_flight == 5.0
    meter.reset()
    assert meter.in_flight == 0.0


def test_a_service_that_holds_most_rollouts_comes_before_the_sandboxes_that_they_fill() -> None:
    """F14: agents wait for a service inside their sandboxes, so full sandboxes are a consequence."""
    sandbox, engine = load(Station.SANDBOX, 64.0, 64.0), load(Station.ENGINE, 6.0, 128.0)
    slow, idle = load("service.user", 40.0, 64.0), load("service.wiki", 3.0, 64.0)
    assert bottleneck([sandbox, engine, slow, idle], 64.0) == slow
    assert bottleneck([engine, slow, idle], 64.0) == slow
    assert bottleneck([sandbox, engine, idle], 64.0) == sandbox
    assert bottleneck([engine, idle], 64.0) is None
    full_engine = load(Station.ENGINE, 128.0, 128.0)
    assert bottleneck([sandbox, full_engine, slow], 64.0) == full_engine


def test_a_service_whose_limit_is_full_is_the_bottleneck() -> None:
    """F14: rollouts that wait for a slot are in the service, so that more than all of its limit is in use."""
    throttled = load("service.user", 20.0, 4.0)
    assert bottleneck([load(Station.SANDBOX, 64.0, 64.0), throttled], 64.0) == throttled
    assert throttled.line() == "service.user 500% of 4"


def test_services_are_stations_with_a_limit_that_changes() -> None:
    meter = UtilisationMeter()
    meter.sample(0.0, {}, 0)
    meter.sample(2.0, {"service.b": 4.0, "service.a": 1.0, Station.LEARNER: 1.0}, 2)
    loads = meter.loads({"service.a": 2.0, "service.b": 8.0})
    assert [load.station for load in loads] == [Station.LEARNER, "service.a", "service.b"]
    assert service_shares(loads, 8.0) == {"a": 0.125, "b": 0.5}
    assert service_shares(loads, 0.0) == {}

    def record(seconds: float, in_use: float, capacity: float) -> dict:
        return {"seconds": seconds, "stations": {"service.a": {"in_use": in_use, "capacity": capacity, "mean_s": 1.0}}}

    (mean,) = mean_loads([record(30.0, 4.0, 4.0), record(10.0, 8.0, 64.0)])
    assert (mean.in_use, mean.capacity) == (5.0, 19.0)
