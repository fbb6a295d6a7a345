"""The figures of the tracing bench.

Invariants:
- Everything is measured in alternated pairs of one invocation: a short quickstart over Ray, two gateways side by side,
  and simulated rollouts over Ray.
- Tracing is what a run has by default: spans of all processes, to compressed files. Only the comparison of collectors
  exports them.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benches.gateway.engine import ScriptedEngine
from benches.gateway.load import AT_ONCE, Bench
from benches.gateway.model import write_model
from benches.gateway.workload import answers
from benches.load import OBJECT_STORE_BYTES, Loaded, load_plan, run_load
from benches.rollout_costs import measure as measure_rollouts
from benches.rollout_costs import service_ms, service_ratio
from benches.tracing.collector import collector
from benches.tracing.pairs import Pairs, alternated
from benches.tracing.span import measure_span
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.runtime.actors.runtime import RayRuntime, start_local_ray, stop_local_ray
from headrace.actors.telemetry.spans.store import FOLDER, SpanFolder
from headrace.serve.tracing import span_names
from headrace.serve.tracing.telemetry import TelemetryConfig

PARTS: Final = ("span", "quickstart", "gateway", "collector")
BOUNDS: Final = {
    "span_us": 60.0,
    "span_ms_per_rollout": 1.5,
    "cpu_overhead": 0.08,
    "gateway_cpu_overhead": 0.05,
    "bytes_per_turn": 250.0,
    "collector_down_ratio": 1.05,
}
"""Largest value of each figure."""
PAIRS: Final = {"quickstart": 1, "gateway": 4, "collector": 1}
"""Pairs by default, for all parts to end within five minutes on two idle cores. One pair of runs says little: for a
figure to rely on, ask for more."""
WARM_UP: Final = 64
ROLLOUTS: Final = 200
SIMULATED: Final = 256
TURN_S: Final = 0.1
QUICK_AGENTS: Final = 10


def measure(parts: tuple[str, ...], quickstart: Path, *, pairs: int | None, quick: bool) -> dict[str, Any]:
    """Measure the parts, each in `pairs` (None: `PAIRS`). `quick` measures fewer rollouts and turns in each pair.
    Raises MeasurementBroken."""
    measured: dict[str, Callable[[Path, int], dict[str, Any]]] = {
        "span": lambda *_: measure_span(),
        "quickstart": lambda folder, number: quickstart_cost(
            folder, quickstart, pairs=number, rollouts=ROLLOUTS // 4 if quick else ROLLOUTS
        ),
        "gateway": lambda folder, number: asyncio.run(
            gateway_cost(folder, pairs=number, agents=QUICK_AGENTS if quick else AT_ONCE)
        ),
        "collector": lambda folder, number: collector_ratio(folder, pairs=number),
    }
    figures: dict[str, Any] = {"quick": quick}
    for part in parts:
        number, began_s = pairs or PAIRS.get(part, 1), time.monotonic()
        with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
            figures |= measured[part](Path(folder), number)
        figures |= {f"{part}_pairs": number, f"{part}_took_s": time.monotonic() - began_s}
    if "span_us" in figures and "quickstart_spans" in figures:
        stored = figures["quickstart_spans"]
        figures["span_ms_per_rollout"] = figures["span_us"] * stored["spans"] / stored["rollouts"] / 1000
    return figures


def misses(figures: dict[str, Any]) -> list[str]:
    """Return the figures that are out of bounds."""
    return [name for name, bound in BOUNDS.items() if figures.get(name, bound) > bound]


def quickstart_cost(folder: Path, recipe: Path, *, pairs: int, rollouts: int) -> dict[str, Any]:
    """Compare the CPU of the service's processes per rollout of a short quickstart, over that of its sandboxes, and
    measure what its spans take."""
    compared, per_rollout, stored = Pairs(), Pairs(), {}
    for number, on in enumerate(alternated(pairs)):
        directory = RunDirectory(path=folder / f"run-{number}")
        overrides = (f"telemetry.enabled={str(on).lower()}",)
        found = measure_rollouts(directory, recipe, rollouts=rollouts, warm_up=WARM_UP, overrides=overrides)
        compared.add(service_ratio(found), on=on)
        per_rollout.add(service_ms(found), on=on)
        if on:
            stored = stored_spans(directory.path / FOLDER)
    return {
        "cpu_overhead": compared.overhead,
        "off_spread": compared.off_spread,
        "quickstart_service_over_sandboxes": compared.to_json(),
        "quickstart_service_ms_per_rollout": per_rollout.to_json(),
        "quickstart_spans": stored,
    }


async def gateway_cost(folder: Path, *, pairs: int, agents: int) -> dict[str, Any]:
    """Compare two gateways under agent-sized turns, and measure what the spans of a turn take."""
    scripted = answers(write_model(folder / "model"))
    async with ScriptedEngine(scripted) as engine:
        compared = Pairs()
        async for cpu_ms, on in Bench(folder / "model", engine).alternated(
            alternated(pairs), folder / "spans", agents=agents
        ):
            compared.add(cpu_ms, on=on)
    stored = stored_spans(folder / "spans")
    return {
        "gateway_cpu_overhead": compared.overhead,
        "gateway_off_spread": compared.off_spread,
        "bytes_per_turn": stored["bytes_per_turn"],
        "gateway_cpu_ms_per_turn": compared.to_json(),
        "gateway_spans": stored,
    }


def collector_ratio(folder: Path, *, pairs: int) -> dict[str, Any]:
    """Compare the time of simulated steps with a stopped collector to that with a running one. The observer sends what
    it sends by default: work that only a running collector gets would hide what a stopped one costs."""
    compared = Pairs()
    for number, stopped in enumerate(alternated(pairs)):
        with collector(stopped=stopped) as url:
            loaded = simulated_run(folder / str(number), TelemetryConfig(otlp_endpoint=url))
        compared.add(loaded.wall_s, on=stopped)
    return {
        "collector_down_ratio": compared.ratio,
        "collector_up_spread": compared.off_spread,
        "collector_wall_s": compared.to_json(),
    }


def simulated_run(folder: Path, telemetry: TelemetryConfig) -> Loaded:
    """Run `SIMULATED` rollouts over Ray, all of them at once."""
    directory = RunDirectory(path=folder)
    plan = load_plan(rollouts=SIMULATED, in_flight=SIMULATED, turn_s=TURN_S)
    start_local_ray("bench", object_store_bytes=OBJECT_STORE_BYTES)
    try:
        return asyncio.run(run_load(plan, RayRuntime(), directory, idle_s=0.0, telemetry=telemetry))
    finally:
        stop_local_ray()


def stored_spans(folder: Path) -> dict[str, float]:
    """Return the size of the stored span files, and what a turn, and a span, takes of it."""
    spans = turns = rollouts = 0
    for span in SpanFolder(folder).spans():
        spans += 1
        turns += span["name"] == span_names.TURN
        rollouts += span["name"] == span_names.ROLLOUT
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {
        "bytes": size,
        "spans": spans,
        "turns": turns,
        "rollouts": rollouts,
        "bytes_per_turn": size / turns,
        "bytes_per_span": size / spans,
    }
