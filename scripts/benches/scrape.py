"""The cost of `/metrics`: time and memory of a process that renders it, with a ledger of many rollouts.

Invariants:
- The process that is measured does nothing else; it reads a copy of the ledger.
- `changed_s` is with a ledger that was written to since, so the file is read again, without new rollouts.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import orjson
import psutil

from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.simulation.virtual.plan import SimulationPlan
from headrace.actors.simulation.virtual.simulate import run_plan
from headrace.actors.telemetry.prometheus.exposition import Exposition
from headrace.buffer.ledger.archive import ARCHIVE

REPEATS: Final = 9
MB: Final = 1e6
OPENMETRICS: Final = "application/openmetrics-text"


def measure(folder: Path, *, rollouts: int, run_dir: Path | None) -> dict[str, Any]:
    """Return the figures for a run, or for a simulated one of about that many rollouts, copied to `folder`."""
    copy = folder / "run"
    if run_dir is None:
        plan = SimulationPlan()
        run_plan(plan.model_copy(update={"steps": max(1, rollouts // plan.batch_size)}), copy)
    else:
        copy.mkdir()
        for name in ("ledger.db", "ledger.db-wal", ARCHIVE, f"{ARCHIVE}-wal", "metrics.jsonl"):
            if (run_dir / name).exists():
                shutil.copy(run_dir / name, copy / name)
    command = [sys.executable, "-m", "benches.scrape", str(copy)]
    figures: dict[str, Any] = orjson.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return figures


def render(run_dir: Path) -> dict[str, Any]:
    """Return the figures of this process."""
    exposition = Exposition(RunDirectory.at(run_dir))
    own = psutil.Process()
    cpu_s, began_s = time.process_time(), time.perf_counter()
    text, _ = exposition.render(OPENMETRICS)
    first_s, first_cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    changed, unchanged = [], []
    for _ in range(REPEATS):
        os.utime(run_dir / "ledger.db")
        began_s = time.perf_counter()
        exposition.render(OPENMETRICS)
        changed.append(time.perf_counter() - began_s)
    # Another process could still write within the tick of the file system's clock.
    os.utime(run_dir / "ledger.db", (0, 0))
    exposition.render(OPENMETRICS)
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        exposition.render(OPENMETRICS)
        unchanged.append(time.perf_counter() - began_s)
    attempts = sum(
        sample.value
        for family in exposition.collect()
        for sample in family.samples
        if sample.name == "headrace_attempts_total"
    )
    return {
        "attempts": int(attempts),
        "first_s": first_s,
        "first_cpu_s": first_cpu_s,
        "changed_s": statistics.median(changed),
        "unchanged_s": statistics.median(unchanged),
        "bytes": len(text),
        "memory_mb": own.memory_info().rss / MB,
    }


if __name__ == "__main__":
    sys.stdout.buffer.write(orjson.dumps(render(Path(sys.argv[1]))))
