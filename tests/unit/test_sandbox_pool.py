"""The pool over a simulated provider that fails on demand."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.sandboxes.base import Sandbox, SandboxId, SandboxInfo, SandboxRef, SandboxSpec
from headrace.sandboxes.errors import BootFailed, CapacityExceeded, ImageUnknown, SandboxError, SandboxGone
from headrace.sandboxes.pool.ledger import SandboxLedger
from headrace.sandboxes.pool.pool import Pool, PoolConfig
from headrace.sandboxes.simulated.provider import SimulatedProvider, SimulationConfig

EVALUATION = {"purpose": "evaluate"}


class Flaky(SimulatedProvider):
    """A provider that raises the given errors first; a `gate` blocks creates until it is opened."""

    def __init__(self) -> None:
        super().__init__(SimulationConfig(boot_s=0.001, answer_s=0, images=("host",)))
        self.errors: list[SandboxError] = []
        self.creates = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        self.creates += 1
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        return await super().create(spec)


@pytest.fixture
async def provider() -> Flaky:
    return Flaky()


def pool_of(provider: Flaky, **settings: float) -> Pool:
    defaults = {"max_live": 4, "evaluation_reserve": 1, "retry_base_s": 0.001, "reconcile_every_s": 0.05}
    return Pool({"host": provider}, PoolConfig.model_validate({**defaults, **settings}))


async def leased(pool: Pool, *specs: SandboxSpec) -> list[SandboxRef]:
    results = await pool.lease(specs)
    return [result for result in results if isinstance(result, SandboxRef)]


async def alive(provider: Flaky) -> set[SandboxId]:
    return {info.id for info in await provider.list()}


async def test_a_sandbox_can_be_leased_and_released(provider: Flaky) -> None:
    async with pool_of(provider) as pool:
        refs = await leased(pool, SandboxSpec(), SandboxSpec())
        assert await alive(provider) == {ref.id for ref in refs}
        status = await pool.status()
        assert (status.live, status.booting, status.waiting, status.booted_total) == (2, 0, 0, 2)
        await pool.release([ref.id for ref in refs])
        await pool.release([refs[0].id, SandboxId("unknown")])
        status = await pool.status()
        assert (status.live, status.released_total) == (0, 2)
        assert await alive(provider) == set()


async def test_errors_are_returned_as_results_in_the_order_of_the_specs(provider: Flaky) -> None:
    async with pool_of(provider) as pool:
        first, second = await pool.lease([SandboxSpec(image="missing"), SandboxSpec()])
        assert isinstance(first, ImageUnknown)
        assert isinstance(second, SandboxRef)
        status = await pool.status()
        assert (status.live, status.failed_total) == (1, 1)


async def test_only_transient_errors_are_retried(provider: Flaky) -> None:
    async with pool_of(provider, boot_attempts=3) as pool:
        provider.errors = [BootFailed("no"), CapacityExceeded("full", 0.001)]
        (ref,) = await pool.lease([SandboxSpec()])
        assert isinstance(ref, SandboxRef)
        assert provider.creates == 3
        provider.errors = [BootFailed("1"), BootFailed("2"), BootFailed("3"), BootFailed("4")]
        (error,) = await pool.lease([SandboxSpec()])
        assert isinstance(error, BootFailed)
        assert str(error) == "3"
        provider.errors, provider.creates = [SandboxGone("x")], 0
        (error,) = await pool.lease([SandboxSpec()])
        assert isinstance(error, SandboxGone)
        assert provider.creates == 1


async def test_leases_wait_while_the_pool_is_full_and_evaluations_use_the_reserve(provider: Flaky) -> None:
    async with pool_of(provider, max_live=2) as pool:
        (held,) = await leased(pool, SandboxSpec())
        waiting = asyncio.create_task(pool.lease([SandboxSpec()]))
        (evaluation,) = await leased(pool, SandboxSpec(labels=EVALUATION))
        assert not waiting.done()
        assert (await pool.status()).waiting == 1
        await pool.release([evaluation.id, held.id])
        (ref,) = await waiting
        assert isinstance(ref, SandboxRef)


async def test_a_frozen_sandbox_frees_its_slot(provider: Flaky) -> None:
    async with pool_of(provider, max_live=2) as pool:
        (held,) = await leased(pool, SandboxSpec())
        await pool.freeze([held.id, held.id, SandboxId("unknown")])
        (other,) = await leased(pool, SandboxSpec())
        status = await pool.status()
        assert (status.live, status.frozen) == (1, 1)
        await pool.release([held.id, other.id])
        assert (await pool.status()).live == 0


async def test_a_freeze_is_durable_when_it_returns(provider: Flaky, tmp_path: Path) -> None:
    ledger = SandboxLedger(tmp_path / "ledger")
    async with Pool({"host": provider}, ledger=ledger) as pool:
        (held,) = await leased(pool, SandboxSpec())
        await pool.freeze([held.id])
        assert [entry.frozen for entry in ledger.load()] == [True]


async def test_release_does_not_wait_for_a_boot(provider: Flaky) -> None:
    async with pool_of(provider, boot_concurrency=1) as pool:
        (held,) = await leased(pool, SandboxSpec())
        provider.gate.clear()
        booting = asyncio.create_task(pool.lease([SandboxSpec(), SandboxSpec()]))
        await pool.release([held.id])
        assert await alive(provider) == set()
        assert not booting.done()
        provider.gate.set()
        assert all(isinstance(result, SandboxRef) for result in await booting)


async def test_a_cancelled_lease_leaves_nothing_behind(provider: Flaky) -> None:
    async with pool_of(provider, max_live=2) as pool:
        task = asyncio.create_task(pool.lease([SandboxSpec(), SandboxSpec()]))
        async with asyncio.timeout(30):
            while (await pool.status()).live == 0:  # noqa: ASYNC110 - the pool tells nobody
                await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(30):
            while (await pool.status()).live > 0:  # noqa: ASYNC110 - the pool tells nobody
                await asyncio.sleep(0.01)
        status = await pool.status()
        assert (status.live, status.booting, status.waiting) == (0, 0, 0)
        assert await alive(provider) == set()


async def test_slots_of_dead_sandboxes_are_freed(provider: Flaky) -> None:
    async with pool_of(provider, max_live=2) as pool:
        (held,) = await leased(pool, SandboxSpec())
        sandbox: Sandbox = await provider.attach(held)
        await sandbox.kill()
        (other,) = await leased(pool, SandboxSpec())
        assert other.id != held.id
        assert (await pool.status()).lost_total == 1


async def test_renew_returns_dead_sandboxes(provider: Flaky) -> None:
    async with pool_of(provider) as pool:
        kept, lost = await leased(pool, SandboxSpec(ttl_s=50), SandboxSpec())
        await (await provider.attach(lost)).kill()
        gone = await pool.renew([kept.id, lost.id, SandboxId("unknown")], 500)
        assert set(gone) == {lost.id, SandboxId("unknown")}
        rows: list[SandboxInfo] = await provider.list()
        assert [row.id for row in rows] == [kept.id]
        assert rows[0].expires_in_s > 400
        assert (await pool.status()).lost_total == 1


async def test_equal_keys_share_one_slot(provider: Flaky) -> None:
    async with pool_of(provider) as pool:
        spec = SandboxSpec(idempotency_key="k")
        (first,) = await leased(pool, spec)
        (second,) = await leased(pool, spec)
        assert first == second
        assert (await pool.status()).live == 1


async def test_closing_the_pool_terminates_everything(provider: Flaky) -> None:
    async with pool_of(provider) as pool:
        await leased(pool, SandboxSpec(), SandboxSpec())
        await pool.aclose()
        await pool.aclose()
        assert await alive(provider) == set()
