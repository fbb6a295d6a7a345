"""The actor around the store: which version orders begin with, and who waits for it."""

from __future__ import annotations

import asyncio

from headrace.actors.training.replay import Replay
from headrace.buffer.trajectories.types import Cause, CheckpointRef, StepReport
from headrace.buffer.trajectories.versions import PolicyVersion
from support import replay_cases as cases

FIRST = PolicyVersion(1, 0)
GUARD_S = 20.0


async def step(replay, version):
    """Fill, train and push one batch; the reference is what a learner that saved then would hand over."""
    issued = await replay.issue(4, "dispatcher", timeout_s=0.0)
    await replay.offer([cases.result(order, version) for order in issued.orders])
    batch = await replay.take(version, timeout_s=GUARD_S)
    after = PolicyVersion(version.epoch, version.step + 1)
    await replay.commit(batch.lease, StepReport(batch_id=batch.lease.batch_id, version=after, skipped=False))
    await replay.served(after, epoch=after.epoch)
    chain = (await replay.status()).chain
    return CheckpointRef(path="elsewhere", version=after, batch_ids=(batch.lease.batch_id,), chain=chain)


async def test_after_a_resume_orders_wait_for_weights_that_will_be_within_the_bound():
    replay = Replay(cases.SMALL, directory=None, seed=3, tasks=cases.tasks())
    async with replay, asyncio.timeout(GUARD_S):
        await replay.open_epoch(None)
        saved = await step(replay, FIRST)
        for number in range(1, 4):
            await step(replay, PolicyVersion(1, number))
        running = (await replay.issue(2, "dispatcher", timeout_s=0.0)).orders
        opened = await replay.open_epoch(saved)
        await replay.offer([cases.ended(order, Cause.CANCELLED) for order in running])
        assert await replay.lies_ahead(PolicyVersion(1, 4))
        await replay.served(opened, epoch=opened.epoch)
        assert (await replay.issue(2, "dispatcher", timeout_s=0.0)).orders == (), "2.1 is three updates before 1.4"
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(replay.issue(2, "dispatcher", timeout_s=10 * GUARD_S))
            await asyncio.sleep(0)
            await replay.served(PolicyVersion(1, 4), epoch=opened.epoch)
        issued = await replay.issue(2, "dispatcher", timeout_s=0.0)
        assert {order.attempt for order in issued.orders} == {2}
        assert issued.to_cancel == ()
        assert (await replay.status()).counters.get("rollouts_evicted", 0) == 0
