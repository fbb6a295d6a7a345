"""Comparison of the learner's log-probabilities with those recorded at sampling, by the staleness of each token.

Shapes: N trained tokens of a micro-batch in row-major order, T tokens of a row.

Invariants:
- Tokens that the trained version sampled itself show the mismatch between engine and learner; all others show the lag
  as well. Tokens sampled with stale keys and values belong to neither: no weights give their log-probabilities.
- Means are over all tokens of the step at once, so the result does not depend on the split into micro-batches or
  ranks.
- This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from headrace.buffer.trajectories.types import Batch, LogprobDrift, Row, TokenRatios

_STALE_KV: Final = -1
"""Key of tokens sampled with stale keys and values, in place of a staleness."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DriftSums:
    """Comparison over some of a step's rows, to be added over micro-batches and ranks."""

    differences: Mapping[int, tuple[npt.NDArray[np.float64], ...]] = field(default_factory=dict)
    """log(current / behaviour) of the trained tokens, by their staleness."""
    positions: int = 0
    """Number of computed positions, including padding."""
    padding: int = 0
    tokens: int = 0
    """Number of trained tokens."""
    capped: int = 0
    """Number of them whose ratio exceeds the cap."""

    def __add__(self, other: DriftSums) -> DriftSums:
        keys = sorted(self.differences.keys() | other.differences.keys())
        return DriftSums(
            differences={key: (*self.differences.get(key, ()), *other.differences.get(key, ())) for key in keys},
            positions=self.positions + other.positions,
            padding=self.padding + other.padding,
            tokens=self.tokens + other.tokens,
            capped=self.capped + other.capped,
        )

    def shares(self) -> dict[str, float]:
        """Return `padding_share` (of all computed positions) and `capped_share` (tokens whose ratio exceeds the cap, of
        all trained tokens); empty if nothing was computed."""
        if not self.tokens:
            return {}
        return {"padding_share": self.padding / self.positions, "capped_share": self.capped / self.tokens}

    def drift(self) -> LogprobDrift | None:
        """Return the comparison; None if nothing was computed."""
        if not self.tokens:
            return None
        ratios = {key: _ratios(np.concatenate(parts)) for key, parts in sorted(self.differences.items())}
        stale_kv = ratios.pop(_STALE_KV, None)
        return LogprobDrift(by_staleness=ratios, stale_kv=stale_kv)


class DriftMeter:
    """Compares the micro-batches of one step. `cap` is the objective's maximum importance weight."""

    def __init__(self, batch: Batch, *, cap: float) -> None:
        self._batch, self._cap = batch, cap
        self.sums = DriftSums()

    def add(self, rows: Sequence[Row], logprobs_N: npt.NDArray[np.floating], *, positions: int) -> None:
        """Add a micro-batch of `rows`, which was computed as `positions` positions including padding. `logprobs_N` are
        the current log-probabilities of its trained tokens."""
        behaviour_N = np.concatenate([row.logprobs_T[row.loss_mask_T] for row in rows])
        staleness_N = np.concatenate([staleness_T(self._batch, row)[row.loss_mask_T] for row in rows])
        difference_N = logprobs_N.astype(np.float64) - behaviour_N
        self.sums += DriftSums(
            differences={int(key): (difference_N[staleness_N == key],) for key in np.unique(staleness_N)},
            positions=positions,
            padding=positions - sum(len(row.tokens_T) for row in rows),
            tokens=difference_N.size,
            capped=int((difference_N > np.log(self._cap)).sum()),
        )


def staleness_T(batch: Batch, row: Row) -> npt.NDArray[np.int64]:
    """Return the staleness of each token of a row of a batch, -1 for tokens sampled with stale keys and values."""
    keys_T = np.zeros(len(row.tokens_T), dtype=np.int64)
    for span in row.versions:
        keys_T[span.start : span.end] = _STALE_KV if span.stale_kv else batch.staleness_of(span.version)
    return keys_T


def _ratios(difference_n: npt.NDArray[np.float64]) -> TokenRatios:
    magnitude_n = np.abs(difference_n)
    # A value that is not finite is reported, not raised: the step's gradient is checked elsewhere.
    with np.errstate(over="ignore", invalid="ignore"):
        mean_ratio = float(np.exp(difference_n).mean())
    return TokenRatios(
        tokens=difference_n.size,
        mean_ratio=mean_ratio,
        mean_abs_log_ratio=float(magnitude_n.mean()),
        max_abs_log_ratio=float(magnitude_n.max()),
    )
