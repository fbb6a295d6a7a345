"""`headrace ledger drop-batch` and `retry-lost`: what an operator may change in the ledger of a run that has ended.

Invariant: the run's lock is held from before the ledger is read, so that nothing is changed under a run that is driven.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.actors.cli.output import EXIT_DIRTY, Json, say, write_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headrace.actors.record.run_directory import RunDirectory
    from headrace.actors.run.config import RunConfig
    from headrace.buffer.core.records import BatchRecord
    from headrace.buffer.ledger.store import ReplayStore
    from headrace.buffer.types import BatchId, RolloutId

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run that nobody drives.")]


def drop_batch(
    run_dir: Run,
    batch: Annotated[
        str, typer.Argument(metavar="[BATCH]", help="Id, e.g. b000007; the one that the learner held when left out.")
    ] = "",
    json: Json = None,
) -> None:
    """Leave a batch out for good, so that a run whose learner cannot train it goes on with the next resume."""
    from headrace.actors.run.launch import reopen
    from headrace.buffer.types import BatchId

    config, directory = reopen(run_dir)
    dropped = asyncio.run(_drop_batch(config, directory, BatchId(batch) if batch else None))
    if json is not None:
        members = [{"rollout_id": member.rollout_id, "attempt": member.attempt} for member in dropped.members]
        write_json({"batch_id": dropped.batch_id, "version": str(dropped.version), "members": members}, json)
    say(
        f"dropped {dropped.batch_id}: its {len(dropped.members)} rollouts are not trained; "
        f"go on with `headrace resume {run_dir}`"
    )


def retry_lost(run_dir: Run, json: Json = None) -> None:
    """Issue the rollouts again that `ledger verify` reports as lost; exit code 3 when some are lost still."""
    from headrace.actors.run.launch import reopen
    from headrace.buffer.audit.verify import verify

    config, directory = reopen(run_dir)
    again = asyncio.run(_retry_lost(config, directory))
    left = verify(directory.path)
    if json is not None:
        write_json({"issued_again": again, "lost": left.lost, "problems": left.problems}, json)
    say(f"{len(again)} rollouts get a new attempt; {left.lost} are lost still")
    if left.lost:
        say(f"put back what is missing, e.g. from a copy of the run: {left.problems[0]}")
        raise typer.Exit(EXIT_DIRTY)
    say(f"go on with `headrace resume {run_dir}`")


async def _drop_batch(config: RunConfig, directory: RunDirectory, batch_id: BatchId | None) -> BatchRecord:
    async with idle_store(config, directory) as store:
        return await store.operators.drop_batch(batch_id)


async def _retry_lost(config: RunConfig, directory: RunDirectory) -> tuple[RolloutId, ...]:
    from headrace.buffer.audit.evidence import streamed
    from headrace.buffer.audit.verify import lost_rollouts
    from headrace.policies.learners.checkpoints import usable_checkpoint

    async with idle_store(config, directory) as store:
        with streamed(directory.path) as evidence:
            lost = lost_rollouts(evidence)
        return (
            await store.operators.retry_lost(lost, usable_checkpoint(directory.checkpoints).checkpoint) if lost else ()
        )


@asynccontextmanager
async def idle_store(config: RunConfig, directory: RunDirectory) -> AsyncIterator[ReplayStore]:
    """The store of a run that nobody drives. Raises RunExists, LedgerRefused."""
    from headrace.actors.run.launch import sole_driver
    from headrace.buffer.audit.evidence import has_begun
    from headrace.buffer.errors import LedgerRefused
    from headrace.buffer.ledger.store import ReplayStore
    from headrace.buffer.tasks import load_tasks

    with sole_driver(directory):
        if not has_begun(directory.path):
            raise LedgerRefused(f"{directory.path}: nothing was recorded yet; there is nothing to change")
        opening = ReplayStore.open(
            directory.path,
            config.buffer,
            load_tasks(directory.train_tasks),
            run_id=directory.run_id(),
            seed=config.service.seed,
        )
        async with await opening as store:
            yield store
