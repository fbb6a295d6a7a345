"""Git's unified diffs as data, read per file (git-diff(1), "generating patch text with -p").

Invariants:
- Parsing is strict: whatever is not exactly a diff of git's is refused as a whole, so nothing slips by half understood.
- The lines of a hunk are counted, never guessed: text that looks like a header stays text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

REGULAR_MODES: Final = ("100644", "100755")
LINK_MODE: Final = "120000"
SUBMODULE_MODE: Final = "160000"
NO_END: Final = b"\\ No newline at end of file"

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_INDEX = re.compile(rb"index ([0-9a-f]{4,64})\.\.([0-9a-f]{4,64})(?: (\d{6}))?")
ESCAPES: Final = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, '"': 34, "\\": 92}
_ESCAPE = re.compile(r'\\(?:([0-3][0-7]{2})|([abtnvfr"\\]))')


class DiffRefused(Exception):
    """The text is no diff of git's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunk:
    """`lines` without line ends, each with its first character: blank, plus, minus or backslash."""

    old_start: int
    old_count: int
    new_start: int
    new_count: int
    lines: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDiff:
    """The change of one file. A path of None: not there on that side. Bytes that are no UTF-8 are surrogates."""

    old_path: str | None
    new_path: str | None
    old_mode: str | None = None
    new_mode: str | None = None
    blobs: tuple[str, str] | None = None
    """Object names before and after; `git apply --3way` looks the first one up."""
    hunks: tuple[Hunk, ...] = ()
    binary: bool = False
    moved: str = ""
    """`rename` or `copy` when the paths differ."""

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
    """The files of a diff in their order. Raises DiffRefused."""
    lines = diff.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    reader = _Reader(lines)
    files = []
    while not reader.at_end():
        files.append(_parse_file(reader))
    return tuple(files)


class _Reader:
    """Lines with a place."""

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


def _parse_file(reader: _Reader) -> FileDiff:
    if not reader.peek().startswith(b"diff --git "):
        raise reader.refuse("no `diff --git` line")
    header = reader.take().removeprefix(b"diff --git ")
    named = _Named()
    while not reader.at_end() and not reader.peek().startswith((b"diff --git ", b"@@ ")):
        if not named.take(reader.peek()):
            raise reader.refuse("an unknown header line")
        reader.take()
    hunks = []
    while reader.peek().startswith(b"@@ "):
        hunks.append(_parse_hunk(reader))
    return named.file_diff(_header_paths(header), tuple(hunks))


class _Named:
    """What the extended header of one file says."""

    def __init__(self) -> None:
        self.modes: dict[str, str] = {}
        self.moves: dict[str, str] = {}
        self.sides: dict[str, str | None] = {}
        self.blobs: tuple[str, str] | None = None
        self.binary = False

    def take(self, line: bytes) -> bool:
        """False when the line is none of git's."""
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
                self.sides[word.decode().strip()] = _side(line.removeprefix(word))
                return True
        if match := _INDEX.fullmatch(line):
            self.blobs = (match[1].decode(), match[2].decode())
            if match[3]:
                self.modes["old mode"] = self.modes["new mode"] = match[3].decode()
            return True
        if line.startswith((b"Binary files ", b"GIT binary patch")):
            self.binary = True
            return True
        return self.binary or re.fullmatch(rb"(dis)?similarity index \d{1,3}%", line) is not None

    def file_diff(self, header: tuple[str, str] | None, hunks: tuple[Hunk, ...]) -> FileDiff:
        """Raises DiffRefused when the lines contradict each other or name no file."""
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
        if self._contradicts(names, created=created, deleted=deleted, moved=bool(moved)):
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
            moved=moved,
        )

    @staticmethod
    def _contradicts(names: tuple[str | None, str | None], *, created: bool, deleted: bool, moved: bool) -> bool:
        if created or deleted:
            return moved or (names[0] is None) != created or (names[1] is None) != deleted
        return None in names or (names[0] != names[1]) != moved


def _side(text: bytes) -> str | None:
    """The path of a `---` or `+++` line; git ends a name with blanks in it with a tab."""
    if text == b"/dev/null":
        return None
    return _without_prefix(unquote(text.removesuffix(b"\t")))


def _header_paths(text: bytes) -> tuple[str, str] | None:
    """Both paths of a `diff --git` line, where they are quoted or equal; None where only other lines can tell."""
    if text.startswith(b'"'):
        match = re.fullmatch(rb'("(?:[^"\\]|\\.)*") (".*"|[^"].*)', text)
        return None if match is None else (_without_prefix(unquote(match[1])), _without_prefix(unquote(match[2])))
    half = len(text) // 2
    first, second = text[:half], text[half + 1 :]
    if text[half : half + 1] != b" " or first.split(b"/", 1)[1:] != second.split(b"/", 1)[1:]:
        return None
    return _without_prefix(unquote(first)), _without_prefix(unquote(second))


def _without_prefix(name: str) -> str:
    """The path after git's `a/` or `b/`."""
    prefix, _, path = name.partition("/")
    if prefix not in ("a", "b") or not path:
        raise DiffRefused(f"{name[:80]!r} does not begin with a/ or b/")
    return path


def unquote(text: bytes) -> str:
    """A name as git writes it, C-quoted or plain (core.quotePath). Raises DiffRefused."""
    name = text.decode("utf-8", "surrogateescape")
    if not name.startswith('"'):
        return name
    body = name[1:-1]
    if len(name) < 2 or not name.endswith('"') or re.search(r'[\\"]', _ESCAPE.sub("", body)):
        raise DiffRefused(f"{name[:80]!r} is badly quoted")
    raw = _ESCAPE.sub(_escaped, body.encode("utf-8", "surrogateescape").decode("latin-1"))
    return raw.encode("latin-1").decode("utf-8", "surrogateescape")


def _escaped(match: re.Match[str]) -> str:
    return chr(int(match[1], 8)) if match[1] else chr(ESCAPES[match[2]])


def _parse_hunk(reader: _Reader) -> Hunk:
    match = _HUNK.match(reader.peek())
    if match is None:
        raise reader.refuse("a hunk without its numbers")
    reader.take()
    old_start, new_start = int(match[1]), int(match[3])
    old_count, new_count = int(match[2] or 1), int(match[4] or 1)
    old_left, new_left = old_count, new_count
    lines: list[bytes] = []
    while old_left or new_left or reader.peek().startswith(b"\\"):
        # Editors strip the blank of an empty context line; git takes it as one.
        line = reader.peek() or b" "
        kind = line[:1]
        if reader.at_end() or kind not in (b" ", b"+", b"-", b"\\"):
            raise reader.refuse("a hunk that is shorter than it says")
        old_left -= kind in b" -"
        new_left -= kind in b" +"
        if min(old_left, new_left) < 0 or (kind == b"\\" and (not lines or line != NO_END)):
            raise reader.refuse("a hunk that differs from what it says")
        reader.take()
        lines.append(line)
    return Hunk(old_start=old_start, old_count=old_count, new_start=new_start, new_count=new_count, lines=tuple(lines))
