"""Reads, writes, checks and removes checkpoint directories. Needs no torch.

Invariants:
- `<root>/<epoch>.<step>/` is always complete: it is written under a `tmp-` name, every file and directory is fsynced,
  and then it is renamed.
- `headrace.json` contains the batches since the previous checkpoint in the order of their steps, including skipped
  ones, and the hash chain over all batches of the run up to this checkpoint: extending `previous_chain` with the
  batches gives `chain`.
- Checkpoints are ordered by version: those of a later epoch come later.
- `headrace.json` is written last and lists every other file with its size and SHA-256, so that missing, truncated or
  altered files are found before anything is loaded. A damaged directory is renamed to `aside-<name>`, never removed.
  So is one that a replaced learner finished after a newer epoch had been opened.
- It also records what was trained (architecture, vocabulary, objective): a learner refuses a checkpoint of another
  kind instead of loading it. And the resolved configuration of the run that trained it, which no learner reads.

Layout: `headrace.json`, `megatron/` (model, optimizer and random state), and beside them a Hugging Face model
directory.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from headrace.buffer.primitives.durable_files import publish_folder
from headrace.buffer.trajectories.types import BatchId, CheckpointRef, RolloutId, batch_digest, extend_chain
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.errors import CheckpointDamaged, CheckpointMismatch, CheckpointUnreadable, ModelInvalid
from headrace.policies.tokens.model_keys import read_language_keys

FORMAT = 1
MANIFEST = "headrace.json"
MEGATRON_STATE = "megatron"
ASIDE = "aside-"
"""Prefix of checkpoints that no run resumes from, because they are damaged or belong to a lost or replaced life of the
run; they are kept for inspection only."""
KEPT = "kept-"
"""Prefix of checkpoints that are kept although they are not among the newest, see `checkpoint_retention`."""
OBJECTIVE = "objective"
"""Entry of `Manifest.trained` with the name of the objective."""
_SIZES = {
    "vocabulary": "vocab_size",
    "layers": "num_hidden_layers",
    "hidden size": "hidden_size",
    "feed-forward size": "intermediate_size",
    "attention heads": "num_attention_heads",
    "key-value heads": "num_key_value_heads",
}
"""Other entries of `Manifest.trained`, with their keys in config.json."""
_UNFINISHED = "tmp-"
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
    """Contents of `headrace.json`. `trained` describes what was trained, by name (see
    `trained_model`); empty if it is not known. `configuration` is the run's, as in its config.json (no secrets); empty
    without a run directory."""

    version: PolicyVersion
    previous_chain: str
    chain: str
    batches: tuple[SteppedBatch, ...]
    trained: Mapping[str, str | int] = field(default_factory=dict)
    configuration: Mapping[str, Any] = field(default_factory=dict)


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
    """Return the hash chain after `batches` (see `headrace.buffer.trajectories.types.extend_chain`)."""
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
            trained=dict(document["trained"]),
            configuration=dict(document["configuration"]),
        )
        chain = fold_chain(manifest.previous_chain, manifest.batches)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointDamaged(f"{path / MANIFEST} lacks a field or has an invalid one: {error!r}") from error
    if chain != manifest.chain:
        raise CheckpointDamaged(
            f"{path / MANIFEST}: its hash chain does not match its batches; use an earlier checkpoint"
        )
    return manifest


def check_checkpoint(path: Path) -> CheckpointRef:
    """Check all files of a checkpoint, and return its reference. Raises as `read_manifest` does."""
    checkpoint = read_checkpoint(path)
    if str(checkpoint.version) != path.name.removeprefix(KEPT):
        raise CheckpointDamaged(f"{path} contains version {checkpoint.version}: the directory was renamed")
    for name, size, digest in _listed_files(path):
        file = path / name
        if not file.is_file():
            raise CheckpointDamaged(f"{file} is missing")
        if file.stat().st_size != size:
            raise CheckpointDamaged(f"{file} has {file.stat().st_size} bytes, but {size} were written")
        if (found := _sha256(file)) != digest:
            raise CheckpointDamaged(
                f"{file} was altered after it was written: its digest is {found}, but {digest} was recorded"
            )
    return checkpoint


def trained_model(model_dir: Path) -> dict[str, str | int]:
    """Return the entries of `Manifest.trained` that config.json of a model directory gives; empty if it has none."""
    try:
        keys = read_language_keys(model_dir / "config.json")
    except ModelInvalid:
        return {}
    architectures = keys.get("architectures") or [keys.get("model_type", "")]
    named = {"architecture": architectures[0]} | {name: keys.get(key) for name, key in _SIZES.items()}
    return {name: value for name, value in named.items() if value}


def refuse_mismatch(path: Path, wanted: Mapping[str, str | int]) -> None:
    """Raise CheckpointMismatch, with both values and the fix, if the checkpoint was trained as something else than
    `wanted`. What only one of them knows is not compared."""
    trained = read_manifest(path).trained
    for name, value in wanted.items():
        if name in trained and trained[name] != value:
            fix = (
                f"set learner.objective to {trained[name]}"
                if name == OBJECTIVE
                else "set model.path to the model with which the run began"
            )
            raise CheckpointMismatch(
                f"{path} was trained with {name} {trained[name]}, but this learner has {name} {value}: {fix}, or start "
                f"a new run from these weights with model.path = {path}"
            )


def usable_checkpoint(root: Path) -> Usable:
    """Return the newest undamaged checkpoint, after reading all of its files. Newer damaged ones are renamed. Raises
    CheckpointUnreadable for one of another format."""
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


def write_manifest(path: Path, manifest: Manifest, *, digests: Mapping[str, str] | None = None) -> None:
    """Write `headrace.json` into the directory `path`, which contains all other files. `digests` are the known SHA-256
    of files, by path below `path`; the other files are read."""
    known = digests or {}
    batches = [
        {"batch_id": batch.batch_id, "skipped": batch.skipped, "members": [list(member) for member in batch.members]}
        for batch in manifest.batches
    ]
    document = {
        "format": FORMAT,
        "version": str(manifest.version),
        "previous_chain": manifest.previous_chain,
        "chain": manifest.chain,
        "trained": dict(manifest.trained),
        "configuration": dict(manifest.configuration),
        "batches": batches,
        "files": {
            (name := str(file.relative_to(path))): [file.stat().st_size, known.get(name) or _sha256(file)]
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
    for leftover in root.glob(f"{_UNFINISHED}*"):
        # `root` has one learner, but one that was replaced may not know it yet: it leaves the save of its successor.
        name = leftover.name.removeprefix(_UNFINISHED)
        if not _COMPLETE.fullmatch(name) or PolicyVersion.parse(name).epoch <= version.epoch:
            shutil.rmtree(leftover)
    staged = root / f"{_UNFINISHED}{version}"
    staged.mkdir()
    return staged


def publish(staged: Path, version: PolicyVersion) -> Path:
    """Make a staged checkpoint durable, rename it, and return its final path."""
    final = staged.with_name(str(version))
    publish_folder(staged, final)
    return final


def remove(path: Path) -> None:
    """Remove a checkpoint directory."""
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
            f"{path / MANIFEST} has format {document['format']}, which is of an unreleased version of headrace: start "
            f"a new run from these weights with model.path = {path}"
        )
    return document


def _listed_files(path: Path) -> list[tuple[str, int, str]]:
    """Return name, size and digest of the files that a manifest lists. Raises CheckpointDamaged."""
    document = _read_document(path)
    try:
        return [(name, size, digest) for name, (size, digest) in document["files"].items()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointDamaged(f"{path / MANIFEST} has no valid list of files: {error!r}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
