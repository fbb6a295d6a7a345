"""Every link, file and test that the docs name is there."""

from __future__ import annotations

import ast
import re
import runpy
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:actors|buffer|policies|sandboxes|serve|scripts|tests|docs)/[\w./-]*\w)(?:::(\w+))?[^`]*`")


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@cache
def anchors(page: Path) -> set[str]:
    return {anchor(line.lstrip("#").strip()) for line in page.read_text().splitlines() if line.startswith("#")}


def problems(page: Path) -> list[str]:
    text = page.read_text()
    found = []
    for target in LINK.findall(text):
        name, _, place = target.partition("#")
        if "://" in target:
            continue
        path = (page.parent / name) if name else page
        if not path.exists():
            found.append(f"{target}: no such file")
        elif place and place not in anchors(path):
            found.append(f"{target}: no such heading")
    for name, test in NAMED.findall(text):
        path = ROOT / name
        if not path.exists():
            found.append(f"{name}: no such file")
        elif test and test not in defined(path):
            found.append(f"{name}::{test}: no such test")
    return found


@cache
def defined(path: Path) -> tuple[str, ...]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return tuple(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    assert problems(page) == []


def test_the_index_links_every_page() -> None:
    linked = set(LINK.findall((ROOT / "docs" / "index.md").read_text()))
    assert {page.name for page in PAGES if page.parent.name == "docs"} - {"index.md"} <= linked


def test_what_is_not_there_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n[a](absent.md) [b](#a) [c](#b) `actors/absent.py` `tests/unit/test_docs.py::test_absent`\n")
    assert problems(page) == [
        "absent.md: no such file",
        "#b: no such heading",
        "actors/absent.py: no such file",
        "tests/unit/test_docs.py::test_absent: no such test",
    ]


def test_the_list_of_modules_is_that_of_the_tree() -> None:
    rendered = runpy.run_path(str(ROOT / "scripts" / "module_docs.py"))["render"]()
    assert (ROOT / "docs" / "modules.md").read_text() == rendered, "run scripts/module_docs.py"
    assert "|  |" not in rendered, "every module says what it is for"


def test_the_glossary_is_short() -> None:
    words = (ROOT / "docs" / "architecture.md").read_text().split("## Words")[1]
    assert 10 < sum(line.startswith("| ") for line in words.splitlines()) - 1 <= 60
