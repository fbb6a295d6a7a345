"""Rows that a learner cannot train: refused when the result arrives, or filtered when a step refuses them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.buffer.audit.verify import verify
from headrace.buffer.core.curriculum import TaskStream
from headrace.buffer.core.records import BatchState, Charge, FilterReason, RolloutState
from headrace.buffer.core.replay import ReplayBuffer
from headrace.buffer.errors import LeaseError
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.trajectories.row_limits import RowLimits
from headrace.buffer.trajectories.types import Cause, RolloutId, StepReport, Trajectory
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.config import LearnerConfig, row_limits
from support import replay_cases as cases

FIRST = PolicyVersion(1, 0)
LIMITS = RowLimits(vocabulary=500, tokens=20)
"""Limits that the rows of `replay_cases` are within: ids below 500, 8 tokens."""


def changed(trajectory: Trajectory, *, temperature: float = 1.0, **arrays: Any) -> Trajectory:
    return Trajectory(rows=(replace(trajectory.rows[0], **arrays),), temperature=temperature)


GOOD = cases.trajectory(FIRST)
MASK_T = GOOD.rows[0].loss_mask_T
VIOLATIONS = {
    "vocabulary of 500": changed(GOOD, tokens_T=GOOD.rows[0].tokens_T + 500),
    "outside the model's vocabulary": changed(GOOD, tokens_T=GOOD.rows[0].tokens_T - 500),
    "first token of a row": changed(
        GOOD, loss_mask_T=np.ones_like(MASK_T), versions=(replace(GOOD.rows[0].versions[0], start=0),)
    ),
    "temperature 0 has no gradient": changed(GOOD, temperature=0.0),
    "a row of 26 tokens exceeds the learner's token budget of 20": cases.trajectory(FIRST, tokens=24),
}


@pytest.mark.parametrize("reason", VIOLATIONS)
def test_a_row_over_a_limit_is_named_with_its_reason(reason: str) -> None:
    assert reason in LIMITS.violation(VIOLATIONS[reason])
    assert LIMITS.violation(GOOD) == ""


def test_rows_without_trained_tokens_have_no_limits() -> None:
    row = VIOLATIONS["vocabulary of 500"].rows[0]
    masked = replace(row, loss_mask_T=np.zeros_like(row.loss_mask_T))
    assert LIMITS.violation(Trajectory(rows=(masked, *GOOD.rows), temperature=1.0)) == ""


@pytest.mark.parametrize("reason", VIOLATIONS)
def test_a_result_over_a_limit_is_a_failure_of_ours_and_not_of_the_task(reason: str) -> None:
    buffer = ReplayBuffer(cases.SMALL, TaskStream(cases.tasks(), seed=3), limits=LIMITS)
    buffer.open_epoch(None, 0.0)
    now = 0.0
    # Each attempt runs on another host at another time, which would charge the task with an ordinary failure.
    for number in range(cases.SMALL.max_attempts):
        now += 1000.0
        [order] = [order for order in buffer.issue(100, FIRST, now) if order.rollout_id == "g000000-0"]
        bad = replace(cases.result(order, FIRST, host=f"host-{number}"), trajectory=VIOLATIONS[reason])
        buffer.offer(bad, now)
        attempt = buffer.state.attempts[order.rollout_id]
        assert (attempt.cause, attempt.reward, attempt.charged_to) == (Cause.INFRA, None, Charge.LEARNER)
        assert reason in attempt.detail
    assert buffer.state.rollouts[RolloutId("g000000-0")].state is RolloutState.POISON
    status = buffer.status()
    assert (dict(status.parked), dict(status.suspects), status.held) == ({}, {}, "")
    assert status.counters["attempts_infra"] == cases.SMALL.max_attempts


def test_many_results_over_a_limit_hold_no_orders() -> None:
    """Engines, hosts and tasks all work: pacing the run would only hide the setting to change."""
    buffer = ReplayBuffer(cases.SMALL, TaskStream(cases.tasks(), seed=3), limits=replace(LIMITS, tokens=2))
    buffer.open_epoch(None, 0.0)
    orders = cases.fill(buffer, FIRST)
    assert len({order.task_id for order in orders}) > 5
    assert buffer.status().held == ""
    assert buffer.issue(100, FIRST, 2.0)


@pytest.fixture
def stocked() -> ReplayBuffer:
    """Batches of 4 in groups of 2: twelve sealed rollouts of version 1.0."""
    buffer = cases.core()
    buffer.open_epoch(None, 0.0)
    cases.fill(buffer, FIRST)
    return buffer


def test_refused_members_are_filtered_and_the_others_are_batched_again(stocked: ReplayBuffer) -> None:
    batch = stocked.take(FIRST, 1, 2.0)
    assert batch is not None
    refused, *others = (member.rollout_id for member in batch.members)
    lease = cases.lease_of(batch)
    for _ in range(2):
        stocked.batches.refuse_rows(lease, {refused: "a row is too long"})
    rollout = stocked.state.rollouts[refused]
    assert (rollout.state, rollout.reason) == (RolloutState.FILTERED, FilterReason.ROW_REFUSED)
    assert stocked.state.attempts[refused].detail == "refused by the learner: a row is too long"
    assert stocked.state.path.batches[batch.batch_id].state is BatchState.DISSOLVED
    assert stocked.status().counters["filtered_row_refused"] == 1, "the second call changed nothing"
    again, _ = cases.step(stocked, FIRST)
    assert again.batch_id != batch.batch_id
    assert [member.rollout_id for member in again.members][:3] == others


def test_refusing_no_member_or_an_older_lease_is_an_error(stocked: ReplayBuffer) -> None:
    batch = stocked.take(FIRST, 1, 2.0)
    assert batch is not None
    with pytest.raises(LeaseError, match="no refused member"):
        stocked.batches.refuse_rows(cases.lease_of(batch), {RolloutId("g000099-0"): "too long"})
    assert stocked.take(PolicyVersion(1, 1), 1, 2.0) is not None
    with pytest.raises(LeaseError, match="not the newest lease"):
        stocked.batches.refuse_rows(cases.lease_of(batch), {batch.members[0].rollout_id: "too long"})


async def filled(run_dir: Path, limits: RowLimits | None) -> ReplayStore:
    store = await ReplayStore.open(
        run_dir, cases.SMALL, cases.tasks(), run_id="run", seed=3, clock=lambda: 100.0, limits=limits
    )
    await store.open_epoch(None)
    for number, order in enumerate(await store.issue(1000, FIRST)):
        tokens = 24 if number in (1, 2) else 6
        await store.offer_many([cases.result(order, FIRST, reward=float(number % 2), tokens=tokens)])
    return store


async def test_the_ledger_of_refused_results_is_clean(tmp_path: Path) -> None:
    async with await filled(tmp_path, LIMITS) as store:
        assert store.status().counters["attempts_infra"] == 2
        assert await store.take(FIRST, 1, timeout_s=1.0) is not None
    assert verify(tmp_path).problems == ()


async def test_the_ledger_is_clean_after_a_step_without_the_refused_rows(tmp_path: Path) -> None:
    """As after a resume with a smaller token budget: the results were within the limits when they arrived."""
    async with await filled(tmp_path, None) as store:
        batch = await store.take(FIRST, 1, timeout_s=1.0)
        assert batch is not None
        refused = {item.rollout_id: why for item in batch.items if (why := LIMITS.violation(item.trajectory))}
        assert set(refused) == {"g000000-1", "g000001-0"}
        await store.refuse_rows(batch.lease, refused)
        again = await store.take(FIRST, 1, timeout_s=1.0)
        assert again is not None
        assert not {item.rollout_id for item in again.items} & set(refused)
        after = PolicyVersion(1, 1)
        await store.commit(again.lease, StepReport(batch_id=again.lease.batch_id, version=after, skipped=False))
    report = verify(tmp_path)
    assert (report.problems, report.steps, report.filtered) == ((), 1, 2)


def test_the_learner_states_its_limits(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = LearnerConfig(model_dir=tiny_model_dir, checkpoint_dir=tmp_path, snapshot_dir=tmp_path, token_budget=1234)
    assert row_limits(config) == RowLimits(vocabulary=258, tokens=1234)
    assert row_limits(config.model_copy(update={"kind": "simulated"})) is None
