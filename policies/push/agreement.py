"""Whose checksums are wrong, where nobody but the engines themselves can tell. Pure: no clock, no I/O.

Invariants:
- Engines of one kind and size name their parameters alike; only those are compared.
- What most of them tell is right. Among as many, those that were believed before are: first the one that told first,
  which is found wrong, after all, as soon as more engines agree on something else.
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
    _believed: dict[frozenset[str], Sums] = field(default_factory=dict)

    def tell(self, engine_id: EngineId, checksums: Mapping[str, str]) -> None:
        """By parameter."""
        names, sums = frozenset(checksums), tuple(sorted(checksums.items()))
        kind = self._told.setdefault(names, {})
        kind.setdefault(sums, []).append(engine_id)
        believed = self._believed.setdefault(names, sums)
        if len(kind[sums]) > len(kind[believed]):
            self._believed[names] = sums

    def wrong(self) -> dict[EngineId, list[str]]:
        """The engines that are in the minority, and the parameters in which they are."""
        found: dict[EngineId, list[str]] = {}
        for parameters, kind in self._told.items():
            right = self._believed[parameters]
            for sums, engines in kind.items():
                names = [name for (name, told), (_, other) in zip(sums, right, strict=True) if told != other]
                found |= dict.fromkeys(engines, names) if names else {}
        return found
