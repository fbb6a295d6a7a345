# ruff: noqa: PTH123
# (pathlib stays out of the launcher: what is not imported is not copied at a fork)
"""The fork server of the launcher: it owns all local sandboxes of one host.

Invariants:
- Tied to its owner it ends when its standard input ends or the owner dies, and every sandbox with it. One that stays
  ends by itself when it has had neither sandboxes nor clients for a while.
- A sandbox is `booting`, `running`, `ending`, then `frozen` or gone. Its lease is kept here by the monotonic clock:
  what nobody renews is killed and its layer dropped, frozen or not.
- It never blocks on a client or a sandbox and copies none of their bytes: standard streams are the client's own pipes.
- Each operation needs the sandbox's secret or the admin secret, compared in constant time; create, list and usage need
  the admin secret.
- Only the standard library is imported: a small process forks fast.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from headrace.sandboxes.kernel import rootfs, syscalls
from headrace.sandboxes.kernel.id_blocks import IDS_PER_SANDBOX
from headrace.sandboxes.kernel.reasons import reason_of
from headrace.sandboxes.launcher import requests
from headrace.sandboxes.launcher.command_costs import Costs
from headrace.sandboxes.launcher.connections import Connections, Waiter
from headrace.sandboxes.launcher.leases import Deadlines
from headrace.sandboxes.launcher.sandbox_record import Record
from headrace.sandboxes.launcher.settings import Refused
from headrace.sandboxes.launcher.wire import close_all

if TYPE_CHECKING:
    import socket

    from headrace.sandboxes.launcher.boots import Boots
    from headrace.sandboxes.launcher.executions import Execution
    from headrace.sandboxes.launcher.launcher_secrets import Secrets
    from headrace.sandboxes.launcher.settings import Settings
    from headrace.sandboxes.launcher.wire import Channel, Message

_MALFORMED: Final = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_IDLE: Final = "idle"
"""Key of the launcher's own deadline; sandboxes have hexadecimal ones."""


