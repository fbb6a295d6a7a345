"""The commands `headrace ledger repair`, which repairs the ledger of a stopped run, and `headrace ledger unpark`, which
releases tasks that a run no longer issues.

Invariant: the run's lock is taken before the ledger is read, so that a repair never changes a live run.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.actors.cli.output import Json, say, write_json
from headrace.actors.run.exit_codes import EXIT_DIRTY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headrace.actors.record.files.run_directory import RunDirectory
    from headrace.actors.run.config import RunConfig
    from headrace.buffer.core.records import BatchRecord
    from headrace.buffer.ledger.store import ReplayStore
    from headrace.buffer.trajectories.types import RolloutId

HELD = "held"
"""Name of the batch that the learner held."""
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run that is not live.")]


def repair(
    run_dir: Run,
    drop_batch: Annotated[
        str,
        typer.Option(
            metavar="BATCH",
            help="Drop a batch for good, such as b000007, so that a run whose learner cannot train it can be resumed; "
            "`held` for the one that the learner held.",
        ),
    ] = "",
    retry_lost: Annotated[
        bool, typer.Option("--retry-lost", help="Reissue the rollouts that `ledger verify` reports as lost.")
    ] = False,
    json: Json = None,
) -> None:
    """Repair the ledger of a run that is not live; exit code 3 if rollouts remain lost."""
    if bool(drop_batch) == retry_lost:
        raise typer.BadParameter("name one repair: --drop-batch BATCH or --retry-lost")
    if retry_lost:
        _retry_lost(run_dir, json)
    else:
        _drop_batch(run_dir, "" if drop_batch == HELD else drop_batch, json)


def _drop_batch(run_dir: Path, batch: str, json: Path | None) -> None:
    from headrace.actors.run.launch import reopen
    from headrace.buffer.trajectories.types import BatchId

    async def drop() -> BatchRecord:
        async with idle_store(*reopen(run_dir)) as store:
            return await store.operators.drop_batch(BatchId(batch) if batch else None)

    dropped = asyncio.run(drop())
    members = [{"rollout_id": member.rollout_id, "attempt": member.attempt} for member in dropped.members]
    write_json({"batch_id": dropped.batch_id, "version": str(dropped.version), "members": members}, json)
    say(
        f"dropped {dropped.batch_id}: its {len(dropped.members)} rollouts will not be trained; "
        f"continue with `headrace resume {run_dir}`"
    )


def _retry_lost(run_dir: Path, json: Path | None) -> None:
    from headrace.actors.run.launch import reopen
    from headrace.buffer.audit.evidence import streamed
    from headrace.buffer.audit.verify import lost_rollouts, verify
    from headrace.policies.learners.checkpoints import usable_checkpoint

    config, directory = reopen(run_dir)

    async def retry() -> tuple[RolloutId, ...]:
        async with idle_store(config, directory) as store:
            with streamed(directory.path) as evidence:
                lost = lost_rollouts(evidence)
            return (
                await store.operators.retry_lost(lost, usable_checkpoint(directory.checkpoints).checkpoint)
                if lost
                else ()
            )

    again = asyncio.run(retry())
    left = verify(directory.path)
    write_json({"issued_again": again, "lost": left.lost, "problems": left.problems}, json)
    say(f"{len(again)} rollouts get a new attempt; {left.lost} are still lost")
    if left.lost:
        say(f"restore the missing files, e.g. from a copy of the run: {left.problems[0]}")
        raise typer.Exit(EXIT_DIRTY)
    say(f"continue with `headrace resume {run_dir}`")


@asynccontextmanager
async def idle_store(config: RunConfig, directory: RunDirectory) -> AsyncIterator[ReplayStore]:
    """Open the store of a run that is not live. Raises RunExists, LedgerRefused."""
    from headrace.actors.run.launch import sole_driver
    from headrace.buffer.audit.evidence import has_begun
    from headrace.buffer.errors import LedgerRefused
    from headrace.buffer.ledger.store import ReplayStore
    from headrace.buffer.tasks.task import load_tasks

    with sole_driver(directory):
        if not has_begun(directory.path):
            raise LedgerRefused(f"{directory.path}: the ledger of this run is empty, so there is nothing to repair")
        opening = ReplayStore.open(
            directory.path,
            config.buffer,
            load_tasks(directory.train_tasks),
            run_id=directory.run_id(),
            seed=config.service.seed,
            sources=config.mix(),
        )
        async with await opening as store:
            yield store


def unpark(
    run_dir: Run,
    tasks: Annotated[list[str] | None, typer.Argument(metavar="[TASK]...", help="Ids of parked tasks.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Release all parked tasks.")] = False,
    json: Json = None,
) -> None:
    """Issue parked tasks again from the next resume on, with a cleared failure record."""
    from headrace.actors.run.launch import reopen

    if bool(tasks) == every:
        raise typer.BadParameter("name the tasks to release, or give --all (`headrace status RUN --parked` lists them)")

    async def release() -> tuple[str, ...]:
        async with idle_store(*reopen(run_dir)) as store:
            return await store.operators.unpark(tasks or None)

    released = asyncio.run(release())
    write_json({"released": released}, json)
    say(f"{len(released)} tasks are released; continue with `headrace resume {run_dir}`")
