"""The branches of a session's trie: the conversations that led to turns which nothing continues.

Invariants:
- Every sampled turn is on at least one branch, and is owned by exactly one: the first one in the order that has it.
- The first branch is the main conversation: of those that have a whole row and began first, the one with the longest
  row. Then come the others that have a whole row, and then the rest, each in the order in which they ended.
- So the turns of a row are owned by branches that have a whole row, and the last turn of each row by a different one.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.serve.gateway.capture.rows import IN_ROWS, Masked, lineage_name, verdicts_of
from headrace.serve.gateway.capture.session import Session
from headrace.serve.gateway.capture.trie import PromptNode, SampledNode, path


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BranchTurn:
    """Turn of a branch. `masked` is the reason why it is not trained, and `is_owned` is false if an earlier branch has
    it too."""

    prompt: PromptNode
    sampled: SampledNode
    masked: Masked | None
    is_owned: bool

    @property
    def is_in_row(self) -> bool:
        return self.masked in IN_ROWS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Branch:
    """Conversation from a root to a turn that nothing continues. `lineage` is the name of its row's lineage, which
    several branches can have; `name` is unique within the session."""

    name: str
    lineage: str
    turns: tuple[BranchTurn, ...]


def branches_of(session: Session) -> list[Branch]:
    """Return the branches; empty if nothing was sampled. They hold nodes, so hold the session as long."""
    verdicts, roots = verdicts_of(session), session.trie.roots
    in_rows = {node for node, reason in verdicts.items() if reason in IN_ROWS}
    ends_of_rows = in_rows - {sampled for node in in_rows for _, sampled in path(node)[:-1]}
    leaves = [node for node in verdicts if not node.children]
    # By leaf, the number of tokens of the row that the branch has as a whole.
    rows = {leaf: max((end.length for _, end in path(leaf) if end in ends_of_rows), default=0) for leaf in leaves}
    main = min(leaves, key=lambda leaf: (not rows[leaf], roots.index(path(leaf)[0][0]), -rows[leaf]), default=None)
    # The sort is stable.
    leaves.sort(key=lambda leaf: (leaf is not main, not rows[leaf]))
    branches, seen = [], set[SampledNode]()
    for leaf in leaves:
        turns = tuple(
            BranchTurn(prompt=prompt, sampled=node, masked=verdicts[node], is_owned=node not in seen)
            for prompt, node in path(leaf)
        )
        seen.update(turn.sampled for turn in turns)
        lineage = lineage_name(leaf, session.trie)
        branches.append(Branch(name=f"{lineage}/{leaf.turn_id}", lineage=lineage, turns=turns))
    return branches
