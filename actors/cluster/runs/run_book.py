"""What is known of the runs of a cluster: their table, the quotas of owners, and who waits for events."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from headrace.actors.cluster.runs.grants import Rights
from headrace.actors.cluster.runs.layout import ClusterTerms
from headrace.actors.cluster.runs.quotas import Quotas, load_quotas
from headrace.actors.cluster.runs.records import ActualState, Caller, RunId, RunRecord
from headrace.actors.cluster.runs.table import RunsTable
from headrace.actors.errors import ConfigError, RunRefused
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.config import RunConfig
from headrace.buffer.tasks.task import load_tasks

logger = logging.getLogger(__name__)


class RunBook:
    """The table of runs, and what every question and every driver reads of it. `table` is opened by the actor."""

    table: RunsTable

    def __init__(self, terms: ClusterTerms, quotas: Path | None) -> None:
        self.terms = terms
        self._quotas_file, self._quotas_problem = quotas, ""
        # A file that is wrong from the beginning is refused.
        self._last_quotas = Quotas() if quotas is None else load_quotas(quotas)
        self.changed = asyncio.Event()

    def quotas(self) -> Quotas:
        """Return the quotas in the file, or those that were read last while it cannot be read."""
        if self._quotas_file is not None:
            try:
                self._last_quotas = load_quotas(self._quotas_file)
            except ConfigError as error:
                if str(error) != self._quotas_problem:
                    logger.error("the quotas stay as they are: %s", error)
                self._quotas_problem = str(error)
        return self._last_quotas

    def rights(self, record: RunRecord, caller: Caller) -> Rights:
        return Rights(owner=record.owner, caller=caller, quotas=self.quotas())

    def check(self, record: RunRecord, caller: Caller, config: RunConfig) -> None:
        """Check that a caller could have submitted a run as it is now. Blocks. Raises RoleTooSmall."""
        rights, directory = self.rights(record, caller), self.terms.directory(record.run_id)
        rights.check_recipe(config)
        if not caller.may_name_code:
            rights.check_tasks((*load_tasks(directory.train_tasks), *load_tasks(directory.heldout_tasks)))

    def tell(self) -> None:
        """Wake everyone who waits for events."""
        self.changed.set()
        self.changed = asyncio.Event()

    def with_service(self) -> list[RunRecord]:
        """Return the runs that may have actors on nodes."""
        return [record for record in self.table.runs() if record.is_live and record.actual is not ActualState.WAITING]

    def directory(self, run_id: RunId) -> RunDirectory:
        return self.terms.directory(self.table.get(run_id).run_id)

    def live(self, run_id: RunId) -> RunDirectory:
        record = self.table.get(run_id)
        if not record.is_live:
            raise RunRefused(f"run {run_id} is {record.actual}: resume it first")
        return self.directory(run_id)
