"""What of an agent's diff reaches the tests, and what never does.

Invariants:
- No kept change touches a forbidden path: a test, a setting of the tests, what Python runs by itself at its start,
  anything of git's own, a place outside the tree. The tests stay the base's.
- Kept changes are of regular text files below a size cap.
- Whatever is dropped is recorded with its path and the reason.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from headrace.actors.evaluation.diff_text import apply_hunks, render_diff, replacement
from headrace.actors.evaluation.settings_sections import SECTIONED, with_base_sections
from headrace.actors.evaluation.unified_diff import (
    LINK_MODE,
    REGULAR_MODES,
    SUBMODULE_MODE,
    DiffRefused,
    FileDiff,
    parse_diff,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_PATH_BYTES: Final = 1024
_SETTINGS: Final = frozenset({"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini"})
_STARTUP: Final = frozenset({"sitecustomize", "usercustomize"})
_STARTUP_SUFFIXES: Final = (".pth", "._pth", "pyvenv.cfg", ".egg-info", ".dist-info", ".egg-link")
_TOOLS: Final = frozenset({"pytest", "_pytest", "pluggy", "iniconfig", "xdist", "_virtualenv"})
_MODULES: Final = (".py", ".pyc", ".so")
_TEST_NAMES: Final = ("test_*.py", "*_test.py", "tests.py")
_TEST_FOLDERS: Final = frozenset({"tests", "__tests__"})


class DropReason(StrEnum):
    """Why a change is not applied; the value is what the record says."""

    TEST = "test file"
    """A test of the task, or by its name a test: restored from the base."""
    SETTING = "test setting"
    """conftest.py, pytest.ini, tox.ini and their like; the test sections of pyproject.toml and setup.cfg."""
    STARTUP = "runs at interpreter start"
    """sitecustomize, usercustomize, *.pth, pyvenv.cfg, metadata that registers plugins."""
    TOOL = "shadows a test tool"
    """A new module that would be imported instead of pytest."""
    GIT = "belongs to git"
    """.git and what is in it, .gitattributes (filters, drivers), .gitmodules."""
    LINK = "symbolic link"
    SUBMODULE = "submodule"
    BINARY = "binary"
    SIZE = "over the size cap"
    PATH = "unsafe path"
    """Absolute, with `..` or empty parts, with control characters, or no UTF-8."""
    MODE = "no regular file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    path: str
    reason: DropReason


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterRules:
    """`test_files` are paths in the tree, files or folders, that stay the base's besides what looks like a test."""

    test_files: frozenset[str] = frozenset()
    max_file_bytes: int = 1 << 20
    max_bytes: int = 4 << 20
    max_files: int = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class FilteredDiff:
    """`diff` is what `git apply` gets."""

    diff: bytes = b""
    kept: tuple[str, ...] = ()
    dropped: tuple[Dropped, ...] = field(default=())


def filter_diff(diff: bytes, rules: FilterRules, base: Mapping[str, bytes]) -> FilteredDiff:
    """The applicable part of a hostile diff. `base` holds the old content of every file named as in
    `settings_sections.SECTIONED` that the diff changes. Raises DiffRefused."""
    files = parse_diff(diff)
    reasons: dict[str, DropReason] = {}
    kept: list[FileDiff] = []
    size = 0
    for file in files:
        reason, resolved = _resolve(file, rules, base)
        length = 0 if resolved is None else len(render_diff([resolved]))
        if length > rules.max_file_bytes or size + length > rules.max_bytes or len(kept) >= rules.max_files:
            reason, resolved = DropReason.SIZE, None
        if reason is not None:
            reasons |= dict.fromkeys(file.paths, reason)
        if resolved is not None:
            size += length
            kept.append(resolved)
    kept = _whole(files, kept)
    return FilteredDiff(
        diff=render_diff(kept),
        kept=tuple(path for file in kept for path in file.paths),
        dropped=tuple(Dropped(path=path, reason=reason) for path, reason in reasons.items()),
    )


def _resolve(
    file: FileDiff, rules: FilterRules, base: Mapping[str, bytes]
) -> tuple[DropReason | None, FileDiff | None]:
    """Why something of the change is dropped, and what of it is kept."""
    reason = reason_to_drop(file, rules)
    if reason is not None:
        return reason, None
    if not any(_basename(path) in SECTIONED for path in file.paths):
        return None, file
    resolved = _sectioned(file, base)
    return (None if resolved is file else DropReason.SETTING), resolved


