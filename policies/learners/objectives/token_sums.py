"""Sums of metrics over trained and over observed tokens. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationSums:
    """Sums over observed tokens, to be added over micro-batches and ranks. Cross-entropies are in nats."""

    loss: float = 0.0
    """Sum of weights x cross-entropy, without the coefficient."""
    selected: int = 0
    """Number of tokens in that sum."""
    observations: int = 0
    warnings: int = 0
    observation_sum: float = 0.0
    """Sum of the cross-entropies of observations."""
    warning_sum: float = 0.0

    def __add__(self, other: ObservationSums) -> ObservationSums:
        sums = {item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)}
        return ObservationSums(**sums)

    def metrics(self, *, coefficient: float, total: float) -> dict[str, float]:
        """Return the metrics of a step whose loss, including this term, is `total`."""
        scaled, found = coefficient * self.loss, {"observation_tokens": float(self.selected)}
        found |= {"observation_coef": coefficient, "observation_loss": self.loss, "observation_loss_scaled": scaled}
        if self.observations:
            found["observation_cross_entropy"] = self.observation_sum / self.observations
        if self.warnings:
            found["warning_cross_entropy"] = self.warning_sum / self.warnings
        if policy := total - scaled:
            found["observation_to_policy"] = abs(scaled) / abs(policy)
        return found
