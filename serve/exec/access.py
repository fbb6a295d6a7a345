"""Who asks: the owner of a key, or the holder of one sandbox's secret, from `Authorization: Bearer`.

Invariants: compared in constant time; a key never opens a sandbox of another owner, a secret opens one sandbox only and
creates none. Without a file of keys there is one owner, whom anybody on this loopback is.
"""

from __future__ import annotations

from hmac import compare_digest
from typing import TYPE_CHECKING

from headrace.sandboxes.errors import SecretRefused
from headrace.serve.e2b_sandboxes.keys import ANYONE

if TYPE_CHECKING:
    from aiohttp import web

    from headrace.serve.e2b_sandboxes.keys import ApiKeys, Owner
    from headrace.serve.exec.store import LeasedSandbox


def presented(request: web.Request) -> str:
    """The key or secret of a request; empty without one."""
    kind, _, value = request.headers.get("Authorization", "").partition(" ")
    return value.strip() if kind.lower() == "bearer" else request.headers.get("X-API-Key", "")


def owner_of(request: web.Request, keys: ApiKeys) -> Owner:
    """Raises SecretRefused."""
    if keys.open_to_anyone:
        return ANYONE
    owner = keys.identify(presented(request))
    if owner is None:
        raise SecretRefused("missing or wrong key: send `Authorization: Bearer KEY` with one of the server's --keys")
    return owner


def check_secret(request: web.Request, row: LeasedSandbox) -> None:
    """Raises SecretRefused."""
    if not compare_digest(presented(request).encode(errors="surrogateescape"), row.secret.encode()):
        raise SecretRefused(f"the secret is not that of sandbox {row.id}")
