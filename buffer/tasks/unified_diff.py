"""The parser of git's unified diffs (git-diff(1), "generating patch text with -p").

Invariants:
- Parsing is strict: text that is not exactly in git's diff format is refused as a whole.
- The lines of a hunk are counted, so text in a hunk that looks like a header is still treated as text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

REGULAR_MODES: Final = ("100644", "100755")
LINK_MODE: Final = "120000"
SUBMODULE_MODE: Final = "160000"
NO_END: Final = b"\\ No newline at end of file"

_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
_INDEX = re.compile(rb"index ([0-9a-f]{4,64})\.\.([0-9a-f]{4,64})(?: (\d{6}))?")
ESCAPES: Final = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, '"': 34, "\\": 92}
_ESCAPE = re.compile(r'\\(?:([0-3][0-7]{2})|([abtnvfr"\\]))')


class DiffRefused(Exception):
    """The text is not a valid git diff."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunk:
    """One hunk. `lines` have no line endings and start with a space, plus, minus or backslash."""

    old_start: int
    old_count: int
    new_start: int
    new_count: int
    lines: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDiff:
    """Change to one file. A path is None if the file does not exist on that side; bytes that are not UTF-8 are
    represented as surrogates."""

    old_path: str | None
    new_path: str | None
    old_mode: str | None = None
    new_mode: str | None = None
    blobs: tuple[str, str] | None = None
    """Object names before and after the change; `git apply --3way` looks up the first one."""
    hunks: tuple[Hunk, ...] = ()
    binary: bool = False
    has_data: bool = True
    """False for a binary change that is only mentioned, and cannot be applied."""
    moved: str = ""
    """`rename` or `copy` if the paths differ."""

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(path for path in (self.old_path, self.new_path) if path is not None))

    @property
    def path(self) -> str:
        return self.paths[-1]

    @property
    def modes(self) -> tuple[str, ...]:
        return tuple(mode for mode in (self.old_mode, self.new_mode) if mode is not None)


def parse_diff(diff: bytes) -> tuple[FileDiff, ...]:
    """Parse the files of a diff, in order. Raises DiffRefused."""
    lines = diff.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    reader = _Reader(lines)
    files = []
    while not reader.at_end():
        if not reader.peek():
            reader.take()  # between files, and at the end, git passes blank lines over
            continue
        if not reader.peek().startswith(b"diff --git "):
            raise reader.refuse("not a `diff --git` line")
        paths = reader.take().removeprefix(b"diff --git ")
        header = _Header()
        while not reader.at_end() and not reader.peek().startswith((b"diff --git ", b"@@ ")):
            if not header.take(reader.peek()):
                raise reader.refuse("unknown header line")
            reader.take()
        hunks = []
        while reader.peek().startswith(b"@@ "):
            hunks.append(_parse_hunk(reader))
        files.append(header.file_diff(_header_paths(paths), tuple(hunks)))
    return tuple(files)


class _Reader:
    """Line reader that keeps its position."""

    def __init__(self, lines: list[bytes]) -> None:
        self._lines = lines
        self._place = 0

    def at_end(self) -> bool:
        return self._place >= len(self._lines)

    def peek(self) -> bytes:
        return b"" if self.at_end() else self._lines[self._place]

    def take(self) -> bytes:
        line = self.peek()
        self._place += 1
        return line

    def refuse(self, reason: str) -> DiffRefused:
        return DiffRefused(f"line {self._place + 1} of the diff: {reason}: {self.peek()[:80]!r}")


class _Header:
    """Extended header of one file."""

    def __init__(self) -> None:
        self.modes: dict[str, str] = {}
        self.moves: dict[str, str] = {}
        self.sides: dict[str, str | None] = {}
        self.blobs: tuple[str, str] | None = None
        self.binary, self.has_data = False, True

    def take(self, line: bytes) -> bool:
        """Read one line. Returns False if it is not a git header line."""
        for word in (b"old mode ", b"new mode ", b"deleted file mode ", b"new file mode "):
            if line.startswith(word) and re.fullmatch(rb"\d{6}", line.removeprefix(word)):
                self.modes[word.decode().strip()] = line.removeprefix(word).decode()
                return True
        for word in (b"rename from ", b"rename to ", b"copy from ", b"copy to "):
            if line.startswith(word):
                self.moves[word.decode().strip()] = unquote(line.removeprefix(word))
                return True
        for word in (b"--- ", b"+++ "):
            if line.startswith(word):
                # Git ends a name that has blanks with a tab.
                name = line.removeprefix(word)
                path = None if name == b"/dev/null" else _without_prefix(unquote(name.removesuffix(b"\t")))
                self.sides[word.decode().strip()] = path
                return True
        if match := _INDEX.fullmatch(line):
            self.blobs = (match[1].decode(), match[2].decode())
            if match[3]:
                self.modes["old mode"] = self.modes["new mode"] = match[3].decode()
            return True
        if line.startswith((b"Binary files ", b"GIT binary patch")):
            self.binary, self.has_data = True, line.startswith(b"GIT")
            return True
        return self.binary or re.fullmatch(rb"(dis)?similarity index \d{1,3}%", line) is not None

    def file_diff(self, header: tuple[str, str] | None, hunks: tuple[Hunk, ...]) -> FileDiff:
        """Return the change. Raises DiffRefused if header lines contradict each other or name no file."""
        created, deleted = "new file mode" in self.modes, "deleted file mode" in self.modes
        moved = next((word for word in ("rename", "copy") if f"{word} from" in self.moves), "")
        if moved:
            names = (self.moves.get(f"{moved} from"), self.moves.get(f"{moved} to"))
        elif self.sides:
            names = (self.sides.get("---"), self.sides.get("+++"))
        elif header is not None:
            names = (None if created else header[0], None if deleted else header[1])
        else:
            names = (None, None)
        if created or deleted:
            contradicts = bool(moved) or (names[0] is None) != created or (names[1] is None) != deleted
        else:
            contradicts = None in names or (names[0] != names[1]) != bool(moved)
        if contradicts:
            raise DiffRefused(f"the header lines of {names[1] or names[0]!r} contradict each other")
        if hunks and not self.sides and not self.binary:
            raise DiffRefused(f"hunks of {names[1] or names[0]!r} without file names")
        return FileDiff(
            old_path=names[0],
            new_path=names[1],
            old_mode=self.modes.get("deleted file mode", self.modes.get("old mode")),
            new_mode=self.modes.get("new file mode", self.modes.get("new mode")),
            blobs=self.blobs,
            hunks=hunks,
            binary=self.binary,
            has_data=self.has_data,
            moved=moved,
        )


