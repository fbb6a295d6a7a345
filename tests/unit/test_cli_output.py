"""What commands write for people: nothing is cut, nothing is read as markup or as an emoji."""

from __future__ import annotations

import io
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from headrace.actors.cli.app import app
from headrace.actors.cli.output import console, say, show

CELL = "a long cell " * 8


def table() -> Table:
    made = Table(*(f"column {number}" for number in range(6)), box=None)
    made.add_row(*[CELL + "."] * 6)
    return made


@pytest.mark.parametrize("terminal", [True, False])
def test_no_cell_is_truncated_on_80_columns_or_in_a_pipe(terminal: bool) -> None:
    out = io.StringIO()
    show(table(), Console(file=out, force_terminal=terminal, width=80, color_system=None))
    assert out.getvalue().count(CELL + ".") == 6


def test_brackets_and_colons_are_printed_literally(capsys: pytest.CaptureFixture[str]) -> None:
    say("write name:key:max_sandboxes or name:key:10 [dim]")
    console().print("name:key:max", markup=False)
    marked = Table("state", box=None)
    marked.add_row("[bold]:key:")
    show(marked)
    said = capsys.readouterr().err
    assert "write name:key:max_sandboxes or name:key:10 [dim]\nname:key:max\n" in said
    assert "[bold]:key:" in said


def test_the_help_shows_the_lines_of_a_key_file() -> None:
    said = CliRunner().invoke(app, ["serve", "sandbox", "--help"], env={"COLUMNS": "200"}).output
    assert "name:key[:max_sandboxes]" in re.sub(r"\x1b\[[0-9;]*m", "", said)


def test_the_version_option_prints_the_version() -> None:
    told = CliRunner().invoke(app, ["--version"])
    assert (told.exit_code, told.output) == (0, f"headrace {version('headrace')}\n")


def test_consoles_are_created_in_one_module() -> None:
    root = Path(__file__).resolve().parents[2] / "actors" / "cli"
    made = {path.name for path in root.glob("*.py") if "Console(" in path.read_text()}
    assert made == {"output.py"}
