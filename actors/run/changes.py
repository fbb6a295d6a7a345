"""Changes of a run's configuration between two of its sessions.

Invariants:
- A key that defines what the run trains, or where it is, never changes.
- Every change is journalled, in `changes.jsonl` of the state folder.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from headrace.actors.errors import ConfigError
from headrace.actors.record.files.run_directory import RunDirectory, read_configuration
from headrace.actors.run.config import RunConfig, apply_override, of_record
from headrace.actors.run.overlays import leaves
from headrace.buffer.primitives.durable_files import append_line
from headrace.policies.errors import CheckpointUnreadable
from headrace.policies.learners.checkpoints import list_checkpoints, read_manifest

DEFINING: Final = (
    "model",
    "tasks",
    "agent",
    "sampling",
    "buffer",
    "learner",
    "training.rewards",
    "evaluation.tasks",
    "evaluation.samples",
    "evaluation.sampling",
    "service.seed",
    "engines.backend",
    "cluster.address",
    "cluster.state",
    "cluster.storage",
)
"""Tables and keys that define what a run trains, or where it is. All others may change when the run is resumed."""

_OF_THE_FOLDER: Final = ("learner.checkpoint_dir", "learner.snapshot_dir")
"""Keys that follow from the place of the run directory, which may be moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedKey:
    """Key whose value a checkpoint was not trained with. None where one of the two has no such key."""

    key: str
    trained: Any
    present: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfiguration:
    """Configuration with which the newest checkpoint of a run was trained. `configuration` is the document that the
    checkpoint holds, if any, `changed` lists the keys in which the run's present one differs,
    and `problem` says why the two cannot be compared."""

    version: str
    configuration: dict[str, Any] | None = None
    changed: tuple[ChangedKey, ...] = ()
    problem: str = ""

    def lines(self) -> list[str]:
        """Describe the comparison for the terminal."""
        name = f"newest checkpoint {self.version}"
        if self.problem:
            return [f"{name}: {self.problem}"]
        if not self.changed:
            return [f"{name} was trained with the run's present configuration"]
        return [
            f"{name} was trained with {change.key} {change.trained!r}; the run now has {change.present!r}"
            for change in self.changed
        ]


def newest_configuration(directory: RunDirectory) -> CheckpointConfiguration | None:
    """Compare the newest checkpoint with the run's config.json; None if the run has no checkpoint or no config.json.
    Reads only the checkpoint's manifest."""
    if not (found := list_checkpoints(directory.checkpoints)) or (present := read_configuration(directory)) is None:
        return None
    version = found[-1].name
    try:
        recorded = dict(read_manifest(found[-1]).configuration)
    except CheckpointUnreadable as error:
        return CheckpointConfiguration(version=version, problem=str(error))
    if not recorded:
        return CheckpointConfiguration(version=version, problem="it does not hold its configuration")
    try:
        before, now = (
            dict(leaves(RunConfig.model_validate(of_record(document)).model_dump(mode="json")))
            for document in (recorded, present)
        )
    except ValueError as error:
        problem = f"its configuration cannot be compared with the run's: {' '.join(str(error).split())}"
        return CheckpointConfiguration(version=version, configuration=recorded, problem=problem)
    changed = tuple(
        ChangedKey(key=key, trained=before.get(key), present=now.get(key))
        for key in sorted({**before, **now})
        if before.get(key) != now.get(key) and key not in _OF_THE_FOLDER
    )
    return CheckpointConfiguration(version=version, configuration=recorded, changed=changed)


def changed_document(document: Mapping[str, Mapping[str, Any]], changes: Sequence[str]) -> dict[str, Any]:
    """Return a copy of a document with changed keys (`table.key=value`). Raises ConfigError for a key that defines the
    run."""
    changed: dict[str, Any] = {table: copy.deepcopy(dict(keys)) for table, keys in document.items()}
    for change in changes:
        key = change.partition("=")[0].strip()
        for prefix in DEFINING:
            if key == prefix or key.startswith(f"{prefix}."):
                raise ConfigError(
                    f"--set {change}: {prefix} defines the run and cannot change; start a new run instead"
                )
        apply_override(changed, change)
    return changed


def journal_changes(state: Path, changes: Sequence[str]) -> None:
    """Append changes to the journal of a run. Raises OSError."""
    append_line(state / "changes.jsonl", orjson.dumps({"time_s": time.time(), "changes": list(changes)}) + b"\n")
