"""`scripts/bench slow`: the time and memory of `headrace trace slow` over a long run.

Invariants:
- The run is simulated, and then repeated until it is long enough: each copy of its closed groups has ids, versions and
  times of its own, so a cohort has the rollouts of near copies, as in a run over the same tasks again and again.
- What is timed is the command as a user starts it, the start of Python included, in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any, Final

import orjson

from headrace.actors.simulation.virtual.plan import make_plan
from headrace.actors.simulation.virtual.simulate import run_plan

MOST_S: Final = 2.0
STEPS: Final = 11
"""Simulated steps; a checkpoint closes the groups of the first ten."""
REPEATS: Final = 5
PLAN: Final[Mapping[str, Any]] = {
    "steps": STEPS,
    "save_every": STEPS - 1,
    "hosts": 4,
    "images": 4,
    "engines": 4,
    "tools": ["bash", "edit", "search"],
    "boot_s": 8.0,
    "evaluate_s": 20.0,
    "evaluate_every": 5,
    "heldout": 64,
    "slowdowns": [{"kind": "host", "name": "host-1", "factor": 60.0, "share": 0.3}],
}
COPIED: Final = ("groups", "rollouts", "attempts", "batches", "commits", "evaluations")
_ID: Final = re.compile(r"^([gb])(\d+)")


def measure(folder: Path, *, rollouts: int, turns: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Generate a run and return the figures of the command about it."""
    began_s = time.monotonic()
    run_dir = folder / "run"
    written = write_long_run(run_dir, rollouts=rollouts, turns=turns)
    say(f"{written} rollouts written in {time.monotonic() - began_s:.0f} s")
    command = [sys.executable, "-c", "from headrace.actors.cli.app import main; main()", "trace", "slow", str(run_dir)]
    seconds, processor_s, peaks_mb, report = [], [], [], {}
    for _ in range(REPEATS):
        before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        output = subprocess.run([*command, "--json", "-"], check=True, capture_output=True, timeout=600).stdout
        seconds.append(time.monotonic() - began_s)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        peaks_mb.append(after.ru_maxrss / 1024)
        report = json.loads(output)
    return {
        "slow_query_s": median(seconds),
        "slow_query_max_s": max(seconds),
        "slow_query_cpu_s": median(processor_s),
        "slow_query_peak_mb": max(peaks_mb),
        "rollouts": report["rollouts"],
        "turns": turns,
        "slow": report["slow"],
        "ledger_mb": sum((run_dir / name).stat().st_size for name in ("ledger.db", "archive.db")) / 1e6,
        "load": os.getloadavg()[0],
    }


def misses(figures: Mapping[str, Any]) -> list[str]:
    """Return the figures that miss their bounds."""
    taken_s = figures["slow_query_s"]
    return [f"slow_query_s {taken_s:.2f} is above {MOST_S:g}"] if taken_s > MOST_S else []


def write_long_run(run_dir: Path, *, rollouts: int, turns: int) -> int:
    """Simulate a run of this many turns a rollout, and repeat its closed groups up to this many rollouts. Return the
    number of rollouts."""
    run_plan(make_plan("swe64", {**PLAN, "turns": turns}), run_dir)
    shutil.rmtree(run_dir / "trajectories")
    with closing(sqlite3.connect(run_dir / "archive.db")) as archive:
        tables = {name: _rows(archive, name) for name in COPIED}
        members = tables["rollouts"]
        copies = -(-rollouts // len(members))
        groups = 1 + max(row["ordinal"] for row in tables["groups"])
        steps = max(int(row["version"].rpartition(".")[2]) for row in tables["commits"])
        ends = [row["committed_at_s"] for row in tables["commits"]]
        span_s = (max(ends) - min(ends)) * (1 + 1 / len(ends))
        for copy in range(1, copies):
            # Earlier copies would need negative versions, so the simulated end of the run stays where it is, in time.
            shift = _Shift(groups=copy * groups, steps=copy * steps, seconds=copy * span_s, copy=copy)
            for name, rows in tables.items():
                some = [shift.row(row) for row in rows]
                columns = list(some[0]) if some else []
                marks = ", ".join("?" for _ in columns)
                archive.executemany(
                    f"INSERT INTO {name} ({', '.join(columns)}) VALUES ({marks})", [tuple(row.values()) for row in some]
                )
        archive.commit()
    with closing(sqlite3.connect(run_dir / "ledger.db")) as ledger:
        # Rows of the archive whose number the ledger has not assigned do not count.
        ledger.execute("UPDATE totals SET value = value + ? WHERE name LIKE 'next_%'", (copies * groups,))
        ledger.commit()
    metrics = (run_dir / "metrics.jsonl").read_bytes().splitlines()
    with (run_dir / "metrics.jsonl").open("ab") as file:
        for copy in range(1, copies):
            for line in metrics:
                record = orjson.loads(line)
                file.write(orjson.dumps(record | {"time_s": record["time_s"] + copy * span_s}) + b"\n")
    return copies * len(members)


def _rows(archive: sqlite3.Connection, table: str) -> list[dict[str, Any]]:
    found = archive.execute(f"SELECT * FROM {table}")
    names = [column[0] for column in found.description]
    return [dict(zip(names, row, strict=True)) for row in found]


class _Shift:
    """Changes of ids, versions and times that make one copy of a row."""

    def __init__(self, *, groups: int, steps: int, seconds: float, copy: int) -> None:
        self._groups, self._steps, self._seconds, self._copy = groups, steps, seconds, copy

    def row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._value(name, value) for name, value in row.items()}

    def _value(self, name: str, value: Any) -> Any:
        if value is None:
            return None
        if name in ("group_id", "batch_id", "rollout_id"):
            return self._id(value)
        if name in ("version", "trained_at"):
            epoch, _, step = value.rpartition(".")
            return f"{epoch}.{int(step) + self._steps}"
        if name.endswith("_at_s"):
            return value + self._seconds
        if name in ("ordinal", "seal_order", "sequence"):
            return value + self._groups
        if name == "members":
            return json.dumps([[self._id(rollout), *rest] for rollout, *rest in json.loads(value)])
        return f"{value}-{self._copy}" if name == "tag" else value

    def _id(self, value: str) -> str:
        known = _ID.match(value)
        if known is None:
            return f"{value}-{self._copy}"
        return f"{known[1]}{int(known[2]) + self._groups:07d}{value[known.end() :]}"
