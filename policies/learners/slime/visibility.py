"""Check that all nodes see the folders of a run, by token files, before the first step.

An export or a checkpoint of several nodes is complete only if each node's files appear in one folder. Where a folder is
local to a node, every rank writes its part without an error, and the result lacks the others'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.policies.errors import LearnerSettingsInvalid


def leave_token(folder: Path, name: str, token: str) -> None:
    """Write a node's token file. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _file(name)).write_text(token, encoding="utf-8")


def unseen(folder: Path, names: Sequence[str], token: str) -> list[str]:
    """Return the names of the nodes whose token files this node does not see."""

    def seen(name: str) -> bool:
        try:
            return (folder / _file(name)).read_text(encoding="utf-8") == token
        except OSError:
            return False

    return [name for name in names if not seen(name)]


def remove_tokens(folder: Path, names: Sequence[str]) -> None:
    """Remove the token files that this node sees."""
    for name in names:
        (folder / _file(name)).unlink(missing_ok=True)


def refuse_unseen(folder: Path, unseen_by: Mapping[str, Sequence[str]]) -> None:
    """Raise LearnerSettingsInvalid if a node does not see what another wrote."""
    for reader, writers in unseen_by.items():
        if writers:
            raise LearnerSettingsInvalid(
                f"{folder}: {reader} does not see what {writers[0]} wrote there: put the run directory on storage that "
                "all nodes mount at the same path"
            )


def _file(name: str) -> str:
    return f".visible-{name}"
