"""What pushes cost the generation of the quickstart's model: throughput with a push in every 10 s over that without."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benches.push.testbed import open_floor
from headrace.policies.push.contract import PushConfig

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from benches.push.testbed import Floor
    from headrace.policies.push.contract import PushReport

MODEL = Path(__file__).resolve().parents[3] / "scripts" / "models" / "tiny"
AGENTS = 64
TURN_TOKENS = 128
WINDOW_S = 10.0
ROUNDS = 8
ENGINES = 2


def measure_overlap(folder: Path) -> dict[str, Any]:
    """`overlap_throughput_ratio`: throughput in a window with a push in two waves over that in the window without
    before it, the median of the rounds; and the same with one wave, and when turns are drained first. The learner
    computes nothing meanwhile."""
    folder.mkdir(exist_ok=True)
    return asyncio.run(_measure(folder))


async def _measure(folder: Path) -> dict[str, Any]:
    figures: dict[str, Any] = {"window_s": WINDOW_S, "rounds": ROUNDS}
    async with (
        open_floor(MODEL, folder, engines=ENGINES, max_running=AGENTS, max_context=512) as floor,
        floor.busy(AGENTS, TURN_TOKENS),
    ):
        await floor.until_in_flight(AGENTS // 2)
        await floor.push(PushConfig())
        for key, way in WAYS.items():
            figures |= await _compare(floor, key, way)
    return figures


async def _compare(floor: Floor, key: str, way: Callable[[Floor], Awaitable[PushReport]]) -> dict[str, Any]:
    ratios, reports, without = [], [], []
    for _ in range(ROUNDS):
        plain, _none = await window(floor, None)
        pushed, report = await window(floor, way)
        ratios.append(pushed / plain)
        without.append(plain)
        reports += [report] if report else []
    parts = [part for report in reports for part in report.engines]
    return {
        f"{key}_throughput_ratio": median(ratios),
        f"{key}_ratios": ratios,
        f"{key}_tokens_per_s_without": median(without),
        f"{key}_push_s": median(report.total_s for report in reports),
        f"{key}_gate_s": median(part.gate_s for part in parts),
        f"{key}_requests_retracted": sum(part.retracted for part in parts) / len(reports),
        f"{key}_tokens_recomputed": sum(part.recomputed_tokens for part in parts) / len(reports),
    }


async def window(floor: Floor, way: Callable[[Floor], Awaitable[PushReport]] | None) -> tuple[float, PushReport | None]:
    """Tokens sampled per second of one window, which begins with the push and is as long as that at least."""
    before, started_s = floor.sampled_tokens, time.monotonic()
    report = None if way is None else await way(floor)
    await asyncio.sleep(max(0.0, started_s + WINDOW_S - time.monotonic()))
    return (floor.sampled_tokens - before) / (time.monotonic() - started_s), report


async def _two_waves(floor: Floor) -> PushReport:
    return await floor.push(PushConfig(wave_size=1))


async def _one_wave(floor: Floor) -> PushReport:
    return await floor.push(PushConfig(wave_size=ENGINES))


async def _drained(floor: Floor) -> PushReport:
    """What others do: nothing new begins, what runs ends, then the push."""
    for engine in floor.engines:
        floor.pool.close_gate(engine.engine_id, 10 * WINDOW_S)
    for engine in floor.engines:
        while True:
            load = await engine.load()
            if not load.running and not load.waiting:
                break
    return await floor.push(PushConfig(wave_size=ENGINES))


WAYS: Mapping[str, Callable[[Floor], Awaitable[PushReport]]] = {
    "overlap": _two_waves,
    "one_wave": _one_wave,
    "drain": _drained,
}
