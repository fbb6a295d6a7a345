"""Verdicts on the slow rollouts of a run, computed where they disturb nobody.

Invariants:
- Verdicts on a large run take seconds and hundreds of megabytes: a process of its own computes them, at low priority,
  and ends with its parent. Small runs are read in the thread that asks.
- At most `MAX_VERDICTS` verdicts are kept, the costliest; `left_out` counts the others.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from headrace.actors.errors import RunError
from headrace.actors.telemetry.slow.cohort import Cohorts, Typical
from headrace.actors.telemetry.slow.reading import times_with
from headrace.actors.telemetry.slow.rows import RolloutTime, RunTimes
from headrace.actors.telemetry.slow.verdicts import SlowReport, explain
from headrace.buffer.errors import ReplayError
from headrace.policies.processes.parent_death import die_with_parent

RolloutInCohort = tuple[RolloutTime, dict[str, Typical]]

LARGE_BYTES: Final = 16 << 20
"""Size of a ledger with its archive above which another process reads them."""
MAX_VERDICTS: Final = 2_000
PATIENCE_S: Final = 300.0
NICE: Final = 10
# Not `-m`: classes of a module that runs as `__main__` cannot be unpickled elsewhere.
_PROGRAM: Final = f"import sys; from {__name__} import main; main(int(sys.argv[1]), *sys.argv[2:])"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """Verdicts of a run. `causes` counts the rollouts by how their last attempt ended."""

    report: SlowReport
    slow: int
    left_out: int
    causes: Mapping[str, int]


def explained(run_dir: Path) -> Explained:
    """Return the verdicts. Raises LedgerRefused, RunError."""
    found = _apart("explain", run_dir) if _is_large(run_dir) else explain_here(run_dir)
    assert isinstance(found, Explained)
    return found


def time_of(run_dir: Path, rollout_id: str) -> RolloutInCohort | None:
    """Return the times of a rollout, and what is typical of each part in its cohort; None if it has no attempt yet.
    Raises LedgerRefused, RunError."""
    found = _apart("time", run_dir, rollout_id) if _is_large(run_dir) else time_here(run_dir, rollout_id)
    assert found is None or isinstance(found, tuple)
    return found


def explain_here(run_dir: Path) -> Explained:
    """Do the work of `explained` in this process."""
    times = _times(run_dir)
    report = explain(times)
    return Explained(
        report=replace(report, verdicts=report.verdicts[:MAX_VERDICTS]),
        slow=len(report.verdicts),
        left_out=max(0, len(report.verdicts) - MAX_VERDICTS),
        causes=dict(Counter(row.cause for row in times.rows).most_common()),
    )


def time_here(run_dir: Path, rollout_id: str) -> RolloutInCohort | None:
    """Do the work of `time_of` in this process."""
    times = _times(run_dir, rollout_id)
    place = next((place for place, row in enumerate(times.rows) if row.rollout_id == rollout_id), None)
    return None if place is None else (times.rows[place], Cohorts(times.rows).typical_parts(place))


def _times(run_dir: Path, rollout_id: str = "") -> RunTimes:
    """Return the times of training rollouts, or of those of evaluations if `rollout_id` is one."""
    try:
        return times_with(rollout_id, run_dir)
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"a record of this run is damaged, so there are no verdicts: {error!r}") from error


def _is_large(run_dir: Path) -> bool:
    sizes = (path.stat().st_size for name in ("ledger.db", "archive.db") if (path := run_dir / name).is_file())
    return sum(sizes) > LARGE_BYTES


def _apart(*arguments: object) -> Any:
    """Return the result of `main` in a process of its own. Raises what it raised, and RunError if it died."""
    command = [sys.executable, "-c", _PROGRAM, str(os.getpid()), *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"verdicts on this run took more than {PATIENCE_S:.0f} s: use `headrace trace slow`") from error
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2][:300]
        raise RunError(f"the process that explains this run ended with {done.returncode}: {reason}")
    result = pickle.loads(done.stdout)
    if isinstance(result, Exception):
        raise result
    return result


def main(parent_pid: int, task: str, run_dir: str, *rollout: str) -> None:
    """Write the result, or the error that is one for users, to standard output."""
    die_with_parent(parent_pid)
    os.nice(NICE)
    try:
        path = Path(run_dir)
        result: Any = explain_here(path) if task == "explain" else time_here(path, *rollout)
    except (RunError, ReplayError, OSError) as error:
        result = error.with_traceback(None)
    sys.stdout.buffer.write(pickle.dumps(result))
