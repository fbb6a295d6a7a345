"""Majority vote over the checksums of engines, where the snapshot's checksums cannot be compared. Pure: no clock, no
I/O.

Invariants:
- Only engines with the same parameter names are compared, which are those of one kind and size.
- The checksums of the majority are right. On a tie the verdict stays as it was; at first, the first engine is right.
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
    """Vote of one push."""

    _votes: dict[frozenset[str], dict[Sums, list[EngineId]]] = field(default_factory=dict)
    _accepted: dict[frozenset[str], Sums] = field(default_factory=dict)

    def add(self, engine_id: EngineId, checksums: Mapping[str, str]) -> None:
        """Add the checksums of an engine, by parameter."""
        names, sums = frozenset(checksums), tuple(sorted(checksums.items()))
        kind = self._votes.setdefault(names, {})
        kind.setdefault(sums, []).append(engine_id)
        accepted = self._accepted.setdefault(names, sums)
        if len(kind[sums]) > len(kind[accepted]):
            self._accepted[names] = sums

    def wrong(self) -> dict[EngineId, list[str]]:
        """Return the engines in the minority, with the parameters that differ."""
        found: dict[EngineId, list[str]] = {}
        for parameters, kind in self._votes.items():
            right = self._accepted[parameters]
            for sums, engines in kind.items():
                names = [name for (name, mine), (_, other) in zip(sums, right, strict=True) if mine != other]
                found |= dict.fromkeys(engines, names) if names else {}
        return found
