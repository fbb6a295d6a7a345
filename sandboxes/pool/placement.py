"""Choice of the host for a boot. Pure.

Invariant: a host that takes boots is preferred to one that does not, then one outside of `avoid`, then one that has
been tried less often; among equals the least loaded is chosen, where having the image is worth `LOCALITY` of a host's
places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection

LOCALITY: Final = 0.5
"""A host without the image is chosen when the hosts with it are busier by this share of their places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """Properties of a host on which the choice depends."""

    name: str
    is_open: bool
    """It takes boots."""
    load: float
    """Number of waiting, booting and live sandboxes, divided by its places."""
    has_image: bool


def choose(hosts: Collection[HostView], tried: Collection[str], avoid: Collection[str] = ()) -> str:
    """Return the name of the best of at least one host."""

    def rank(host: HostView) -> tuple[bool, bool, int, float, str]:
        tries = sum(name == host.name for name in tried)
        return not host.is_open, host.name in avoid, tries, host.load + (0.0 if host.has_image else LOCALITY), host.name

    return min(hosts, key=rank).name
