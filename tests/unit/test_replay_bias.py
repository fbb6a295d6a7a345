"""The gradient estimate of an early accepting buffer, exactly: all lengths that a group may have, through the core.

A policy chooses "long" with probability P; long rollouts take longer and earn more, so dE[reward]/dP is LONG - SHORT.
The estimate is the mean of advantage * score over what is trained. Its expectation is a sum over all groups, weighted
by their probability: nothing is sampled, so nothing can be off by chance.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from headrace.buffer.core.advantages import deviation_square_sum, deviation_sum
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.records import RolloutState, Snapshot, TaskRecord
from headrace.buffer.trajectories.versions import PolicyVersion
from support import replay_cases as cases

FIRST = PolicyVersion(1, 0)
TRAJECTORY = cases.trajectory(FIRST)
MEMBERS, P = 8, 0.4
SHORT, LONG = 0.2, 1.0
SECONDS = {False: 1.0, True: 10.0}
EARLY = ("count(6)", "fraction(0.5)", "deadline(5)", "count(3) & grace(2)", "count(7) | deadline(5)")


def score(long: bool) -> float:
    """d log probability / dP."""
    return 1 / P if long else -1 / (1 - P)


def train(buffer, lengths):
    """Run one group with these lengths; returns (advantage, long) of what may be trained."""
    opened = float(buffer.state.next_ordinal * 1000)
    orders = buffer.issue(MEMBERS, FIRST, opened)
    # Ties are broken by member, whatever its length.
    ends = sorted((SECONDS[long] + 0.01 * member, member) for member, long in enumerate(lengths))
    for seconds, member in ends:
        reward = LONG if lengths[member] else SHORT
        done = replace(cases.result(orders[member], reward=reward), trajectory=TRAJECTORY)
        buffer.offer(done, opened + seconds)
    buffer.tick(opened + 1000.0)
    members = [buffer.state.rollouts[order.rollout_id] for order in orders]
    return [
        (member.advantage, long, member)
        for member, long in zip(members, lengths, strict=True)
        if member.state is RolloutState.SEALED
    ]


def train_expiring(lengths, unfinished):
    """As `train`, but what is finished expires by an update between the short and the long ones."""
    config = BufferConfig(
        group_size=MEMBERS,
        batch_size=MEMBERS,
        max_staleness=2,
        rule="all | expiring(1)",
        unfinished=unfinished,
        advantage="leave_one_out",
    )
    buffer = cases.core(config)
    buffer.open_epoch(None, 0.0)
    orders = buffer.issue(MEMBERS, FIRST, 0.0)
    cases.fill(buffer, FIRST, limit=MEMBERS)

    def finish(asked):
        for member, order in enumerate(orders):
            if lengths[member] is asked:
                done = replace(cases.result(order, reward=LONG if asked else SHORT), trajectory=TRAJECTORY)
                buffer.offer(done, SECONDS[asked] + 0.01 * member)

    finish(False)
    cases.step(buffer, FIRST)
    finish(True)
    members = [buffer.state.rollouts[order.rollout_id] for order in orders]
    return [
        (member.advantage, long)
        for member, long in zip(members, lengths, strict=True)
        if member.state in (RolloutState.SEALED, RolloutState.TRAINED)
    ]


def expectation_expiring(unfinished, early_others):
    """The expected estimate over members of which so many others are short, and its value without a bias."""
    estimate = exact = 0.0
    for lengths in itertools.product((False, True), repeat=MEMBERS):
        probability = math.prod(P if long else 1 - P for long in lengths)
        trained = train_expiring(lengths, unfinished)
        for advantage, long in trained:
            if lengths.count(False) - (not long) in early_others:
                estimate += probability / len(trained) * advantage * score(long)
                exact += probability / len(trained) * (LONG - SHORT)
    return estimate, exact


def expectations(rule, unfinished):
    """Expected estimates: with the buffer's baselines, and with the mean over the early finishers for everybody."""
    config = BufferConfig(
        group_size=MEMBERS, batch_size=1 << 20, rule=rule, unfinished=unfinished, advantage="leave_one_out"
    )
    buffer = cases.core(config)
    buffer.open_epoch(None, 0.0)
    fixed, naive = [], []
    for lengths in itertools.product((False, True), repeat=MEMBERS):
        probability = math.prod(P if long else 1 - P for long in lengths)
        trained = train(buffer, lengths)
        early = [LONG if long else SHORT for _, long, member in trained if not member.late]
        mean = math.fsum(early) / len(early)
        share = probability / len(trained)
        fixed += [share * advantage * score(long) for advantage, long, _ in trained]
        naive += [share * ((LONG if long else SHORT) - mean) * score(long) for _, long, _ in trained]
    # A plain mean that holds the member itself shrinks the estimate by (n - 1) / n even without early acceptance.
    return math.fsum(fixed), math.fsum(naive) * MEMBERS / (MEMBERS - 1)


