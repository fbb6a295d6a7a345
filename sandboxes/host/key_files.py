"""Key files: a secret on one line of a file that other users of the machine cannot read.

Invariants:
- A key is read only from a file that belongs to this user or to root, and that no other user can read. A file of root
  may be readable by its group, because that is how Kubernetes mounts a secret for a pod that does not run as root.
- A key can be sent in a header and written to a command's configuration: it is printable ASCII without spaces, does not
  begin with a dash, and has at least `SHORTEST` characters.
- A new key is complete when its file appears, and an existing key is never replaced.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Final

from headrace.buffer.primitives.durable_files import write_private
from headrace.sandboxes.errors import SecretRefused

SHORTEST: Final = 16
LONGEST: Final = 1 << 20
"""Maximum size of a file of keys, in bytes."""
_KEY_BYTES: Final = 32


def read_private(path: Path, option: str, longest: int = LONGEST) -> str:
    """Return the text of a file that the user named with `option`, if no other user can read it. Raises
    SecretRefused."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(longest + 1)
    except OSError as error:
        raise SecretRefused(f"{option} {path}: {error.strerror}; name a file with the key") from error
    if len(data) > longest:
        raise SecretRefused(f"{option} {path}: it has more than {longest} bytes; name a file with keys only")
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (0, os.geteuid()):
        raise SecretRefused(f"{option} {path}: it belongs to another user (id {status.st_uid}); copy it")
    if mode & (0o007 if status.st_uid == 0 != os.geteuid() else 0o077):
        raise SecretRefused(f"{option} {path}: other users can read it (mode {mode:o}); chmod 600 {path}")
    return data.decode(errors="replace")


def read_key(path: Path, option: str) -> str:
    """Return the key in a file that the user named with `option`. Raises SecretRefused."""
    key = read_private(path, option).strip()
    if len(key) < SHORTEST or not all("!" <= character <= "~" for character in key) or key.startswith("-"):
        raise SecretRefused(
            f"{option} {path}: a key has at least {SHORTEST} printable ASCII characters without spaces, and no dash in "
            f"front; write one with `openssl rand -hex {_KEY_BYTES}`"
        )
    return key


def make_key(path: Path) -> None:
    """Write a new key to the file, unless it exists. Raises OSError."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Hexadecimal digits: no quoting, and no dash in front.
        write_private(path, secrets.token_hex(_KEY_BYTES).encode() + b"\n")
