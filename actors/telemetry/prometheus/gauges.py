"""Gauges of a run from its newest records, the files of its workers and engines, and its file systems; lost spans.

Invariant: a record or file of another version, or a damaged one, costs the metrics that it would give and no others.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from headrace.actors.engines.members_file import read_roster
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.record.files.running import FOLDER, STUCK, read_running
from headrace.actors.telemetry.prometheus import table
from headrace.actors.telemetry.prometheus.counts import Counts
from headrace.actors.telemetry.prometheus.ledger_counts import LedgerCounts
from headrace.actors.telemetry.slow.in_flight import SILENT_S
from headrace.actors.telemetry.spans.store import SpanFolder
from headrace.serve.tracing.span_files import NOT_WRITTEN, QUEUE_FULL, REMOVED

logger = logging.getLogger(__name__)


def add_records(gauges: Counts, newest: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the gauges of the newest records, by kind."""
    for kind, add in OF_RECORDS.items():
        if (record := newest.get(kind)) is not None:
            try:
                add(gauges, record)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                logger.debug("a record of kind %s is not exported: %r", kind, error)


def add_step(gauges: Counts, record: Mapping[str, Any]) -> None:
    """Add the newest optimizer step."""
    gauges.set(table.STEP, to=record["step"])
    gauges.set(table.STEP_REWARD, to=record["reward"])
    for activity, key in (("training", "step_s"), ("waiting", "idle_s"), ("pushing", "push_s")):
        gauges.set(table.STEP_S, activity, to=record[key])
    if mismatch := record.get("mismatch"):
        gauges.set(table.MISMATCH, to=mismatch["mean_abs_log_ratio"])
    known = {"time_s", "step", "reward", "step_s", "idle_s", "push_s"}
    for name, value in sorted(record.items()):
        if name not in known and isinstance(value, int | float) and not isinstance(value, bool):
            gauges.set(table.STEP_VALUE, name, to=value)


def add_push(gauges: Counts, record: Mapping[str, Any]) -> None:
    """Add the newest push."""
    gauges.set(table.PUSH_AT, to=record["time_s"])
    gauges.set(table.PUSH_S, "total", to=record["total_s"])
    for phase, seconds in record.get("seconds", {}).items():
        gauges.set(table.PUSH_S, phase, to=seconds)
    for metric, key in ((table.PUSH_BYTES, "sent_bytes"), (table.PUSH_RECOMPUTED, "tokens_recomputed")):
        if key in record:
            gauges.set(metric, to=record[key])
    if record.get("stall_share") is not None:
        gauges.set(table.PUSH_STALL, to=record["stall_share"])
    gauges.set(table.PUSH_QUARANTINED, to=len(record.get("quarantined", ())))


def add_evaluation(gauges: Counts, record: Mapping[str, Any]) -> None:
    """Add the newest evaluation."""
    gauges.set(table.EVALUATED_STEP, to=record["step"])
    if record["success"] is not None:
        gauges.set(table.EVALUATION_SUCCESS, to=record["success"])


def add_stations(gauges: Counts, record: Mapping[str, Any]) -> None:
    """Add the load of the stations."""
    gauges.set(table.IN_FLIGHT, to=record["in_flight"])
    if "rollout_limit" in record:
        gauges.set(table.ROLLOUT_LIMIT, to=record["rollout_limit"])
    for station, means in sorted(record["stations"].items()):
        gauges.add(table.STATION_IN_USE, station, by=means["in_use"])
        gauges.set(table.STATION_LIMITS, station, to=float(station == record["held_up_by"]))
        if means["capacity"] is not None:
            gauges.add(table.STATION_CAPACITY, station, by=means["capacity"])
        if means["mean_s"] is not None:
            gauges.set(table.STATION_S, station, to=means["mean_s"])


def add_services(gauges: Counts, record: Mapping[str, Any]) -> None:
    """Add the calls to the services."""
    for service, totals in sorted(record["services"].items()):
        calls, failures = totals["calls"], totals["failures"]
        gauges.add(table.SERVICE_CALLS, service, "ok", by=(calls - failures) / record["seconds"])
        gauges.add(table.SERVICE_CALLS, service, "failed", by=failures / record["seconds"])
        if calls:
            gauges.set(table.SERVICE_S, service, "waiting", to=totals["waiting_s"] / calls)
            gauges.set(table.SERVICE_S, service, "calling", to=totals["calling_s"] / calls)


def add_mismatch(gauges: Counts, record: Mapping[str, Any]) -> None:
    """Add the time of the alarm."""
    gauges.set(table.MISMATCH_AT, to=record["time_s"])


def add_stall(gauges: Counts, record: Mapping[str, Any]) -> None:
    """Add the time of the stall."""
    gauges.set(table.STALL_AT, "ended" if record["ended"] else "warned", to=record["time_s"])


OF_RECORDS: Final[Mapping[str, Callable[[Counts, Mapping[str, Any]], None]]] = {
    "step": add_step,
    "mismatch_alarm": add_mismatch,
    "push": add_push,
    "evaluation": add_evaluation,
    "stations": add_stations,
    "services": add_services,
    "stall": add_stall,
}
"""Function that adds the gauges of a record, by its kind."""


def add_running(
    gauges: Counts, directory: RunDirectory, ledger: LedgerCounts | None, *, driven: bool, now_s: float
) -> None:
    """Add what is running by the workers' files, and what is stuck by the ledger: nothing while nobody drives the
    run. `now_s` is Unix time."""
    ages = (
        [] if ledger is None or not driven else [(each.task, now_s - each.issued_at_s) for each in ledger.open.values()]
    )
    limits = {task: ledger.typical.p95_s(task) for task, _ in ages} if ledger is not None else {}
    stuck = sum(limit is not None and age_s > STUCK * limit for task, age_s in ages for limit in (limits[task],))
    gauges.set(table.STUCK, to=stuck)
    gauges.set(table.OLDEST_S, to=max((age_s for _, age_s in ages), default=0.0))
    for file in read_running(directory.path / FOLDER) if driven else ():
        if now_s - file.written_s <= SILENT_S:
            for rollout in sorted(file.rollouts, key=lambda each: each.part):
                gauges.add(table.RUNNING, rollout.part, rollout.purpose)


def add_engines(gauges: Counts, directory: RunDirectory) -> None:
    """Add the engines by state, with their load."""
    for engine in sorted(read_roster(directory.engines).engines, key=lambda each: each.engine_id):
        gauges.add(table.ENGINE_STATE, engine.engine_id, engine.state)
        for state, number in (("running", engine.running), ("waiting", engine.waiting)):
            if number is not None:
                gauges.add(table.ENGINE_REQUESTS, engine.engine_id, state, by=number)


def add_lost_spans(gauges: Counts, directory: RunDirectory) -> None:
    """Add the spans that were lost, with a 0 for the reasons that a process may find."""
    lost = SpanFolder.of_run(directory.path).lost()
    for reason in sorted({*lost, QUEUE_FULL, NOT_WRITTEN, REMOVED}):
        gauges.add(table.SPANS_LOST, reason, by=lost[reason])


def add_disks(gauges: Counts, directory: RunDirectory) -> None:
    """Add the room on the file systems of the run's folders; a folder that is away is left out."""
    for name, folder in (("state", directory.path), ("storage", directory.storage)):
        try:
            found = os.statvfs(folder)
        except OSError as error:
            logger.warning("%s cannot be measured: %s", folder, error)
            continue
        gauges.set(table.DISK_FREE, name, to=found.f_bavail * found.f_frsize)
        gauges.set(table.DISK_SIZE, name, to=found.f_blocks * found.f_frsize)
