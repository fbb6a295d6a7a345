"""The specification of evaluators: a class for each kind, with that kind's fields only.

Invariants:
- `kind` is the tag by which a task file's object becomes one of the classes; a field of another kind is refused.
- A spec without `faults` can be run; others are refused before anything boots.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, ClassVar, Final, Literal, Self, TypeAlias

from pydantic import ConfigDict, Discriminator

from headrace.buffer.tasks.parts import MAX_REWARD, STRICT, JudgeSpec, why_no_judge
from headrace.buffer.tasks.repositories import RepositorySpec, is_plain_path, why_unusable
from headrace.buffer.tasks.verifiers import VerifierSpec, why_not_runnable

PYTHON: Final = "/usr/bin/python3"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardMap:
    """Rewards in place of an evaluator's own, by whether it found the task solved."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    solved: float = 1.0
    failed: float = 0.0


# Without slots, so that `kind` can be read from the classes, and `super` works in the methods.
@dataclass(frozen=True, kw_only=True)
class _Evaluator:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    rewards: RewardMap | None = None
    """Rewards in place of the evaluator's own. A rollout that it could not score still has none."""

    def faults(self) -> Iterator[str]:
        """Yield the key and reason of each value that is invalid although its type is right."""
        rewards = self.rewards
        if rewards is not None and not -MAX_REWARD <= rewards.failed < rewards.solved <= MAX_REWARD:
            yield f"rewards: must satisfy -{MAX_REWARD:g} <= failed < solved <= {MAX_REWARD:g}"


@dataclass(frozen=True, kw_only=True)
class _TimedEvaluator(_Evaluator):
    timeout_s: float = 20.0
    """Deadline of the check, the tests or the function, in seconds."""

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if not 0 < self.timeout_s < float("inf"):
            yield f"timeout_s: {self.timeout_s} must be a number above 0"


@dataclass(frozen=True, kw_only=True)
class FilesEvaluator(_TimedEvaluator):
    """What evaluators of an agent's files have in common."""

    data_paths: tuple[str, ...] = ("/workspace",)
    """Absolute paths in the agent's sandbox; nothing else in it is evaluated."""
    hidden_files: Mapping[str, str] = field(default_factory=dict)
    """Absolute paths with the texts that are written there after the agent's end."""

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        yield from _odd_paths("hidden_files", self.hidden_files)
        yield from _odd_paths("data_paths", self.data_paths)

    def _data_path_above(self, path: str) -> str | None:
        return next((above for above in self.data_paths if f"{path}/".startswith(above.rstrip("/") + "/")), None)


@dataclass(frozen=True, kw_only=True)
class PythonEvaluator(FilesEvaluator):
    """An evaluator of files that runs Python of the image."""

    python: str = PYTHON
    """Absolute path of the interpreter in the image."""

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if not is_plain_path(self.python) or shlex.quote(self.python) != self.python:
            yield (
                f"python: {self.python!r} must be an absolute path with only plain characters and without '.' or '..'"
            )
        if self.python != PYTHON and (above := self._data_path_above(self.python)) is not None:
            yield f"python: {self.python!r} is below the data path {above!r}: the agent could replace it"


@dataclass(frozen=True, kw_only=True)
class CheckEvaluator(PythonEvaluator):
    """An evaluator whose `check` is Python source. Exit code 0 means reward 1, exit code 1 means reward 0, and any
    other exit code means that the evaluator failed. A check that binds `reward` returns that reward instead
    (docs/tasks.md)."""

    check: str

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        yield from _faults_of_check(self.check)


@dataclass(frozen=True, kw_only=True)
class StateEvaluator(CheckEvaluator):
    """The agent's frozen data paths are mounted read-only in a clean sandbox, where `check` runs."""

    kind: Literal["state"] = "state"

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        for path in self.hidden_files:
            if (above := self._data_path_above(path)) is not None:
                yield (
                    f"hidden_files: {path!r} is below the data path {above!r}, which is mounted read-only; put it "
                    "elsewhere"
                )


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

    expected: str
    """JSON of the expected result."""
    test_files: tuple[str, ...] = ()
    """Absolute paths whose files are always the task's own."""
    kind: Literal["compare"] = "compare"

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        yield from _odd_paths("test_files", self.test_files)
        yield from _faults_of_result(self.expected)


