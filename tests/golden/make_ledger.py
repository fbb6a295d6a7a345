"""Makes the golden run directory: `scripts/generate golden_ledger`.

Until a version is released, a change of a table replaces it.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.primitives.critical_path import Segment
from headrace.buffer.trajectories.breakdown import Breakdown
from headrace.buffer.trajectories.step_scores import Credit, ScoredStep, StepScores, TokenSpan
from headrace.buffer.trajectories.timeline import Timeline
from headrace.buffer.trajectories.types import Cause, CheckpointRef, StepReport
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.checkpoints import Manifest, SteppedBatch, write_manifest
from support import replay_cases as cases


async def step(store, version):
    orders = await store.issue(1000, version)
    await store.offer_many(
        [
            scored(cases.result(order, version, reward=(0.1, 1.0)[position % 2], solved=position % 2 == 1))
            for position, order in enumerate(orders)
        ]
    )
    batch = await store.take(version, version.epoch, timeout_s=1.0)
    after = PolicyVersion(version.epoch, version.step + 1)
    report = StepReport(batch_id=batch.lease.batch_id, version=after, skipped=False, metrics={"loss": 0.25})
    await store.commit(batch.lease, report)
    members = tuple((item.rollout_id, item.attempt) for item in batch.items)
    return SteppedBatch(batch_id=batch.lease.batch_id, members=members, skipped=False), after


SPENT = Breakdown(
    wall_s=4.0,
    parts_s={"queue": 0.5, "boot": 0.5, "engine.decode": 1.0, "tool.bash": 1.5, "evaluate.check": 0.25, "other": 0.25},
    within_s={
        "queue": (0.0, 0.5),
        "boot": (0.5, 1.0),
        "engine.decode": (1.0, 2.0),
        "tool.bash": (2.0, 3.5),
        "evaluate.check": (3.5, 3.75),
        "other": (3.75, 4.0),
    },
    timeline=Timeline(
        segments=[
            Segment("queue", 0.0, 0.5, 0, "host-1"),
            Segment("boot", 0.5, 1.0, 0, "host-1"),
            Segment("engine.decode", 1.0, 2.0, 1, "engine-0"),
            Segment("tool.bash", 2.0, 3.5, 1, "pytest -x"),
            Segment("evaluate.check", 3.5, 3.75),
            Segment("other", 3.75, 4.0),
        ],
        began_at_s=1_700_000_000.0,
    ),
    labels={"image": "host", "agent": "shell", "engines": ("engine-0",), "tools": ("bash",), "turns": 1, "warm": False},
)


def scored(result):
    """The result with the breakdown of its time, and with a score for its only turn, except for the first member of
    each group."""
    result = replace(result, breakdown=SPENT, host="host-1")
    if result.rollout_id.endswith("-0"):
        return result
    step = ScoredStep(1, 1.0 if result.outcome.solved else -0.5, (TokenSpan(0, 2, 8),))
    scores = StepScores(credit=Credit.STEPS, outcome=result.outcome.reward, coefficient=1.0, steps=(step,))
    return replace(result, scores=scores)


CONFIG = cases.SMALL.model_copy(
    update={"batch_size": 8, "group_size": 4, "rule": "count(3) | deadline(1000)", "max_attempts": 2}
)


async def make(run_dir: Path):
    """A run with members carried, issued again, poisoned and still running, a checkpoint, and steps undone."""
    ticks = itertools.count(1_800_000_000)
    async with await ReplayStore.open(
        run_dir, CONFIG, cases.tasks(), run_id="golden", seed=3, clock=lambda: float(next(ticks))
    ) as store:
        version = await store.open_epoch(None)
        first, version = await step(store, version)
        second, version = await step(store, version)
        chain = store.status().chain
        directory = run_dir / "checkpoints" / str(version)
        directory.mkdir(parents=True)
        write_manifest(directory, Manifest(version=version, previous_chain="", chain=chain, batches=(first, second)))
        ref = CheckpointRef(
            path=f"checkpoints/{version}", version=version, batch_ids=(first.batch_id, second.batch_id), chain=chain
        )
        await store.checkpointed(ref)
        await step(store, version)
        version = await store.open_epoch(ref)
        await step(store, version)
        version = PolicyVersion(2, 3)
        orders = await store.issue(6, version)
        await store.offer_many([cases.ended(orders[0], Cause.INFRA)])
        await store.offer_many([cases.ended(order, Cause.INFRA) for order in await store.issue(1, version)])
        await store.offer_many([cases.result(order, PolicyVersion(1, 0)) for order in orders[1:4]])
        await store.evaluations.record(
            [(cases.result(orders[5], version), orders[5].task_id)], tag="held out", version=version
        )
        await store.take(version, 2, timeout_s=0.0)
