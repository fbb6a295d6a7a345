"""Launcher process as its provider sees it: started here, or adopted from another provider.

Invariants:
- A launcher has a private folder with its socket. One that stays (`stays_in`) always uses the same folder, which holds
  a note with its secret for the next provider. At most one launcher serves there, because it is started under a lock.
- A launcher that does not exit on request is killed; in both cases its sandboxes die with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import select
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self

from headrace.buffer.primitives.file_lock import FileLock
from headrace.sandboxes.errors import LauncherGone, NamespacesUnavailable, SandboxError, SpecRefused
from headrace.sandboxes.host.leftovers import LAUNCHER_NAME
from headrace.sandboxes.host.private_folders import make_private, new_private, user_folder
from headrace.sandboxes.linux.stdlib_process import stdlib_command
from headrace.sandboxes.local.client import LauncherClient

_MAX_FOLDER_BYTES: Final = 90
"""sun_path holds up to 107 bytes (unix(7))."""
_START_TIMEOUT_S: Final = 30.0
_CLOSE_TIMEOUT_S: Final = 30.0
_ADOPT_TIMEOUT_S: Final = 10.0
_NOTE: Final = "launcher.json"
_LOCK: Final = "lock"
_OWN_FOLDER: Final = re.compile(r"[0-9]+-[a-z0-9_]{8}")
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OWN_FILES: Final = frozenset((_LOCK, _NOTE, "launcher.new", "socket"))


class LauncherProcess:
    """Running launcher, created by `start` or `adopt`. `missing` maps each unavailable controller to the reason."""

    def __init__(
        self,
        folder: Path,
        *,
        secret: str,
        pid: int,
        missing: Mapping[str, str],
        process: asyncio.subprocess.Process | None,
    ) -> None:
        self.endpoint = str(folder / "socket")
        self.secret = secret
        self.pid = pid
        self.missing = missing
        self._folder = folder
        self._process = process
        # The pid alone could belong to another process by the time it is used.
        self._handle = os.pidfd_open(pid)

    @classmethod
    async def start(cls, folder: Path, settings: Mapping[str, Any], *, tied: bool) -> Self:
        """Start a launcher that serves in `folder`; if `tied`, it ends with this process. Raises NamespacesUnavailable,
        LauncherGone."""
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                return await cls._spawn(folder, {**settings, "tied": tied})
        except TimeoutError as error:
            raise LauncherGone(f"the launcher did not start within {_START_TIMEOUT_S} s") from error
        except OSError as error:
            raise LauncherGone(f"the launcher could not be started: {error}") from error

    @classmethod
    async def _spawn(cls, folder: Path, settings: Mapping[str, Any]) -> Self:
        environment = {"LD_LIBRARY_PATH": path} if (path := os.environ.get("LD_LIBRARY_PATH")) else {}
        secret = secrets.token_hex(16)
        # In a new session Ctrl-C at the terminal reaches only the owner, which then closes in order.
        process = await asyncio.create_subprocess_exec(
            *stdlib_command("launcher.main"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=None if settings["tied"] else asyncio.subprocess.DEVNULL,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
        try:
            # One folder for all launchers of this user on this host.
            ids = await asyncio.to_thread(user_folder, "ids")
            places = {"socket_path": str(folder / "socket"), "ids_folder": str(ids)}
            all_settings = {**settings, **places, "admin_secret": secret}
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(all_settings).encode() + b"\n")
            with suppress(ConnectionError):
                await process.stdin.drain()
            line = await process.stdout.readline()
            if not line:
                raise LauncherGone("the launcher ended while it was starting: see its standard error")
            answer = json.loads(line)
            if "error" in answer:
                raise NamespacesUnavailable(str(answer["error"]))
            return cls(folder, secret=secret, pid=process.pid, missing=answer["missing"], process=process)
        except BaseException:
            if process.returncode is None:
                process.kill()
            await asyncio.shield(process.wait())
            raise

    @classmethod
    async def adopt(cls, folder: Path) -> Self | None:
        """Return the launcher that serves in `folder`, or None. A launcher in another container cannot be adopted,
        because its process cannot be watched from here. One that does not answer is killed."""
        try:
            note = json.loads(await asyncio.to_thread((folder / _NOTE).read_bytes))
            client = await LauncherClient.connect(str(folder / "socket"))
        except (OSError, ValueError, LauncherGone):
            return None
        try:
            async with asyncio.timeout(_ADOPT_TIMEOUT_S):
                answer = await client.request({"op": "usage", "secret": note["secret"]})
            adopted = cls(folder, secret=note["secret"], pid=answer["pid"], missing=answer["missing"], process=None)
            if _is_launcher(adopted.pid):
                return adopted
            adopted.close()
            return None
        except TimeoutError:
            # A new launcher takes its folder, so that no provider could find this one any more.
            await asyncio.to_thread(_kill_launcher, note["pid"])
            return None
        except (SandboxError, ProcessLookupError):
            return None
        finally:
            client.close()

    def leave_note(self) -> None:
        """Write the note that lets the next provider with this folder adopt the launcher."""
        path = self._folder / _NOTE
        with os.fdopen(os.open(path.with_suffix(".new"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({"secret": self.secret, "pid": self.pid}, file)
        path.with_suffix(".new").rename(path)

    @property
    def alive(self) -> bool:
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return not poll.poll(0)

    async def kill(self) -> None:
        """Kill the launcher; its sandboxes die with it."""
        self._send(signal.SIGKILL)
        await self._ended()

    async def end(self) -> None:
        """Ask the launcher to kill its sandboxes, clean up and exit."""
        self._send(signal.SIGTERM)
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._ended()
        except TimeoutError:
            await self.kill()

    def close(self) -> None:
        """Close the handle to a launcher that has exited or is to stay."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    async def _ended(self) -> None:
        if self._process is not None:
            await self._process.wait()
            return
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self._handle, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._handle)


