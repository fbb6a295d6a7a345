"""Checkpoint directories: what is complete, what is in it, which to keep. No torch.

Invariants:
- `<root>/<epoch>.<step>/` exists only complete: it is written under a `tmp-` name, every file and directory is
  fsynced, then renamed.
- `headrace.json` holds the batches since the previous checkpoint in the order they were stepped, skipped ones too,
  and the hash chain over all batches of the run's line up to here: folding the batches over `previous_chain` gives
  `chain`.
- Versions order checkpoints: an epoch opened later is later.

Layout: `headrace.json`, `megatron/` (model, optimizer and random state), and beside them a Hugging Face model
directory.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from headrace.buffer.durable_files import publish_folder
from headrace.buffer.types import BatchId, CheckpointRef, RolloutId, batch_digest, extend_chain
from headrace.buffer.versions import PolicyVersion
from headrace.policies.learner_errors import CheckpointUnreadable

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FORMAT = 1
MANIFEST = "headrace.json"
MEGATRON_STATE = "megatron"
_UNFINISHED = "tmp-"
_COMPLETE = re.compile(r"\d+\.\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedBatch:
    """A batch the learner consumed, with its ordered (rollout, attempt) members. `skipped`: its gradient was not
    finite."""

    batch_id: BatchId
    members: tuple[tuple[RolloutId, int], ...]
    skipped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of `headrace.json`."""

    version: PolicyVersion
    previous_chain: str
    chain: str
    batches: tuple[SteppedBatch, ...]


def fold_chain(chain: str, batches: Iterable[SteppedBatch]) -> str:
    """The hash chain after `batches` (see `headrace.buffer.types.extend_chain`)."""
    digests = (batch_digest(batch.batch_id, batch.members) for batch in batches)
    return reduce(extend_chain, digests, chain)


def read_checkpoint(path: Path) -> CheckpointRef:
    """The reference to a complete checkpoint. Raises CheckpointUnreadable."""
    manifest = read_manifest(path)
    return CheckpointRef(
        path=str(path.absolute()),
        version=manifest.version,
        batch_ids=tuple(batch.batch_id for batch in manifest.batches),
        chain=manifest.chain,
    )


def read_manifest(path: Path) -> Manifest:
    """Batches and members of one checkpoint. Raises CheckpointUnreadable when torn, of another format or
    inconsistent."""
    try:
        document = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointUnreadable(f"{path} is no complete checkpoint: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointUnreadable(
            f"{path / MANIFEST} is not of format {FORMAT}: open it with the headrace that wrote it"
        )
    try:
        manifest = _manifest(document)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointUnreadable(f"{path / MANIFEST} lacks or misspells a field: {error!r}") from error
    if fold_chain(manifest.previous_chain, manifest.batches) != manifest.chain:
        raise CheckpointUnreadable(
            f"{path / MANIFEST}: its batches do not give its hash chain; take an earlier checkpoint"
        )
    return manifest


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write `headrace.json` into the directory `path`."""
    batches = [
        {"batch_id": batch.batch_id, "skipped": batch.skipped, "members": [list(member) for member in batch.members]}
        for batch in manifest.batches
    ]
    document = {
        "format": FORMAT,
        "version": str(manifest.version),
        "previous_chain": manifest.previous_chain,
        "chain": manifest.chain,
        "batches": batches,
    }
    (path / MANIFEST).write_text(json.dumps(document, indent=1), encoding="utf-8")


def list_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoint directories under `root`, oldest version first; empty when `root` does not exist."""
    if not root.is_dir():
        return []
    complete = (path for path in root.iterdir() if _COMPLETE.fullmatch(path.name))
    return sorted(complete, key=lambda path: PolicyVersion.parse(path.name))


def latest_checkpoint(root: Path) -> CheckpointRef | None:
    """The newest complete checkpoint under `root`, None when there is none. Raises CheckpointUnreadable when it is
    damaged."""
    complete = list_checkpoints(root)
    return read_checkpoint(complete[-1]) if complete else None


def stage(root: Path, version: PolicyVersion) -> Path:
    """An empty directory to write the checkpoint of `version` into. Removes what interrupted saves left: `root` has
    one learner."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover)
    staged = root / f"{_UNFINISHED}{version}"
    staged.mkdir()
    return staged


def publish(staged: Path, version: PolicyVersion) -> Path:
    """Make a staged checkpoint durable, then visible under its final name, which is returned."""
    final = staged.with_name(str(version))
    publish_folder(staged, final)
    return final


def keep_newest(root: Path, count: int) -> None:
    """Remove all but the `count` newest complete checkpoints; a half-removed one is never visible as complete."""
    for path in list_checkpoints(root)[:-count]:
        shutil.rmtree(path.rename(path.with_name(f"{_UNFINISHED}removed-{path.name}")))


def _manifest(document: dict[str, Any]) -> Manifest:
    batches = tuple(
        SteppedBatch(
            batch_id=BatchId(batch["batch_id"]),
            members=tuple((RolloutId(rollout), int(attempt)) for rollout, attempt in batch["members"]),
            skipped=bool(batch["skipped"]),
        )
        for batch in document["batches"]
    )
    return Manifest(
        version=PolicyVersion.parse(document["version"]),
        previous_chain=document["previous_chain"],
        chain=document["chain"],
        batches=batches,
    )
