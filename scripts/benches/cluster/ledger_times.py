"""Times of orders and steps of a run, read from its ledger and archive while it is in progress.

Times are Unix seconds of the control node. Steps that a resume has undone count: they were made at that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from headrace.buffer.audit.evidence import read_only

FILES = ("ledger.db", "archive.db")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How soon a run went on after a fault, in seconds since its beginning; None if it did not. An order counts if its
    result has arrived."""

    next_order_s: float | None
    next_step_s: float | None
    longest_gap_s: float | None
    """Longest time between two steps from the last one before the fault to the newest one."""


def recovery(orders: Sequence[float], steps: Sequence[float], began_s: float) -> Recovery:
    """Return the recovery from a fault that began at this time, by the times of answered orders and of steps."""
    since = [time_s for time_s in sorted(steps) if time_s > began_s]
    before = max((time_s for time_s in steps if time_s <= began_s), default=began_s)
    return Recovery(
        next_order_s=min((time_s - began_s for time_s in orders if time_s > began_s), default=None),
        next_step_s=since[0] - began_s if since else None,
        longest_gap_s=max((after - first for first, after in pairwise([before, *since])), default=None),
    )


def read_steps(run_dir: Path) -> list[float]:
    """Return the times of all steps, in order."""
    return sorted(_times(run_dir, "SELECT committed_at_s FROM commits"))


def read_orders(run_dir: Path, *, after_s: float = 0.0) -> list[float]:
    """Return the times of the orders after this time whose results have arrived, in order."""
    query = "SELECT issued_at_s FROM attempts WHERE offered = 1 AND issued_at_s > ?"
    return sorted(_times(run_dir, query, after_s))


def wall_s(run_dir: Path) -> float:
    """Return the time from the first order of a run to its last step."""
    return read_steps(run_dir)[-1] - read_orders(run_dir)[0]


def _times(run_dir: Path, query: str, *parameters: float) -> set[float]:
    """Return the times in both files; a row that is moved in between is in both."""
    found: set[float] = set()
    for path in (run_dir / name for name in FILES):
        if path.exists():
            with closing(read_only(path)) as database:
                found.update(time_s for (time_s,) in database.execute(query, parameters))
    return found
