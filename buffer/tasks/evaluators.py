"""The specification of evaluators: a class for each kind, with that kind's fields only.

Invariants:
- `kind` is the tag by which a task file's object becomes one of the classes; a field of another kind is refused.
- A spec that pydantic has read and that has no `fault` can be run; others are refused before anything boots.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, TypeVar

from pydantic import AfterValidator, Discriminator

from headrace.buffer.primitives.sections import StrictRecord
from headrace.buffer.tasks.parts import MAX_REWARD, JudgeSpec, why_no_judge
from headrace.buffer.tasks.repositories import RepositorySpec, is_plain_path, why_unusable
from headrace.buffer.tasks.verifiers import VerifierSpec, why_not_runnable

Value = TypeVar("Value", bound=Collection[str])
PYTHON: Final = "/usr/bin/python3"


class KeyFault(ValueError):
    """A value below the validated one is invalid; the message begins with its key."""


def _sound(why_not: Callable[[Any], str | None]) -> AfterValidator:
    """Return a validator from a function that returns the key and reason of an invalid value, or None."""

    def sound(value: object) -> object:
        if (fault := why_not(value)) is not None:
            raise KeyFault(fault)
        return value

    return AfterValidator(sound)


def _must(hold: Callable[[Any], bool], message: str) -> AfterValidator:
    """Return a validator that requires `hold`; `{!r}` in the message stands for the value."""

    def must(value: object) -> object:
        if not hold(value):
            raise ValueError(message.format(value))
        return value

    return AfterValidator(must)


def _plain_paths(paths: Value) -> Value:
    for path in paths:
        if not is_plain_path(path):
            raise ValueError(f"{path!r} must be an absolute path without '.' or '..'")
    return paths


def _source(check: str) -> str:
    if not check.strip():
        raise ValueError("is empty; write Python that exits with 0 (solved) or 1 (not solved)")
    try:
        compile(check, "check", "exec")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"not valid Python: {' '.join(str(error).split())}; correct it") from error
    return check


def _result(expected: str) -> str:
    try:
        json.loads(expected)
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}; write the value of `result`") from error
    return expected


_Paths: TypeAlias = Annotated[tuple[str, ...], AfterValidator(_plain_paths)]
_Files: TypeAlias = Annotated[Mapping[str, str], AfterValidator(_plain_paths)]
_Name: TypeAlias = Annotated[str, _must(bool, "is empty; write a name")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardMap(StrictRecord):
    """Rewards in place of an evaluator's own, by whether it found the task solved."""

    solved: float = 1.0
    failed: float = 0.0


def _is_ordered(rewards: RewardMap | None) -> bool:
    return rewards is None or -MAX_REWARD <= rewards.failed < rewards.solved <= MAX_REWARD


# Without slots, so that `kind` can be read from the classes, and `super` works in the methods.
@dataclass(frozen=True, kw_only=True)
class _Evaluator(StrictRecord):
    rewards: Annotated[
        RewardMap | None, _must(_is_ordered, f"must satisfy -{MAX_REWARD:g} <= failed < solved <= {MAX_REWARD:g}")
    ] = None
    """Rewards in place of the evaluator's own. A rollout that it could not score still has none."""

    def fault(self) -> str | None:
        """Return the key and reason of a value that does not fit the others, or None."""
        return None


@dataclass(frozen=True, kw_only=True)
class _TimedEvaluator(_Evaluator):
    timeout_s: Annotated[float, _must(lambda given: 0 < given < float("inf"), "{!r} must be a number above 0")] = 20.0
    """Deadline of the check, the tests or the function, in seconds."""


@dataclass(frozen=True, kw_only=True)
class FilesEvaluator(_TimedEvaluator):
    """What evaluators of an agent's files have in common."""

    data_paths: _Paths = ("/workspace",)
    """Absolute paths in the agent's sandbox; nothing else in it is evaluated."""
    hidden_files: _Files = field(default_factory=dict)
    """Absolute paths with the texts that are written there after the agent's end."""

    def _data_path_above(self, path: str) -> str | None:
        return next((above for above in self.data_paths if f"{path}/".startswith(above.rstrip("/") + "/")), None)


@dataclass(frozen=True, kw_only=True)
class PythonEvaluator(FilesEvaluator):
    """An evaluator of files that runs Python of the image."""

    python: Annotated[
        str,
        _must(
            lambda path: is_plain_path(path) and shlex.quote(path) == path,
            "{!r} must be an absolute path with only plain characters and without '.' or '..'",
        ),
    ] = PYTHON
    """Absolute path of the interpreter in the image."""

    def fault(self) -> str | None:
        if self.python != PYTHON and (above := self._data_path_above(self.python)) is not None:
            return f"python: {self.python!r} is below the data path {above!r}: the agent could replace it"
        return None


