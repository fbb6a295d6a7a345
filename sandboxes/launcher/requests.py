"""Validation of the values in a client's request.

Invariants: pure. A wrong value raises RequestRefused with SpecRefused. Later steps never see a NaN, a number too large
for a float, or a text with a NUL, at which the kernel would cut it.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

from headrace.sandboxes.kernel.rootfs import Mount
from headrace.sandboxes.launcher.sandbox_record import RequestRefused

if TYPE_CHECKING:
    from headrace.sandboxes.launcher.wire import Message

FOLDER: Final = "folder:"
"""Prefix of the names of host folders that the owner handed over to be shown in sandboxes."""
_LONGEST_LEASE_S: Final = 1e9
_MOST: Final = 1 << 62
_MAX_LABEL_BYTES: Final = 8192
"""Limit of key and labels together, because the list of all sandboxes must fit in one message."""
_PORTS: Final = 1 << 16


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
    """Return the paths of a frozen sandbox that the new one shows. Raises RequestRefused."""
    return tuple(Mount(*(_text("mounts", value) for value in row)) for row in message["mounts"])


def folders_of(message: Message) -> tuple[tuple[str, str], ...]:
    """Return the host folders that the new sandbox shows: the launcher's name for each, and its target."""
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
            "SpecRefused", f"labels and idempotency_key are longer than {_MAX_LABEL_BYTES} bytes together"
        )
    return labels


def check_for_init(message: Message) -> None:
    """Check the numbers that the first process of a sandbox gets, which trusts them. Raises RequestRefused."""
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
