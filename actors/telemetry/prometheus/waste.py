"""Counts of the attempts that were not trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace.actors.telemetry.prometheus import table
from headrace.actors.telemetry.prometheus.attempts import TRAIN, EndedAttempt, breakdown_of
from headrace.actors.telemetry.prometheus.counts import Counts
from headrace.actors.telemetry.prometheus.ledger_rows import IN_JSON, json_of
from headrace.buffer.audit.joined_rows import JoinedRows
from headrace.buffer.core.records import RolloutState
from headrace.buffer.trajectories.types import Cause

_REPEATED: Final = (Cause.INFRA, Cause.EVALUATOR, Cause.POISON, Cause.CANCELLED)
WASTED: Final = (*_REPEATED, RolloutState.EVICTED, RolloutState.FILTERED)
"""Reasons for which an attempt was not trained."""


def count_waste(counts: Counts, rows: JoinedRows, ended: Mapping[str, tuple[str, int]]) -> None:
    """Count the attempts of rollouts that were not trained. `ended` has the state and the last attempt of rollouts that
    can no longer change."""
    columns = ("rollout_id", "attempt", "cause", "breakdown")
    for rollout_id, number, cause, breakdown in rows.select(
        "attempts", columns, where=f"rollout_id {IN_JSON}", values=(json_of(ended),)
    ):
        state, last = ended[rollout_id]
        if number == last and state == RolloutState.TRAINED:
            continue
        # An earlier attempt failed, was cancelled, or had a result that became too stale.
        reason = state if number == last else cause if cause in _REPEATED else RolloutState.EVICTED
        parts, labels = breakdown_of(breakdown)
        attempt = EndedAttempt(
            purpose=TRAIN, cause=cause or "", ended_at_s=0.0, duration_s=0.0, parts_s=parts, labels=labels
        )
        counts.add(table.WASTED_ATTEMPTS, reason)
        counts.add(table.WASTED_TOKENS, reason, by=attempt.number("sampled_tokens"))
        counts.add(table.WASTED_SANDBOX_S, reason, by=attempt.sandbox_s)
