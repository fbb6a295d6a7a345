"""The classification of results as the ledger counts them.

Invariants:
- A failure has no reward, whatever the worker reports; a result that contradicts itself counts as an infra failure.
- Trained tokens are counted by the version that sampled them, from the trajectory itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from headrace.buffer.core.records import VersionTokens
from headrace.buffer.trajectories.breakdown import Breakdown
from headrace.buffer.trajectories.codec import refuse_unstorable
from headrace.buffer.trajectories.row_limits import RowLimits
from headrace.buffer.trajectories.sanitizer import (
    clean_text,
    plain_breakdown,
    plain_float,
    plain_int,
    plain_scores,
    plain_timeline,
    plain_version,
)
from headrace.buffer.trajectories.step_scores import StepScores
from headrace.buffer.trajectories.types import Cause, Outcome, RolloutResult, Row, Trajectory, check_reward
from headrace.buffer.trajectories.versions import PolicyVersion, VersionTree

FAILED = frozenset({Cause.INFRA, Cause.EVALUATOR, Cause.POISON})
"""Causes that lead to a new attempt and count as a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorableResult:
    """A result in the form in which the ledger stores it: every string and number has been made storable."""

    outcome: Outcome
    trained: tuple[VersionTokens, ...] = ()
    turns: int = 0
    phases_s: tuple[tuple[str, float], ...] = ()
    trace_id: str = ""
    host: str = ""
    engine_failed: bool = False
    scores: StepScores | None = None
    breakdown: Breakdown | None = None
    timeline: str | None = None
    untrainable: bool = False
    """The result exceeds the limits of the learner, so it counts as an infra failure."""


def classify(
    result: RolloutResult, tree: VersionTree, *, masked: bool = False, limits: RowLimits | None = None
) -> StorableResult:
    """Return the result as the ledger counts it. With `masked`, tokens that cannot be trained on are counted too, for
    example those of an evaluation sampled at temperature 0.

    A failure has no reward, whatever the worker reports; a result that contradicts itself, cannot be stored or exceeds
    the `limits` of the learner counts as an infra failure.
    """
    try:
        outcome = _plain_outcome(result.outcome)
        counts = outcome.cause not in FAILED and outcome.cause is not Cause.CANCELLED
        trained = trained_tokens(result.trajectory, tree, masked=masked) if counts else ()
        violation = limits.violation(result.trajectory) if limits and trained and result.trajectory else ""
        if violation:
            outcome, trained = Outcome.infra(f"the learner cannot train this result: {violation}"), ()
        scores = None
        # Scores of a failed attempt act on nothing.
        if result.scores is not None and outcome.reward is not None:
            scores = plain_scores(result.scores, result.trajectory)
            if not math.isclose(scores.reward, outcome.reward, rel_tol=1e-9, abs_tol=1e-9):
                raise ValueError(f"reward {outcome.reward}, but its outcome and scores give {scores.reward}")
        return StorableResult(
            outcome=outcome,
            trained=trained,
            turns=plain_int(result.turns),
            phases_s=tuple((clean_text(name), plain_float(seconds)) for name, seconds in result.phases_s),
            trace_id=clean_text(result.trace_id),
            host=clean_text(result.host),
            engine_failed=bool(result.engine_failed),
            scores=scores,
            breakdown=None if result.breakdown is None else plain_breakdown(result.breakdown),
            timeline=None if result.breakdown is None else plain_timeline(result.breakdown.timeline).to_json(),
            untrainable=bool(violation),
        )
    except Exception as error:  # noqa: BLE001 - a foreign worker may send anything; only its own result is lost
        return StorableResult(outcome=Outcome.infra(clean_text(f"malformed result: {error}")))


def _plain_outcome(outcome: Outcome) -> Outcome:
    """Return the outcome in a form that can be stored. Raises ValueError, TypeError."""
    plain = Outcome(
        reward=None,
        solved=bool(outcome.solved),
        trainable=bool(outcome.trainable),
        cause=Cause(outcome.cause),
        detail=clean_text(outcome.detail),
    )
    if plain.cause in FAILED or plain.cause is Cause.CANCELLED:
        return replace(plain, solved=False, trainable=False)
    # A spent budget goes with either verdict.
    if plain.cause is not Cause.BUDGET and plain.solved != (plain.cause is Cause.SOLVED):
        raise ValueError(f"cause {plain.cause} with solved = {plain.solved}")
    return replace(plain, reward=check_reward(outcome.reward))


def trained_tokens(
    trajectory: Trajectory | None, tree: VersionTree, *, masked: bool = False
) -> tuple[VersionTokens, ...]:
    """Return how many trained tokens each version sampled; with `masked`, tokens outside the loss count too. Raises
    ValueError or CodecError when arrays or spans do not match or cannot be stored, or when a version is unknown."""
    if trajectory is None:
        return ()
    refuse_unstorable(trajectory)
    counts: dict[PolicyVersion, int] = {}
    for row in trajectory.rows:
        for version, tokens in _row_tokens(row, masked=masked):
            counts[version] = counts.get(version, 0) + tokens
    for version in counts:
        if version.epoch not in tree.forks:
            raise ValueError(f"sampled by version {version}, whose epoch was never opened")
    return tuple(VersionTokens(version=plain_version(version), tokens=counts[version]) for version in sorted(counts))


def stale_kv_tokens(trajectory: Trajectory) -> int:
    """Return the number of trained tokens that were sampled with keys and values from older weights."""
    return sum(
        int(row.loss_mask_T[span.start : span.end].sum())
        for row in trajectory.rows
        for span in row.versions
        if span.stale_kv
    )


def _row_tokens(row: Row, *, masked: bool) -> list[tuple[PolicyVersion, int]]:
    length = len(row.tokens_T)
    if len(row.loss_mask_T) != length or len(row.logprobs_T) != length:
        raise ValueError("the arrays of a row differ in length")
    cumulative = np.concatenate(([0], np.cumsum(row.loss_mask_T)))
    counts, end, trained = [], 0, 0
    for span in row.versions:
        if not end <= span.start < span.end <= length:
            raise ValueError(f"version span [{span.start}, {span.end}) is out of range or overlaps another")
        end = span.end
        in_loss = int(cumulative[span.end] - cumulative[span.start])
        trained += in_loss
        if tokens := span.end - span.start if masked else in_loss:
            counts.append((span.version, tokens))
    if trained != int(cumulative[-1]):
        raise ValueError("there are trained tokens outside the version spans")
    if not np.isfinite(row.logprobs_T).all():
        raise ValueError("log-probabilities are not finite")
    return counts
