"""What the engine group keeps on disk, so that whoever takes over knows what was going on.

Files in `<run>/engines`: `newest.json`, the snapshot that all engines are to hold; `pushes.jsonl`, one line before
each phase of a push and one at its end; `members.json`, the engines and how they are.

Invariants:
- A line tells what is about to be done, and with which engines. The newest snapshot is written before its push begins.
- A push without an end was broken off: what its engines hold follows from the last phase of each of its waves.
- A line that a crash tore is the last one, and is left out.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from headrace.buffer.primitives.durable_files import write_private
from headrace.buffer.versions import PolicyVersion
from headrace.policies.engine import EngineId
from headrace.policies.learner import WeightsShard, WeightsSnapshot
from headrace.policies.push.layout import group_name
from headrace.policies.push.machine import ORDER, Phase
from headrace.serve.observing.retention import RotatingFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from headrace.policies.engine import EngineInfo
    from headrace.policies.push.contract import PushReport
    from headrace.policies.push.machine import Step
    from headrace.serve.observing.retention import RetentionConfig

logger = logging.getLogger(__name__)

TAIL_BYTES = 1 << 18
"""What is read of the journal's end at first: the lines of one push of a hundred engines."""


@dataclass(slots=True, kw_only=True)
class BrokenPush:
    """A push that nobody ended: how far each engine's wave came, and the process groups that may be left over."""

    push_id: str
    version: str
    reached: dict[EngineId, Phase] = field(default_factory=dict)
    groups: dict[EngineId, tuple[str, ...]] = field(default_factory=dict)

    def is_whole(self, engine_id: EngineId, info: EngineInfo) -> bool:
        """Whether the engine surely holds one version: no bucket reached it, or the push itself resumed it with all of
        them, which it does after they were verified."""
        phase = self.reached.get(engine_id)
        if phase is None or ORDER.index(phase) < ORDER.index(Phase.BROADCAST):
            return True
        resumed = ORDER.index(phase) >= ORDER.index(Phase.OPEN) and not info.paused
        return resumed and str(info.version) == self.version


class PushJournal:
    """Of one run; written by the group, read by its successor."""

    def __init__(self, directory: Path, retention: RetentionConfig | None = None) -> None:
        self._directory = directory
        self._pushes = directory / "pushes.jsonl"
        self._retention = retention
        self._version, self._shards = "", 1
        self.sent_to: set[EngineId] = set()
        """The engines to which this push has sent something."""

    def begin(self, snapshot: WeightsSnapshot) -> None:
        """The next lines are of a push of this snapshot. A journal that has its size is begun anew, before the push:
        who takes over reads the lines of the last one in one file."""
        if self._retention is not None and self._pushes.exists():
            RotatingFile(self._pushes, self._retention, keep_bytes=self._retention.log_bytes).rotate()
        self._version, self._shards = str(snapshot.version), len(snapshot.shards)
        self.sent_to.clear()

    async def step(self, push_id: str, step: Step) -> None:
        """Awaited before each step."""
        if step.phase is Phase.BROADCAST:
            self.sent_to.update(step.engines)
        taken = {"wave": step.wave, "phase": step.phase, "attempt": step.attempt, "engines": step.engines}
        self._append({"push_id": push_id, **taken, "version": self._version, "shards": self._shards})

    def ended(self, report: PushReport) -> None:
        outcomes = {item.engine_id: item.outcome for item in report.engines}
        self._append({"push_id": report.push_id, "phase": "ended", "outcomes": outcomes})

    def broken(self) -> BrokenPush | None:
        """The last push, when it has no end."""
        lines = self._last_push()
        if not lines or lines[-1]["phase"] == "ended":
            return None
        last = BrokenPush(push_id=lines[-1]["push_id"], version=lines[-1]["version"])
        for line in lines:
            for engine_id in map(EngineId, line["engines"]):
                last.reached[engine_id] = _further(last.reached.get(engine_id), Phase(line["phase"]))
                if line["phase"] == Phase.FORM:
                    last.groups[engine_id] = (*last.groups.get(engine_id, ()), *_group_names(line))
        return last

    def write_newest(self, snapshot: WeightsSnapshot) -> None:
        shards = [{"path": str(shard.path), "sha256": shard.sha256} for shard in snapshot.shards]
        write_private(
            self._directory / "newest.json", orjson.dumps({"version": str(snapshot.version), "shards": shards})
        )

    def newest(self) -> WeightsSnapshot | None:
        """The snapshot that all engines are to hold, if its files are still there. A damaged record is none: the next
        push writes it anew."""
        path = self._directory / "newest.json"
        if not path.exists():
            return None
        try:
            snapshot = _snapshot(orjson.loads(path.read_bytes()))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            logger.warning("%s is damaged (%r): engines wait for the next push", path, error)
            return None
        return snapshot if all(shard.path.exists() for shard in snapshot.shards) else None

    def _append(self, line: dict[str, object]) -> None:
        with self._pushes.open("ab", buffering=0) as file:
            file.write(orjson.dumps({**line, "time_s": time.time()}) + b"\n")

    def _last_push(self) -> list[dict[str, Any]]:
        """All lines of the last push: read back, ever further, to a line of the push before it."""
        if not self._pushes.exists():
            return []
        size, length = self._pushes.stat().st_size, TAIL_BYTES
        while True:
            lines = self._tail(min(length, size))
            ids = [line["push_id"] for line in lines]
            if length >= size or len(set(ids)) > 1:
                return [line for line in lines if line["push_id"] == ids[-1]] if ids else []
            length *= 4

    def _tail(self, length: int) -> list[dict[str, Any]]:
        with self._pushes.open("rb") as file:
            file.seek(-length, os.SEEK_END)
            return list(_records(file.read().split(b"\n")))


def _further(before: Phase | None, now: Phase) -> Phase:
    """The later of two phases: a wave that lost an engine goes back to forming a group, and its buckets stay sent."""
    return now if before is None else max(before, now, key=ORDER.index)


def _group_names(line: dict[str, Any]) -> tuple[str, ...]:
    """The groups that a step of forming is about to make."""
    return tuple(group_name(line["push_id"], line["wave"], line["attempt"], shard) for shard in range(line["shards"]))


def _records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        # Lines of older versions tell less: what they pushed to died with the group.
        if isinstance(record, dict) and ("shards" in record or record.get("phase") == "ended"):
            yield record


def _snapshot(record: dict[str, Any]) -> WeightsSnapshot:
    # Journals of the first versions know one file only.
    given = record.get("shards", [record])
    shards = tuple(WeightsShard(path=Path(shard["path"]), sha256=shard["sha256"]) for shard in given)
    return WeightsSnapshot(version=PolicyVersion.parse(record["version"]), shards=shards)
