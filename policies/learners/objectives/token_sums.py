"""Sums of metrics over trained tokens. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSums:
    """Number of tokens and sums over them, by metric, to be added over micro-batches and ranks."""

    tokens: int = 0
    sums: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: TokenSums) -> TokenSums:
        names = self.sums.keys() | other.sums.keys()
        sums = {name: self.sums.get(name, 0.0) + other.sums.get(name, 0.0) for name in names}
        return TokenSums(tokens=self.tokens + other.tokens, sums=sums)

    def means(self) -> dict[str, float]:
        """Return the mean of each metric over the tokens; none if there are no tokens."""
        return {name: total / self.tokens for name, total in sorted(self.sums.items())} if self.tokens else {}