@dataclass(frozen=True, kw_only=True)
class RepositoryEvaluator(_TimedEvaluator):
    """The agent's changes to a git repository are filtered, applied to a clean copy and graded by its tests. If `check`
    and `expected` are given, its result is compared as well."""

    repository: RepositorySpec
    hidden_files: Mapping[str, str] = field(default_factory=dict)
    check: str = ""
    expected: str = ""
    kind: Literal["repository"] = "repository"

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        yield from _odd_paths("hidden_files", self.hidden_files)
        if (reason := why_unusable(self.repository)) is not None:
            yield f"repository.{reason}"
        if self.check:
            yield from _faults_of_check(self.check)
            yield from _faults_of_result(self.expected)
        elif self.expected:
            yield "expected: is used only with a check; remove it"


@dataclass(frozen=True, kw_only=True)
class VerifierEvaluator(PythonEvaluator):
    """A script or tests, which come to the sandbox after the agent's end, score its state."""

    verifier: VerifierSpec
    kind: Literal["verifier"] = "verifier"

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if (reason := why_not_runnable(self.verifier, self.hidden_files, self.data_paths)) is not None:
            yield reason


@dataclass(frozen=True, kw_only=True)
class PluginEvaluator(FilesEvaluator):
    """A function in another package scores the files that the agent left (docs/extending.md). It defines the meaning of
    `check` and `expected`."""

    plugin: str
    """`package.module:function`, or the name of an entry point."""
    check: str = ""
    expected: str = ""
    kind: Literal["plugin"] = "plugin"

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if not self.plugin:
            yield "plugin: is empty; name a function"


