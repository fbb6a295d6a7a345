"""The context policy head_tail keeps the published shares of whole turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.actors.agents.loop.contexts import HeadAndTail, head_share, kept_turns, marker
from headrace.actors.services.chat import ChatMessage

OPENING = [ChatMessage(role="system", content="s" * 10), ChatMessage(role="user", content="p" * 20)]


async def count(messages: list[ChatMessage]) -> int:
    """A character is a token, and so is a role."""
    return sum(len(message.content) + 1 for message in messages)


def turn(number: int, size: int) -> list[ChatMessage]:
    """A turn of `size` tokens."""
    text = f"{number}".ljust((size - 2) // 2, ".")
    return [ChatMessage(role="assistant", content=text), ChatMessage(role="user", content="o" * (size - 2 - len(text)))]


def policy(budget_tokens: int) -> HeadAndTail:
    return HeadAndTail(budget_tokens=budget_tokens, head_share=0.3, count=count)  # type: ignore[arg-type]


async def test_a_conversation_within_the_budget_is_unchanged() -> None:
    turns = [turn(number, 20) for number in range(3)]
    whole = [*OPENING, *turns[0], *turns[1], *turns[2]]
    assert await policy(32 + 60).shown(OPENING, turns) == whole


async def test_the_head_gets_three_tenths_and_the_tail_the_rest() -> None:
    turns = [turn(number, 20) for number in range(20)]
    fixed = 32 + len(marker(20).content) + 1
    # 0.3 x 200 = 60 tokens in front, 140 behind.
    shown = await policy(fixed + 200).shown(OPENING, turns)
    expected = [message for part in (turns[:3], turns[13:]) for one in part for message in one]
    assert shown == [*OPENING, *expected[:6], marker(10), *expected[6:]]
    assert await count(shown) <= fixed + 200


async def test_a_long_turn_ends_a_share() -> None:
    turns = [turn(0, 20), turn(1, 400), turn(2, 20), turn(3, 20)]
    fixed = 32 + len(marker(4).content) + 1
    assert await policy(fixed + 100).shown(OPENING, turns) == [*OPENING, *turns[0], marker(1), *turns[2], *turns[3]]


async def test_a_single_turn_is_shown_even_over_the_budget() -> None:
    assert await policy(40).shown(OPENING, [turn(0, 200)]) == [*OPENING, *turn(0, 200)]


async def test_an_opening_over_the_budget_leaves_the_marker_alone() -> None:
    turns = [turn(number, 20) for number in range(3)]
    assert await policy(10).shown(OPENING, turns) == [*OPENING, marker(3)]


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(-10, 500), st.floats(0, 1))
def test_kept_turns_fit_and_do_not_overlap(sizes: list[int], available: int, share: float) -> None:
    head, tail = kept_turns(sizes, available, share)
    assert head + tail <= len(sizes)
    assert sum(sizes[:head]) <= int(share * max(0, available))
    assert sum(sizes[:head]) + sum(sizes[len(sizes) - tail :]) <= max(0, available)


@pytest.mark.parametrize("context", ["", "tail", "head_tail", "head_tail(3)", "head_tail(0.3", "head_tail(-0.3)"])
def test_other_policies_are_refused(context: str) -> None:
    with pytest.raises(ValueError, match=r"write full or head_tail\(0\.3\)"):
        head_share(context)
