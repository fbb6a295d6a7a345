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
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final, NewType, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from headrace.buffer.errors import TaskFileError
from headrace.buffer.tasks.parts import (
    MAX_REWARD,
    STRICT,
    BinaryFile,
    EnvironmentSpec,
    JudgeSpec,
    TaskLimits,
    TaskMessage,
    TaskOrigin,
    secret_in_prompt,
    why_no_judge,
)
from headrace.buffer.tasks.repositories import RepositorySpec, is_plain_path, why_unusable
from headrace.buffer.tasks.verifiers import VerifierSpec, why_not_runnable

TaskId = NewType("TaskId", str)
_STRICT: Final = STRICT


PYTHON: Final = "/usr/bin/python3"
BINARY_FILES: Final = "binary_files"
"""Folder beside a task file for copies of binary files, named by their SHA-256."""


class EvaluatorKind(StrEnum):
    """Kind of evaluator, which scores the files that the agent left."""

    STATE = "state"
    """The agent's frozen data paths are mounted read-only in a clean sandbox, where `check` runs."""
    PATCH = "patch"
    """The changed text files under the data paths are applied to fresh copies in a second clean sandbox, with
    `hidden_files`, and `check` runs there. The agent never saw the hidden files."""
    COMPARE = "compare"
    """Like `patch`, but `check` only computes: it runs as another user and binds `result` to plain data, which is
    compared with `expected` outside the sandbox. The agent's code gains nothing by manipulating the process of the
    check."""
    REPOSITORY = "repository"
    """The agent's changes to a git repository are filtered, applied to a clean copy and graded by its tests
    (`repository`). If `check` and `expected` are given, its result is compared as well."""
    VERIFIER = "verifier"
    """A script or tests, which come to the sandbox after the agent's end, score its state (`verifier`)."""
    PLUGIN = "plugin"
    """A function in another package scores the files that the agent left (`plugin`; docs/extending.md)."""
    NONE = "none"
    """Every finished rollout gets reward 1, without a sandbox; only for measuring the orchestration."""
    ANSWER = "answer"
    """The answer in the agent's last message is compared with the targets (`answer`), without a sandbox."""
    FUNCTION = "function"
    """A function in a process of its own scores the record of the episode (`function`), without a sandbox."""
    HTTP = "http"
    """A reward server (`service`) scores the record of the episode, without a sandbox."""
    JUDGE = "judge"
    """A model (`service`) votes on the record of the episode (`judge`), without a sandbox."""
    SUM = "sum"
    """The weighted sum of several evaluators' rewards counts (`parts`)."""
    ENVIRONMENT = "environment"
    """The environment's own verdict counts, without a sandbox."""
    SIMULATED = "simulated"
    """No sandbox is used: after `seconds`, the reward is 1 with probability `success`, drawn with the attempt's name as
    the seed. Both are given in `expected`."""


