"""Summary of a run, computed from its metrics, its ledger and the sandboxes left on this host."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

from headrace.actors.record.files.metrics import read_metrics
from headrace.actors.record.files.push_costs import push_costs
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.record.files.utilisation import bottleneck, mean_in_flight, mean_loads
from headrace.actors.telemetry.spans.store import SpanFolder
from headrace.buffer.audit.evidence import streamed
from headrace.buffer.audit.verify import audit
from headrace.sandboxes.host.leftovers import sandboxes_left


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Summary of one run. `completed` is true when all steps were done or the data was used up. Success is a share in
    [0, 1], with the mean reward beside it; both are None if that evaluation did not run. Staleness is in optimizer
    updates; `rollouts` counts training attempts that ended with a result; wall times are in seconds. `trained_twice`,
    `lost` and `max_staleness_seen` are those of `ledger verify`; `spans_lost` counts lost spans by reason;
    `sandboxes_leaked` counts processes on this host. `utilisation` is the average share of its capacity that each
    station had in use over the whole run, without the stations that have no capacity; `held_up_by` names the
    bottleneck."""

    run: str
    completed: bool
    base_success: float | None
    final_success: float | None
    base_reward: float | None
    final_reward: float | None
    steps: int
    versions: int
    rollouts: int
    mean_staleness: float
    max_staleness: int | None
    max_staleness_seen: int
    trained_twice: int
    lost: int
    sandboxes_leaked: int
    evaluation_answers: int
    evaluation_infra: int
    in_flight_at_push_min: int | None
    push_s_mean: float | None
    engine_stall_share: float | None
    learner_idle_share: float
    utilisation: dict[str, float]
    held_up_by: str | None
    train_wall_s: float | None
    total_wall_s: float
    spans_lost: dict[str, int]
    ledger_clean: bool
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Render the summary for the terminal."""
        base, final = ("-" if share is None else f"{share:.1%}" for share in (self.base_success, self.final_success))
        verdict = "clean" if self.ledger_clean else f"NOT CLEAN: {self.problems[0]}"
        wall = "-" if self.train_wall_s is None else f"{self.train_wall_s:.0f} s"
        busy = ", ".join(f"{station} {share:.0%}" for station, share in self.utilisation.items())
        lost = ", ".join(f"{number} {reason}" for reason, number in sorted(self.spans_lost.items()))
        held_up = f"; held up by {self.held_up_by}" if self.held_up_by else ""
        rewards = ("-" if reward is None else f"{reward:.3f}" for reward in (self.base_reward, self.final_reward))
        graded = (self.base_reward, self.final_reward) != (self.base_success, self.final_success)
        rewarded = f", reward {' -> '.join(rewards)}" if graded else ""
        return [
            f"held-out success {base} -> {final}{rewarded}   ({self.evaluation_answers} sampled answers)",
            f"{self.steps} steps, {self.rollouts} rollouts, trained in {wall}, {self.total_wall_s:.0f} s in all",
            f"staleness mean {self.mean_staleness:.2f}, largest {self.max_staleness_seen} of {self.max_staleness}",
            *([f"in use: {busy}{held_up}"] if busy else []),
            *([f"spans lost: {lost} (guide 'Run directory')"] if lost else []),
            f"ledger {verdict}; trained twice {self.trained_twice}, lost {self.lost}; leaked {self.sandboxes_leaked}",
            f"see {self.run}/reward.png" + ("" if self.completed else f"; continue with: headrace resume {self.run}"),
        ]


def summarize(directory: RunDirectory, *, completed: bool) -> RunSummary:
    """Compute the summary from the run's files. Raises LedgerRefused when the directory has no readable ledger."""
    metrics = read_metrics(directory.metrics, ("evaluation", "step", "push", "stations"))
    evaluations = {record["tag"]: record for record in metrics if record["kind"] == "evaluation"}
    steps = [record for record in metrics if record["kind"] == "step"]
    # The first push of each learner comes before there are any rollouts that it could pause.
    pushes = [
        record
        for record in metrics
        if record["kind"] == "push"
        and record["rollouts_in_flight"] is not None
        and not record["version"].endswith(".0")
    ]
    costs = push_costs(metrics)
    with streamed(directory.path) as evidence:
        report = audit(evidence)
        offered, started_s = evidence.offered()
    commits_s = [commit.committed_at_s for commit in evidence.commits]
    driven = read_driven_time(directory.sessions, (*commits_s, *(record["time_s"] for record in metrics)))
    base, final = evaluations.get("base"), evaluations.get("final")
    times = [sum(record[f"{part}_s"] for record in steps) for part in ("idle", "step", "push")]
    stations = [record for record in metrics if record["kind"] == "stations"]
    loads = mean_loads(stations)
    slowest = bottleneck(loads, mean_in_flight(stations))
    return RunSummary(
        run=str(directory.path),
        completed=completed,
        base_success=base["success"] if base else None,
        final_success=final["success"] if final else None,
        base_reward=base["mean_reward"] if base else None,
        final_reward=final["mean_reward"] if final else None,
        steps=report.steps,
        versions=len({commit.version for commit in evidence.commits if not commit.skipped}) + len(evidence.epochs),
        rollouts=offered,
        mean_staleness=report.mean_staleness,
        max_staleness=report.max_staleness,
        max_staleness_seen=report.max_staleness_seen,
        trained_twice=report.trained_twice,
        lost=report.lost,
        sandboxes_leaked=sandboxes_left(directory.path),
        evaluation_answers=final["answers"] if final else (base["answers"] if base else 0),
        evaluation_infra=sum(record["infra"] for record in evaluations.values()),
        in_flight_at_push_min=min((record["rollouts_in_flight"] for record in pushes), default=None),
        push_s_mean=sum(record["total_s"] for record in pushes) / len(pushes) if pushes else None,
        engine_stall_share=None if costs is None else costs.stall_share,
        learner_idle_share=times[0] / sum(times) if sum(times) else 0.0,
        utilisation={str(load.station): load.utilisation for load in loads if load.utilisation is not None},
        spans_lost=dict(SpanFolder.of_run(directory.path).lost()),
        held_up_by=None if slowest is None else str(slowest.station),
        train_wall_s=driven.within_s(started_s, max(commits_s)) if commits_s and started_s is not None else None,
        total_wall_s=driven.total_s(),
        ledger_clean=report.clean,
        problems=report.problems,
    )


