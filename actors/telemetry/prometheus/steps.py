"""Counts of the optimizer steps in the ledger of a run."""

from __future__ import annotations

from itertools import islice
from typing import Final

import orjson

from headrace.actors.telemetry.prometheus import table
from headrace.actors.telemetry.prometheus.counts import Counts
from headrace.actors.telemetry.prometheus.ledger_rows import IN_JSON, json_of
from headrace.buffer.audit.joined_rows import JoinedRows

STEPS_AT_ONCE: Final = 512


class StepCounts:
    """Adds steps to `counts`. `newest_s` is the time of the newest commit (Unix seconds), and `max_staleness` the bound
    in force then; both are None before the first one."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        for outcome in ("updated", "skipped"):
            counts.add(table.STEPS, outcome, by=0)
        counts.add(table.STEPS_ROLLED_BACK, by=0)
        self.next_commit = 1
        self.newest_s: float | None = None
        self.max_staleness: int | None = None

    def update(self, rows: JoinedRows) -> None:
        """Count the steps that were committed since the last call."""
        opened = sorted(at_s for (at_s,) in rows.select("epochs", ("opened_at_s",)))
        columns = ("sequence", "batch_id", "skipped", "committed_at_s", "rolled_back_by", "max_staleness")
        commits = iter(sorted(rows.select("commits", columns, where="sequence >= ?", values=(self.next_commit,))))
        while some := list(islice(commits, STEPS_AT_ONCE)):
            ids = json_of({commit[1] for commit in some})
            leases = {
                batch_id: (leased_s, members)
                for batch_id, leased_s, members in rows.select(
                    "batches", ("batch_id", "leased_at_s", "members"), where=f"batch_id {IN_JSON}", values=(ids,)
                )
            }
            for sequence, batch_id, skipped, committed_s, rolled_back_by, bound in some:
                self._counts.add(table.STEPS, "skipped" if skipped else "updated")
                self._counts.add(table.STEPS_ROLLED_BACK, by=float(rolled_back_by is not None))
                # A lost archive has taken the batch with it.
                leased_s, members = leases.get(batch_id, (committed_s, "[]"))
                for _, _, staleness in orjson.loads(members):
                    self._counts.observe(table.TRAINED_STALENESS, value=staleness)
                # Between two incarnations of the learner nobody waits.
                opened_s = max((at_s for at_s in opened if at_s <= leased_s), default=leased_s)
                free_s = max(self.newest_s or opened_s, opened_s)
                begun_s = max(leased_s, free_s)
                self._counts.add(table.LEARNER_S, "waiting", by=begun_s - free_s)
                self._counts.add(table.LEARNER_S, "stepping", by=max(0.0, committed_s - begun_s))
                self.newest_s, self.max_staleness, self.next_commit = committed_s, bound, sequence + 1