OF_EPISODES: Final = (
    EvaluatorKind.ANSWER,
    EvaluatorKind.ENVIRONMENT,
    EvaluatorKind.FUNCTION,
    EvaluatorKind.HTTP,
    EvaluatorKind.JUDGE,
)
"""Kinds that score the record of an episode: what was said, and the artifacts of its end."""
OF_SERVICES: Final = (EvaluatorKind.HTTP, EvaluatorKind.JUDGE)
"""Kinds that call a service of the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSpec:
    """Settings of the kind `answer`. The answer is the text of the last pair of tags; it scores 1 if, after
    normalisation (lower case, no punctuation, no articles, single spaces), it equals a target. The format scores are
    those of Search-R1: `structure` for a conversation in which every search is followed by its passages and one answer
    ends it, `retrieval` on top of that if a passage contains a target, and `final` for any answer. A correct answer in
    a conversation of another structure scores 1 - `structure`."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    targets: tuple[str, ...] = ()
    tag: str = "answer"
    structure: float = 0.0
    retrieval: float = 0.0
    final: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardMap:
    """Rewards in place of an evaluator's own, by whether it found the task solved."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    solved: float = 1.0
    failed: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorSpec:
    """Evaluator of a task. `check` is Python source; exit code 0 means reward 1, exit code 1 means reward 0, and any
    other exit code means that the evaluator failed. A check that binds `reward` returns that reward instead
    (docs/tasks.md). `python` is the interpreter in the image that runs the check. `data_paths` are absolute paths in
    the agent's sandbox; nothing else in it is evaluated. `hidden_files` maps absolute paths to text; `test_files` are
    absolute paths whose files are always the task's own (compare). `expected` is JSON."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    kind: EvaluatorKind
    check: str = ""
    data_paths: tuple[str, ...] = ("/workspace",)
    hidden_files: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 20.0
    expected: str = ""
    test_files: tuple[str, ...] = ()
    repository: RepositorySpec | None = None
    python: str = PYTHON
    verifier: VerifierSpec | None = None
    plugin: str = ""
    """Function for the kind `plugin`: `package.module:function`, or the name of an entry point. The function defines
    the meaning of `check` and `expected`."""
    answer: AnswerSpec | None = None
    rewards: RewardMap | None = None
    """Rewards in place of the evaluator's own. A rollout that it could not score still has none."""
    function: str = ""
    """Function for the kind `function`: `package.module:function`."""
    service: str = ""
    """Service of the recipe (`[services.NAME]`) for the kinds `http` and `judge`."""
    judge: JudgeSpec | None = None
    """Settings of the kind `judge`, which has defaults."""
    parts: tuple[EvaluatorPart, ...] = ()
    """Evaluators of the kind `sum`; the first one decides whether the task is solved."""

    @property
    def deciding(self) -> tuple[EvaluatorSpec, ...]:
        """The evaluators that score: those of a sum, or this one."""
        return tuple(part.evaluator for part in self.parts) if self.parts else (self,)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorPart:
    """One evaluator of a sum, and the weight of its reward."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    evaluator: EvaluatorSpec
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedVerdict:
    """Verdict of a simulated evaluator: the probability of reward 1, and the duration of the evaluation, which is
    `slow_factor` times as long for `slow_share` of the attempts."""

    success: float
    seconds: float = 0.0
    slow_share: float = 0.0
    slow_factor: float = 1.0

    @classmethod
    def parse(cls, expected: str) -> Self:
        """Parse `EvaluatorSpec.expected`. Raises ValueError."""
        document = json.loads(expected)
        known = {each.name for each in fields(cls)}
        if not isinstance(document, dict) or not set(document) <= known or "success" not in document:
            raise ValueError("must be an object with success and, optionally, seconds, slow_share and slow_factor")
        verdict = cls(**{key: float(value) for key, value in document.items()})
        if not 0 <= verdict.success <= 1 or not 0 <= verdict.seconds < float("inf"):
            raise ValueError("success must be from 0 to 1, and seconds must not be negative")
        if not 0 <= verdict.slow_share <= 1 or not 1 <= verdict.slow_factor < float("inf"):
            raise ValueError("slow_share must be from 0 to 1, and slow_factor at least 1")
        return verdict

    def expected(self) -> str:
        """Return the string that `parse` reads."""
        document = asdict(self)
        if not self.slow_share:
            del document["slow_share"], document["slow_factor"]
        return json.dumps(document, sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A problem for the agent. `files` (absolute path inside the sandbox -> text) are written before the agent
    starts."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

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
    def repository(self) -> RepositorySpec | None:
        """The repository that the task's evaluator, or one of its parts, grades."""
        return next((spec.repository for spec in self.evaluator.deciding if spec.repository is not None), None)


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
        raise TaskFileError(f"{path}: has no tasks; see docs/tasks.md for the format")


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
    document = asdict(task)
    # Optional fields are left out at their defaults, so that lines stay short.
    for evaluator in (document["evaluator"], *(part["evaluator"] for part in document["evaluator"]["parts"])):
        for name, default in _OPTIONAL_EVALUATOR_FIELDS.items():
            if evaluator[name] == default:
                del evaluator[name]
    for name in ("binary_files", "messages", "environment", "limits", "origin"):
        if not document[name] or document[name] == _NO_LIMITS:
            del document[name]
    if "limits" in document:
        document["limits"] = dict(task.limits.items())
    for binary in document.get("binary_files", {}).values():
        del binary["file"]
    return document


_OPTIONAL_EVALUATOR_FIELDS: Final = {
    "python": PYTHON,
    "plugin": "",
    "answer": None,
    "verifier": None,
    "rewards": None,
    "function": "",
    "parts": (),
    "service": "",
    "judge": None,
}
_NO_LIMITS: Final = asdict(TaskLimits())


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
        raise TaskFileError(f"{where}: must be one JSON object, not {type(document).__name__}; see docs/tasks.md")
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
    key = ".".join(map(str, first["loc"])) or "the task"
    match first["type"]:
        case "unexpected_keyword_argument" | "extra_forbidden":
            return f"{key}: unknown field; remove it or correct its name (docs/tasks.md lists all fields)"
        case "missing" | "missing_keyword_only_argument" | "missing_argument":
            return f"{key}: is missing; add it (docs/tasks.md lists all fields)"
        case _:
            if "secret" in first["loc"]:
                return f"{key}: {first['msg']}"
            return f"{key}: {first['msg']}, found {str(first['input'])[:60]!r}"


