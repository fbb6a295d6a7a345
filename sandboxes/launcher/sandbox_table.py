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
from collections.abc import Iterator
from contextlib import suppress

from headrace.sandboxes.launcher import requests
from headrace.sandboxes.launcher.booter import Booter
from headrace.sandboxes.launcher.connections import Connections, Secrets, Waiter
from headrace.sandboxes.launcher.host_guard import HostGuard
from headrace.sandboxes.launcher.leases import Deadlines
from headrace.sandboxes.launcher.sandbox_record import RequestRefused, SandboxRecord, Settings
from headrace.sandboxes.launcher.sudo import lend_descriptors
from headrace.sandboxes.launcher.wire import Message, close_all
from headrace.sandboxes.linux import rootfs, syscalls
from headrace.sandboxes.linux.id_blocks import IDS_PER_SANDBOX


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
