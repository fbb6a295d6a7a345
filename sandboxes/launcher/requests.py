"""Validation of the values in a client's request.

Invariants:
- Pure. An invalid value raises RequestRefused with SpecRefused. Later steps never see a NaN, a number too large for a
  float, or a string with a NUL, where the kernel would truncate it.
- A command with an `exec_id` runs once: a repeated request gets the result that the first caller has stored here.
- The launcher copies no output: standard streams are the client's own pipes.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
from typing import Any, Final

from headrace.sandboxes.launcher import requests
from headrace.sandboxes.launcher.connections import Connections, Waiter
from headrace.sandboxes.launcher.guest import GuestFiles
from headrace.sandboxes.launcher.sandbox_record import Execution, RequestRefused, SandboxRecord
from headrace.sandboxes.launcher.wire import Channel, Message
from headrace.sandboxes.linux.rootfs import Mount

FOLDER: Final = "folder:"
"""Prefix for the names of host folders that the owner has handed over to be mounted in sandboxes."""
_LONGEST_LEASE_S: Final = 1e9
_MOST: Final = 1 << 62
_MAX_LABEL_BYTES: Final = 8192
"""Limit on the key and labels together, because the list of all sandboxes must fit in one message."""
_PORTS: Final = 1 << 16
_WITHOUT_STREAMS: Final = ("listen", "socket")
"""Operations of the first process that start no command."""
_USER: Final = re.compile(r"[a-z_][a-z0-9_-]{0,31}")


def lease_s(value: object) -> float:
    """Return the length of a lease in seconds. Raises RequestRefused."""
    if not isinstance(value, int | float) or not 0 <= value < _LONGEST_LEASE_S:
        raise _refusal("ttl_s", value, "must be a number of seconds, 0 to 1e9")
    return float(value)


def limit(name: str, value: object) -> float | None:
    """Return a limit, or None for the launcher's default. Raises RequestRefused."""
    if value is None:
        return None
    if not isinstance(value, int | float) or not 0 < value < _MOST:
        raise _refusal(name, value, "must be a number above 0")
    return value


def mounts_of(message: Message) -> tuple[Mount, ...]:
    """Return the paths of a frozen sandbox to mount in the new one. Raises RequestRefused."""
    return tuple(Mount(*(_text("mounts", value) for value in row)) for row in message["mounts"])


def folders_of(message: Message) -> tuple[tuple[str, str], ...]:
    """Return the host folders to mount in the new sandbox: the launcher's name for each, and its target."""
    rows = tuple((_text("folders", name), _text("folders", target)) for name, target in message["folders"])
    for name, _ in rows:
        if not name.startswith(FOLDER):
            raise _refusal("folders", name, "is not a folder that was handed over to the launcher")
    return rows


def labels_of(message: Message) -> dict[str, str]:
    """Return the labels of a new sandbox. Raises RequestRefused."""
    labels: Any = message["labels"]
    if not isinstance(labels, dict) or not all(isinstance(value, str) for value in labels.values()):
        raise _refusal("labels", labels, "must be an object whose values are strings")
    if len(json.dumps(labels)) + len(str(message["key"])) > _MAX_LABEL_BYTES:
        raise RequestRefused(
            "SpecRefused", f"labels and idempotency_key together are longer than {_MAX_LABEL_BYTES} bytes"
        )
    return labels


def guest_of(message: Message) -> GuestFiles | None:
    """Return what the sandbox gets for E2B's clients, if it was asked for. Raises RequestRefused."""
    document = message.get("guest")
    if document is None:
        return None
    user, files = _text("guest", document["user"]), dict(document["files"])
    if not _USER.fullmatch(user):
        raise _refusal("guest", user, "must be a user name")
    named = tuple((_text("guest", path), _text("guest", text)) for path, text in files.items())
    for path, _ in named:
        if not path.startswith("/"):
            raise _refusal("guest", path, "must be an absolute path")
    return GuestFiles(user, document["sudo"] is True, named)


def check_for_init(message: Message) -> None:
    """Check the numbers that are passed to a sandbox's first process, which trusts them. Raises RequestRefused."""
    if message["op"] == "socket":
        if not isinstance(message["ipv6"], bool):
            raise _refusal("ipv6", message["ipv6"], "must be true or false")
        return
    if message["op"] == "listen":
        port = message["port"]
        if not isinstance(port, int) or not 0 <= port < _PORTS:
            raise _refusal("port", port, "must be a port number, 0 to 65535")
        return
    timeout_s = message["timeout_s"]
    if timeout_s is not None and (
        not isinstance(timeout_s, int | float) or math.isnan(timeout_s) or _MOST < timeout_s < math.inf
    ):
        raise _refusal("timeout_s", timeout_s, "must be a number of seconds")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise _refusal(name, value, "must be a string without NUL")
    return value


def _refusal(name: str, value: object, rule: str) -> RequestRefused:
    return RequestRefused("SpecRefused", f"{name}={str(value)[:100]!r}: {rule}")


_MAX_NAMES: Final = 64
"""Clients choose the purposes, so the number of names is capped; any further ones are counted as `other`."""


