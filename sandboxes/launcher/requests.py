"""Values of a client's request, checked before anything is done with them.

Invariants: pure; what is wrong raises Refused with SpecRefused; no later step meets a NaN, a number too large for a
float, or a text with a NUL, which the kernel would cut there.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

from headrace.sandboxes.kernel.rootfs import Mount
from headrace.sandboxes.launcher.settings import Refused

if TYPE_CHECKING:
    from headrace.sandboxes.launcher.wire import Message

FOLDER: Final = "folder:"
"""Begins the names of folders that the owner handed over to be shown in sandboxes."""
_LONGEST_LEASE_S: Final = 1e9
_MOST: Final = 1 << 62
_MAX_LABEL_BYTES: Final = 8192
"""Of key and labels together: the list of all sandboxes is one message."""
_PORTS: Final = 1 << 16


def lease_s(value: object) -> float:
    """Length of a lease in seconds."""
    if not isinstance(value, int | float) or not 0 <= value < _LONGEST_LEASE_S:
        raise _refusal("ttl_s", value, "must be a number of seconds, 0 to 1e9")
    return float(value)


def amount(name: str, value: object) -> float | None:
    """A limit, or None for the launcher's own."""
    if value is None:
        return None
    if not isinstance(value, int | float) or not 0 < value < _MOST:
        raise _refusal(name, value, "must be a number above 0")
    return value


def mounts_of(message: Message) -> tuple[Mount, ...]:
    """What is to be shown of a frozen sandbox."""
    return tuple(Mount(*(_text("mounts", value) for value in row)) for row in message["mounts"])


def folders_of(message: Message) -> tuple[tuple[str, str], ...]:
    """What is to be shown of the host: the name under which the launcher has it, and where."""
    rows = tuple((_text("folders", name), _text("folders", target)) for name, target in message["folders"])
    for name, _ in rows:
        if not name.startswith(FOLDER):
            raise _refusal("folders", name, "is no folder that was handed over")
    return rows


def labels_of(message: Message) -> dict[str, str]:
    """Labels of a new sandbox."""
    labels: Any = message["labels"]
    if not isinstance(labels, dict) or not all(isinstance(value, str) for value in labels.values()):
        raise _refusal("labels", labels, "must be texts by name")
    if len(json.dumps(labels)) + len(str(message["key"])) > _MAX_LABEL_BYTES:
        raise Refused("SpecRefused", f"labels and idempotency_key: at most {_MAX_LABEL_BYTES} bytes together")
    return labels


def check_for_init(message: Message) -> None:
    """The first process of a sandbox trusts the numbers it gets."""
    if message["op"] == "listen":
        port = message["port"]
        if not isinstance(port, int) or not 0 <= port < _PORTS:
            raise _refusal("port", port, "must be a port number")
        return
    timeout_s = message["timeout_s"]
    if timeout_s is not None and (
        not isinstance(timeout_s, int | float) or math.isnan(timeout_s) or _MOST < timeout_s < math.inf
    ):
        raise _refusal("timeout_s", timeout_s, "must be a number of seconds")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise _refusal(name, value, "must be text without NUL")
    return value


def _refusal(name: str, value: object, rule: str) -> Refused:
    return Refused("SpecRefused", f"{name}={str(value)[:100]!r}: {rule}")
