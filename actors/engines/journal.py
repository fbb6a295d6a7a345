"""Write-ahead journal of pushes, from which a new engine group recovers an interrupted push.

Files in `<run>/engines`: `newest.json`, the snapshot that all engines should hold; `pushes.jsonl`, one line before
each phase of a push and one at its end.

Invariants:
- A line describes the next step and its engines. The newest snapshot is written before its push begins.
- A push without an end was interrupted: the state of its engines follows from the last phase of each of its waves.
- Only the last line can be torn by a crash; it is ignored.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from headrace.buffer.primitives.durable_files import append_line, write_private
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId, EngineInfo
from headrace.policies.learner import WeightsDelta, WeightsDirectory, WeightsShard, WeightsSnapshot
from headrace.policies.push.contract import PushReport
from headrace.policies.push.machine import ORDER, Phase, PushStep
from headrace.policies.push.transfer import group_name
from headrace.serve.tracing.retention import RetentionConfig, RotatingFile

logger = logging.getLogger(__name__)

TAIL_BYTES = 1 << 18
"""Number of bytes first read from the journal's end: enough for one push to a hundred engines."""


@dataclass(slots=True, kw_only=True)
class BrokenPush:
    """Interrupted push: the last phase of each engine, and the process groups that may still exist."""

    push_id: str
    version: str
    reached: dict[EngineId, Phase] = field(default_factory=dict)
    groups: dict[EngineId, tuple[str, ...]] = field(default_factory=dict)

    def in_phase(self, phase: Phase) -> list[EngineId]:
        """Return the engines whose last phase was this one."""
        return [engine_id for engine_id, reached in self.reached.items() if reached is phase]

    def is_whole(self, engine_id: EngineId, info: EngineInfo) -> bool:
        """Return True if the engine certainly holds one version: no bucket reached it, or the push resumed it after all
        buckets had been verified."""
        phase = self.reached.get(engine_id)
        if phase is None or ORDER.index(phase) < ORDER.index(Phase.BROADCAST):
            return True
        resumed = ORDER.index(phase) >= ORDER.index(Phase.OPEN) and not info.paused
        return resumed and str(info.version) == self.version


class PushJournal:
    """Journal of one run, written by the engine group and read by its successor."""

    def __init__(self, directory: Path, retention: RetentionConfig | None = None) -> None:
        self._directory = directory
        self._pushes = directory / "pushes.jsonl"
        self._retention = retention
        self._version = ""
        self.sent_to: set[EngineId] = set()
        """Engines to which the current push has sent tensors."""

    def begin(self, snapshot: WeightsSnapshot) -> None:
        """Begin journalling a push of this snapshot."""
        # Rotated only between pushes: a successor reads all lines of the last push from one file.
        if self._retention is not None and self._pushes.exists():
            RotatingFile(self._pushes, self._retention, keep_bytes=self._retention.log_bytes).rotate()
        self._version = str(snapshot.version)
        self.sent_to.clear()

    async def step(self, push_id: str, step: PushStep) -> None:
        """Write the line for a step that is about to begin."""
        if step.phase is Phase.BROADCAST:
            self.sent_to.update(step.engines)
        taken = {"wave": step.wave, "phase": step.phase, "attempt": step.attempt, "engines": step.engines}
        self._append({"push_id": push_id, **taken, "version": self._version})

    def ended(self, report: PushReport) -> None:
        outcomes = {item.engine_id: item.outcome for item in report.engines}
        self._append({"push_id": report.push_id, "phase": "ended", "outcomes": outcomes})

    def broken(self) -> BrokenPush | None:
        """Return the last push if it was interrupted, otherwise None."""
        lines = self._last_push()
        if not lines or lines[-1]["phase"] == "ended":
            return None
        push_id = lines[-1]["push_id"]
        last = BrokenPush(push_id=push_id, version=lines[-1]["version"])
        for line in lines:
            for engine_id in map(EngineId, line["engines"]):
                phase = Phase(line["phase"])
                # The furthest phase counts: a wave that lost an engine forms a new group, but its buckets were sent.
                last.reached[engine_id] = max(last.reached.get(engine_id, phase), phase, key=ORDER.index)
                if phase is Phase.FORM:
                    name = group_name(push_id, line["wave"], line["attempt"])
                    last.groups[engine_id] = (*last.groups.get(engine_id, ()), name)
        return last

    def write_newest(self, snapshot: WeightsSnapshot) -> None:
        record: dict[str, object] = {"version": str(snapshot.version), "untrained": snapshot.untrained}
        if (directory := snapshot.directory) is not None:
            record["directory"] = {"path": str(directory.path), "digests": dict(directory.digests)}
        elif (delta := snapshot.delta) is not None:
            record["delta"] = {"source": str(delta.source), "number": delta.number}
        elif snapshot.live:
            record["live"] = True
        else:
            record["shards"] = [{"path": str(shard.path), "sha256": shard.sha256} for shard in snapshot.shards]
        write_private(self._directory / "newest.json", orjson.dumps(record))

    def newest(self) -> WeightsSnapshot | None:
        """Return the snapshot that all engines should hold. Return None if there is none, its files are gone or the
        record is damaged; the next push replaces the record."""
        path = self._directory / "newest.json"
        if not path.exists():
            return None
        try:
            snapshot = _snapshot_of(orjson.loads(path.read_bytes()))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            logger.warning("%s is damaged (%r): engines wait for the next push", path, error)
            return None
        return snapshot if all(file.path.exists() for file in snapshot.files) else None

    def _append(self, line: dict[str, object]) -> None:
        append_line(self._pushes, orjson.dumps({**line, "time_s": time.time()}) + b"\n")

    def _last_push(self) -> list[dict[str, Any]]:
        """Return all lines of the last push."""
        if not self._pushes.exists():
            return []
        size, length = self._pushes.stat().st_size, TAIL_BYTES
        # Read larger and larger tails until one contains a line of the push before.
        while True:
            with self._pushes.open("rb") as file:
                file.seek(-min(length, size), os.SEEK_END)
                lines = list(_records(file.read().split(b"\n")))
            ids = [line["push_id"] for line in lines]
            if length >= size or len(set(ids)) > 1:
                return [line for line in lines if line["push_id"] == ids[-1]] if ids else []
            length *= 4


def _snapshot_of(record: dict[str, Any]) -> WeightsSnapshot:
    version, untrained = PolicyVersion.parse(record["version"]), tuple(map(str, record["untrained"]))
    if (directory := record.get("directory")) is not None:
        digests = {str(name): str(digest) for name, digest in directory["digests"].items()}
        held = WeightsDirectory(path=Path(directory["path"]), digests=digests)
        return WeightsSnapshot(version=version, directory=held, untrained=untrained)
    if (delta := record.get("delta")) is not None:
        written = WeightsDelta(source=Path(delta["source"]), number=int(delta["number"]))
        return WeightsSnapshot(version=version, delta=written, untrained=untrained)
    if record.get("live"):
        return WeightsSnapshot(version=version, live=True, untrained=untrained)
    shards = [WeightsShard(path=Path(shard["path"]), sha256=shard["sha256"]) for shard in record["shards"]]
    return WeightsSnapshot(version=version, shards=tuple(shards), untrained=untrained)


def _records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with suppress(orjson.JSONDecodeError):
            if isinstance(record := orjson.loads(line), dict):
                yield record
