"""Reads the ledger of a run when it has changed.

Invariants:
- Files are only read, in one transaction.
- What an error leaves half counted is dropped: the next reading counts everything again.
"""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

from headrace.actors.telemetry.prometheus.counts import Counts
from headrace.actors.telemetry.prometheus.ledger_counts import LedgerCounts
from headrace.actors.telemetry.prometheus.ledger_state import file_stamps, state_of
from headrace.buffer.audit.evidence import begin_with_archive, reading
from headrace.buffer.audit.joined_rows import JoinedRows
from headrace.buffer.errors import LedgerRefused

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
