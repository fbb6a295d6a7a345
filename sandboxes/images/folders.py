"""The files of an image store: layers by digest, records of resolved images, leases, locks.

`layers/<sha256>/{tree,bytes}`, `records/<key>.json`, `leases/<owner>.json`, `locks/<key>`, `unpacking/<owner>/`, where
an owner is `<pid>-<boot>_<pid namespace>_<start>-<random>`: a process of this boot.

Invariants:
- What stands in `layers` is complete: it was written elsewhere, synced, then renamed. Whatever a dead process left in
  `unpacking` and `leases` is removed by the next sweep.
- One process at a time unpacks a layer, and reads an archive (flock; the kernel releases it when its holder dies).
- A layer with a lease of a living process is never evicted: leases are written, and victims chosen, under one lock.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import secrets
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NewType

from headrace.sandboxes.kernel.processes import parse_stat
from headrace.sandboxes.private_folders import make_missing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Owner = NewType("Owner", str)
_FOLDERS: Final = ("layers", "records", "leases", "locks", "unpacking")


class StoreFolder:
    """Synchronous: callers are worker processes and threads."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def prepare(self) -> None:
        """Make the folders and remove what dead processes left. Raises OSError."""
        for name in _FOLDERS:
            make_missing(self.home / name)
        for left in (*(self.home / "unpacking").iterdir(), *(self.home / "leases").iterdir()):
            if not is_alive(Owner(left.stem)):
                remove(left)

    def tree(self, digest: str) -> Path:
        """The folder of a layer, named by the hex digest of its plain tar. Unless it is there it does not exist."""
        return self.home / "layers" / digest / "tree"

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Wait until no other process holds `key`."""
        with (self.home / "locks" / key).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def new_layer(self) -> Iterator[Path]:
        """A folder with an empty `tree`, removed at the end unless `publish` took it."""
        folder = self.home / "unpacking" / new_owner()
        folder.mkdir()
        try:
            (folder / "tree").mkdir(mode=0o755)
            yield folder
        finally:
            remove(folder)

    def publish(self, folder: Path, digest: str, size_bytes: int) -> None:
        """Let a finished layer be seen, durably. One that is there already stays."""
        (folder / "bytes").write_text(str(size_bytes))
        (folder / "used").touch()
        _sync_file_system(folder)
        with suppress(OSError):
            folder.rename(self.home / "layers" / digest)
        if not self.tree(digest).is_dir():
            raise OSError(f"layer {digest} could not be moved into {self.home}")
        _sync_folder(self.home / "layers")

    def read_record(self, key: str) -> dict[str, Any] | None:
        """What `write_record` kept, if all its layers are still here."""
        try:
            record: dict[str, Any] = json.loads((self.home / "records" / f"{key}.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return record if all(self.tree(digest).is_dir() for digest in record["layers"]) else None

    def write_record(self, key: str, record: dict[str, Any]) -> None:
        self._write("records", f"{key}.json", json.dumps(record))

    def lease(self, owner: Owner, digests: Sequence[str]) -> bool:
        """Protect layers until `release`, or until the process of `owner` is dead. False when one is gone by now."""
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
        """Digests of layers that some living process uses."""
        used: set[str] = set()
        for path in (self.home / "leases").glob("*.json"):
            if is_alive(Owner(path.stem)):
                with suppress(FileNotFoundError):
                    used.update(json.loads(path.read_bytes()))
        return used

    def size_bytes(self) -> int:
        return sum(size for _, size, _ in self._layers())

    def evict(self, max_bytes: int, keep: Sequence[str] = ()) -> None:
        """Remove layers, those first that nobody asked for longest, until `max_bytes` are kept. Neither leased ones nor
        those of `keep` go."""
        with self.lock("eviction"):
            spared = self.leased() | set(keep)
            layers = sorted(self._layers())
            total = sum(size for _, size, _ in layers)
            trash = self.home / "unpacking" / new_owner()
            trash.mkdir()
            for _, size, digest in layers:
                if total > max_bytes and digest not in spared:
                    (self.home / "layers" / digest).rename(trash / digest)
                    total -= size
        remove(trash)
        self._forget_records()

    def _layers(self) -> list[tuple[float, int, str]]:
        """(last used, bytes, digest) of each layer."""
        rows = []
        for folder in (self.home / "layers").iterdir():
            with suppress(FileNotFoundError):
                rows.append(((folder / "used").stat().st_mtime, int((folder / "bytes").read_text()), folder.name))
        return rows

    def _forget_records(self) -> None:
        for path in (self.home / "records").glob("*.json"):
            if self.read_record(path.stem) is None:
                path.unlink(missing_ok=True)

    def _write(self, folder: str, name: str, text: str) -> None:
        beside = self.home / "unpacking" / new_owner()
        beside.write_text(text)
        beside.rename(self.home / folder / name)


def new_owner(pid: int | None = None) -> Owner:
    """A name that tells the process it belongs to. Raises ProcessLookupError when there is no such process."""
    number = pid or os.getpid()
    return Owner(f"{number}-{_boot()}_{_pid_namespace()}_{_start_of(number)}-{secrets.token_hex(8)}")


def is_alive(owner: Owner) -> bool:
    """Whether its process lives, as far as can be seen: containers may share a folder, and the processes of another
    one are not there to be looked at. Until the next boot those count as alive."""
    pid, _, rest = owner.partition("-")
    boot, *namespace, start = rest.rpartition("-")[0].split("_") if "_" in rest else ("", "")
    if not pid.isdigit() or boot != _boot():
        return False
    # Older versions wrote no namespace.
    if namespace and namespace != [str(_pid_namespace())]:
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
    """When a process began: clock ticks of this boot."""
    try:
        entry = parse_stat(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessLookupError(f"no process {pid}") from error
    if entry.state in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return entry.started


def remove(path: Path) -> None:
    """Remove a file or a tree of any depth; what is gone already is fine, what the host refuses stays. No link is
    followed, and nothing recurses: folders are moved up one by one until all lie side by side."""
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


def _sync_file_system(folder: Path) -> None:
    """syncfs(2): contents and names of a whole tree at once."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), f"syncfs {folder}")
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
