"""Repositories with pytest options of their own: strict settings, and plugins that others wrote.

The plugins come from PyPI, into a folder outside of the repository; PLUGINS names their versions. Each option meets
each kind of grader and each patch, and so does each file that options stand in.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from dataclasses import replace

import pytest
from benches.cheating.cheat_bench import BenchSandboxes
from benches.cheating.repositories import git_diff

from headrace.actors.evaluation.graders.baselines import Baselines
from headrace.actors.evaluation.graders.patch_collection import LeftDiff
from headrace.actors.evaluation.graders.repository import grade
from headrace.buffer.tasks.repositories import EvalCommand, EvalScript, Grader
from headrace.sandboxes.local.provider import LocalProvider
from support.repositories import FILES, HIDDEN_TESTS, IDS, PYTEST, REPO, RIGHT, SPEC, WRONG, repository_task

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow(but_first=True),
    pytest.mark.timeout(600),
]
PLUGINS = (
    "pytest==9.1.1",
    "pytest-xdist==3.8.0",
    "pytest-randomly==5.1.0",
    "pytest-timeout==2.4.0",
    "pytest-asyncio==1.5.0",
    "pytest-forked==1.7.5",
)
OPTIONS = {
    "two workers": ("addopts", "-n 2"),
    "all workers": ("addopts", "-nauto"),
    "distribution": ("addopts", "-n 2 --dist loadgroup"),
    "warnings as errors": ("filterwarnings", "error"),
    "strict configuration": ("addopts", "--strict-config --strict-markers"),
    "first failure": ("addopts", "-x"),
    "one failure": ("addopts", "--maxfail=1"),
    "quiet": ("addopts", "-qq"),
    "no cache": ("addopts", "-p no:cacheprovider"),
    "failed first": ("addopts", "--ff"),
    "stepwise": ("addopts", "--stepwise"),
    "importlib": ("addopts", "--import-mode=importlib"),
    "forked": ("addopts", "--forked"),
    "without randomly": ("addopts", "-p no:randomly"),
    "timeout": ("timeout", "60"),
    "strict asyncio": ("asyncio_mode", "strict"),
    "strict xfail": ("xfail_strict", "true"),
    "required plugins": ("required_plugins", "pytest-xdist"),
    "environment": ("", "-n 2 -x"),
}
FILE_NAMES = {
    "pytest.ini": ("[pytest]", "{} = {}"),
    "setup.cfg": ("[tool:pytest]", "{} = {}"),
    "tox.ini": ("[pytest]", "{} = {}"),
    "pyproject.toml": ("[tool.pytest.ini_options]", "{} = '{}'"),
}
SCRIPT = (
    f"{HIDDEN_TESTS}\n\nif __name__ == '__main__':\n    import sys, pytest\n    sys.exit(pytest.main([__file__]))\n"
)
GRADERS: dict[str, Grader] = {
    "ids": IDS,
    "command": EvalCommand(command="python3 -m pytest tests"),
    "script": EvalScript(script=SCRIPT),
}
XFAIL = WRONG.replace("    return sum", "    if not numbers:\n        import pytest; pytest.xfail()\n    return sum", 1)
PATCHES = {"right": (RIGHT, 1.0), "wrong": (f"{WRONG}\n\nDONE = 1\n", 0.0), "xfail": (XFAIL, 0.0)}


def pairwise() -> list[tuple[str, ...]]:
    """Return rows that hold each pair of an option or a file with a grader or a patch, and each pair of those, chosen
    greedily. (Which file an option stands in is pytest's own concern.)"""
    rows = [(a, b, c, d) for a in OPTIONS for b in FILE_NAMES for c in GRADERS for d in PATCHES]

    def pairs(row: tuple[str, ...]) -> set[tuple[int, str, int, str]]:
        return {(i, row[i], j, row[j]) for i in range(2, 4) for j in range(i)}

    left = {pair for row in rows for pair in pairs(row)}
    chosen: list[tuple[str, ...]] = []
    while left:
        chosen.append(max(rows, key=lambda row: len(pairs(row) & left)))
        left -= pairs(chosen[-1])
    return chosen


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("plugins")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder / "site"), *PLUGINS]
    subprocess.run(command, check=True, timeout=600)
    with tarfile.open(folder / "plugins.tar", "w") as archive:
        archive.add(folder / "site", ".", filter=lambda part: None if part.name.endswith(".pyc") else part)
    return (folder / "plugins.tar").read_bytes()


@pytest.mark.parametrize(("option", "file", "grader", "patch"), pairwise())
async def test_a_repository_is_graded_with_its_own_options(
    provider: LocalProvider, plugins: bytes, option: str, file: str, grader: str, patch: str
) -> None:
    key, value = OPTIONS[option]
    head, line = FILE_NAMES[file]
    files = {path: text for path, text in FILES.items() if not path.endswith("pyproject.toml")}
    environment = dict(SPEC.environment)
    if key:
        files[f"{REPO}/{file}"] = f"{head}\n{line.format(key, value)}\n"
    else:
        environment["PYTEST_ADDOPTS"] = value
    spec = replace(SPEC, grader=GRADERS[grader], environment=environment)
    hidden = {} if grader == "script" else {f"{REPO}/tests/test_calc.py": HIDDEN_TESTS}
    task = replace(repository_task(spec, hidden_files=hidden, timeout_s=60.0), files=files)
    text, wanted = PATCHES[patch]
    left = LeftDiff(diff=git_diff("calc.py", WRONG, text).encode())
    verdict = await grade(task, left, BenchSandboxes(provider, plugins, PYTEST), Baselines())
    assert verdict.reward == wanted, verdict
