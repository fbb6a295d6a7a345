"""Split of a rollout's cost, from handmade readings."""

from __future__ import annotations

import os

import pytest
from benches.rollout_costs import Reading, read, report


def reading(time_s: float, rollouts: float, commands: dict[str, tuple[int, float]], **parts_s: float) -> Reading:
    return Reading(
        time_s=time_s,
        rollouts=rollouts,
        machine_s=1.1 * sum(parts_s.values()),
        parts_s=parts_s,
        calls={"sandbox-pool": int(rollouts * 2)},
        commands=commands,
    )


def test_rollout_cost_parts_add_up_to_the_total() -> None:
    start = reading(0.0, 0, {}, launcher=0.1, driver=2.0, sandboxes=0.0)
    warm_commands = {"train.write": (100, 0.1), "train.exec": (200, 1.0)}
    warm = reading(10.0, 100, warm_commands, launcher=1.0, driver=3.0, sandboxes=4.0)
    commands = {
        "train.write": (600, 0.6),
        "train.exec": (1200, 6.0),
        "evaluate.exec": (500, 5.0),
        "warm.read": (1, 0.5),
    }
    end = reading(60.0, 600, commands, launcher=4.0, driver=4.0, sandboxes=24.0, engine=5.0)
    told = report(start, warm, end, interpreter_s=0.004)
    assert told["cpu_ms_per_rollout"] == pytest.approx(58.0)
    assert sum(told["parts_ms"].values()) == pytest.approx(told["cpu_ms_per_rollout"])
    assert told["machine_cpu_ms_per_rollout"] == pytest.approx(1.1 * 58.0)
    assert told["parts_ms"] == pytest.approx(
        {
            "agent commands": 10.0,
            "engine": 10.0,
            "boot": 18.0,
            "check": 6.0,
            "launcher": 6.0,
            "interpreter start-up": 4.0,
            "driver": 2.0,
            "prepare": 1.0,
            "warm.read": 1.0,
        }
    )
    assert told["commands_per_rollout"] == pytest.approx(
        {"train.write": 1.0, "train.exec": 2.0, "evaluate.exec": 1.0, "warm.read": 0.002}
    )
    assert told["calls_per_rollout"] == {"sandbox-pool": 2.0}
    assert told["rollouts_per_s"] == 10.0
    assert told["start_cpu_s"] == pytest.approx(2.1)


def test_processor_time_is_attributed_to_an_actor_by_name() -> None:
    before = read({os.getpid(): "replay"}, {}, {}, 0)
    total = sum(number * number for number in range(1_000_000))
    after = read({os.getpid(): "replay"}, {}, {}, 0)
    assert total
    assert after.parts_s["actor replay"] > before.parts_s["actor replay"]