@pytest.mark.whole(but_first=True)
@pytest.mark.parametrize("rule", ["all", *EARLY])
def test_carried_members_leave_the_gradient_unbiased(rule):
    """F18."""
    estimate, naive = expectations(rule, "carry")
    assert estimate == pytest.approx(LONG - SHORT, rel=1e-9)
    if rule == "all":
        assert naive == pytest.approx(LONG - SHORT, rel=1e-9)


@pytest.mark.whole
def test_expiring_groups_are_unbiased_unless_a_member_completes_min_members():
    """With one other in by the update, whether the group is sealed then depends on the member: `min_members` is 2."""
    estimate, exact = expectation_expiring("carry", {0, *range(2, MEMBERS)})
    assert estimate == pytest.approx(exact, rel=1e-9)
    estimate, exact = expectation_expiring("carry", range(MEMBERS))
    assert exact == pytest.approx(LONG - SHORT)
    assert estimate == pytest.approx(exact, rel=0.01)
    aborted, _ = expectation_expiring("abort", range(MEMBERS))
    assert aborted < 0.05 * exact


@pytest.mark.whole(but_first=True)
@pytest.mark.parametrize("rule", EARLY)
def test_aborted_members_bias_the_gradient(rule):
    """F18."""
    estimate, _ = expectations(rule, "abort")
    assert abs(estimate / (LONG - SHORT) - 1) > 0.05


def test_the_mean_over_early_finishers_biases_the_gradient():
    _, naive = expectations("deadline(5)", "carry")
    assert abs(naive / (LONG - SHORT) - 1) > 0.1


def all_groups(p):
    """Every combination of lengths, with its probability."""
    for lengths in itertools.product((False, True), repeat=MEMBERS):
        yield lengths, math.prod(p if long else 1 - p for long in lengths)


def long_history(p):
    """The records of tasks with so many complete groups that their sums are expectations and further groups do not
    change them."""
    square_sum = deviations = 0.0
    for lengths, probability in all_groups(p):
        rewards = [LONG if long else SHORT for long in lengths]
        square_sum += 1e12 * probability * deviation_square_sum(rewards)
        deviations += 1e12 * probability * deviation_sum(rewards)
    spread = {"grpo_square_sum": square_sum, "grpo_deviation_sum": deviations}
    return Snapshot(records=tuple(TaskRecord(task_id=task.id, **spread) for task in cases.tasks()))


def expected_gradient(kind, rule, p):
    """With members carried, and the score at this probability of "long"."""
    config = BufferConfig(group_size=MEMBERS, batch_size=1 << 20, rule=rule, advantage=kind)
    buffer = cases.core(config, long_history(p))
    buffer.open_epoch(None, 0.0)
    estimate = []
    for lengths, probability in all_groups(p):
        trained = train(buffer, lengths)
        scores = [1 / p if long else -1 / (1 - p) for _, long, _ in trained]
        products = (advantage * score for (advantage, *_), score in zip(trained, scores, strict=True))
        estimate.append(probability / len(trained) * math.fsum(products))
    return math.fsum(estimate)