def _header_paths(text: bytes) -> tuple[str, str] | None:
    """Return both paths of a `diff --git` line if they are quoted or equal, or None if only other lines can determine
    them."""
    if text.startswith(b'"'):
        match = re.fullmatch(rb'("(?:[^"\\]|\\.)*") (".*"|[^"].*)', text)
        return None if match is None else (_without_prefix(unquote(match[1])), _without_prefix(unquote(match[2])))
    half = len(text) // 2
    first, second = text[:half], text[half + 1 :]
    if text[half : half + 1] != b" " or first.split(b"/", 1)[1:] != second.split(b"/", 1)[1:]:
        return None
    return _without_prefix(unquote(first)), _without_prefix(unquote(second))


def _without_prefix(name: str) -> str:
    """Return the path after `a/` or `b/`."""
    prefix, _, path = name.partition("/")
    if prefix not in ("a", "b") or not path:
        raise DiffRefused(f"{name[:80]!r} does not start with a/ or b/")
    return path


def unquote(text: bytes) -> str:
    """Parse a name in git's notation, C-quoted or plain (core.quotePath). Raises DiffRefused."""
    name = text.decode("utf-8", "surrogateescape")
    if not name.startswith('"'):
        return name
    body = name[1:-1]
    if len(name) < 2 or not name.endswith('"') or re.search(r'[\\"]', _ESCAPE.sub("", body)):
        raise DiffRefused(f"{name[:80]!r} is not validly quoted")
    raw = _ESCAPE.sub(_escaped, body.encode("utf-8", "surrogateescape").decode("latin-1"))
    return raw.encode("latin-1").decode("utf-8", "surrogateescape")


def _escaped(match: re.Match[str]) -> str:
    return chr(int(match[1], 8)) if match[1] else chr(ESCAPES[match[2]])


def _parse_hunk(reader: _Reader) -> Hunk:
    match = _HUNK.match(reader.peek())
    if match is None:
        raise reader.refuse("a hunk header without line numbers")
    reader.take()
    old_start, new_start = int(match[1]), int(match[3])
    old_count, new_count = int(match[2] or 1), int(match[4] or 1)
    old_left, new_left = old_count, new_count
    lines: list[bytes] = []
    while old_left or new_left or reader.peek().startswith(b"\\"):
        # Editors strip the blank of an empty context line; git accepts that.
        line = reader.peek() or b" "
        kind = line[:1]
        if reader.at_end() or kind not in (b" ", b"+", b"-", b"\\"):
            raise reader.refuse("a hunk is shorter than its header says")
        old_left -= kind in b" -"
        new_left -= kind in b" +"
        if min(old_left, new_left) < 0 or (kind == b"\\" and (not lines or line != NO_END)):
            raise reader.refuse("a hunk differs from its header")
        reader.take()
        lines.append(line)
    return Hunk(old_start=old_start, old_count=old_count, new_start=new_start, new_count=new_count, lines=tuple(lines))


def with_last_line_end(text: str) -> str:
    """Return a text with the last line end, which git needs and data sets strip from patches."""
    return text if not text or text.endswith("\n") else text + "\n"


def why_not_applicable(diff: str) -> str | None:
    """Return the reason why git could not apply a diff to any tree, or None if it is well-formed."""
    try:
        files = parse_diff(diff.encode("utf-8", "surrogateescape"))
    except DiffRefused as error:
        return str(error)
    if not files:
        return "it has no `diff --git` line"
    return next((f"the change of the binary file {file.path} has no data" for file in files if not file.has_data), None)
