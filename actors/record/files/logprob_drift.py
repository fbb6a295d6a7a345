"""Log-probability mismatch between learner and engines, and the lag of trained tokens: the alarm of a step, and a run's
totals.

Invariant: mismatch and lag are never mixed. The mismatch is measured only over tokens that the trained version sampled
itself, with keys and values of its own weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.actors.record.files.metrics import MismatchMetric
from headrace.buffer.trajectories.types import StepReport, TokenRatios


def mismatch_alarm(report: StepReport, above: float) -> MismatchMetric | None:
    """Return the alarm of a step whose mean mismatch is above `above` nats or not a number; None without one."""
    mismatch = None if report.drift is None else report.drift.mismatch
    # Written this way round because a NaN compares as false.
    if mismatch is None or mismatch.mean_abs_log_ratio <= above:
        return None
    return MismatchMetric(
        step=report.version.step,
        version=str(report.version),
        tokens=mismatch.tokens,
        mean=mismatch.mean_abs_log_ratio,
        max=mismatch.max_abs_log_ratio,
        alarm=above,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftTotals:
    """Totals over a run's steps. `mismatch` and `stale_kv` are None if no such token was computed; the shares are means
    over the steps, None if no step reported them. `alarms` counts steps over `learner.mismatch_alarm`, of which
    `last_alarm` is the last."""

    mismatch: TokenRatios | None
    by_staleness: Mapping[str, TokenRatios]
    stale_kv: TokenRatios | None
    capped_share: float | None
    padding_share: float | None
    alarms: int
    last_alarm: int | None

    def lines(self) -> list[str]:
        """Return the totals as lines of the report."""
        lines = []
        if self.mismatch is not None:
            lines.append(
                f"log-prob mismatch of learner and engines: mean {self.mismatch.mean_abs_log_ratio:.2g}, largest "
                f"{self.mismatch.max_abs_log_ratio:.2g} nats over {self.mismatch.tokens} tokens sampled by the trained "
                "version"
            )
        if self.alarms:
            lines.append(
                f"MISMATCH ALARM in {self.alarms} steps, last in step {self.last_alarm}: engine and learner do not "
                "compute the same policy"
            )
        parts = [
            f"{staleness}: {ratios.mean_ratio:.3f} (|log| {ratios.mean_abs_log_ratio:.2g})"
            for staleness, ratios in self.by_staleness.items()
        ]
        if self.stale_kv is not None:
            parts.append(f"stale_kv: {self.stale_kv.mean_ratio:.3f} (|log| {self.stale_kv.mean_abs_log_ratio:.2g})")
        lines += [f"mean ratio by staleness {', '.join(parts)}"] if parts else []
        shares = (("over the cap", self.capped_share), ("padding", self.padding_share))
        known = [f"{name} {share:.1%}" for name, share in shares if share is not None]
        return lines + ([f"computed tokens: {', '.join(known)}"] if known else [])


def drift_totals(metrics: Sequence[Mapping[str, Any]]) -> DriftTotals | None:
    """Return the totals of a run's steps; None if none has a comparison (simulated learners)."""
    steps = [record for record in metrics if record["kind"] == "step" and record.get("ratio_by_staleness")]
    if not steps:
        return None
    alarms = [record["step"] for record in metrics if record["kind"] == "mismatch_alarm"]
    keys = sorted({staleness for record in steps for staleness in record["ratio_by_staleness"]}, key=int)
    by_staleness = {key: _pooled(record["ratio_by_staleness"].get(key) for record in steps) for key in keys}
    known = {key: ratios for key, ratios in by_staleness.items() if ratios is not None}
    return DriftTotals(
        mismatch=known.get("0"),
        by_staleness=known,
        stale_kv=_pooled(record["stale_kv"] for record in steps),
        capped_share=_mean(record.get("capped_share") for record in steps),
        padding_share=_mean(record.get("padding_share") for record in steps),
        alarms=len(alarms),
        last_alarm=max(alarms, default=None),
    )


def _pooled(entries: Iterable[Mapping[str, Any] | None]) -> TokenRatios | None:
    """Pool entries of several steps. Entries with a value that was not finite are left out."""
    finite = [entry for entry in entries if entry is not None and None not in entry.values()]
    if not finite:
        return None
    tokens: int = sum(entry["tokens"] for entry in finite)

    def mean(key: str) -> float:
        total: float = sum(entry[key] * entry["tokens"] for entry in finite)
        return total / tokens

    return TokenRatios(
        tokens=tokens,
        mean_ratio=mean("mean_ratio"),
        mean_abs_log_ratio=mean("mean_abs_log_ratio"),
        max_abs_log_ratio=max(entry["max_abs_log_ratio"] for entry in finite),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
