"""Damages a run's files for fault storms and soaks: files are lost, emptied or truncated, and foreign files are added.

Invariant: only files that a run can do without are damaged: the journal of the served version, and a checkpoint that
has a predecessor. The caller kills the actors that must read them again.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Final

from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.checkpoints import MANIFEST, list_checkpoints

FOREIGN: Final = ("notes.txt", "checkpoints/7.x", "checkpoints/.unfinished", "trajectories/9.old")
CUT_BYTES: Final = 3


class Damage(StrEnum):
    """Kind of damage to a file."""

    LOST = "lost"
    EMPTY = "empty"
    TORN = "torn"
    """The last bytes are missing."""


def add_foreign_file(run: Path, name: str) -> None:
    """Write a file that does not belong to headrace into a run directory."""
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_bytes(b"not ours")


def damage_served(run: Path, damage: Damage) -> Path | None:
    """Damage the journal of the served version; return its path, or None if there is none yet."""
    return _damage(run / "served.json", damage)


def damage_checkpoint(run: Path, damage: Damage, *, steps: int) -> Path | None:
    """Damage the newest checkpoint of a run of `steps` steps and return its path. Return None if the learner has no
    earlier checkpoint to fall back on, or if the run has made its last step, so that no learner would read a checkpoint
    again."""
    checkpoints = list_checkpoints(run / "checkpoints")
    if len(checkpoints) < 2 or PolicyVersion.parse(checkpoints[-1].name).step >= steps:
        return None
    return _damage(checkpoints[-1] / MANIFEST, damage)


def _damage(path: Path, damage: Damage) -> Path | None:
    if not path.exists():
        return None
    if damage is Damage.LOST:
        path.unlink()
    else:
        path.write_bytes(b"" if damage is Damage.EMPTY else path.read_bytes()[:-CUT_BYTES])
    return path
