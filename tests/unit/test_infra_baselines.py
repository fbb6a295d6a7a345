"""F19: a quarter of all attempts fail for reasons of the infrastructure, in virtual time, through the ordinary
dispatcher, workers and buffer. Their groups have the mean and the deviation of the members that have a reward."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from statistics import fmean, stdev

import pytest

from headrace.actors.simulation.virtual.plan import make_plan
from headrace.actors.simulation.virtual.simulate import run_plan
from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.audit.joined_rows import GroupHistory
from headrace.buffer.core.records import GroupState, RolloutState
from headrace.buffer.trajectories.types import Cause

GROUP, STEPS = 8, 12
BOUND = 8


def sealed_groups(folder: Path, *, max_attempts: int) -> list[GroupHistory]:
    """The groups of a run in which no rollout is run again because of its age, and no task is parked."""
    sizes = {"batch_size": 16, "group_size": GROUP, "slots": 64, "tasks": 64, "turns": 2, "steps": STEPS}
    keys = (f"buffer.max_attempts={max_attempts}", "buffer.max_evictions=0", "buffer.park_after=1000")
    plan = make_plan("swe64", sizes | {"failure": 0.25, "max_staleness": BOUND}, keys)
    account, _ = run_plan(plan, folder)
    assert account.problems_at(BOUND) == []
    evidence = read_evidence(folder)
    ended = Counter(attempt.cause for attempt in evidence.attempts if attempt.cause is not None)
    assert 0.2 < ended[Cause.INFRA] / ended.total() < 0.35
    assert all(attempt.reward is None for attempt in evidence.attempts if attempt.cause is Cause.INFRA)
    return [history for history in evidence.histories() if history.group.state is GroupState.SEALED]


def assert_advantages_are_those_of(rewards: list[float], history: GroupHistory) -> int:
    """Compare with the published formula, computed here; return the number of compared members."""
    mean, deviation = fmean(rewards), stdev(rewards)
    trained = [member for member in history.members if member.state is RolloutState.TRAINED]
    for member in trained:
        assert member.reward is not None
        assert member.advantage == pytest.approx((member.reward - mean) / (deviation + 1e-6), abs=1e-9)
    return len(trained)


def test_f19_failed_members_are_refilled_up_to_the_size_of_the_group(tmp_path: Path) -> None:
    groups = sealed_groups(tmp_path / "run", max_attempts=20)
    refilled = compared = 0
    for history in groups:
        rewards = [member.first_reward for member in history.members if member.first_reward is not None]
        assert len(rewards) == GROUP, "the refill reaches n"
        refilled += sum(len(history.attempts[member.rollout_id]) > 1 for member in history.members)
        compared += assert_advantages_are_those_of(rewards, history)
    assert refilled > len(groups), "more than one member of a group on average"
    assert compared >= STEPS * 16 - GROUP


def test_f19_members_that_are_given_up_are_not_in_the_mean_and_deviation(tmp_path: Path) -> None:
    groups = sealed_groups(tmp_path / "run", max_attempts=1)
    compared = biased = 0
    for history in groups:
        lost = [member for member in history.members if member.state is RolloutState.POISON]
        rewards = [member.first_reward for member in history.members if member.first_reward is not None]
        assert len(lost) + len(rewards) == GROUP
        assert all(member.reward is None and member.advantage is None for member in lost)
        compared += assert_advantages_are_those_of(rewards, history)
        with_zeros = rewards + [0.0] * len(lost)
        biased += not math.isclose(fmean(with_zeros), fmean(rewards))
    assert compared >= STEPS * 16 - GROUP
    assert biased > len(groups) / 2, "zeros in place of the lost members would have moved most baselines"
