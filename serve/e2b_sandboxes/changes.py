"""Differences between two scans of a folder. Pure.

Invariants: the same scans always give the same events; a file with the same inode under another name was renamed, which
gives RENAME for the old name and CREATE for the new one, as with inotify.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.serve.e2b_sandboxes.entries import Entry


class Kind(StrEnum):
    """Kind of an event: filesystem.EventType."""

    CREATE = "EVENT_TYPE_CREATE"
    WRITE = "EVENT_TYPE_WRITE"
    """The content changed."""
    REMOVE = "EVENT_TYPE_REMOVE"
    RENAME = "EVENT_TYPE_RENAME"
    """The file was renamed from this name."""
    CHMOD = "EVENT_TYPE_CHMOD"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One event. `name` is relative to the watched folder; `entry` is the current file."""

    kind: Kind
    name: str
    entry: Entry | None = None


def changes(before: Mapping[str, Entry], after: Mapping[str, Entry]) -> list[Change]:
    """Return the events between two scans, which are entries by relative name."""
    gone = [name for name in before if name not in after]
    new = [name for name in after if name not in before]
    new_inodes = {after[name].inode for name in new}
    events = [Change(kind=Kind.RENAME if before[name].inode in new_inodes else Kind.REMOVE, name=name) for name in gone]
    gone_inodes = {before[name].inode for name in gone}
    for name in new:
        entry = after[name]
        events.append(Change(kind=Kind.CREATE, name=name, entry=entry))
        if entry.kind == "f" and entry.size_bytes and entry.inode not in gone_inodes:
            events.append(Change(kind=Kind.WRITE, name=name, entry=entry))
    for name, entry in after.items():
        if (old := before.get(name)) is not None:
            events += _differences(name, old, entry)
    return events


def _differences(name: str, old: Entry, new: Entry) -> list[Change]:
    if old.inode != new.inode or old.kind != new.kind:
        # Replaced by another file of that name, as editors write.
        written = [Change(kind=Kind.WRITE, name=name, entry=new)] if new.kind == "f" else []
        return [Change(kind=Kind.CREATE, name=name, entry=new), *written]
    events = []
    if new.kind == "f" and (old.size_bytes, old.modified_at) != (new.size_bytes, new.modified_at):
        events.append(Change(kind=Kind.WRITE, name=name, entry=new))
    if (old.mode, old.owner, old.group) != (new.mode, new.owner, new.group):
        events.append(Change(kind=Kind.CHMOD, name=name, entry=new))
    return events
