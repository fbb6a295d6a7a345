"""What a simulated run shows, read from its ledger: not from what its actors say of themselves.

Invariants:
- Staleness is computed again from the version spans of the stored trajectories and the version each step began at.
- Only steps after the warm-up are measured; conservation and the bound are checked over the whole run.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from headrace.buffer.audit.evidence import read_evidence, read_trajectories
from headrace.buffer.audit.report import acceptance
from headrace.buffer.audit.verify import audit
from headrace.buffer.core.classification import trained_tokens
from headrace.buffer.core.records import RolloutState

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from headrace.buffer.audit.evidence import Evidence
    from headrace.buffer.audit.report import DecileReport
    from headrace.buffer.core.records import AttemptRecord, CommitRecord

_UNDECIDED = frozenset({RolloutState.IN_FLIGHT, RolloutState.WAITING, RolloutState.SEALED, RolloutState.LEASED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Of one run. `step_s` is the mean time of a measured step; `staleness` counts trained rollouts by staleness;
    `evicted` counts how often one went over the bound; `waste` is the share of the attempts' time that was, and will
    be, trained nowhere; `busy` is the mean number of rollouts in each phase over the measured time, `most_in_flight`
    the largest number of attempts under way at once, in the whole run; `deciles` say what became of short and long
    ones."""

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
        """By decile of duration, shortest first: the share that was trained of the attempts whose fate is known. None
        where none is."""
        known = [decile.finished - decile.held + decile.cancelled for decile in self.deciles]
        return [decile.trained / number if number else None for decile, number in zip(self.deciles, known, strict=True)]

    def problems_at(self, bound: int) -> list[str]:
        """What must not be in a run with this bound."""
        seen = self.max_staleness
        over = [f"trained at staleness {seen}, the bound is {bound}"] if seen > bound else []
        return [*over, *self.problems]


def read_account(folder: Path, *, warmup_steps: int) -> Account:
    """From an exported ledger. Raises LedgerRefused."""
    evidence = read_evidence(folder)
    commits = evidence.surviving
    states = Counter(rollout.state for rollout in evidence.rollouts)
    began_s, ended_s = _window(evidence, commits, warmup_steps)
    steps = len(commits) - warmup_steps
    learner_s = sum(commit.metrics.get("learner_s", 0.0) for commit in commits[warmup_steps:])
    staleness, problems = _staleness(evidence, commits)
    accepted = acceptance(evidence)
    return Account(
        step_s=(ended_s - began_s) / steps,
        staleness=staleness,
        trained=states[RolloutState.TRAINED],
        evicted=accepted.evicted,
        waste=_waste(evidence),
        deciles=accepted.deciles,
        busy=_busy(evidence, began_s, ended_s),
        most_in_flight=most_in_flight(evidence),
        learner_share=learner_s / (ended_s - began_s),
        problems=(*audit(evidence).problems, *problems),
    )


def _window(evidence: Evidence, commits: list[CommitRecord], warmup_steps: int) -> tuple[float, float]:
    """From the last step that is left out, or the opening of the first epoch, to the last step."""
    began_s = commits[warmup_steps - 1].committed_at_s if warmup_steps else evidence.epochs[0].opened_at_s
    return began_s, commits[-1].committed_at_s


def _staleness(evidence: Evidence, commits: list[CommitRecord]) -> tuple[dict[int, int], list[str]]:
    """Of every trained rollout, from its stored trajectory; and what is missing."""
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
            problems.append(f"{key[0]} attempt {key[1]} was trained, and has no trained token in the ledger")
    return dict(sorted(seen.items())), problems


def _waste(evidence: Evidence) -> float:
    """Time of ended attempts that train nothing over the time of all that are decided."""
    current = {(rollout.rollout_id, rollout.attempt): rollout.state for rollout in evidence.rollouts}
    wasted_s = decided_s = 0.0
    for attempt in evidence.attempts:
        state = current.get(attempt.key)
        if attempt.ended_at_s is None or state in _UNDECIDED:
            continue
        spent_s = attempt.ended_at_s - attempt.issued_at_s
        decided_s += spent_s
        wasted_s += spent_s * (state is not RolloutState.TRAINED)
    return wasted_s / decided_s if decided_s else 0.0


def _busy(evidence: Evidence, began_s: float, ended_s: float) -> dict[str, float]:
    """Mean number of rollouts in each phase over the measured time; those in flight at its end work."""
    spent_s: dict[str, float] = defaultdict(float)
    for attempt in evidence.attempts:
        for phase, start_s, end_s in _stretches(attempt, ended_s):
            spent_s[phase] += max(0.0, min(end_s, ended_s) - max(start_s, began_s))
    return {phase: seconds / (ended_s - began_s) for phase, seconds in sorted(spent_s.items())}


def most_in_flight(evidence: Evidence) -> int:
    """Of one moment, ends before beginnings."""
    changes = [(attempt.issued_at_s, 1) for attempt in evidence.attempts]
    changes += [(attempt.ended_at_s, -1) for attempt in evidence.attempts if attempt.ended_at_s is not None]
    return max(accumulate(change for _, change in sorted(changes)), default=0)


def _stretches(attempt: AttemptRecord, now_s: float) -> Iterator[tuple[str, float, float]]:
    """What an attempt did from when to when: its phases follow each other, and the last one ends with it."""
    if attempt.ended_at_s is None:
        yield "agent", attempt.issued_at_s, now_s
        return
    start_s = attempt.ended_at_s - sum(seconds for _, seconds in attempt.phases_s)
    for phase, seconds in attempt.phases_s:
        yield phase, start_s, start_s + seconds
        start_s += seconds


def history_digest(folder: Path) -> str:
    """SHA-256 over every row of the ledger and its trajectories: equal for equal histories, wherever they lie."""
    digest = hashlib.sha256()
    for path in (folder / "ledger.db", *sorted((folder / "trajectories").glob("*.db"))):
        with closing(sqlite3.connect(path)) as database:
            for line in database.iterdump():
                digest.update(line.replace(str(folder), "").encode())
    return digest.hexdigest()
