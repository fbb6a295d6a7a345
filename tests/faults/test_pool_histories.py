"""Seeded histories in virtual time: pools that are killed between any two writes of their ledger, ambiguous creates,
sandboxes that die, hosts that go. After a restart and a sweep nothing lives that nobody leases."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping

import pytest

from headrace.actors.simulation.virtual.virtual_time import run_virtual
from headrace.sandboxes.base import Feature, Sandbox, SandboxId, SandboxInfo, SandboxProvider, SandboxRef, SandboxSpec
from headrace.sandboxes.errors import SandboxError
from headrace.sandboxes.pool.boot import HOLDER_LABEL, LeaseRequest
from headrace.sandboxes.pool.ledger import Change, Entry, EntryState, SandboxLedger
from headrace.sandboxes.pool.pool import Pool, PoolConfig, PoolStatus
from headrace.sandboxes.simulated.provider import SimulatedProvider, SimulationConfig

HISTORIES = 300
LEASE_S = 60.0
CONFIG = PoolConfig(
    max_live=12,
    boot_concurrency=4,
    evaluation_reserve=2,
    boot_attempts=3,
    create_timeout_s=20,
    answer_timeout_s=3,
    breaker_failures=3,
    breaker_open_s=10,
    warm={"host": 2},
    warm_ttl_s=60,
)


class Line:
    """The connection of one pool to a host; it ends with the pool, after which no call returns."""

    def __init__(self, provider: SimulatedProvider, disk: Disk) -> None:
        self._provider = provider
        self._killed = disk.killed

    @property
    def features(self) -> frozenset[Feature]:
        return self._provider.features

    async def _reach(self) -> None:
        if self._killed.is_set():
            await asyncio.get_running_loop().create_future()

    async def create(self, spec: SandboxSpec) -> SandboxRef:
        await self._reach()
        ref = await self._provider.create(spec)
        await self._reach()
        return ref

    async def attach(self, ref: SandboxRef) -> Sandbox:
        await self._reach()
        return await self._provider.attach(ref)

    async def list(self) -> list[SandboxInfo]:
        await self._reach()
        return await self._provider.list()

    async def destroy(self, sandbox: SandboxId) -> None:
        await self._reach()
        await self._provider.destroy(sandbox)

    async def aclose(self) -> None:
        """Leave the host running without this pool."""


class Disk:
    """The ledger's file, to which each pool in turn writes until it is killed."""

    def __init__(self) -> None:
        self._ledger = SandboxLedger()
        self.writes_left: int | None = None
        self.killed = asyncio.Event()
        self.on_disk = False
        self.owner = self._ledger.owner

    def new_life(self, writes_left: int | None) -> None:
        self.writes_left, self.killed = writes_left, asyncio.Event()

    def apply(self, changes: Iterable[Change]) -> None:
        if self.writes_left == 0:
            self.killed.set()
            return
        if self.writes_left is not None:
            self.writes_left -= 1
        self._ledger.apply(changes)

    def load(self) -> list[Entry]:
        return self._ledger.load()

    def close(self) -> None:
        """Do nothing: the file outlives its pools."""


