"""Rows of ended attempts in the ledger, as what they add to the counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Final, TypeAlias

import orjson

from headrace.actors.telemetry.prometheus.attempts import EVALUATION, TRAIN, EndedAttempt, breakdown_of
from headrace.buffer.audit.joined_rows import JoinedRows

IN_JSON: Final = "IN (SELECT value FROM json_each(?))"
"""Condition of SQL that takes the result of `json_of`."""
Key: TypeAlias = tuple[str, int]
"""Rollout and number of an attempt."""
End: TypeAlias = tuple[float, str, str, int, bool]
"""End of an attempt: time, purpose, rollout, number, and whether the end was counted before, without its times."""


def json_of(values: Collection[str]) -> str:
    """Return values as the argument of `IN_JSON`."""
    return orjson.dumps(sorted(values)).decode()


def all_ends(rows: JoinedRows) -> Iterator[End]:
    """Return the ends of all training attempts, in order."""
    columns = ("ended_at_s", f"'{TRAIN}'", "rollout_id", "attempt", "0")
    return iter(rows.select("attempts", columns, where="ended_at_s NOTNULL", order="ended_at_s, rollout_id, attempt"))


def training_attempts(rows: JoinedRows, ids: str) -> Iterator[tuple[tuple[str, str, int], EndedAttempt]]:
    """Yield the ended attempts of rollouts, by purpose, rollout and number. `ids` is a result of `json_of`."""
    groups = dict(rows.select("rollouts", ("rollout_id", "group_id"), where=f"rollout_id {IN_JSON}", values=(ids,)))
    named = json_of({*groups.values()})
    tasks = dict(rows.select("groups", ("group_id", "task_id"), where=f"group_id {IN_JSON}", values=(named,)))
    columns = (
        *("rollout_id", "attempt", "issued_at_s", "ended_at_s", "cause", "reward", "turns", "trace_id", "host"),
        "breakdown",
    )
    for rollout_id, number, issued_s, ended_s, cause, reward, turns, trace_id, host, breakdown in rows.select(
        "attempts", columns, where=f"rollout_id {IN_JSON} AND ended_at_s NOTNULL", values=(ids,)
    ):
        parts, labels = breakdown_of(breakdown)
        yield (
            (TRAIN, rollout_id, number),
            EndedAttempt(
                purpose=TRAIN,
                cause=cause or "unknown",
                ended_at_s=ended_s,
                duration_s=max(0.0, ended_s - issued_s),
                task=tasks[groups[rollout_id]],
                host=host,
                trace_id=trace_id,
                turns=turns,
                rewarded=reward is not None,
                parts_s=parts,
                labels=labels,
            ),
        )


def evaluation_attempts(rows: JoinedRows, ids: str) -> Iterator[tuple[tuple[str, str, int], EndedAttempt]]:
    """Yield the answers of evaluations, by purpose, rollout and number. `ids` is a result of `json_of`."""
    columns = ("rollout_id", "attempt", "task_id", "cause", "recorded_at_s", "host", "trace_id", "breakdown")
    for rollout_id, number, task, cause, at_s, host, trace_id, breakdown in rows.select(
        "evaluations", columns, where=f"rollout_id {IN_JSON}", values=(ids,)
    ):
        parts, labels = breakdown_of(breakdown)
        yield (
            (EVALUATION, rollout_id, number),
            EndedAttempt(
                purpose=EVALUATION,
                cause=cause,
                ended_at_s=at_s,
                duration_s=sum(parts.values()),
                task=task,
                host=host,
                trace_id=trace_id,
                parts_s=parts,
                labels=labels,
            ),
        )


class EvaluationEnds:
    """The answers of evaluations, each once. Of evaluations that have ended only their tags are remembered: nothing
    more is recorded under them."""

    def __init__(self) -> None:
        self._evaluated: defaultdict[str, set[Key]] = defaultdict(set)
        self._ended_tags: set[str] = set()

    def new(self, rows: JoinedRows) -> Iterator[End]:
        """Yield the answers of evaluations that were not counted yet."""
        over = {tag for (tag,) in rows.select("ended_evaluations", ("tag",))}
        tags = over | {tag for (tag,) in rows.select("evaluations", ("DISTINCT tag",))}
        columns = ("recorded_at_s", "rollout_id", "attempt", "tag")
        for at_s, rollout_id, attempt, tag in rows.select(
            "evaluations", columns, where=f"tag {IN_JSON}", values=(json_of(tags - self._ended_tags),)
        ):
            if (rollout_id, attempt) not in self._evaluated[tag]:
                self._evaluated[tag].add((rollout_id, attempt))
                yield at_s, EVALUATION, rollout_id, attempt, False
        self._ended_tags |= over
        for tag in over:
            self._evaluated.pop(tag, None)