@dataclass(frozen=True, kw_only=True)
class CheckEvaluator(PythonEvaluator):
    """An evaluator whose `check` is Python source. Exit code 0 means reward 1, exit code 1 means reward 0, and any
    other exit code means that the evaluator failed. A check that binds `reward` returns that reward instead
    (guide 'Task files')."""

    check: Annotated[str, AfterValidator(_source)]


@dataclass(frozen=True, kw_only=True)
class StateEvaluator(CheckEvaluator):
    """The agent's frozen data paths are mounted read-only in a clean sandbox, where `check` runs."""

    kind: Literal["state"] = "state"

    def fault(self) -> str | None:
        for path in self.hidden_files:
            if (above := self._data_path_above(path)) is not None:
                mounted = f"is below the data path {above!r}, which is mounted read-only"
                return f"hidden_files: {path!r} {mounted}; put it elsewhere"
        return super().fault()


@dataclass(frozen=True, kw_only=True)
class PatchEvaluator(CheckEvaluator):
    """The changed text files under the data paths are applied to fresh copies in a second clean sandbox, with
    `hidden_files`, and `check` runs there. The agent never saw the hidden files."""

    kind: Literal["patch"] = "patch"


@dataclass(frozen=True, kw_only=True)
class CompareEvaluator(CheckEvaluator):
    """Like `patch`, but `check` only computes: it runs as another user and binds `result` to plain data, which is
    compared with `expected` outside the sandbox. The agent's code gains nothing by manipulating the process of the
    check."""

    expected: Annotated[str, AfterValidator(_result)]
    """JSON of the expected result."""
    test_files: _Paths = ()
    """Absolute paths whose files are always the task's own."""
    kind: Literal["compare"] = "compare"


@dataclass(frozen=True, kw_only=True)
class RepositoryEvaluator(_TimedEvaluator):
    """The agent's changes to a git repository are filtered, applied to a clean copy and graded by its tests. If `check`
    and `expected` are given, its result is compared as well."""

    repository: Annotated[RepositorySpec, _sound(why_unusable)]
    hidden_files: _Files = field(default_factory=dict)
    check: Annotated[str, AfterValidator(_source)] = ""
    expected: Annotated[str, AfterValidator(_result)] = ""
    kind: Literal["repository"] = "repository"

    def fault(self) -> str | None:
        if bool(self.check) != bool(self.expected):
            return "expected: belongs to a check, which needs it"
        return None


@dataclass(frozen=True, kw_only=True)
class VerifierEvaluator(PythonEvaluator):
    """A script or tests, which come to the sandbox after the agent's end, score its state."""

    verifier: VerifierSpec
    kind: Literal["verifier"] = "verifier"

    def fault(self) -> str | None:
        return why_not_runnable(self.verifier, self.hidden_files, self.data_paths) or super().fault()


@dataclass(frozen=True, kw_only=True)
class PluginEvaluator(FilesEvaluator):
    """A function in another package scores the files that the agent left (guide 'Extending headrace'). It defines the
    meaning of `check` and `expected`."""

    plugin: _Name
    """`package.module:function`, or the name of an entry point."""
    check: str = ""
    expected: str = ""
    kind: Literal["plugin"] = "plugin"