def _check_values(task: Task, *, where: str) -> None:
    """Check what the types cannot express. Raises TaskFileError."""
    for key, text in (("id", task.id), ("instruction", task.instruction), ("image", task.image)):
        if not text:
            raise TaskFileError(f"{where}: {key}: is empty; write some text")
    files = {**task.files, **task.binary_files}
    _check_paths(files, where=f"{where}: files")
    _check_parts(task, where=where)
    _check_evaluator(task.evaluator, where=f"{where}: evaluator")
    names = [part.name for part in task.evaluator.parts]
    for part in task.evaluator.parts:
        if not part.name or names.count(part.name) > 1:
            raise TaskFileError(f"{where}: evaluator.parts: {part.name!r} must be a name of its own")
        if part.evaluator.kind in _NOT_IN_SUMS or (
            part.evaluator.verifier is not None and part.evaluator.verifier.live
        ):
            raise TaskFileError(
                f"{where}: evaluator.parts.{part.name}: a sum has no part of the kinds {', '.join(_NOT_IN_SUMS)} and "
                "no live verifier; remove it"
            )
        if not abs(part.weight) <= MAX_REWARD:
            raise TaskFileError(f"{where}: evaluator.parts.{part.name}.weight: {part.weight} must be a finite number")
        _check_evaluator(part.evaluator, where=f"{where}: evaluator.parts.{part.name}")
    if sum(spec.repository is not None for spec in task.evaluator.deciding) > 1:
        raise TaskFileError(f"{where}: evaluator.parts: more than one has a repository; keep one")


_NOT_IN_SUMS: Final = (EvaluatorKind.SUM, EvaluatorKind.NONE, EvaluatorKind.SIMULATED)


def _check_paths(paths: Iterable[str], *, where: str) -> None:
    for path in paths:
        if not is_plain_path(path):
            raise TaskFileError(f"{where}: {path!r} must be an absolute path without '.' or '..'")


def _check_evaluator(evaluator: EvaluatorSpec, *, where: str) -> None:
    """Check the values of one evaluator. Raises TaskFileError."""
    for key in ("hidden_files", "data_paths", "test_files"):
        _check_paths(getattr(evaluator, key), where=f"{where}.{key}")
    if not 0 < evaluator.timeout_s < float("inf"):
        raise TaskFileError(f"{where}.timeout_s: {evaluator.timeout_s} must be a number above 0")
    _check_kind(evaluator, where=where)
    _check_python(evaluator, where=f"{where}.python")
    if evaluator.kind is EvaluatorKind.STATE:
        for path in evaluator.hidden_files:
            if (above := _data_path_above(path, evaluator)) is not None:
                raise TaskFileError(
                    f"{where}.hidden_files: {path!r} is below the data path {above!r}, which is mounted "
                    "read-only; put it elsewhere"
                )


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
    hidden = [dict(spec.hidden_files) for spec in task.evaluator.deciding]
    if any(secret_in_prompt(files, prompt) is not None for files in hidden):
        raise TaskFileError(f"{where}: the prompt contains a hidden file of the evaluator; remove it")


_WITH_PYTHON: Final = (EvaluatorKind.STATE, EvaluatorKind.PATCH, EvaluatorKind.COMPARE, EvaluatorKind.VERIFIER)


def _check_python(evaluator: EvaluatorSpec, *, where: str) -> None:
    python = evaluator.python
    if not is_plain_path(python) or shlex.quote(python) != python:
        raise TaskFileError(
            f"{where}: {python!r} must be an absolute path with only plain characters and without '.' or '..'"
        )
    if python == PYTHON:
        return
    if evaluator.kind not in _WITH_PYTHON:
        raise TaskFileError(f"{where}: belongs to the kinds {', '.join(_WITH_PYTHON)}; remove it")
    if (above := _data_path_above(python, evaluator)) is not None:
        raise TaskFileError(f"{where}: {python!r} is below the data path {above!r}: the agent could replace it")


def _data_path_above(path: str, evaluator: EvaluatorSpec) -> str | None:
    return next((above for above in evaluator.data_paths if f"{path}/".startswith(above.rstrip("/") + "/")), None)


def _check_answer(answer: AnswerSpec, *, where: str) -> None:
    if not any(target.strip() for target in answer.targets):
        raise TaskFileError(f"{where}.targets: has no target; list at least one answer that counts as correct")
    if not answer.tag.isidentifier():
        raise TaskFileError(f"{where}.tag: {answer.tag!r} must be the name of a tag, such as answer")
    if not 0 <= answer.final <= answer.structure <= answer.structure + answer.retrieval < 1:
        raise TaskFileError(f"{where}: the scores must satisfy 0 <= final <= structure <= structure + retrieval < 1")


