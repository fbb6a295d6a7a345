"""The filter's rules one by one: what is dropped, why, and what of a settings file stays."""

from __future__ import annotations

import pytest

from headrace.actors.evaluation.graders.diff_filter import (
    DropReason,
    FilterRules,
    filter_diff,
    reason_for_path,
    summary,
    with_base_sections,
)
from headrace.actors.evaluation.graders.diff_text import apply_hunks, render_diff, replacement
from headrace.buffer.tasks.unified_diff import DiffRefused, FileDiff, parse_diff

LISTED = frozenset({"checks/word.py", "spec"})


def modified(path: str, before: str, after: str) -> bytes:
    diff = FileDiff(
        old_path=path,
        new_path=path,
        old_mode="100644",
        new_mode="100644",
        hunks=replacement(before.encode(), after.encode()),
    )
    return render_diff([diff])


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("src/calc.py", None),
        ("django/test/client.py", None),
        ("docs/pytest/intro.md", None),
        (".github/workflows/x.yml", None),
        (".gitignore", None),
        ("conftest.py", DropReason.SETTING),
        ("src/deep/Conftest.py", DropReason.SETTING),
        ("pytest.ini", DropReason.SETTING),
        ("tox.ini", DropReason.SETTING),
        ("sitecustomize.py", DropReason.STARTUP),
        ("lib/usercustomize/__init__.py", DropReason.STARTUP),
        ("sitecustomize.cpython-311-x86_64-linux-gnu.so", DropReason.STARTUP),
        ("lib/evil.pth", DropReason.STARTUP),
        ("pkg.egg-info/entry_points.txt", DropReason.STARTUP),
        ("pytest.py", DropReason.TOOL),
        ("_pytest/python.py", DropReason.TOOL),
        ("src/pluggy/__init__.py", DropReason.TOOL),
        (".git/config", DropReason.GIT),
        ("sub/.GIT/hooks/pre-commit", DropReason.GIT),
        ("src/.gitattributes", DropReason.GIT),
        ("sub/git~1", DropReason.GIT),
        (".git /x", DropReason.GIT),
        ("sub/.GIT. ./x", DropReason.GIT),
        (".git::$INDEX_ALLOCATION/x", DropReason.GIT),
        (".git-blame-ignore-revs", None),
        (".gitmodules", DropReason.GIT),
        ("tests/helpers.py", DropReason.TEST),
        ("src/test_calc.py", DropReason.TEST),
        ("src/calc_test.py", DropReason.TEST),
        ("checks/word.py", DropReason.TEST),
        ("checks/word.py/x", DropReason.TEST),
        ("checks", DropReason.TEST),
        ("spec/any.rb", DropReason.TEST),
        ("/etc/passwd", DropReason.PATH),
        ("../x", DropReason.PATH),
        ("a//b", DropReason.PATH),
        ("a/./b", DropReason.PATH),
        ("a\nb", DropReason.PATH),
        ("\udcff", DropReason.PATH),
        ("a" * 2000, DropReason.PATH),
    ],
)
def test_forbidden_paths_are_dropped(path: str, reason: DropReason | None) -> None:
    assert reason_for_path(path, LISTED, new=True) is reason


def test_a_repository_that_is_a_test_tool_can_be_repaired() -> None:
    assert reason_for_path("src/_pytest/python.py", LISTED, new=False) is None


SYMLINK = b"""diff --git a/link b/link
new file mode 120000
index 0000000..3594e94
--- /dev/null
+++ b/link
@@ -0,0 +1 @@
+/etc/passwd
\\ No newline at end of file
"""
SUBMODULE = b"""diff --git a/sub b/sub
new file mode 160000
index 0000000..b45ef6f
--- /dev/null
+++ b/sub
@@ -0,0 +1 @@
+Subproject commit b45ef6fec89518d314f546fd6c3025367b721684
"""
BINARY = b"""diff --git a/x.bin b/x.bin
new file mode 100644
index 0000000..b45ef6f
Binary files /dev/null and b/x.bin differ
"""
RENAME = b"""diff --git a/src/a.py b/conftest.py
similarity index 100%
rename from src/a.py
rename to conftest.py
"""
DEVICE = b"""diff --git a/x b/x
new file mode 020666
"""
UNKNOWN_KIND = b"""diff --git a/x b/x
--- a/x
+++ b/x
@@ -1 +1 @@
-a
+b
"""
BECAME_A_FILE = b"""diff --git a/link b/link
deleted file mode 120000
index 3594e94..0000000
--- a/link
+++ /dev/null
@@ -1 +0,0 @@
-calc.py
\\ No newline at end of file
diff --git a/link b/link
new file mode 100644
index 0000000..45b983b
--- /dev/null
+++ b/link
@@ -0,0 +1 @@
+hi
"""


@pytest.mark.parametrize(
    ("diff", "path", "reason"),
    [
        (SYMLINK, "link", DropReason.LINK),
        (SUBMODULE, "sub", DropReason.SUBMODULE),
        (BINARY, "x.bin", DropReason.BINARY),
        (RENAME, "conftest.py", DropReason.SETTING),
        (DEVICE, "x", DropReason.MODE),
        (UNKNOWN_KIND, "x", DropReason.MODE),
        (BECAME_A_FILE, "link", DropReason.LINK),
    ],
)
def test_changes_of_other_file_types_are_dropped(diff: bytes, path: str, reason: DropReason) -> None:
    good = modified("src/calc.py", "a\n", "b\n")
    filtered = filter_diff(diff + good, FilterRules(), {})
    assert filtered.kept == ("src/calc.py",)
    assert filtered.diff == good
    assert (path, reason) in [(drop.path, drop.reason) for drop in filtered.dropped]


