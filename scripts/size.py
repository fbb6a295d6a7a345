"""Prints what the tree costs to read: product lines, test lines and words of docs, and their change against a commit.

Usage: scripts/size.py [COMMIT], by default the last tag. What is not committed counts too.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from import_graph import PACKAGES


def kind_of(path: PurePosixPath) -> str:
    """Return what a file counts as; empty if it does not count."""
    top = path.parts[0]
    if path.suffix == ".py":
        return "product lines" if top in PACKAGES else "test lines" if top == "tests" else ""
    return "words of docs" if path.suffix == ".md" and (top == "docs" or len(path.parts) == 1) else ""


def sizes(files: Iterable[tuple[str, bytes]]) -> Counter[str]:
    """Return the size of each kind, and the number of product files."""
    total: Counter[str] = Counter()
    for name, content in files:
        kind = kind_of(PurePosixPath(name))
        total[kind] += len(content.split()) if kind == "words of docs" else content.count(b"\n")
        total["product files"] += kind == "product lines"
    return total


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], capture_output=True, check=True).stdout


def present() -> Iterable[tuple[str, bytes]]:
    names = git("ls-files", "--cached", "--others", "--exclude-standard", "-z").decode().split("\0")
    return ((name, Path(name).read_bytes()) for name in names if name and Path(name).is_file())


def committed(commit: str) -> Iterable[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as archive:
        for member in archive:
            if member.isfile() and (file := archive.extractfile(member)):
                yield member.name, file.read()


def main() -> int:
    try:
        now = sizes(present())
    except (OSError, subprocess.CalledProcessError):
        print("sizes are not shown: this is not a git checkout")
        return 0
    commit = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        commit = commit or git("describe", "--tags", "--abbrev=0").decode().strip()
        before = sizes(committed(commit))
    except subprocess.CalledProcessError as error:
        if commit:
            print(f"{commit} is no commit of this checkout: {error.stderr.decode().strip()}", file=sys.stderr)
            return 2
        before = None
    for kind in ("product lines", "product files", "test lines", "words of docs"):
        change = "" if before is None else f" ({now[kind] - before[kind]:+,} since {commit})"
        print(f"{kind}: {now[kind]:,}{change}")
    if before is None:
        print("no tag to compare with; scripts/check --since COMMIT shows the change")
    return 0


if __name__ == "__main__":
    sys.exit(main())
