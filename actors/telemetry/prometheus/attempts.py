"""What an attempt that has ended adds to the counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from headrace.actors.telemetry.prometheus import table
from headrace.actors.telemetry.prometheus.counts import Counts
from headrace.buffer.trajectories.breakdown import OFFER, OTHER, QUEUE, Label, is_of_agent
from headrace.buffer.trajectories.types import Cause

TRAIN: Final = "train"
EVALUATION: Final = "evaluation"
UNMEASURED: Final = "unmeasured"
"""Value of the label `part` for the part `other` of a breakdown: `other` sums the values beyond a label's limit."""
PROVIDER: Final = "headrace"
"""Value of `gen_ai.provider.name`."""
_FAILED: Final = (Cause.INFRA, Cause.EVALUATOR, Cause.POISON)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedAttempt:
    """An attempt that has ended: times in seconds, `ended_at_s` in Unix time. Without a breakdown, `parts_s` is
    empty."""

    purpose: str
    cause: str
    ended_at_s: float
    duration_s: float
    task: str = ""
    host: str = ""
    trace_id: str = ""
    turns: int = 0
    rewarded: bool = False
    parts_s: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, Label] = field(default_factory=dict)

    @property
    def described(self) -> bool:
        """True if it is known where the time went."""
        return bool(self.parts_s)

    @property
    def sandbox_s(self) -> float:
        """Seconds with a sandbox: everything but waiting for a place and for the buffer."""
        return sum(seconds for part, seconds in self.parts_s.items() if part not in (QUEUE, OFFER))

    def number(self, label: str) -> float:
        """Return a label that is a number, never negative; 0 where it is unknown."""
        value = self.labels.get(label, 0)
        return max(0.0, float(value)) if isinstance(value, int | float) else 0.0


def breakdown_of(breakdown: str | None) -> tuple[dict[str, float], dict[str, Label]]:
    """Return the parts and labels of a row, never negative. A damaged breakdown counts as none."""
    if breakdown is None:
        return {}, {}
    try:
        document: dict[str, Any] = orjson.loads(breakdown)
        return {part: max(0.0, seconds) for part, seconds in document["parts_s"].items()}, dict(document["labels"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}, {}


def count_end(counts: Counts, attempt: EndedAttempt) -> None:
    """Count that an attempt has ended."""
    counts.add(table.ATTEMPTS, attempt.cause, attempt.purpose)
    counts.observe(
        table.ATTEMPT_S,
        attempt.purpose,
        value=attempt.duration_s,
        trace_id=attempt.trace_id,
        at_s=attempt.ended_at_s,
    )


def count_description(counts: Counts, attempt: EndedAttempt) -> None:
    """Count where the time of an ended attempt went, and what it used."""
    purpose = attempt.purpose
    for part, seconds in attempt.parts_s.items():
        name = UNMEASURED if part == OTHER else part
        counts.observe(table.PART_S, name, purpose, value=seconds, trace_id=attempt.trace_id, at_s=attempt.ended_at_s)
    if attempt.host:
        counts.add(table.HOST_ATTEMPTS, attempt.host, attempt.cause)
    engines = attempt.labels.get("engines")
    for engine in engines if isinstance(engines, list | tuple) else ():
        counts.add(table.ENGINE_ATTEMPTS, str(engine))
    for kind, label in (("prompt", "prompt_tokens"), ("cached", "cached_tokens"), ("sampled", "sampled_tokens")):
        counts.add(table.TOKENS_USED, kind, purpose, by=attempt.number(label))
    counts.add(table.RETRACTIONS, by=attempt.number("retractions"))
    counts.add(table.SANDBOX_S, purpose, by=attempt.sandbox_s)
    counts.add(table.SANDBOX_CPU_S, purpose, by=attempt.number("cpu_s"))
    if "warm" in attempt.labels:
        counts.add(table.BOOTS, str(bool(attempt.labels["warm"])).lower())
        counts.add(table.BOOT_TRIES, by=attempt.number("boot_tries"))
    if agent_s := sum(seconds for part, seconds in attempt.parts_s.items() if is_of_agent(part)):
        count_invocation(counts, attempt, agent_s)


def count_invocation(counts: Counts, attempt: EndedAttempt, agent_s: float) -> None:
    """Count the agent of an attempt, which took `agent_s` seconds, under the names of the GenAI conventions."""
    agent, trace_id, at_s = str(attempt.labels.get("agent", "")), attempt.trace_id, attempt.ended_at_s
    error = attempt.cause if attempt.cause in _FAILED else ""
    turns = attempt.number("turns") or attempt.turns
    counts.observe(table.INVOKE_AGENT_S, agent, error, value=agent_s, trace_id=trace_id, at_s=at_s)
    counts.observe(table.INFERENCE_CALLS, agent, value=turns, trace_id=trace_id, at_s=at_s)
    for kind, label in (("input", "prompt_tokens"), ("output", "sampled_tokens")):
        if label in attempt.labels:
            tokens = attempt.number(label)
            operation = ("invoke_agent", PROVIDER, kind)
            counts.observe(table.TOKEN_USAGE, *operation, value=tokens, trace_id=trace_id, at_s=at_s)
