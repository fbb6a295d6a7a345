# ruff: noqa: PTH123
# (The launcher does not import pathlib: every forked sandbox would pay for its memory.)
"""Table of a launcher's sandboxes, from boot to removal, with their leases.

Invariants:
- A sandbox is `booting`, `running`, `ending`, then `frozen` or removed.
- Leases are timed here with the monotonic clock: a sandbox whose lease is not renewed is killed and its layer dropped,
  even if it is frozen.
- Every client that waits for a boot, a freeze or a kill gets an answer, even if the sandbox dies first.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from headrace.sandboxes.launcher import requests
from headrace.sandboxes.launcher.booter import Booter
from headrace.sandboxes.launcher.connections import Connections, Secrets, Waiter
from headrace.sandboxes.launcher.leases import Deadlines
from headrace.sandboxes.launcher.sandbox_record import RequestRefused, SandboxRecord, Settings
from headrace.sandboxes.launcher.sudo import lend_descriptors
from headrace.sandboxes.launcher.wire import Message, close_all
from headrace.sandboxes.linux import rootfs, syscalls
from headrace.sandboxes.linux.cgroups import Cgroups
from headrace.sandboxes.linux.id_blocks import IDS_PER_SANDBOX
from headrace.sandboxes.linux.syscalls import reason_of

# ruff: noqa: PTH123
# (The launcher does not import pathlib: every forked sandbox would pay for its memory.)

_LOOK_S: Final = 0.1
_DEATHS_S: Final = 1.0
"""Time for killed commands to end, before the next look."""
_FILE_BYTES: Final = 192
"""Least size of an open file in the kernel (`struct file`)."""
_TASK_BYTES: Final = 120 << 10
"""About what the kernel holds for one more process: its stack, its tables and its descriptors."""


class SandboxTable:
    """Sandboxes by id, idempotency key and pid, and the operations that create or end them."""

    def __init__(self, settings: Settings, secrets: Secrets, booter: Booter, connections: Connections) -> None:
        self._settings = settings
        self._secrets = secrets
        self._booter = booter
        self._connections = connections
        self._guard = HostGuard(booter.groups)
        self._sandboxes: dict[str, SandboxRecord] = {}
        self._by_key: dict[str, str] = {}
        self._by_pid: dict[int, str] = {}
        self._deadlines = Deadlines()
        self.closing = False

    def __len__(self) -> int:
        return len(self._sandboxes)

    def __iter__(self) -> Iterator[SandboxRecord]:
        return iter(self._sandboxes.values())

    def find(self, sandbox_id: str) -> SandboxRecord:
        """Return the sandbox with this id. Raises RequestRefused."""
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is None:
            raise RequestRefused("SandboxGone", f"sandbox {sandbox_id} is gone: it was killed, or its lease ended")
        return sandbox

    def lease_left_s(self, sandbox: SandboxRecord) -> float:
        """Return the time remaining of a sandbox's lease, or of its boot timeout."""
        return self._deadlines.remaining(sandbox.id, time.monotonic())

    def next_deadline(self) -> float | None:
        """Return the monotonic time at which the next lease ends, or the host is to be looked at."""
        due = (self._deadlines.next(), self._guard.next_look(len(self)))
        return min((time_s for time_s in due if time_s is not None), default=None)

    def close(self) -> None:
        """Refuse further boots and end every sandbox."""
        self.closing = True
        for sandbox in list(self._sandboxes.values()):
            self._end(sandbox, keep_layer=False)

    def create(self, waiter: Waiter, message: Message, _descriptors: list[int]) -> None:
        """Boot a sandbox, or answer with the one that has the same idempotency key."""
        key = str(message["key"])
        known = self._sandboxes.get(self._by_key.get(key, "")) if key else None
        if known is not None and known.state == "booting":
            known.boot_waiters.append(waiter)
            return
        if known is not None and known.state != "ending":
            self._connections.answer(waiter, {"sandbox": known.id, "secret": self._secrets.of(known.id)})
            return
        if self.closing:
            raise RequestRefused("LauncherGone", "the launcher is closing")
        if len(self) >= self._settings.max_sandboxes:
            raise RequestRefused("CapacityExceeded", f"{len(self)} sandboxes are alive: raise max_sandboxes")
        live = sum(sandbox.state in ("booting", "running") for sandbox in self)
        if live >= self._booter.max_live:
            raise RequestRefused("CapacityExceeded", f"{live} sandboxes are running: raise max_live")
        if self._guard.full:
            raise RequestRefused("CapacityExceeded", self._guard.full)
        mounts = requests.mounts_of(message)
        sandbox = SandboxRecord(key=key, ttl_s=requests.lease_s(message["ttl_s"]), labels=requests.labels_of(message))
        sandbox.host_network = message.get("host_network") is True
        source_ids = {mount.source for mount in mounts}
        if len(source_ids) > 1:
            raise RequestRefused("SpecRefused", "all mounts of a sandbox must come from the same frozen sandbox")
        source = None
        for source_id in source_ids:
            source = self._sandboxes.get(source_id)
            if source is None or source.state != "frozen":
                raise RequestRefused("SpecRefused", f"mount source {source_id} is not a frozen sandbox")
        sandbox.control = self._booter.begin(sandbox, message, mounts, source)
        self._connections.add(sandbox.control, sandbox)
        sandbox.boot_waiters.append(waiter)
        self._sandboxes[sandbox.id] = sandbox
        self._by_pid[sandbox.pid] = sandbox.id
        if key:
            self._by_key[key] = sandbox.id
        self._deadlines.set(sandbox.id, time.monotonic() + self._settings.boot_timeout_s)

    def discard(self, waiter: Waiter, message: Message, _descriptors: list[int]) -> None:
        """End the sandbox of a create request that has been abandoned."""
        sandbox = self._sandboxes.get(self._by_key.get(str(message["key"]), ""))
        if sandbox is not None:
            self._end(sandbox, keep_layer=False)
        self._connections.answer(waiter, {})

    def on_boot_event(self, sandbox: SandboxRecord, message: Message, descriptors: list[int]) -> None:
        """Take the next step of a boot, as requested or reported by the sandbox's first process."""
        assert sandbox.control is not None
        match message["event"]:
            case "layer":
                try:
                    for descriptor in descriptors:
                        syscalls.attach_mount(descriptor, f"{rootfs.LAYERS}/{sandbox.id}")
                except OSError as error:
                    sandbox.failure = ("BootFailed", str(error))
                    self._end(sandbox, keep_layer=False)
                finally:
                    close_all(descriptors)
            case "unmapped":
                # Its user namespace exists now, and only a process outside may write the map (user_namespaces(7)).
                try:
                    for name in () if self._booter.single_id else ("uid_map", "gid_map"):
                        with open(f"/proc/{sandbox.pid}/{name}", "w", encoding="utf-8") as file:
                            file.write(f"0 {sandbox.base_id} {IDS_PER_SANDBOX}")
                except OSError as error:
                    sandbox.failure = ("BootFailed", f"cannot map the user ids from {sandbox.base_id}: {error}")
                    self._end(sandbox, keep_layer=False)
                else:
                    self._connections.send(sandbox.control, {"op": "mapped"})
            case "borrow":
                lend_descriptors(sandbox.control, message, descriptors)
            case "ready" if sandbox.state == "booting":
                sandbox.state = "running"
                self._deadlines.set(sandbox.id, time.monotonic() + sandbox.ttl_s)
                self._answer(sandbox.boot_waiters, {"sandbox": sandbox.id, "secret": self._secrets.of(sandbox.id)})
            case "failed":
                sandbox.failure = (str(message["error"]), str(message["message"]))

    def freeze(self, waiter: Waiter, sandbox: SandboxRecord, _message: Message, _descriptors: list[int]) -> None:
        """End a sandbox and retain its layer."""
        if sandbox.state == "frozen":
            self._connections.answer(waiter, {})
            return
        if sandbox.state == "ending" and not sandbox.keep_layer:
            sandbox.check_running()
        sandbox.freeze_waiters.append(waiter)
        self._end(sandbox, keep_layer=sandbox.state != "booting")

    def snapshot(self, waiter: Waiter, sandbox: SandboxRecord, message: Message, descriptors: list[int]) -> None:
        """End a sandbox and turn its layer into an image."""
        if sandbox.state != "frozen":
            sandbox.check_running()
        if len(self._booter.image_of(sandbox).layers) >= rootfs.MAX_LAYERS:
            text = f"the sandbox's image already has {rootfs.MAX_LAYERS} layers, the maximum"
            raise RequestRefused("SpecRefused", text)
        sandbox.becomes_image = True
        if sandbox.state == "frozen":
            sandbox.freeze_waiters.append(waiter)
            self._turn_into_image(sandbox)
        else:
            self.freeze(waiter, sandbox, message, descriptors)

    def own_layer(self, waiter: Waiter, message: Message, _descriptors: list[int]) -> None:
        """Answer with a detached mount of the files that a frozen sandbox has written, and the first of their ids. The
        mount stays readable when the sandbox is gone."""
        sandbox = self.find(str(message["sandbox"]))
        if sandbox.state != "frozen":
            raise RequestRefused("SpecRefused", f"sandbox {sandbox.id} is {sandbox.state}: freeze it first")
        path = rootfs.own_layer(sandbox.id, self._booter.image_of(sandbox))
        answer = {"base_id": sandbox.base_id, "single_id": self._booter.single_id}
        self._connections.answer(waiter, answer, [syscalls.copy_mount(path)])

    def _turn_into_image(self, sandbox: SandboxRecord) -> None:
        image = self._booter.image_of(sandbox)
        name = self._booter.images.add_snapshot(sandbox.id, sandbox.base_id, image)
        self._forget(sandbox)
        self._answer(sandbox.kill_waiters, {"image": name})
        self._answer(sandbox.freeze_waiters, {"image": name})

    def kill(self, waiter: Waiter, sandbox: SandboxRecord, _message: Message, _descriptors: list[int]) -> None:
        """End a sandbox and drop its layer."""
        sandbox.kill_waiters.append(waiter)
        self._end(sandbox, keep_layer=False)

    def renew(self, waiter: Waiter, sandbox: SandboxRecord, message: Message, _descriptors: list[int]) -> None:
        """Make a sandbox's lease end `ttl_s` seconds from now, or from the end of its boot."""
        sandbox.ttl_s = requests.lease_s(message["ttl_s"])
        if sandbox.state != "booting":
            self._deadlines.set(sandbox.id, time.monotonic() + sandbox.ttl_s)
        self._connections.answer(waiter, {})

    def expire(self) -> None:
        """End the sandboxes whose lease or boot timeout has expired."""
        for sandbox_id in self._deadlines.pop_due(time.monotonic()):
            sandbox = self._sandboxes[sandbox_id]
            if sandbox.state == "booting":
                text = f"the sandbox was not ready within {self._settings.boot_timeout_s} s: raise boot_timeout_s"
                sandbox.failure = ("BootTimeout", text)
            self._end(sandbox, keep_layer=False)

    def guard(self) -> None:
        """When a look is due, end the commands of the sandbox that holds too much of the host, as the kernel does when
        memory is out."""
        due_s = self._guard.next_look(len(self))
        if due_s is None or due_s > time.monotonic():
            return
        found = self._guard.look([sandbox for sandbox in self if sandbox.state == "running"])
        if found is not None and found.control is not None:
            found.limit_kills += 1
            self._connections.send(found.control, {"op": "end_commands"})

    def _end(self, sandbox: SandboxRecord, *, keep_layer: bool) -> None:
        """Begin ending a sandbox; `reap` completes it."""
        sandbox.keep_layer = keep_layer
        if sandbox.state == "frozen":
            self._remove(sandbox)
        elif sandbox.state != "ending":
            sandbox.state = "ending"
            self._booter.groups.lift_cpu_limit(sandbox.id)
            with suppress(ProcessLookupError):
                os.kill(sandbox.pid, signal.SIGKILL)
                with suppress(PermissionError):
                    # Root inside may have given the first process a lower priority than all its own
                    # (sched_setscheduler(2)): without processor time it could not die.
                    os.sched_setscheduler(sandbox.pid, os.SCHED_OTHER, os.sched_param(0))
                    os.setpriority(os.PRIO_PROCESS, sandbox.pid, 0)
                    os.sched_setaffinity(sandbox.pid, os.sched_getaffinity(0))
            if sandbox.paused_at is not None:
                # The freezer of version 1 holds even killed processes.
                with suppress(OSError):
                    self._booter.groups.set_frozen(sandbox.id, frozen=False)

    def reap(self) -> None:
        """Reap every child that has exited and finish ending its sandbox."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid not in self._by_pid:
                continue
            # The first process is dead, and with it every process of the sandbox.
            sandbox = self._sandboxes[self._by_pid.pop(pid)]
            with suppress(OSError):
                self._booter.groups.remove(sandbox.id)
            if sandbox.control is not None:
                self._connections.read_to_end(sandbox.control)
            name, text = sandbox.failure
            self._answer(sandbox.boot_waiters, {"error": name, "message": text})
            gone = {"error": "SandboxGone", "message": f"sandbox {sandbox.id} died while the command was running"}
            self._answer([*sandbox.pending.values(), *sandbox.executions.end()], gone)
            sandbox.pending.clear()
            if not sandbox.keep_layer or sandbox.state != "ending":
                self._remove(sandbox)
                continue
            sandbox.state = "frozen"
            if sandbox.becomes_image:
                self._turn_into_image(sandbox)
            else:
                self._answer(sandbox.kill_waiters, {})
                self._answer(sandbox.freeze_waiters, {})

    def _remove(self, sandbox: SandboxRecord) -> None:
        self._booter.drop_layer(sandbox.id, sandbox.base_id)
        self._forget(sandbox)
        text = f"sandbox {sandbox.id} was killed before it was frozen"
        self._answer(sandbox.freeze_waiters, {"error": "SandboxGone", "message": text})
        self._answer(sandbox.kill_waiters, {})

    def _answer(self, waiters: list[Waiter], message: Message) -> None:
        for waiter in waiters:
            self._connections.answer(waiter, message)
        waiters.clear()

    def _forget(self, sandbox: SandboxRecord) -> None:
        for name in (sandbox.image, *sandbox.folders):
            self._booter.images.release(name)
        self._deadlines.drop(sandbox.id)
        del self._sandboxes[sandbox.id]
        if self._by_key.get(sandbox.key) == sandbox.id:
            del self._by_key[sandbox.key]


# ruff: noqa: PTH116, PTH208
# (The launcher does not import pathlib: every forked sandbox would pay for its memory.)


class HostGuard:
    """Guard on what all sandboxes of a launcher hold together of the host's processes and open files: their limits may
    add up to more than the host has, because programs rarely all hold at once what they need.

    When too much is held, the sandbox that holds most, and more than its even share, has reached its own limit. If
    there is none, new boots wait. What others hold, sandboxes or programs of the host, never ends a sandbox. A count of
    files is what processes have on descriptors, and no more than the sandbox's kernel memory has room for, so that what
    many workers inherit counts about once. Mappings and files on their way in a socket are not counted: while they fill
    the table, boots wait. A look takes little time whatever is in the sandboxes, and no error of it ends the
    launcher."""

    def __init__(self, groups: Cgroups) -> None:
        self._groups = groups
        # Kept open: a process without privileges cannot open a file once they are used up.
        self._file_number = os.open("/proc/sys/fs/file-nr", os.O_RDONLY | os.O_CLOEXEC)
        self._next_s = 0.0
        self.full = ""
        """Why nothing may boot now; empty if anything may."""

    def next_look(self, sandboxes: int) -> float | None:
        """Return the monotonic time of the next look, or None if there is nothing to look at."""
        return self._next_s if sandboxes or self.full else None

    def look(self, sandboxes: Sequence[SandboxRecord]) -> SandboxRecord | None:
        """Return the sandbox whose commands must end, if any."""
        found = None
        try:
            self.full = ""
            most = self._groups.allowed.processes * 7 // 8
            if (held := self._groups.processes()) > most:
                self.full = f"the sandboxes of this host hold {held} processes, and may hold {most}"
                found = _above(most, sandboxes, lambda one, _: self._groups.processes(one.id))
            most = self._groups.allowed.open_files
            if (held := int(os.pread(self._file_number, 100, 0).split()[0])) > most:
                self.full = f"{held} files are open on this host, and new sandboxes need it to be below {most}"
                found = _above(most, sandboxes, self._files) or found
        except OSError as error:
            self.full = f"this host cannot be looked at: {reason_of(error)}"
        self._next_s = time.monotonic() + (_LOOK_S if found is None else _DEATHS_S)
        return found

    def _files(self, sandbox: SandboxRecord, least: int) -> int:
        """Return about how many files a sandbox holds. Descriptors are read only if it may hold more than `least`."""
        kernel_bytes, processes = self._groups.kernel_memory(sandbox.id)
        # Descriptors that many processes have inherited are one file, and take its memory once.
        most = (kernel_bytes - len(processes) * _TASK_BYTES) // _FILE_BYTES
        return most if most <= least else min(most, sum(map(_descriptors, processes)))


def _above(
    most: int, sandboxes: Sequence[SandboxRecord], count: Callable[[SandboxRecord, int], int]
) -> SandboxRecord | None:
    share = most // max(1, len(sandboxes))
    held = {sandbox: count(sandbox, share) for sandbox in sandboxes}
    largest = max(held, key=lambda one: held[one], default=None)
    # The first process of a paused sandbox cannot end anything.
    return largest if largest is not None and held[largest] > share and largest.paused_at is None else None


def _descriptors(pid: int) -> int:
    """Return a process's number of descriptors; 0 if it has ended."""
    with suppress(OSError):
        # Since Linux 6.2 the size of the folder is their number (proc_pid_fd(5)).
        if count := os.stat(f"/proc/{pid}/fd").st_size:
            return count
        # An older kernel, or only the first thread has ended.
        return max(len(os.listdir(f"/proc/{pid}/task/{task}/fd")) for task in os.listdir(f"/proc/{pid}/task"))
    return 0
