"""Copies of a run's ledger in a storage folder that outlives the disk of the run.

Invariants:
- `<storage>/ledger/<epoch>.<step>/` is always complete. It is assembled beside the ledger, where SQLite can lock its
  files, copied under a `tmp-` name, fsynced, and then renamed. `copy.json` lists its files with sizes and digests.
- The copy named after a checkpoint contains `ledger.db`, `archive.db` if there is one, and the trajectories that a
  return to that checkpoint can still train. Each keeps the number of its file. Trained trajectories are left out.
- A copy is read from the files while the run goes on: `ledger.db` first, so that rows that move to the archive
  meanwhile are in both.
- Epochs that a lost ledger may have opened are never opened again: `reserve_epochs` records them beside the copies.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace.buffer.core.epochs import EPOCHS_RESERVED
from headrace.buffer.core.records import RolloutState
from headrace.buffer.errors import LedgerRefused
from headrace.buffer.ledger.archive import ARCHIVE
from headrace.buffer.ledger.schema import TRAJECTORIES_DDL
from headrace.buffer.primitives.durable_files import fsync, publish_folder, replace_file
from headrace.buffer.trajectories.versions import PolicyVersion

FOLDER: Final = "ledger"
MANIFEST: Final = "copy.json"
FORMAT: Final = 1
COPIES_KEPT: Final = 2
EPOCH_GAP: Final = 100
"""Epochs that a lost ledger may have opened after the newest one seen in storage. Each is a start of a learner."""
_RESERVED: Final = "epochs.json"
_LEDGER: Final = "ledger.db"
_TRAJECTORIES: Final = "trajectories"
_STAGED: Final = "copying"
_RESTORING: Final = "restoring"
_UNFINISHED: Final = "tmp-"
_COMPLETE: Final = re.compile(r"\d+\.\d+")
_UNTRAINED: Final = ", ".join(
    f"'{state.value}'" for state in (RolloutState.WAITING, RolloutState.SEALED, RolloutState.LEASED)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRef:
    """Complete copy of a ledger. `version` is the checkpoint that it was made for; `in_flight` counts the rollouts that
    will be issued again, `untrained` the finished ones whose trajectories are in the copy. `files` gives the size and
    SHA-256 of each file."""

    path: Path
    version: PolicyVersion
    run_id: str
    taken_at_s: float
    in_flight: int
    untrained: int
    files: Mapping[str, tuple[int, str]]


def copies_folder(storage: Path) -> Path:
    """Return the folder of the copies in a storage folder."""
    return storage / FOLDER


def copied_versions(storage: Path) -> list[PolicyVersion]:
    """Return the versions of the copies, oldest first; none if storage is absent."""
    folder = copies_folder(storage)
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(PolicyVersion.parse(name) for name in names if _COMPLETE.fullmatch(name))


def write_copy(run_dir: Path, storage: Path, version: PolicyVersion, *, taken_at_s: float) -> CopyRef:
    """Copy the ledger in `run_dir`, which may be open, for its checkpoint `version`; keep the newest copies only.
    Raises OSError."""
    root, staged = copies_folder(storage), run_dir / _STAGED
    # Not `parents`: a storage folder that is absent must not be created on a local disk in its place.
    root.mkdir(exist_ok=True)
    final, sent = root / str(version), root / f"{_UNFINISHED}{version}"
    shutil.rmtree(staged, ignore_errors=True)
    try:
        (staged / _TRAJECTORIES).mkdir(parents=True)
        document = _assemble(run_dir, staged, version, taken_at_s)
        for leftover in root.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(leftover)
        shutil.copytree(staged, sent)
        (sent / MANIFEST).write_text(json.dumps(document, indent=1), encoding="utf-8")
        if final.exists():
            final.rename(root / f"{_UNFINISHED}replaced-{version}")
        publish_folder(sent, final)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    _prune(storage)
    return read_copy(final)


def read_copy(path: Path) -> CopyRef:
    """Read the manifest of a copy. Raises LedgerRefused."""
    try:
        document = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise LedgerRefused(
                f"{path / MANIFEST} has format {document['format']}, but this version of headrace reads {FORMAT}: "
                "upgrade headrace"
            )
        return CopyRef(
            path=path,
            version=PolicyVersion.parse(document["version"]),
            run_id=str(document["run_id"]),
            taken_at_s=float(document["taken_at_s"]),
            in_flight=int(document["in_flight"]),
            untrained=int(document["untrained"]),
            files={str(name): (int(size), str(digest)) for name, (size, digest) in document["files"].items()},
        )
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise LedgerRefused(f"{path} is not a complete copy of a ledger: {error!r}") from error


def restore(copy: CopyRef, state: Path, *, epochs_reserved: int) -> None:
    """Copy a copy to the folder `state`, which has no ledger. Its next epoch is opened after `epochs_reserved`. An
    interrupted restoration can be repeated. Raises LedgerRefused when `state` has a ledger or a file of the copy is
    damaged, OSError."""
    refuse_ledger(state)
    staged = state / _RESTORING
    shutil.rmtree(staged, ignore_errors=True)
    (staged / _TRAJECTORIES).mkdir(parents=True)
    for name, (size, digest) in copy.files.items():
        try:
            shutil.copyfile(copy.path / name, staged / name)
        except FileNotFoundError as error:
            raise LedgerRefused(f"{copy.path / name} is missing: use another copy") from error
        if (staged / name).stat().st_size != size or _sha256(staged / name) != digest:
            raise LedgerRefused(f"{copy.path / name} differs from what was copied: use another copy")
    with _as_oserror(staged), closing(sqlite3.connect(staged / _LEDGER, isolation_level=None)) as ledger:
        ledger.execute("INSERT OR REPLACE INTO counters VALUES (?, ?)", (EPOCHS_RESERVED, epochs_reserved))
    shutil.rmtree(state / _TRAJECTORIES, ignore_errors=True)
    publish_folder(staged / _TRAJECTORIES, state / _TRAJECTORIES)
    # The ledger comes last: without it nothing was restored.
    for name in (ARCHIVE, _LEDGER):
        for suffix in ("-wal", "-shm"):
            (state / f"{name}{suffix}").unlink(missing_ok=True)
        if (staged / name).exists():
            fsync(staged / name)
            (staged / name).replace(state / name)
            fsync(state)
    shutil.rmtree(staged)


def refuse_ledger(state: Path) -> None:
    """Raise LedgerRefused if a folder has a ledger or parts of one, unless an interrupted restoration left them."""
    for name in (_LEDGER, ARCHIVE, _TRAJECTORIES):
        if (state / name).exists() and (name == _LEDGER or not (state / _RESTORING).exists()):
            raise LedgerRefused(f"{state / name} exists: resume the run from this folder, or restore to an empty one")


def reserve_epochs(storage: Path, seen: Iterable[int]) -> int:
    """Return a number above every epoch that a lost ledger may have opened, given those seen in storage, and record it
    durably. Raises OSError."""
    path = copies_folder(storage) / _RESERVED
    known = 0
    with suppress(FileNotFoundError):
        known = int(json.loads(path.read_text(encoding="utf-8"))["reserved"])
    reserved = max([known, *seen]) + EPOCH_GAP
    replace_file(path, json.dumps({"reserved": reserved}).encode() + b"\n")
    return reserved


def _assemble(run_dir: Path, staged: Path, version: PolicyVersion, taken_at_s: float) -> dict[str, Any]:
    """Write all files of a copy to `staged`, and return the contents of its manifest."""
    for name in (_LEDGER, ARCHIVE):
        if name == ARCHIVE and not (run_dir / name).exists():
            continue
        with _as_oserror(run_dir / name), closing(_read_only(run_dir / name)) as source:
            # VACUUM reads a snapshot of its own, so that the run can continue to write.
            source.execute("VACUUM INTO ?", (str(staged / name),))
    with _as_oserror(staged), closing(_read_only(staged / _LEDGER)) as ledger:
        if (staged / ARCHIVE).exists():
            ledger.execute("ATTACH ? AS archive", ((staged / ARCHIVE).absolute().as_uri() + "?mode=ro",))
        counts = dict(ledger.execute("SELECT state, count(*) FROM main.rollouts GROUP BY state"))
        (run_id,) = ledger.execute("SELECT value FROM main.meta WHERE key = 'run_id'").fetchone()
        wanted = _untrained(ledger, version)
    for number, keys in wanted.items():
        _copy_trajectories(run_dir / _TRAJECTORIES, staged / _TRAJECTORIES, number, keys)
    return {
        "format": FORMAT,
        "version": str(version),
        "run_id": run_id,
        "taken_at_s": taken_at_s,
        "in_flight": counts.get(RolloutState.IN_FLIGHT.value, 0),
        "untrained": sum(len(keys) for keys in wanted.values()),
        "files": {
            str(path.relative_to(staged)): [path.stat().st_size, _sha256(path)]
            for path in sorted(staged.rglob("*"))
            if path.is_file()
        },
    }


def _untrained(ledger: sqlite3.Connection, version: PolicyVersion) -> dict[int, list[tuple[str, int]]]:
    """Return the attempts whose trajectory a return to `version` can still train, by the number of its file."""
    schemas = [name for _, name, _ in ledger.execute("PRAGMA database_list") if name in ("main", "archive")]

    def union(query: str) -> str:
        return " UNION ".join(query.format(schema=schema) for schema in schemas)

    # Steps after the checkpoint are undone by a resume, and their batches are trained again.
    chains = union("SELECT chain FROM {schema}.checkpoints WHERE version = ?1")
    covered = union(f"SELECT sequence FROM {{schema}}.commits WHERE chain IN ({chains}) AND rolled_back_by IS NULL")
    last = f"(SELECT coalesce(max(sequence), 0) FROM ({covered}))"
    undone = union(f"SELECT batch_id FROM {{schema}}.commits WHERE sequence > {last} AND rolled_back_by IS NULL")
    wanted = union(
        "SELECT trajectory_file, rollout_id, attempt FROM {schema}.rollouts "
        "JOIN {schema}.attempts USING (rollout_id, attempt) WHERE trajectory_file IS NOT NULL "
        f"AND (state IN ({_UNTRAINED}) OR batch_id IN ({undone.replace('{', '{{').replace('}', '}}')}))"
    )
    by_file: dict[int, list[tuple[str, int]]] = {}
    for number, rollout_id, attempt in ledger.execute(wanted, (str(version),)):
        by_file.setdefault(number, []).append((rollout_id, attempt))
    return by_file


def _copy_trajectories(source: Path, target: Path, number: int, keys: Iterable[tuple[str, int]]) -> None:
    """Copy trajectories to a file with the same number. Raises OSError when one is missing."""
    name = f"{number:06d}.db"
    query = "SELECT rollout_id, attempt, data FROM trajectories WHERE rollout_id = ? AND attempt = ?"
    with (
        _as_oserror(source / name),
        closing(_read_only(source / name)) as reader,
        closing(sqlite3.connect(target / name)) as writer,
        writer,
    ):
        writer.execute(TRAJECTORIES_DDL)
        for key in keys:
            row = reader.execute(query, key).fetchone()
            if row is None:
                raise OSError(f"the trajectory of {key[0]} attempt {key[1]} is not in {source / name}")
            writer.execute("INSERT INTO trajectories (rollout_id, attempt, data) VALUES (?, ?, ?)", row)


def _prune(storage: Path) -> None:
    """Remove all but the newest copies."""
    root = copies_folder(storage)
    for version in copied_versions(storage)[:-COPIES_KEPT]:
        # Renamed first, so that a partly removed copy never looks complete.
        (root / str(version)).rename(root / f"{_UNFINISHED}removed-{version}")
    for leftover in root.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover)


def _read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _as_oserror(path: Path) -> Iterator[None]:
    """Raise SQLite's errors as OSError, because a copy that fails never ends a run."""
    try:
        yield
    except sqlite3.Error as error:
        raise OSError(f"{path} cannot be copied: {error}") from error
