"""Comparison of the checksums that engines report after a push.

Invariants:
- Only engines with the same parameter names, that is, of the same kind and size, are compared.
- Checksums are compared with the snapshot's if the engine computes them in the same way, as the embedded engine does.
- SGLang's cannot be: it fuses parameters (query, key and value; gate and up), splits them over its ranks, converts them
  to its own dtype, and its hash depends on its version and device (64 bits of SHA-256 on a CPU, a kernel of its own on
  CUDA). They are comparable only between two reads of one snapshot by engines of one kind. So these engines vote: the
  majority is taken as correct, and a verdict stands on a later tie.
- One engine against one, before any majority, is no verdict: neither is taken as correct.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.policies.engine import EngineId
from headrace.policies.models.qwen_config import TIED_HEAD

Sums = tuple[tuple[str, str], ...]


def differing(expected: Mapping[str, str], reported: Mapping[str, str]) -> list[str]:
    """Return the parameters whose reported checksum is not the expected one. The head may be missing, because a tied
    head is not a parameter of the engine."""
    wrong = sorted(name for name, checksum in expected.items() if reported.get(name) != checksum)
    return [name for name in wrong if name != TIED_HEAD or name in reported]


@dataclass(slots=True)
class Agreement:
    """Majority vote on the checksums that engines report in one push. A vote is one read of the snapshot."""

    _votes: dict[frozenset[str], dict[Sums, list[EngineId]]] = field(default_factory=dict)
    _accepted: dict[frozenset[str], Sums | None] = field(default_factory=dict)

    def add(self, engine_id: EngineId, checksums: Mapping[str, str]) -> None:
        """Add an engine's checksums, by parameter. A second read by the same engine is a further vote if it gave the
        same weights, and else replaces the first one, whose weights are gone."""
        names, sums = frozenset(checksums), tuple(sorted(checksums.items()))
        kind = self._votes.setdefault(names, {})
        for other, engines in kind.items():
            if other != sums and engine_id in engines:
                engines.remove(engine_id)
        kind.setdefault(sums, []).append(engine_id)
        self._decide(names)

    def withdraw(self, engine_id: EngineId) -> None:
        """Remove the votes of an engine that failed."""
        for names, kind in list(self._votes.items()):
            left = {sums: [each for each in engines if each != engine_id] for sums, engines in kind.items()}
            if left != kind:
                self._votes[names] = left
                self._decide(names)

    def is_disputed(self, engine_id: EngineId) -> bool:
        """Return True if engines of this one's kind differ and none of their checksums has a majority."""
        return any(
            self._accepted[names] is None and any(engine_id in engines for engines in kind.values())
            for names, kind in self._votes.items()
        )

    def wrong(self) -> dict[EngineId, list[str]]:
        """Return the engines that are not in the majority, with the parameters that differ from it, or, without a
        majority, from those of another engine."""
        found: dict[EngineId, list[str]] = {}
        for parameters, kind in self._votes.items():
            right = self._accepted[parameters]
            for sums, engines in kind.items():
                other = right if right is not None else next(each for each in kind if each != sums)
                names = [name for (name, mine), (_, theirs) in zip(sums, other, strict=True) if mine != theirs]
                found |= dict.fromkeys(engines, names) if names else {}
        return found

    def _decide(self, names: frozenset[str]) -> None:
        kind = {sums: len(engines) for sums, engines in self._votes[names].items() if engines}
        self._votes[names] = {sums: self._votes[names][sums] for sums in kind}
        most = max(kind.values(), default=0)
        leading = [sums for sums, count in kind.items() if count == most]
        if len(leading) == 1:
            self._accepted[names] = leading[0]
        elif most == 1 or self._accepted.get(names) not in leading:
            self._accepted[names] = None
