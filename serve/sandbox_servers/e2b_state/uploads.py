"""Files that clients upload for the COPY steps of their builds.

Invariants:
- An upload goes to a URL with a secret of its own, which names one owner and one set of files and expires.
- A client's hash of its files identifies them for that client only; layers are named by what was uploaded.
- An archive is bounded while it arrives, and unpacked in a thread under the limits of a layer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace.sandboxes.errors import ImageRefused, OutOfDisk
from headrace.sandboxes.images.build_context import store_archive
from headrace.sandboxes.images.layers import UnpackLimits
from headrace.serve.sandbox_servers.e2b_state.errors import ApiError
from headrace.serve.sandbox_servers.e2b_state.keys import Owner
from headrace.serve.sandbox_servers.e2b_state.template_bodies import FILES_HASH

if TYPE_CHECKING:
    from headrace.sandboxes.images.builder import ImageBuilder

_EXPIRES_S: Final = 3600.0
_MAX_OPEN: Final = 1000
"""Upload URLs of one owner at a time."""
_AT_ONCE: Final = 8


class _Upload(NamedTuple):
    owner: str
    key: str
    expires_at: float


class Uploads:
    """The uploaded files of one server."""

    def __init__(self, builder: ImageBuilder) -> None:
        self._builder = builder
        self._store = builder.files
        self._limits = builder.limits
        self._open: dict[str, _Upload] = {}
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def find(self, owner: Owner, files_hash: str) -> str:
        """Return the layer of an owner's files, or "" if they have not been uploaded or have been evicted. Raises
        ApiError 400."""
        record = await asyncio.to_thread(self._store.read_record, _key(owner, files_hash))
        return str(record["layers"][0]) if record is not None else ""

    def offer(self, owner: Owner, files_hash: str) -> str:
        """Return the secret of a new upload. Raises ApiError."""
        now = time.time()
        self._open = {secret: one for secret, one in self._open.items() if one.expires_at > now}
        if sum(one.owner == owner.name for one in self._open.values()) >= _MAX_OPEN:
            raise ApiError(429, f"more than {_MAX_OPEN} uploads have been requested and not made", retry_after_s=10.0)
        secret = secrets.token_urlsafe(32)
        self._open[secret] = _Upload(owner.name, _key(owner, files_hash), now + _EXPIRES_S)
        return secret

    async def receive(self, secret: str, chunks: AsyncIterator[bytes]) -> None:
        """Store an upload. Raises ApiError 403 (unknown or expired), 400, 413, OutOfDisk."""
        upload = self._open.get(secret)
        if upload is None or upload.expires_at < time.time():
            raise ApiError(403, "this upload URL is unknown or has expired: ask for another one")
        async with self._places:
            try:
                with self._store.new_layer() as folder:
                    archive = folder / "archive"
                    with archive.open("xb") as file:
                        async for chunk in chunks:
                            if file.tell() + len(chunk) > self._limits.layer_bytes:
                                most = self._limits.layer_bytes
                                raise ApiError(413, f"the uploaded files have more than {most} bytes")
                            await asyncio.to_thread(file.write, chunk)
                    limits = UnpackLimits(self._limits.layer_bytes, self._limits.entries)
                    digest = await asyncio.to_thread(store_archive, self._store, folder, archive, limits)
                    await asyncio.to_thread(self._store.write_record, upload.key, {"layers": [digest]})
                await self._builder.evict()
            except ImageRefused as error:
                raise ApiError(400, f"the uploaded files are refused: {error.message}") from error
            except OSError as error:
                raise OutOfDisk(f"the uploaded files could not be stored: {error}", 30.0) from error
        self._open.pop(secret, None)


def _key(owner: Owner, files_hash: str) -> str:
    if not FILES_HASH.fullmatch(files_hash):
        raise ApiError(400, "the hash of the files must have 64 hexadecimal digits")
    return hashlib.sha256(json.dumps(["files", owner.name, files_hash]).encode()).hexdigest()