_WITHOUT_CHECK: Final = (
    EvaluatorKind.ANSWER,
    EvaluatorKind.ENVIRONMENT,
    EvaluatorKind.FUNCTION,
    EvaluatorKind.SUM,
)
_WITH_EXPECTED: Final = (EvaluatorKind.PLUGIN, *OF_SERVICES)
"""Kinds that give `expected` a meaning of their own."""
_NEEDED: Final = {
    "parts": (EvaluatorKind.SUM,),
    "function": (EvaluatorKind.FUNCTION,),
    "plugin": (EvaluatorKind.PLUGIN,),
    "answer": (EvaluatorKind.ANSWER,),
    "service": OF_SERVICES,
}
"""Fields that these kinds need and no other kind uses."""


def _check_kind(evaluator: EvaluatorSpec, *, where: str) -> None:
    """Check that everything that this kind of evaluator needs is given, and nothing that only another kind uses."""
    if (rewards := evaluator.rewards) is not None and not -MAX_REWARD <= rewards.failed < rewards.solved <= MAX_REWARD:
        raise TaskFileError(f"{where}.rewards: must satisfy -{MAX_REWARD:g} <= failed < solved <= {MAX_REWARD:g}")
    is_repository = evaluator.kind is EvaluatorKind.REPOSITORY
    if is_repository != (evaluator.repository is not None):
        raise TaskFileError(f"{where}.repository: belongs to the kind repository, which needs it")
    if evaluator.repository is not None and (reason := why_unusable(evaluator.repository)) is not None:
        raise TaskFileError(f"{where}.repository.{reason}")
    if (evaluator.kind is EvaluatorKind.VERIFIER) != (evaluator.verifier is not None):
        raise TaskFileError(f"{where}.verifier: belongs to the kind verifier, which needs it")
    if evaluator.verifier is not None:
        reason = why_not_runnable(evaluator.verifier, evaluator.hidden_files, evaluator.data_paths)
        if reason is not None:
            raise TaskFileError(f"{where}.{reason}")
        if evaluator.check or evaluator.expected:
            raise TaskFileError(f"{where}: check and expected do not belong to the kind verifier; remove them")
        return
    for key, kinds in _NEEDED.items():
        if (evaluator.kind in kinds) != bool(getattr(evaluator, key)):
            needs = "which needs it" if len(kinds) == 1 else "which need it"
            raise TaskFileError(
                f"{where}.{key}: belongs to the kind{'s' * (len(kinds) > 1)} {' and '.join(kinds)}, {needs}"
            )
    if evaluator.judge is not None:
        if evaluator.kind is not EvaluatorKind.JUDGE:
            raise TaskFileError(f"{where}.judge: belongs to the kind judge; remove it")
        if (reason := why_no_judge(evaluator.judge)) is not None:
            raise TaskFileError(f"{where}.judge.{reason}")
    if evaluator.function and not all(evaluator.function.partition(":")):
        raise TaskFileError(f"{where}.function: {evaluator.function!r} must be written as package.module:function")
    if evaluator.answer is not None:
        _check_answer(evaluator.answer, where=f"{where}.answer")
    if evaluator.kind in OF_SERVICES and evaluator.check:
        raise TaskFileError(f"{where}.check: the kind {evaluator.kind} has no check; remove it")
    if evaluator.kind in _WITH_EXPECTED:
        return
    if evaluator.kind in _WITHOUT_CHECK:
        if evaluator.check or evaluator.expected:
            raise TaskFileError(f"{where}: the kind {evaluator.kind} uses neither check nor expected; remove them")
        return
    if evaluator.kind is EvaluatorKind.SIMULATED:
        try:
            SimulatedVerdict.parse(evaluator.expected)
        except ValueError as error:
            example = '{"success": 0.5, "seconds": 2}'
            raise TaskFileError(f"{where}.expected: {error}; write {example}") from error
        return
    if evaluator.kind is not EvaluatorKind.NONE and not (is_repository and not evaluator.check):
        if not evaluator.check.strip():
            raise TaskFileError(f"{where}.check: is empty; write Python that exits with 0 (solved) or 1 (not solved)")
        try:
            compile(evaluator.check, "check", "exec")
        except (SyntaxError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise TaskFileError(f"{where}.check: not valid Python: {reason}; correct it") from error
    if evaluator.kind is EvaluatorKind.COMPARE or (is_repository and evaluator.check):
        try:
            json.loads(evaluator.expected)
        except ValueError as error:
            raise TaskFileError(f"{where}.expected: not valid JSON: {error}; write the value of `result`") from error
    elif evaluator.expected:
        raise TaskFileError(
            f"{where}.expected: is used only by the kinds compare and repository with a check; remove it"
        )
