"""Links, files, tests and snippets of the docs exist and work; generated pages match the code."""

from __future__ import annotations

import ast
import dataclasses
import re
import runpy
import sqlite3
import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from generators.command import COMPARED, main, stale

from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.config import load_recipe
from headrace.actors.run.summary import RunSummary
from headrace.buffer.audit.export import export_schema
from headrace.buffer.ledger.schema import LEDGER_STATEMENTS
from headrace.buffer.tasks.task import load_tasks
from headrace.serve.tracing import span_names
from support.pages import PAGES, ROOT, command_words, tables_of

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
    assert "choose from cli, config, metrics, panel, recipes\n" in capsys.readouterr().err


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


ABSENT = re.compile(r"docs/[\w-]+\.md|(?<![\w/])scripts/(?!models)[\w/]+|\(README")
"""Files that only a checkout has; slime has `scripts/models`."""
PROGRAMS = {"scripts/install agents", "scripts/install sglang"}
"""Names of programs in their own help."""


def test_texts_of_the_product_name_guides_by_their_titles() -> None:
    """Users of an installed package have no docs folder and no scripts."""
    titles = {page.read_text().splitlines()[0].removeprefix("# ") for page in PAGES}
    named, paths = set(), []
    for path in (path for folder in CODE[:-1] for path in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text())
        nodes = [node for statement in tree.body[ast.get_docstring(tree) is not None :] for node in ast.walk(statement)]
        for text in [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]:
            paths += [f"{path.name}: {name}" for name in ABSENT.findall(text) if text not in PROGRAMS]
            named |= set(re.findall(r"guide '([^']+)'", " ".join(text.split())))
    assert paths == []
    assert len(named) > 5
    assert named <= titles


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_rows_of_tables_have_as_many_cells_as_their_header(page: Path) -> None:
    for header, *rows in tables_of(page):
        assert [row for row in rows if len(row) != len(header)] == []


def test_defaults_of_keys_are_toml_and_the_keys_are_at_most_335() -> None:
    rows = [
        (header, row)
        for name in ("configuration", "simulation_keys")
        for header, _, *rows in tables_of(ROOT / "docs" / f"{name}.md")
        for row in rows
    ]
    assert all(header == ["key", "default", "meaning"] for header, _ in rows)
    for _, (_, default, meaning) in rows:
        assert default in ("required", "unset") or default.startswith(("derived: ", "`"))
        assert "None" not in meaning
        if default.startswith("`"):
            tomllib.loads(f"value = {default.strip('`').replace(chr(92) + '|', '|')}")
    keys = [row[0] for _, row in rows if not row[0].startswith("[")]
    assert 200 < len(keys) <= 335
    assert len(rows) - len(keys) >= 80, "the keys that most users set come first"


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


MENTION = re.compile(r"(?:`|^|\$ |bin/)headrace ((?:[a-z][\w-]*)(?: [^`\n;#|&]*)?)", re.MULTILINE)
PROSE = {"of", "is", "by", "in", "refuses", "trains", "saves", "tasks"}
"""Words after the name `headrace` in sentences, and in a seed."""


def mentions() -> Iterator[tuple[str, str]]:
    """Yield each command of `headrace` that a page, script or text of the product names, and where."""
    places = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *(ROOT / "scripts").rglob("*")]
    places += [path for folder in CODE[:-1] for path in (ROOT / folder).rglob("*.py")]
    for path in places:
        if path.is_file() and path.suffix in {".md", ".py", ".toml", ".yaml", ""} and "__pycache__" not in path.parts:
            text = path.read_text()
            if path.suffix == ".py":
                nodes = ast.walk(ast.parse(text))
                text = "\n".join(
                    " ".join(node.value.split())
                    for node in nodes
                    if isinstance(node, ast.Constant) and isinstance(node.value, str)
                )
            for said in MENTION.findall(text):
                if said.split()[0] not in PROSE:
                    yield path.name, said.strip()


def refused_mention(said: str, known: dict[str, Any]) -> str:
    """Return what is wrong with a command; empty if there is one with such words and options."""
    words = said.split()
    depth = max(number for number in range(4) if " ".join(words[:number]) in known)
    command, rest = known[" ".join(words[:depth])], words[depth:]
    if command is None:
        # A group alone names all its commands, and so does `...`.
        return "" if not rest or rest[0].startswith(("...", "-", "[")) or "|" in rest[0] else "no such command"
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    own = rest[: rest.index("--")] if "--" in rest else rest
    given = {word.strip("[].,()'").partition("=")[0] for word in own if word.strip("[(").startswith("--")}
    return ", ".join(sorted(given - options - {"--verbose", "--help", "--version"}))


def test_each_command_that_a_text_names_exists_with_its_options() -> None:
    known = command_words()
    found = list(mentions())
    assert len(found) > 300
    assert [(place, said, wrong) for place, said in found if (wrong := refused_mention(said, known))] == []
    assert refused_mention("engine absent RUN", known) and refused_mention("run x.toml --absent", known)


def test_all_commands_that_write_json_name_its_file_alike() -> None:
    """Scripts that read what a command or server writes need one option for all."""
    for words, command in command_words().items():
        names = {name: parameter for parameter in command.params for name in parameter.opts} if command else {}
        assert not names.keys() & {"--announce", "--address-file"}, words
        assert "--json" not in names or not names["--json"].is_flag, words