def _kill_launcher(pid: int) -> None:
    """Kill the launcher with this pid, unless the pid now belongs to another process."""
    with suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if _is_launcher(pid):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def _is_launcher(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(LAUNCHER_NAME.encode())
    except OSError:
        return False


def runtime_folder(chosen: Path | None) -> Path:
    """Return the folder in which launchers' folders are made, by default this user's own. Raises FolderRefused."""
    return chosen or user_folder("sandboxes")


class ProviderFolder:
    """Private folder of one provider below `parent`, from which other providers' abandoned folders are removed. It is
    held with a lock, because containers that share the parent do not see each other's processes. Raises SpecRefused,
    FolderRefused, OSError."""

    def __init__(self, parent: Path) -> None:
        _make_private(parent)
        _sweep(parent)
        # Other providers look for abandoned folders under this lock, so that they never see this one unlocked.
        with FileLock(os.open(parent, _FOLDER)):
            for folder in parent.iterdir():
                if _OWN_FOLDER.fullmatch(folder.name) and not _is_held(folder) and not _listens(folder / "socket"):
                    shutil.rmtree(folder, ignore_errors=True)
            self.path = new_private(parent, f"{os.getpid()}-")
            self._lock = FileLock(os.open(self.path, _FOLDER))

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def _is_held(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, _FOLDER)
    except OSError:
        return False
    try:
        FileLock(descriptor, blocking=False).release()
    except BlockingIOError:
        return True
    return False


def _make_private(folder: Path) -> None:
    """Make a launcher's folder. Raises FolderRefused, SpecRefused."""
    if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES - len(f"/{os.getpid()}-12345678"):
        raise SpecRefused(
            f"{folder} is too long for a unix socket: set TMPDIR (or runtime_folder, stays_in) to a shorter path"
        )
    make_private(folder)


@asynccontextmanager
async def locked_folder(folder: Path) -> AsyncIterator[None]:
    """Make and lock the folder of a launcher that stays, so that no other provider starts a launcher there or removes
    the folder."""
    await asyncio.to_thread(_sweep, folder.parent)
    with await asyncio.to_thread(_lock, folder):
        yield


def _lock(folder: Path) -> FileLock:
    while True:
        _make_private(folder)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        lock = FileLock(descriptor)
        with suppress(FileNotFoundError):
            if (folder / _LOCK).stat().st_ino == os.fstat(descriptor).st_ino:
                return lock
        # The lock file was removed while this process waited for it.
        lock.release()


def _sweep(parent: Path) -> None:
    """Remove the folders of exited launchers that had stayed, unless a launcher is being started there or the folder
    has other files."""
    for lock in parent.glob(f"*/{_LOCK}"):
        with suppress(OSError), FileLock(os.open(lock, os.O_RDWR | os.O_CLOEXEC), blocking=False):
            names = {path.name for path in lock.parent.iterdir()}
            if names <= _OWN_FILES and _NOTE in names and not _listens(lock.parent / "socket"):
                for name in names:
                    (lock.parent / name).unlink()
                lock.parent.rmdir()


def remove_socket(folder: Path) -> None:
    """Remove the socket of a dead launcher."""
    (folder / "socket").unlink(missing_ok=True)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
