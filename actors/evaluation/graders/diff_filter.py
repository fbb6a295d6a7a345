"""The filter of agents' diffs, which drops every change that could tamper with the tests.

Invariants:
- No kept change touches a forbidden path: a test, a test setting, a file that Python runs at startup, one of git's own
  files, or a path outside the tree. The tests are always those of the base.
- Kept changes affect only regular text files below a size cap.
- Every dropped change is recorded with its path and the reason.
- For a file with test sections, the result is provably the patched file with the base's test sections. Where that
  cannot be proven (unusual spellings of a section, a file that does not parse), there is no result, and the whole
  change is dropped.
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from headrace.actors.evaluation.graders.diff_text import apply_hunks, render_diff, replacement
from headrace.buffer.tasks.unified_diff import (
    LINK_MODE,
    REGULAR_MODES,
    SUBMODULE_MODE,
    DiffRefused,
    FileDiff,
    parse_diff,
    with_last_line_end,
)

MAX_PATH_BYTES: Final = 1024
_SETTINGS: Final = frozenset({"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini"})
_STARTUP: Final = frozenset({"sitecustomize", "usercustomize"})
_STARTUP_SUFFIXES: Final = (".pth", "._pth", "pyvenv.cfg", ".egg-info", ".dist-info", ".egg-link")
_TOOLS: Final = frozenset({"pytest", "_pytest", "pluggy", "iniconfig", "xdist", "_virtualenv"})
_MODULES: Final = (".py", ".pyc", ".so")
_TEST_NAMES: Final = ("test_*.py", "*_test.py", "tests.py")
_TEST_FOLDERS: Final = frozenset({"tests", "__tests__"})
_GIT_NAME = re.compile(r"(\.git|git~1)[ .]*(:.*)?|\.gitattributes|\.gitmodules", re.DOTALL)
"""Lower-case names of git's files. The first two are those that git refuses with core.protectNTFS (is_ntfs_dotgit)."""

PYPROJECT: Final = "pyproject.toml"
SETUP_CFG: Final = "setup.cfg"
SECTIONED: Final = (PYPROJECT, SETUP_CFG)
"""Names of files that can contain both test sections and other sections."""

_MAX_DOTS: Final = 100
"""Maximum number of dots in a line of TOML: the time of tomllib is quadratic in the parts of a key."""
# Only one way to match each text: with blanks in several parts the time would be cubic in the length of a line.
_TOML_HEADER = re.compile(r"\s*\[\[?([^\[\]]+)\]\]?\s*(?:#.*)?")
_INI_HEADER = re.compile(r"\[([^\[\]]+)\]")
_INI_SECTIONS: Final = ("tool:pytest", "pytest")


def with_base_sections(name: str, base: str, new: str) -> str | None:
    """Return `new` with the test sections of `base`, or None if the result cannot be proven correct. `name` is one of
    SECTIONED."""
    if name == SETUP_CFG:
        for line in f"{base}\n{new}".split("\n"):
            # Some parser could read such a line as a test section although it is not written as one.
            named = line.strip().startswith("[") and "pytest" in line.lower()
            if (named and line not in [f"[{section}]" for section in _INI_SECTIONS]) or "\r" in line or "\f" in line:
                return None
        wanted = [text for header, text in _chunks(base, _INI_HEADER) if header in _INI_SECTIONS]
        if wanted == [text for header, text in _chunks(new, _INI_HEADER) if header in _INI_SECTIONS]:
            return new
        rest = [text for header, text in _chunks(new, _INI_HEADER) if header not in _INI_SECTIONS]
        return "".join(map(with_last_line_end, rest + wanted))
    before, after = _parse_toml(base), _parse_toml(new)
    if before is None or after is None:
        return None
    if before[1] == after[1]:
        return new
    own = [text for header, text in _chunks(new, _TOML_HEADER) if not _is_test_table(header)]
    tests = [text for header, text in _chunks(base, _TOML_HEADER) if _is_test_table(header)]
    spliced = "".join(map(with_last_line_end, own + tests))
    return spliced if _parse_toml(spliced) == (after[0], before[1]) else None


