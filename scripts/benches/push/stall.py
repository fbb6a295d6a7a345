"""The time that an engine's gate is closed for a push of 1 GB by group and by disk, with 64 turns in flight and an
agent that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benches.push.testbed import open_testbed, write_random_model
from headrace.policies.push.contract import PushConfig, PushReport

TOTAL_BYTES = 10**9
TURNS = 64
DECODED_AT_ONCE = 16
"""Limit on concurrently decoded turns, because a step of this model is slow on one core."""
TURN_TOKENS = 96
ROUNDS = 5


def measure_stall(folder: Path) -> dict[str, Any]:
    """Return `stall_ratio`, the time that a gate is closed divided by transfer time plus pause (in which the engine
    finishes its step), as the median over engines and rounds in two waves; and the parts of this ratio. The same for
    pushes by disk, with the prefix `disk_`, which alternate with those by group in the same engines; and
    `disk_stall_ratio_to_group`, the time of a gate by disk divided by that by group."""
    path = write_random_model(folder / "model", TOTAL_BYTES)
    by_group, by_disk = asyncio.run(_measure(path.parent, folder))
    disk = {f"disk_{key}": value for key, value in figures_of(by_disk).items()}
    figures = figures_of(by_group) | disk
    return figures | {"disk_stall_ratio_to_group": figures["disk_gate_s"] / figures["gate_s"]}


def figures_of(reports: Sequence[PushReport]) -> dict[str, Any]:
    parts = [part for report in reports for part in report.engines]
    return {
        "stall_ratio": median(part.gate_s / (part.transfer_s + part.pause_s) for part in parts),
        "gate_s": median(part.gate_s for part in parts),
        "transfer_s": median(part.transfer_s for part in parts),
        "pause_s": median(part.pause_s for part in parts),
        "turns_in_flight": [sum(part.in_flight for part in report.engines) for report in reports],
        "stall_seconds": {phase: median(report.seconds[phase] for report in reports) for phase in reports[0].seconds},
    }


async def _measure(model: Path, folder: Path) -> tuple[list[PushReport], list[PushReport]]:
    limits = {"phase_timeout_s": 60.0, "transfer_timeout_s": 120.0, "read_timeout_s": 120.0, "gate_lease_s": 600.0}
    ways = [PushConfig.model_validate({**limits, "transport": transport}) for transport in ("group", "disk")]
    reports: tuple[list[PushReport], list[PushReport]] = ([], [])
    async with (
        open_testbed(model, folder, engines=2, max_running=DECODED_AT_ONCE, max_context=128) as testbed,
        testbed.busy(TURNS, TURN_TOKENS),
    ):
        for _ in range(ROUNDS + 1):
            for way, found in zip(ways, reports, strict=True):
                await testbed.until_in_flight(TURNS - 4)
                found.append(await testbed.push(way))
    # The first push of each kind touches memory that is not mapped yet.
    return reports[0][1:], reports[1][1:]
