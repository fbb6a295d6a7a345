"""Whose checksums are wrong, where nobody but the engines themselves can tell. Pure: no clock, no I/O.

Invariants:
- Engines of one kind and size name their parameters alike; only those are compared.
- What most of them tell is right. Of two that stand alone against each other the one that told first is believed, and
  it is found wrong, after all, as soon as a third one contradicts it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.policies.engine import EngineId

Sums = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Agreement:
    """Of one push."""

    _told: dict[frozenset[str], dict[Sums, list[EngineId]]] = field(default_factory=dict)

    def tell(self, engine_id: EngineId, checksums: Mapping[str, str]) -> None:
        """By parameter."""
        kind = self._told.setdefault(frozenset(checksums), {})
        kind.setdefault(tuple(sorted(checksums.items())), []).append(engine_id)

    def wrong(self) -> dict[EngineId, list[str]]:
        """The engines that are in the minority, and the parameters in which they are."""
        found: dict[EngineId, list[str]] = {}
        for kind in self._told.values():
            right = max(kind, key=lambda sums: len(kind[sums]))
            for sums, engines in kind.items():
                names = [name for (name, told), (_, other) in zip(sums, right, strict=True) if told != other]
                found |= dict.fromkeys(engines, names) if names else {}
        return found
