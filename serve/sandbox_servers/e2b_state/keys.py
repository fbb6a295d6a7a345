"""The control plane's API keys, which are read from a file; each key has its own sandboxes.

Invariants: a key's SHA-256 is compared with every line in constant time; keys from the file never leave this module.
Without a file, there is one owner, any key is accepted, and the server binds to loopback only.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from hmac import compare_digest
from pathlib import Path
from typing import Final

from headrace.sandboxes.errors import SpecRefused
from headrace.sandboxes.host.key_files import read_private
from headrace.serve.sandbox_servers.e2b_state.limits import SandboxLimits, parse_ceilings

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Owner of sandboxes. A request can use only the sandboxes that belong to its key's owner."""

    name: str
    max_sandboxes: int | None = None
    """Maximum number of simultaneous sandboxes, including paused ones; None for no limit."""
    ceilings: SandboxLimits = field(default_factory=SandboxLimits)
    """Most that each of its sandboxes may have."""


ANYONE: Final = Owner(name="anyone")


class ApiKeys:
    """Lookup table of owners by key."""

    def __init__(self, owners: dict[bytes, Owner] | None) -> None:
        self._owners = owners

    @property
    def open_to_anyone(self) -> bool:
        return self._owners is None

    def named(self, name: str) -> Owner:
        """Return the owner of that name; one that has left the file has no ceilings."""
        owners = (self._owners or {}).values()
        return next((owner for owner in owners if owner.name == name), ANYONE)

    def identify(self, key: str) -> Owner | None:
        """Return the owner of a key, or None if the key is missing or wrong."""
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
    """Read lines of the form `name:key[:max_sandboxes[:ceilings]]`, where 64 hexadecimal digits instead of a key are
    its SHA-256, max_sandboxes may be empty, and `parse_ceilings` reads the ceilings. Raises SpecRefused, and
    SecretRefused if other users can read the file."""
    if path is None:
        return ApiKeys(None)
    text = read_private(path, "--keys")
    owners: dict[bytes, Owner] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            where, parts = f"--keys {path}, line {number}", line.strip().split(":")
            if not 2 <= len(parts) <= 4 or not _NAME.fullmatch(parts[0]) or not parts[1]:
                raise SpecRefused(f"{where}: must be `name:key[:max_sandboxes[:ceilings]]`")
            name, secret, most, ceilings = (*parts, "", "")[:4]
            if (most or len(parts) == 3) and not (most.isascii() and most.isdigit()):
                raise SpecRefused(f"{where}: max_sandboxes must be a whole number")
            digest = bytes.fromhex(secret) if _DIGEST.fullmatch(secret) else hashlib.sha256(secret.encode()).digest()
            if digest in owners or any(name == other.name for other in owners.values()):
                raise SpecRefused(f"{where}: duplicate name or key; keep one")
            owners[digest] = Owner(
                name=name,
                max_sandboxes=int(most) if most else None,
                ceilings=parse_ceilings(ceilings, where) if ceilings else SandboxLimits(),
            )
    if not owners:
        raise SpecRefused(f"--keys {path}: the file has no keys; add lines of the form `name:key`")
    return ApiKeys(owners)
