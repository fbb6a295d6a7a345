"""Files of an image store: layers by digest, records of resolved images, leases, and locks.

`layers/<sha256>/{tree,bytes}`, `records/<key>.json`, `leases/<owner>.json`, `locks/<key>`, `named/<sha256 of the
name>.json`, `unpacking/<owner>/`, where an owner is `<pid>-<boot>_<pid namespace>_<start>-<random>`, which identifies a
process of this boot.

Invariants:
- Entries of `layers` are complete: they were written elsewhere, synced, then renamed. The next sweep removes the files
  of dead processes from `unpacking` and `leases`.
- One process at a time unpacks a layer, or reads an archive (flock; the kernel releases it when its holder dies).
- A layer leased by a living process, or of a named image (`catalog`), is never evicted: leases and names are written,
  and victims are chosen, under the same lock.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NewType

from headrace.buffer.primitives.file_lock import FileLock
from headrace.sandboxes.errors import ImageRefused
from headrace.sandboxes.host.private_folders import make_missing
from headrace.sandboxes.linux.processes import parse_stat

logger = logging.getLogger(__name__)

Owner = NewType("Owner", str)
_FOLDERS: Final = ("layers", "records", "leases", "locks", "unpacking", "named")


class StoreFolder:
    """Synchronous access to the files of a store, for worker processes and threads."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def prepare(self) -> None:
        """Make the folders and remove the files of dead processes. Raises OSError."""
        for name in _FOLDERS:
            make_missing(self.home / name)
        for left in (*(self.home / "unpacking").iterdir(), *(self.home / "leases").iterdir()):
            if not is_alive(Owner(left.stem)):
                remove(left)

    def tree(self, digest: str) -> Path:
        """Return the folder of a layer, which is named by the hex digest of its plain tar and exists once the layer is
        published. A layer that is used in place is named by its absolute path."""
        return Path(digest) if digest.startswith("/") else self.home / "layers" / digest / "tree"

    def layer_bytes(self, digest: str) -> int:
        """Return the size of a published layer. Raises FileNotFoundError."""
        return int((self.home / "layers" / digest / "bytes").read_text())

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Wait until no other process holds the lock `key`, then hold it for the block."""
        with FileLock(self.home / "locks" / key):
            yield

    @contextmanager
    def new_layer(self) -> Iterator[Path]:
        """Make a folder with an empty `tree`, which is removed at the end unless `publish` has moved it."""
        folder = self.home / "unpacking" / new_owner()
        folder.mkdir()
        try:
            (folder / "tree").mkdir(mode=0o755)
            yield folder
        finally:
            remove(folder)

    def publish(self, folder: Path, digest: str, size_bytes: int) -> None:
        """Move a finished layer into `layers` durably; if the layer already exists there, the existing one is kept."""
        (folder / "bytes").write_text(str(size_bytes))
        (folder / "used").touch()
        layers = self.home / "layers"
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        descriptor = os.open(folder, flags)
        try:
            # syncfs(2) writes contents and names of the whole tree at once.
            if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
                raise OSError(ctypes.get_errno(), f"syncfs {folder}")
        finally:
            os.close(descriptor)
        with suppress(OSError):
            folder.rename(layers / digest)
        if not self.tree(digest).is_dir():
            raise OSError(f"layer {digest} could not be moved into {self.home}")
        descriptor = os.open(layers, flags)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read_record(self, key: str) -> dict[str, Any] | None:
        """Return a record that `write_record` stored, if all its layers still exist."""
        try:
            record: dict[str, Any] = json.loads((self.home / "records" / f"{key}.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return record if all(self.tree(digest).is_dir() for digest in record["layers"]) else None

    def write_record(self, key: str, record: dict[str, Any]) -> None:
        self._write("records", f"{key}.json", json.dumps(record))

    def lease(self, owner: Owner, digests: Sequence[str]) -> bool:
        """Protect layers until `release`, or until `owner`'s process is dead. Returns False if one has been evicted."""
        with self.lock("eviction"):
            if not all(self.tree(digest).is_dir() for digest in digests):
                return False
            for digest in digests:
                (self.home / "layers" / digest / "used").touch()
            self._write("leases", f"{owner}.json", json.dumps(list(digests)))
        return True

    def release(self, owner: Owner) -> None:
        (self.home / "leases" / f"{owner}.json").unlink(missing_ok=True)

    def leased(self) -> set[str]:
        """Return the digests of the layers that living processes have leased."""
        used: set[str] = set()
        for path in (self.home / "leases").glob("*.json"):
            if is_alive(Owner(path.stem)):
                with suppress(FileNotFoundError):
                    used.update(json.loads(path.read_bytes()))
        return used

    def size_bytes(self) -> int:
        return sum(size for _, size, _ in self._layers())

    def retained(self, *, without: Sequence[str] = ()) -> set[str]:
        """Return the digests of the layers that are leased, or belong to named images other than those `without`.
        Raises ImageRefused for a damaged entry, because nobody knows which layers it protects."""
        found = self.leased()
        for path in self.named():
            try:
                image = json.loads(path.read_bytes())
                if image["name"] not in without:
                    found.update(image["layers"])
            except FileNotFoundError:
                continue
            except (ValueError, TypeError, KeyError) as error:
                raise damaged(path) from error
        return found

    def unused_bytes(self, *, without: Sequence[str] = ()) -> int:
        """Return the bytes of the layers that are not `retained`."""
        kept = self.retained(without=without)
        return sum(size for _, size, digest in self._layers() if digest not in kept)

    def evict(self, max_bytes: int, keep: Sequence[str] = ()) -> int:
        """Remove the least recently used layers until at most `max_bytes` remain, except those that are retained or in
        `keep`. Returns the bytes removed; while an entry of the catalogue is damaged, nothing is."""
        with self.lock("eviction"):
            try:
                retained = self.retained() | set(keep)
            except ImageRefused as error:
                logger.warning("no image layer is evicted: %s", error.message)
                return 0
            layers = sorted(self._layers())
            before = total = sum(size for _, size, _ in layers)
            trash = self.home / "unpacking" / new_owner()
            trash.mkdir()
            for _, size, digest in layers:
                if total > max_bytes and digest not in retained:
                    (self.home / "layers" / digest).rename(trash / digest)
                    total -= size
        remove(trash)
        for path in (self.home / "records").glob("*.json"):
            if self.read_record(path.stem) is None:
                path.unlink(missing_ok=True)
        return before - total

    def named(self) -> list[Path]:
        """Return the files of all named images."""
        return list((self.home / "named").glob("*.json"))

    def write_named(self, file_name: str, text: str) -> None:
        """Write the file of a named image durably."""
        self._write("named", file_name, text, durable=True)

    def _layers(self) -> list[tuple[float, int, str]]:
        """Return (last used, bytes, digest) of each layer."""
        rows = []
        for folder in (self.home / "layers").iterdir():
            with suppress(FileNotFoundError):
                rows.append(((folder / "used").stat().st_mtime, int((folder / "bytes").read_text()), folder.name))
        return rows

    def _write(self, folder: str, name: str, text: str, *, durable: bool = False) -> None:
        draft = self.home / "unpacking" / new_owner()
        with draft.open("w") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.rename(self.home / folder / name)
        if durable:
            descriptor = os.open(self.home / folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def damaged(path: Path) -> ImageRefused:
    """Return the error for an entry of the catalogue that cannot be read."""
    return ImageRefused(f"{path}: a damaged entry of the image catalogue: remove the file and add its image again")


def new_owner(pid: int | None = None) -> Owner:
    """Return a new owner name that identifies a process, by default this one. Raises ProcessLookupError for an unknown
    process."""
    number = pid or os.getpid()
    return Owner(f"{number}-{_boot()}_{_pid_namespace()}_{_start_of(number)}-{secrets.token_hex(8)}")


def is_alive(owner: Owner) -> bool:
    """Return True unless the owner's process is known to be dead. Containers may share a folder without seeing each
    other's processes, so a process in another container counts as alive until the next boot."""
    pid, _, rest = owner.partition("-")
    boot, *namespace, start = rest.rpartition("-")[0].split("_") if "_" in rest else ("", "")
    if not pid.isdigit() or boot != _boot():
        return False
    if namespace != [str(_pid_namespace())]:
        return True
    try:
        return str(_start_of(int(pid))) == start
    except ProcessLookupError:
        return False


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _start_of(pid: int) -> int:
    """Return the start time of a process, in clock ticks of this boot."""
    try:
        entry = parse_stat(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessLookupError(f"there is no process {pid}") from error
    if entry.state in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return entry.started


def remove(path: Path) -> None:
    """Remove a file or a tree of any depth. A missing path is ignored, and entries that the host refuses to remove
    remain. Links are not followed, and there is no recursion: nested folders are moved up one by one until all are
    siblings."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    folders = [path]
    for folder in folders:
        with suppress(OSError):
            for entry in list(os.scandir(folder)):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path).rename(path / f"folder-{secrets.token_hex(8)}"))
                else:
                    Path(entry.path).unlink()
    for folder in reversed(folders):
        with suppress(OSError):
            folder.rmdir()
