"""Scripts of developers: which tests a change needs, what the tree costs, and what tests say before the first."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from headrace.actors.errors import ConfigError
from headrace.actors.runtime.actors.runtime import check_ray_folder

ROOT = Path(__file__).resolve().parents[2]
TREE = {
    "buffer/base.py": "",
    "sandboxes/launcher/main.py": "",
    "sandboxes/local.py": "START = 'launcher.main'\n",
    "serve/gateway.py": "import headrace.buffer.base\n",
    "actors/cli/app.py": "def command():\n    from headrace.serve import gateway\n",
    "tests/support/rig.py": "from headrace.sandboxes import local\n",
    "tests/unit/test_base.py": "from headrace.buffer import base\n",
    "tests/unit/test_local.py": "from support.rig import local\n",
    "tests/unit/test_page.py": "PAGE = ROOT / 'docs' / 'page.md'\n",
    "tests/integration/conftest.py": "def app():\n    from headrace.serve import gateway\n",
    "tests/integration/test_command.py": "RUN = ['headrace', 'run']\n",
    "tests/integration/test_fixture.py": "def test_app(app): ...\n",
    "tests/integration/test_alone.py": "",
}
ALL_OF_BASE = ["tests/integration/test_command.py", "tests/integration/test_fixture.py", "tests/unit/test_base.py"]


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.invalid")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with small packages and tests, and the scripts of this one."""
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "scripts").mkdir()
    for name in ("changed_tests.py", "import_graph.py", "size.py"):
        (tmp_path / "scripts" / name).write_bytes((ROOT / "scripts" / name).read_bytes())
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "all")
    return tmp_path


def told(folder: Path, *arguments: str, **environment: str) -> tuple[int, list[str]]:
    told = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONSAFEPATH": "", **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return told.returncode, [line for line in (told.stdout + told.stderr).splitlines() if line]


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("buffer/base.py", ALL_OF_BASE),
        ("sandboxes/launcher/main.py", ["tests/unit/test_local.py"]),
        ("docs/page.md", ["tests/unit/test_page.py"]),
        ("tests/unit/test_local.py", ["tests/unit/test_local.py"]),
        ("pyproject.toml", ["tests"]),
        ("LICENSE", []),
    ],
)
def test_tests_that_can_tell_of_a_change_are_found(tree: Path, changed: str, tests: list[str]) -> None:
    (tree / changed).parent.mkdir(exist_ok=True)
    (tree / changed).write_text("# changed\n")
    assert told(tree, "scripts/changed_tests.py", "HEAD") == (0, tests)


def test_sizes_are_compared_with_a_commit_or_the_last_tag(tree: Path) -> None:
    (tree / "buffer" / "more.py").write_text("a = 1\nb = 2\n")
    (tree / "README.md").write_text("three words here\n")
    code, lines = told(tree, "scripts/size.py")
    assert (code, lines[:2]) == (0, ["product lines: 6", "product files: 6"])
    assert "--since COMMIT" in lines[-1]
    git(tree, "tag", "v1")
    wanted = ["product lines: 6 (+2 since v1)", "product files: 6 (+1 since v1)"]
    assert told(tree, "scripts/size.py")[1][:2] == wanted
    assert told(tree, "scripts/size.py")[1][3] == "words of docs: 3 (+3 since v1)"
    assert told(tree, "scripts/size.py", "absent")[0] == 2


@pytest.mark.parametrize(
    ("variable", "value", "line"),
    [
        ("TMPDIR", "{}/" + 40 * "t", "is too long for Ray's unix sockets: set TMPDIR to a path of at most 39 bytes"),
        ("TMPDIR", "/proc/absent", "tests need a folder for temporary files: "),
        ("XDG_CACHE_HOME", "/proc/absent", "tests need a folder for caches ([Errno 2]"),
    ],
)
def test_what_no_test_can_do_without_is_told_before_the_first(
    tmp_path: Path, variable: str, value: str, line: str
) -> None:
    value = value.format(tmp_path)
    if value.startswith(str(tmp_path)):
        Path(value).mkdir(mode=0o700)
    pytest_here = ("-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests" / "unit" / "test_ci.py"))
    code, lines = told(ROOT, *pytest_here, **{variable: value})
    assert code == 4
    assert [line in each for each in lines] == [True]


def test_the_readme_names_the_longest_tmpdir_that_a_run_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    [told] = re.findall(r"a path of at most (\d+) bytes", (ROOT / "README.md").read_text())
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        monkeypatch.setattr(tempfile, "tempdir", None)
        longest, longer = (Path(f"{place}/".ljust(int(told) + more, "t")) for more in (0, 1))
        for folder in (longest, longer):
            folder.mkdir(mode=0o700)
        monkeypatch.setenv("TMPDIR", str(longest))
        assert check_ray_folder() == longest
        monkeypatch.setenv("TMPDIR", str(longer))
        with pytest.raises(ConfigError, match=f"at most {told} bytes"):
            check_ray_folder()
