"""The pages of the docs, their tables, and the commands that they may name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from headrace.actors.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def tables_of(page: Path) -> Iterator[list[list[str]]]:
    """Yield the tables of a page as rows of cells, the header first."""
    rows: list[list[str]] = []
    for line in [*re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif rows:
            yield rows
            rows = []


def rows_of(page: str, first: str) -> list[list[str]]:
    """Return the rows of the first table of a page of the docs whose first column has this name."""
    tables = tables_of(ROOT / "docs" / page)
    return next(rows for header, _, *rows in tables if header[0] == first)


def command_words() -> dict[str, Any]:
    """Return all commands of `headrace` by their words; a group is there too, without a command."""
    found: dict[str, Any] = {}

    def add(words: str, command: Any) -> None:
        found[words] = None if hasattr(command, "commands") else command
        for name, part in getattr(command, "commands", {}).items():
            add(f"{words} {name}".strip(), part)

    add("", typer.main.get_command(app))
    return found
