"""Signed URLs of `/files`, made by the SDKs' `download_url` and `upload_url` (e2b sandbox/signature.py, version 1).

Invariants: until its expiration a signature is valid for one path, one operation and one user of the sandbox whose
token made it; it is compared in constant time.
"""

from __future__ import annotations

import base64
import hashlib
import time
from hmac import compare_digest
from typing import TYPE_CHECKING

from headrace.serve.e2b_sandboxes.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from headrace.serve.e2b_sandboxes.live_sandbox import LiveSandbox


def signature(path: str, operation: str, user: str, token: str, expiration: str) -> str:
    """Return the signature of a URL. `operation` is `read` or `write`; `user` and `expiration` are "" if the URL has
    none."""
    parts = [path, operation, user, token] + ([expiration] if expiration else [])
    digest = hashlib.sha256(":".join(parts).encode(errors="surrogatepass")).digest()
    return "v1_" + base64.b64encode(digest).rstrip(b"=").decode("ascii")


def find_signed(running: Iterable[LiveSandbox], query: Mapping[str, str], operation: str) -> LiveSandbox:
    """Find the sandbox by whose token a URL was signed, since the URL does not name it. Raises ApiError 401."""
    given, expiration = query.get("signature", ""), query.get("signature_expiration", "")
    if not given:
        raise ApiError(401, "missing signature query parameter")
    path, user = query.get("path", ""), query.get("username", "")
    found = None
    for live in running:
        expected = signature(path, operation, user, live.row.access_token, expiration)
        if compare_digest(expected.encode(), given.encode(errors="surrogatepass")):
            found = live
    if found is None:
        raise ApiError(401, "invalid signature")
    if expiration and not (expiration.isascii() and expiration.isdigit() and int(expiration) >= time.time()):
        raise ApiError(401, "signature is already expired")
    return found
