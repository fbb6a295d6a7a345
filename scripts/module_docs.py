"""Writes docs/modules.md: every module with the first sentence of its docstring. A test compares the two."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "modules.md"
PACKAGES = ("actors", "serve", "policies", "buffer", "sandboxes", "scripts/benches")
HEAD = """# Modules

What each file is for: the first sentence of its docstring. This page is written by `scripts/module_docs.py`;
[architecture.md](architecture.md) says how they belong together.
"""


def first_sentence(path: Path) -> str:
    """Of a module's docstring, on one line; empty where it has none."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.?])\s+(?=[A-Z`])|\s+Invariants?:", text)[0]


def folders() -> list[Path]:
    return [path.parent for package in PACKAGES for path in sorted((ROOT / package).rglob("__init__.py"))]


def render() -> str:
    lines = [HEAD]
    for folder in folders():
        lines += [f"## {folder.relative_to(ROOT)}/", "", first_sentence(folder / "__init__.py"), ""]
        modules = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
        if modules:
            rows = [f"| `{path.name}` | {first_sentence(path).replace('|', chr(92) + '|')} |" for path in modules]
            lines += ["| file | for |", "|---|---|", *rows, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(TARGET)
