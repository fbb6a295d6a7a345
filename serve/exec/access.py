"""Authentication of requests: by a key, or by the secret of one sandbox, in `Authorization: Bearer`.

Invariants: comparisons take constant time; a key never opens a sandbox of another owner; a secret opens one sandbox and
creates none. Without a key file all clients are the same owner, and the server listens on loopback only.
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
    """Return the key or secret of a request, or an empty text."""
    kind, _, value = request.headers.get("Authorization", "").partition(" ")
    return value.strip() if kind.lower() == "bearer" else request.headers.get("X-API-Key", "")


def owner_of(request: web.Request, keys: ApiKeys) -> Owner:
    """Return the owner of the request's key. Raises SecretRefused."""
    if keys.open_to_anyone:
        return ANYONE
    owner = keys.identify(presented(request))
    if owner is None:
        raise SecretRefused("missing or wrong key: send `Authorization: Bearer KEY` with one of the server's --keys")
    return owner


def check_secret(request: web.Request, row: LeasedSandbox) -> None:
    """Check that a request has the secret of a sandbox. Raises SecretRefused."""
    if not compare_digest(presented(request).encode(errors="surrogateescape"), row.secret.encode()):
        raise SecretRefused(f"wrong secret for sandbox {row.id}")
