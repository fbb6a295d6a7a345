"""The rollouts that are running, or that were when the run was killed, the oldest against its cohort first.

Invariants:
- The ledger says which training attempts have not ended; the workers' files say in which part they were last seen. An
  attempt in no file was issued, and no worker has written about it yet.
- Of a run that nobody drives, or of a worker that has not written for `SILENT_S`, rollouts are interrupted.
- The cohort is the ended attempts at the same task; with fewer than `FEW`, all ended attempts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.record.files.running import (
    EVERY_S,
    FEW,
    FOLDER,
    STUCK,
    RunningFile,
    RunningRollout,
    newest,
    read_running,
)
from headrace.buffer.audit.evidence import rows_of
from headrace.buffer.audit.joined_rows import JoinedRows

SILENT_S: Final = 10 * EVERY_S
"""Time without a word of a worker after which its rollouts count as interrupted."""
DISPATCH: Final = "dispatch"
"""Part of an attempt that no worker has written about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Typical:
    """Seconds of `n` ended attempts: median and 95th percentile."""

    n: int
    p50_s: float
    p95_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """An attempt that has not ended: its part when it was last seen, for how long, and its age so far."""

    rollout_id: str
    attempt: int
    task: str
    purpose: str
    part: str
    part_s: float
    age_s: float
    host: str
    worker: str
    node: str
    interrupted: bool
    typical: Typical | None

    @property
    def ratio(self) -> float:
        """Age over the cohort's 95th percentile; 0 without a cohort."""
        return self.age_s / self.typical.p95_s if self.typical and self.typical.p95_s else 0.0

    @property
    def stuck(self) -> bool:
        return self.ratio > STUCK

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"stuck": self.stuck}

    def line(self) -> str:
        """Return the attempt as a line for a terminal."""
        typical = "no cohort yet"
        if self.typical is not None:
            typical = f"typical {self.typical.p50_s:.1f} s, p95 {self.typical.p95_s:.1f} s of {self.typical.n}"
        state = "interrupted, last in" if self.interrupted else "in"
        parts = [
            f"{self.rollout_id}.{self.attempt}",
            f"{self.age_s:.1f} s",
            f"({typical})",
            f"{state} {self.part} for {self.part_s:.1f} s",
            *([f"host {self.host}"] if self.host else []),
            *([f"worker {self.worker}"] if self.worker else []),
            f"task {self.task}",
            *(["evaluation"] if self.purpose == "evaluation" else []),
            *(["STUCK"] if self.stuck else []),
        ]
        return "  ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohorts:
    """Typical times by task, and of all attempts."""

    by_task: Mapping[str, Typical]
    every: Typical | None

    @classmethod
    def of(cls, seconds: Mapping[str, list[float]]) -> Cohorts:
        """Return the cohorts of ended attempts' seconds by task."""
        by_task = {task: _typical(values) for task, values in seconds.items() if len(values) >= FEW}
        every = [value for values in seconds.values() for value in values]
        return cls(by_task=by_task, every=_typical(every) if every else None)

    def get(self, task: str) -> Typical | None:
        return self.by_task.get(task, self.every)


def _typical(values: list[float]) -> Typical:
    p50, p95 = np.quantile(values, (0.5, 0.95))
    return Typical(n=len(values), p50_s=float(p50), p95_s=float(p95))


def in_flight(directory: RunDirectory, *, driven: bool, now_s: float | None = None) -> list[InFlight]:
    """Return the attempts of a run that have not ended. `driven` says whether a process drives the run. Raises
    LedgerRefused."""
    now_s = time.time() if now_s is None else now_s
    files = read_running(directory.path / FOLDER)
    seen, latest = newest(files), {file.worker: file for file in files}
    with rows_of(directory.path) as rows:
        issued, evaluated, cohorts = read_attempts(rows)
    found = []
    for key, (task, issued_s) in issued.items():
        file, known = seen.pop(key, (None, None))
        found.append(_row(key, task, issued_s, file, known, cohorts, driven=driven, now_s=now_s))
    for key, (file, known) in seen.items():
        # Evaluations enter the ledger when they end; training attempts in no row have ended.
        if known.purpose == "evaluation" and key not in evaluated:
            row = _row(key, known.task, known.started_s, file, known, cohorts, driven=driven, now_s=now_s)
            # What a living worker has written last is what it runs.
            if row.interrupted or file is latest[file.worker]:
                found.append(row)
    return sorted(found, key=lambda each: (-each.ratio, -each.age_s))


def _row(
    key: tuple[str, int],
    task: str,
    issued_s: float,
    file: RunningFile | None,
    known: RunningRollout | None,
    cohorts: Cohorts,
    *,
    driven: bool,
    now_s: float,
) -> InFlight:
    interrupted = not driven or (file is not None and now_s - file.written_s > SILENT_S)
    # Of an interrupted attempt, the last word counts; of others, the age until now. Clocks of hosts may disagree.
    last_s = now_s if not interrupted else (issued_s if file is None else file.written_s)
    return InFlight(
        rollout_id=key[0],
        attempt=key[1],
        task=task,
        purpose=known.purpose if known else "train",
        part=known.part if known else DISPATCH,
        part_s=max(0.0, last_s - (known.part_since_s if known else issued_s)),
        age_s=max(0.0, last_s - issued_s),
        host=known.host if known else "",
        worker=file.worker if file else "",
        node=file.node if file else "",
        interrupted=interrupted,
        typical=cohorts.get(task),
    )


def read_attempts(tables: JoinedRows) -> tuple[dict[tuple[str, int], tuple[str, float]], set[tuple[str, int]], Cohorts]:
    """Return the attempts that have not ended (task and time of issue), the ended evaluations, and the cohorts."""
    tasks = dict(tables.select("groups", ["group_id", "task_id"]))
    groups = dict(tables.select("rollouts", ["rollout_id", "group_id"]))
    issued: dict[tuple[str, int], tuple[str, float]] = {}
    seconds: dict[str, list[float]] = {}
    columns = ["rollout_id", "attempt", "issued_at_s", "ended_at_s", "reward"]
    for rollout_id, attempt, issued_s, ended_s, reward in tables.select("attempts", columns):
        task = tasks.get(groups.get(rollout_id, ""), "")
        if ended_s is None:
            issued[rollout_id, attempt] = task, issued_s
        elif reward is not None:
            seconds.setdefault(task, []).append(ended_s - issued_s)
    evaluated = set(tables.select("evaluations", ["rollout_id", "attempt"]))
    return issued, evaluated, Cohorts.of(seconds)
