"""What a pool says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.sandboxes.pool.boot import Booter
    from headrace.sandboxes.pool.circuit_breaker import BreakerState
    from headrace.sandboxes.pool.host import Host
    from headrace.sandboxes.pool.lease_table import LeaseTable
    from headrace.sandboxes.pool.reaper import Reaper
    from headrace.sandboxes.pool.teardown import Teardown
    from headrace.sandboxes.pool.warm import WarmStock


@dataclass(slots=True)
class Totals:
    """Since the pool began."""

    booted: int = 0
    failed: int = 0
    released: int = 0
    lost: int = 0
    adopted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatus:
    """Counts of one host now. `live` have a place, those that end too; frozen ones have none."""

    name: str
    live: int
    booting: int
    waiting: int
    breaker: BreakerState


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """Counts over all hosts now, and totals since the pool began."""

    live: int
    booting: int
    waiting: int
    frozen: int
    warm: int
    """Booted and ready for whoever comes; they count as live too."""
    ending: int
    """To be killed, and not known to be gone."""
    booted_total: int
    failed_total: int
    retried_total: int
    """Tries of boots after a first one."""
    released_total: int
    lost_total: int
    """Sandboxes that ended without a release: killed by memory, by their provider, or with their host."""
    reaped_total: int
    """Sandboxes whose lease nobody renewed."""
    orphans_total: int
    """Sandboxes of this pool that nobody held: left by an earlier life, or come to life after their boot was given
    up."""
    adopted_total: int
    """Leases taken over from an earlier life of the pool."""
    warm_served_total: int
    warm_dead_total: int
    """Ready sandboxes that did not pass their check."""
    kill_failures_total: int
    """Kills that failed and were tried again."""
    hosts: tuple[HostStatus, ...] = ()


def status_of(
    hosts: Mapping[str, Host],
    holdings: LeaseTable,
    totals: Totals,
    booter: Booter,
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
        frozen=sum(held.frozen for held in holdings),
        warm=len(warm.ready()),
        ending=sum(held.ending for held in holdings),
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
