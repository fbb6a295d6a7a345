"""Restoration of a run whose control node lost its disk, from its storage folder.

Invariants:
- Nothing acts for the run meanwhile: the caller holds its newest incarnation (see `incarnation`).
- The run continues from the newest whole copy of the ledger whose checkpoint is undamaged. Newer checkpoints, and
  damaged ones, are set aside: the ledger of their steps is lost.
- The folder of the ledger has a link `checkpoints` to those in storage, since resuming and auditing read them beside
  the ledger.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.buffer.core.outages import utc
from headrace.buffer.errors import LedgerRefused
from headrace.buffer.ledger.copies import (
    CopyRef,
    copied_versions,
    copies_folder,
    read_copy,
    refuse_ledger,
    reserve_epochs,
    restore,
)
from headrace.buffer.primitives.durable_files import replace_file
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.errors import CheckpointDamaged, CheckpointUnreadable
from headrace.policies.learners.checkpoints import KEPT, SetAside, check_checkpoint, list_checkpoints, set_aside
from headrace.sandboxes.host.leftovers import IDENTITY_FILE

_VERSION = re.compile(r"\d+\.\d+")
_CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """Result of a restoration. `version` is the checkpoint from which the run continues, `taken_at_s` the time of the
    copy (Unix seconds), `newest` the newest version seen in storage. `steps_lost` counts the steps between the two;
    `issued_again` the rollouts that were in flight when the ledger was copied, `untrained` the finished ones that are
    kept. `set_aside` maps checkpoints that are not used to the reason, `left_out` copies. Epochs up to
    `epochs_reserved` may have been opened by the lost ledger, and are not opened again."""

    run_id: str
    version: str
    taken_at_s: float
    newest: str
    steps_lost: int
    issued_again: int
    untrained: int
    epochs_reserved: int
    set_aside: dict[str, str]
    left_out: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        return [
            f"restored the ledger of checkpoint {self.version}, copied {utc(self.taken_at_s)}",
            f"lost {self.steps_lost} steps (newest version in storage: {self.newest}), and all rollouts since the copy",
            f"kept {self.untrained} finished rollouts that are not trained yet",
            f"issued again: {self.issued_again} rollouts that were in flight",
            *(f"COPY {name} IS LEFT OUT: {reason}" for name, reason in self.left_out.items()),
            *(f"CHECKPOINT {name} IS LEFT OUT: {reason}" for name, reason in self.set_aside.items()),
        ]


def restore_run(state: Path, storage: Path) -> RestoreReport:
    """Restore the ledger of a run to the folder `state`, which has none, and report what is lost. Raises LedgerRefused
    when there is nothing to restore or `state` has a ledger, OSError."""
    if not storage.is_dir():
        raise LedgerRefused(f"{storage} does not exist: mount the storage of the run, or name another folder")
    seen = list(_versions_in(storage))
    state.mkdir(parents=True, exist_ok=True)
    refuse_ledger(state)
    reserved = reserve_epochs(storage, (version.epoch for version in seen))
    link_checkpoints(state, storage)
    aside: list[SetAside] = []
    copy, left_out = _restore_newest(state, storage, reserved, aside)
    later = [version for version in seen if version > copy.version]
    newest = max(later, default=copy.version)
    return RestoreReport(
        run_id=copy.run_id,
        version=str(copy.version),
        taken_at_s=copy.taken_at_s,
        newest=str(newest),
        steps_lost=max(0, max((version.step for version in later), default=0) - copy.version.step),
        issued_again=copy.in_flight,
        untrained=copy.untrained,
        epochs_reserved=reserved,
        set_aside={one.name: f"{one.reason}; it is kept as {one.kept_as}" for one in aside},
        left_out=left_out,
    )


def link_checkpoints(state: Path, storage: Path) -> None:
    """Make the checkpoints in storage visible beside the ledger, if the two are in different folders; idempotent.
    Raises OSError."""
    link, target = state / _CHECKPOINTS, (storage / _CHECKPOINTS).absolute()
    if link.is_symlink() and link.readlink() != target:
        link.unlink()
    if state.absolute() != storage.absolute() and not link.is_symlink():
        link.symlink_to(target)


def _restore_newest(state: Path, storage: Path, reserved: int, aside: list[SetAside]) -> tuple[CopyRef, dict[str, str]]:
    """Restore the newest whole copy whose checkpoint is undamaged, and add the checkpoints that were set aside for it
    to `aside`. Return the copy, and the newer ones with the reasons why they were left out."""
    left_out: dict[str, str] = {}
    root = storage / _CHECKPOINTS
    for version in reversed(copied_versions(storage)):
        path = root / str(version)
        try:
            copy = read_copy(copies_folder(storage) / str(version))
            if not path.exists() and path.with_name(f"{KEPT}{path.name}").exists():
                path.with_name(f"{KEPT}{path.name}").rename(path)
            check_checkpoint(path)
            # Before the ledger is there: after an interruption all of this is repeated.
            for newer in list_checkpoints(root):
                if PolicyVersion.parse(newer.name) > version:
                    why = f"the ledger of its steps is lost: the run continues from {version}"
                    aside.append(set_aside(newer, why))
            replace_file(state / IDENTITY_FILE, copy.run_id.encode())
            restore(copy, state, epochs_reserved=reserved)
        except (CheckpointDamaged, CheckpointUnreadable, LedgerRefused) as error:
            left_out[str(version)] = str(error)
        else:
            return copy, left_out
    reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
    raise LedgerRefused(
        f"{copies_folder(storage)} contains no usable copy of the ledger"
        + (f" ({reasons})" if reasons else "")
        + ": start a new run from the newest checkpoint with model.path"
    )


def _versions_in(storage: Path) -> Iterator[PolicyVersion]:
    """Yield the versions that the names of checkpoints, weights and copies contain, also of unfinished ones and those
    that were set aside."""
    for folder in (
        storage / _CHECKPOINTS,
        storage / "weights",
        storage / "engines" / "weights",
        copies_folder(storage),
    ):
        for path in folder.iterdir() if folder.is_dir() else ():
            for text in _VERSION.findall(path.name):
                with suppress(ValueError):
                    yield PolicyVersion.parse(text)
