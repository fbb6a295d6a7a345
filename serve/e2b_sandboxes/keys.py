"""Who may use the control plane: keys from a file, each with its own sandboxes.

Invariants: a key is compared by its SHA-256 against every line in constant time; a file's key never leaves this module;
without a file there is one owner, whom any key opens, and the server binds to loopback only.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from hmac import compare_digest
from typing import TYPE_CHECKING, Final

from headrace.sandboxes.errors import SpecRefused

if TYPE_CHECKING:
    from pathlib import Path

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose sandboxes a request may see and touch."""

    name: str
    max_sandboxes: int | None = None
    """Sandboxes at once, paused ones included; None is no limit of its own."""


ANYONE: Final = Owner(name="anyone")


class ApiKeys:
    """`identify` tells the owner of a presented key."""

    def __init__(self, owners: dict[bytes, Owner] | None) -> None:
        self._owners = owners

    @property
    def open_to_anyone(self) -> bool:
        return self._owners is None

    def identify(self, key: str) -> Owner | None:
        """The key's owner; None when it is missing or wrong."""
        if not key:
            return None
        if self._owners is None:
            return ANYONE
        digest = hashlib.sha256(key.encode(errors="surrogateescape")).digest()
        found = None
        for known, owner in self._owners.items():
            if compare_digest(known, digest):
                found = owner
        return found


def load_keys(path: Path | None) -> ApiKeys:
    """Read lines `name:key[:max_sandboxes]`, where 64 hexadecimal digits are the key's SHA-256. Raises SpecRefused."""
    if path is None:
        return ApiKeys(None)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecRefused(f"--keys {path}: {error}") from error
    owners: dict[bytes, Owner] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            digest, owner = _parse_line(line.strip(), f"--keys {path}, line {number}")
            if digest in owners or any(owner.name == other.name for other in owners.values()):
                raise SpecRefused(f"--keys {path}, line {number}: this name or key stands there already")
            owners[digest] = owner
    if not owners:
        raise SpecRefused(f"--keys {path}: no key in it; write lines `name:key`")
    return ApiKeys(owners)


def _parse_line(line: str, where: str) -> tuple[bytes, Owner]:
    parts = line.split(":")
    if len(parts) not in (2, 3) or not _NAME.fullmatch(parts[0]) or not parts[1]:
        raise SpecRefused(f"{where}: write `name:key` or `name:key:max_sandboxes`")
    if len(parts) == 3 and not (parts[2].isascii() and parts[2].isdigit()):
        raise SpecRefused(f"{where}: max_sandboxes must be a whole number")
    secret = parts[1]
    digest = bytes.fromhex(secret) if _DIGEST.fullmatch(secret) else hashlib.sha256(secret.encode()).digest()
    return digest, Owner(name=parts[0], max_sandboxes=int(parts[2]) if len(parts) == 3 else None)
