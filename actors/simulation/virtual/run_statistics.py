"""Statistics of a simulated run, computed from its ledger rather than from its actors' reports.

Invariants:
- Staleness is recomputed from the version spans of the stored trajectories and the version at which each step began.
- Only steps after the warm-up are measured; conservation and the bound are checked over the whole run.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from headrace.buffer.audit.evidence import Evidence, read_evidence, read_trajectories
from headrace.buffer.audit.report import DecileReport, acceptance
from headrace.buffer.audit.verify import audit
from headrace.buffer.core.classification import trained_tokens
from headrace.buffer.core.records import AttemptRecord, CommitRecord, RolloutState

_RANDOM_NAMES = re.compile(r'"(?:worker|sandbox)":"[^"]*"')
_UNDECIDED = frozenset({RolloutState.IN_FLIGHT, RolloutState.WAITING, RolloutState.SEALED, RolloutState.LEASED})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatistics:
    """Statistics of one run. `step_s` is the mean time of a measured step; `staleness` counts trained rollouts by
    staleness, `evicted` counts rollouts that exceeded the bound; `waste` is the share of the attempts' time that is
    never trained; `busy` is the mean number of rollouts in each phase over the measured time, and `most_in_flight` is
    the largest number of concurrent attempts in the whole run; `deciles` has the outcomes of attempts by duration."""

    step_s: float
    staleness: dict[int, int]
    trained: int
    evicted: int
    waste: float
    deciles: tuple[DecileReport, ...]
    busy: dict[str, float]
    most_in_flight: int
    learner_share: float
    problems: tuple[str, ...]

    @property
    def max_staleness(self) -> int:
        return max(self.staleness, default=0)

    def trained_shares(self) -> list[float | None]:
        """Return the trained share of the attempts with a known outcome, by decile of duration, shortest first. None
        for a decile without any such attempts."""
        known = [decile.finished - decile.held + decile.cancelled for decile in self.deciles]
        return [decile.trained / number if number else None for decile, number in zip(self.deciles, known, strict=True)]

    def problems_at(self, bound: int) -> list[str]:
        """Return the violations of the ledger's invariants and of this staleness bound."""
        seen = self.max_staleness
        over = [f"trained at staleness {seen}, but the bound is {bound}"] if seen > bound else []
        return [*over, *self.problems]


def read_statistics(folder: Path, *, warmup_steps: int) -> RunStatistics:
    """Compute the statistics from an exported ledger. Raises LedgerRefused."""
    evidence = read_evidence(folder)
    commits = evidence.surviving
    current = {(rollout.rollout_id, rollout.attempt): rollout.state for rollout in evidence.rollouts}
    # Measured from the last step of the warm-up, or the opening of the first epoch, to the last step.
    began_s = commits[warmup_steps - 1].committed_at_s if warmup_steps else evidence.epochs[0].opened_at_s
    ended_s = commits[-1].committed_at_s
    wasted_s = decided_s = 0.0
    busy_s: dict[str, float] = defaultdict(float)
    for attempt in evidence.attempts:
        state = current.get(attempt.key)
        if attempt.ended_at_s is not None and state not in _UNDECIDED:
            spent_s = attempt.ended_at_s - attempt.issued_at_s
            decided_s += spent_s
            wasted_s += spent_s * (state is not RolloutState.TRAINED)
        for phase, start_s, end_s in _phase_intervals(attempt, ended_s):
            busy_s[phase] += max(0.0, min(end_s, ended_s) - max(start_s, began_s))
    steps = len(commits) - warmup_steps
    learner_s = sum(commit.metrics.get("learner_s", 0.0) for commit in commits[warmup_steps:])
    staleness, problems = _staleness(evidence, commits)
    accepted = acceptance(evidence)
    return RunStatistics(
        step_s=(ended_s - began_s) / steps,
        staleness=staleness,
        trained=sum(rollout.state is RolloutState.TRAINED for rollout in evidence.rollouts),
        evicted=accepted.evicted,
        waste=wasted_s / decided_s if decided_s else 0.0,
        deciles=accepted.deciles,
        busy={phase: seconds / (ended_s - began_s) for phase, seconds in sorted(busy_s.items())},
        most_in_flight=most_in_flight(evidence),
        learner_share=learner_s / (ended_s - began_s),
        problems=(*audit(evidence).problems, *problems),
    )


def _staleness(evidence: Evidence, commits: list[CommitRecord]) -> tuple[dict[int, int], list[str]]:
    """Count the trained rollouts by the staleness of their stored trajectories, and list those whose trajectory is
    invalid or has no trained token."""
    tree = evidence.tree()
    batches = {batch.batch_id: batch for batch in evidence.batches}
    trained_at = {
        (member.rollout_id, member.attempt): commit.trained_at
        for commit in commits
        for member in batches[commit.batch_id].members
    }
    seen: Counter[int] = Counter()
    problems: list[str] = []
    for key, trajectory in read_trajectories(evidence, set(trained_at)):
        try:
            trained = trained_tokens(trajectory, tree)
        except ValueError as error:
            problems.append(f"{key[0]} attempt {key[1]} was trained: {error}")
            continue
        if trained:
            seen[max(tree.staleness(trained_at[key], part.version) for part in trained)] += 1
        else:
            problems.append(f"{key[0]} attempt {key[1]} was trained, but has no trained token in the ledger")
    return dict(sorted(seen.items())), problems


def most_in_flight(evidence: Evidence) -> int:
    """Return the largest number of concurrent attempts; at the same moment, ends are counted before starts."""
    changes = [(attempt.issued_at_s, 1) for attempt in evidence.attempts]
    changes += [(attempt.ended_at_s, -1) for attempt in evidence.attempts if attempt.ended_at_s is not None]
    return max(accumulate(change for _, change in sorted(changes)), default=0)


def _phase_intervals(attempt: AttemptRecord, now_s: float) -> Iterator[tuple[str, float, float]]:
    """Yield phase, start and end: the phases of an attempt are contiguous, and the last one ends with the attempt."""
    if attempt.ended_at_s is None:
        # Attempts in flight count as working.
        yield "agent", attempt.issued_at_s, now_s
        return
    start_s = attempt.ended_at_s - sum(seconds for _, seconds in attempt.phases_s)
    for phase, seconds in attempt.phases_s:
        yield phase, start_s, start_s + seconds
        start_s += seconds


def history_digest(folder: Path) -> str:
    """Return the SHA-256 of every row of the ledger and its trajectories. It does not depend on the folder, or on the
    random names of worker processes and sandboxes."""
    digest = hashlib.sha256()
    for path in (folder / "ledger.db", *sorted((folder / "trajectories").glob("*.db"))):
        with closing(sqlite3.connect(path)) as database:
            for line in database.iterdump():
                digest.update(_RANDOM_NAMES.sub("", line.replace(str(folder), "")).encode())
    return digest.hexdigest()
