"""Cost of weight pushes: the record of each push in `metrics.jsonl`, and a run's totals.

Invariant: an engine stalls while its gate is closed. The stall share of a push refers to the engines' time since the
previous push, which is the time of the step that produced its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from headrace.actors.record.files.metrics import PushMetric
from headrace.policies.push.contract import PushReport


def push_record(report: PushReport, *, rollouts_in_flight: int | None, since_s: float | None) -> PushMetric:
    """Return the record of one push; `since_s` is the time since the end of the previous push, None for the first."""
    engines = report.engines
    return PushMetric(
        push_id=report.push_id,
        version=str(report.version),
        total_s=report.total_s,
        seconds=report.seconds,
        sent_bytes=report.sent_bytes,
        rollouts_in_flight=rollouts_in_flight,
        requests_in_flight=sum(item.in_flight for item in engines),
        requests_retracted=sum(item.retracted for item in engines),
        tokens_recomputed=sum(item.recomputed_tokens for item in engines),
        gate_s=[item.gate_s for item in engines],
        paused_s=[item.paused_s for item in engines],
        gb_per_s=[item.gb_per_s for item in engines],
        stall_share=report.gates_s / (len(engines) * since_s) if since_s else None,
        since_s=since_s,
        updated=list(report.updated),
        quarantined=list(report.quarantined),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PushCosts:
    """Totals over the pushes of a run.

    `seconds` (by phase), `total_s` and `gb_per_s` are means over the pushes; `gb_per_s` is None when no engine received
    data. `stall_share` is the share of the engines' time between the first push and the last during which their gates
    were closed. `learner_waited_s` is the total time for which the learner waited for a push.
    """

    pushes: int
    seconds: dict[str, float]
    total_s: float
    gb_per_s: float | None
    stall_share: float | None
    requests_retracted: int
    tokens_recomputed: int
    quarantined: int
    learner_waited_s: float

    def line(self) -> str:
        """Return the totals as one line of the report."""
        speed = "" if self.gb_per_s is None else f" at {self.gb_per_s:.2f} GB/s"
        stalled = "-" if self.stall_share is None else f"{self.stall_share:.1%}"
        return (
            f"{self.pushes} pushes, on average {self.total_s:.2f} s "
            f"(transfer {self.seconds.get('broadcast', 0):.2f} s{speed}); "
            f"engines stalled for {stalled} of their time; {self.requests_retracted} requests retracted, "
            f"{self.tokens_recomputed} tokens recomputed; {self.quarantined} engines failed; the learner waited "
            f"{self.learner_waited_s:.1f} s for pushes"
        )


def push_costs(metrics: Sequence[dict[str, Any]]) -> PushCosts | None:
    """Return the totals of a run's pushes; None if no record contains their costs (simulated engines)."""
    pushes = [record for record in metrics if record["kind"] == "push" and "gate_s" in record]
    if not pushes:
        return None
    speeds = [speed for record in pushes for speed in record["gb_per_s"] if speed]
    following = [record for record in pushes if record["since_s"]]
    engine_s = sum(len(record["gate_s"]) * record["since_s"] for record in following)
    return PushCosts(
        pushes=len(pushes),
        seconds={phase: fmean(record["seconds"][phase] for record in pushes) for phase in pushes[0]["seconds"]},
        total_s=fmean(record["total_s"] for record in pushes),
        gb_per_s=fmean(speeds) if speeds else None,
        stall_share=sum(sum(record["gate_s"]) for record in following) / engine_s if engine_s else None,
        requests_retracted=sum(record["requests_retracted"] for record in pushes),
        tokens_recomputed=sum(record["tokens_recomputed"] for record in pushes),
        quarantined=sum(len(record["quarantined"]) for record in pushes),
        learner_waited_s=sum(record["push_s"] for record in metrics if record["kind"] == "step"),
    )