def _whole(files: Iterable[FileDiff], kept: list[FileDiff]) -> list[FileDiff]:
    """Without the halves of paths that change their kind: a deletion whose creation is dropped is not what was left."""
    given = Counter(path for file in files for path in file.paths)
    left = Counter(path for file in kept for path in file.paths)
    return [file for file in kept if all(left[path] == given[path] for path in file.paths)]


def reason_to_drop(file: FileDiff, rules: FilterRules) -> DropReason | None:
    """Why this change as a whole is not applied; None when it is."""
    for path in file.paths:
        reason = reason_for_path(path, rules.test_files, new=file.old_path is None or file.moved != "")
        if reason is not None:
            return reason
    present = (mode for path, mode in ((file.old_path, file.old_mode), (file.new_path, file.new_mode)) if path)
    if LINK_MODE in file.modes:
        return DropReason.LINK
    if SUBMODULE_MODE in file.modes:
        return DropReason.SUBMODULE
    if file.binary:
        return DropReason.BINARY
    return DropReason.MODE if any(mode not in REGULAR_MODES for mode in present) else None


def reason_for_path(path: str, test_files: frozenset[str], *, new: bool) -> DropReason | None:
    """Why nothing may change at this path; None when something may. `new`: there is no file yet."""
    parts = path.split("/")
    lowered = [part.lower() for part in parts]
    if not _is_safe(path, parts):
        return DropReason.PATH
    if {".git", "git~1", ".gitattributes", ".gitmodules"} & set(lowered):
        return DropReason.GIT
    if lowered[-1] in _SETTINGS:
        return DropReason.SETTING
    stems = {part.split(".")[0] for part in lowered}
    if stems & _STARTUP or any(part.endswith(_STARTUP_SUFFIXES) for part in lowered):
        return DropReason.STARTUP
    if new and stems & _TOOLS and lowered[-1].endswith(_MODULES):
        return DropReason.TOOL
    return DropReason.TEST if is_test(path, test_files) else None


def is_test(path: str, test_files: frozenset[str]) -> bool:
    """By the task's word or by its name."""
    if any(path == test or path.startswith(test + "/") or test.startswith(path + "/") for test in test_files):
        return True
    *folders, name = path.lower().split("/")
    return bool(_TEST_FOLDERS & {*folders, name}) or any(fnmatch.fnmatchcase(name, pattern) for pattern in _TEST_NAMES)


def _is_safe(path: str, parts: list[str]) -> bool:
    if (
        not path
        or {"", ".", ".."} & set(parts)
        or "\\" in path
        or any(ord(char) < 32 or char == "\x7f" for char in path)
    ):
        return False
    try:
        return len(path.encode()) <= MAX_PATH_BYTES
    except UnicodeEncodeError:
        return False


def _basename(path: str) -> str:
    return path.rsplit("/", 1)[-1]


def _sectioned(file: FileDiff, base: Mapping[str, bytes]) -> FileDiff | None:
    """The change of a file with the base's test sections in it; None when there is no sound one."""
    if file.moved or file.binary or (file.old_path is not None and file.old_path not in base):
        return None
    before = base[file.old_path] if file.old_path is not None else b""
    try:
        after = apply_hunks(before, file.hunks)
        text = with_base_sections(_basename(file.path), before.decode(), after.decode())
    except (DiffRefused, UnicodeDecodeError):
        return None
    if text is None or (file.new_path is None and text):
        return None
    if text.encode() == after:
        return file
    if text.encode() == before and file.old_mode == file.new_mode:
        return None
    return replace(file, hunks=replacement(before, text.encode()))


def summary(dropped: Iterable[Dropped], limit: int = 12) -> str:
    """One line for the record of the rollout; empty when nothing was dropped."""
    every = list(dropped)
    if not every:
        return ""
    named = ", ".join(f"{_printable(drop.path)} ({drop.reason})" for drop in every[:limit])
    counts = Counter(drop.reason for drop in every[limit:])
    rest = ", ".join(f"{count} more: {reason}" for reason, count in counts.items())
    return f"dropped from the patch: {named}{'; ' + rest if rest else ''}"


def _printable(path: str) -> str:
    return path.encode("unicode_escape", "surrogatepass").decode("ascii")[:120]
