"""The cost of pushes for generation: throughput of the quickstart's model with a push every 10 s, relative to that
without pushes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benches.push.testbed import PushTestbed, open_testbed
from headrace.policies.push.contract import PushConfig, PushReport

MODEL = Path(__file__).resolve().parents[3] / "scripts" / "models" / "tiny"
AGENTS = 64
TURN_TOKENS = 128
WINDOW_S = 10.0
ROUNDS = 8
ENGINES = 2


def measure_overlap(folder: Path) -> dict[str, Any]:
    """Return `overlap_throughput_ratio`: throughput in a window with a push in two waves, relative to that in the
    preceding window without a push, as the median over the rounds; and the same with one wave, and with drained turns.
    The learner computes nothing meanwhile."""
    folder.mkdir(exist_ok=True)
    return asyncio.run(_measure(folder))


async def _measure(folder: Path) -> dict[str, Any]:
    figures: dict[str, Any] = {"window_s": WINDOW_S, "rounds": ROUNDS}
    async with (
        open_testbed(MODEL, folder, engines=ENGINES, max_running=AGENTS, max_context=512) as testbed,
        testbed.busy(AGENTS, TURN_TOKENS),
    ):
        await testbed.until_in_flight(AGENTS // 2)
        await testbed.push(PushConfig())
        for key, way in WAYS.items():
            figures |= await _compare(testbed, key, way)
    return figures


async def _compare(
    testbed: PushTestbed, key: str, way: Callable[[PushTestbed], Awaitable[PushReport]]
) -> dict[str, Any]:
    ratios, reports, without = [], [], []
    for _ in range(ROUNDS):
        plain, _none = await window(testbed, None)
        pushed, report = await window(testbed, way)
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


async def window(
    testbed: PushTestbed, way: Callable[[PushTestbed], Awaitable[PushReport]] | None
) -> tuple[float, PushReport | None]:
    """Return the tokens per second of one window, which begins with the push and lasts at least as long as it."""
    before, started_s = testbed.sampled_tokens, time.monotonic()
    report = None if way is None else await way(testbed)
    await asyncio.sleep(max(0.0, started_s + WINDOW_S - time.monotonic()))
    return (testbed.sampled_tokens - before) / (time.monotonic() - started_s), report


async def _two_waves(testbed: PushTestbed) -> PushReport:
    return await testbed.push(PushConfig(wave_size=1))


async def _one_wave(testbed: PushTestbed) -> PushReport:
    return await testbed.push(PushConfig(wave_size=ENGINES))


async def _drained(testbed: PushTestbed) -> PushReport:
    """Push as other frameworks do: admit no new turns, let the running ones end, then push."""
    for engine in testbed.engines:
        testbed.pool.close_gate(engine.engine_id, 10 * WINDOW_S)
    for engine in testbed.engines:
        while True:
            load = await engine.load()
            if not load.running and not load.waiting:
                break
    return await testbed.push(PushConfig(wave_size=ENGINES))


WAYS: Mapping[str, Callable[[PushTestbed], Awaitable[PushReport]]] = {
    "overlap": _two_waves,
    "one_wave": _one_wave,
    "drain": _drained,
}
