"""The renderer of file diffs, either as input for `git apply` or as a file's patched text.

Invariant: only parsed fields are written; no line of a hostile diff is copied.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from headrace.buffer.tasks.unified_diff import ESCAPES, NO_END, DiffRefused, FileDiff, Hunk

_NO_BLOBS: Final = ("0000000", "0000000")


def render_diff(files: Iterable[FileDiff]) -> bytes:
    """Return the diff as input for `git apply`, omitting binary files."""
    lines: list[bytes] = []
    for file in files:
        if file.binary:
            continue
        old, new = (file.old_path or file.path), (file.new_path or file.path)
        lines += [b"diff --git " + _prefixed("a", old) + b" " + _prefixed("b", new)]
        if file.old_path is None:
            lines.append(f"new file mode {file.new_mode}".encode())
        elif file.new_path is None:
            lines.append(f"deleted file mode {file.old_mode}".encode())
        elif file.old_mode != file.new_mode:
            lines += [f"old mode {file.old_mode}".encode(), f"new mode {file.new_mode}".encode()]
        if file.moved:
            lines += [f"{file.moved} from ".encode() + quote(old), f"{file.moved} to ".encode() + quote(new)]
        same = file.old_mode if file.old_mode == file.new_mode else None
        if file.blobs is not None or same is not None:
            # The mode here makes `git apply` refuse a file that is of another kind in the tree.
            blobs = "..".join(file.blobs or _NO_BLOBS)
            lines.append(f"index {blobs}{f' {same}' if same else ''}".encode())
        if file.hunks:
            lines.append(b"--- " + (b"/dev/null" if file.old_path is None else _side_name("a", old)))
            lines.append(b"+++ " + (b"/dev/null" if file.new_path is None else _side_name("b", new)))
        for hunk in file.hunks:
            lines.append(f"@@ -{hunk.old_start},{hunk.old_count} +{hunk.new_start},{hunk.new_count} @@".encode())
            lines += hunk.lines
    return b"".join(line + b"\n" for line in lines)


def _prefixed(prefix: str, path: str) -> bytes:
    return quote(f"{prefix}/{path}")


def _side_name(prefix: str, path: str) -> bytes:
    return _prefixed(prefix, path) + (b"\t" if " " in path and quote(path) == path.encode() else b"")


def quote(path: str) -> bytes:
    """Quote a path as git does with core.quotePath."""
    raw = path.encode("utf-8", "surrogateescape")
    if all(32 <= byte < 127 and byte not in b'"\\' for byte in raw):
        return raw
    named = {code: letter for letter, code in ESCAPES.items()}
    parts = [
        f"\\{named[byte]}" if byte in named else chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}" for byte in raw
    ]
    return f'"{"".join(parts)}"'.encode()


def apply_hunks(before: bytes, hunks: Iterable[Hunk]) -> bytes:
    """Apply hunks to a text. Raises DiffRefused if one does not match the text exactly at its line."""
    old = _split_lines(before)
    new: list[bytes] = []
    place = 0
    for hunk in hunks:
        start = hunk.old_start - (1 if hunk.old_count else 0)
        if not place <= start <= len(old):
            raise DiffRefused(f"a hunk at line {hunk.old_start} is outside the file")
        new += old[place:start]
        removed: list[bytes] = []
        added: list[bytes] = []
        touched: list[list[bytes]] = []
        for line in hunk.lines:
            if line.startswith(b"\\"):
                # "No newline at end of file" is about the line before, on each of its sides.
                for side in touched:
                    side[-1] = side[-1].removesuffix(b"\n")
                continue
            touched = [side for side, kinds in ((removed, b" -"), (added, b" +")) if line[:1] in kinds]
            for side in touched:
                side.append(line[1:] + b"\n")
        if old[start : start + len(removed)] != removed:
            raise DiffRefused(f"the hunk at line {hunk.old_start} does not match the text")
        new += added
        place = start + len(removed)
    return b"".join(new + old[place:])


def _split_lines(text: bytes) -> list[bytes]:
    """Split text into lines, keeping line endings; as in git, only a line feed ends a line."""
    lines = [line + b"\n" for line in text.split(b"\n")]
    lines[-1] = lines[-1].removesuffix(b"\n")
    return [line for line in lines if line]


def replacement(before: bytes, after: bytes) -> tuple[Hunk, ...]:
    """Return one hunk that replaces all of `before` with `after`."""
    lines = [*_marked(b"-", before), *_marked(b"+", after)]
    counts = len(_split_lines(before)), len(_split_lines(after))
    if not lines:
        return ()
    return (
        Hunk(
            old_start=1 if counts[0] else 0,
            old_count=counts[0],
            new_start=1 if counts[1] else 0,
            new_count=counts[1],
            lines=tuple(lines),
        ),
    )


def _marked(mark: bytes, text: bytes) -> list[bytes]:
    lines = [mark + line.removesuffix(b"\n") for line in _split_lines(text)]
    return [*lines, NO_END] if text and not text.endswith(b"\n") else lines
