"""Reads, writes, checks and removes checkpoint directories. Needs no torch.

Invariants:
- `<root>/<epoch>.<step>/` is always complete: it is written under a `tmp-` name, every file and directory is fsynced,
  and then it is renamed.
- `headrace.json` contains the batches since the previous checkpoint in the order of their steps, including skipped
  ones, and the hash chain over all batches of the run up to this checkpoint: extending `previous_chain` with the
  batches gives `chain`.
- Checkpoints are ordered by version: those of a later epoch come later.
- `headrace.json` is written last and lists every other file with its size and CRC-32, so that missing, truncated or
  altered files are found before anything is loaded. A damaged directory is renamed to `aside-<name>`, never removed.

Layout: `headrace.json`, `megatron/` (model, optimizer and random state), and beside them a Hugging Face model
directory.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from headrace.buffer.primitives.durable_files import publish_folder
from headrace.buffer.types import BatchId, CheckpointRef, RolloutId, batch_digest, extend_chain
from headrace.buffer.versions import PolicyVersion
from headrace.policies.errors import CheckpointDamaged, CheckpointUnreadable

FORMAT = 1
MANIFEST = "headrace.json"
MEGATRON_STATE = "megatron"
ASIDE = "aside-"
"""Prefix of damaged checkpoints, which are kept for inspection only."""
_UNFINISHED = "tmp-"
_READ_BYTES = 1 << 20
_COMPLETE = re.compile(r"\d+\.\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedBatch:
    """Batch that the learner consumed, with its ordered (rollout, attempt) members. `skipped` is True if its gradient
    was not finite."""

    batch_id: BatchId
    members: tuple[tuple[RolloutId, int], ...]
    skipped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of `headrace.json`."""

    version: PolicyVersion
    previous_chain: str
    chain: str
    batches: tuple[SteppedBatch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """Damaged checkpoint and the path to which it was renamed."""

    name: str
    reason: str
    kept_as: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Usable:
    """Newest undamaged checkpoint (None if there is none), and the damaged checkpoints that are newer."""

    checkpoint: CheckpointRef | None
    set_aside: tuple[SetAside, ...]


def fold_chain(chain: str, batches: Iterable[SteppedBatch]) -> str:
    """Return the hash chain after `batches` (see `headrace.buffer.types.extend_chain`)."""
    digests = (batch_digest(batch.batch_id, batch.members) for batch in batches)
    return reduce(extend_chain, digests, chain)


def read_checkpoint(path: Path) -> CheckpointRef:
    """Return the reference to a checkpoint, from its manifest only. Raises CheckpointUnreadable."""
    manifest = read_manifest(path)
    return CheckpointRef(
        path=str(path.absolute()),
        version=manifest.version,
        batch_ids=tuple(batch.batch_id for batch in manifest.batches),
        chain=manifest.chain,
    )


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of one checkpoint. Raises CheckpointDamaged when it is truncated or inconsistent,
    CheckpointUnreadable when it has another format."""
    document = _read_document(path)
    try:
        batches = tuple(
            SteppedBatch(
                batch_id=BatchId(batch["batch_id"]),
                members=tuple((RolloutId(rollout), int(attempt)) for rollout, attempt in batch["members"]),
                skipped=bool(batch["skipped"]),
            )
            for batch in document["batches"]
        )
        manifest = Manifest(
            version=PolicyVersion.parse(document["version"]),
            previous_chain=document["previous_chain"],
            chain=document["chain"],
            batches=batches,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointDamaged(f"{path / MANIFEST} lacks a field or has an invalid one: {error!r}") from error
    if fold_chain(manifest.previous_chain, manifest.batches) != manifest.chain:
        raise CheckpointDamaged(
            f"{path / MANIFEST}: its hash chain does not match its batches; use an earlier checkpoint"
        )
    return manifest


def check_checkpoint(path: Path) -> CheckpointRef:
    """Check all files of a checkpoint, and return its reference. Raises as `read_manifest` does."""
    checkpoint = read_checkpoint(path)
    if str(checkpoint.version) != path.name:
        raise CheckpointDamaged(f"{path} contains version {checkpoint.version}: the directory was renamed")
    # Checkpoints of older versions list no files.
    for name, (size, checksum) in _read_document(path).get("files", {}).items():
        file = path / name
        if not file.is_file():
            raise CheckpointDamaged(f"{file} is missing")
        if file.stat().st_size != size:
            raise CheckpointDamaged(f"{file} has {file.stat().st_size} bytes, but {size} were written")
        if _crc32(file) != checksum:
            raise CheckpointDamaged(f"{file} was altered after it was written: its checksum differs")
    return checkpoint


def usable_checkpoint(root: Path) -> Usable:
    """Return the newest undamaged checkpoint, after reading all of its files. Newer damaged ones are renamed. Raises
    CheckpointUnreadable for one written by a newer version of headrace."""
    aside: list[SetAside] = []
    for path in reversed(list_checkpoints(root)):
        try:
            return Usable(checkpoint=check_checkpoint(path), set_aside=tuple(aside))
        except CheckpointDamaged as error:
            aside.append(set_aside(path, str(error)))
    return Usable(checkpoint=None, set_aside=tuple(aside))


def set_aside(path: Path, reason: str) -> SetAside:
    """Rename a checkpoint so that no run will resume from it."""
    names = (f"{ASIDE}{path.name}", *(f"{ASIDE}{path.name}-{number}" for number in range(2, 1000)))
    kept_as = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    path.rename(kept_as)
    return SetAside(name=path.name, reason=reason, kept_as=kept_as)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write `headrace.json` into the directory `path`, which contains all other files."""
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
        "files": {
            str(file.relative_to(path)): [file.stat().st_size, _crc32(file)]
            for file in sorted(path.rglob("*"))
            if file.is_file() and file != path / MANIFEST
        },
    }
    (path / MANIFEST).write_text(json.dumps(document, indent=1), encoding="utf-8")


