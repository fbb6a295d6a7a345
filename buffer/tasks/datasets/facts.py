"""A generated corpus of facts, and questions that only a search of the corpus can answer.

Invariants:
- The value of a fact is a pure function of its entity and attribute, so that every machine has the same corpus.
- The split of a question is decided by its hash alone. The corpus contains the facts of both splits.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.buffer.tasks.datasets.terminal import Split
from headrace.buffer.tasks.evaluators import AnswerEvaluator, AnswerSpec
from headrace.buffer.tasks.parts import EnvironmentSpec, TaskOrigin
from headrace.buffer.tasks.task import Task, TaskId

ENTITIES: Final = (
    "adder", "bison", "camel", "dingo", "eagle", "finch", "gecko", "heron", "hyena", "ibis", "jackal", "kiwi",
    "lemur", "llama", "macaw", "moose", "newt", "okapi", "otter", "panda", "puma", "quail", "raven", "robin",
    "sloth", "snail", "squid", "stork", "swan", "tapir", "tiger", "trout", "viper", "vole", "walrus", "wasp",
    "weasel", "whale", "wolf", "wombat", "yak", "zebra", "bee", "crow", "dove", "elk", "frog", "goat",
)  # fmt: skip
"""Subjects of the facts."""
ATTRIBUTES: Final = ("color", "home", "meal", "song", "friend", "number")
"""Attributes, each of which every entity has."""
VALUES: Final = (
    "amber", "birch", "cedar", "delta", "ember", "flint", "glass", "hazel", "ivory", "jade", "khaki", "lilac",
    "maple", "north", "olive", "pearl", "quartz", "ruby", "slate", "topaz", "umber", "velvet", "willow", "zinc",
)  # fmt: skip
"""Values of all attributes."""
HELD_OUT_SHARE: Final = 4
"""One in this many facts is held out."""


@dataclass(frozen=True, slots=True)
class Fact:
    """An entity's value of an attribute."""

    entity: str
    attribute: str

    @property
    def digest(self) -> str:
        """SHA-256 of the question, hexadecimal."""
        return hashlib.sha256(self.question.encode()).hexdigest()

    @property
    def split(self) -> Split:
        """Split of the question."""
        return Split.HELD_OUT if int(self.digest, 16) % HELD_OUT_SHARE == 0 else Split.TRAIN

    @property
    def value(self) -> str:
        """The answer, which is unrelated to the words of the question."""
        return VALUES[int(self.digest, 16) // HELD_OUT_SHARE % len(VALUES)]

    @property
    def question(self) -> str:
        """The question, which is the instruction of a task."""
        return f"what is the {self.attribute} of {self.entity}?"

    @property
    def query(self) -> str:
        """The words of a search that finds the fact."""
        return f"{self.attribute} of {self.entity}"

    @property
    def passage(self) -> str:
        """The passage of the corpus, without its title."""
        return f"the {self.attribute} of {self.entity} is {self.value}"

    def task(self) -> Task:
        """Return the question as a task."""
        return Task(
            id=TaskId(f"{self.entity}-{self.attribute}"),
            family=self.attribute,
            instruction=self.question,
            evaluator=AnswerEvaluator(answer=AnswerSpec(targets=(self.value,))),
            environment=EnvironmentSpec(kind="search"),
            origin=TaskOrigin(source="headrace: generated facts", split=self.split.value, licence="Apache-2.0"),
        )


def facts(split: Split | None = None) -> tuple[Fact, ...]:
    """Return all facts, or those of one split."""
    every = (Fact(entity, attribute) for entity in ENTITIES for attribute in ATTRIBUTES)
    return tuple(fact for fact in every if split is None or fact.split is split)


def questions(seed: int, count: int, split: Split) -> tuple[Task, ...]:
    """Return at most `count` questions of a split, in an order that the seed decides."""
    shuffled = list(facts(split))
    random.Random(f"facts {seed} {split}").shuffle(shuffled)
    return tuple(fact.task() for fact in shuffled[:count])


def write_corpus(path: Path) -> None:
    """Write the corpus as JSON lines `{"id", "contents"}`, the form of Search-R1."""
    documents = (
        {"id": str(number), "contents": f'"{fact.entity}"\n{fact.passage}'} for number, fact in enumerate(facts())
    )
    path.write_text("".join(f"{json.dumps(document)}\n" for document in documents), encoding="utf-8")
