"""Limits of a learner on the rows that it can train, checked when a result arrives and again before a step.

Invariants:
- Only rows with trained tokens are checked, because the learner computes no others.
- The buffer and the learner use the same check, so a result within the limits is never refused by a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.buffer.trajectories.types import Row, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimits:
    """Limits of one learner: the model's `vocabulary`, and the maximum number of `tokens` in a row (its token
    budget)."""

    vocabulary: int
    tokens: int

    def violation(self, trajectory: Trajectory) -> str:
        """Return why the learner cannot train a trajectory, with the setting to change; empty if it can."""
        trained = [row for row in trajectory.rows if len(row.loss_mask_T) and row.loss_mask_T.any()]
        if trained and not trajectory.temperature > 0.0:
            return f"temperature {trajectory.temperature:g} has no gradient: set sampling.temperature above 0"
        return next(filter(None, map(self._row_violation, trained)), "")

    def _row_violation(self, row: Row) -> str:
        length = len(row.tokens_T)
        if not length == len(row.loss_mask_T) == len(row.logprobs_T):
            return "the tokens, mask and log-probabilities of a row differ in length"
        if row.kinds_T is not None and len(row.kinds_T) != length:
            return "the tokens and their kinds differ in length in a row"
        if length > self.tokens:
            return (
                f"a row of {length} tokens exceeds the learner's token budget of {self.tokens}: raise "
                "learner.token_budget, or lower sampling.max_context_tokens"
            )
        if row.loss_mask_T[0]:
            return "the first token of a row is trained, but has no context: mask it"
        if not 0 <= int(row.tokens_T.min()) <= int(row.tokens_T.max()) < self.vocabulary:
            return f"a token id is outside the model's vocabulary of {self.vocabulary}: check the tokenizer"
        return ""
