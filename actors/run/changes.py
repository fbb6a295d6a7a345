"""Changes of a run's configuration between two of its sessions.

Invariants:
- A key that defines what the run trains, or where it is, never changes.
- Every change is journalled, in `changes.jsonl` of the state folder.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson

from headrace.actors.errors import ConfigError
from headrace.actors.run.config import apply_override

if TYPE_CHECKING:
    from pathlib import Path

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
    with (state / "changes.jsonl").open("ab") as file:
        file.write(orjson.dumps({"time_s": time.time(), "changes": list(changes)}) + b"\n")
