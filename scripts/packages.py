"""Writes the list of packages in pyproject.toml from the tree; a test compares the two. setuptools maps folders to
`headrace.*` only for packages that are listed by name."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("actors", "buffer", "policies", "sandboxes", "serve")
LISTED = re.compile(r"^packages = \[\n(?:  \"headrace\.[\w.]+\",\n)+\]$", re.MULTILINE)
MAPPED = re.compile(r"^package-dir = \{.*\}$", re.MULTILINE)


def packages() -> list[str]:
    found = (path.parent.relative_to(ROOT).parts for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py"))
    return sorted(".".join(parts) for parts in found)


def render(text: str) -> str:
    """Return `text`, that of pyproject.toml, with the list of the packages in the source tree."""
    listed = "".join(f'  "headrace.{name}",\n' for name in packages())
    mapped = ", ".join(f'"headrace.{name}" = "{name.replace(".", "/")}"' for name in packages())
    text, lists = LISTED.subn(f"packages = [\n{listed}]", text)
    text, maps = MAPPED.subn(f"package-dir = {{ {mapped} }}", text)
    assert (lists, maps) == (1, 1), "pyproject.toml does not have the form that this script expects"
    return text


if __name__ == "__main__":
    path = ROOT / "pyproject.toml"
    path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
