"""Fork server of the launcher: the event loop that serves all local sandboxes of one host.

Invariants:
- A launcher that is tied to its owner exits when its standard input ends or the owner dies, and every sandbox ends with
  it. One that is not tied exits on its own once it has had neither sandboxes nor clients for `idle_exit_s`.
- The launcher never blocks on a client or a sandbox and copies none of their data: standard streams are the client's
  own pipes.
- Each operation needs the sandbox's secret or the admin secret, compared in constant time; operations on the launcher
  itself need the admin secret.
- Only the standard library is imported: a small process forks fast.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from contextlib import suppress
from typing import Final

from headrace.sandboxes.launcher.booter import Booter
from headrace.sandboxes.launcher.connections import Connections, Secrets, Waiter
from headrace.sandboxes.launcher.requests import CommandRequests
from headrace.sandboxes.launcher.sandbox_record import RequestRefused, SandboxRecord, Settings
from headrace.sandboxes.launcher.sandbox_table import SandboxTable
from headrace.sandboxes.launcher.wire import Channel, Message, close_all
from headrace.sandboxes.linux import rootfs
from headrace.sandboxes.linux.syscalls import reason_of

_MALFORMED: Final = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class ForkServer:
    """Event loop of the launcher, which checks the secret of each request and dispatches it."""

    def __init__(self, settings: Settings, secrets: Secrets, booter: Booter, listener: socket.socket) -> None:
        self._settings = settings
        self._secrets = secrets
        self._groups = booter.groups
        self._images = booter.images
        self._connections = Connections(listener, self._on_message, self._on_client_gone)
        self._sandboxes = SandboxTable(settings, secrets, booter, self._connections)
        self._commands = CommandRequests(self._connections)
        self._idle_deadline: float | None = None
        self._launcher_operations = {
            "create": self._sandboxes.create,
            "list": self._list,
            "usage": self._usage,
            "discard": self._sandboxes.discard,
            "own_layer": self._sandboxes.own_layer,
            "add_image": self._add_image,
            "drop_image": self._drop_image,
            "images": self._list_images,
        }
        self._sandbox_operations = {
            "exec": self._commands.execute,
            "keep": self._commands.store_result,
            "spawn": self._commands.forward,
            "run": self._commands.forward,
            "signal": self._commands.signal,
            "listen": self._commands.forward,
            "socket": self._commands.forward,
            "read": self._commands.forward,
            "write": self._commands.forward,
            "cancel": self._commands.cancel,
            "freeze": self._sandboxes.freeze,
            "snapshot": self._sandboxes.snapshot,
            "pause": self._pause,
            "resume": self._resume,
            "state": self._state,
            "kill": self._sandboxes.kill,
            "renew": self._sandboxes.renew,
        }

    @property
    def missing(self) -> dict[str, str]:
        """Unavailable controllers of control groups, with the reason for each."""
        return self._groups.missing

    def handle_signals(self) -> None:
        """From now on, reap children and shut down cleanly on SIGTERM. Must be called before the launcher reports that
        it is ready."""
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

        def on_wake() -> None:
            numbers = b""
            with suppress(BlockingIOError):
                numbers = os.read(wake_read, 4096)
            if signal.SIGTERM in numbers:
                self._sandboxes.close()
            self._sandboxes.reap()

        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda _number, _frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._connections.watch(wake_read, on_wake)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def serve(self) -> None:
        """Serve until the owner is gone and every sandbox has ended."""
        if self._settings.owner_pid:
            try:
                owner = os.pidfd_open(self._settings.owner_pid)
            except ProcessLookupError:
                self._sandboxes.close()
            else:
                self._connections.watch(owner, lambda: self._lose_owner(owner))
        if self._settings.tied:
            self._connections.watch(0, lambda: self._lose_owner(0))
        while not (self._sandboxes.closing and not self._sandboxes):
            if self._settings.tied or self._sandboxes or self._connections.clients:
                self._idle_deadline = None
            elif self._idle_deadline is None:
                self._idle_deadline = time.monotonic() + self._settings.idle_exit_s
            deadlines = (self._sandboxes.next_deadline(), self._idle_deadline)
            deadline = min((deadline for deadline in deadlines if deadline is not None), default=None)
            self._connections.poll(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if self._idle_deadline is not None and self._idle_deadline <= time.monotonic():
                # A client may have connected while the poll waited for the deadline.
                self._sandboxes.closing = not self._sandboxes and not self._connections.clients
            self._sandboxes.expire()
            self._sandboxes.guard()
        self._groups.close()

    def _lose_owner(self, source: int) -> None:
        self._connections.unwatch(source)
        self._sandboxes.close()

    def _on_message(
        self, channel: Channel, owner: SandboxRecord | None, message: Message, descriptors: list[int]
    ) -> None:
        """Handle a request of a client or, with an owner, a message from the first process of that sandbox."""
        if owner is not None:
            handle = self._sandboxes.on_boot_event if "event" in message else self._commands.on_result
            handle(owner, message, descriptors)
            return
        request_id = message.get("id")
        waiter = Waiter(channel, request_id if isinstance(request_id, int) else 0)
        # An operation that takes over descriptors removes them from the list.
        try:
            operation, secret = str(message["op"]), str(message["secret"])
            is_admin = self._secrets.is_admin(secret)
            if operation in self._launcher_operations:
                if not is_admin:
                    raise RequestRefused("SecretRefused", f"{operation} needs the admin secret of the launcher")
                self._launcher_operations[operation](waiter, message, descriptors)
                return
            if operation not in self._sandbox_operations:
                raise RequestRefused("SpecRefused", f"unknown operation {operation!r}")
            sandbox = self._sandboxes.find(str(message["sandbox"]))
            if not is_admin and not self._secrets.fits(sandbox.id, secret):
                raise RequestRefused("SecretRefused", f"wrong secret for sandbox {sandbox.id}")
            self._sandbox_operations[operation](waiter, sandbox, message, descriptors)
        except RequestRefused as refused:
            self._connections.answer(waiter, {"error": refused.name, "message": str(refused)})
        except _MALFORMED as error:
            answer = {"error": "SpecRefused", "message": f"malformed request: {error!r}"[:500]}
            self._connections.answer(waiter, answer)
        except OSError as error:
            # The host is out of descriptors or memory; a smaller request may still succeed.
            answer = {"error": "CapacityExceeded", "message": f"the host refused the request: {error}"}
            self._connections.answer(waiter, answer)
        finally:
            close_all(descriptors)

    def _on_client_gone(self, channel: Channel) -> None:
        for sandbox in self._sandboxes:
            self._commands.drop_client(sandbox, channel)

    def _list(self, waiter: Waiter, _message: Message, _descriptors: list[int]) -> None:
        rows = [
            {
                "id": sandbox.id,
                "state": sandbox.shown_state(),
                "expires_in_s": self._sandboxes.lease_left_s(sandbox),
                "labels": sandbox.labels,
                "key": sandbox.key,
            }
            for sandbox in self._sandboxes
        ]
        self._connections.answer(waiter, {"sandboxes": rows})

    def _usage(self, waiter: Waiter, _message: Message, _descriptors: list[int]) -> None:
        """Answer with the CPU seconds used by the launcher and all its reaped children, and by commands grouped by
        purpose."""
        usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
        cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in usages)
        commands = self._commands.costs.to_json()
        usage = {"cpu_s": cpu_s, "commands": commands, "pid": os.getpid(), "missing": self.missing}
        self._connections.answer(waiter, usage)

    def _add_image(self, waiter: Waiter, message: Message, descriptors: list[int]) -> None:
        if not 0 < len(descriptors) <= rootfs.MAX_LAYERS:
            text = f"the image has {len(descriptors)} layers; it must have 1 to {rootfs.MAX_LAYERS}"
            raise RequestRefused("ImageRefused", text)
        try:
            shows_host = message.get("shows_host") is True
            name, folder = str(message["name"]), str(message["folder"])
            self._images.add(name, descriptors, message["environment"], folder, shows_host=shows_host)
        except OSError as error:
            raise RequestRefused("ImageRefused", str(error)) from error
        self._connections.answer(waiter, {})

    def _drop_image(self, waiter: Waiter, message: Message, _descriptors: list[int]) -> None:
        self._connections.answer(waiter, {"dropped": self._images.drop(str(message["name"]))})

    def _list_images(self, waiter: Waiter, _message: Message, _descriptors: list[int]) -> None:
        self._connections.answer(waiter, {"images": self._images.names})

    def _pause(self, waiter: Waiter, sandbox: SandboxRecord, _message: Message, _descriptors: list[int]) -> None:
        sandbox.check_running()
        if sandbox.paused_at is None:
            self._set_paused(sandbox, paused=True)
            sandbox.paused_at = time.monotonic()
        self._connections.answer(waiter, {})

    def _resume(self, waiter: Waiter, sandbox: SandboxRecord, _message: Message, _descriptors: list[int]) -> None:
        sandbox.check_running()
        if sandbox.paused_at is not None and sandbox.control is not None:
            paused_s = time.monotonic() - sandbox.paused_at
            # Sent before the processes run again: the deadlines of commands are extended by the pause.
            self._connections.send(sandbox.control, {"op": "paused", "seconds": paused_s})
            self._set_paused(sandbox, paused=False)
            sandbox.paused_s += paused_s
            sandbox.paused_at = None
        self._connections.answer(waiter, {})

    def _set_paused(self, sandbox: SandboxRecord, *, paused: bool) -> None:
        try:
            self._groups.set_frozen(sandbox.id, frozen=paused)
        except OSError as error:
            raise RequestRefused("Unsupported", f"pause and resume: {reason_of(error)}; see headrace doctor") from error

    def _state(self, waiter: Waiter, sandbox: SandboxRecord, _message: Message, _descriptors: list[int]) -> None:
        """Answer with a sandbox's state, current usage, limits and total paused seconds."""
        paused_s = sandbox.paused_s + (0 if sandbox.paused_at is None else time.monotonic() - sandbox.paused_at)
        answer = {"state": sandbox.shown_state(), "paused_s": paused_s, "limit_kills": sandbox.limit_kills}
        answer |= rootfs.layer_usage(sandbox.id)
        if sandbox.state == "running":
            answer |= self._groups.usage(sandbox.id)
        self._connections.answer(waiter, {**answer, "limits": sandbox.limits})
