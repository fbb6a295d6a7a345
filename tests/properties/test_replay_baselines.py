"""Baselines against the sentence that defines them, taken literally: move one member to the group's start, look at
every moment, and average the others that are in at the first one at which the group would have been sealed."""

from __future__ import annotations

import math

from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.buffer.core.acceptance import parse_rule
from headrace.buffer.core.advantages import Finish, baseline

SIZE = 6
PREDICATES = {
    "all": lambda ends, now: False,
    "count(3)": lambda ends, now: len(ends) >= 3,
    "fraction(0.5)": lambda ends, now: len(ends) >= 3,
    "at_least(5)": lambda ends, now: len(ends) >= 5,
    "deadline(7)": lambda ends, now: now >= 7,
    "grace(3)": lambda ends, now: now - max(ends) >= 3,
    "count(4) & deadline(5)": lambda ends, now: len(ends) >= 4 and now >= 5,
    "count(5) | deadline(9)": lambda ends, now: len(ends) >= 5 or now >= 9,
    "count(3) & grace(2) | deadline(11)": lambda ends, now: (len(ends) >= 3 and now - max(ends) >= 2) or now >= 11,
    "all | count(4) & (grace(4) | deadline(6))": lambda ends, now: (
        len(ends) >= 4 and (now - max(ends) >= 4 or now >= 6)
    ),
}
RULES = st.sampled_from(sorted(PREDICATES))


def sealing_time(text, ends, size, min_members=2, latest=40):
    """The first whole second at which the group is sealed, None when it is not by `latest`."""
    for now in range(latest):
        here = [end for end in ends if end <= now]
        if len(here) == size:
            return now
        if len(here) >= min_members and PREDICATES[text](here, now):
            return now
    return None


@given(text=RULES, ends=st.lists(st.integers(0, 20), min_size=SIZE, max_size=SIZE), min_members=st.integers(2, 4))
def test_a_baseline_is_the_mean_over_members_finished_by_the_counterfactual_sealing_time(text, ends, min_members):
    sealed_at = sealing_time(text, ends, SIZE, min_members)
    assume(sealed_at is not None)
    for member, own_end in enumerate(ends):
        others = {other: end for other, end in enumerate(ends) if other != member}
        tau = sealing_time(text, [0, *others.values()], SIZE, min_members)
        assert tau <= sealed_at, "finishing earlier never seals later"
        expected = math.fsum(2.0**other for other, end in others.items() if end <= tau)
        expected /= sum(end <= tau for end in others.values())
        known = [Finish(at_s=float(end), reward=2.0**other) for other, end in others.items() if end <= sealed_at]
        got = baseline(parse_rule(text), known, size=SIZE, min_members=min_members, opened_at_s=0.0)
        assert math.isclose(got, expected), f"member {member}, which took {own_end}"


@given(text=RULES, ends=st.lists(st.integers(0, 20), min_size=SIZE, max_size=SIZE), own=st.integers(0, 20))
def test_a_baseline_does_not_depend_on_the_members_own_speed(text, ends, own):
    """Whenever the member itself ends, what is known of the others by the sealing gives the same baseline."""
    values = []
    for first in (ends[0], own):
        sealed_at = sealing_time(text, [first, *ends[1:]], SIZE)
        known = [Finish(at_s=float(end), reward=float(end)) for end in ends[1:] if end <= sealed_at]
        values.append(baseline(parse_rule(text), known, size=SIZE, min_members=2, opened_at_s=0.0))
    assert values[0] == values[1]
