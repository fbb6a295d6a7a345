"""Scheduling report of a run for `headrace report RUN`, read from its directory.

Invariant: only files are read and no process is queried, so the run may have ended, may have been killed, or may still
be running.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from headrace.actors.engines.members_file import EngineStatus, read_roster
from headrace.actors.record.files.collapse import ADVICE, Collapse, collapses
from headrace.actors.record.files.logprob_drift import DriftTotals, drift_totals
from headrace.actors.record.files.metrics import read_metrics
from headrace.actors.record.files.push_costs import PushCosts, push_costs
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.record.files.service_totals import ServiceTotals, service_totals
from headrace.actors.record.files.utilisation import StationLoad, bottleneck, mean_in_flight, mean_loads, service_shares
from headrace.actors.run.changes import CheckpointConfiguration, newest_configuration
from headrace.actors.telemetry.prometheus.ledger import breakdown_of
from headrace.buffer.audit.evidence import streamed
from headrace.buffer.audit.joined_rows import JoinedRows
from headrace.buffer.audit.report import DecileReport, LeftOut, acceptance
from headrace.buffer.audit.source_report import SourceReport, source_reports
from headrace.policies.learners.checkpoint_retention import BestCheckpoint, best_checkpoint
from headrace.serve.gateway.capture.coverage import WINDOW_SESSIONS, Coverage

CRITIC_STEPS = 10
"""Maximum number of last steps over which the critic is rated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlySealing:
    """Totals over the groups that were sealed before all members had finished. Means are over the groups' means; they
    are None if there are no such groups."""

    groups: int
    late: int
    late_finished: int
    early_mean_s: float | None
    late_mean_s: float | None
    early_mean_reward: float | None
    late_mean_reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Scheduling report of one run. `staleness` counts trained rollouts of the surviving path by staleness, `causes`
    counts finished attempts by cause, and `evicted` counts rollouts that exceeded the bound; `parked` maps tasks that
    are no longer issued to their last failure."""

    steps: int
    staleness: dict[int, int]
    causes: dict[str, int]
    evicted: int
    deciles: tuple[DecileReport, ...]
    early: EarlySealing
    left_out: tuple[LeftOut, ...]
    """The groups that `early` sums up; only in the JSON."""
    parked: dict[str, str]
    stations: tuple[StationLoad, ...]
    held_up_by: str | None
    services: dict[str, ServiceTotals]
    """Calls to each service over the whole run."""
    service_shares: dict[str, float]
    """Share of the rollouts' time in each service, waits for its slots included."""
    slowed_to: int | None
    """Lowest limit on rollouts in flight set by `dispatcher.pacing`; None when it never lowered the limit."""
    slowed_by: str
    """Reason for that limit."""
    demotions: tuple[str, ...]
    """Changes of `push.transport` after failures, one line each."""
    pushes: PushCosts | None
    """Costs of the weight pushes; None if there were none."""
    drift: DriftTotals | None
    """Log-probability mismatch and lag of the trained tokens; None if the learner did not measure them."""
    collapses: tuple[Collapse, ...]
    """Families and sources of tasks that collapsed, in order."""
    coverage: Coverage
    """Sampled and trained tokens of the latest training attempts."""
    explained_variance: float | None
    """Share of the variance of returns that the critic explained, mean of the last steps; None without a critic."""
    best: BestCheckpoint | None
    """Checkpoint with the highest success on held-out tasks; None if no evaluation has rated one that still exists."""
    checkpoint: CheckpointConfiguration | None
    """Configuration with which the newest checkpoint was trained; None without a checkpoint."""
    engines: tuple[EngineStatus, ...]
    """Last status of every engine, including those that have left the group."""
    sources: dict[str, SourceReport]
    """What became of the rollouts of each source of tasks; empty in a run without sources."""
    source_success: dict[str, float | None]
    """Success of each source in the last evaluation; empty before the first, and in a run without sources."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"staleness": {str(staleness): count for staleness, count in self.staleness.items()}}

    def tables(self) -> RenderableType:
        """Render the report for the terminal."""
        staleness = ", ".join(f"{staleness}: {count}" for staleness, count in self.staleness.items())
        causes = ", ".join(f"{cause} {count}" for cause, count in self.causes.items())
        finished = sum(decile.evicted for decile in self.deciles)
        lines = [
            f"{self.steps} steps; trained rollouts by staleness {staleness or '-'}",
            f"exceeded the staleness bound: {self.evicted}, of which {finished} had finished",
            f"finished attempts: {causes or '-'}",
        ]
        if self.early.groups:
            lines.append(
                f"{self.early.groups} groups were sealed early, without {self.early.late} members, of which "
                f"{self.early.late_finished} have finished since; mean reward {_number(self.early.early_mean_reward)} "
                f"early, {_number(self.early.late_mean_reward)} late"
            )
        lines += [f"parked: {task} ({failure})" for task, failure in self.parked.items()]
        lines += [f"station {load.line()}" for load in self.stations]
        lines += [f"held up by {self.held_up_by}"] if self.held_up_by else []
        for name, totals in self.services.items():
            share = f", {self.service_shares[name]:.0%} of the rollouts' time" if name in self.service_shares else ""
            lines.append(f"service {name}: {totals.line()}{share}")
        for engine in self.engines:
            line = f"engine {engine.engine_id} at {engine.url or '-'}: {engine.state}, version {engine.version or '-'}"
            lines.append(f"{line}, load {engine.load}" + (f" ({engine.reason})" if engine.reason else ""))
        lines += [f"slowed down to {self.slowed_to} rollouts: {self.slowed_by}"] if self.slowed_by else []
        lines += [*self.demotions, *([self.pushes.line()] if self.pushes else [])]
        lines += self.drift.lines() if self.drift else []
        lines += [f"COLLAPSE: {found.line()}" for found in self.collapses]
        lines += [f"a collapse: {ADVICE}"] if any(found.until is None for found in self.collapses) else []
        if alarm := self.coverage.alarm:
            lines.append(f"coverage of the last {self.coverage.sessions} attempts: {alarm}: {self.coverage.advice}")
        if self.explained_variance is not None:
            lines.append(f"critic: explained variance {self.explained_variance:.3f}, mean of the last steps")
        if self.best is not None:
            best = self.best
            lines.append(f"best checkpoint {best.version}: held-out success {best.success:.1%} (evaluation {best.tag})")
        lines += self.checkpoint.lines() if self.checkpoint else []
        sources = self.source_table()
        if not self.deciles:
            return Group(*lines, *sources)
        # The outcome of each decile shows whether long rollouts vanish from training.
        fates = ("finished", "trained", "evicted", "undone", "filtered", "held", "cancelled")
        table = Table("duration up to", box=None, title_justify="left")
        for name in (*fates, "mean reward"):
            table.add_column(name, justify="right")
        for decile in self.deciles:
            counts = (str(getattr(decile, name)) for name in fates)
            table.add_row(f"{decile.longest_s:.3g} s", *counts, _number(decile.mean_reward))
        return Group(*lines, *sources, "", table)

    def source_table(self) -> tuple[RenderableType, ...]:
        """Return a table of the sources, and a line for each that is failing, if the run has sources."""
        if not self.sources:
            return ()
        table = Table("source", box=None, title_justify="left")
        for name in (
            "share",
            "realised",
            "trained",
            "reward",
            "staleness",
            "evictions",
            "filtered",
            "infra",
            "held-out",
        ):
            table.add_column(name, justify="right")
        for name, source in self.sources.items():
            table.add_row(
                name,
                _share(source.share),
                _share(source.realised),
                str(source.trained),
                _number(source.mean_reward),
                _number(source.mean_staleness),
                *map(str, (source.evictions, source.filtered, source.infra)),
                _share(self.source_success.get(name)),
            )
        failing = [
            f"source {name}: {source.infra} attempts failed, {source.parked} tasks are parked; last: "
            f"{source.last_failure}"
            for name, source in self.sources.items()
            if source.infra
        ]
        return ("", table, *failing)


def report_of(directory: RunDirectory) -> RunReport:
    """Compute the report from the run's files. Raises LedgerRefused."""
    staleness: Counter[int] = Counter()
    with streamed(directory.path) as evidence:
        accepted = acceptance(evidence)
        sources = source_reports(evidence)
        coverage = latest_coverage(evidence.rows)
        steps = Counter(step.batch_id for step in evidence.surviving)
        for batch in evidence.batches:
            for _ in range(steps[batch.batch_id]):
                staleness.update(member.staleness for member in batch.members)
    groups = accepted.left_out
    kinds = ("stations", "services", "push", "push_demotion", "step", "mismatch_alarm", "evaluation")
    metrics = read_metrics(directory.metrics, kinds)
    records = [record for record in metrics if record["kind"] == "stations"]
    loads = mean_loads(records)
    in_flight = mean_in_flight(records)
    full = bottleneck(loads, in_flight)
    slowed = [record for record in records if record.get("slowed_by")]
    best = best_checkpoint(directory.checkpoints)
    slowest = min(slowed, key=lambda record: record["rollout_limit"], default=None)
    judged = [record["explained_variance"] for record in metrics if "explained_variance" in record]
    evaluated = [record["sources"] for record in metrics if record["kind"] == "evaluation" and record.get("sources")]
    return RunReport(
        steps=sum(not commit.skipped for commit in evidence.surviving),
        staleness=dict(sorted(staleness.items())),
        causes=accepted.causes,
        evicted=accepted.evicted,
        deciles=accepted.deciles,
        early=EarlySealing(
            groups=len(groups),
            late=sum(group.late for group in groups),
            late_finished=sum(group.late_finished for group in groups),
            early_mean_s=_mean(group.early_mean_s for group in groups),
            late_mean_s=_mean(group.late_mean_s for group in groups),
            early_mean_reward=_mean(group.early_mean_reward for group in groups),
            late_mean_reward=_mean(group.late_mean_reward for group in groups),
        ),
        left_out=groups,
        parked={task.task_id: task.last_failure for task in evidence.tasks if task.parked},
        stations=loads,
        held_up_by=None if full is None else str(full.station),
        services=service_totals(metrics),
        service_shares=service_shares(loads, in_flight),
        slowed_to=slowest["rollout_limit"] if slowest else None,
        slowed_by=slowest["slowed_by"] if slowest else "",
        demotions=tuple(
            f"pushed by {record['transport']} since {record['version']}: {record['reason']}"
            for record in metrics
            if record["kind"] == "push_demotion"
        ),
        pushes=push_costs(metrics),
        drift=drift_totals(metrics),
        collapses=collapses(record for record in metrics if record["kind"] == "step"),
        coverage=coverage,
        explained_variance=_mean(judged[-CRITIC_STEPS:]),
        best=None if best is None else best[0],
        checkpoint=newest_configuration(directory),
        engines=read_roster(directory.engines).engines,
        sources=sources,
        source_success={name: own["success"] for name, own in evaluated[-1].items()} if evaluated else {},
    )


def latest_coverage(rows: JoinedRows) -> Coverage:
    """Return the tokens of the latest training attempts that sampled any, by the reasons that mask most of each."""
    columns, ended = ("breakdown", "end_sequence"), "breakdown NOTNULL AND end_sequence NOTNULL"
    # A run of months has millions: only those that are looked at are read.
    latest = rows.select("attempts", columns, where=ended, order="end_sequence DESC")
    sampled = (coverage for breakdown, _ in latest if (coverage := coverage_of(breakdown)).sampled > 0)
    return Coverage.together(list(islice(sampled, WINDOW_SESSIONS)))


def coverage_of(breakdown: str) -> Coverage:
    """Return the tokens of one attempt; none if its breakdown lacks them."""
    _, labels = breakdown_of(breakdown)
    sampled, trained, reason = (labels.get(name) for name in ("sampled_tokens", "trained_tokens", "masked"))
    if not isinstance(sampled, int | float) or not isinstance(trained, int | float):
        return Coverage()
    masked = {str(reason): int(sampled - trained)} if reason else {}
    return Coverage(sessions=1, sampled=int(sampled), trained=int(trained), masked=masked)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
