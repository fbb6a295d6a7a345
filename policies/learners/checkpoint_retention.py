"""Choice of the checkpoints that are kept: the newest ones, and the best by held-out success.

Invariants:
- `retention.json` in the checkpoint folder names the best checkpoint, and the step at which an evaluation in progress
  began. Only the service writes it, atomically and durably; the learner reads it before each removal.
- The service records the best checkpoint before the evaluation counts as ended in the ledger. After a crash in between,
  the evaluation ends a second time, with the same effect.
- The recorded best checkpoint, and the one nearest to the start of an evaluation in progress, are never removed: a lock
  beside the folder keeps a change of the record and a removal apart. While the record cannot be read, nothing is
  removed.
- The checkpoint of a ledger copy in storage is never removed: the run resumes there after the loss of its ledger.
- A checkpoint that is kept although it is not among the newest is renamed to `kept-<version>`: no run resumes from it,
  so the ledger need not keep the trajectories of all steps after it.

An evaluation is sampled while training continues. It rates the checkpoint nearest to the mean step of its sampled
tokens.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from headrace.buffer.ledger.copies import copied_versions
from headrace.buffer.primitives.durable_files import replace_file
from headrace.buffer.primitives.file_lock import FileLock
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.checkpoints import KEPT, list_checkpoints, remove

logger = logging.getLogger(__name__)

RECORD: Final = "retention.json"
_KEPT_NAME: Final = re.compile(rf"{KEPT}\d+\.\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class BestCheckpoint:
    """Checkpoint with the highest success on held-out tasks so far: its version, the tag of the evaluation that rated
    it, and that evaluation's success."""

    version: str
    tag: str
    success: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRecord:
    """Contents of `retention.json`. `evaluating` is the step at which the evaluation in progress began."""

    best: BestCheckpoint | None = None
    evaluating: int | None = None


def read_record(root: Path) -> RetentionRecord:
    """Return the record of a checkpoint folder, an empty one if there is none yet. Raises ValueError, OSError."""
    try:
        document = json.loads((root / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return RetentionRecord()
    try:
        best = BestCheckpoint(**document["best"]) if document["best"] else None
        evaluating = document["evaluating"]
        # Written by hand or damaged: a value of another type would end every save or evaluation later.
        if best is not None:
            PolicyVersion.parse(best.version)
            best = replace(best, success=float(best.success))
        return RetentionRecord(best=best, evaluating=None if evaluating is None else int(evaluating))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{root / RECORD} lacks a field or has an invalid one: {error!r}") from error


def begin_evaluation(root: Path, step: int) -> None:
    """Record that an evaluation begins at this step: the checkpoint that it will probably rate is kept until it ends.
    Raises OSError."""
    with _locked(root):
        _write(root, replace(_known(root), evaluating=step))


def end_evaluation(root: Path, *, tag: str, success: float | None, versions: Mapping[str, int]) -> None:
    """Record the end of an evaluation; `versions` counts its sampled tokens by policy version. The checkpoint that it
    rates becomes the best one if `success` is higher than that of the best one; with None it rates none. What was kept
    only as the best one before, or for this evaluation, is removed. Raises OSError."""
    tokens = sum(versions.values())
    with _locked(root):
        known, best = _known(root), best_checkpoint(root)
        if success is not None and tokens and (best is None or success > best[0].success):
            mean_step = sum(PolicyVersion.parse(version).step * count for version, count in versions.items()) / tokens
            if (rated := _nearest(root, mean_step)) is not None:
                known = replace(known, best=BestCheckpoint(version=str(version_of(rated)), tag=tag, success=success))
        known = replace(known, evaluating=None)
        _write(root, known)
        for path in kept_checkpoints(root):
            if str(version_of(path)) not in _wanted(root, known):
                remove(path)


def best_checkpoint(root: Path) -> tuple[BestCheckpoint, Path] | None:
    """Return the best checkpoint and its directory; None if none has been rated or its directory is gone."""
    best = _known(root).best
    paths = [path for path in _all_checkpoints(root) if best is not None and str(version_of(path)) == best.version]
    return None if best is None or not paths else (best, paths[0])


def remove_old(root: Path, *, newest: int) -> None:
    """Remove all checkpoints except the `newest` newest ones, the best one, and the one that the evaluation in progress
    will probably rate."""
    with _locked(root):
        try:
            record = read_record(root)
        except (ValueError, OSError) as error:
            logger.warning("no old checkpoint is removed, because the best one is not known: %s", error)
            return
        wanted, copied = _wanted(root, record), set(copied_versions(root.parent))
        for path in (*kept_checkpoints(root), *list_checkpoints(root)[:-newest]):
            if version_of(path) in copied:
                continue
            if str(version_of(path)) not in wanted:
                remove(path)
            elif not path.name.startswith(KEPT):
                path.rename(path.with_name(f"{KEPT}{path.name}"))


def version_of(path: Path) -> PolicyVersion:
    """Return the version of a checkpoint directory, from its name."""
    return PolicyVersion.parse(path.name.removeprefix(KEPT))


def kept_checkpoints(root: Path) -> list[Path]:
    """Return the directories that are kept although they are not among the newest checkpoints."""
    return sorted((path for path in root.glob(f"{KEPT}*") if _KEPT_NAME.fullmatch(path.name)), key=version_of)


def forget(root: Path) -> None:
    """Remove the record: no checkpoint of a run that restarts from the beginning is its best one."""
    (root / RECORD).unlink(missing_ok=True)


def _locked(root: Path) -> FileLock:
    root.mkdir(parents=True, exist_ok=True)
    return FileLock(root.with_name(f"{root.name}.lock"))


def _all_checkpoints(root: Path) -> list[Path]:
    return [*kept_checkpoints(root), *list_checkpoints(root)]


def _wanted(root: Path, record: RetentionRecord) -> set[str]:
    """Return the versions of the best checkpoint, and of the one that the evaluation in progress will probably rate."""
    rated = None if record.evaluating is None else _nearest(root, record.evaluating)
    best = [] if record.best is None else [record.best.version]
    return {*best, *([] if rated is None else [str(version_of(rated))])}


def _nearest(root: Path, step: float) -> Path | None:
    """Return the checkpoint nearest to a step, the newer one of two; None if there is none."""
    newest_first = sorted(_all_checkpoints(root), key=version_of, reverse=True)
    return min(newest_first, key=lambda path: abs(version_of(path).step - step), default=None)


def _known(root: Path) -> RetentionRecord:
    try:
        return read_record(root)
    except ValueError as error:
        logger.warning("the best checkpoint is chosen anew: %s", error)
        return RetentionRecord()


def _write(root: Path, record: RetentionRecord) -> None:
    replace_file(root / RECORD, json.dumps(asdict(record), indent=1).encode() + b"\n")
