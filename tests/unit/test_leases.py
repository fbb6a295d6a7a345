"""A holder's leases over the pool actor, inline, over a simulated provider."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.runtime.pools import leases as leases_module
from headrace.actors.runtime.pools.config import SandboxSection
from headrace.actors.runtime.pools.leases import Leases
from headrace.actors.runtime.pools.sandbox_pool import SandboxPool
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.errors import ImageUnknown, QueueTimeout
from headrace.sandboxes.pool.boot import HOLDER_LABEL, LeaseRequest
from headrace.sandboxes.pool.pool import PoolConfig
from headrace.sandboxes.simulated.provider import SimulatedProvider, SimulationConfig

PLAIN = LeaseRequest(spec=SandboxSpec())
SIMULATION = SimulationConfig(boot_s=0.001, answer_s=0, images=("host",))


@asynccontextmanager
async def opened(
    tmp_path: Path, *, lease_s: float = 60.0, host: SimulatedProvider | None = None
) -> AsyncIterator[tuple[SandboxPool, Leases]]:
    """A pool with one place for rollouts."""
    provider = host or SimulatedProvider(SIMULATION)
    config = PoolConfig(max_live=2, evaluation_reserve=1, reconcile_every_s=0.05)
    async with (
        asyncio.timeout(60),
        SandboxPool(SandboxSection(pool=config), directory=RunDirectory(path=tmp_path), provider=provider) as pool,
        Leases(pool, "worker", lease_s=lease_s) as leases,
    ):
        yield pool, leases


async def test_a_lease_does_not_wait_for_others_in_its_batch(tmp_path: Path) -> None:
    async with opened(tmp_path) as (pool, leases):
        first, second = asyncio.create_task(leases.lease(PLAIN)), asyncio.create_task(leases.lease(PLAIN))
        lease = await first
        assert not second.done()
        await leases.release(lease.ref.id)
        assert (await second).ref.id != lease.ref.id
        assert (await pool.status()).live == 1


async def test_an_error_in_one_lease_does_not_affect_the_others(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, leases):
        unknown = LeaseRequest(spec=SandboxSpec(image="missing"))
        results = await asyncio.gather(leases.lease(unknown), leases.lease(PLAIN), return_exceptions=True)
        assert isinstance(results[0], ImageUnknown)
        assert not isinstance(results[1], BaseException)
        with pytest.raises(QueueTimeout):
            await leases.lease(LeaseRequest(spec=SandboxSpec(), queue_timeout_s=0.1))


async def test_a_lease_cancelled_in_the_queue_is_dropped(tmp_path: Path) -> None:
    async with opened(tmp_path) as (pool, leases):
        lease = await leases.lease(PLAIN)
        waiting = asyncio.create_task(leases.lease(PLAIN))
        while (await pool.status()).waiting == 0:  # noqa: ASYNC110 - the pool tells nobody
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        while (await pool.status()).waiting > 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await leases.release(lease.ref.id)
        assert (await pool.status()).live == 0


async def test_a_lease_abandoned_while_its_pool_restarts_is_released(tmp_path: Path) -> None:
    async with opened(tmp_path) as (pool, _):
        labels = {HOLDER_LABEL: "worker"}
        request = LeaseRequest(spec=SandboxSpec(labels=labels, idempotency_key="a"))
        # Leases of which a pool that was killed had told nobody: the one that adopted them knows no such operation.
        while not (await pool.begin({"a": request})).ready:
            pass
        assert (await pool.status()).live == 1
        assert (await pool.fetch(["a"])).unknown == ("a",)
        await pool.withdraw(["a", "b", ""])
        assert (await pool.status()).live == 0


async def test_heartbeats_renew_the_leases_of_a_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "HEARTBEATS", 600)
    beats = asyncio.Event()
    host = SimulatedProvider(SIMULATION)

    def deadline() -> float:
        [info] = host.living
        return asyncio.get_running_loop().time() + info.expires_in_s

    async with opened(tmp_path, host=host) as (pool, leases):
        await leases.lease(PLAIN)
        first_s = deadline()
        renew, count = pool.renew_holder, 0

        async def counting(holder: str, ttl_s: float) -> list[object]:
            nonlocal count
            lost = list(await renew(holder, ttl_s))
            count += 1
            if count == 3:
                beats.set()
            return lost

        monkeypatch.setattr(pool, "renew_holder", counting)
        await beats.wait()
        assert deadline() > first_s + 0.05
        assert (await pool.status()).reaped_total == 0


async def test_sandboxes_of_a_dead_holder_are_reaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "HEARTBEATS", 0.01)
    async with opened(tmp_path, lease_s=0.3) as (pool, leases):
        await leases.lease(PLAIN)
        while (status := await pool.status()).live > 0:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert status.reaped_total + status.lost_total == 1
