"""Keys of the control API: a file of their SHA-256 digests with roles and owners.

Invariants:
- The file has no keys, only digests. A key's digest is compared with every line in constant time.
- A file that others can read or its group can write is refused, since who writes it is an admin. (Its group may read
  it: Kubernetes gives a Secret to the group of the pod.)
- The file is read for every request, so a change of it holds at once. While it is invalid, no key is accepted.
"""

from __future__ import annotations

import os
import re
import stat
from hmac import compare_digest
from pathlib import Path
from typing import Final

from headrace.actors.cluster.runs.records import ApiRole, Caller
from headrace.actors.cluster.runs.table import NAME
from headrace.actors.errors import ConfigError

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_LONGEST_FILE: Final = 1 << 20
_SHOWN_DIGITS: Final = 12
_REFUSED_BITS: Final = stat.S_IWGRP | stat.S_IRWXO


class KeyFile:
    """The keys of a file with lines `SHA256 ROLE OWNER`. Raises ConfigError if the file is refused."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data = _read(path)
        self._callers = _parsed(self._data, path)

    def caller_of(self, digest: bytes) -> Caller | None:
        """Return the user of the key with this digest (`digest_of`), or None if there is none. A digest that a request
        contains proves nothing. Raises ConfigError if the file is refused now."""
        data = _read(self._path)
        if data != self._data:
            self._callers, self._data = _parsed(data, self._path), data
        found = None
        for known, caller in self._callers.items():
            if compare_digest(known, digest):
                found = caller
        return found


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & _REFUSED_BITS:
                raise ConfigError(
                    f"key file {path} has mode {stat.S_IMODE(mode):o}: others must not read it, nor its group write it "
                    f"(chmod 600 {path})"
                )
            data = file.read(_LONGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(f"key file {path} cannot be read: {error.strerror}; name a file of key digests") from error
    if len(data) > _LONGEST_FILE:
        raise ConfigError(f"key file {path} has more than {_LONGEST_FILE >> 20} MiB: remove unused keys")
    return data


def _parsed(data: bytes, path: Path) -> dict[bytes, Caller]:
    callers: dict[bytes, Caller] = {}
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        parts = line.split()
        if not parts or parts[0].startswith("#"):
            continue
        where = f"key file {path}, line {number}"
        # The line itself is not repeated: somebody may have written a key into it.
        if len(parts) != 3 or not _DIGEST.fullmatch(parts[0]) or not NAME.fullmatch(parts[2]):
            raise ConfigError(
                f"{where}: must be `SHA256 ROLE OWNER`, with the SHA-256 of the key in 64 small hex digits"
            )
        if parts[1].upper() not in ApiRole.__members__ or not parts[1].islower():
            raise ConfigError(f"{where}: the role must be read, operate, code or admin")
        digest = bytes.fromhex(parts[0])
        if digest in callers:
            raise ConfigError(f"{where}: duplicate key; keep one line of it")
        callers[digest] = Caller(owner=parts[2], role=ApiRole[parts[1].upper()], key=parts[0][:_SHOWN_DIGITS])
    if not callers:
        raise ConfigError(f"key file {path} has no keys; add lines of the form `SHA256 ROLE OWNER`")
    return callers
