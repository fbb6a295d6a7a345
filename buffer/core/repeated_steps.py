"""Steps that a resumed run trains again: which steps of undone lines they repeat.

Invariants:
- A step repeats an undone one when it has the same hash chain after it, starts from the same place in the version tree,
  and neither was skipped: equal batches from equal weights, hence equal weights. Anything else is a fork.
- What the waiting batches will repeat is foreseen from their ids and members alone. It decides what need not be thrown
  away; what is trained is decided by committed steps only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.buffer.types import batch_digest, extend_chain
from headrace.buffer.versions import PolicyVersion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.buffer.core.records import BatchRecord, CommitRecord
    from headrace.buffer.versions import VersionTree


@dataclass(frozen=True, slots=True)
class Foresight:
    """The line after the next batches: its last version, and the tree with what the line will have repeated."""

    version: PolicyVersion
    tree: VersionTree


class UndoneSteps:
    """Steps that resumes undid, by the hash chain after them."""

    def __init__(self) -> None:
        self._by_chain: dict[str, dict[int, CommitRecord]] = {}

    def add(self, commit: CommitRecord) -> None:
        """Idempotent."""
        self._by_chain.setdefault(commit.chain, {})[commit.sequence] = commit

    def matches(self, tree: VersionTree, trained_at: PolicyVersion, chain: str) -> list[CommitRecord]:
        """Undone steps from the place of `trained_at` to `chain`, oldest first. They differ at most in having been
        skipped."""
        known = self._by_chain.get(chain, {})
        return [commit for commit in known.values() if tree.staleness(commit.trained_at, trained_at) == 0]

    def repeated(self, tree: VersionTree, trained_at: PolicyVersion, chain: str) -> PolicyVersion | None:
        """The version that had the weights after a step from `trained_at` to `chain` that was not skipped."""
        if not tree.repeats(trained_at):
            return None
        done = (commit.version for commit in self.matches(tree, trained_at, chain) if not commit.skipped)
        return next(done, None)

    def foresee(self, tree: VersionTree, head: PolicyVersion, chain: str, batches: Sequence[BatchRecord]) -> Foresight:
        """What training these batches in order, from `head` and `chain` on, comes to: each step as it went before, and
        not skipped where it is new."""
        version = head
        for batch in batches:
            chain = extend_chain(chain, digest_of(batch))
            known = self.matches(tree, version, chain) if tree.repeats(version) else []
            if known and known[-1].skipped:
                continue
            version = PolicyVersion(version.epoch, version.step + 1)
            if known:
                tree = tree.following(version.epoch, known[-1].version)
        return Foresight(version, tree)


def digest_of(batch: BatchRecord) -> bytes:
    """One link of the hash chain, from the ledger's record."""
    return batch_digest(batch.batch_id, tuple((member.rollout_id, member.attempt) for member in batch.members))
