"""The parts of the push bench; `scripts/bench push` prints their figures as one object.

Invariants:
- A part is one function that takes an empty folder and returns its own keys; parts are independent of each other.
- Compared measurements alternate within one part, on warmed-up processes, and are reported as medians.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benches.push.overlap import measure_overlap
from benches.push.plain_broadcast import open_pair
from benches.push.stall import measure_stall
from benches.push.testbed import open_testbed, write_random_model
from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.policies.push.contract import PushConfig, PushReport

BYTES_BY_KEY: Mapping[str, int] = {"": 10**9, "_100mb": 10**8}
ROUNDS = 7


def measure(parts: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the figures of the named parts. Raises KeyError for an unknown part."""
    figures: dict[str, Any] = {}
    for part in parts:
        place = folder / part
        place.mkdir()
        figures |= PARTS[part](place)
    return figures


def measure_bandwidth(folder: Path) -> dict[str, Any]:
    """Measure pushes of 1 GB and 100 MB into one engine (sender, HTTP, gloo, storage, swap: the push's phase
    `broadcast`), and plain broadcasts of the same buckets that are copied into parameters. `bandwidth_ratio` is the
    push's bandwidth relative to the plain broadcast's. The seconds of all phases are medians too; `load` includes the
    file's SHA-256, and `verify` the engine's own checksums."""
    figures: dict[str, Any] = {"rounds": ROUNDS, "bucket_bytes": PushConfig().bucket_bytes}
    for key, total_bytes in BYTES_BY_KEY.items():
        measured = asyncio.run(compare(folder / f"model{key}", total_bytes))
        figures |= {f"{name}{key}": value for name, value in measured.items()}
    return figures


async def compare(folder: Path, total_bytes: int) -> dict[str, Any]:
    """Alternate pushes and plain broadcasts; the first round of each is a warm-up."""
    path = write_random_model(folder / "model", total_bytes)
    async with AsyncExitStack() as stack:
        testbed = await stack.enter_async_context(
            open_testbed(path.parent, folder, engines=1, max_running=1, max_context=64)
        )
        pair = await stack.enter_async_context(open_pair(path, folder / "meeting", PushConfig().bucket_bytes))
        rounds = [(await testbed.push(PushConfig()), await pair.round_s()) for _ in range(ROUNDS + 1)][1:]
    path.unlink()
    return figures_of([report for report, _ in rounds], [plain_s for _, plain_s in rounds])


def figures_of(reports: Sequence[PushReport], plain_s: Sequence[float]) -> dict[str, Any]:
    size_gb = reports[0].sent_bytes / 1e9
    push_s = statistics.median(report.seconds["broadcast"] for report in reports)
    seconds = {phase: statistics.median(report.seconds[phase] for report in reports) for phase in reports[0].seconds}
    load_s = statistics.median(report.total_s - sum(report.seconds.values()) for report in reports)
    return {
        "bandwidth_ratio": statistics.median(plain_s) / push_s,
        "gb": size_gb,
        "push_gb_per_s": size_gb / push_s,
        "plain_gb_per_s": size_gb / statistics.median(plain_s),
        "push_s": [report.seconds["broadcast"] for report in reports],
        "plain_s": list(plain_s),
        "seconds": {"load": load_s, **seconds},
    }


PARTS: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "bandwidth": measure_bandwidth,
    "stall": measure_stall,
    "overlap": measure_overlap,
}