def _parse_toml(text: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Parse a document into the part without test tables and the test tables. Returns None if it does not parse."""
    if any(line.count(".") > _MAX_DOTS for line in text.split("\n")):
        return None
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError):
        # A plain ValueError for an integer of more than 4,300 digits.
        return None
    tool = document.get("tool")
    if not isinstance(tool, dict):
        return document, {}
    tests = {key: value for key, value in tool.items() if key.startswith("pytest")}
    rest = {key: value for key, value in tool.items() if key not in tests}
    others = {key: value for key, value in document.items() if key != "tool"}
    return (others | {"tool": rest} if rest else others), tests


def _is_test_table(header: str) -> bool:
    parts = [part.strip().strip("\"'") for part in header.split(".")]
    return parts[0] == "tool" and len(parts) > 1 and parts[1].startswith("pytest")


def _chunks(text: str, header: re.Pattern[str]) -> list[tuple[str, str]]:
    """Split the text before every header line into pairs (section name, section text including its header)."""
    chunks: list[tuple[str, list[str]]] = [("", [])]
    for line in text.splitlines(keepends=True):
        match = header.fullmatch(line.rstrip("\n"))
        if match:
            chunks.append((match[1], []))
        chunks[-1][1].append(line)
    return [(name, "".join(lines)) for name, lines in chunks]


class DropReason(StrEnum):
    """Recorded reason for dropping a change."""

    TEST = "test file"
    """One of the task's tests, or a file whose name marks it as a test; restored from the base."""
    SETTING = "test setting"
    """conftest.py, pytest.ini, tox.ini and similar files; the test sections of pyproject.toml and setup.cfg."""
    STARTUP = "runs at interpreter start"
    """sitecustomize, usercustomize, *.pth, pyvenv.cfg, metadata that registers plugins."""
    TOOL = "shadows a test tool"
    """A new module that would be imported instead of pytest."""
    GIT = "belongs to git"
    """.git and its contents, .gitattributes (filters, drivers), .gitmodules."""
    LINK = "symbolic link"
    SUBMODULE = "submodule"
    BINARY = "binary"
    SIZE = "over the size cap"
    PATH = "unsafe path"
    """A path that is absolute, that contains `..`, empty parts or control characters, or that is not UTF-8."""
    MODE = "no regular file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    path: str
    reason: DropReason


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterRules:
    """Rules of the filter. `test_files` are files or folders in the tree that keep their base content, in addition to
    paths that look like tests. With `new_names`, new files outside of folders of tests that only have the name of one
    are kept, and the tests must not collect them."""

    test_files: frozenset[str] = frozenset()
    new_names: bool = False
    max_file_bytes: int = 1 << 20
    max_bytes: int = 4 << 20
    max_files: int = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class FilteredDiff:
    """Result of the filter; `diff` can be passed to `git apply`."""

    diff: bytes = b""
    kept: tuple[str, ...] = ()
    dropped: tuple[Dropped, ...] = field(default=())
    uncollected: tuple[str, ...] = ()
    """Kept files with the name of a test."""


def filter_diff(diff: bytes, rules: FilterRules, base: Mapping[str, bytes]) -> FilteredDiff:
    """Return the part of a hostile diff that may be applied. `base` holds the old content of every changed file named
    in `SECTIONED`. Raises DiffRefused."""
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
    paths = tuple(path for file in kept for path in file.paths)
    return FilteredDiff(
        diff=render_diff(kept),
        kept=paths,
        dropped=tuple(Dropped(path=path, reason=reason) for path, reason in reasons.items()),
        uncollected=tuple(path for path in paths if is_test(path, rules.test_files)),
    )


def reason_to_drop(file: FileDiff, rules: FilterRules) -> DropReason | None:
    """Return the reason to drop a whole change, or None to keep it."""
    for path in file.paths:
        reason = reason_for_path(path, rules.test_files, new=file.old_path is None or file.moved != "")
        if reason is DropReason.TEST and rules.new_names and _has_only_the_name(file, rules.test_files):
            continue
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
    """Return the reason why a path may not change, or None if it may. `new` is True if the path does not exist in the
    base."""
    parts = path.split("/")
    lowered = [part.lower() for part in parts]
    unsafe = {"", ".", ".."} & set(parts) or "\\" in path or any(ord(char) < 32 or char == "\x7f" for char in path)
    try:
        if unsafe or len(path.encode()) > MAX_PATH_BYTES:
            return DropReason.PATH
    except UnicodeEncodeError:
        return DropReason.PATH
    if any(map(_GIT_NAME.fullmatch, lowered)):
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
    """Return True for one of the task's test files, or for a path whose name marks it as a test."""
    name = _basename(path.lower())
    return _is_kept(path, test_files) or any(fnmatch.fnmatchcase(name, pattern) for pattern in _TEST_NAMES)


def _is_kept(path: str, test_files: frozenset[str]) -> bool:
    if any(path == test or path.startswith(test + "/") or test.startswith(path + "/") for test in test_files):
        return True
    return bool(_TEST_FOLDERS & {*path.lower().split("/")})


def _has_only_the_name(file: FileDiff, test_files: frozenset[str]) -> bool:
    """Return whether a new file has the name of a test, but of none that exists, and is in no folder of tests."""
    if file.old_path is not None or file.moved or _is_kept(file.path, test_files):
        return False
    return _basename(file.path).lower() not in {_basename(path).lower() for path in test_files}


def _basename(path: str) -> str:
    return path.rsplit("/", 1)[-1]


def _with_base_tests(file: FileDiff, base: Mapping[str, bytes]) -> FileDiff | None:
    """Return the change with the base's test sections, or None if that cannot be done soundly."""
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
    """Return a one-line summary for the rollout's record; empty if nothing was dropped."""
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
