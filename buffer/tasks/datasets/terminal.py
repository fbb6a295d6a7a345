"""A generated family of terminal tasks that can only be solved by looking at files first.

Invariants:
- A task is a pure function of its combination (kind, the given values, the finding): the same combination always has
  the same id, files and check, on every machine.
- The split of a combination is decided by its hash alone, so training and held-out tasks never share a combination.
- The finding is never in the instruction, only in the files. A check accepts exactly one state of the whole
  `/workspace`; for a repair it accepts code that computes the right totals for counts that the agent has not seen.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from headrace.buffer.tasks.evaluators import CompareEvaluator, EvaluatorSpec, StateEvaluator
from headrace.buffer.tasks.task import Task, TaskId

WORKSPACE = "/workspace"
HIDDEN_COUNTS = (0, 1, 7, 12, 1000, -3)
"""Arguments for the repaired `total`; the agent sees only the test for 1."""
HELD_OUT_SHARE = 4
"""One in this many combinations is held out."""

WORDS = (
    "apple", "bread", "cider", "dates", "fudge", "grape", "honey", "icing", "jelly", "chili", "lemon", "mango",
    "nacho", "olive", "peach", "quark", "ramen", "salsa", "toast", "trout", "wafer", "yeast", "basil", "curry",
)  # fmt: skip
"""Words used as contents of files. None is part of another word or of a file name."""
NAMES = ("ash", "box", "elm", "fir", "gum", "haw", "ivy", "jay", "oak", "pin", "tea", "yew")
"""Names of files."""
CONSTANTS = ("RATE", "COST", "SIZE", "STEP", "UNIT", "GAIN", "LOAD", "BASE")
"""Names of the constant in calc.py."""
NUMBERS = tuple(str(number) for number in range(11, 100, 3))
"""Correct values of that constant."""
WRONG_NUMBER = "10"
"""Value of that constant before the repair."""


class Split(StrEnum):
    """Split to which a combination belongs, decided by its hash."""

    TRAIN = "train"
    HELD_OUT = "held_out"


class Kind(StrEnum):
    """Kind of terminal task."""

    WRITE = "write"
    """Write a word to a file whose name is in another file."""
    MOVE = "move"
    """Move the last line of one file to the end of another."""
    RENAME = "rename"
    """Rename the one file that contains a word."""
    REPAIR = "repair"
    """Repair a constant in calc.py so that its test passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A combination. `given` is in the instruction, `finding` only in the files.

    | kind | given | finding |
    |---|---|---|
    | write | word, file that holds the name | name of the file to write |
    | move | from, to | word on the last line |
    | rename | word, new name | name of the file with the word |
    | repair | constant, its wrong value | its right value |
    """

    kind: Kind
    given: tuple[str, str]
    finding: str

    @property
    def digest(self) -> str:
        """SHA-256 of the combination, hexadecimal."""
        return hashlib.sha256("|".join((self.kind, *self.given, self.finding)).encode()).hexdigest()

    @property
    def split(self) -> Split:
        """Split of the combination."""
        return Split.HELD_OUT if int(self.digest, 16) % HELD_OUT_SHARE == 0 else Split.TRAIN

    @property
    def instruction(self) -> str:
        """Instruction of the task."""
        first, second = self.given
        match self.kind:
            case Kind.WRITE:
                return f"write {first} to the file named in {second}"
            case Kind.MOVE:
                return f"move the last line of {first} to {second}"
            case Kind.RENAME:
                return f"rename the file that has {first} to {second}"
            case Kind.REPAIR:
                return f"repair {first} in calc.py so that test.py passes"

    @property
    def stray(self) -> tuple[str, str, str]:
        """A look at the wrong file: the command, its output, and the wrong finding in that output."""
        first, second = self.given
        files = self.files()
        name, text = next((name, text) for name, text in files.items() if name not in (first, second, self.finding))
        match self.kind:
            case Kind.WRITE:
                return f"cat {name}", text.rstrip(), text.rstrip()
            case Kind.MOVE:
                return f"tail -n 1 {second}", files[second].rstrip(), files[second].rstrip()
            case Kind.RENAME:
                return f"grep -l {text.rstrip()} *", name, name
            case Kind.REPAIR:
                return "cat calc.py", files["calc.py"].rstrip(), WRONG_NUMBER

    @property
    def look(self) -> str:
        """Command that shows the finding."""
        first, second = self.given
        match self.kind:
            case Kind.WRITE:
                return f"cat {second}"
            case Kind.MOVE:
                return f"tail -n 1 {first}"
            case Kind.RENAME:
                return f"grep -l {first} *"
            case Kind.REPAIR:
                return "cat test.py"

    @property
    def shown(self) -> str:
        """Output of `look`, without the final newline."""
        return calc_test(1, self.finding) if self.kind is Kind.REPAIR else self.finding

    def act(self, finding: str) -> str:
        """Return the command that solves the task if `finding` is right. With any other finding it is a wrong guess."""
        first, second = self.given
        match self.kind:
            case Kind.WRITE:
                return f"echo {first} > {finding}; exit"
            case Kind.MOVE:
                return f"sed -i /{finding}/d {first}; echo {finding} >> {second}; exit"
            case Kind.RENAME:
                return f"mv {finding} {second}; exit"
            case Kind.REPAIR:
                return f'sed -i "s/= .*/= {finding}/" calc.py; exit'

    def files(self) -> dict[str, str]:
        """Return the contents of the files in /workspace before the agent starts, by file name."""
        return self._files()[0]

    def expected(self) -> dict[str, str]:
        """Return the contents of the files in /workspace in the only accepted result, by file name."""
        return self._files()[1]

    def _files(self) -> tuple[dict[str, str], dict[str, str]]:
        first, second = self.given
        chance = random.Random(self.digest)
        words = [word for word in WORDS if word not in (*self.given, self.finding)]
        names = [name for name in NAMES if name not in (*self.given, self.finding)]
        fillers = chance.sample(words, 4)
        spare = chance.sample(names, 2)
        match self.kind:
            case Kind.WRITE:
                before = {second: self.finding, spare[0]: fillers[0], spare[1]: fillers[1]}
                after = before | {self.finding: first}
            case Kind.MOVE:
                kept = f"{fillers[0]}\n{fillers[1]}"
                before = {first: f"{kept}\n{self.finding}", second: fillers[2], spare[0]: fillers[3]}
                after = before | {first: kept, second: f"{fillers[2]}\n{self.finding}"}
            case Kind.RENAME:
                content = f"{fillers[0]}\n{first}"
                before = {self.finding: content, spare[0]: fillers[1], spare[1]: fillers[2]}
                after = {second: content, spare[0]: fillers[1], spare[1]: fillers[2]}
            case Kind.REPAIR:
                before = {"calc.py": calc_source(first, second), "test.py": calc_test(1, self.finding)}
                after = before | {"calc.py": calc_source(first, self.finding)}
        return _with_newlines(before), _with_newlines(after)

    def task(self) -> Task:
        """Return the task of the combination."""
        if self.kind is Kind.REPAIR:
            evaluator: EvaluatorSpec = CompareEvaluator(
                check=REPAIR_CHECK,
                expected=json.dumps([count * int(self.finding) for count in HIDDEN_COUNTS]),
                test_files=(f"{WORKSPACE}/test.py",),
            )
        else:
            check = STATE_CHECK.format(expected=json.dumps(self.expected(), sort_keys=True))
            evaluator = StateEvaluator(check=check)
        return Task(
            id=TaskId(f"terminal-{self.kind}-{self.digest[:16]}"),
            family=f"terminal/{self.kind}",
            instruction=self.instruction,
            files={f"{WORKSPACE}/{name}": text for name, text in self.files().items()},
            evaluator=evaluator,
        )


STATE_CHECK = """\
import os, sys
expected = {expected}
found = {{}}
for entry in os.scandir("/workspace"):
    if entry.name not in expected or not entry.is_file(follow_symlinks=False) or entry.stat().st_size > 4096:
        sys.exit(1)
    with open(entry.path, "rb") as file:
        found[entry.name] = file.read()
