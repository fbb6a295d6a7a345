"""What `headrace resume` says before it goes on, and keeps in the run directory as `resumes/<epoch>.json`.

Invariants:
- It is told under the run's lock and before any process starts. A run without a ledger has nothing to tell; a ledger
  of an older version is migrated first.
- A run that has lost something does not go on: what is missing would end it later, again and again.
- Damaged checkpoints are kept aside first, and named. A run whose ledger recorded a checkpoint does not begin from the
  start policy unless it is asked to (`--from-start`): that undoes every step.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import orjson

from headrace.buffer.audit.evidence import has_begun, streamed
from headrace.buffer.audit.resume_report import resume_report
from headrace.buffer.audit.verify import lost_rollouts
from headrace.buffer.errors import BatchUntrainable, LedgerRefused
from headrace.buffer.ledger.ledger import bring_up_to_date
from headrace.buffer.ledger.schema import SCHEMA_VERSION
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.primitives.durable_files import replace_file
from headrace.buffer.tasks import load_tasks
from headrace.policies.errors import CheckpointUnreadable
from headrace.policies.learners.checkpoints import list_checkpoints, set_aside, usable_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.actors.record.run_directory import RunDirectory
    from headrace.actors.run.config import RunConfig
    from headrace.buffer.audit.resume_report import ResumeReport
    from headrace.policies.learners.checkpoints import SetAside


class Resuming:
    """One resume of one run; `from_start` undoes all its steps, `retry_batch` begins to count the tries of its batches
    anew."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        *,
        say: Callable[[str], object],
        from_start: bool = False,
        retry_batch: bool = False,
    ) -> None:
        self._config, self._directory, self._say = config, directory, say
        self._from_start, self._retry_batch = from_start, retry_batch
        self.told: dict[str, Any] | None = None
        """The report as JSON, once told."""

    def tell(self) -> None:
        """Read, say and keep the report. Raises LedgerRefused, LedgerMismatch, BatchUntrainable, OSError."""
        if not has_begun(self._directory.path):
            self._say("nothing was recorded yet: the run begins")
            return
        self._bring_up_to_date()
        if self._from_start:
            # Before any checkpoint gets another name: where this fails, the run goes on from the newest.
            asyncio.run(self._refuse_lost_history())
        aside = self._set_aside()
        for one in aside:
            self._say(f"CHECKPOINT {one.name} IS LEFT OUT: {one.reason}; it is kept as {one.kept_as}")
        report = resume_report(
            self._directory.path,
            max_staleness=self._config.buffer.max_staleness,
            batch_tries=self._config.buffer.batch_tries,
        )
        self._refuse_without_checkpoint(report, aside)
        for line in report.lines():
            self._say(line)
        self.told = report.to_json() | {"checkpoints_left_out": {one.name: one.reason for one in aside}}
        path = self._directory.path / "resumes" / f"{report.epoch}.json"
        path.parent.mkdir(exist_ok=True)
        replace_file(path, orjson.dumps(self.told, option=orjson.OPT_INDENT_2) + b"\n")
        if report.untrainable and not self._retry_batch:
            raise BatchUntrainable(report.untrainable.replace("RUN", str(self._directory.path)))
        if self._retry_batch:
            asyncio.run(self._try_again())
        if self._from_start:
            again = asyncio.run(self._begin_again())
            self._say(f"all steps are undone; {again} rollouts whose trajectories are gone get a new attempt")
        elif report.lost:
            path = self._directory.path
            raise LedgerRefused(
                f"{path}: {report.lost} rollouts are lost ({'; '.join(report.problems[:2])}): put back what is "
                f"missing, e.g. from a copy of the run, or issue them again with `headrace ledger retry-lost {path}`"
            )

    def _set_aside(self) -> tuple[SetAside, ...]:
        """Checkpoints that the learner shall not find: damaged ones, and from the start all of them."""
        root = self._directory.checkpoints
        try:
            damaged = usable_checkpoint(root).set_aside
        except CheckpointUnreadable as error:
            raise LedgerRefused(str(error)) from error
        if not self._from_start:
            return damaged
        return (*damaged, *(set_aside(path, "the run begins again (--from-start)") for path in list_checkpoints(root)))

    def _refuse_without_checkpoint(self, report: ResumeReport, aside: tuple[SetAside, ...]) -> None:
        root, path = self._directory.checkpoints, self._directory.path
        if report.checkpoint_is_foreign:
            raise LedgerRefused(
                f"{root / str(report.checkpoint)} is of another run, of an undone line, or newer than this ledger: "
                "move it elsewhere to resume from the one before, or put back the ledger that belongs to it"
            )
        if report.recorded is None or report.recorded == report.checkpoint or self._from_start:
            return
        if report.checkpoint is None:
            why = f" ({aside[0].name}: {aside[0].reason})" if aside else ""
            raise LedgerRefused(
                f"{root} holds no checkpoint that can be used{why}, but the ledger recorded {report.recorded}: put the "
                f"folder back, e.g. from a copy of the run, or undo all steps: `headrace resume {path} --from-start`"
            )
        if all(one.name != report.recorded for one in aside):
            self._say(f"CHECKPOINT {report.recorded} IS MISSING: the run goes on from {report.checkpoint}")

    async def _open_store(self) -> ReplayStore:
        return await ReplayStore.open(
            self._directory.path,
            self._config.buffer,
            load_tasks(self._directory.train_tasks),
            run_id=self._directory.identity.read_text(),
            seed=self._config.service.seed,
        )

    async def _try_again(self) -> None:
        async with await self._open_store() as store:
            await store.operators.retry_batches()

    async def _refuse_lost_history(self) -> None:
        async with await self._open_store() as store:
            await store.operators.refuse_lost_history(None)

    async def _begin_again(self) -> int:
        """Undo all steps in the ledger; returns how many rollouts must be run again."""
        async with await self._open_store() as store:
            await store.open_epoch(None, from_start=True)
            with streamed(self._directory.path) as evidence:
                lost = lost_rollouts(evidence)
            return len(await store.operators.retry_lost(lost, None))

    def _bring_up_to_date(self) -> None:
        """Before the report: to read a ledger of an older version as it lies takes as long as to migrate it."""
        began_s = time.monotonic()
        schema = bring_up_to_date(self._directory.path)
        if schema is not None:
            took_s = time.monotonic() - began_s
            self._say(f"migrated the ledger from schema {schema} to {SCHEMA_VERSION} in {took_s:.1f} s")
