"""Tasks, each of which is one problem, read from JSONL files with a documented schema (docs/tasks.md).

Invariants:
- A task file is accepted as a whole or not at all: at the first bad line it is refused with the file, line, key and
  fix.
- Ids are unique in a file. A task is frozen data: it holds the contents that its `{"file": ...}` references had when
  the task was read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NewType

from pydantic import TypeAdapter, ValidationError

from headrace.buffer.errors import TaskFileError
from headrace.buffer.primitives.sections import StrictRecord
from headrace.buffer.tasks.evaluators import EvaluatorSpec, KeyFault, RepositoryEvaluator, SumEvaluator
from headrace.buffer.tasks.parts import (
    BinaryFile,
    EnvironmentSpec,
    TaskLimits,
    TaskMessage,
    TaskOrigin,
    secret_in_prompt,
)
from headrace.buffer.tasks.repositories import RepositorySpec, is_plain_path

TaskId = NewType("TaskId", str)
BINARY_FILES: Final = "binary_files"
"""Folder beside a task file for copies of binary files, named by their SHA-256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(StrictRecord):
    """A problem for the agent. `files` (absolute path inside the sandbox -> text) are written before the agent
    starts."""

    id: TaskId
    family: str
    instruction: str
    evaluator: EvaluatorSpec
    image: str = "host"
    files: Mapping[str, str] = field(default_factory=dict)
    binary_files: Mapping[str, BinaryFile] = field(default_factory=dict)
    """Further files, by absolute path in the sandbox, whose bytes are beside the task file."""
    messages: tuple[TaskMessage, ...] = ()
    """Messages that open the conversation; without any, the agent's templates show the instruction."""
    environment: EnvironmentSpec | None = None
    limits: TaskLimits = field(default_factory=TaskLimits)
    origin: TaskOrigin | None = None

    @property
    def evaluators(self) -> tuple[EvaluatorSpec, ...]:
        """The evaluators that score: those of a sum, or the task's own."""
        own = self.evaluator
        return tuple(part.evaluator for part in own.parts) if isinstance(own, SumEvaluator) else (own,)

    @property
    def repository(self) -> RepositorySpec | None:
        """The repository that the task's evaluator, or one of its parts, grades."""
        return next((spec.repository for spec in self.evaluators if isinstance(spec, RepositoryEvaluator)), None)


def load_tasks(path: Path) -> tuple[Task, ...]:
    """Read a JSONL file of tasks, in order. Raises TaskFileError for the first error."""
    return tuple(read_tasks(path))


def read_tasks(path: Path) -> Iterator[Task]:
    """Yield the tasks of a JSONL file, in order. Of those before only the ids are kept. Raises TaskFileError for the
    first error."""
    first_lines: dict[TaskId, int] = {}
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                task = parse_task(line, path.parent, where=f"{path}:{number}")
                if (before := first_lines.setdefault(task.id, number)) != number:
                    raise TaskFileError(
                        f"{path}:{number}: id: {task.id!r} is a duplicate of line {before}; give each task its own id"
                    )
                yield task
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise TaskFileError(f"{path}: cannot be read: {reason}; give the path of a JSONL file of tasks") from error
    if not first_lines:
        raise TaskFileError(f"{path}: has no tasks; see the guide 'Task files' for the format")