if found != {{name: text.encode() for name, text in expected.items()}}:
    sys.exit(1)
"""
"""Check that compares all files of /workspace byte for byte; links, folders and large files are refused."""

REPAIR_CHECK = f"""\
import sys
sys.path.insert(0, "{WORKSPACE}")
from calc import total
result = [total(count) for count in {list(HIDDEN_COUNTS)}]
"""
"""Check that only computes: the totals are compared where none of the agent's code runs."""


def calc_source(constant: str, value: str) -> str:
    """Return the source of calc.py."""
    return f"{constant} = {value}\n\n\ndef total(count):\n    return count * {constant}"


def calc_test(count: int, value: str) -> str:
    """Return the source of a test of calc.py."""
    return f"from calc import total; assert total({count}) == {count * int(value)}"


def _with_newlines(files: dict[str, str]) -> dict[str, str]:
    return {name: text + "\n" for name, text in files.items()}


def combinations(kind: Kind) -> Iterator[Problem]:
    """Yield every combination of a kind, in a fixed order."""
    pools: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
    match kind:
        case Kind.WRITE:
            pools = (WORDS, NAMES, NAMES)
        case Kind.MOVE:
            pools = (NAMES, NAMES, WORDS)
        case Kind.RENAME:
            pools = (WORDS, NAMES, NAMES)
        case Kind.REPAIR:
            pools = (CONSTANTS, (WRONG_NUMBER,), NUMBERS)
    for first, second, finding in itertools.product(*pools):
        if len({first, second, finding}) == 3:
            yield Problem(kind=kind, given=(first, second), finding=finding)


def guesses(problem: Problem) -> tuple[str, ...]:
    """Return the wrong findings that an agent might guess without looking."""
    pool = {Kind.WRITE: NAMES, Kind.MOVE: WORDS, Kind.RENAME: NAMES, Kind.REPAIR: NUMBERS}[problem.kind]
    return tuple(value for value in pool if value not in (*problem.given, problem.finding))


def problems(seed: int, count: int, split: Split) -> tuple[Problem, ...]:
    """Return `count` distinct combinations of one split, with the kinds in turn. Raises ValueError when a kind has too
    few."""
    chance = random.Random(f"{seed}/{split}")
    kinds = tuple(Kind)
    drawn: list[list[Problem]] = []
    for index, kind in enumerate(kinds):
        wanted = len(range(index, count, len(kinds)))
        pool = [problem for problem in combinations(kind) if problem.split is split]
        if wanted > len(pool):
            raise ValueError(f"count {count} needs {wanted} {split} combinations of {kind}, but only {len(pool)} exist")
        drawn.append(chance.sample(pool, wanted))
    return tuple(drawn[position % len(kinds)][position // len(kinds)] for position in range(count))


def generate(seed: int, count: int, split: Split) -> tuple[Task, ...]:
    """Return `count` tasks of one split; see `problems`."""
    return tuple(problem.task() for problem in problems(seed, count, split))
