"""`verify` finds what contradicts, and changes nothing."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from types import FunctionType

import pytest

from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.audit.verify import verify
from headrace.buffer.core import advantages
from headrace.buffer.core.staleness import StalenessBound
from headrace.buffer.errors import LedgerRefused
from headrace.buffer.ledger.ledger import Ledger, StoredTrajectory
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.trajectories.types import Cause, CheckpointRef, StepReport
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.checkpoints import (
    Manifest,
    SteppedBatch,
    publish,
    read_checkpoint,
    stage,
    write_manifest,
)
from support import replay_cases as cases

FIRST = PolicyVersion(1, 0)


def save(run_dir: Path, version: PolicyVersion, previous: str, chain: str, batches) -> CheckpointRef:
    """A checkpoint directory as the learner writes it."""
    root = run_dir / "checkpoints"
    staged = stage(root, version)
    stepped = tuple(
        SteppedBatch(
            batch_id=batch.lease.batch_id,
            members=tuple((item.rollout_id, item.attempt) for item in batch.items),
            skipped=False,
        )
        for batch in batches
    )
    write_manifest(staged, Manifest(version=version, previous_chain=previous, chain=chain, batches=stepped))
    return read_checkpoint(publish(staged, version))


async def make_run(run_dir: Path) -> ReplayStore:
    """An open store after three steps, a checkpoint after the second; something in every state that lasts."""
    store = await ReplayStore.open(run_dir, cases.SMALL, cases.tasks(), run_id="run", seed=3, clock=lambda: 100.0)
    version = await store.open_epoch(None)
    batches = []
    for number in range(3):
        orders = await store.issue(1000, version)
        offers = [cases.result(order, version, reward=float(i % 2)) for i, order in enumerate(orders)]
        await store.offer_many(offers)
        batch = await store.take(version, 1, timeout_s=1.0)
        version = PolicyVersion(1, version.step + 1)
        await store.commit(batch.lease, StepReport(batch_id=batch.lease.batch_id, version=version, skipped=False))
        batches.append(batch)
        if number == 1:
            await store.checkpointed(save(run_dir, version, "", store.status().chain, batches))
    first, second, third, _ = await store.issue(4, version)
    await store.offer_many([cases.ended(first, Cause.INFRA), cases.ended(second, Cause.CANCELLED)])
    await store.offer_many([cases.result(third, version)])
    await store.take(version, 1, timeout_s=1.0)
    return store


@pytest.fixture
async def run_dir(tmp_path):
    await (await make_run(tmp_path / "run")).aclose()
    return tmp_path / "run"


def change(run_dir, statement):
    """In the ledger and in its archive, if it has one."""
    for path in run_dir.glob("*.db"):
        with closing(sqlite3.connect(path)) as database, database:
            database.execute(statement)


async def test_the_counts_of_a_clean_run_add_up(run_dir):
    report = verify(run_dir)
    assert report.problems == ()
    assert report.clean
    parts = ("trained", "leased", "sealed", "waiting", "in_flight", "pending", "evicted", "filtered", "infra", "poison")
    assert report.issued == sum(getattr(report, part) for part in (*parts, "cancelled")) == 24
    assert (report.trained, report.leased, report.waiting, report.in_flight) == (12, 4, 1, 1)
    assert (report.infra, report.cancelled) == (1, 1)
    assert (report.steps, report.checkpoints, report.trained_twice, report.lost) == (3, 1, 0, 0)
    assert (report.max_staleness, report.max_staleness_seen, report.mean_staleness) == (2, 2, 1.0)


async def test_a_killed_run_is_read_from_its_log_without_changing_it(tmp_path):
    store = await make_run(tmp_path / "run")
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "run", killed)
    await store.aclose()
    (killed / "ledger.db-shm").unlink()
    files = [path for path in sorted(killed.rglob("*")) if path.is_file() and path.suffix in {".db", ".db-wal"}]
    assert (killed / "ledger.db-wal").stat().st_size > 0
    before = [hashlib.sha256(path.read_bytes()).digest() for path in files]
    report = verify(killed)
    assert report == verify(tmp_path / "run")
    assert [hashlib.sha256(path.read_bytes()).digest() for path in files] == before


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        (
            "UPDATE attempts SET trained = '[[\"1.0\",5]]' WHERE rollout_id = 'g000004-0'",
            "its stored spans do not match",
        ),
        ("UPDATE commits SET max_staleness = 0", "was trained at staleness 1 > 0"),
        ("UPDATE commits SET chain = '00' WHERE sequence = 2", "hash chain does not follow"),
        ("UPDATE commits SET version = '1.9' WHERE sequence = 3", "goes from 1.2 to 1.9"),
        ("UPDATE commits SET rolled_back_by = 1 WHERE sequence = 3", "marked as undone"),
        ("UPDATE rollouts SET state = 'sealed' WHERE rollout_id = 'g000001-1'", "history says trained"),
        ("UPDATE rollouts SET state = 'pending' WHERE state = 'waiting'", "is pending, but its history says waiting"),
        ("UPDATE rollouts SET failures = 2 WHERE failures = 1", "counts 2 failures"),
        (
            "UPDATE rollouts SET reward = 1 - reward WHERE rollout_id = 'g000000-0'",
            "has reward 1.0, but its attempt has 0.0",
        ),
        (
            "UPDATE attempts SET reward = 1 - reward WHERE rollout_id = 'g000000-0'",
            "has reward 0.0, but its attempt has 1.0",
        ),
        ("UPDATE rollouts SET member = 7 WHERE rollout_id = 'g000001-1'", "has fewer than 2 members"),
        ("DELETE FROM rollouts WHERE rollout_id = 'g000000-0'", "g000000 has fewer than 2 members"),
        ("DELETE FROM rollouts WHERE rollout_id = 'g000006-0'", "dangling reference"),
        ("UPDATE batches SET members = replace(members, 'g000002-0', 'g000000-0')", "trained more than once"),
        ("UPDATE batches SET members = replace(members, '-1\",1,1', '-1\",1,0')", "but 0 is stored"),
        ("UPDATE groups SET ordinal = 99 WHERE ordinal = 3", "gaps"),
        ("UPDATE epochs SET chain = '11'", "was opened at a chain"),
        ("UPDATE checkpoints SET chain = '11'", "different hash chains"),
    ],
)
async def test_contradictions_in_the_ledger_are_reported(run_dir, statement, problem):
    change(run_dir, statement)
    report = verify(run_dir)
    assert not report.clean
    assert any(problem in line for line in report.problems), report.problems


async def test_rollouts_trained_twice_or_lost_are_counted(run_dir):
    change(run_dir, "UPDATE batches SET members = replace(members, 'g000002-0', 'g000000-0')")
    report = verify(run_dir)
    assert report.trained_twice == 1
    assert report.lost == 1, "g000002-0 says trained, no step has it"


async def test_a_missing_trajectory_counts_as_lost(run_dir):
    path = run_dir / "trajectories" / "000001.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DELETE FROM trajectories WHERE rollout_id = 'g000006-0'")
    assert verify(run_dir).lost == 1
    path.unlink()
    report = verify(run_dir)
    assert report.lost == 4 + 4 + 4 + 1, "trained since the checkpoint, leased, sealed, waiting"


async def test_the_ledger_is_checked_against_the_checkpoint(run_dir):
    manifest = run_dir / "checkpoints" / "1.2" / "headrace.json"
    document = json.loads(manifest.read_text())
    first, second = document["batches"]
    manifest.write_text(json.dumps({**document, "batches": [second, first]}))
    assert any("its hash chain does not follow" in line for line in verify(run_dir).problems)
    manifest.write_text(json.dumps({**document, "version": "1.5"}))
    assert any("no step with its version" in line for line in verify(run_dir).problems)
    first["members"][0][1] = 2
    manifest.write_text(json.dumps(document))
    assert any("batch b000001 differs from that in the ledger" in line for line in verify(run_dir).problems)
    for text in ("{", json.dumps({**document, "previous_chain": "!0"}), json.dumps({**document, "version": 1.2})):
        manifest.write_text(text)
        assert any("not readable" in line for line in verify(run_dir).problems)


def test_a_directory_without_a_ledger_is_refused(tmp_path):
    with pytest.raises(LedgerRefused, match=r"no ledger\.db"):
        verify(tmp_path)
    (tmp_path / "ledger.db").write_bytes(b"nothing of the kind" * 300)
    with pytest.raises(LedgerRefused, match="not readable"):
        verify(tmp_path)


EARLY = cases.SMALL.model_copy(update={"batch_size": 8, "group_size": 4, "rule": "count(3)"})


async def run_early(run_dir, config=EARLY):
    """A run whose groups are sealed with a member running: some trained, some evicted and issued again."""
    clock = itertools.count(100)
    store = await ReplayStore.open(
        run_dir, config, cases.tasks(), run_id="run", seed=3, clock=lambda: float(next(clock))
    )
    async with store:
        version = await store.open_epoch(None)
        for _ in range(3):
            orders = await store.issue(1000, FIRST)
            for number, order in enumerate(orders):
                await store.offer_many([cases.result(order, FIRST, reward=number % 3 / 2)])
            batch = await store.take(version, 1, timeout_s=0.0)
            version = PolicyVersion(1, version.step + 1)
            await store.commit(batch.lease, StepReport(batch_id=batch.lease.batch_id, version=version, skipped=False))
        await store.take(version, 1, timeout_s=0.0)
        for order in await store.issue(9, version):
            await store.offer_many([cases.result(order, version)])
    return run_dir


@pytest.fixture
async def early_dir(tmp_path):
    return await run_early(tmp_path / "early")


async def test_a_run_with_groups_sealed_early_has_no_problems(early_dir):
    report = verify(early_dir)
    assert report.problems == ()
    assert report.trained == 24
    parts = ("trained", "leased", "sealed", "waiting", "in_flight", "pending", "evicted", "filtered", "infra", "poison")
    assert report.issued == sum(getattr(report, part) for part in (*parts, "cancelled"))
    evidence = read_evidence(early_dir)
    assert any(rollout.evictions for rollout in evidence.rollouts)
    assert any(rollout.late for rollout in evidence.rollouts)


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("UPDATE rollouts SET baseline = baseline + 0.1 WHERE rollout_id = 'g000001-1'", "g000001-1 has baseline"),
        ("UPDATE rollouts SET baseline = NULL WHERE late AND group_id = 'g000002'", "has baseline None"),
        ("UPDATE rollouts SET scale = scale * 2 WHERE rollout_id = 'g000001-1'", "g000001-1 has scale"),
        ("UPDATE rollouts SET advantage = advantage + 1 WHERE rollout_id = 'g000001-0'", "does not follow from"),
        ("UPDATE rollouts SET first_reward = 0.25 WHERE rollout_id = 'g000001-0'", "counts 0.25 in its group"),
        ("UPDATE rollouts SET late = 0 WHERE group_id = 'g000001'", "g000001-0 has scale"),
        ("UPDATE rollouts SET evictions = 9 WHERE evictions", "more than its group allows"),
        (
            "UPDATE rollouts SET evictions = 2 WHERE rollout_id = 'g000000-0'",
            "more evictions than it has ended attempts",
        ),
        ("UPDATE groups SET max_evictions = 0", "more than its group allows"),
        ("UPDATE groups SET complete_before = NULL WHERE group_id = 'g000000'", "marked as incomplete"),
        ("UPDATE groups SET rule = 'count(4)' WHERE group_id = 'g000000'", "before its rule count(4) accepted"),
        ("UPDATE groups SET rule = 'most' WHERE group_id = 'g000000'", "'most' is not a rule"),
        ("UPDATE groups SET min_members = 4 WHERE group_id = 'g000000'", "was sealed with only 3 finished members"),
        ("UPDATE tasks SET solved = solved + 1 WHERE task_id = 'task-1'", "task task-1 counts"),
        ("DELETE FROM tasks WHERE task_id = 'task-2'", "task task-2 counts 0 groups"),
        ("UPDATE rollouts SET state = 'cancelled' WHERE state = 'trained' AND late", "history says trained"),
        ("UPDATE rollouts SET state = 'pending' WHERE rollout_id = 'g000000-0'", "says trained"),
    ],
)
async def test_contradictions_in_groups_are_reported(early_dir, statement, problem):
    change(early_dir, statement)
    report = verify(early_dir)
    assert any(problem in line for line in report.problems), report.problems


KINDS = ("grpo", "grpo_no_std", "leave_one_out")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_ledger_is_checked_with_the_formula_that_it_was_made_by(tmp_path, kind):
    run_dir = await run_early(tmp_path / "run", EARLY.model_copy(update={"advantage": kind}))
    assert verify(run_dir).problems == ()
    for other in {*KINDS, "ppo"} - {kind}:
        change(run_dir, f"UPDATE groups SET advantage = '{other}' WHERE advantage IS NOT NULL")
        assert not verify(run_dir).clean, other


async def test_a_complete_group_that_a_member_held_open_is_checked_with_speed_independent_baselines(tmp_path):
    """The second to finish bridged the gap to the last: without it, the group would have been sealed before."""
    config = EARLY.model_copy(update={"group_size": 3, "rule": "count(2) & grace(3)"})
    now = [100.0]
    store = await ReplayStore.open(tmp_path, config, cases.tasks(), run_id="run", seed=3, clock=lambda: now[0])
    async with store:
        version = await store.open_epoch(None)
        for order, at_s, reward in zip(
            await store.issue(3, version), (101.0, 103.5, 106.0), (1.0, 1.0, 0.0), strict=True
        ):
            now[0] = at_s
            await store.offer_many([cases.result(order, version, reward=reward)])
    assert verify(tmp_path).problems == ()
    [group] = [group for group in read_evidence(tmp_path).groups if group.seal_order]
    assert group.complete_before is not None
    members = [one for one in read_evidence(tmp_path).rollouts if one.group_id == group.group_id]
    assert [member.baseline for member in members] == [0.5, 1.0, 1.0]
    assert members[1].advantage == 0.0


def too_large(*values, **named):
    """Code of a wrong function: it finds the right one in the globals of its module."""
    return 1.25 * globals()["right"](*values, **named)


@pytest.mark.parametrize(
    "name", ["group_scale", "baseline", "advantage", "mean", "deviation_square_sum", "deviation_sum"]
)
async def test_a_wrong_formula_in_the_buffer_is_reported(tmp_path, monkeypatch, name):
    """Although every module that has imported it, `verify` among them, gets the same wrong function."""
    function = getattr(advantages, name)
    monkeypatch.setattr(advantages, "right", FunctionType(function.__code__, vars(advantages)), raising=False)
    monkeypatch.setattr(function, "__code__", too_large.__code__)
    run_dir = await run_early(tmp_path / "run")
    assert not verify(run_dir).clean


def two_lines(run_dir, *, skipped):
    """Two updates, undone and trained again; with `skipped` the first one is not made this time."""
    buffer = cases.core()
    ledger = Ledger.open(run_dir, {"run_id": "run"})
    for epoch in (1, 2):
        version = buffer.open_epoch(None, 0.0)
        for number in range(2):
            done = [cases.result(order, version) for order in buffer.issue(4 if epoch == 1 else 0, version, 0.0)]
            for one in done:
                buffer.offer(one, 1.0)
            _, version = cases.step(buffer, version, epoch=epoch, skipped=skipped and epoch == 2 and number == 0)
            ledger.write(
                buffer.drain(),
                [
                    StoredTrajectory(rollout_id=one.rollout_id, attempt=one.attempt, trajectory=one.trajectory)
                    for one in done
                ],
            )
    ledger.close()


def test_a_repeated_line_of_training_counts_as_the_previous_line(tmp_path):
    two_lines(tmp_path, skipped=False)
    report = verify(tmp_path)
    assert (report.problems, report.max_staleness_seen, report.steps_rolled_back) == ((), 0, 2)


@pytest.mark.parametrize("claimed", ["1.1", "1.2", "2.1", "7.1"])
def test_a_fork_that_claims_to_be_the_previous_line_is_reported(tmp_path, claimed):
    two_lines(tmp_path, skipped=True)
    assert verify(tmp_path).problems == ()
    change(tmp_path, f"UPDATE epochs SET follows = '{claimed}' WHERE epoch = 2")
    assert any("was trained on other batches" in line for line in verify(tmp_path).problems)


@pytest.mark.parametrize("rule", ["all", "count(3)"])
def test_an_off_by_one_staleness_bound_in_a_take_is_reported(tmp_path, monkeypatch, rule):
    """`take` uses a bound of one more than the run's, which the commits record."""
    config = EARLY.model_copy(update={"rule": rule})
    buffer = cases.core(config)
    monkeypatch.setattr(buffer.batches, "_bound", StalenessBound(config.max_staleness + 1))
    ledger = Ledger.open(tmp_path, {"run_id": "run"})
    version = buffer.open_epoch(None, 0.0)
    for _ in range(4):
        done = [cases.result(order, FIRST) for order in buffer.issue(1000, FIRST, 0.0)]
        for one in done:
            buffer.offer(one, 1.0)
        stored = [
            StoredTrajectory(rollout_id=one.rollout_id, attempt=one.attempt, trajectory=one.trajectory) for one in done
        ]
        _, version = cases.step(buffer, version)
        ledger.write(buffer.drain(), stored)
    ledger.close()
    report = verify(tmp_path)
    assert report.max_staleness_seen == config.max_staleness + 1
    assert any("was trained at staleness 3 > 2" in line for line in report.problems)
