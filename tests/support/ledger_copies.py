"""Copies of a ledger on a storage."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from headrace.buffer.errors import LedgerRefused
from headrace.buffer.ledger.copies import CopyRef, copied_versions, copies_folder, read_copy


def newest_copy(storage: Path) -> CopyRef | None:
    """Return the newest copy with a readable manifest; None if there is none."""
    for version in reversed(copied_versions(storage)):
        with suppress(LedgerRefused):
            return read_copy(copies_folder(storage) / str(version))
    return None
