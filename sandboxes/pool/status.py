"""Status of a sandbox pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.buffer.primitives.circuit_breaker import BreakerState
from headrace.sandboxes.pool.boot import PoolBooter
from headrace.sandboxes.pool.host import PoolHost
from headrace.sandboxes.pool.lease_table import LeaseTable
from headrace.sandboxes.pool.reaper import Reaper, Teardown
from headrace.sandboxes.pool.warm import WarmStock


@dataclass(slots=True)
class Totals:
    """Counts since the pool started."""

    booted: int = 0
    failed: int = 0
    released: int = 0
    lost: int = 0
    adopted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatus:
    """Current counts of one host. `live` counts sandboxes that hold a slot, including ending ones but not frozen
    ones."""

    name: str
    live: int
    booting: int
    waiting: int
    breaker: BreakerState


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """Current counts over all hosts, and totals since the pool started."""

    live: int
    booting: int
    waiting: int
    frozen: int
    warm: int
    """Sandboxes booted in advance, which also count as live."""
    ending: int
    """Sandboxes that are being killed."""
    booted_total: int
    failed_total: int
    retried_total: int
    """Boot attempts after the first one."""
    released_total: int
    lost_total: int
    """Sandboxes that ended without a release: out of memory, ended by their provider, or lost with their host."""
    reaped_total: int
    """Sandboxes whose lease expired."""
    orphans_total: int
    """Sandboxes of this pool without a holder: left by an earlier process, or started after their boot was
    abandoned."""
    adopted_total: int
    """Leases taken over from an earlier process of the pool."""
    warm_served_total: int
    warm_dead_total: int
    """Warm sandboxes that failed their check."""
    kill_failures_total: int
    """Kills that failed and were retried."""
    hosts: tuple[HostStatus, ...] = ()


def status_of(
    hosts: Mapping[str, PoolHost],
    table: LeaseTable,
    totals: Totals,
    booter: PoolBooter,
    teardown: Teardown,
    reaper: Reaper,
    warm: WarmStock,
) -> PoolStatus:
    rows = tuple(
        HostStatus(
            name=host.name,
            live=host.admission.live,
            booting=host.admission.booting,
            waiting=host.admission.waiting,
            breaker=host.breaker,
        )
        for host in hosts.values()
    )
    return PoolStatus(
        live=sum(row.live for row in rows),
        booting=sum(row.booting for row in rows),
        waiting=sum(row.waiting for row in rows),
        frozen=sum(held.frozen for held in table),
        warm=len(warm.ready()),
        ending=sum(held.ending for held in table),
        booted_total=totals.booted,
        failed_total=totals.failed,
        retried_total=booter.retries,
        released_total=totals.released,
        lost_total=totals.lost + reaper.lost,
        reaped_total=reaper.reaped,
        orphans_total=reaper.orphans,
        adopted_total=totals.adopted,
        warm_served_total=warm.served,
        warm_dead_total=warm.dead,
        kill_failures_total=teardown.failures,
        hosts=rows,
    )
