"""The miniature of Search-R1: questions about generated facts, a corpus, and a policy that searches poorly.

Invariant: most demonstrations of the second phase are wrong, but as long as the right ones. A trajectory's gradient is
the mean over its tokens, so that short failures and long successes would together suppress their common tokens.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.buffer.tasks.datasets.facts import ATTRIBUTES, ENTITIES, VALUES, Fact, facts, questions, write_corpus
from headrace.buffer.tasks.datasets.terminal import Split
from headrace.buffer.tasks.task import write_tasks
from headrace.policies.miniatures.demonstrations import Demonstration, DemonstrationMessage, continued
from headrace.policies.miniatures.fitting import GOOD_SHARE, PRACTICE_SHARE, FitConfig
from headrace.policies.miniatures.miniature import Miniature

if TYPE_CHECKING:
    from headrace.policies.tokens.tokenizer import ChatTokenizer

PIECES: Final = (
    *ENTITIES, *ATTRIBUTES, *VALUES,
    "what is the ", " of ", "?", "the ", " is ",
    "<search>", "</search>", "<answer>", "</answer>",
    "\n\n<information>", "</information>\n\n", "Doc ", "(Title: ", ") ", "\nSearch or answer.\n",
)  # fmt: skip
HELD_OUT_TASKS: Final = 64
RIGHT_SHARE: Final = 0.18
"""Share of the later demonstrations that search and answer well."""
STRAY_SHARE: Final = 0.5
"""Share of those that search for something else."""
OTHER_PASSAGE_SHARE: Final = 0.2
"""Share of those that take the answer from the wrong passage. The rest answer without a search."""


class SearchDemonstrator:
    """Generator of demonstrations of two passages a search, from the training split."""

    def __init__(self, tokenizer: ChatTokenizer, seed: int, fit: FitConfig) -> None:
        self._tokenizer = tokenizer
        self._chance = random.Random(f"search demonstrations {seed}")
        self._train = facts(Split.TRAIN)
        self._practice_steps = int(fit.steps * PRACTICE_SHARE)

    def batch(self, count: int, *, step: int) -> list[Demonstration]:
        draw = self._good if step < self._practice_steps else self._poor
        return [draw(self._chance.choice(self._train)) for _ in range(count)]

    def _good(self, fact: Fact) -> Demonstration:
        if self._chance.random() < GOOD_SHARE:
            return self._search(fact, fact, takes_second=False)
        return self._guess(fact)

    def _poor(self, fact: Fact) -> Demonstration:
        luck = self._chance.random()
        if luck < RIGHT_SHARE:
            return self._search(fact, fact, takes_second=False)
        if luck < RIGHT_SHARE + STRAY_SHARE:
            return self._search(fact, self._near(fact), takes_second=False)
        if luck < RIGHT_SHARE + STRAY_SHARE + OTHER_PASSAGE_SHARE:
            return self._search(fact, fact, takes_second=True)
        return self._guess(fact)

    def _near(self, fact: Fact) -> Fact:
        """Return another fact of the training split about the same entity or the same attribute."""
        near = [
            other
            for other in self._train
            if other != fact and (other.entity == fact.entity or other.attribute == fact.attribute)
        ]
        return self._chance.choice(near)

    def _search(self, asked: Fact, searched: Fact, *, takes_second: bool) -> Demonstration:
        second = self._near(searched)
        passages = (
            f"Doc {number}(Title: {fact.entity}) {fact.passage}"
            for number, fact in enumerate((searched, second), start=1)
        )
        return continued(
            self._tokenizer,
            [DemonstrationMessage(role="user", content=asked.question)],
            f"<search>{searched.query}</search>",
            "\n\n<information>" + "\n".join(passages) + "</information>\n\n",
            f"<answer>{(second if takes_second else searched).value}</answer>",
        )

    def _guess(self, fact: Fact) -> Demonstration:
        guess = self._chance.choice(VALUES)
        return continued(
            self._tokenizer, [DemonstrationMessage(role="user", content=fact.question)], f"<answer>{guess}</answer>"
        )


def write_data(folder: Path, seed: int) -> None:
    """Write the corpus and the questions of both splits."""
    write_corpus(folder / "corpus.jsonl")
    write_tasks(folder / "train.jsonl", questions(seed, len(facts()), Split.TRAIN))
    write_tasks(folder / "heldout.jsonl", questions(seed, HELD_OUT_TASKS, Split.HELD_OUT))


SEARCH: Final = Miniature(pieces=PIECES, demonstrator=SearchDemonstrator, write_data=write_data)
