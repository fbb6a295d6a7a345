"""Reads the ledger of a run when it has changed.

Invariants:
- Files are only read, in one transaction.
- What an error leaves half counted is dropped: the next reading counts everything again.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from pathlib import Path
from typing import Final

from headrace.actors.telemetry.prometheus import table
from headrace.actors.telemetry.prometheus.counts import Counts
from headrace.actors.telemetry.prometheus.ledger_counts import LedgerCounts
from headrace.buffer.audit.evidence import begin_with_archive, reading
from headrace.buffer.audit.joined_rows import JoinedRows
from headrace.buffer.core.epochs import EPOCHS_RESERVED
from headrace.buffer.core.records import RolloutState
from headrace.buffer.core.source_names import SEPARATOR
from headrace.buffer.errors import LedgerRefused
from headrace.buffer.ledger.archive import ARCHIVE

SETTLED_S: Final = 1.0
"""Age from which a file's time of change proves that it has not changed again: clocks of file systems tick in
milliseconds."""


def state_of(ledger: LedgerCounts, database: sqlite3.Connection, rows: JoinedRows) -> Counts:
    """Return what the ledger says of this moment, and its own counters."""
    counts = Counts()
    for state in RolloutState:
        counts.set(table.ROLLOUTS, state, to=ledger.states[state])
    events = {
        name: value
        for name, value in sorted(database.execute("SELECT name, value FROM main.counters"))
        if SEPARATOR not in name and name != EPOCHS_RESERVED
    }
    for name, value in events.items():
        counts.add(table.EVENTS, name, by=value)
    counts.add(table.EVICTIONS, "reissued", by=events.get("rollouts_reissued", 0))
    counts.add(table.EVICTIONS, "ended", by=events.get("rollouts_evicted", 0))
    outages = "SELECT component, count(*), sum(ended_at_s IS NULL) FROM main.outages GROUP BY component"
    for component, number, still_open in database.execute(outages):
        counts.add(table.OUTAGES, component, by=number)
        counts.set(table.OUTAGE_OPEN, component, to=float(still_open > 0))
    saved_s = (at_s for (at_s,) in rows.select("checkpoints", ("max(recorded_at_s)",)) if at_s is not None)
    newest = (
        (table.NEWEST_CHECKPOINT, max(saved_s, default=None)),
        (table.NEWEST_END, ledger.newest_end_s),
        (table.NEWEST_COMMIT, ledger.steps.newest_s),
        (table.MAX_STALENESS, ledger.steps.max_staleness),
    )
    for metric, value in newest:
        if value is not None:
            counts.set(metric, to=value)
    return counts


def file_stamps(run_dir: Path) -> tuple[object, ...] | None:
    """Return what changes with the ledger's files, or None if one may change without showing it."""
    stamps: list[object] = []
    for name in ("ledger.db", "ledger.db-wal", ARCHIVE, f"{ARCHIVE}-wal"):
        try:
            found = (run_dir / name).stat()
        except OSError:
            stamps.append(name)
            continue
        if abs(time.time() - found.st_mtime) < SETTLED_S:
            return None
        stamps.append((found.st_ino, found.st_size, found.st_mtime_ns))
    return tuple(stamps)


logger = logging.getLogger(__name__)


class LedgerReader:
    """Reader of the ledger in a folder. After `update`, `counts` has what happened so far and `state` what is now; both
    are of the same moment. `counts` is None while the ledger cannot be read."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.counts: LedgerCounts | None = None
        self.state = Counts()
        self._stamps: tuple[object, ...] | None = None
        self._told = ""

    def update(self) -> None:
        """Read what is new. A ledger that cannot be read is named in the log, once."""
        stamps = file_stamps(self._run_dir)
        if stamps is not None and stamps == self._stamps:
            return
        counts, self.counts, self._stamps = self.counts, None, None
        try:
            with reading(self._run_dir) as (database, archive):
                attached, damage = begin_with_archive(database, archive)
                # What a lost archive had may come back.
                if counts is None or self._told or not counts.is_continued_by(database):
                    counts = LedgerCounts(database)
                rows = JoinedRows(database, attached=attached)
                counts.update(database, rows)
                self.state = state_of(counts, database, rows)
        except (LedgerRefused, sqlite3.DatabaseError) as error:
            damage = [str(error)]
        else:
            self.counts, self._stamps = counts, stamps
        told = "; ".join(damage)
        if told and told != self._told:
            logger.warning("metrics of %s lack what the ledger does not give: %s", self._run_dir, told)
        self._told = told
