"""Preparation of a resumed run: damaged checkpoints, and the report `resumes/<epoch>.json`.

Invariants:
- The preparation holds the run's lock and ends before any process starts. A run without a ledger needs none.
- A run with lost rollouts is not resumed, because the lost rollouts would later end it again, each time that it is
  resumed.
- Damaged checkpoints are renamed first, and reported. A run whose ledger recorded a checkpoint restarts from the
  initial policy only with `--from-start`, which undoes every step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import orjson

from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.config import RunConfig
from headrace.buffer.audit.evidence import has_begun, streamed
from headrace.buffer.audit.resume_report import ResumeReport, resume_report
from headrace.buffer.audit.verify import lost_rollouts
from headrace.buffer.errors import BatchUntrainable, LedgerRefused
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.primitives.durable_files import replace_file
from headrace.buffer.tasks.task import load_tasks
from headrace.policies.errors import CheckpointUnreadable
from headrace.policies.learners.checkpoint_retention import forget, kept_checkpoints
from headrace.policies.learners.checkpoints import (
    SetAside,
    list_checkpoints,
    refuse_mismatch,
    set_aside,
    usable_checkpoint,
)
from headrace.policies.learners.config import trained_as

R = TypeVar("R")


class ResumePreparation:
    """Preparation of one resume. `from_start` undoes all steps of the run; `retry_batch` resets the number of failed
    tries of each batch."""

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
        self.report: dict[str, Any] | None = None
        """The report as JSON; None before `prepare` has run."""

    def prepare(self) -> None:
        """Compute, print and save the report. Raises LedgerRefused, LedgerMismatch, BatchUntrainable, OSError."""
        if not has_begun(self._directory.path):
            self._say("nothing was recorded yet: the run starts from the beginning")
            return
        if self._from_start:
            # Checked before any checkpoint is renamed: after a refusal, the run can still resume from the newest one.
            self._with_store(lambda store: store.operators.refuse_lost_history(None))
        aside = self._set_aside()
        for one in aside:
            self._say(f"CHECKPOINT {one.name} IS LEFT OUT: {one.reason}; it is kept as {one.kept_as}")
        report = self._report()
        while report.checkpoint_is_late and not self._from_start:
            late = set_aside(
                self._directory.checkpoints / str(report.checkpoint),
                "a replaced learner finished it after a newer epoch had been opened",
            )
            self._say(f"CHECKPOINT {late.name} IS LEFT OUT: {late.reason}; it is kept as {late.kept_as}")
            aside = (*self._set_aside(), late, *aside)
            report = self._report()
        self._refuse_without_checkpoint(report, aside)
        for line in report.lines():
            self._say(line)
        self.report = report.to_json() | {"checkpoints_left_out": {one.name: one.reason for one in aside}}
        path = self._directory.path / "resumes" / f"{report.epoch}.json"
        path.parent.mkdir(exist_ok=True)
        replace_file(path, orjson.dumps(self.report, option=orjson.OPT_INDENT_2) + b"\n")
        if report.untrainable and not self._retry_batch:
            raise BatchUntrainable(report.untrainable.replace("RUN", str(self._directory.path)))
        if self._retry_batch:
            self._with_store(lambda store: store.operators.retry_batches())
        if self._from_start:
            again = self._with_store(self._undo_all_steps)
            self._say(f"all steps are undone; {again} rollouts without a trajectory get a new attempt")
        elif report.lost:
            path = self._directory.path
            raise LedgerRefused(
                f"{path}: {report.lost} rollouts are lost ({'; '.join(report.problems[:2])}): restore the missing "
                f"files, e.g. from a copy of the run, or issue the rollouts again with `headrace ledger repair "
                f"{path} --retry-lost`"
            )

    def _report(self) -> ResumeReport:
        return resume_report(
            self._directory.path,
            max_staleness=self._config.buffer.max_staleness,
            batch_tries=self._config.buffer.batch_tries,
        )

    def _set_aside(self) -> tuple[SetAside, ...]:
        """Rename the checkpoints that the learner must not use: damaged ones, and all of them with `--from-start`."""
        root = self._directory.checkpoints
        try:
            usable = usable_checkpoint(root)
            if usable.checkpoint is not None and not self._from_start:
                refuse_mismatch(Path(usable.checkpoint.path), trained_as(self._config.learner))
        except CheckpointUnreadable as error:
            raise LedgerRefused(str(error)) from error
        if not self._from_start:
            return usable.set_aside
        forget(root)
        undone = (*kept_checkpoints(root), *list_checkpoints(root))
        return (*usable.set_aside, *(set_aside(path, "the run restarts (--from-start)") for path in undone))

    def _refuse_without_checkpoint(self, report: ResumeReport, aside: tuple[SetAside, ...]) -> None:
        root, path = self._directory.checkpoints, self._directory.path
        if report.checkpoint_is_foreign:
            raise LedgerRefused(
                f"{root / str(report.checkpoint)} belongs to another run or an undone branch, or is newer than this "
                "ledger: move it elsewhere to resume from the previous checkpoint, or restore the ledger that belongs "
                "to it"
            )
        if report.recorded is None or report.recorded == report.checkpoint or self._from_start:
            return
        if report.checkpoint is None:
            why = f" ({aside[0].name}: {aside[0].reason})" if aside else ""
            raise LedgerRefused(
                f"{root} contains no usable checkpoint{why}, but the ledger recorded {report.recorded}: restore the "
                f"folder, e.g. from a copy of the run, or undo all steps: `headrace resume {path} --from-start`"
            )
        if all(one.name != report.recorded for one in aside):
            self._say(f"CHECKPOINT {report.recorded} IS MISSING: the run resumes from {report.checkpoint}")

    def _with_store(self, change: Callable[[ReplayStore], Awaitable[R]]) -> R:
        """Open the ledger, apply `change` and close the ledger again."""

        async def run() -> R:
            async with await ReplayStore.open(
                self._directory.path,
                self._config.buffer,
                load_tasks(self._directory.train_tasks),
                run_id=self._directory.identity.read_text(),
                seed=self._config.service.seed,
                sources=self._config.mix(),
            ) as store:
                return await change(store)

        return asyncio.run(run())

    async def _undo_all_steps(self, store: ReplayStore) -> int:
        """Undo all steps in the ledger; return the number of rollouts that must run again."""
        await store.open_epoch(None, from_start=True)
        with streamed(self._directory.path) as evidence:
            lost = lost_rollouts(evidence)
        return len(await store.operators.retry_lost(lost, None))
