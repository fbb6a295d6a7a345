"""What operators change in the ledger of a run that has ended: batches that no learner can train leave, results that
are lost are made again; both are in the journal, and the ledger stays one that `verify` finds clean."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sqlite3
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.actors.cli import app as cli
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.launch import RunRequest, prepare, sole_driver
from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.audit.resume_report import resume_report
from headrace.buffer.audit.verify import lost_rollouts, verify
from headrace.buffer.core.records import OperatorAction, RolloutState
from headrace.buffer.errors import LeaseError, LedgerMismatch
from headrace.buffer.ledger.ledger import Ledger
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.tasks.task import write_tasks
from headrace.buffer.trajectories.types import BatchId, CheckpointRef, RolloutId, StepReport
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.checkpoints import (
    Manifest,
    SteppedBatch,
    publish,
    stage,
    usable_checkpoint,
    write_manifest,
)
from support import replay_cases as cases

TESTS = Path(__file__).parents[1]
FIRST = PolicyVersion(1, 0)
RECIPE = TESTS.parent / "scripts" / "recipes" / "simulated.toml"


@dataclass
class Run:
    """A run of the ledger alone: two steps, a checkpoint after the first, a third batch leased, results waiting."""

    run_dir: Path
    store: ReplayStore
    checkpoint: CheckpointRef


async def open_store(run_dir: Path) -> ReplayStore:
    return await ReplayStore.open(run_dir, cases.SMALL, cases.tasks(), run_id="run", seed=3, clock=lambda: 100.0)


async def step(store: ReplayStore, version: PolicyVersion):
    batch = await store.take(version, version.epoch, timeout_s=0.0)
    after = PolicyVersion(version.epoch, version.step + 1)
    await store.commit(batch.lease, StepReport(batch_id=batch.lease.batch_id, version=after, skipped=False))
    return batch, after


async def begin(run_dir: Path) -> Run:
    store = await open_store(run_dir)
    version = await store.open_epoch(None)
    orders = await store.issue(1000, version)
    await store.offer_many([cases.result(order, version, reward=float(n % 2)) for n, order in enumerate(orders)])
    batch, version = await step(store, version)
    members = tuple((item.rollout_id, item.attempt) for item in batch.items)
    stepped = SteppedBatch(batch_id=batch.lease.batch_id, members=members, skipped=False)
    chain = store.status().chain
    staged = stage(run_dir / "checkpoints", version)
    write_manifest(staged, Manifest(version=version, previous_chain="", chain=chain, batches=(stepped,)))
    publish(staged, version)
    checkpoint = usable_checkpoint(run_dir / "checkpoints").checkpoint
    assert checkpoint is not None
    await store.checkpointed(checkpoint)
    _, version = await step(store, version)
    assert await store.take(version, 1, timeout_s=0.0) is not None
    orders = await store.issue(3, version)
    await store.offer_many([cases.result(order, version, reward=float(n)) for n, order in enumerate(orders)])
    return Run(run_dir, store, checkpoint)


@pytest.fixture
async def run(tmp_path: Path):
    run = await begin(tmp_path / "run")
    yield run
    await run.store.aclose()


async def train(run: Run, steps: int) -> list:
    """A new learner goes on from the checkpoint; what it trained."""
    version = await run.store.open_epoch(run.checkpoint)
    await run.store.keep_in_flight(())
    batches = []
    for _ in range(steps):
        orders = await run.store.issue(1000, version)
        await run.store.offer_many(
            [cases.result(order, version, reward=float(n % 2)) for n, order in enumerate(orders)]
        )
        batch, version = await step(run.store, version)
        batches.append(batch)
    return batches


async def test_the_run_continues_without_a_dropped_batch(run: Run) -> None:
    before = verify(run.run_dir)
    assert (before.leased, before.batches_dropped) == (4, ())
    dropped = await run.store.operators.drop_batch()
    report = verify(run.run_dir)
    assert report.problems == ()
    assert (report.leased, report.filtered, report.lost) == (0, 4, 0)
    assert report.batches_dropped == (dropped.batch_id,) == ("b000003",)
    assert resume_report(run.run_dir, max_staleness=2).batches == ("b000002",)
    trained = await train(run, 3)
    assert [batch.lease.batch_id for batch in trained] == ["b000002", "b000004", "b000005"]
    gone = {member.rollout_id for member in dropped.members}
    assert not gone & {item.rollout_id for batch in trained for item in batch.items}
    report = verify(run.run_dir)
    assert (report.problems, report.steps, report.filtered) == ((), 4, 4)


async def test_a_drop_is_in_the_journal_and_survives_a_restart(run: Run) -> None:
    await run.store.operators.drop_batch()
    await run.store.aclose()
    (entry,) = read_evidence(run.run_dir).interventions
    assert (entry.action, entry.subject, entry.at_s) == (OperatorAction.DROP_BATCH, "b000003", 100.0)
    assert "to be trained at 1.2" in entry.detail
    run.store = await open_store(run.run_dir)
    assert run.store.status().counters["batches_dropped"] == 1
    assert run.store.status().rollouts[RolloutState.FILTERED] == 4
    with pytest.raises(LeaseError, match="held 0 batches"):
        await run.store.operators.drop_batch()


async def test_a_queued_batch_can_be_dropped_by_name(run: Run) -> None:
    await run.store.open_epoch(run.checkpoint)
    with pytest.raises(LeaseError, match=r"held 0 batches .*name the one to drop \(now: b000002, b000003\)"):
        await run.store.operators.drop_batch()
    await run.store.operators.drop_batch(BatchId("b000002"))
    trained = await train(run, 2)
    assert [batch.lease.batch_id for batch in trained] == ["b000003", "b000004"]
    assert verify(run.run_dir).problems == ()


@pytest.mark.parametrize(
    ("batch_id", "says"),
    [
        ("b000001", "b000001 is no open batch"),
        ("b000002", "b000002 is committed"),
        ("b000099", "b000099 is no open batch"),
    ],
)
async def test_a_refused_drop_changes_nothing(run: Run, batch_id: str, says: str) -> None:
    before = read_evidence(run.run_dir)
    with pytest.raises(LeaseError, match=rf"{says}.*now: b000003"):
        await run.store.operators.drop_batch(BatchId(batch_id))
    assert read_evidence(run.run_dir) == before


def change(run_dir: Path, *statements: str) -> None:
    with closing(sqlite3.connect(run_dir / "ledger.db")) as database, database:
        for statement in statements:
            assert database.execute(statement).rowcount > 0


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("DELETE FROM interventions", "b000003 was dropped without an entry"),
        ("UPDATE batches SET state = 'dissolved' WHERE state = 'dropped'", "b000003 was dropped without an entry"),
        ("UPDATE rollouts SET reason = 'no_tokens' WHERE reason = 'batch_dropped'", "was not dropped"),
        ("UPDATE rollouts SET state = 'sealed', batch_id = NULL WHERE reason = 'batch_dropped'", "says filtered"),
    ],
)
async def test_a_drop_that_contradicts_the_journal_is_reported(run: Run, statement: str, problem: str) -> None:
    await run.store.operators.drop_batch()
    change(run.run_dir, statement)
    assert any(problem in line for line in verify(run.run_dir).problems)


NEVER_OFFERED = (
    "UPDATE attempts SET offered = 0, ended_at_s = NULL, cause = NULL, reward = NULL, trainable = 0, solved = 0, "
    "trained = '[]', trajectory_file = NULL WHERE rollout_id = '{}'"
)
"""What the rows say of a result that was acknowledged, and gone with the transaction that failed."""


def some_in(run_dir: Path, state: RolloutState) -> RolloutId:
    found = (rollout.rollout_id for rollout in read_evidence(run_dir).rollouts if rollout.state is state)
    return list(found)[-1]


@pytest.mark.parametrize("state", ["waiting", "sealed", "leased", "trained"])
async def test_a_result_that_was_never_offered_is_lost(run: Run, state: str) -> None:
    if state == "sealed":
        await run.store.open_epoch(run.checkpoint)
    rollout_id = some_in(run.run_dir, RolloutState(state))
    assert verify(run.run_dir).lost == 0
    change(run.run_dir, NEVER_OFFERED.format(rollout_id))
    report = verify(run.run_dir)
    assert report.lost == 1
    assert any(line.startswith(f"{rollout_id} is {state}") for line in report.problems)
    assert resume_report(run.run_dir, max_staleness=2).lost == 1


async def retried(run: Run) -> tuple[RolloutId, ...]:
    """Reopen the store on what the files say, and issue what is lost again."""
    await run.store.aclose()
    run.store = await open_store(run.run_dir)
    return await run.store.operators.retry_lost(lost_rollouts(read_evidence(run.run_dir)), run.checkpoint)


@pytest.mark.parametrize("state", ["waiting", "sealed", "leased", "trained"])
@pytest.mark.parametrize("loss", ["never offered", "no trajectory"])
async def test_lost_rollouts_are_run_again(run: Run, state: str, loss: str) -> None:
    if state == "sealed":
        await run.store.open_epoch(run.checkpoint)
    rollout_id = some_in(run.run_dir, RolloutState(state))
    await run.store.aclose()
    if loss == "never offered":
        change(run.run_dir, NEVER_OFFERED.format(rollout_id))
    else:
        with closing(sqlite3.connect(run.run_dir / "trajectories" / "000001.db")) as database, database:
            database.execute("DELETE FROM trajectories WHERE rollout_id = ?", (rollout_id,))
    assert verify(run.run_dir).lost == 1
    assert await retried(run) == (rollout_id,)
    report = verify(run.run_dir)
    assert (report.lost, report.retried) == (0, 1)
    assert report.problems == ()
    trained = await train(run, 4)
    members = [item for batch in trained for item in batch.items]
    assert [item.attempt for item in members if item.rollout_id == rollout_id] == [2]
    report = verify(run.run_dir)
    assert (report.problems, report.trained, report.trained_twice) == ((), 20, 0)
    (entry,) = read_evidence(run.run_dir).interventions
    assert (entry.action, entry.subject, entry.attempt) == (OperatorAction.RETRY_LOST, rollout_id, 1)


async def test_all_trajectories_can_be_lost(run: Run) -> None:
    await run.store.aclose()
    shutil.rmtree(run.run_dir / "trajectories")
    lost = verify(run.run_dir).lost
    assert lost == 4 + 4 + 2 + 1, "trained since the checkpoint, leased, sealed, waiting"
    assert len(await retried(run)) == lost
    report = verify(run.run_dir)
    assert (report.problems, report.lost, report.retried, report.steps_rolled_back) == ((), 0, lost, 1)
    await train(run, 5)
    report = verify(run.run_dir)
    assert (report.problems, report.steps, report.trained) == ((), 6, 24)


async def test_a_group_with_a_time_dependent_rule_has_no_problems_after_a_retry(tmp_path: Path) -> None:
    """Nobody knows when the lost result came."""
    config = cases.SMALL.model_copy(update={"group_size": 4, "rule": "count(2)", "batch_size": 8})
    run_dir, now = tmp_path / "run", iter(range(100, 1000))
    opening = ReplayStore.open(run_dir, config, cases.tasks(), run_id="run", seed=3, clock=lambda: float(next(now)))
    async with await opening as store:
        version = await store.open_epoch(None)
        for number, order in enumerate(await store.issue(4, version)):
            await store.offer_many([cases.result(order, version, reward=number / 4)])
    assert verify(run_dir).problems == ()
    change(run_dir, NEVER_OFFERED.format("g000000-0"))
    async with await ReplayStore.open(run_dir, config, cases.tasks(), run_id="run", seed=3) as store:
        assert await store.operators.retry_lost(lost_rollouts(read_evidence(run_dir)), None) == ("g000000-0",)
    assert verify(run_dir).problems == ()


async def test_lost_rollouts_in_a_checkpoint_stay_trained(tmp_path: Path) -> None:
    """Its group is still open to others, so that its trajectory is looked for."""
    config = cases.SMALL.model_copy(update={"group_size": 3, "rule": "count(2)", "max_staleness": 4})
    run_dir = tmp_path / "run"
    async with await ReplayStore.open(run_dir, config, cases.tasks(), run_id="run", seed=3) as store:
        version = await store.open_epoch(None)
        orders = await store.issue(6, version)
        await store.offer_many([cases.result(order, version) for order in orders if order.rollout_id[-1] != "2"])
        batch, version = await step(store, version)
        chain = store.status().chain
        ref = CheckpointRef(path="gone", version=version, batch_ids=(batch.lease.batch_id,), chain=chain)
        await store.checkpointed(ref)
        shutil.rmtree(run_dir / "trajectories")
        lost = lost_rollouts(read_evidence(run_dir))
        assert len(lost) == 4
        with pytest.raises(LedgerMismatch, match="put its checkpoints back"):
            await store.operators.retry_lost(lost, None)
        assert await store.operators.retry_lost(lost, ref) == ()
        assert (verify(run_dir).lost, verify(run_dir).retried) == (0, 4)
        await store.open_epoch(None, from_start=True)
        assert verify(run_dir).lost == 4, "they are to be trained again"


@pytest.fixture
def named_run(tmp_path: Path) -> Path:
    """The directory of a run that the command line knows, with nothing recorded yet."""
    _, directory = prepare(RunRequest(recipe=RECIPE, runs_dir=tmp_path, name="run", overrides=()))
    document = json.loads(directory.config.read_bytes())
    document["buffer"] |= cases.SMALL.model_dump(mode="json")
    document["service"]["seed"] = 3
    directory.config.write_text(json.dumps(document))
    write_tasks(directory.train_tasks, cases.tasks())
    directory.identity.write_text("run")
    return directory.path


def headrace(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["headrace", *map(str, arguments)])
    with pytest.raises(SystemExit) as leave:
        cli.main()
    return int(leave.value.code or 0)


async def begin_and_end(run_dir: Path) -> None:
    await (await begin(run_dir)).store.aclose()


def test_repairs_change_a_run_that_has_ended(monkeypatch, capsys, named_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"

    def said(command: str, *options: str) -> dict:
        assert headrace(monkeypatch, "ledger", command, named_run, *options, "--json", out) == 0
        return json.loads(out.read_bytes())

    asyncio.run(begin_and_end(named_run))
    dropped = said("repair", "--drop-batch", "held")
    assert (dropped["batch_id"], len(dropped["members"])) == ("b000003", 4)
    report = said("verify")
    assert (report["batches_dropped"], report["clean"]) == (["b000003"], True)
    shutil.rmtree(named_run / "trajectories")
    assert len(said("repair", "--retry-lost")["issued_again"]) == 7
    report = said("verify")
    assert (report["retried"], report["clean"]) == (7, True)
    assert said("repair", "--retry-lost") == {"issued_again": [], "lost": 0, "problems": []}


@pytest.mark.parametrize("options", [["--drop-batch", "held"], ["--retry-lost"]])
def test_the_repair_command_refuses_a_live_or_empty_run(monkeypatch, capsys, named_run: Path, options) -> None:
    def refused() -> str:
        assert headrace(monkeypatch, "ledger", "repair", named_run, *options) != 0
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    assert "nothing to repair" in refused()
    assert not (named_run / "ledger.db").exists()
    asyncio.run(begin_and_end(named_run))
    before = read_evidence(named_run)
    with sole_driver(RunDirectory(path=named_run)):
        assert "is being driven by another process" in refused()
    ledger = Ledger.open(named_run, {"run_id": "run"})
    assert "is open in another process" in refused()
    ledger.close()
    assert read_evidence(named_run) == before


@pytest.mark.parametrize("options", [[], ["--retry-lost", "--drop-batch", "held"]])
def test_exactly_one_repair_is_asked_for(monkeypatch, capsys, named_run: Path, options) -> None:
    assert headrace(monkeypatch, "ledger", "repair", named_run, *options) == cli.EXIT_BAD_INPUT
    assert "name one repair: --drop-batch BATCH or --retry-lost" in " ".join(capsys.readouterr().err.split())


def test_a_loss_that_cannot_be_retried_is_reported(monkeypatch, capsys, named_run: Path) -> None:
    asyncio.run(begin_and_end(named_run))
    with closing(sqlite3.connect(named_run / "archive.db")) as database, database:
        database.execute("UPDATE rollouts SET state = 'evicted', batch_id = NULL WHERE rollout_id = 'g000000-0'")
    assert headrace(monkeypatch, "ledger", "repair", named_run, "--retry-lost") == cli.EXIT_DIRTY
    assert "1 are still lost" in capsys.readouterr().err


def no_run_id(run_dir: Path) -> None:
    (run_dir / "run_id").unlink()


def of_another_run(run_dir: Path) -> None:
    (run_dir / "run_id").write_text("another")


def of_another_version(run_dir: Path) -> None:
    with closing(sqlite3.connect(run_dir / "ledger.db")) as database:
        database.execute("PRAGMA user_version = 99")


def empty(run_dir: Path) -> None:
    for path in run_dir.glob("ledger.db*"):
        path.unlink()
    (run_dir / "ledger.db").touch()


def cut_off(run_dir: Path) -> None:
    os.truncate(run_dir / "ledger.db", 5000)


def damaged_trajectories(run_dir: Path) -> None:
    (run_dir / "trajectories" / "000001.db").write_bytes(b"half of a copy" * 1000)


def no_tasks(run_dir: Path) -> None:
    (run_dir / "tasks" / "train.jsonl").unlink()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (no_run_id, r"run_id cannot be read.*copy all of it"),
        (of_another_run, r"was made with run_id = run, but this run has another: resume with the same run"),
        (of_another_version, r"is of an unreleased version of headrace, .*start a new run"),
        (empty, r"is missing or empty, but there is .*restore the ledger"),
        (cut_off, r"is not readable: .*put the newest copy in its place"),
        (damaged_trajectories, r"000001.db is not readable: .*remove it .*retry-lost"),
        (no_tasks, r"train.jsonl: cannot be read"),
    ],
)
def test_an_unusable_ledger_is_reported_in_one_line_with_the_fix(
    monkeypatch, capsys, named_run: Path, spoil, says: str
) -> None:
    asyncio.run(begin_and_end(named_run))
    spoil(named_run)
    assert headrace(monkeypatch, "ledger", "repair", named_run, "--drop-batch", "held") == cli.EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert "Traceback" not in error
    (line,) = error.strip().splitlines()
    assert re.search(says, line), line


def test_a_trajectory_file_copied_by_hand_is_ignored(named_run: Path) -> None:
    asyncio.run(begin_and_end(named_run))
    folder = named_run / "trajectories"
    shutil.copy(folder / "000001.db", folder / "000001 (1).db")
    Ledger.open(named_run, {"run_id": "run"}).close()
