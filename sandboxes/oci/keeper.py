# ruff: noqa: PTH211, PTH101, PTH102, PTH103, PTH108, PTH110, PTH123
# (pathlib is not imported, because every fork copies the memory of imported modules)
"""Keeper process of a provider's containers: their parent, which holds their file layers.

Standard input: one JSON request per line: {op: boot, tag, id, home, ...}, or {op: end, id}, also for frozen sandboxes.
Standard output: {ready}, then for each boot {tag, pid} or {tag, error, message}.

Invariants:
- It has its own mount namespace, so the host never sees a sandbox's mounts, and all of them disappear with the keeper.
- It is the parent of every container (as a subreaper): a container whose first process ends for any reason is cleaned
  up, except for the layer of a frozen one.
- Each container waits on a pipe that only the keeper holds, so that the container ends when the keeper dies. When the
  keeper's standard input ends, it kills and removes all containers, then exits.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import stat
from contextlib import suppress
from typing import Any, Final, NoReturn

from headrace.sandboxes.linux import rootfs, syscalls
from headrace.sandboxes.linux.id_maps import IdMaps
from headrace.sandboxes.oci import cgroups as oci_cgroups

LAYER: Final = "layer"
FROZEN_MARK: Final = "frozen"
PID_FILE: Final = "pid"
LOG_FILE: Final = "runtime.log"
_ERROR_FILE: Final = "boot-error"
_MAX_MESSAGE_BYTES: Final = 2000
_READ_BYTES: Final = 1 << 16

Request = dict[str, Any]


def main() -> None:
    syscalls.become_subreaper()
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    wake, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    _answer({"ready": True})
    _Keeper(wake).serve()


def _answer(message: Request) -> None:
    with suppress(BrokenPipeError):
        os.write(1, json.dumps(message).encode() + b"\n")


class _Keeper:
    """Event loop over requests and ended children (boots, containers, clean-ups)."""

    def __init__(self, wake: int) -> None:
        self._wake = wake
        self._input = b""
        self._booting: dict[int, Request] = {}
        self._containers: dict[int, Request] = {}
        self._frozen: dict[str, Request] = {}
        self._cleaning: set[int] = set()
        self._lifelines: dict[str, int] = {}
        self._ended_early: set[int] = set()
        self._closing = False

    def serve(self) -> None:
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while not self._closing or self._booting or self._containers or self._cleaning:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if 0 in ready:
                data = os.read(0, _READ_BYTES)
                *lines, self._input = (self._input + data).split(b"\n")
                for line in lines:
                    request = json.loads(line)
                    if request["op"] == "boot":
                        self._boot(request)
                    else:
                        for pid, known in (*self._booting.items(), *self._containers.items()):
                            if known["id"] == request["id"]:
                                self._kill(pid, known)
                        if (frozen := self._frozen.pop(request["id"], None)) is not None:
                            with suppress(FileNotFoundError):
                                os.unlink(f"{frozen['home']}/{FROZEN_MARK}")
                            self._clean(frozen)
                if not data:
                    poll.unregister(0)
                    self._closing = True
                    for pid, request in (*self._booting.items(), *self._containers.items()):
                        self._kill(pid, request)
            if self._wake in ready:
                self._reap()

    def _boot(self, request: Request) -> None:
        home = request["home"]
        try:
            os.mkdir(f"{home}/{LAYER}", 0o711)
            options = f"mode=711,size={request['disk_bytes']},nr_inodes={max(request['disk_bytes'] // 4096, 1024)}"
            syscalls.mount("tmpfs", f"{home}/{LAYER}", "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)
            reading, self._lifelines[request["id"]] = os.pipe2(os.O_CLOEXEC)
            pid = os.fork()
        except OSError as error:
            _answer({"tag": request["tag"], "error": "BootFailed", "message": str(error)})
            self._clean(request)
            return
        if pid == 0:
            _become_runtime(request, reading)
        os.close(reading)
        self._booting[pid] = request

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._wake, 4096):
                pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._booting:
                self._booted(self._booting.pop(pid), os.waitstatus_to_exitcode(status))
            elif pid in self._containers:
                self._clean(self._containers.pop(pid))
            elif pid in self._cleaning:
                self._cleaning.discard(pid)
            elif self._booting:
                self._ended_early.add(pid)

    def _booted(self, request: Request, code: int) -> None:
        try:
            if code != 0:
                name, message = "BootFailed", f"the runtime exited with status {code}"
                with suppress(OSError), open(f"{request['home']}/{LOG_FILE}", "rb") as log:
                    message += f": {log.read()[-_MAX_MESSAGE_BYTES:].decode(errors='replace').strip()}"
                with suppress(OSError, ValueError), open(f"{request['home']}/{_ERROR_FILE}", encoding="utf-8") as file:
                    name, message = json.load(file)
                raise _BootError(name, message)
            with open(f"{request['home']}/{PID_FILE}", encoding="ascii") as file:
                pid = int(file.read())
            if pid in self._ended_early:
                raise _BootError("BootFailed", "the first process of the sandbox ended at once")
        except (_BootError, OSError, ValueError) as error:
            name = error.name if isinstance(error, _BootError) else "BootFailed"
            _answer({"tag": request["tag"], "error": name, "message": str(error)})
            self._clean(request)
        else:
            self._containers[pid] = request
            _answer({"tag": request["tag"], "pid": pid})
            if self._closing:
                self._kill(pid, request)
        if not self._booting:
            self._ended_early.clear()

    def _clean(self, request: Request) -> None:
        """Remove the files and mounts of a container, except for the layer of a frozen one."""
        home = request["home"]
        lifeline = self._lifelines.pop(request["id"], None)
        if lifeline is not None:
            os.close(lifeline)
        frozen = os.path.exists(f"{home}/{FROZEN_MARK}")
        if not frozen:
            with suppress(OSError):
                syscalls.detach(f"{home}/{LAYER}")
        pid = os.fork()
        if pid == 0:
            _become(["/bin/sh", "-c", _CLEAN, "sh", home, "" if frozen else "remove", *request["delete"]])
        self._cleaning.add(pid)
        if frozen:
            self._frozen[request["id"]] = request

    def _kill(self, pid: int, request: Request) -> None:
        with suppress(FileNotFoundError):
            os.unlink(f"{request['home']}/{FROZEN_MARK}")
        oci_cgroups.thaw(request["group"])
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


_CLEAN: Final = """
home=$1 remove=$2; shift 2
"$@" > /dev/null 2>&1
[ -z "$remove" ] || rm -rf --one-file-system -- "$home"
"""


class _BootError(Exception):
    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def _become_runtime(request: Request, lifeline: int) -> NoReturn:
    """In the forked child: mount the layer over the image, in a separate mount namespace and with the sandbox's ids,
    then execute the runtime."""
    home = request["home"]
    try:
        signal.set_wakeup_fd(-1)
        syscalls.unshare(syscalls.CLONE_NEWNS)
        os.chdir(home)
        base_id = request["base_id"]
        for name, owner in (("upper", base_id), ("work", 0)):
            os.mkdir(f"{LAYER}/{name}", 0o755)
            os.chown(f"{LAYER}/{name}", owner, owner)
        os.mkdir("rootfs", 0o755)
        lowers = _mount_lowers("lower", request["lowers"], 0, base_id)
        if request["skeleton"]:
            _write_skeleton(f"{LAYER}/upper", base_id, request["skeleton"])
        if lowers:
            options = f"lowerdir={':'.join(lowers)},upperdir={LAYER}/upper,workdir={LAYER}/work,redirect_dir=on"
            syscalls.mount("overlay", "rootfs", "overlay", syscalls.MS_NODEV | syscalls.MS_NOSUID, options)
            # Commands rely on these folders, which the image may lack.
            for path, mode in (("rootfs/tmp", 0o1777), ("rootfs/workspace", 0o777)):
                if not os.path.lexists(path):
                    os.mkdir(path)
                    os.chown(path, base_id, base_id)
                    os.chmod(path, mode)
        else:
            syscalls.mount(f"{LAYER}/upper", "rootfs", flags=syscalls.MS_BIND)
        for number, frozen in enumerate(request["frozen"]):
            _mount_frozen(f"frozen{number}", frozen, base_id)
        log = os.open(LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.dup2(lifeline, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _become(request["command"])
    except rootfs.MountRefused as error:
        _report(home, "FrozenPathRefused", str(error))
    except OSError as error:
        _report(home, "BootFailed", str(error))
    finally:
        os._exit(1)


def _report(home: str, name: str, message: str) -> None:
    with open(f"{home}/{_ERROR_FILE}", "w", encoding="utf-8") as file:
        json.dump([name, message], file)


def _become(command: list[str]) -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(command[0], command, {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"})
    finally:
        os._exit(127)


def _mount_lowers(prefix: str, folders: list[str], stored_id: int, base_id: int) -> list[str]:
    """Mount folders in the current folder, with their files shown under the sandbox's ids. Returns the names of the
    mount points."""
    names = []
    id_maps = IdMaps()
    for number, folder in enumerate(folders):
        names.append(f"{prefix}{number}")
        os.mkdir(names[-1])
        mount = syscalls.copy_mount(folder)
        syscalls.map_mount_ids(mount, id_maps.get(stored_id, base_id))
        syscalls.attach_mount(mount, names[-1])
        os.close(mount)
    return names


def _write_skeleton(root: str, base_id: int, skeleton: Request) -> None:
    """Create the folders, links and small files for the image `host`."""
    syscalls.create_files_as(base_id, base_id)
    for name, mode in skeleton["folders"].items():
        os.makedirs(f"{root}/{name}", exist_ok=True)
        os.chmod(f"{root}/{name}", mode)
    for name, target in skeleton["links"].items():
        os.symlink(target, f"{root}/{name}")
    for name, text in skeleton["files"].items():
        with open(f"{root}/{name}", "w", encoding="utf-8") as file:
            file.write(text)
    syscalls.create_files_as(0, 0)
    for name, owner in skeleton["owners"].items():
        os.chown(f"{root}/{name}", base_id + owner, base_id + owner)


def _mount_frozen(name: str, frozen: Request, base_id: int) -> None:
    """Mount a frozen sandbox's data path, resolved within that sandbox's file tree, at `<name>-data`. Raises
    MountRefused, OSError."""
    layer = f"{frozen['home']}/{LAYER}/upper"
    tops = _mount_lowers(f"{name}-upper", [layer], frozen["base_id"], base_id)
    lowers = _mount_lowers(f"{name}-lower", frozen["lowers"], 0, base_id)
    tree = tops[0]
    if lowers:
        tree = f"{name}-tree"
        os.mkdir(tree)
        options = f"lowerdir={':'.join(tops + lowers)},redirect_dir=on"
        syscalls.mount("overlay", tree, "overlay", syscalls.MS_RDONLY, options)
    root = os.open(tree, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    resolve = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS
    try:
        found = syscalls.open_resolved(root, frozen["path"].strip("/") or ".", os.O_PATH | os.O_NOFOLLOW, resolve)
    except OSError as error:
        reason = "leads through a symbolic link" if error.errno == errno.ELOOP else os.strerror(error.errno or 0)
        raise rootfs.MountRefused(f"frozen path {frozen['path']!r}: {reason}") from error
    mode = os.fstat(found).st_mode
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        raise rootfs.MountRefused(f"frozen path {frozen['path']!r}: neither a folder nor a regular file")
    if stat.S_ISDIR(mode):
        os.mkdir(f"{name}-data")
    else:
        os.close(os.open(f"{name}-data", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    syscalls.mount(f"/proc/self/fd/{found}", f"{name}-data", flags=syscalls.MS_BIND)


if __name__ == "__main__":
    main()
