"""The specification of repository tasks: the repository, its tests, and which results get reward 1.

Invariant: a spec that `why_unusable` passes can be graded; others are refused before anything boots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator

from headrace.buffer.primitives.sections import StrictRecord
from headrace.buffer.tasks.unified_diff import why_not_applicable


@dataclass(frozen=True, slots=True, kw_only=True)
class TestIds(StrictRecord):
    """FAIL_TO_PASS and PASS_TO_PASS rows: pytest runs the files of these ids after `test_patch` has been applied. The
    reward is 1 if every id passed; a missing id counts as not passed. Ids are cut at their first blank, as SWE-bench
    writes them."""

    __test__: ClassVar[bool] = False

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...] = ()
    test_patch: str = ""
    kind: Literal["test_ids"] = "test_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalScript(StrictRecord):
    """`remote_env_info.f2p_script`: Python source that ends in `sys.exit(pytest.main(...))`, run as a file outside the
    repository. The reward is 1 if at least one test passed, none failed, and no test that runs on the untouched
    repository was skipped."""

    script: str
    kind: Literal["f2p_script"] = "f2p_script"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalCommand(StrictRecord):
    """`eval_cmd`: a shell command that runs pytest. It is scored like a script; its exit code is ignored."""

    command: str
    kind: Literal["eval_cmd"] = "eval_cmd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Swepro(StrictRecord):
    """`swepro`: `before_repo_set_cmd` (shell) puts the tests in place, `run_script` (bash) gets the selected test files
    joined by commas, `parser_script` (Python) turns the logs of that run into `{"tests": [{"name", "status"}]}`.
    The reward is 1 if every name in both lists has the status PASSED."""

    run_script: str
    parser_script: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...] = ()
    before_repo_set_cmd: str = ""
    selected_test_files: tuple[str, ...] = ()
    kind: Literal["swepro"] = "swepro"


Grader = Annotated[TestIds | EvalScript | EvalCommand | Swepro, Discriminator("kind")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositorySpec(StrictRecord):
    """A repository at `workdir` (an absolute path; from the image or the task's files), and the grader of patches to
    it."""

    workdir: str
    grader: Grader
    base_commit: str = ""
    """Commit that is checked out first, if it differs from the image's HEAD."""
    prepare: tuple[str, ...] = ()
    """Shell commands run as root in `workdir` before the agent starts, and again in every clean sandbox."""
    python: str = "/usr/bin/python3"
    """Absolute path of the Python interpreter that runs the tests, version 3.7 or later."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the tests."""
    user: str = "agent"
    """User that runs the tests and owns the tree, except the tests themselves. If this were root, the code
    under test could change the tests while they run."""
    test_files: tuple[str, ...] = ()
    """Files and folders in the repository that a patch cannot change; the grader protects further
    ones, and so do certain names (`tests/`, `test_*.py`)."""


def required_ids(grader: TestIds | EvalScript | EvalCommand | Swepro) -> tuple[str, ...]:
    """Return the test ids that must pass, without duplicates; empty if the grader names none."""
    if isinstance(grader, TestIds | Swepro):
        return tuple(dict.fromkeys((*grader.fail_to_pass, *grader.pass_to_pass)))
    return ()


def why_unusable(spec: RepositorySpec) -> str | None:
    """Return the key and reason for the first value that is invalid although its type is right; None if there is
    none."""
    grader = spec.grader
    if not is_plain_path(spec.workdir):
        return f"workdir: {spec.workdir!r} must be an absolute path without '.' or '..'"
    if not is_plain_path(spec.python):
        return f"python: {spec.python!r} must be an absolute path"
    for path in spec.test_files:
        if not is_plain_path(f"/{path}"):
            return f"test_files: {path!r} must be a path in the repository without '.' or '..'"
    if isinstance(grader, TestIds | Swepro) and not required_ids(grader):
        return "grader.fail_to_pass: is empty; name at least one test that must pass"
    if isinstance(grader, TestIds):
        for test_id in required_ids(grader):
            if not is_plain_path("/" + test_id.split("::")[0]) or "::" not in test_id:
                return f"grader.fail_to_pass: {test_id!r} is not a test id of pytest (path::name)"
        if grader.test_patch and (reason := why_not_applicable(grader.test_patch)):
            return f"grader.test_patch: cannot be applied: {reason}"
    for name in ("script", "command", "run_script", "parser_script"):
        if not getattr(grader, name, "x").strip():
            return f"grader.{name}: is empty"
    return None


def is_plain_path(path: str) -> bool:
    """Return whether a path is absolute and has no empty, `.` or `..` parts."""
    parts = path.split("/")
    return len(parts) > 1 and parts[0] == "" and all(parts[1:]) and not {".", ".."} & set(parts) and "\0" not in path
