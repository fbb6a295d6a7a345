"""Limits of sandboxes that an operator sets: for a server, and for each of its keys.

Invariants: pure. A ceiling of a key lowers what a sandbox gets and never raises it; a request for more is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.errors import SpecRefused

N = TypeVar("N", int, float)

_SIZE: Final = re.compile(r"([0-9]{1,15})([KMGT]?)(?:i?B)?")
_SHIFTS: Final = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one sandbox; None for no limit of this kind."""

    memory_bytes: int | None = None
    disk_bytes: int | None = None
    processes: int | None = None
    cpus: int | None = None
    lifetime_s: int | None = None
    """Longest time from now for which a request may keep a sandbox."""

    def lowered_by(self, ceilings: SandboxLimits) -> SandboxLimits:
        """Return the lower limit of each kind."""
        return SandboxLimits(
            memory_bytes=_lower(self.memory_bytes, ceilings.memory_bytes),
            disk_bytes=_lower(self.disk_bytes, ceilings.disk_bytes),
            processes=_lower(self.processes, ceilings.processes),
            cpus=_lower(self.cpus, ceilings.cpus),
            lifetime_s=_lower(self.lifetime_s, ceilings.lifetime_s),
        )

    def applied_to(self, spec: SandboxSpec, owner: str) -> SandboxSpec:
        """Return the specification with these ceilings of a key as its limits, where it has none. Raises SpecRefused
        for one that asks for more."""
        ceilings: dict[str, float | None] = {
            "memory_bytes": self.memory_bytes,
            "disk_bytes": self.disk_bytes,
            "pids": self.processes,
            "cpu": self.cpus,
        }
        for name, ceiling in ceilings.items():
            value = getattr(spec, name)
            if value is not None and ceiling is not None and not 0 < value <= ceiling:
                raise SpecRefused(f"{name}={value}: key {owner!r} allows at most {ceiling}; request less")
        self.check_lifetime(spec.ttl_s, owner)
        return replace(
            spec,
            memory_bytes=_lower(spec.memory_bytes, self.memory_bytes),
            disk_bytes=_lower(spec.disk_bytes, self.disk_bytes),
            pids=_lower(spec.pids, self.processes),
            cpu=_lower(spec.cpu, self.cpus),
        )

    def check_lifetime(self, seconds: float, owner: str) -> None:
        """Raises SpecRefused for a time that the key does not allow."""
        if self.lifetime_s is not None and seconds > self.lifetime_s:
            raise SpecRefused(f"{seconds:.0f} s: key {owner!r} allows at most {self.lifetime_s} s; request less")


def _lower(one: N | None, other: N | None) -> N | None:
    return one if other is None else other if one is None else min(one, other)


def parse_size(text: str, name: str) -> int:
    """Return the bytes of a size such as 512M, 2G or 1048576; units are powers of 1024. Raises SpecRefused."""
    match = _SIZE.fullmatch(text)
    size = 0 if match is None else int(match[1]) << _SHIFTS[match[2]]
    if not 1 << 20 <= size < 1 << 60:
        raise SpecRefused(f"{name} {text[:40]!r}: must be a size of at least 1M, such as 512M or 2G")
    return size


def parse_ceilings(text: str, where: str) -> SandboxLimits:
    """Parse the ceilings of a key, such as `memory=2G,disk=4G,processes=256,cpus=2,lifetime=3600`. Raises
    SpecRefused."""
    values: dict[str, int] = {}
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        if name in values:
            raise SpecRefused(f"{where}: {name} is given twice")
        if name in ("memory", "disk"):
            values[name] = parse_size(value, f"{where}: {name}")
        elif name in ("processes", "cpus", "lifetime") and value.isascii() and value.isdigit() and int(value[:12]) > 0:
            values[name] = int(value[:12])
        else:
            raise SpecRefused(
                f"{where}: {pair[:40]!r}: must be memory=SIZE, disk=SIZE, processes=NUMBER, cpus=NUMBER or "
                "lifetime=SECONDS"
            )
    return SandboxLimits(
        memory_bytes=values.get("memory"),
        disk_bytes=values.get("disk"),
        processes=values.get("processes"),
        cpus=values.get("cpus"),
        lifetime_s=values.get("lifetime"),
    )
