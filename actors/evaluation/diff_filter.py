"""The filter of agents' diffs, which drops every change that could tamper with the tests.

Invariants:
- No kept change touches a forbidden path: a test, a test setting, a file that Python runs at startup, a file of git, or
  a path outside the tree. The tests stay those of the base.
- Kept changes are of regular text files below a size cap.
- Every dropped change is recorded with its path and the reason.
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
    """Reason for dropping a change, as recorded."""

    TEST = "test file"
    """Test of the task, or a test by its name; restored from the base."""
    SETTING = "test setting"
    """conftest.py, pytest.ini, tox.ini and similar files; the test sections of pyproject.toml and setup.cfg."""
    STARTUP = "runs at interpreter start"
    """sitecustomize, usercustomize, *.pth, pyvenv.cfg, metadata that registers plugins."""
    TOOL = "shadows a test tool"
    """A new module that would be imported instead of pytest."""
    GIT = "belongs to git"
    """.git and files in it, .gitattributes (filters, drivers), .gitmodules."""
    LINK = "symbolic link"
    SUBMODULE = "submodule"
    BINARY = "binary"
    SIZE = "over the size cap"
    PATH = "unsafe path"
    """Absolute, with `..` or empty parts, with control characters, or not UTF-8."""
    MODE = "no regular file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    path: str
    reason: DropReason


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterRules:
    """Rules of the filter. `test_files` are files or folders in the tree that stay those of the base, in addition to
    paths that look like tests."""

    test_files: frozenset[str] = frozenset()
    max_file_bytes: int = 1 << 20
    max_bytes: int = 4 << 20
    max_files: int = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class FilteredDiff:
    """Result of the filter; `diff` is the input of `git apply`."""

    diff: bytes = b""
    kept: tuple[str, ...] = ()
    dropped: tuple[Dropped, ...] = field(default=())


def filter_diff(diff: bytes, rules: FilterRules, base: Mapping[str, bytes]) -> FilteredDiff:
    """Return the applicable part of a hostile diff. `base` holds the old content of every changed file named in
    `settings_sections.SECTIONED`. Raises DiffRefused."""
    files = parse_diff(diff)
    reasons: dict[str, DropReason] = {}
    kept: list[FileDiff] = []
    size = 0
    for file in files:
        reason = reason_to_drop(file, rules)
        resolved = file if reason is None else None
        if resolved is not None and any(_basename(path) in SECTIONED for path in file.paths):
            resolved = _with_base_tests(file, base)
            reason = None if resolved is file else DropReason.SETTING
        length = 0 if resolved is None else len(render_diff([resolved]))
        if length > rules.max_file_bytes or size + length > rules.max_bytes or len(kept) >= rules.max_files:
            reason, resolved = DropReason.SIZE, None
        if reason is not None:
            reasons |= dict.fromkeys(file.paths, reason)
        if resolved is not None:
            size += length
            kept.append(resolved)
    # A path that changes its kind is a deletion and a creation: without one half the other is dropped too.
    given = Counter(path for file in files for path in file.paths)
    left = Counter(path for file in kept for path in file.paths)
    kept = [file for file in kept if all(left[path] == given[path] for path in file.paths)]
    return FilteredDiff(
        diff=render_diff(kept),
        kept=tuple(path for file in kept for path in file.paths),
        dropped=tuple(Dropped(path=path, reason=reason) for path, reason in reasons.items()),
    )


def reason_to_drop(file: FileDiff, rules: FilterRules) -> DropReason | None:
    """Return the reason to drop a whole change, None to keep it."""
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
    """Return the reason why a path may not change, None if it may. `new`: the path does not exist in the base."""
    parts = path.split("/")
    lowered = [part.lower() for part in parts]
    unsafe = {"", ".", ".."} & set(parts) or "\\" in path or any(ord(char) < 32 or char == "\x7f" for char in path)
    try:
        if unsafe or len(path.encode()) > MAX_PATH_BYTES:
            return DropReason.PATH
    except UnicodeEncodeError:
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
    """Return True for a test file of the task, or a test by its name."""
    if any(path == test or path.startswith(test + "/") or test.startswith(path + "/") for test in test_files):
        return True
    *folders, name = path.lower().split("/")
    return bool(_TEST_FOLDERS & {*folders, name}) or any(fnmatch.fnmatchcase(name, pattern) for pattern in _TEST_NAMES)


def _basename(path: str) -> str:
    return path.rsplit("/", 1)[-1]


def _with_base_tests(file: FileDiff, base: Mapping[str, bytes]) -> FileDiff | None:
    """Return the change with the test sections of the base; None if there is no sound one."""
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
    """Return one line for the record of the rollout; empty if nothing was dropped."""
    every = list(dropped)
    if not every:
        return ""
    shown = (
        (drop.path.encode("unicode_escape", "surrogatepass").decode("ascii")[:120], drop) for drop in every[:limit]
    )
    named = ", ".join(f"{path} ({drop.reason})" for path, drop in shown)
    counts = Counter(drop.reason for drop in every[limit:])
    rest = ", ".join(f"{count} more: {reason}" for reason, count in counts.items())
    return f"dropped from the patch: {named}{'; ' + rest if rest else ''}"