@dataclass(frozen=True, slots=True)
class DrivenTime:
    """Spans of Unix time in which the run was driven, oldest first, without the gaps between drivers. A driver that was
    killed is assumed to have ended at the last record before the next driver started."""

    spans: tuple[tuple[float, float], ...]

    def total_s(self) -> float:
        """Return the sum of all spans, in seconds."""
        return sum(ended_s - started_s for started_s, ended_s in self.spans)

    def within_s(self, first_s: float, last_s: float) -> float:
        """Return the driven time between `first_s` and `last_s`."""
        return sum(max(0.0, min(ended_s, last_s) - max(started_s, first_s)) for started_s, ended_s in self.spans)


def read_driven_time(path: Path, signs_s: Iterable[float]) -> DrivenTime:
    """Read the spans from `sessions.jsonl`; `signs_s` are times at which the run recorded something."""
    ends, signs, spans = dict(_sessions(path)), sorted(signs_s), []
    for start, until in pairwise([*sorted(ends), float("inf")]):
        place = bisect_left(signs, until)
        last_sign = max(start, signs[place - 1]) if place else start
        spans.append((start, ends[start] or last_sign))
    return DrivenTime(tuple(spans))


def _sessions(path: Path) -> Iterator[tuple[float, float | None]]:
    """Yield start and end of each driver; the end is None while it is unknown. Lines torn by a crash are skipped."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            session = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(session, dict) and isinstance(session.get("started_s"), float) and "ended_s" in session:
            yield session["started_s"], session["ended_s"]