class Client:
    """A holder that repeats its requests, with the same keys, until it has its sandboxes, and renews them."""

    def __init__(self, name: str, chance: random.Random) -> None:
        self.name = name
        self.chance = chance
        self.has: dict[str, SandboxRef] = {}

    def spec(self, number: int) -> SandboxSpec:
        labels = {HOLDER_LABEL: self.name, "purpose": "evaluate" if number % 5 == 0 else "train"}
        cpu = 1.0 if number % 3 == 0 else None
        return SandboxSpec(labels=labels, ttl_s=LEASE_S, idempotency_key=f"{self.name}.{number}", cpu=cpu)

    async def live(self, pool: Pool, killed: asyncio.Event) -> None:
        """Lease, use, freeze, abandon and release sandboxes for a while."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(6):
                tasks.create_task(self._one(pool, number, killed))

    async def _one(self, pool: Pool, number: int, killed: asyncio.Event) -> None:
        await asyncio.sleep(self.chance.uniform(0, 20))
        spec = self.spec(number)
        try:
            lease = await pool.lease_one(LeaseRequest(spec=spec, queue_timeout_s=60))
        except SandboxError:
            return
        if killed.is_set():
            return
        self.has[spec.idempotency_key] = lease.ref
        await asyncio.sleep(self.chance.uniform(0, 40))
        if self.chance.random() < 0.3:
            await pool.freeze([lease.ref.id])
        if self.chance.random() < 0.6:
            await pool.release([lease.ref.id])
            del self.has[spec.idempotency_key]

    async def beat(self, pool: Pool) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 4)
            await pool.renew_holder(self.name, LEASE_S)


def simulated(seed: int, name: str) -> SimulatedProvider:
    chance = random.Random(f"{seed}.{name}")
    return SimulatedProvider(
        SimulationConfig(
            seed=seed,
            capacity=30,
            ends_leases=chance.random() < 0.1,
            boot_s=chance.choice([0.5, 2, 6]),
            creates_per_s=chance.choice([None, 5]),
            boot_failure=chance.choice([0, 0.1]),
            ambiguous=chance.choice([0, 0.2]),
            lost_create=chance.choice([0, 0.05]),
            stuck_sandbox=chance.choice([0, 0.2]),
            kill_failure=chance.choice([0, 0.3]),
            life_s=chance.choice([None, 100]),
        ),
        name=name,
    )


async def history(seed: int) -> None:
    chance = random.Random(seed)
    random.seed(seed)
    hosts = {name: simulated(seed, name) for name in ("a", "b")[: chance.choice([1, 2])]}
    disk = Disk()
    clients = [Client(f"w{number}", chance) for number in range(3)]
    for _ in range(chance.choice([1, 2, 3])):
        disk.new_life(chance.randrange(60))
        await one_life(hosts, disk, clients, chance)
        for provider in hosts.values():
            provider.come_back()
        if chance.random() < 0.5:
            await asyncio.sleep(chance.uniform(0, 2 * LEASE_S))
    disk.new_life(None)
    await last_life(hosts, disk, clients)


async def one_life(
    hosts: dict[str, SimulatedProvider], disk: Disk, clients: list[Client], chance: random.Random
) -> None:
    """Run the pool until it is killed, at any point."""
    lines = {name: Line(provider, disk) for name, provider in hosts.items()}
    pool_life = asyncio.create_task(served(lines, disk, clients, hosts, chance))
    killed = asyncio.create_task(disk.killed.wait())
    await asyncio.wait([pool_life, killed], return_when=asyncio.FIRST_COMPLETED)
    disk.writes_left = 0
    disk.killed.set()
    killed.cancel()
    pool_life.cancel()
    await asyncio.wait([pool_life])
    if not pool_life.cancelled() and (error := pool_life.exception()) is not None:
        raise error


async def served(
    lines: dict[str, Line],
    disk: Disk,
    clients: list[Client],
    hosts: dict[str, SimulatedProvider],
    chance: random.Random,
) -> None:
    async with open_pool(lines, disk) as pool, asyncio.TaskGroup() as tasks:
        beats = [tasks.create_task(client.beat(pool)) for client in clients]
        async with asyncio.TaskGroup() as working:
            for client in clients:
                working.create_task(client.live(pool, disk.killed))
            working.create_task(trouble(hosts, chance))
        for beat in beats:
            beat.cancel()


async def trouble(hosts: dict[str, SimulatedProvider], chance: random.Random) -> None:
    """Take a host down and up again at random times."""
    await asyncio.sleep(chance.uniform(0, 40))
    if chance.random() < 0.4:
        provider = chance.choice(list(hosts.values()))
        provider.go_down(lose_sandboxes=chance.random() < 0.5, silent=chance.random() < 0.5)
        await asyncio.sleep(chance.uniform(0, 40))
        provider.come_back()


async def last_life(hosts: dict[str, SimulatedProvider], disk: Disk, clients: list[Client]) -> None:
    """Start the last pool: two of the holders continue, the third is dead."""
    async with open_pool(hosts, disk) as pool, asyncio.TaskGroup() as tasks:
        beats = [tasks.create_task(client.beat(pool)) for client in clients[:2]]
        await asyncio.sleep(4 * LEASE_S)
        booting = assert_all_leased(hosts, disk)
        assert_placed(disk, await pool.status())
        await asyncio.sleep(LEASE_S / 2)
        assert_all_leased(hosts, disk)
        still = booting & alive(hosts)
        assert still <= {entry.ref.id for entry in disk.load() if entry.ref is not None}
        await pool.release_holder("w0")
        await pool.release_holder("w1")
        for beat in beats:
            beat.cancel()
        await asyncio.sleep(3 * LEASE_S)
        assert {entry.holder for entry in disk.load()} <= {"(warm)"}
        assert (await pool.status()).frozen == 0


def alive(hosts: dict[str, SimulatedProvider]) -> set[str]:
    return {info.id for provider in hosts.values() for info in provider.living}


def assert_all_leased(hosts: dict[str, SimulatedProvider], disk: Disk) -> set[str]:
    """Check that every live sandbox is leased by a live holder or booting; returns the booting ones."""
    entries = {(entry.host, entry.key): entry for entry in disk.load()}
    booting: set[str] = set()
    for name, provider in hosts.items():
        for info in provider.living:
            entry = entries.get((name, info.idempotency_key))
            assert entry is not None, "alive, and nobody answers for it"
            assert entry.holder in ("w0", "w1", "(warm)"), "the dead holder's lease is over"
            if entry.state is EntryState.INTENDED:
                booting.add(info.id)
    requests = [(entry.holder, entry.request_key) for entry in entries.values() if entry.state is EntryState.HELD]
    assert len(requests) == len(set(requests)), "one sandbox for a request"
    return booting


def assert_placed(disk: Disk, status: PoolStatus) -> None:
    """Check that no place is lost or taken twice; those of dead sandboxes are freed by the next sweep."""
    running = [entry for entry in disk.load() if entry.ref is not None and not entry.frozen]
    assert status.live == len(running)


def open_pool(hosts: Mapping[str, SandboxProvider], disk: Disk) -> Pool:
    return Pool(hosts, CONFIG, ledger=disk, clock=asyncio.get_running_loop().time)  # type: ignore[arg-type]


@pytest.mark.parametrize("part", range(6))
def test_no_sandbox_is_left_after_any_sequence_of_operations(part: int) -> None:
    for seed in range(part, HISTORIES, 6):
        try:
            run_virtual(history(seed))
        except BaseException as error:
            raise AssertionError(f"history {seed} broke") from error
