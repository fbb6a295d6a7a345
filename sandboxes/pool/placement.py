"""On which host to boot. Pure.

Invariant: a host that takes boots goes before one that does not, one that need not be avoided before one that must, one
that was not tried before one that was; among equals the least loaded goes first, where knowing the image is worth
`LOCALITY` of a host's places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection

LOCALITY: Final = 0.5
"""A host without the image is taken when one with it is busier by this share of its places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """What the choice depends on."""

    name: str
    is_open: bool
    """It takes boots: its breaker is not open."""
    load: float
    """What waits, boots or lives there, over its places."""
    has_image: bool


def choose(hosts: Collection[HostView], tried: Collection[str], avoid: Collection[str] = ()) -> str:
    """The name of the best host; there is at least one."""

    def rank(host: HostView) -> tuple[bool, bool, int, float, str]:
        tries = sum(name == host.name for name in tried)
        return not host.is_open, host.name in avoid, tries, host.load + (0.0 if host.has_image else LOCALITY), host.name

    return min(hosts, key=rank).name
