"""The simulation of one candidate in virtual time, and the statistics computed from its ledger.

Invariants:
- Bias is relative to the same attempts without any rule or bound: durations and rewards of all issued rollouts are
  known draws, even those of cancelled or evicted ones.
- A trial depends only on its plan, not on processes or their order.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from headrace.actors.errors import ConfigError, RunStalled, TasksParked
from headrace.actors.runtime.simulated.durations import Durations
from headrace.actors.runtime.simulated.tasks import is_solved
from headrace.actors.simulation.tuning.candidates import Candidate
from headrace.actors.simulation.virtual.plan import SimulationPlan
from headrace.actors.simulation.virtual.simulate import run_plan
from headrace.buffer.audit.evidence import Evidence, read_evidence
from headrace.buffer.core.records import RolloutState
from headrace.buffer.tasks.evaluators import SimulatedEvaluator
from headrace.buffer.tasks.task import Task
from headrace.buffer.trajectories.types import RolloutId

SLOW: Final = 0.9
"""Rank above which an attempt belongs to the slowest decile."""
LOST: Final = frozenset({RolloutState.EVICTED, RolloutState.CANCELLED, RolloutState.POISON})
"""End states of rollouts that are not trained; rollouts in other states may still be trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """Bias of trained rollouts. `slow_share`: share of the slowest decile of issued rollouts among trained ones, times
    ten; 1 means no loss. `reward`: mean reward of trained rollouts minus that of issued ones."""

    slow_share: float
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A candidate and its measured statistics. `waste` is as in `RunStatistics`; `evictions` are per step."""

    candidate: Candidate
    steps: int
    step_s: float
    mean_staleness: float
    max_staleness: int
    waste: float
    evictions: float
    slow_share: float
    reward_bias: float
    learner_share: float

    @property
    def length_bias(self) -> float:
        """Absolute deviation of `slow_share` from 1."""
        return abs(1.0 - self.slow_share)

    @property
    def loss(self) -> float:
        """Sum of the waste and both biases, as shares: the price of a fast setting."""
        return self.waste + self.length_bias + abs(self.reward_bias)

    def to_json(self) -> dict[str, Any]:
        figures = {key: value for key, value in asdict(self).items() if key != "candidate"}
        return asdict(self.candidate) | figures | {"length_bias": self.length_bias, "loss": self.loss}


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedTrial:
    """A candidate whose simulation failed."""

    candidate: Candidate
    reason: str


def run_trial(candidate: Candidate, base: SimulationPlan, steps: int) -> Trial | FailedTrial:
    """Simulate a candidate in this process."""
    plan = candidate.plan(base, steps=steps)
    with tempfile.TemporaryDirectory(prefix="headrace-tune-") as folder:
        kept = Path(folder) / "ledger"
        try:
            account, _ = run_plan(plan, kept)
        except (RunStalled, TasksParked, ConfigError) as error:
            return FailedTrial(candidate=candidate, reason=str(error))
        bias = measure_bias(read_evidence(kept), plan)
    if problems := account.problems_at(plan.max_staleness):
        return FailedTrial(candidate=candidate, reason=f"its ledger is not clean: {problems[0]}")
    trained = sum(account.staleness.values())
    return Trial(
        candidate=candidate,
        steps=steps,
        step_s=account.step_s,
        mean_staleness=sum(staleness * count for staleness, count in account.staleness.items()) / max(1, trained),
        max_staleness=account.max_staleness,
        waste=account.waste,
        evictions=account.evicted / steps,
        slow_share=bias.slow_share,
        reward_bias=bias.reward,
        learner_share=account.learner_share,
    )


@dataclass(frozen=True, slots=True)
class _Draw:
    duration_s: float
    reward: float


def measure_bias(evidence: Evidence, plan: SimulationPlan) -> Bias:
    """Compare trained with issued rollouts. Only rollouts issued early enough to have ended before the last commit
    count."""
    tasks = {task.id: task for task in plan.task_set()}
    of_group = {group.group_id: tasks[group.task_id] for group in evidence.groups}
    ended_s = max((commit.committed_at_s for commit in evidence.commits), default=0.0)
    began_s = {attempt.rollout_id: attempt.issued_at_s for attempt in evidence.attempts if attempt.attempt == 1}
    issued = [rollout for rollout in evidence.rollouts if rollout.rollout_id in began_s]
    old = [rollout for rollout in issued if began_s[rollout.rollout_id] <= ended_s - plan.longest_s]
    durations = Durations(plan.durations, seed=plan.seed)
    first, last = [], []
    for rollout in old or issued:
        task = of_group[rollout.group_id]
        first.append(_draw(durations, task, rollout.rollout_id, 1))
        if rollout.state not in LOST:
            last.append(_draw(durations, task, rollout.rollout_id, max(1, rollout.attempt)))
    if not first or not last:
        return Bias(slow_share=1.0, reward=0.0)
    slow_s = sorted(draw.duration_s for draw in first)[int(SLOW * len(first))]
    expected = fmean(draw.duration_s >= slow_s for draw in first)
    return Bias(
        slow_share=fmean(draw.duration_s >= slow_s for draw in last) / expected,
        reward=fmean(draw.reward for draw in last) - fmean(draw.reward for draw in first),
    )


def _draw(durations: Durations, task: Task, rollout_id: RolloutId, attempt: int) -> _Draw:
    """Draw an attempt's duration and reward as the simulated agent and evaluator do."""
    assert isinstance(task.evaluator, SimulatedEvaluator)
    solved = is_solved(task, task.evaluator.verdict.success, f"{rollout_id}.{attempt}")
    duration_s = durations.draw_s(f"{task.id} {rollout_id} {attempt}", task=task.id, solved=solved)
    return _Draw(duration_s=duration_s, reward=float(solved))
