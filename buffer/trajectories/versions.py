"""Policy versions and the tree that they form.

Invariants:
- A version is never reused: a resume opens a new epoch at the step from which it resumes, so `2.40` has the weights of
  `1.40` when epoch 2 was forked at `1.40`.
- A place in the tree represents weights: if a resumed run trains the same batches again, its steps lead to the places
  of the undone steps (`2.41` is where `1.41` was), so an epoch forks where its batches first differ, not where it was
  opened.
- Staleness is the number of optimizer updates on the path between two places in that tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, order=True)
class PolicyVersion:
    """Version of the weights: `epoch` counts learner incarnations from 1, `step` counts optimizer updates since step 0
    of the run."""

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Parse `"2.41"` as `PolicyVersion(2, 41)`. Raises ValueError when the text is not `epoch.step`."""
        epoch, _, step = text.partition(".")
        return cls(int(epoch), int(step))


@dataclass(slots=True)
class VersionTree:
    """Forks by epoch: `forks[e]` is the newest version of an earlier epoch that is on the line of epoch `e`, None for a
    root. The line begins at that version or before it, and every step that it repeats moves its fork forward."""

    forks: dict[int, PolicyVersion | None] = field(default_factory=dict)

    def open_epoch(self, epoch: int, parent: PolicyVersion | None) -> None:
        """Record that `epoch` starts at `parent`'s weights. Raises ValueError if the epoch exists or the parent's epoch
        is unknown."""
        if epoch in self.forks:
            raise ValueError(f"epoch {epoch} is already open")
        if parent is not None and parent.epoch not in self.forks:
            raise ValueError(f"parent epoch {parent.epoch} is unknown")
        self.forks[epoch] = parent

    def following(self, epoch: int, fork: PolicyVersion | None) -> VersionTree:
        """Return the same tree with a different fork for one epoch."""
        return VersionTree(self.forks | {epoch: fork})

    def repeats(self, version: PolicyVersion) -> bool:
        """Return whether all steps of the version's epoch up to this version repeat those of an earlier epoch."""
        fork = self.forks[version.epoch]
        return fork is not None and version.step <= fork.step

    def staleness(self, trained_at: PolicyVersion, sampled: PolicyVersion) -> int:
        """Return the number of optimizer updates on the path between two versions (between 2.41 and 1.45, with
        epoch 2 forked at 1.40: 1 + 5 = 6)."""
        left, right, distance = trained_at, sampled, 0
        while left.epoch != right.epoch:
            if left.epoch > right.epoch:
                left, climbed = self._climb(left)
            else:
                right, climbed = self._climb(right)
            distance += climbed
        return distance + abs(left.step - right.step)

    def leads_to(self, earlier: PolicyVersion, later: PolicyVersion) -> bool:
        """Return whether the weights of `later` were trained from those of `earlier`, or are the same."""
        return self.staleness(later, earlier) == later.step - earlier.step

    def _climb(self, version: PolicyVersion) -> tuple[PolicyVersion, int]:
        """Return the position on an earlier epoch's line, and the number of updates back to it."""
        fork = self.forks[version.epoch]
        if fork is None:
            raise ValueError(f"version {version} has no common ancestor with the version it is compared to")
        step = min(version.step, fork.step)
        return PolicyVersion(fork.epoch, step), version.step - step
