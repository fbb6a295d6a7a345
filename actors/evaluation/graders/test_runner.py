"""The test runner, which runs a repository task's tests in a clean sandbox and collects their reports.

Invariants:
- In every run the reporting plugin has a random name and lives in a folder that only root can write to. The report is
  never stored in a file there (see `in_sandbox.monitor`).
- The command cannot import the repository's code in place of pytest or the plugin.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from headrace.actors.evaluation.graders.history import ANY_OWNER
from headrace.actors.evaluation.graders.report import PytestSession
from headrace.actors.evaluation.in_sandbox import program_command, source
from headrace.actors.evaluation.in_sandbox.monitor import NO_USER
from headrace.buffer.tasks.repositories import EvalCommand, EvalScript, RepositorySpec, Swepro, TestIds, required_ids
from headrace.sandboxes.base import Sandbox
from headrace.sandboxes.errors import SandboxError

MAX_REPORT_BYTES: Final = 32 << 20
MAX_LOG_BYTES: Final = 8 << 20
_CUT_S: Final = 30.0
"""Extra time that the monitor has to stop tests at their deadline and return their report."""
_MAIN: Final = """\
import os, sys
path, here = sys.path[1:], os.getcwd()
sys.path[1:] = [entry for entry in path if not (entry + "/").startswith(here + "/")]
import pytest, {plugin}
sys.path[:] = [here, *path]
sys.exit(pytest.main({arguments!r}, plugins=[{plugin}]))
"""
"""Imports pytest before the repository is on the path, be it by `python -m pytest` or by PYTHONPATH."""


class RunBroken(Exception):
    """The tests could not be run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestRun:
    """Result of a test command: its logs, truncated at MAX_LOG_BYTES each, and the pytest reports."""

    __test__ = False

    exit_code: int
    stdout: str
    stderr: str
    sessions: tuple[PytestSession, ...]
    intruded: bool = False
    """True if the code under test tried to start a session of its own."""
    cut: bool = False
    """True if the tests were stopped at the timeout; the sessions have the results so far."""


@dataclass(frozen=True, slots=True)
class _Tools:
    """The tools folder of one run and the name of the plugin."""

    folder: str = field(default_factory=lambda: f"/opt/{secrets.token_hex(8)}")
    plugin: str = field(default_factory=lambda: f"p{secrets.token_hex(8)}")


async def run_tests(
    sandbox: Sandbox,
    repository: RepositorySpec,
    protected: Iterable[str],
    timeout_s: float,
    *,
    uncollected: Iterable[str] = (),
    twins: bool = False,
) -> TestRun:
    """Run the grader's tests, or their twins. `protected` lists repository paths that the user running the tests must
    not be able to change, `uncollected` those that look like tests and are none. Tests are stopped at the timeout.

    Raises RunBroken, ExecTimeout, SandboxError."""
    tools = _Tools()
    command, files = _command(repository, tools)
    environment = {"PYTHONDONTWRITEBYTECODE": "1", **ANY_OWNER, **repository.environment}
    if not isinstance(repository.grader, TestIds):
        # Makes every pytest that the command starts load the plugin.
        paths = (tools.folder, environment.get("PYTHONPATH", ""))
        environment |= {"PYTHONPATH": ":".join(filter(None, paths)), "PYTEST_PLUGINS": tools.plugin}
    settings = {
        "command": command,
        "workdir": repository.workdir,
        "user": repository.user,
        "protected": [f"{repository.workdir}/{path}" for path in sorted(protected)],
        "environment": environment,
        "uncollected": [f"{repository.workdir}/{path}" for path in sorted(uncollected)],
        "twins": twins,
        "deadline_s": timeout_s,
        "max_log_bytes": MAX_LOG_BYTES,
        "max_report_bytes": MAX_REPORT_BYTES,
    }
    files |= {f"{tools.plugin}.py": source("canary_plugin"), "settings": json.dumps(settings)}
    await sandbox.write_many({f"{tools.folder}/{name}": text.encode() for name, text in files.items()})
    result = await sandbox.exec(
        program_command(repository.python, "monitor", f"{tools.folder}/settings"),
        cwd="/",
        timeout_s=timeout_s + _CUT_S,
        max_output_bytes=6 * (2 * MAX_LOG_BYTES + MAX_REPORT_BYTES),
    )
    if result.exit_code == NO_USER:
        raise RunBroken(f"the tests could not be run: there is no user {repository.user!r}")
    if result.exit_code != 0:
        raise RunBroken(f"the tests could not be run ({result.exit_code}): {result.stderr[-200:]!r}")
    try:
        left = json.loads(result.stdout)
    except ValueError as error:
        raise RunBroken(f"the tests could not be run: {repository.python} printed {result.stdout[:200]!r}") from error
    return TestRun(**{**left, "sessions": tuple(PytestSession(**session) for session in left["sessions"])})


def _command(repository: RepositorySpec, tools: _Tools) -> tuple[list[str], dict[str, str]]:
    """Return the command to run and, by name, the contents of the files that it needs in the tools folder."""
    grader = repository.grader
    match grader:
        case TestIds():
            paths = list(dict.fromkeys(test_id.split("::")[0] for test_id in required_ids(grader)))
            # The user of the tests may not be able to write to the repository, and its options may need a cache.
            arguments = ["-o", f"cache_dir=/tmp/{tools.plugin}", "-q", *paths]
            text = _MAIN.format(plugin=tools.plugin, arguments=arguments)
            return [repository.python, f"{tools.folder}/main.py"], {"main.py": text}
        case EvalScript():
            # The same in every run, so that ids can be compared, but unknown to a patch.
            name = f"test_{hashlib.sha256(grader.script.encode()).hexdigest()[:16]}.py"
            return [repository.python, f"{tools.folder}/{name}"], {name: grader.script}
        case EvalCommand():
            return ["/bin/bash", "-c", grader.command], {}
        case Swepro():
            selected = ",".join(grader.selected_test_files)
            return ["/bin/bash", f"{tools.folder}/run.sh", selected], {"run.sh": grader.run_script}


async def parse_logs(sandbox: Sandbox, repository: RepositorySpec, grader: Swepro, run: TestRun) -> frozenset[str]:
    """Return the names of passed tests, as found by the task's parser in a sandbox that the tested code never ran in.

    Raises RunBroken, ExecTimeout, SandboxError."""
    folder = f"/opt/{secrets.token_hex(8)}"
    files = {"parser.py": grader.parser_script, "stdout.log": run.stdout, "stderr.log": run.stderr}
    await sandbox.write_many({f"{folder}/{name}": text.encode() for name, text in files.items()})
    arguments = " ".join(f"{folder}/{name}" for name in ("parser.py", "stdout.log", "stderr.log", "result.json"))
    result = await sandbox.exec(f"{repository.python} {arguments}", cwd=folder, timeout_s=120.0)
    if result.exit_code != 0:
        raise RunBroken(f"the parser failed with exit code {result.exit_code}: {result.stderr[-200:]!r}")
    try:
        parsed = json.loads(await sandbox.read(f"{folder}/result.json", max_bytes=MAX_LOG_BYTES))
        return frozenset(test["name"] for test in parsed["tests"] if test["status"] == "PASSED")
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise RunBroken(f"the parser's result is not {{'tests': [{{'name', 'status'}}]}}: {error!r}") from error
    except SandboxError as error:
        raise RunBroken(f"the parser wrote no result: {error}") from error