# Under `count(3) & grace(2)` a member's speed decides whether the group is complete when it is sealed, and so by which
# deviation it is divided.
SAME_SCALE = {"count(6)": 1e-6, "fraction(0.5)": 1e-6, "deadline(5)": 1e-6, "count(3) & grace(2)": 0.01}


@pytest.mark.whole(but_first=True)
@pytest.mark.parametrize("p", [0.05, 0.4])
@pytest.mark.parametrize("rule", SAME_SCALE)
def test_early_groups_have_the_expected_gradient_of_complete_groups(rule, p):
    """In size too, although at 0.05 two of three groups are flat."""
    assert expected_gradient("grpo", rule, p) == pytest.approx(
        expected_gradient("grpo", "all", p), rel=SAME_SCALE[rule]
    )


@pytest.mark.whole(but_first=True)
@pytest.mark.parametrize(("kind", "share"), [("grpo_no_std", (MEMBERS - 1) / MEMBERS), ("leave_one_out", 1.0)])
@pytest.mark.parametrize("rule", ["all", "count(6)"])
def test_kinds_without_a_deviation_have_a_known_share_of_the_gradient(kind, share, rule):
    assert expected_gradient(kind, rule, P) == pytest.approx(share * (LONG - SHORT), rel=1e-9)


ROLLOUT_S, CLOCK_S = 1.0, 60.0


def rambling_gradient(p, *, train_cut, first_turn):
    """The expected estimate of dE[reward]/dp by leave-one-out, which is -1: in its last turn a policy rambles with
    probability p until the clock cuts the turn, and earns 0 instead of 1. With `first_turn`, a turn before it has
    trained tokens.

    Each trajectory adds its advantage times the scores of what it trains; a batch has a fixed number of rollouts, so
    the mean is over those that may be trained. The first turn has no choice, and so no score."""
    config = BufferConfig(group_size=MEMBERS, batch_size=1 << 20, advantage="leave_one_out")
    buffer = cases.core(config)
    buffer.open_epoch(None, 0.0)
    whole, first_only = cases.trajectory(FIRST, tokens=12), cases.trajectory(FIRST, tokens=6)
    estimate = []
    for rambles, probability in all_groups(p):
        orders = buffer.issue(MEMBERS, FIRST, float(buffer.state.next_ordinal * 1000))
        for order, cut in zip(orders, rambles, strict=True):
            trajectory = whole if not cut or train_cut else first_only if first_turn else None
            done = replace(cases.result(order, reward=0.0 if cut else 1.0), trajectory=trajectory)
            buffer.offer(done, CLOCK_S if cut else ROLLOUT_S)
        trained = [
            (member.advantage, cut)
            for order, cut in zip(orders, rambles, strict=True)
            if (member := buffer.state.rollouts[order.rollout_id]).state is RolloutState.SEALED
        ]
        # What is masked adds nothing, whatever its advantage.
        scored = [advantage * (1 / p if cut else -1 / (1 - p)) for advantage, cut in trained if train_cut or not cut]
        estimate.append(probability * math.fsum(scored) / max(1, len(trained)))
    return math.fsum(estimate)


@pytest.mark.whole(but_first=True)
@pytest.mark.parametrize("p", [0.05, 0.4])
def test_rambling_until_the_clock_has_a_gradient_of_its_own_only_if_cut_turns_are_trained(p):
    """While they are masked, only the others teach against it: a share p of the gradient, so the less the rarer it is.
    Where ramblers take no place in a batch, it is about p / (1 - p)."""
    assert rambling_gradient(p, train_cut=True, first_turn=True) == pytest.approx(-1.0, rel=1e-9)
    assert rambling_gradient(p, train_cut=True, first_turn=False) == pytest.approx(-1.0, rel=1e-9)
    assert rambling_gradient(p, train_cut=False, first_turn=True) == pytest.approx(-p, rel=1e-9)
    assert rambling_gradient(p, train_cut=False, first_turn=False) == pytest.approx(
        -8 / 7 * p * (1 - p**7) / (1 - p), rel=1e-9
    )