def write_tasks(path: Path, tasks: Iterable[Task]) -> None:
    """Write a JSONL file that `load_tasks` reads back as equal tasks. Binary files are copied to a folder beside it,
    named by their digests. Raises OSError, TaskFileError."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(task_line(task, path.parent) for task in tasks)


def task_line(task: Task, folder: Path) -> str:
    """Return the line of a task in a task file in `folder`, where its binary files are copied to. Raises OSError,
    TaskFileError."""
    document = _document(task)
    for name, binary in task.binary_files.items():
        copy = folder / BINARY_FILES / binary.sha256
        if not copy.exists():
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(binary.read())
        document["binary_files"][name]["file"] = f"{BINARY_FILES}/{binary.sha256}"
    return f"{_text(document)}\n"


def task_digest(task: Task) -> str:
    """Return the SHA-256 of all fields of a task, in hexadecimal; two digests are equal exactly when the tasks are."""
    return hashlib.sha256(_text(_document(task)).encode()).hexdigest()


def tasks_digest(tasks: Iterable[Task]) -> str:
    """Return the SHA-256 over the digests of tasks, in order and in hexadecimal."""
    return hashlib.sha256("\n".join(map(task_digest, tasks)).encode()).hexdigest()


def _document(task: Task) -> dict[str, Any]:
    """Return a task as JSON, without the paths of its binary files."""
    document: dict[str, Any] = _plain(task)
    for binary in document.get("binary_files", {}).values():
        del binary["file"]
    return document


def _plain(value: Any) -> Any:
    """Return a value as JSON. Fields at their defaults are left out, so that lines stay short."""
    match value:
        case Mapping():
            return {key: _plain(each) for key, each in value.items()}
        case tuple() | list():
            return [_plain(each) for each in value]
        case _ if not is_dataclass(value):
            return value
    document = {}
    for each in fields(value):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if (found := getattr(value, each.name)) != default or each.name == "kind":
            document[each.name] = _plain(found)
    return document


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, ensure_ascii=False)


def parse_task(line: str, folder: Path, *, where: str) -> Task:
    """Return the task in a line of a task file in `folder`; `where` opens the messages. Raises TaskFileError."""
    try:
        document = json.loads(line, object_pairs_hook=_unique_keys)
    except _DuplicateKey as error:
        raise TaskFileError(f"{where}: {error}: duplicate key; keep one") from error
    except ValueError as error:
        raise TaskFileError(f"{where}: not valid JSON: {error}; write one JSON object per line") from error
    if not isinstance(document, dict):
        raise TaskFileError(f"{where}: must be one JSON object, not {type(document).__name__} (guide 'Task files')")
    # Replace every `{"file": "relative/path"}` by the text of that file.
    evaluator = document.get("evaluator")
    holders: list[tuple[str, Any]] = [("files", document.get("files"))]
    evaluators = [("evaluator", evaluator)]
    if isinstance(evaluator, dict) and isinstance(evaluator.get("parts"), list):
        parts = [part for part in evaluator["parts"] if isinstance(part, dict)]
        evaluators += [(f"evaluator.parts.{part.get('name')}", part.get("evaluator")) for part in parts]
    for key, spec in evaluators:
        if isinstance(spec, dict):
            holders.append((f"{key}.hidden_files", spec.get("hidden_files")))
            if isinstance(spec.get("check"), dict):
                spec["check"] = _read_reference(spec["check"], folder, where=f"{where}: {key}.check")
            judge = spec.get("judge")
            if isinstance(judge, dict) and isinstance(judge.get("template"), dict):
                where_judge = f"{where}: {key}.judge.template"
                judge["template"] = _read_reference(judge["template"], folder, where=where_judge)
    for key, holder in holders:
        for name, value in holder.items() if isinstance(holder, dict) else ():
            if isinstance(value, dict):
                holder[name] = _read_reference(value, folder, where=f"{where}: {key}.{name}")
    binary_files = document.get("binary_files")
    for name, reference in binary_files.items() if isinstance(binary_files, dict) else ():
        if isinstance(reference, dict) and isinstance(reference.get("file"), str):
            _find_binary(reference, folder, where=f"{where}: binary_files.{name}")
    try:
        task = _adapter().validate_json(json.dumps(document))
    except ValidationError as error:
        raise TaskFileError(f"{where}: {_explain(error)}") from error
    _check_values(task, where=where)
    return task


@cache
def _adapter() -> TypeAdapter[Task]:
    # Built on first use, because that takes long.
    return TypeAdapter(Task)


class _DuplicateKey(ValueError):
    """A JSON object has a duplicate key; the message is the key."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _DuplicateKey(key)
        found[key] = value
    return found


def _read_reference(reference: dict[str, Any], folder: Path, *, where: str) -> str:
    name = reference.get("file")
    if not isinstance(name, str) or len(reference) != 1:
        raise TaskFileError(f'{where}: must be text, or {{"file": "path beside the task file"}}')
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise TaskFileError(f"{where}: {name!r} is outside the task file's folder; put the file beside the task file")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise TaskFileError(f"{where}: cannot read {path}: {reason}; add the file or correct the name") from error