def test_changes_over_a_cap_are_dropped() -> None:
    diff = b"".join(modified(f"src/{number}.py", "a\n", "b\n" * 50) for number in range(5))
    by_size = filter_diff(diff, FilterRules(max_bytes=1000), {})
    by_count = filter_diff(diff, FilterRules(max_files=2), {})
    by_file = filter_diff(diff, FilterRules(max_file_bytes=100), {})
    assert (len(by_size.kept), len(by_count.kept), len(by_file.kept)) == (3, 2, 0)
    assert {drop.reason for drop in (*by_size.dropped, *by_count.dropped, *by_file.dropped)} == {DropReason.SIZE}


BASE_TOML = '[project]\nname = "x"\n\n[tool.pytest.ini_options]\nminversion = "6"\n\n[tool.ruff]\nline = 1\n'


def test_only_the_test_section_of_a_settings_file_is_dropped() -> None:
    new = (
        BASE_TOML.replace('"x"', '"y"').replace('minversion = "6"', 'addopts = "--co"').replace("line = 1", "line = 2")
    )
    filtered = filter_diff(
        modified("pyproject.toml", BASE_TOML, new), FilterRules(), {"pyproject.toml": BASE_TOML.encode()}
    )
    [file] = parse_diff(filtered.diff)
    text = apply_hunks(BASE_TOML.encode(), file.hunks).decode()
    assert 'name = "y"' in text
    assert "line = 2" in text
    assert 'minversion = "6"' in text
    assert "--co" not in text
    assert filtered.kept == ("pyproject.toml",)
    assert [drop.reason for drop in filtered.dropped] == [DropReason.SETTING]


def test_a_change_outside_the_test_section_is_kept() -> None:
    diff = modified("pyproject.toml", BASE_TOML, BASE_TOML.replace('"x"', '"y"'))
    filtered = filter_diff(diff, FilterRules(), {"pyproject.toml": BASE_TOML.encode()})
    assert (filtered.diff, filtered.dropped) == (diff, ())


CFG = "[metadata]\nname = x\n\n[tool:pytest]\naddopts = -q\n"


@pytest.mark.parametrize(
    ("name", "base", "new", "expected"),
    [
        ("setup.cfg", CFG, CFG.replace("-q", "--co"), CFG),
        ("setup.cfg", CFG, "[metadata]\nname = y\n", "[metadata]\nname = y\n[tool:pytest]\naddopts = -q\n"),
        ("setup.cfg", CFG, CFG + "[ tool:pytest ]\naddopts = --co\n", None),
        ("setup.cfg", CFG, CFG + "  [tool:pytest]\naddopts = --co\n", None),
        ("setup.cfg", "", "[tool:pytest]\naddopts = --co\n", ""),
        ("pyproject.toml", "", "[tool]\npytest.ini_options = {addopts = '--co'}\n", None),
        ("pyproject.toml", "", "tool.pytest.ini_options.addopts = '--co'\n", None),
        ("pyproject.toml", "", 'x = """\n[tool.pytest.ini_options]\n"""\n[tool.pytest]\na = 1\n', None),
        ("pyproject.toml", "", "[tool.'pytest'.ini_options]\naddopts = '--co'\n", ""),
        ("pyproject.toml", "", "no toml", None),
        ("pyproject.toml", "", "a = " + "[" * 5000, None),
        ("pyproject.toml", "", "a = 1" + "0" * 5000, None),
        ("pyproject.toml", "", "a." * 200_000 + "b = 1", None),
    ],
)
def test_test_sections_are_restored_or_the_change_is_refused(
    name: str, base: str, new: str, expected: str | None
) -> None:
    assert with_base_sections(name, base, new) == expected


@pytest.mark.timeout(20)
def test_a_long_line_of_blanks_takes_no_time() -> None:
    text = f'a = """\n[{" " * 100_000}\n"""\n'
    base, new = "[tool.pytest.ini_options]\nb = 1\n", "[tool.pytest.ini_options]\nb = 2\n"
    assert with_base_sections("pyproject.toml", text + base, text + new) == text + base


def test_a_hunk_with_an_endless_line_number_is_refused() -> None:
    diff = modified("a.txt", "a\n", "b\n").replace(b"@@ -1,1", b"@@ -1" + b"0" * 5000 + b",1")
    with pytest.raises(DiffRefused):
        filter_diff(diff, FilterRules(), {})


def test_a_settings_file_with_test_sections_is_not_deleted() -> None:
    deleted = FileDiff(old_path="setup.cfg", new_path=None, old_mode="100644", hunks=replacement(CFG.encode(), b""))
    filtered = filter_diff(render_diff([deleted]), FilterRules(), {"setup.cfg": CFG.encode()})
    assert (filtered.kept, [drop.reason for drop in filtered.dropped]) == ((), [DropReason.SETTING])


def test_the_summary_names_paths_and_counts_the_rest() -> None:
    diff = b"".join(modified(f"tests/{number}\t.py", "a\n", "b\n") for number in range(30))
    filtered = filter_diff(diff + modified("conftest.py", "", "x\n"), FilterRules(), {})
    line = summary(filtered.dropped)
    assert line.startswith("dropped from the patch: tests/0\\t.py (unsafe path), ")
    assert line.endswith("18 more: unsafe path, 1 more: test setting")
    assert summary(()) == ""
