"""What a run did meanwhile: evaluations, pushes, checkpoints, restarts, outages, quarantines and pacing.

Invariant: of `metrics.jsonl` only the records of pushes and of pacing are parsed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from headrace.actors.telemetry.slow.rows import Interval, StepTime
from headrace.buffer.audit.joined_rows import JoinedRows
from headrace.serve.tracing.retention import kept_files

EVALUATION: Final = "evaluation"
"""Kind of event: a held-out evaluation ran. Also the purpose of its rollouts."""
_SECONDS: Final = {"push": "total_s", "stations": "seconds"}
"""Fields of metrics that hold the length of what ended at their time."""
PUSH: Final = b'{"kind":"push"'
LIMIT: Final = b'"rollout_limit":'
BLOCK_BYTES: Final = 4 << 20


def intervals_of_ledger(rows: JoinedRows, steps: Sequence[StepTime]) -> Iterator[Interval]:
    """Yield checkpoints, restarts of the learner, outages, and evaluations, whose first rollout begins them."""
    committed = {step.step: step.committed_at_s for step in steps}
    times = sorted(committed.values())
    for version, at_s in rows.select("checkpoints", ("version", "recorded_at_s")):
        step = int(version.rpartition(".")[2])
        yield Interval("checkpoint", min(at_s, committed.get(step, at_s)), at_s)
    opened = sorted(at_s for (at_s,) in rows.select("epochs", ("opened_at_s",)))
    for at_s in opened[1:]:
        yield Interval("restart", max((time_s for time_s in times if time_s < at_s), default=at_s), at_s)
    for began_s, ended_s in rows.select("outages", ("began_at_s", "ended_at_s")):
        yield Interval("outage", began_s, ended_s or float("inf"))
    evaluated: dict[str, tuple[float, float]] = {}
    for tag, version, at_s, text in rows.select("evaluations", ("tag", "version", "recorded_at_s", "breakdown")):
        begun_s = at_s - orjson.loads(text)["wall_s"] if text else committed.get(int(version.rpartition(".")[2]), at_s)
        start_s, end_s = evaluated.get(tag, (begun_s, at_s))
        evaluated[tag] = (min(start_s, begun_s), max(end_s, at_s))
    for start_s, end_s in evaluated.values():
        yield Interval(EVALUATION, start_s, end_s)


def add_metrics(path: Path, meanwhile: list[Interval], missing: list[str]) -> None:
    """Add what the run's metrics tell, or to `missing` what is not told without them."""
    if path.exists():
        meanwhile += intervals_of_metrics(path)
    else:
        missing.append("no metrics.jsonl: evaluations, pushes and pacing are not compared")


def intervals_of_metrics(path: Path) -> Iterator[Interval]:
    """Yield pushes, quarantines of engines (until the next push), and periods in which pacing lowered its limit."""
    quarantined_s: float | None = None
    limit: float | None = None
    for record in pushes_and_limits(path):
        at_s = record["time_s"]
        if record["kind"] == "push":
            yield Interval("push", at_s - record["total_s"], at_s)
            if quarantined_s is not None:
                yield Interval("quarantine", quarantined_s, at_s)
            quarantined_s = at_s if record.get("quarantined") else None
        elif isinstance(new := record.get("rollout_limit"), float | int):
            if limit is not None and new < limit:
                yield Interval("pacing", at_s - record["seconds"], at_s)
            limit = new
    if quarantined_s is not None:
        yield Interval("quarantine", quarantined_s, float("inf"))


def pushes_and_limits(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the metrics of pushes, and those of stations that name pacing's limit. A long run has a hundred thousand
    others, which are not parsed."""
    for file_path in kept_files(path):
        for line in _lines_with(file_path, (PUSH, LIMIT)):
            if line.startswith(PUSH) or LIMIT in line:
                try:
                    record = orjson.loads(line)
                except orjson.JSONDecodeError:
                    continue
                # A record without its numbers was written by something else.
                span = _SECONDS.get(str(record.get("kind"))) if isinstance(record, dict) else None
                if span and all(isinstance(record.get(key), float | int) for key in ("time_s", span)):
                    yield record


def _lines_with(path: Path, texts: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file that contain one of these texts. To look for the texts is far quicker than to look at
    each line."""
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES) + file.readline():
            begins = set()
            for text in texts:
                at = block.find(text)
                while at >= 0:
                    begins.add(block.rfind(b"\n", 0, at) + 1)
                    at = block.find(text, at + len(text))
            for begin in sorted(begins):
                end = block.find(b"\n", begin)
                yield block[begin:] if end < 0 else block[begin:end]
