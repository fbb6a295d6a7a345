"""The converter of software-engineering data sets to tasks of kind repository.

Rows of four forms: flat SWE-bench and SWE-Gym rows (FAIL_TO_PASS, PASS_TO_PASS, test_patch), OpenClaw's with such a row
in `metadata.instance`, and rows with `metadata` that hold `swepro`, `eval_cmd` or `remote_env_info` (with `f2p_script`,
or the fields of a flat row). Invariants:
- A row becomes a task that can be graded, or a refusal with the line number and the reason, before anything boots. If a
  row has several graders, the first of these is used: swepro, eval_cmd, f2p_script, test ids.
- No part of the grader is in the instruction or in the files that the agent sees; the gold patch is not stored at all.
- Scripts that are given as paths are read only from the folder of the data file or below it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from headrace.buffer.tasks.datasets.recognition import converted
from headrace.buffer.tasks.datasets.rows import Item, RowRefused, read_rows
from headrace.buffer.tasks.evaluators import RepositoryEvaluator
from headrace.buffer.tasks.repositories import EvalCommand, EvalScript, RepositorySpec, Swepro, TestIds, why_unusable
from headrace.buffer.tasks.task import Task, TaskId

_BASE_COMMIT = re.compile(r"git (?:reset --hard|checkout) ([0-9a-f]{40})\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweEnvironment:
    """Settings that rows do not contain. `image` is used for rows without an image; it may contain `{instance_id}`."""

    image: str = ""
    workdir: str = "/testbed"
    python: str = "/usr/bin/python3"
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str = "agent"
    timeout_s: float = 450.0
    """Of one run of the tests; an evaluation may need four, and the recipes of agents give it 1,800 s."""


class _Model(BaseModel):
    # Publishers add columns of their own; only those that are read must have the right type.
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class _Swepro(_Model):
    run_script_path: str
    parser_script_path: str
    before_repo_set_cmd: str | None = None
    selected_test_files: list[str] = []
    fail_to_pass: list[str] = []
    pass_to_pass: list[str] = []


class _Instance(_Model):
    """A flat row, or the value of `remote_env_info`."""

    instance_id: str | None = None
    repo: str | None = None
    image: str | None = None
    image_name: str | None = None
    image_url: str | None = None
    workdir: str | None = None
    base_commit: str | None = None
    problem_statement: str | None = None
    test_patch: str | None = None
    FAIL_TO_PASS: list[str] | str | None = None
    PASS_TO_PASS: list[str] | str | None = None
    f2p_script: str | None = None
    pre_commands: list[str] | str | None = None


class _Metadata(_Instance):
    swepro: _Swepro | None = None
    eval_cmd: str | None = None
    remote_env_info: _Instance | None = None


class _Row(_Model):
    prompt: str | list[dict[str, Any]] = ""
    label: str | None = None
    metadata: _Metadata | None = None


def read_repositories(source: Path, environment: SweEnvironment) -> Iterator[Item]:
    """Yield the tasks of a data file, and the refused rows. Raises OSError, SourceRefused."""
    return converted("swe", read_rows(source), lambda _, row: task_of(row, environment, source.parent))


def read_openclaw(source: Path, environment: SweEnvironment) -> Iterator[Item]:
    """Yield the tasks of a data file of OpenClaw's swe-rl, and the refused rows. Raises OSError, SourceRefused."""
    return converted("openclaw", read_rows(source), lambda _, row: task_of_openclaw(row, environment, source.parent))


def task_of_openclaw(row: object, environment: SweEnvironment, folder: Path) -> Task:
    """Convert a row `{text, metadata: {instance, data_source}}`, in which `instance` is a flat row. Its `eval_script`,
    which changes files as root, is not used: the test ids grade. Raises RowRefused."""
    match row:
        case {"metadata": {"instance": dict(instance)}, "text": str(text)}:
            flat = dict(instance)
        case _:
            raise RowRefused("metadata.instance must be an object, and text a text")
    flat["problem_statement"] = flat.get("problem_statement") or text
    if "FAIL_TO_PASS" not in flat and flat.get("eval_script"):
        raise RowRefused(
            "metadata.instance: eval_script alone cannot grade; add FAIL_TO_PASS, PASS_TO_PASS, test_patch"
        )
    return task_of({key: value for key, value in flat.items() if value is not None}, environment, folder)