class CommandCosts:
    """Number and CPU seconds (user and system, including reaped children) of finished commands, by purpose."""

    def __init__(self) -> None:
        self._ended: dict[str, tuple[int, float]] = {}

    def add(self, purpose: str, operation: str, cpu_s: float) -> None:
        """Count a finished command; `purpose` is the sandbox's label of that name, and `operation` is the requested
        operation."""
        name = f"{purpose or 'other'}.{operation}"
        if name not in self._ended and len(self._ended) >= _MAX_NAMES:
            name = "other"
        count, seconds = self._ended.get(name, (0, 0.0))
        self._ended[name] = count + 1, seconds + cpu_s

    def to_json(self) -> dict[str, tuple[int, float]]:
        """Return `purpose.operation` -> (commands, CPU seconds) since the launcher started."""
        return dict(self._ended)


class CommandRequests:
    """Handlers for operations on commands; each gets the waiter, the sandbox, the message and its descriptors."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._last_tag = 0
        self.costs = CommandCosts()

    def forward(self, waiter: Waiter, sandbox: SandboxRecord, message: Message, descriptors: list[int]) -> None:
        """Pass a request on to the first process of the sandbox, which runs it."""
        if sandbox.state != "running" or sandbox.control is None:
            raise RequestRefused("SandboxGone", f"sandbox {sandbox.id} can run no more commands: it is {sandbox.state}")
        if len(descriptors) != (0 if message["op"] in _WITHOUT_STREAMS else 3):
            raise RequestRefused("SpecRefused", "a command needs three descriptors: standard input, output and error")
        requests.check_for_init(message)
        self._last_tag += 1
        inner = {name: value for name, value in message.items() if name not in ("secret", "sandbox", "id")}
        passed = descriptors.copy()
        descriptors.clear()
        self._connections.send(sandbox.control, {**inner, "tag": self._last_tag}, passed)
        sandbox.pending[self._last_tag] = waiter

    def execute(self, waiter: Waiter, sandbox: SandboxRecord, message: Message, descriptors: list[int]) -> None:
        """Run a command, or answer a repeated `exec_id` with the result of the first request."""
        exec_id = str(message.get("exec_id") or "")
        known = sandbox.executions.find(exec_id) if exec_id else None
        if known is None:
            self.forward(waiter, sandbox, message, descriptors)
            if exec_id:
                sandbox.executions.begin(exec_id, str(message["run"]), waiter)
        elif known.answer is not None:
            self._connections.answer(waiter, known.answer, [os.dup(known.output)] if known.output >= 0 else [])
        elif self._connections.is_connected(known.runner.client):
            known.waiters.append(waiter)
        else:
            self._connections.answer(waiter, known.lost())

    def store_result(self, waiter: Waiter, sandbox: SandboxRecord, message: Message, descriptors: list[int]) -> None:
        """Store the result of an `exec_id`. The first caller sends it, with the output in a memory file; a result of
        None means that the caller was cancelled."""
        known = sandbox.executions.find(str(message["exec_id"]))
        if known is not None and known.answer is None and known.run == message["run"]:
            if message["result"] is None:
                self._lose(known)
            else:
                result, output = dict(message["result"]), descriptors.pop(0) if descriptors else -1
                for waiting in known.settle(result, output):
                    self._connections.answer(waiting, result, [os.dup(output)] if output >= 0 else [])
        self._connections.answer(waiter, {})

    def drop_client(self, sandbox: SandboxRecord, client: Channel) -> None:
        """Give up on results that a disconnected client was supposed to store."""
        for known in sandbox.executions.of(client):
            self._lose(known)

    def _lose(self, known: Execution) -> None:
        for waiting in known.settle(known.lost(), -1):
            self._connections.answer(waiting, known.lost())

    def cancel(self, waiter: Waiter, sandbox: SandboxRecord, message: Message, _descriptors: list[int]) -> None:
        """Kill the command of the request `target`, which the client of this connection has abandoned."""
        for known in sandbox.executions.of(waiter.client):
            if known.runner.request_id == int(message["target"]):
                self._lose(known)
        self._send_to_command(waiter, sandbox, int(message["target"]), {"op": "cancel"})

    def signal(self, waiter: Waiter, sandbox: SandboxRecord, message: Message, _descriptors: list[int]) -> None:
        """Send a signal to the command that this connection's request `target` started."""
        number = int(message["number"])
        if not 1 <= number < signal.NSIG:
            raise RequestRefused("SpecRefused", f"number={number}: must be a signal number, 1 to {signal.NSIG - 1}")
        self._send_to_command(waiter, sandbox, int(message["target"]), {"op": "signal", "number": number})

    def _send_to_command(self, waiter: Waiter, sandbox: SandboxRecord, target: int, message: Message) -> None:
        # Nothing is sent when the command has ended meanwhile.
        for tag, pending in sandbox.pending.items():
            if pending == Waiter(waiter.client, target) and sandbox.control is not None:
                self._connections.send(sandbox.control, {**message, "tag": tag})
        self._connections.answer(waiter, {})

    def on_result(self, sandbox: SandboxRecord, message: Message, descriptors: list[int]) -> None:
        """Answer the client of a command that has started or ended."""
        tag = int(message.pop("tag"))
        if "cost" in message:
            operation, cpu_s = message.pop("cost")
            self.costs.add(sandbox.labels.get("purpose", ""), operation, cpu_s)
        waiter = sandbox.pending.get(tag) if "started" in message else sandbox.pending.pop(tag, None)
        if waiter is not None:
            self._connections.answer(waiter, message, descriptors)
