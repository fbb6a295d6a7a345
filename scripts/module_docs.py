"""Writes docs/modules.md: every module with the first sentence of its docstring. A test checks that the page is up to
date."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "modules.md"
PACKAGES = ("actors", "serve", "policies", "buffer", "sandboxes", "scripts/benches")
HEAD = """# Modules

The purpose of each file: the first sentence of its docstring. `scripts/module_docs.py` writes this page.
[architecture.md](architecture.md) explains how the files belong together.
"""


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring on one line; empty without a docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.?])\s+(?=[A-Z`])|\s+Invariants?:", text)[0]


def folders() -> list[Path]:
    """Return all packages in the order of the page."""
    return [path.parent for package in PACKAGES for path in sorted((ROOT / package).rglob("__init__.py"))]


def render() -> str:
    """Return the page."""
    lines = [HEAD]
    for folder in folders():
        lines += [f"## {folder.relative_to(ROOT)}/", "", first_sentence(folder / "__init__.py"), ""]
        modules = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
        if modules:
            rows = [f"| `{path.name}` | {first_sentence(path).replace('|', chr(92) + '|')} |" for path in modules]
            lines += ["| file | purpose |", "|---|---|", *rows, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(TARGET)