def list_checkpoints(root: Path) -> list[Path]:
    """Return the complete checkpoint directories under `root`, oldest first; none if `root` does not exist."""
    if not root.is_dir():
        return []
    complete = (path for path in root.iterdir() if _COMPLETE.fullmatch(path.name))
    return sorted(complete, key=lambda path: PolicyVersion.parse(path.name))


def stage(root: Path, version: PolicyVersion) -> Path:
    """Return a new, empty directory for the checkpoint of `version`, and remove those of interrupted saves."""
    root.mkdir(parents=True, exist_ok=True)
    # No other save can be running, because `root` has one learner.
    for leftover in root.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover)
    staged = root / f"{_UNFINISHED}{version}"
    staged.mkdir()
    return staged


def publish(staged: Path, version: PolicyVersion) -> Path:
    """Make a staged checkpoint durable, rename it, and return its final path."""
    final = staged.with_name(str(version))
    publish_folder(staged, final)
    return final


def keep_newest(root: Path, count: int) -> None:
    """Remove all but the `count` newest complete checkpoints."""
    for path in list_checkpoints(root)[:-count]:
        # Renamed first, so that a partly removed directory never looks complete.
        shutil.rmtree(path.rename(path.with_name(f"{_UNFINISHED}removed-{path.name}")))


def _read_document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointDamaged(f"{path} is not a complete checkpoint: {error}") from error
    if not isinstance(document, dict) or "format" not in document:
        raise CheckpointDamaged(f"{path / MANIFEST} is not a checkpoint manifest: it has no format")
    if document["format"] != FORMAT:
        raise CheckpointUnreadable(
            f"{path / MANIFEST} has format {document['format']}, but this version of headrace reads {FORMAT}: "
            "upgrade headrace"
        )
    return document


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            checksum = zlib.crc32(data, checksum)
    return checksum