class ForkServer:
    """The event loop and the table of sandboxes."""

    def __init__(self, settings: Settings, secrets: Secrets, boots: Boots, listener: socket.socket) -> None:
        self._settings = settings
        self._secrets = secrets
        self._board = Connections(listener, self._on_message, self._on_client_gone)
        self._sandboxes: dict[str, Record] = {}
        self._by_key: dict[str, str] = {}
        self._by_pid: dict[int, str] = {}
        self._deadlines = Deadlines()
        self._boots = boots
        self._groups = boots.groups
        self._shelf = boots.shelf
        self._costs = Costs()
        self._last_tag = 0
        self._closing = False
        self._admin = {
            "create": self._create,
            "list": self._list,
            "usage": self._usage,
            "discard": self._discard,
            "add_image": self._add_image,
            "drop_image": self._drop_image,
            "images": self._list_images,
        }
        self._direct = {
            "exec": self._exec,
            "keep": self._keep,
            "spawn": self._forward,
            "run": self._forward,
            "signal": self._signal,
            "listen": self._forward,
            "read": self._forward,
            "write": self._forward,
            "cancel": self._cancel,
            "freeze": self._freeze,
            "snapshot": self._snapshot,
            "pause": self._pause,
            "resume": self._resume,
            "state": self._state,
            "kill": self._kill,
            "renew": self._renew,
        }

    @property
    def missing(self) -> dict[str, str]:
        """Controllers of control groups that cannot be had, with the reason."""
        return self._groups.missing

    def handle_signals(self) -> None:
        """Before anybody is told that it serves: from then on SIGTERM ends it in order."""
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda _number, _frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._board.watch(wake_read, lambda: self._on_signal(wake_read))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def serve(self) -> None:
        """Run until the owner is gone and every sandbox has ended."""
        self._watch_owner()
        if self._settings.tied:
            self._board.watch(0, lambda: self._lose_owner(0))
        while not (self._closing and not self._sandboxes):
            self._watch_idleness()
            deadline = self._deadlines.next()
            self._board.turn(None if deadline is None else max(0.0, deadline - time.monotonic()))
            self._expire()
        self._groups.close()

    def _watch_owner(self) -> None:
        if not self._settings.owner_pid:
            return
        try:
            owner = os.pidfd_open(self._settings.owner_pid)
        except ProcessLookupError:
            self._close()
        else:
            self._board.watch(owner, lambda: self._lose_owner(owner))

    def _watch_idleness(self) -> None:
        if self._settings.tied or self._sandboxes or self._board.clients:
            self._deadlines.drop(_IDLE)
        elif self._deadlines.remaining(_IDLE, time.monotonic()) == 0:
            self._deadlines.set(_IDLE, time.monotonic() + self._settings.idle_exit_s)

    def _on_signal(self, wake: int) -> None:
        numbers = b""
        with suppress(BlockingIOError):
            numbers = os.read(wake, 4096)
        if signal.SIGTERM in numbers:
            self._close()
        self._reap()

    def _lose_owner(self, source: int) -> None:
        self._board.unwatch(source)
        self._close()

    def _close(self) -> None:
        self._closing = True
        for sandbox in list(self._sandboxes.values()):
            self._end(sandbox, keep_layer=False)

    def _on_message(self, channel: Channel, owner: Record | None, message: Message, descriptors: list[int]) -> None:
        """A client's request, or (with an owner) word from the first process of a sandbox."""
        if owner is not None:
            self._from_init(owner, message, descriptors)
            return
        request_id = message.get("id")
        waiter = Waiter(channel, request_id if isinstance(request_id, int) else 0)
        try:
            self._handle(waiter, message, descriptors)
        except Refused as refused:
            self._board.answer(waiter, {"error": refused.name, "message": str(refused)})
        except _MALFORMED as error:
            self._board.answer(waiter, {"error": "SpecRefused", "message": f"malformed request: {error!r}"[:500]})
        except OSError as error:
            # Out of descriptors or memory: whoever asked for less goes on.
            self._board.answer(waiter, {"error": "CapacityExceeded", "message": f"the host refused it: {error}"})
        finally:
            close_all(descriptors)

    def _handle(self, waiter: Waiter, message: Message, descriptors: list[int]) -> None:
        """Check the secret and do it. An operation that keeps descriptors takes them out of the list."""
        operation = str(message["op"])
        given = str(message["secret"])
        is_admin = self._secrets.is_admin(given)
        if operation in self._admin:
            if not is_admin:
                raise Refused("SecretRefused", f"{operation} needs the admin secret of the launcher")
            self._admin[operation](waiter, message, descriptors)
            return
        if operation not in self._direct:
            raise Refused("SpecRefused", f"unknown operation {operation!r}")
        sandbox = self._find(str(message["sandbox"]))
        if not is_admin and not self._secrets.fits(sandbox.id, given):
            raise Refused("SecretRefused", f"wrong secret for sandbox {sandbox.id}")
        self._direct[operation](waiter, sandbox, message, descriptors)

    def _find(self, sandbox_id: str) -> Record:
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is None:
            raise Refused("SandboxGone", f"sandbox {sandbox_id} is gone: killed, or its lease ended")
        return sandbox

    # Operations of the owner

    def _create(self, waiter: Waiter, message: Message, _descriptors: list[int]) -> None:
        key = str(message["key"])
        known = self._sandboxes.get(self._by_key.get(key, "")) if key else None
        if known is not None and known.state == "booting":
            known.creators.append(waiter)
            return
        if known is not None and known.state != "ending":
            self._board.answer(waiter, {"sandbox": known.id, "secret": self._secrets.of(known.id)})
            return
        if self._closing:
            raise Refused("LauncherGone", "the launcher is closing")
        if len(self._sandboxes) >= self._settings.max_sandboxes:
            raise Refused("CapacityExceeded", f"{len(self._sandboxes)} sandboxes are alive: raise max_sandboxes")
        live = sum(sandbox.state in ("booting", "running") for sandbox in self._sandboxes.values())
        if live >= self._boots.max_live:
            raise Refused("CapacityExceeded", f"{live} sandboxes run: raise max_live (each gets a smaller share then)")
        mounts = requests.mounts_of(message)
        sandbox = Record(key=key, ttl_s=requests.lease_s(message["ttl_s"]), labels=requests.labels_of(message))
        sandbox.control = self._boots.begin(sandbox, message, mounts, self._source_of(mounts))
        self._board.add(sandbox.control, sandbox)
        sandbox.creators.append(waiter)
        self._sandboxes[sandbox.id] = sandbox
        self._by_pid[sandbox.pid] = sandbox.id
        if key:
            self._by_key[key] = sandbox.id
        self._deadlines.set(sandbox.id, time.monotonic() + self._settings.boot_timeout_s)

    def _source_of(self, mounts: tuple[rootfs.Mount, ...]) -> Record | None:
        """The dead sandbox whose files are to be shown."""
        names = {mount.source for mount in mounts}
        if len(names) > 1:
            raise Refused("SpecRefused", "the mounts of one sandbox come from one frozen sandbox")
        for name in names:
            source = self._sandboxes.get(name)
            if source is None or source.state != "frozen":
                raise Refused("SpecRefused", f"mount source {name} is not a frozen sandbox")
            return source
        return None

    def _map_ids(self, sandbox: Record) -> None:
        """Its user namespace stands, and only a process outside may write the map (user_namespaces(7))."""
        assert sandbox.control is not None
        try:
            for name in () if self._boots.single_id else ("uid_map", "gid_map"):
                with open(f"/proc/{sandbox.pid}/{name}", "w", encoding="utf-8") as file:
                    file.write(f"0 {sandbox.base_id} {IDS_PER_SANDBOX}")
        except OSError as error:
            sandbox.failure = ("BootFailed", f"cannot map the ids from {sandbox.base_id} on: {error}")
            self._end(sandbox, keep_layer=False)
        else:
            self._board.send(sandbox.control, {"op": "mapped"})

    def _list(self, waiter: Waiter, _message: Message, _descriptors: list[int]) -> None:
        now = time.monotonic()
        rows = [
            {
                "id": sandbox.id,
                "state": sandbox.shown_state(),
                "expires_in_s": self._deadlines.remaining(sandbox.id, now),
                "labels": sandbox.labels,
                "key": sandbox.key,
            }
            for sandbox in self._sandboxes.values()
        ]
        self._board.answer(waiter, {"sandboxes": rows})

    def _usage(self, waiter: Waiter, _message: Message, _descriptors: list[int]) -> None:
        """CPU seconds of the launcher and of all its children that have ended, and of commands by their purpose."""
        usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
        cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in usages)
        usage = {"cpu_s": cpu_s, "commands": self._costs.to_json(), "pid": os.getpid(), "missing": self.missing}
        self._board.answer(waiter, usage)

    def _discard(self, waiter: Waiter, message: Message, _descriptors: list[int]) -> None:
        """A create was given up: end what it made."""
        sandbox = self._sandboxes.get(self._by_key.get(str(message["key"]), ""))
        if sandbox is not None:
            self._end(sandbox, keep_layer=False)
        self._board.answer(waiter, {})

    def _add_image(self, waiter: Waiter, message: Message, descriptors: list[int]) -> None:
        if not 0 < len(descriptors) <= rootfs.MAX_LAYERS:
            raise Refused("ImageRefused", f"{len(descriptors)} layers; 1 to {rootfs.MAX_LAYERS} can be stacked")
        try:
            self._shelf.add(str(message["name"]), descriptors, message["environment"], str(message["folder"]))
        except OSError as error:
            raise Refused("ImageRefused", str(error)) from error
        self._board.answer(waiter, {})

    def _drop_image(self, waiter: Waiter, message: Message, _descriptors: list[int]) -> None:
        self._board.answer(waiter, {"dropped": self._shelf.drop(str(message["name"]))})

    def _list_images(self, waiter: Waiter, _message: Message, _descriptors: list[int]) -> None:
        self._board.answer(waiter, {"images": self._shelf.names})

    # Operations on one sandbox

    def _forward(self, waiter: Waiter, sandbox: Record, message: Message, descriptors: list[int]) -> None:
        if sandbox.state != "running" or sandbox.control is None:
            raise Refused("SandboxGone", f"sandbox {sandbox.id} runs no more commands: it is {sandbox.state}")
        if len(descriptors) != (0 if message["op"] == "listen" else 3):
            raise Refused("SpecRefused", "a command needs three descriptors: standard input, output and error")
        requests.check_for_init(message)
        self._last_tag += 1
        inner = {name: value for name, value in message.items() if name not in ("secret", "sandbox", "id")}
        passed = descriptors.copy()
        descriptors.clear()
        self._board.send(sandbox.control, {**inner, "tag": self._last_tag}, passed)
        sandbox.pending[self._last_tag] = waiter

    def _exec(self, waiter: Waiter, sandbox: Record, message: Message, descriptors: list[int]) -> None:
        """A command with an `exec_id` runs once; whoever names the id again gets what its first caller keeps here."""
        exec_id = str(message.get("exec_id") or "")
        known = sandbox.executions.find(exec_id) if exec_id else None
        if known is None:
            self._forward(waiter, sandbox, message, descriptors)
            if exec_id:
                sandbox.executions.begin(exec_id, str(message["run"]), waiter)
        elif known.answer is not None:
            self._board.answer(waiter, known.answer, [os.dup(known.output)] if known.output >= 0 else [])
        elif self._board.is_connected(known.runner.client):
            known.waiters.append(waiter)
        else:
            self._board.answer(waiter, known.lost())

    def _keep(self, waiter: Waiter, sandbox: Record, message: Message, descriptors: list[int]) -> None:
        """The first caller of an `exec_id` hands over the result, its output as a file of memory; None if cancelled."""
        known = sandbox.executions.find(str(message["exec_id"]))
        if known is not None and known.answer is None and known.run == message["run"]:
            if message["result"] is None:
                self._lose(known)
            else:
                self._settle(known, dict(message["result"]), descriptors.pop(0) if descriptors else -1)
        self._board.answer(waiter, {})

    def _settle(self, known: Execution, result: Message, output: int) -> None:
        for waiting in known.keep(result, output):
            self._board.answer(waiting, result, [os.dup(output)] if output >= 0 else [])

    def _on_client_gone(self, channel: Channel) -> None:
        for sandbox in self._sandboxes.values():
            for known in sandbox.executions.of(channel):
                self._lose(known)

    def _lose(self, known: Execution) -> None:
        for waiting in known.keep(known.lost(), -1):
            self._board.answer(waiting, known.lost())

    def _cancel(self, waiter: Waiter, sandbox: Record, message: Message, _descriptors: list[int]) -> None:
        """The client gave up the request `target` of this connection: end its command."""
        for known in sandbox.executions.of(waiter.client):
            if known.runner.request_id == int(message["target"]):
                self._lose(known)
        self._tell_command(waiter, sandbox, int(message["target"]), {"op": "cancel"})

    def _signal(self, waiter: Waiter, sandbox: Record, message: Message, _descriptors: list[int]) -> None:
        number = int(message["number"])
        if not 1 <= number < signal.NSIG:
            raise Refused("SpecRefused", f"{number} is no signal")
        self._tell_command(waiter, sandbox, int(message["target"]), {"op": "signal", "number": number})

    def _tell_command(self, waiter: Waiter, sandbox: Record, target: int, message: Message) -> None:
        """Pass a message on to the command that the request `target` of this connection runs, if it still does."""
        meant = Waiter(waiter.client, target)
        for tag, pending in sandbox.pending.items():
            if pending == meant and sandbox.control is not None:
                self._board.send(sandbox.control, {**message, "tag": tag})
        self._board.answer(waiter, {})

    def _freeze(self, waiter: Waiter, sandbox: Record, _message: Message, _descriptors: list[int]) -> None:
        if sandbox.state == "frozen":
            self._board.answer(waiter, {})
            return
        if sandbox.state == "ending" and not sandbox.keep_layer:
            self._check_running(sandbox)
        sandbox.keepers.append(waiter)
        self._end(sandbox, keep_layer=sandbox.state != "booting")

    def _snapshot(self, waiter: Waiter, sandbox: Record, message: Message, descriptors: list[int]) -> None:
        if sandbox.state not in ("running", "frozen"):
            self._check_running(sandbox)
        if len(self._boots.image_of(sandbox).layers) >= rootfs.MAX_LAYERS:
            raise Refused("SpecRefused", f"its image has {rootfs.MAX_LAYERS} layers: no more can be stacked")
        sandbox.becomes_image = True
        if sandbox.state == "frozen":
            sandbox.keepers.append(waiter)
            self._turn_into_image(sandbox)
        else:
            self._freeze(waiter, sandbox, message, descriptors)

    def _turn_into_image(self, sandbox: Record) -> None:
        name = self._shelf.add_snapshot(sandbox.id, sandbox.base_id, self._boots.image_of(sandbox))
        self._forget(sandbox)
        self._answer_enders(sandbox, {"image": name})

    def _pause(self, waiter: Waiter, sandbox: Record, _message: Message, _descriptors: list[int]) -> None:
        self._check_running(sandbox)
        if sandbox.paused_at is None:
            self._set_stopped(sandbox, stopped=True)
            sandbox.paused_at = time.monotonic()
        self._board.answer(waiter, {})

    def _resume(self, waiter: Waiter, sandbox: Record, _message: Message, _descriptors: list[int]) -> None:
        self._check_running(sandbox)
        if sandbox.paused_at is not None and sandbox.control is not None:
            paused_s = time.monotonic() - sandbox.paused_at
            # Before it goes on: the deadlines of its commands stood still with it.
            self._board.send(sandbox.control, {"op": "paused", "seconds": paused_s})
            self._set_stopped(sandbox, stopped=False)
            sandbox.paused_s += paused_s
            sandbox.paused_at = None
        self._board.answer(waiter, {})

    def _set_stopped(self, sandbox: Record, *, stopped: bool) -> None:
        try:
            self._groups.set_frozen(sandbox.id, frozen=stopped)
        except OSError as error:
            raise Refused("Unsupported", f"pause and resume: {reason_of(error)}; see headrace doctor") from error

    @staticmethod
    def _check_running(sandbox: Record) -> None:
        if sandbox.state != "running":
            raise Refused("SandboxGone", f"sandbox {sandbox.id} is {sandbox.state}")

    def _state(self, waiter: Waiter, sandbox: Record, _message: Message, _descriptors: list[int]) -> None:
        """What a sandbox takes now, its limits, and how long it was paused in all."""
        paused_s = sandbox.paused_s + (0 if sandbox.paused_at is None else time.monotonic() - sandbox.paused_at)
        answer = {"state": sandbox.shown_state(), "paused_s": paused_s, **rootfs.layer_usage(sandbox.id)}
        if sandbox.state == "running":
            answer |= self._groups.usage(sandbox.id)
        self._board.answer(waiter, {**answer, "limits": sandbox.limits})

    def _kill(self, waiter: Waiter, sandbox: Record, _message: Message, _descriptors: list[int]) -> None:
        sandbox.enders.append(waiter)
        self._end(sandbox, keep_layer=False)

    def _renew(self, waiter: Waiter, sandbox: Record, message: Message, _descriptors: list[int]) -> None:
        sandbox.ttl_s = requests.lease_s(message["ttl_s"])
        if sandbox.state != "booting":
            self._deadlines.set(sandbox.id, time.monotonic() + sandbox.ttl_s)
        self._board.answer(waiter, {})

    # The life of a sandbox

    def _from_init(self, sandbox: Record, message: Message, descriptors: list[int]) -> None:
        if message.get("event") == "layer":
            self._attach_layer(sandbox, descriptors)
        elif message.get("event") == "unmapped":
            self._map_ids(sandbox)
        elif message.get("event") == "ready":
            if sandbox.state == "booting":
                sandbox.state = "running"
                self._deadlines.set(sandbox.id, time.monotonic() + sandbox.ttl_s)
                self._answer_creators(sandbox, {"sandbox": sandbox.id, "secret": self._secrets.of(sandbox.id)})
        elif message.get("event") == "failed":
            sandbox.failure = (str(message["error"]), str(message["message"]))
        else:
            tag = int(message.pop("tag"))
            if "cost" in message:
                operation, cpu_s = message.pop("cost")
                self._costs.add(sandbox.labels.get("purpose", ""), operation, cpu_s)
            waiter = sandbox.pending.get(tag) if "started" in message else sandbox.pending.pop(tag, None)
            if waiter is not None:
                self._board.answer(waiter, message, descriptors)

    def _attach_layer(self, sandbox: Record, descriptors: list[int]) -> None:
        try:
            for descriptor in descriptors:
                syscalls.attach_mount(descriptor, f"{rootfs.LAYERS}/{sandbox.id}")
        except OSError as error:
            sandbox.failure = ("BootFailed", str(error))
            self._end(sandbox, keep_layer=False)
        finally:
            close_all(descriptors)

    def _answer_creators(self, sandbox: Record, message: Message) -> None:
        for waiter in sandbox.creators:
            self._board.answer(waiter, message)
        sandbox.creators.clear()

    def _end(self, sandbox: Record, *, keep_layer: bool) -> None:
        """Start the end of a sandbox; `_ended` follows when its init is reaped."""
        sandbox.keep_layer = keep_layer
        if sandbox.state == "frozen":
            self._remove(sandbox)
        elif sandbox.state != "ending":
            sandbox.state = "ending"
            self._groups.lift_cpu_limit(sandbox.id)
            with suppress(ProcessLookupError):
                os.kill(sandbox.pid, signal.SIGKILL)
                _give_processor_time(sandbox.pid)
            if sandbox.paused_at is not None:
                # The freezer of version 1 keeps even those in that were killed.
                with suppress(OSError):
                    self._groups.set_frozen(sandbox.id, frozen=False)

    def _reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            sandbox_id = self._by_pid.pop(pid, None)
            if sandbox_id is not None:
                self._ended(self._sandboxes[sandbox_id])

    def _ended(self, sandbox: Record) -> None:
        """The init and with it every process of the sandbox is dead."""
        with suppress(OSError):
            self._groups.remove(sandbox.id)
        if sandbox.control is not None:
            self._board.read_to_end(sandbox.control)
        name, text = sandbox.failure
        self._answer_creators(sandbox, {"error": name, "message": text})
        for waiter in (*sandbox.pending.values(), *sandbox.executions.end()):
            self._board.answer(
                waiter, {"error": "SandboxGone", "message": f"sandbox {sandbox.id} died under the command"}
            )
        sandbox.pending.clear()
        if sandbox.keep_layer and sandbox.state == "ending":
            sandbox.state = "frozen"
            if sandbox.becomes_image:
                self._turn_into_image(sandbox)
            else:
                self._answer_enders(sandbox, {})
        else:
            self._remove(sandbox)

    def _answer_enders(self, sandbox: Record, message: Message) -> None:
        for waiter in (*sandbox.enders, *sandbox.keepers):
            self._board.answer(waiter, message)
        sandbox.enders.clear()
        sandbox.keepers.clear()

    def _remove(self, sandbox: Record) -> None:
        self._boots.drop_layer(sandbox.id, sandbox.base_id)
        self._forget(sandbox)
        for waiter in sandbox.keepers:
            text = f"sandbox {sandbox.id} was killed before it was frozen"
            self._board.answer(waiter, {"error": "SandboxGone", "message": text})
        sandbox.keepers.clear()
        self._answer_enders(sandbox, {})

    def _forget(self, sandbox: Record) -> None:
        for name in (sandbox.image, *sandbox.folders):
            self._shelf.give_back(name)
        self._deadlines.drop(sandbox.id)
        del self._sandboxes[sandbox.id]
        if self._by_key.get(sandbox.key) == sandbox.id:
            del self._by_key[sandbox.key]

    def _expire(self) -> None:
        for sandbox_id in self._deadlines.pop_due(time.monotonic()):
            if sandbox_id == _IDLE:
                # Somebody may have come while this turn waited for the deadline.
                self._closing = not self._sandboxes and not self._board.clients
                continue
            sandbox = self._sandboxes[sandbox_id]
            if sandbox.state == "booting":
                sandbox.failure = (
                    "BootTimeout",
                    f"not ready in {self._settings.boot_timeout_s} s: raise boot_timeout_s",
                )
            self._end(sandbox, keep_layer=False)


def _give_processor_time(pid: int) -> None:
    """Root inside may have set the first process back behind all its own (sched_setscheduler(2)): it could not die."""
    with suppress(PermissionError):
        os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, pid, 0)
        os.sched_setaffinity(pid, os.sched_getaffinity(0))
