"""Builders for tests of the buffer: tasks, trajectories, results."""

from __future__ import annotations

import numpy as np

from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.curriculum import TaskStream
from headrace.buffer.core.replay import ReplayBuffer
from headrace.buffer.tasks import EvaluatorKind, EvaluatorSpec, Task, TaskId
from headrace.buffer.types import (
    BatchLease,
    Cause,
    CheckpointRef,
    Outcome,
    RolloutResult,
    Row,
    StepReport,
    Trajectory,
    VersionSpan,
)
from headrace.buffer.versions import PolicyVersion

SMALL = BufferConfig(batch_size=4, group_size=2, max_staleness=2)


def tasks(count=8):
    spec = EvaluatorSpec(kind=EvaluatorKind.NONE)
    return [Task(id=TaskId(f"task-{i}"), family="words", instruction="do it", evaluator=spec) for i in range(count)]


def core(config=SMALL, snapshot=None):
    return ReplayBuffer(config, TaskStream(tasks(), seed=3), snapshot)


def trajectory(*versions, tokens=6, seed=0):
    """One row: a prompt of two tokens, then `tokens` sampled ones for each version."""
    generator = np.random.default_rng(seed)
    length = 2 + tokens * len(versions)
    mask = np.arange(length) >= 2
    spans = tuple(
        VersionSpan(start=2 + i * tokens, end=2 + (i + 1) * tokens, version=version)
        for i, version in enumerate(versions)
    )
    row = Row(
        tokens_T=generator.integers(0, 500, length).astype(np.int32),
        loss_mask_T=mask,
        logprobs_T=np.where(mask, -generator.random(length), 0).astype(np.float32),
        versions=spans,
    )
    return Trajectory(rows=(row,), temperature=1.0)


def result(order, *versions, reward=1.0, solved=None, trainable=True, tokens=6, host=""):
    """A finished attempt, sampled by `versions`; solved with a reward above 0 where not told otherwise."""
    solved = reward > 0 if solved is None else solved
    cause = Cause.SOLVED if solved else Cause.FAILED
    outcome = Outcome(reward=reward, solved=solved, trainable=trainable, cause=cause)
    return RolloutResult(
        rollout_id=order.rollout_id,
        attempt=order.attempt,
        outcome=outcome,
        trajectory=trajectory(*versions, tokens=tokens) if versions else None,
        phases_s=(("boot", 0.5), ("agent", 2.0)),
        turns=1,
        trace_id="abc",
        host=host,
    )


def ended(order, cause, **more):
    """An attempt that says nothing about the policy."""
    outcome = Outcome(reward=None, trainable=False, cause=cause, detail="it broke")
    return RolloutResult(rollout_id=order.rollout_id, attempt=order.attempt, outcome=outcome, trajectory=None, **more)


def fill(buffer, version, *, rewards=(1.0, 0.0), limit=1000, sampled=None):
    """Issue and finish all that may start; rewards alternate. Sampled by the version issued at, or by `sampled`.
    Returns the orders."""
    orders = buffer.issue(limit, version, 0.0)
    for position, order in enumerate(orders):
        buffer.offer(result(order, sampled or version, reward=rewards[position % len(rewards)]), 1.0)
    return orders


def lease_of(record):
    return BatchLease(batch_id=record.batch_id, epoch=record.epoch)


def step(buffer, version, epoch=1, *, skipped=False):
    """Take and commit one batch; returns (batch record, version after)."""
    record = buffer.take(version, epoch, 2.0)
    assert record is not None
    after = version if skipped else PolicyVersion(version.epoch, version.step + 1)
    report = StepReport(batch_id=record.batch_id, version=after, skipped=skipped, metrics={"loss": 0.5})
    buffer.commit(lease_of(record), report, 3.0)
    return record, after


def checkpoint(buffer, version, path="checkpoints/x"):
    """What a learner that saved now would hand over."""
    commits = tuple(commit.batch_id for commit in buffer.state.path.commits.values())
    return CheckpointRef(path=path, version=version, batch_ids=commits, chain=buffer.state.path.chain)


def tables(buffer):
    """All that a core knows, comparable."""
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
