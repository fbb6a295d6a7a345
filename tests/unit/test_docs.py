"""Links, files, tests and snippets of the docs exist and work; generated pages match the code."""

from __future__ import annotations

import ast
import dataclasses
import re
import runpy
import sqlite3
import sys
from collections.abc import Iterable
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest
from generators.command import COMPARED, main, stale

from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.config import load_recipe
from headrace.actors.run.summary import RunSummary
from headrace.buffer.audit.export import export_schema
from headrace.buffer.ledger.schema import LEDGER_STATEMENTS
from headrace.buffer.tasks.task import load_tasks
from headrace.serve.tracing import span_names

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
CODE = ("actors", "buffer", "policies", "sandboxes", "serve", "scripts")
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:actors|buffer|policies|sandboxes|serve|scripts|tests|docs)/[\w./-]*\w)(?:::(\w+))?[^`]*`")


def anchor(heading: str) -> str:
    """Return the anchor that GitHub makes from a heading."""
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
def test_links_files_and_tests_named_on_a_page_exist(page: Path) -> None:
    assert problems(page) == []


def test_the_index_links_every_page() -> None:
    linked = set(LINK.findall((ROOT / "docs" / "index.md").read_text()))
    assert {page.name for page in PAGES if page.parent.name == "docs"} - {"index.md"} <= linked


def test_missing_links_files_and_tests_are_reported(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n[a](absent.md) [b](#a) [c](#b) `actors/absent.py` `tests/unit/test_docs.py::test_absent`\n")
    assert problems(page) == [
        "absent.md: no such file",
        "#b: no such heading",
        "actors/absent.py: no such file",
        "tests/unit/test_docs.py::test_absent: no such test",
    ]


@pytest.mark.parametrize("name", COMPARED)
def test_generated_files_match_the_code(name: str) -> None:
    assert stale([name]) == [], f"run scripts/generate {name}"


def test_generate_compares_no_golden_files(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["generate", "--check", "golden_ledger"])
    with pytest.raises(SystemExit):
        main()
    assert "choose from cli, config, metrics, panel\n" in capsys.readouterr().err


def columns(statements: Iterable[str]) -> set[str]:
    """Return the tables and columns of a database."""
    with closing(sqlite3.connect(":memory:")) as database:
        for statement in statements:
            database.execute(statement)
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        return tables | {row[1] for table in tables for row in database.execute(f"PRAGMA table_info({table})")}


def test_the_run_directory_page_names_every_file_column_key_and_span() -> None:
    named = set(re.findall(r"[\w.-]+", (ROOT / "docs" / "run_directory.md").read_text()))
    paths = vars(RunDirectory).items()
    run = RunDirectory(path=Path("/run"))
    files = {getattr(run, name).name for name, item in paths if isinstance(item, property)}
    spans = {value for name, value in vars(span_names).items() if name.isupper() and isinstance(value, str)}
    keys = {item.name for item in dataclasses.fields(RunSummary)}
    exported = set(export_schema().names)
    assert files | columns(LEDGER_STATEMENTS) | exported | keys | spans <= named


def test_documentation_pages_named_in_the_code_exist() -> None:
    files = [path for folder in CODE for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".toml"}]
    named = {page for path in files for page in re.findall(r"docs/[\w-]+\.md", path.read_text())}
    assert len(named) > 5
    assert [page for page in sorted(named) if not (ROOT / page).exists()] == []


def test_the_glossary_has_at_most_60_words() -> None:
    words = (ROOT / "docs" / "architecture.md").read_text().split("## Glossary")[1]
    assert 10 < sum(line.startswith("| ") for line in words.splitlines()) - 1 <= 60


def blocks(language: str) -> list[str]:
    """Return the README's code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_readme_snippets_are_valid(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("".join(blocks("toml")))
    assert load_recipe(recipe, (), tmp_path / "run").agent.kind == "mini-swe-agent"
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n".join(block.replace("\n", "") for block in blocks("json")))
    [task] = load_tasks(tasks)
    compile(task.evaluator.check, "check", "exec")
    agent, evaluator, metrics = blocks("python")
    parts = tmp_path / "parts.py"
    parts.write_text(agent + evaluator)
    names = runpy.run_path(str(parts))
    assert {"OneTry", "by_length"} <= names.keys()
    compile(metrics, "metrics", "exec")


def test_the_readme_has_at_most_120_lines_and_says_what_has_not_run() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert "placed on 64 logical GPUs with simulated engines and learner; never run on a GPU" in text
    assert "warm-started miniatures" in text


def test_each_failure_of_the_page_has_a_test_with_its_number() -> None:
    rows = re.findall(
        r"^\| (F\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", (ROOT / "docs" / "failures.md").read_text(), re.MULTILINE
    )
    # F6, a memory leak of one framework, has no counterpart here.
    assert [number for number, *_ in rows] == [f"F{number}" for number in range(1, 26) if number != 6]
    wrong = []
    for number, _, _, cell in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cell)
        assert named or cell == "no test", number
        for path, name in named:
            tree = ast.parse((ROOT / path).read_text())
            found = [node for node in tree.body if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef)]
            texts = [f"{node.name} {ast.get_docstring(node)}" for node in found if node.name == name]
            if not texts or not re.search(rf"(?:\b|_){number}(?:\b|_)", texts[0], re.IGNORECASE):
                wrong.append(f"{number}: {path}::{name}")
    assert not wrong
