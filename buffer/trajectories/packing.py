"""The distribution of rows over ranks, and their packing into micro-batches.

Invariants:
- Every row is on exactly one rank, in exactly one micro-batch.
- A micro-batch costs rows x longest row (padding is computed like tokens), never more than the budget; a single row
  above the budget is refused, never cut.
- Both change how much time and memory a step takes, never its gradient: weights are fixed per trajectory before them.
"""

from __future__ import annotations

from collections.abc import Sequence


class RowOverBudget(ValueError):
    """A row is longer than the token budget of a micro-batch."""


def pack(lengths: Sequence[int], *, token_budget: int) -> list[tuple[int, ...]]:
    """Return the indices of `lengths` (tokens per row) in micro-batches of at most `token_budget` padded tokens.

    First fit by decreasing length: the first row of a micro-batch is its longest. Rows of equal length keep their
    order. Raises RowOverBudget when one row alone exceeds the budget.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    if order and lengths[order[0]] > token_budget:
        raise RowOverBudget(
            f"a row of {lengths[order[0]]} tokens does not fit in a micro-batch of {token_budget}: raise "
            "learner.token_budget or lower the token limit of a rollout"
        )
    bins: list[list[int]] = []
    for index in order:
        fitting = (rows for rows in bins if (len(rows) + 1) * lengths[rows[0]] <= token_budget)
        rows = next(fitting, None)
        if rows is None:
            bins.append([index])
        else:
            rows.append(index)
    return [tuple(rows) for rows in bins]


def distribute(lengths: Sequence[int], *, ranks: int) -> list[tuple[int, ...]]:
    """Return the indices of `lengths` (tokens per row) for each rank, in their order. The numbers of tokens of two
    ranks differ by at most the longest row. With fewer rows than ranks, some ranks get none.

    The longest row goes first, each to the rank with the fewest tokens so far (R. L. Graham, 1969, LPT rule).
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        rank = tokens.index(min(tokens))
        shares[rank].append(index)
        tokens[rank] += lengths[index]
    return [tuple(sorted(share)) for share in shares]