@dataclass(frozen=True, kw_only=True)
class NoEvaluator(_Evaluator):
    """Every finished rollout gets reward 1, without a sandbox; only for measuring the orchestration."""

    kind: Literal["none"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSpec:
    """Settings of the kind `answer`. The answer is the text of the last pair of tags; it scores 1 if, after
    normalisation (lower case, no punctuation, no articles, single spaces), it equals a target. The format scores are
    those of Search-R1: `structure` for a conversation in which every search is followed by its passages and one answer
    ends it, `retrieval` on top of that if a passage contains a target, and `final` for any answer. A correct answer in
    a conversation of another structure scores 1 - `structure`."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    targets: tuple[str, ...] = ()
    tag: str = "answer"
    structure: float = 0.0
    retrieval: float = 0.0
    final: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AnswerEvaluator(_Evaluator):
    """The answer in the agent's last message is compared with the targets, without a sandbox."""

    answer: AnswerSpec
    kind: Literal["answer"] = "answer"

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        answer = self.answer
        if not any(target.strip() for target in answer.targets):
            yield "answer.targets: has no target; list at least one answer that counts as correct"
        if not answer.tag.isidentifier():
            yield f"answer.tag: {answer.tag!r} must be the name of a tag, such as answer"
        if not 0 <= answer.final <= answer.structure <= answer.structure + answer.retrieval < 1:
            yield "answer: the scores must satisfy 0 <= final <= structure <= structure + retrieval < 1"


@dataclass(frozen=True, kw_only=True)
class FunctionEvaluator(_TimedEvaluator):
    """A function in a process of its own scores the record of the episode, without a sandbox."""

    function: str
    """`package.module:function`."""
    kind: Literal["function"] = "function"

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if not all(self.function.partition(":")):
            yield f"function: {self.function!r} must be written as package.module:function"


@dataclass(frozen=True, kw_only=True)
class HttpEvaluator(_Evaluator):
    """A reward server scores the record of the episode, without a sandbox; it is sent `expected`."""

    service: str
    """Service of the recipe (`[services.NAME]`)."""
    expected: str = ""
    kind: Literal["http"] = "http"

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if not self.service:
            yield "service: is empty; name a service of the recipe"


@dataclass(frozen=True, kw_only=True)
class JudgeEvaluator(_Evaluator):
    """A model votes on the record of the episode, without a sandbox; its prompt may contain `expected`."""

    service: str
    """Service of the recipe (`[services.NAME]`)."""
    expected: str = ""
    judge: JudgeSpec = field(default_factory=JudgeSpec)
    kind: Literal["judge"] = "judge"

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if not self.service:
            yield "service: is empty; name a service of the recipe"
        if (reason := why_no_judge(self.judge)) is not None:
            yield f"judge.{reason}"


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
class EvaluatorPart:
    """One evaluator of a sum, and the weight of its reward."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    evaluator: Annotated[_Part, Discriminator("kind")]
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class SumEvaluator(_Evaluator):
    """The weighted sum of several evaluators' rewards counts; the first one decides whether the task is solved."""

    parts: tuple[EvaluatorPart, ...]
    kind: Literal["sum"] = "sum"

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if not self.parts:
            yield "parts: is empty; list the evaluators of the sum"
        names = [part.name for part in self.parts]
        for part in self.parts:
            if not part.name or names.count(part.name) > 1:
                yield f"parts: {part.name!r} must be a name of its own"
            if isinstance(part.evaluator, VerifierEvaluator) and part.evaluator.verifier.live:
                yield f"parts.{part.name}: a sum has no live verifier; remove it"
            if not abs(part.weight) <= MAX_REWARD:
                yield f"parts.{part.name}.weight: {part.weight} must be a finite number"
            yield from (f"parts.{part.name}.{fault}" for fault in part.evaluator.faults())
        if sum(isinstance(part.evaluator, RepositoryEvaluator) for part in self.parts) > 1:
            yield "parts: more than one has a repository; keep one"


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


@dataclass(frozen=True, kw_only=True)
class SimulatedEvaluator(_Evaluator):
    """No sandbox is used: after `seconds`, the reward is 1 with probability `success`, drawn with the attempt's name as
    the seed. Both are given in `expected`."""

    expected: str
    kind: Literal["simulated"] = "simulated"

    @property
    def verdict(self) -> SimulatedVerdict:
        """What `expected` says. Raises ValueError."""
        return SimulatedVerdict.parse(self.expected)

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        try:
            SimulatedVerdict.parse(self.expected)
        except (ValueError, TypeError) as error:
            yield f'expected: {error}; write {{"success": 0.5, "seconds": 2}}'


EvaluatorSpec: TypeAlias = Annotated[_Part | SumEvaluator | NoEvaluator | SimulatedEvaluator, Discriminator("kind")]
"""Evaluator of a task."""
OF_EPISODES: Final = (AnswerEvaluator, EnvironmentEvaluator, FunctionEvaluator, HttpEvaluator, JudgeEvaluator)
"""Kinds that score the record of an episode: what was said, and the artifacts of its end."""
OF_SERVICES: Final = (HttpEvaluator, JudgeEvaluator)
"""Kinds that call a service of the recipe."""


def _odd_paths(key: str, paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        if not is_plain_path(path):
            yield f"{key}: {path!r} must be an absolute path without '.' or '..'"


def _faults_of_check(check: str) -> Iterator[str]:
    if not check.strip():
        yield "check: is empty; write Python that exits with 0 (solved) or 1 (not solved)"
    try:
        compile(check, "check", "exec")
    except (SyntaxError, ValueError) as error:
        yield f"check: not valid Python: {' '.join(str(error).split())}; correct it"


def _faults_of_result(expected: str) -> Iterator[str]:
    try:
        json.loads(expected)
    except ValueError as error:
        yield f"expected: not valid JSON: {error}; write the value of `result`"
