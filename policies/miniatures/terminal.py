"""The miniatures of Endless Terminals and Echo: tasks that a policy solves in one shell, by looking before it acts.

Invariants:
- The tasks are the generated terminal tasks (`buffer.tasks.datasets.terminal`), graded by a verifier in Harbor's form:
  its tests arrive after the agent has ended.
- The two miniatures differ in the form of actions: tags for Endless Terminals, tool calls for Echo.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.buffer.tasks.datasets.terminal import NAMES, WORDS, Kind, Problem, Split, combinations, guesses, problems
from headrace.buffer.tasks.evaluators import CheckEvaluator, VerifierEvaluator
from headrace.buffer.tasks.parts import EnvironmentSpec, TaskOrigin
from headrace.buffer.tasks.task import Task, write_tasks
from headrace.buffer.tasks.verifiers import SCRIPT, TESTS, VerifierForm, VerifierSpec
from headrace.policies.miniatures.demonstrations import Demonstration, DemonstrationMessage, taken_in_turns
from headrace.policies.miniatures.fitting import GOOD_SHARE, PRACTICE_SHARE, FitConfig
from headrace.policies.miniatures.miniature import Miniature
from headrace.policies.miniatures.retail import CHAT_TEMPLATE as CALLS_TEMPLATE
from headrace.policies.models.tiny import CHAT_TEMPLATE

if TYPE_CHECKING:
    from headrace.policies.tokens.tokenizer import ChatTokenizer

KINDS: Final = (Kind.WRITE, Kind.MOVE, Kind.RENAME)
TRAIN_TASKS: Final = 384
HELD_OUT_TASKS: Final = 64
RIGHT_SHARE: Final = 0.25
"""Share of the later demonstrations that look in the right place."""
STRAY_SHARE: Final = 0.5
"""Share of those that look in the wrong place and act on that. The rest guess after looking in the right place."""

CHECK: Final = f"{TESTS}/check.py"
TEST_SCRIPT: Final = f"""\
#!/bin/bash
if /usr/bin/python3 -I {CHECK}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
SUCCEEDED, FAILED = "Command succeeded. Output:\n", "Command failed. Output:\n"
EXIT_0, EXIT_1 = "\n\n(exit_code=0)", "\n\n(exit_code=1)"
MALFORMED: Final = "Write one command."
_WORDS: Final = (
    *WORDS, *NAMES, "write ", " to the file named in ", "move the last line of ", " to ", "rename the file that has ",
    "cat ", "tail -n 1 ", "grep -l ", "echo ", "mv ", "sed -i ", " *", " > ", " >> ", "; ", "/d ", "ls",
    SUCCEEDED, FAILED, EXIT_0, EXIT_1, MALFORMED, ": No such file or directory", "cat: ", "grep: ", "tail: ", "mv: ",
    "sed: ", "bash: ", ": command not found", "cannot stat ", "cannot open ", "can't read ", "timed out after ",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Form:
    """Form of the policy's actions, as texts around a command and at the end. `before` is what the template writes
    before the conversation, and `role` answers."""

    opening: str
    closing: str
    done: str
    role: str
    before: str = ""
    is_json: bool = False

    def command(self, text: str) -> str:
        """Return an answer that runs a command."""
        return f"{self.opening}{json.dumps(text)[1:-1] if self.is_json else text}{self.closing}"


TAGS: Final = Form("<command>", "</command>", "<action>done</action>", "user")
CALLS: Final = Form(
    '<tool_call>\n{"name": "bash", "arguments": {"command": "',
    '"}}\n</tool_call>',
    '<tool_call>\n{"name": "done", "arguments": {}}\n</tool_call>',
    "tool",
    before="Tools: bash done\n",
    is_json=True,
)


def task_of(problem: Problem) -> Task:
    """Return a terminal task with a verifier in place of its check."""
    task = problem.task()
    assert isinstance(task.evaluator, CheckEvaluator)
    evaluator = VerifierEvaluator(
        hidden_files={SCRIPT: TEST_SCRIPT, CHECK: task.evaluator.check},
        verifier=VerifierSpec(form=VerifierForm.HARBOR),
    )
    origin = TaskOrigin(source="headrace: generated terminal tasks", split=problem.split.value, licence="Apache-2.0")
    return replace(task, evaluator=evaluator, environment=EnvironmentSpec(kind="terminal"), origin=origin)


def write_data(folder: Path, seed: int) -> None:
    """Write the tasks of both splits."""
    for split, name, count in ((Split.TRAIN, "train", TRAIN_TASKS), (Split.HELD_OUT, "heldout", HELD_OUT_TASKS)):
        # One kind in four is left out: its check compares values, which a verifier does not.
        drawn = problems(seed, -(-count * len(Kind) // len(KINDS)), split)
        write_tasks(folder / f"{name}.jsonl", [task_of(one) for one in drawn if one.kind in KINDS][:count])


class TerminalDemonstrator:
    """Generator of demonstrations of one form that cycles through the kinds of tasks."""

    def __init__(self, form: Form, tokenizer: ChatTokenizer, seed: int, fit: FitConfig) -> None:
        self._form = form
        self._tokenizer = tokenizer
        self._chance = random.Random(f"terminal demonstrations {seed}")
        self._pools = [[one for one in combinations(kind) if one.split is Split.TRAIN] for kind in KINDS]
        self._practice_steps = int(fit.steps * PRACTICE_SHARE)

    def batch(self, count: int, *, step: int) -> list[Demonstration]:
        right = GOOD_SHARE if step < self._practice_steps else RIGHT_SHARE
        pools = (self._pools[index % len(self._pools)] for index in range(count))
        return [self._draw(self._chance.choice(pool), right) for pool in pools]

    def _draw(self, problem: Problem, right: float) -> Demonstration:
        luck = self._chance.random()
        if luck < right:
            return self.spell(problem, problem.look, problem.shown, problem.finding)
        if luck < right + STRAY_SHARE:
            return self.spell(problem, *problem.stray)
        return self.spell(problem, problem.look, problem.shown, self._chance.choice(guesses(problem)))

    def spell(self, problem: Problem, look: str, shown: str, finding: str) -> Demonstration:
        """Return the conversation that looks, acts on a finding, and says that it is done."""
        act = problem.act(finding).removesuffix("; exit")
        turns = [
            self._form.command(look),
            f"{SUCCEEDED}{shown}{EXIT_0}",
            self._form.command(act),
            f"{SUCCEEDED}{EXIT_0}",
            self._form.done,
        ]
        opening = [DemonstrationMessage(role="user", content=problem.instruction)]
        return taken_in_turns(self._tokenizer, opening, *turns, role=self._form.role, before=self._form.before)


ENDLESS: Final = Miniature(
    pieces=(*_WORDS, TAGS.opening, TAGS.closing, TAGS.done),
    demonstrator=partial(TerminalDemonstrator, TAGS),
    write_data=write_data,
    chat_template=CHAT_TEMPLATE,
)
ECHO: Final = Miniature(
    pieces=(*_WORDS, CALLS.opening, CALLS.closing, CALLS.done, CALLS.before),
    demonstrator=partial(TerminalDemonstrator, CALLS),
    write_data=write_data,
    chat_template=CALLS_TEMPLATE,
)