@dataclass(frozen=True, kw_only=True)
class NoEvaluator(_Evaluator):
    """Every finished rollout gets reward 1, without a sandbox; only for measuring the orchestration."""

    kind: Literal["none"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSpec(StrictRecord):
    """Settings of the kind `answer`. The answer is the text of the last pair of tags; it scores 1 if, after
    normalisation (lower case, no punctuation, no articles, single spaces), it equals a target. The format scores are
    those of Search-R1: `structure` for a conversation in which every search is followed by its passages and one answer
    ends it, `retrieval` on top of that if a passage contains a target, and `final` for any answer. A correct answer in
    a conversation of another structure scores 1 - `structure`."""

    targets: tuple[str, ...] = ()
    tag: str = "answer"
    structure: float = 0.0
    retrieval: float = 0.0
    final: float = 0.0


def _why_no_answer(answer: AnswerSpec) -> str | None:
    if not any(target.strip() for target in answer.targets):
        return "targets: has no target; list at least one answer that counts as correct"
    if not answer.tag.isidentifier():
        return f"tag: {answer.tag!r} must be the name of a tag, such as answer"
    if not 0 <= answer.final <= answer.structure <= answer.structure + answer.retrieval < 1:
        return "final: the scores must satisfy 0 <= final <= structure <= structure + retrieval < 1"
    return None


@dataclass(frozen=True, kw_only=True)
class AnswerEvaluator(_Evaluator):
    """The answer in the agent's last message is compared with the targets, without a sandbox."""

    answer: Annotated[AnswerSpec, _sound(_why_no_answer)]
    kind: Literal["answer"] = "answer"


@dataclass(frozen=True, kw_only=True)
class FunctionEvaluator(_TimedEvaluator):
    """A function in a process of its own scores the record of the episode, without a sandbox."""

    function: Annotated[
        str, _must(lambda name: all(name.partition(":")), "{!r} must be written as package.module:function")
    ]
    """`package.module:function`."""
    kind: Literal["function"] = "function"


@dataclass(frozen=True, kw_only=True)
class _ServiceEvaluator(_Evaluator):
    service: _Name
    """Service of the recipe (`[services.NAME]`)."""
    expected: str = ""
    """Text for the service."""


@dataclass(frozen=True, kw_only=True)
class HttpEvaluator(_ServiceEvaluator):
    """A reward server scores the record of the episode, without a sandbox."""

    kind: Literal["http"] = "http"


@dataclass(frozen=True, kw_only=True)
class JudgeEvaluator(_ServiceEvaluator):
    """A model votes on the record of the episode, without a sandbox."""

    judge: Annotated[JudgeSpec, _sound(why_no_judge)] = field(default_factory=JudgeSpec)
    kind: Literal["judge"] = "judge"


@dataclass(frozen=True, kw_only=True)
class EnvironmentEvaluator(_Evaluator):
    """The environment's own verdict counts, without a sandbox."""

    kind: Literal["environment"] = "environment"


_Part: TypeAlias = (
    StateEvaluator
    | PatchEvaluator
    | CompareEvaluator
    | RepositoryEvaluator
    | VerifierEvaluator
    | PluginEvaluator
    | AnswerEvaluator
    | FunctionEvaluator
    | HttpEvaluator
    | JudgeEvaluator
    | EnvironmentEvaluator
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorPart(StrictRecord):
    """One evaluator of a sum, and the weight of its reward."""

    name: _Name
    evaluator: Annotated[_Part, Discriminator("kind")]
    weight: Annotated[float, _must(lambda given: abs(given) <= MAX_REWARD, "{!r} must be a finite number")] = 1.0


@dataclass(frozen=True, kw_only=True)
class SumEvaluator(_Evaluator):
    """The weighted sum of several evaluators' rewards counts; the first one decides whether the task is solved."""

    parts: tuple[EvaluatorPart, ...]
    kind: Literal["sum"] = "sum"

    def fault(self) -> str | None:
        names = [part.name for part in self.parts]
        if not names:
            return "parts: is empty; list the evaluators of the sum"
        for part in self.parts:
            if names.count(part.name) > 1:
                return f"parts: {part.name!r} must be a name of its own"
            if isinstance(part.evaluator, VerifierEvaluator) and part.evaluator.verifier.live:
                return f"parts.{part.name}: a sum has no live verifier; remove it"
            if (fault := part.evaluator.fault()) is not None:
                return f"parts.{part.name}.{fault}"
        if sum(isinstance(part.evaluator, RepositoryEvaluator) for part in self.parts) > 1:
            return "parts: more than one has a repository; keep one"
        return None


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
        """Parse `SimulatedEvaluator.expected`. Raises ValueError."""
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


def _verdict(expected: str) -> str:
    try:
        SimulatedVerdict.parse(expected)
    except (ValueError, TypeError) as error:
        raise ValueError(f'{error}; write {{"success": 0.5, "seconds": 2}}') from error
    return expected


@dataclass(frozen=True, kw_only=True)
class SimulatedEvaluator(_Evaluator):
    """No sandbox is used: after `seconds`, the reward is 1 with probability `success`, drawn with the attempt's name as
    the seed. Both are given in `expected`."""

    expected: Annotated[str, AfterValidator(_verdict)]
    kind: Literal["simulated"] = "simulated"

    @property
    def verdict(self) -> SimulatedVerdict:
        """What `expected` says."""
        return SimulatedVerdict.parse(self.expected)


EvaluatorSpec: TypeAlias = Annotated[_Part | SumEvaluator | NoEvaluator | SimulatedEvaluator, Discriminator("kind")]
"""Evaluator of a task."""
OF_EPISODES: Final = (AnswerEvaluator, EnvironmentEvaluator, FunctionEvaluator, HttpEvaluator, JudgeEvaluator)
"""Kinds that score the record of an episode: what was said, and the artifacts of its end."""
OF_SERVICES: Final = (HttpEvaluator, JudgeEvaluator)
"""Kinds that call a service of the recipe."""
