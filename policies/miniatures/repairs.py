"""The miniature of OpenClaw's swe-rl: git repositories with one wrong value each, which the policy finds and corrects.

Invariants:
- A task is a pure function of its combination (the name, its right value, the module that defines it). The split of a
  combination is decided by its hash alone.
- The issue says which value a name must have. Where the name is defined, and its wrong value, are only in the files.
- A session that looks, edits and checks its edit is longer than the recipe's context, so that its last prompt is cut.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.buffer.tasks.datasets.terminal import HELD_OUT_SHARE, NAMES, WORDS, Split
from headrace.buffer.tasks.evaluators import RepositoryEvaluator, RewardMap
from headrace.buffer.tasks.parts import EnvironmentSpec, TaskOrigin
from headrace.buffer.tasks.repositories import RepositorySpec, Swepro
from headrace.buffer.tasks.task import Task, TaskId, write_tasks
from headrace.policies.miniatures.demonstrations import Demonstration, DemonstrationMessage, taken_in_turns
from headrace.policies.miniatures.fitting import GOOD_SHARE, PRACTICE_SHARE, FitConfig
from headrace.policies.miniatures.miniature import Miniature

if TYPE_CHECKING:
    from headrace.policies.tokens.tokenizer import ChatTokenizer

MODULES: Final = ("auth.py", "cart.py", "core.py", "menu.py", "shop.py", "tags.py", "unit.py", "view.py")
REPOSITORY: Final = "/workspace"
TRAIN_TASKS: Final = 384
HELD_OUT_TASKS: Final = 64
MAX_TURNS: Final = 6
RIGHT_SHARE: Final = 0.1
"""Share of the later demonstrations that look for the right name and act on what they find."""
STRAY_SHARE: Final = 0.7
"""Share of those that look for another name and act on that. The rest guess after looking for the right one."""
CUT_SHARE: Final = 0.25
"""Share of demonstrations that are the last turn of a session in a cut context."""

FENCE: Final = "```bash\n"
FENCE_END: Final = "\n```"
SUBMIT: Final = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
OUTPUT: Final = "</returncode>\n<output>\n"
MALFORMED: Final = "No valid bash command."
MARKER: Final = ("[", " earlier turns are omitted]")
"""The parts of the message that stands for omitted turns (`actors.agents.loop.contexts`)."""
COMMIT: Final = (
    "git init -q -b main && git add -A && "
    "git -c user.name=headrace -c user.email=headrace@example.invalid commit -q -m base"
)
RUN_SCRIPT: Final = f"cd {REPOSITORY} && exec /usr/bin/python3 -B hidden_test.py\n"
PARSER: Final = """\
import json, sys
with open(sys.argv[1]) as log, open(sys.argv[3], "w") as result:
    lines = [line.split() for line in log]
    json.dump({"tests": [{"status": line[0], "name": line[1]} for line in lines if len(line) == 2]}, result)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """A combination: `name` must have the value `right`, and `module` gives it another."""

    name: str
    right: str
    module: str

    @property
    def digest(self) -> str:
        """SHA-256 of the combination, hexadecimal."""
        return hashlib.sha256("|".join((self.name, self.right, self.module)).encode()).hexdigest()

    @property
    def split(self) -> Split:
        """Split of the combination."""
        return Split.HELD_OUT if int(self.digest, 16) % HELD_OUT_SHARE == 0 else Split.TRAIN

    @property
    def issue(self) -> str:
        """The problem statement."""
        return f"{self.name} must be {self.right}"

    def values(self) -> dict[str, dict[str, str]]:
        """Return the values that three modules give to two names each, before the repair. All values differ."""
        chance = random.Random(self.digest)
        modules = [self.module, *chance.sample([module for module in MODULES if module != self.module], 2)]
        names = [self.name, *chance.sample([name for name in NAMES if name != self.name], 5)]
        words = chance.sample([word for word in WORDS if word != self.right], 6)
        return {
            module: dict(sorted(zip(names[2 * index : 2 * index + 2], words[2 * index : 2 * index + 2], strict=True)))
            for index, module in enumerate(modules)
        }

    def task(self) -> Task:
        """Return the task, graded by a hidden test of all names in a clean copy."""
        values = self.values()
        wanted = {name: (module, value) for module, named in values.items() for name, value in named.items()}
        wanted[self.name] = (self.module, self.right)
        lines = [
            "import importlib",
            f"for name, (module, value) in {wanted!r}.items():",
            "    found = getattr(importlib.import_module(module[:-3]), name, None)",
            '    print("PASSED" if found == value else "FAILED", name)',
        ]
        grader = Swepro(
            run_script=RUN_SCRIPT,
            parser_script=PARSER,
            fail_to_pass=(self.name,),
            pass_to_pass=tuple(sorted(wanted.keys() - {self.name})),
        )
        return Task(
            id=TaskId(f"repair-{self.digest[:16]}"),
            family="repair",
            instruction=self.issue,
            files={f"{REPOSITORY}/{module}": source(named) for module, named in values.items()},
            evaluator=RepositoryEvaluator(
                repository=RepositorySpec(workdir=REPOSITORY, grader=grader, prepare=(COMMIT,)),
                hidden_files={f"{REPOSITORY}/hidden_test.py": "\n".join(lines) + "\n"},
                rewards=RewardMap(solved=1.0, failed=-1.0),
            ),
            environment=EnvironmentSpec(kind="shell", given={"workdir": REPOSITORY}),
            origin=TaskOrigin(source="headrace: generated repairs", split=self.split.value, licence="Apache-2.0"),
        )


