"""Runs the tests of a repository task in a clean sandbox and brings back what they reported.

Invariants:
- The report's plugin lies under a name of its own for every run, in a folder that only root writes to; the report
  itself is no file (see `in_sandbox.monitor`).
- The command cannot import anything of the repository's in place of pytest or the plugin.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from headrace.actors.evaluation.preparation import ANY_OWNER
from headrace.actors.evaluation.report import Session
from headrace.actors.in_sandbox import program_command, source
from headrace.buffer.repositories import Command, RepositorySpec, Script, Swepro, TestIds, required_ids
from headrace.sandboxes.errors import SandboxError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.sandboxes.base import Sandbox

MAX_REPORT_BYTES: Final = 32 << 20
MAX_LOG_BYTES: Final = 8 << 20
_CUT_S: Final = 30.0
"""For the monitor to end tests at their deadline and to bring their report."""
_MAIN: Final = """\
import os, sys
import pytest, {plugin}
sys.path[0] = os.getcwd()
sys.exit(pytest.main({arguments!r}))
"""
"""pytest is imported before the repository is on the path, where `python -m pytest` would put it first."""


class RunBroken(Exception):
    """The tests could not be run at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestRun:
    """What a command left: its logs, cut at MAX_LOG_BYTES each, and what pytest reported."""

    __test__ = False

    exit_code: int
    stdout: str
    stderr: str
    sessions: tuple[Session, ...]
    intruded: bool = False
    """Code under test tried to begin a session of its own."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the tools of one run lie, and their names."""

    folder: str = field(default_factory=lambda: f"/opt/{secrets.token_hex(8)}")
    plugin: str = field(default_factory=lambda: f"p{secrets.token_hex(8)}")


async def run_tests(
    room: Sandbox,
    repository: RepositorySpec,
    protected: Iterable[str],
    timeout_s: float,
    *,
    twins: bool = False,
    cut: bool = False,
) -> TestRun:
    """Run the grader's tests, or their twins. `protected` are paths in the repository that the tests' user must not
    change. `cut`: tests that take too long are ended at the timeout, and what they reported until then is returned.

    Raises RunBroken, ExecTimeout, SandboxError."""
    place = _Place()
    command, files = _command(repository, place)
    settings = {
        "command": command,
        "workdir": repository.workdir,
        "user": repository.user,
        "protected": [f"{repository.workdir}/{path}" for path in sorted(protected)],
        "environment": _environment(repository, place),
        "twins": twins,
        "deadline_s": timeout_s if cut else None,
        "max_log_bytes": MAX_LOG_BYTES,
        "max_report_bytes": MAX_REPORT_BYTES,
    }
    files |= {f"{place.plugin}.py": source("canary_plugin"), "settings": json.dumps(settings)}
    await room.write_many({f"{place.folder}/{name}": text.encode() for name, text in files.items()})
    result = await room.exec(
        program_command(repository.python, "monitor", f"{place.folder}/settings"),
        cwd="/",
        timeout_s=timeout_s + _CUT_S * cut,
        max_output_bytes=6 * (2 * MAX_LOG_BYTES + MAX_REPORT_BYTES),
    )
    if result.exit_code != 0:
        raise RunBroken(f"the tests could not be run ({result.exit_code}): {result.stderr[-200:]!r}")
    try:
        left = json.loads(result.stdout)
    except ValueError as error:
        raise RunBroken(f"the tests could not be run: {repository.python} printed {result.stdout[:200]!r}") from error
    return TestRun(**{**left, "sessions": tuple(Session(**session) for session in left["sessions"])})


def _environment(repository: RepositorySpec, place: _Place) -> dict[str, str]:
    """Of the tests: the task's, and what makes any pytest that the command starts load the plugin."""
    environment = {"PYTHONDONTWRITEBYTECODE": "1", **ANY_OWNER, **repository.environment}
    if not isinstance(repository.grader, TestIds):
        paths = (place.folder, environment.get("PYTHONPATH", ""))
        environment |= {"PYTHONPATH": ":".join(filter(None, paths)), "PYTEST_PLUGINS": place.plugin}
    return environment


def _command(repository: RepositorySpec, place: _Place) -> tuple[list[str], dict[str, str]]:
    """What to start, and the files (name in the tools' folder -> text) it needs."""
    grader = repository.grader
    match grader:
        case TestIds():
            paths = list(dict.fromkeys(test_id.split("::")[0] for test_id in required_ids(grader)))
            arguments = ["-p", place.plugin, "-p", "no:cacheprovider", "-q", *paths]
            text = _MAIN.format(plugin=place.plugin, arguments=arguments)
            return [repository.python, f"{place.folder}/main.py"], {"main.py": text}
        case Script():
            # The same for every run, so that ids can be compared, and nothing that a patch could know.
            name = f"test_{hashlib.sha256(grader.script.encode()).hexdigest()[:16]}.py"
            return [repository.python, f"{place.folder}/{name}"], {name: grader.script}
        case Command():
            return ["/bin/bash", "-c", grader.command], {}
        case Swepro():
            selected = ",".join(grader.selected_test_files)
            return ["/bin/bash", f"{place.folder}/run.sh", selected], {"run.sh": grader.run_script}


async def parse_logs(room: Sandbox, repository: RepositorySpec, grader: Swepro, run: TestRun) -> frozenset[str]:
    """The names that passed, by the task's parser, in a sandbox that the tested code never saw.

    Raises RunBroken, ExecTimeout, SandboxError."""
    folder = f"/opt/{secrets.token_hex(8)}"
    files = {"parser.py": grader.parser_script, "stdout.log": run.stdout, "stderr.log": run.stderr}
    await room.write_many({f"{folder}/{name}": text.encode() for name, text in files.items()})
    arguments = " ".join(f"{folder}/{name}" for name in ("parser.py", "stdout.log", "stderr.log", "result.json"))
    result = await room.exec(f"{repository.python} {arguments}", cwd=folder, timeout_s=120.0)
    if result.exit_code != 0:
        raise RunBroken(f"the parser ended with {result.exit_code}: {result.stderr[-200:]!r}")
    try:
        parsed = json.loads(await room.read(f"{folder}/result.json", max_bytes=MAX_LOG_BYTES))
        return frozenset(test["name"] for test in parsed["tests"] if test["status"] == "PASSED")
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise RunBroken(f"the parser's result is not {{'tests': [{{'name', 'status'}}]}}: {error!r}") from error
    except SandboxError as error:
        raise RunBroken(f"the parser wrote no result: {error}") from error
