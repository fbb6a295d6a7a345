"""Keys of engines: every request to a server that has one must carry it as `Authorization: Bearer KEY`.

Invariants:
- A key is passed between processes and hosts as the path of its file, never as a value in arguments or a config.
- The engines that headrace starts for a run share one key; servers that somebody else started have another one, so that
  neither learns the other's.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from headrace.policies.errors import EngineSettingsInvalid
from headrace.sandboxes.errors import SecretRefused
from headrace.sandboxes.host.key_files import read_key


def read_engine_key(path: Path | None, option: str) -> str | None:
    """Return the key in the file, or None without a file. `option` names the setting. Raises EngineSettingsInvalid."""
    if path is None:
        return None
    try:
        return read_key(path, option)
    except SecretRefused as error:
        raise EngineSettingsInvalid(str(error)) from error


def require_key(host: str, key_file: Path | None) -> None:
    """Refuse to listen on an address that other hosts reach without a key. Raises EngineSettingsInvalid."""
    if key_file is None and not is_loopback(host):
        raise EngineSettingsInvalid(
            f"--host {host}: other hosts could use the engine and change its weights; name a file with a key "
            "(--key-file FILE), or bind 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Return True if only this host can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKeyFiles:
    """Key files of a run's engines: `own` for those that the group starts, `attached` for servers that others started
    (`engines.key_file`). None means that those servers have no key."""

    own: Path | None = None
    attached: Path | None = None

    def key_of(self, *, attached: bool) -> str | None:
        """Return the key of an engine. Raises EngineSettingsInvalid."""
        if attached:
            return read_engine_key(self.attached, "engines.key_file")
        return read_engine_key(self.own, "key of the engines")
