"""Generated rows of a run, and what its verdicts say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from headrace.actors.telemetry.slow.rows import RolloutTime

TYPICAL_S = {"boot": 2.0, "prepare": 0.5, "engine.decode": 20.0, "tool.bash": 10.0, "own": 1.0, "evaluate.check": 4.0}
STEP_S = 60.0


def row(number: int, parts_s: Mapping[str, float], **more: Any) -> RolloutTime:
    at_s = more.pop("at_s", 1000.0)
    total_s = sum(parts_s.values())
    given = {
        "rollout_id": f"g{number // 8:06d}-{number % 8}",
        "attempt": 1,
        "task": "task-0",
        "group": f"g{number // 8:06d}",
        "step": 0,
        "issued_at_s": at_s,
        "last_issued_at_s": at_s,
        "total_s": total_s,
        "parts_s": dict(parts_s),
        "ended_at_s": at_s + total_s,
        "ready_at_s": at_s + total_s,
    }
    return RolloutTime(**(given | more))


def many(
    seed: int, change: Callable[[dict[str, Any], dict[str, float], float], None] | None = None
) -> list[RolloutTime]:
    """A run of 40 steps with 2 groups of 8 each over 10 tasks; lognormal parts."""
    generator = np.random.default_rng(seed)
    rows = []
    for number in range(640):
        step, task = number // 16, (number // 8) % 10
        labels = {
            "task": f"task-{task}",
            "host": f"host-{generator.integers(4)}",
            "image": f"image-{task % 5}",
            "engines": (f"engine-{generator.integers(4)}",),
            "worker": f"worker-{generator.integers(3)}",
            "warm": bool(generator.integers(2)),
            "turns": float(generator.integers(5, 30)),
            "boot_tries": 1.0,
        }
        parts = {part: float(seconds * generator.lognormal(0, 0.3)) for part, seconds in TYPICAL_S.items()}
        at_s = 1000.0 + STEP_S * step + float(generator.uniform(0, STEP_S))
        if change is not None:
            change(labels, parts, at_s)
        rows.append(row(number, parts, at_s=at_s, task=labels["task"], step=step, labels=labels))
    return rows


def only(report: Any) -> tuple[str, str | None]:
    cause = max(report.causes, key=lambda cause: cause.excess_s)
    return cause.part, None if cause.factor is None else cause.factor.text()
