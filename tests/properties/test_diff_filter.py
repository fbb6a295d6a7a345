"""Whatever an agent's diff holds: applied with the real git after the filter, it changes nothing that is forbidden."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headrace.actors.evaluation.graders.diff_filter import FilterRules, filter_diff
from headrace.actors.evaluation.graders.diff_text import apply_hunks, quote, render_diff, replacement
from headrace.buffer.tasks.unified_diff import DiffRefused, FileDiff, parse_diff, unquote

FOLDERS = ("", "src/", "src/deep/", "tests/", "a b/", ".git/", ".git/hooks/", "x.egg-info/", "../", "/", "src/../../")
NAMES = (
    "calc.py", "conftest.py", "pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "sitecustomize.py", "evil.pth",
    "test_calc.py", ".gitattributes", "pytest.py", "ünïcode.py", 'quo"te.py', "new\nline.py", "two words.py",
    "listed.py",
)  # fmt: skip
FORBIDDEN = re.compile(
    r"(^|/)(conftest\.py|pytest\.ini|tox\.ini|sitecustomize\.py|[^/]*\.pth|test_[^/]*\.py|\.git[^/]*|tests)(/|$)"
    r"|\.egg-info/|^/|\.\.|^listed\.py$|\n"
)
SHADOWS = {f"{folder}pytest.py" for folder in FOLDERS}
PYTEST_INI = "[tool:pytest]\naddopts = --co\n"
SECTION = b"[tool:pytest]"
CONTENTS = st.one_of(
    st.binary(max_size=60).filter(lambda data: b"\0" not in data),
    st.sampled_from([b"", b"one\n", b"one\ntwo", b"diff --git a/x b/x\n--- a/x\n+++ b/x\n", b"a\r\nb\r\n", b"\\ No\n"]),
    st.sampled_from([PYTEST_INI.encode(), b"[tool.pytest.ini_options]\naddopts='--co'\n", b"[metadata]\nname = x\n"]),
)
RULES = FilterRules(test_files=frozenset({"listed.py"}))


@st.composite
def changes(draw: st.DrawFn) -> dict[str, tuple[bytes | None, bytes | None, str]]:
    """Path -> (content before, content after, mode after)."""
    paths = st.builds("{}{}".format, st.sampled_from(FOLDERS), st.sampled_from(NAMES))
    modes = st.sampled_from(["100644", "100755", "120000", "160000"])
    drawn = draw(st.dictionaries(paths, st.tuples(st.none() | CONTENTS, st.none() | CONTENTS, modes), max_size=6))
    return {path: change for path, change in drawn.items() if change[0] != change[1]}


def file_diff(path: str, before: bytes | None, after: bytes | None, mode: str) -> FileDiff:
    return FileDiff(
        old_path=None if before is None else path,
        new_path=None if after is None else path,
        old_mode=None if before is None else "100644",
        new_mode=None if after is None else mode,
        hunks=replacement(before or b"", after or b""),
    )


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(changes())
@example({"setup.cfg": (b"[metadata]\nname = x\n", b"[metadata]\nname = y\n" + PYTEST_INI.encode(), "100644")})
@example({"src/calc.py": (b"a\n", b"b", "100755"), "conftest.py": (None, b"x\n", "100644")})
def test_an_applied_diff_never_touches_a_forbidden_path(
    drawn: dict[str, tuple[bytes | None, bytes | None, str]],
) -> None:
    hostile = render_diff(file_diff(path, *change) for path, change in drawn.items())
    base = {path: before for path, (before, _, _) in drawn.items() if before is not None}
    filtered = filter_diff(hostile, RULES, base)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "tree"
        root.mkdir()
        for path, content in base.items():
            if not path.startswith(("/", "..")) and ".." not in path:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_bytes(content)
        before = tree(root)
        if filtered.diff:
            command = ["git", "apply", "--whitespace=nowarn", "-"]
            subprocess.run(command, cwd=root, input=filtered.diff, check=True, capture_output=True, timeout=30)
        after = tree(root)
        assert [path.name for path in Path(name).iterdir()] == ["tree"]
        assert not [path for path in root.rglob("*") if path.is_symlink()]
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    # A repository may hold a pytest of its own, which a patch may change; a new one would shadow the real one.
    assert not [path for path in changed if FORBIDDEN.search(path) or (path in SHADOWS and path not in before)]
    assert changed <= set(filtered.kept)
    settings_files = [path for path in changed if path.endswith((".cfg", ".toml"))]
    assert not [
        path for path in settings_files if SECTION in after.get(path, b"") and SECTION not in before.get(path, b"")
    ]
    recorded = {drop.path for drop in filtered.dropped}
    assert recorded | set(filtered.kept) == set(drawn)
    for path, (_, content, mode) in drawn.items():
        if (
            mode in ("100644", "100755")
            and not FORBIDDEN.search(path)
            and not path.endswith((".cfg", ".toml", "pytest.py"))
        ):
            assert after.get(path) == content


@given(CONTENTS, CONTENTS)
def test_applying_a_replacement_hunk_gives_the_new_text(before: bytes, after: bytes) -> None:
    if before != after:
        [file] = parse_diff(render_diff([file_diff("x", before, after, "100644")]))
        assert apply_hunks(before, file.hunks) == after


@given(st.binary(min_size=1).map(lambda raw: raw.decode("utf-8", "surrogateescape")))
def test_quoted_names_round_trip(name: str) -> None:
    assert unquote(quote(name)) == name


@given(st.binary(max_size=200), st.lists(st.integers(0, 400), max_size=6))
def test_a_damaged_diff_is_refused_or_filtered_without_an_unexpected_error(noise: bytes, places: list[int]) -> None:
    diff = bytearray(render_diff([file_diff("src/calc.py", b"one\ntwo\n", b"one\nthree", "100755")]))
    for place in places:
        diff[place % len(diff) : place % len(diff)] = noise[:5]
    try:
        filtered = filter_diff(bytes(diff), RULES, {})
    except DiffRefused:
        return
    assert not [path for path in filtered.kept if FORBIDDEN.search(path)]


def test_text_that_is_not_a_diff_is_refused() -> None:
    for text in (
        b"hello\n",
        b"diff --git a/x b/y\n",
        b"diff --git a/x b/x\n@@ -1 +1 @@\n-a\n+b\n",
        b"--- a/x\n+++ b/x\n",
    ):
        with pytest.raises(DiffRefused):
            parse_diff(text)
