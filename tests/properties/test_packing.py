"""Micro-batches under a token budget, and the rows of each rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.buffer.trajectories.packing import RowOverBudget, distribute, pack

lengths_strategy = st.lists(st.integers(1, 50), max_size=60)


@given(lengths=lengths_strategy, token_budget=st.integers(50, 400))
def test_each_row_is_packed_once_and_within_the_budget(lengths: list[int], token_budget: int) -> None:
    bins = pack(lengths, token_budget=token_budget)
    assert sorted(index for rows in bins for index in rows) == list(range(len(lengths)))
    assert all(rows for rows in bins)
    assert all(len(rows) * max(lengths[index] for index in rows) <= token_budget for rows in bins)


@given(lengths=lengths_strategy, token_budget=st.integers(50, 400))
def test_no_row_would_have_fit_in_an_earlier_micro_batch(lengths: list[int], token_budget: int) -> None:
    bins = pack(lengths, token_budget=token_budget)
    for later, rows in enumerate(bins):
        for earlier in bins[:later]:
            longest = max(lengths[index] for index in earlier)
            assert lengths[rows[0]] > longest or (len(earlier) + 1) * longest > token_budget


@given(lengths=lengths_strategy, excess=st.integers(1, 10), token_budget=st.integers(10, 400))
def test_a_row_above_the_budget_is_refused(lengths: list[int], excess: int, token_budget: int) -> None:
    with pytest.raises(RowOverBudget, match=r"learner\.token_budget"):
        pack([*lengths, token_budget + excess], token_budget=token_budget)


@given(lengths=lengths_strategy, ranks=st.integers(1, 5))
def test_each_row_is_on_one_rank_and_ranks_differ_by_at_most_the_longest_row(lengths: list[int], ranks: int) -> None:
    shares = distribute(lengths, ranks=ranks)
    assert len(shares) == ranks
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    assert all(list(share) == sorted(share) for share in shares)
    tokens = [sum(lengths[index] for index in share) for share in shares]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)
    assert sum(map(bool, shares)) == min(ranks, len(lengths))