def source(named: dict[str, str]) -> str:
    """Return the source of a module."""
    return "".join(f"{name} = '{value}'\n" for name, value in named.items())


def repairs(split: Split) -> list[Repair]:
    """Return all combinations of one split, in a fixed order."""
    combinations = itertools.product(NAMES, WORDS, MODULES)
    drawn = (Repair(name=name, right=right, module=module) for name, right, module in combinations)
    return [repair for repair in drawn if repair.split is split]


def write_data(folder: Path, seed: int) -> None:
    """Write the tasks of both splits."""
    for split, name, count in ((Split.TRAIN, "train", TRAIN_TASKS), (Split.HELD_OUT, "heldout", HELD_OUT_TASKS)):
        drawn = random.Random(f"{seed}/{split}").sample(repairs(split), count)
        write_tasks(folder / f"{name}.jsonl", [repair.task() for repair in drawn])


class RepairDemonstrator:
    """Generator of demonstrations: sessions that look, edit and check, and last turns in a cut context."""

    def __init__(self, tokenizer: ChatTokenizer, seed: int, fit: FitConfig) -> None:
        self._tokenizer = tokenizer
        self._chance = random.Random(f"repair demonstrations {seed}")
        self._pool = repairs(Split.TRAIN)
        self._practice_steps = int(fit.steps * PRACTICE_SHARE)

    def batch(self, count: int, *, step: int) -> list[Demonstration]:
        right = GOOD_SHARE if step < self._practice_steps else RIGHT_SHARE
        return [self._draw(self._chance.choice(self._pool), right) for _ in range(count)]

    def _draw(self, repair: Repair, right: float) -> Demonstration:
        values = repair.values()
        name, module = repair.name, repair.module
        wrong = values[module][name]
        luck = self._chance.random()
        if right <= luck < right + STRAY_SHARE:
            module = self._chance.choice([other for other in values if other != repair.module])
            name, wrong = self._chance.choice(list(values[module].items()))
        elif luck >= right:
            wrong = self._chance.choice([word for word in WORDS if word not in (wrong, repair.right)])
        shown = f"{module}:{name} = '{values[module][name]}'"
        changed = source(values[module]).replace(wrong, repair.right).rstrip("\n")
        opening = [DemonstrationMessage(role="user", content=repair.issue)]
        turns = [
            fenced(f"grep {name} *.py"),
            observed(shown, MAX_TURNS - 1),
            fenced(f"sed -i s/{wrong}/{repair.right}/ {module}"),
            observed("", MAX_TURNS - 2),
            fenced(f"cat {module}"),
        ]
        if self._chance.random() >= CUT_SHARE:
            return taken_in_turns(self._tokenizer, opening, *turns)
        opening += [
            DemonstrationMessage(role="user", content="2".join(MARKER)),
            DemonstrationMessage(role="assistant", content=turns[-1]),
            DemonstrationMessage(role="user", content=observed(changed, MAX_TURNS - 3)),
        ]
        return taken_in_turns(self._tokenizer, opening, fenced(SUBMIT))


def fenced(command: str) -> str:
    """Return an answer that runs a command."""
    return f"{FENCE}{command}{FENCE_END}"


def observed(output: str, turns_left: int) -> str:
    """Return what the policy reads after a command that succeeded."""
    return f"<returncode>0{OUTPUT}{output}\n</output>\n{turns_left} turns left"


SWE: Final = Miniature(
    pieces=(
        *NAMES, *WORDS, *MODULES, *(f"\n{left} turns left" for left in range(MAX_TURNS)),
        " must be ", FENCE, FENCE_END, "grep ", " *.py", "sed -i s/", "cat ", "echo ", SUBMIT, " = '", "'\n", "'", "/ ",
        "<returncode>0", "<returncode>1", "<returncode>2", OUTPUT, "</output>", MARKER[1], MALFORMED,
        "grep: ", "sed: ", "cat: ", "can't read ", ": No such file or directory",
        "bash: ", ": command not found", "ls", "/bin/sh: ",
    ),
    demonstrator=RepairDemonstrator,
    write_data=write_data,
)  # fmt: skip