def task_of(row: object, environment: SweEnvironment, folder: Path) -> Task:
    """Convert one row to a task; scripts are read from `folder`. Raises RowRefused."""
    try:
        wrapped = _Row.model_validate(row)
        given = wrapped.metadata or _Metadata.model_validate(row)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise RowRefused(f"{'.'.join(map(str, first['loc'])) or 'the row'}: {first['msg']}") from error
    info = given.remote_env_info or given
    instance_id = given.instance_id or info.instance_id or wrapped.label or ""
    image = given.image or info.image or info.image_name or info.image_url or environment.image
    problem = given.problem_statement or info.problem_statement
    if not problem:
        # The prompt itself, or the first text of the user in it.
        texts: list[object] = [wrapped.prompt]
        if isinstance(wrapped.prompt, list):
            texts = [message.get("content") for message in wrapped.prompt if message.get("role") == "user"]
        problem = next((text for text in texts if isinstance(text, str)), "")
    for name, value in (("instance_id", instance_id), ("image", image), ("problem_statement", problem)):
        if not value:
            raise RowRefused(f"{name}: is missing")
    repository = _repository(given, info, environment, folder)
    reason = why_unusable(repository)
    if reason is not None:
        raise RowRefused(reason)
    return Task(
        id=TaskId(instance_id),
        family=f"swe/{given.repo or info.repo or repository.grader.kind}",
        instruction=problem,
        image=image.replace("{instance_id}", instance_id),
        evaluator=RepositoryEvaluator(repository=repository, timeout_s=environment.timeout_s),
    )


def _repository(given: _Metadata, info: _Instance, environment: SweEnvironment, folder: Path) -> RepositorySpec:
    grader = _grader(given, info, folder)
    base = given.base_commit or info.base_commit or ""
    if isinstance(grader, Swepro) and not base:
        found = _BASE_COMMIT.search(grader.before_repo_set_cmd)
        base = found[1] if found else ""
    if isinstance(grader, TestIds) and grader.test_patch and not base:
        raise RowRefused("base_commit: is missing")
    # A list, or one text with escaped line ends.
    commands = given.pre_commands or info.pre_commands
    prepare = commands.replace("\\n", "\n") if isinstance(commands, str) else "\n".join(commands or [])
    return RepositorySpec(
        workdir=given.workdir or info.workdir or environment.workdir,
        grader=grader,
        base_commit=base,
        prepare=(prepare,) if prepare.strip() else (),
        python=environment.python,
        environment=environment.environment,
        user=environment.user,
    )


def _grader(given: _Metadata, info: _Instance, folder: Path) -> TestIds | EvalScript | EvalCommand | Swepro:
    if given.swepro is not None:
        return Swepro(
            run_script=_script(given.swepro.run_script_path, folder),
            parser_script=_script(given.swepro.parser_script_path, folder),
            before_repo_set_cmd=given.swepro.before_repo_set_cmd or "",
            selected_test_files=tuple(given.swepro.selected_test_files),
            fail_to_pass=tuple(given.swepro.fail_to_pass),
            pass_to_pass=tuple(given.swepro.pass_to_pass),
        )
    if given.eval_cmd:
        return EvalCommand(command=given.eval_cmd)
    script = info.f2p_script or given.f2p_script
    if script:
        return EvalScript(script=script)
    if info.FAIL_TO_PASS is None:
        raise RowRefused("the row has no grader: add one of swepro, eval_cmd, f2p_script and FAIL_TO_PASS")
    if info.test_patch and not info.test_patch.strip():
        raise RowRefused("test_patch: is empty")
    # Without a test patch, as in SWE-smith's rows, the tests are in the image.
    return TestIds(
        fail_to_pass=_ids(info.FAIL_TO_PASS, "FAIL_TO_PASS"),
        pass_to_pass=_ids(info.PASS_TO_PASS or [], "PASS_TO_PASS"),
        test_patch=info.test_patch or "",
    )


def _script(name: str, folder: Path) -> str:
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise RowRefused(f"{name!r} is outside the data file's folder")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RowRefused(f"cannot read {name!r}: {error}") from error


def _ids(given: list[str] | str, name: str) -> tuple[str, ...]:
    """Return the test ids from a list, or from a JSON string of one, as in SWE-bench."""
    ids = given
    if isinstance(given, str):
        try:
            ids = json.loads(given)
        except ValueError as error:
            raise RowRefused(f"{name}: must be a list, or the JSON text of one") from error
    if not isinstance(ids, list) or not all(isinstance(test_id, str) for test_id in ids):
        raise RowRefused(f"{name}: must be a list of strings")
    return tuple(ids)
