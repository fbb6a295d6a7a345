"""What happens to files of a run: one is lost, emptied or cut off, or one turns up that is nobody's. For storms and
soaks.

Invariant: only such files are spoilt as a run can do without: what engines served, and a checkpoint that has another
one before it. Whoever shall read them again is killed by the caller.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

from headrace.buffer.versions import PolicyVersion
from headrace.policies.learners.checkpoints import MANIFEST, list_checkpoints

if TYPE_CHECKING:
    from pathlib import Path

FOREIGN: Final = ("notes.txt", "checkpoints/7.x", "checkpoints/.unfinished", "trajectories/9.old")
CUT_BYTES: Final = 3


class Damage(StrEnum):
    """What became of a file."""

    LOST = "lost"
    EMPTY = "empty"
    TORN = "torn"
    """Its last bytes are missing."""


def leave_foreign(run: Path, name: str) -> None:
    """A file that headrace did not write appears in a run directory."""
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_bytes(b"not ours")


def spoil_served(run: Path, damage: Damage) -> Path | None:
    """What the engines served is spoilt; None when there is nothing yet."""
    return _spoil(run / "served.json", damage)


def spoil_checkpoint(run: Path, damage: Damage, *, steps: int) -> Path | None:
    """The newest checkpoint of a run of so many steps is spoilt; None when there is none before it that a learner could
    go back to, or none would: the run has made its last step."""
    checkpoints = list_checkpoints(run / "checkpoints")
    if len(checkpoints) < 2 or PolicyVersion.parse(checkpoints[-1].name).step >= steps:
        return None
    return _spoil(checkpoints[-1] / MANIFEST, damage)


def _spoil(path: Path, damage: Damage) -> Path | None:
    if not path.exists():
        return None
    if damage is Damage.LOST:
        path.unlink()
    else:
        path.write_bytes(b"" if damage is Damage.EMPTY else path.read_bytes()[:-CUT_BYTES])
    return path
