"""Builders for tests of the buffer: tasks, trajectories, results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.curriculum import TaskStream
from headrace.buffer.core.records import BatchRecord, Snapshot
from headrace.buffer.core.replay import ReplayBuffer
from headrace.buffer.tasks.evaluators import NoEvaluator
from headrace.buffer.tasks.task import Task, TaskId
from headrace.buffer.trajectories.types import (
    BatchLease,
    Cause,
    CheckpointRef,
    Outcome,
    RolloutOrder,
    RolloutResult,
    Row,
    StepReport,
    Trajectory,
    VersionSpan,
)
from headrace.buffer.trajectories.versions import PolicyVersion

SMALL = BufferConfig(batch_size=4, group_size=2, max_staleness=2)


def tasks(count: int = 8) -> list[Task]:
    spec = NoEvaluator()
    return [Task(id=TaskId(f"task-{i}"), family="words", instruction="do it", evaluator=spec) for i in range(count)]


def core(config: BufferConfig = SMALL, snapshot: Snapshot | None = None) -> ReplayBuffer:
    return ReplayBuffer(config, TaskStream(tasks(), seed=3), snapshot)


def trajectory(*versions: PolicyVersion, tokens: int = 6, seed: int = 0, vocabulary: int = 500) -> Trajectory:
    """One row: a prompt of two tokens, then `tokens` sampled ones for each version."""
    generator = np.random.default_rng(seed)
    length = 2 + tokens * len(versions)
    mask = np.arange(length) >= 2
    spans = tuple(
        VersionSpan(start=2 + i * tokens, end=2 + (i + 1) * tokens, version=version)
        for i, version in enumerate(versions)
    )
    row = Row(
        tokens_T=generator.integers(0, vocabulary, length).astype(np.int32),
        loss_mask_T=mask,
        logprobs_T=np.where(mask, -generator.random(length), 0).astype(np.float32),
        versions=spans,
    )
    return Trajectory(rows=(row,), temperature=1.0)


def result(
    order: RolloutOrder,
    *versions: PolicyVersion,
    reward: float = 1.0,
    solved: bool | None = None,
    trainable: bool = True,
    tokens: int = 6,
    vocabulary: int = 500,
    host: str = "",
) -> RolloutResult:
    """Return a finished attempt, sampled by `versions`; solved if the reward is above 0, unless `solved` is given."""
    solved = reward > 0 if solved is None else solved
    cause = Cause.SOLVED if solved else Cause.FAILED
    outcome = Outcome(reward=reward, solved=solved, trainable=trainable, cause=cause)
    return RolloutResult(
        rollout_id=order.rollout_id,
        attempt=order.attempt,
        outcome=outcome,
        trajectory=trajectory(*versions, tokens=tokens, vocabulary=vocabulary) if versions else None,
        phases_s=(("boot", 0.5), ("agent", 2.0)),
        turns=1,
        trace_id="abc",
        host=host,
    )


def ended(order: RolloutOrder, cause: Cause, **more: Any) -> RolloutResult:
    """Return the result of an attempt that failed without a trajectory."""
    outcome = Outcome(reward=None, trainable=False, cause=cause, detail="it broke")
    return RolloutResult(rollout_id=order.rollout_id, attempt=order.attempt, outcome=outcome, trajectory=None, **more)


def fill(
    buffer: ReplayBuffer,
    version: PolicyVersion,
    *,
    rewards: Sequence[float] = (1.0, 0.0),
    limit: int = 1000,
    sampled: PolicyVersion | None = None,
) -> tuple[RolloutOrder, ...]:
    """Issue and finish all that may start; rewards alternate. Sampled by the version issued at, or by `sampled`.
    Returns the orders."""
    orders = buffer.issue(limit, version, 0.0)
    for position, order in enumerate(orders):
        buffer.offer(result(order, sampled or version, reward=rewards[position % len(rewards)]), 1.0)
    return orders


def lease_of(record: BatchRecord) -> BatchLease:
    return BatchLease(batch_id=record.batch_id, epoch=record.epoch)


def step(
    buffer: ReplayBuffer, version: PolicyVersion, epoch: int = 1, *, skipped: bool = False
) -> tuple[BatchRecord, PolicyVersion]:
    """Take and commit one batch; returns (batch record, version after)."""
    record = buffer.take(version, epoch, 2.0)
    assert record is not None
    after = version if skipped else PolicyVersion(version.epoch, version.step + 1)
    report = StepReport(batch_id=record.batch_id, version=after, skipped=skipped, metrics={"loss": 0.5})
    buffer.commit(lease_of(record), report, 3.0)
    return record, after


def checkpoint(buffer: ReplayBuffer, version: PolicyVersion, path: str = "checkpoints/x") -> CheckpointRef:
    """Return the checkpoint that a learner would report if it saved now."""
    commits = tuple(commit.batch_id for commit in buffer.state.path.commits.values())
    return CheckpointRef(path=path, version=version, batch_ids=commits, chain=buffer.state.path.chain)


def tables(buffer: ReplayBuffer) -> dict[str, Any]:
    """Return the whole state of a core in a form that can be compared."""
    state = buffer.state
    fields = vars(state) | vars(state.path)
    known = {name: value for name, value in fields.items() if not name.startswith("_") and name != "path"}
    del known["changes_made"]
    return known | {
        "by_state": {name: set(ids) for name, ids in state.by_state.items()},
        "open": set(state.open_groups()),
        "in flight": {version: set(ids) for version, ids in state.in_flight_by_version.items()},
        "free": {versions: set(ids) for versions, ids in state.free_by_versions.items()},
        "next": state.next_pending(),
    }