def _find_binary(reference: dict[str, Any], folder: Path, *, where: str) -> None:
    """Make the path of a binary file absolute, and add its digest and size unless both are given."""
    path = folder / reference["file"]
    if not path.resolve().is_relative_to(folder.resolve()):
        raise TaskFileError(f"{where}: {reference['file']!r} is outside the task file's folder; put it beside it")
    try:
        if not {"sha256", "size"} <= reference.keys():
            content = path.read_bytes()
            reference |= {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        elif path.stat().st_size != reference["size"]:
            raise TaskFileError(f"{where}: {path} does not have {reference['size']} bytes; restore the file")
    except OSError as error:
        raise TaskFileError(f"{where}: cannot read {path}: {error.strerror}; add the file") from error
    reference["file"] = str(path)


def _explain(error: ValidationError) -> str:
    """Return pydantic's first error as one line: key, error and fix."""
    first = error.errors(include_url=False)[0]
    # Pydantic names the kind of an object after its key.
    steps = list(zip(("", *first["loc"]), first["loc"], strict=False))
    key = ".".join(str(step) for before, step in steps if before not in _TAGGED) or "the task"
    match first["type"]:
        case "unexpected_keyword_argument" | "extra_forbidden":
            of_kind = f" of the kind {steps[-2][1]}" if len(steps) > 2 and steps[-2][0] in _TAGGED else ""
            return f"{key}: unknown field{of_kind}; remove it or correct its name (guide 'Task files' lists all fields)"
        case "missing" | "missing_keyword_only_argument" | "missing_argument":
            return f"{key}: is missing; add it (guide 'Task files' lists all fields)"
        case "union_tag_not_found":
            return f"{key}.kind: is missing; add it (guide 'Task files' lists all fields)"
        case "union_tag_invalid":
            return f"{key}.kind: must be one of {first['ctx']['expected_tags']}, found {first['ctx']['tag']!r}"
        case "value_error":
            fault = first["ctx"]["error"]
            return f"{key}.{fault}" if isinstance(fault, KeyFault) else f"{key}: {fault}"
        case _:
            if "secret" in first["loc"]:
                return f"{key}: {first['msg']}"
            return f"{key}: {first['msg']}, found {str(first['input'])[:60]!r}"


_TAGGED: Final = ("evaluator", "grader")
"""Keys of objects whose `kind` says which fields they have."""


def _check_values(task: Task, *, where: str) -> None:
    """Check what the types cannot express. Raises TaskFileError."""
    for key, text in (("id", task.id), ("instruction", task.instruction), ("image", task.image)):
        if not text:
            raise TaskFileError(f"{where}: {key}: is empty; write some text")
    for path in (*task.files, *task.binary_files):
        if not is_plain_path(path):
            raise TaskFileError(f"{where}: files: {path!r} must be an absolute path without '.' or '..'")
    _check_parts(task, where=where)
    if (fault := task.evaluator.fault()) is not None:
        raise TaskFileError(f"{where}: evaluator.{fault}")


def _check_parts(task: Task, *, where: str) -> None:
    """Check messages, environment, limits and binary files. Raises TaskFileError."""
    for name, limit in task.limits.items():
        if not 0 < limit < float("inf"):
            raise TaskFileError(f"{where}: limits.{name}: {limit} must be a number above 0")
    if both := sorted(task.files.keys() & task.binary_files.keys()):
        raise TaskFileError(f"{where}: binary_files: {both[0]!r} is also in files; keep one")
    if task.messages and task.messages[-1].role != "user":
        raise TaskFileError(f"{where}: messages: the last one must be the user's, which the policy answers")
    prompt = "\n".join((task.instruction, *(message.content for message in task.messages)))
    if task.environment is not None:
        if not task.environment.kind:
            raise TaskFileError(f"{where}: environment.kind: is empty; name an environment")
        # Of the agent's prompt as this task writes it; what an environment shows is its own responsibility.
        shown = f"{prompt}\n{json.dumps(task.environment.given, ensure_ascii=False)}"
        if (text := secret_in_prompt(task.environment.secret, shown)) is not None:
            raise TaskFileError(f"{where}: the prompt contains the environment's secret ({text[:12]!r}...); remove it")
    if any(secret_in_prompt(getattr(spec, "hidden_files", {}), prompt) is not None for spec in task.evaluators):
        raise TaskFileError(f"{where}: the prompt contains a hidden file of the evaluator; remove it")
