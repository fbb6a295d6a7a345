"""The alarm for families and sources of tasks that collapse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.actors.record.files.collapse import STEPS, Collapse, CollapseWatch, collapses
from headrace.actors.training.learner import parts_of
from headrace.buffer.trajectories.types import Batch, GroupId
from support.objective_cases import make_batch, make_row


def part(*, invalid: int = 0, flat: int = 0, rollouts: int = 16, groups: int = 2) -> dict[str, Any]:
    return {"rollouts": rollouts, "invalid": invalid, "groups": groups, "flat_groups": flat}


def watched(*parts: dict[str, Any]) -> CollapseWatch:
    watch = CollapseWatch()
    for step, each in enumerate(parts, 1):
        watch.see(step, {"write": each})
    return watch


def test_more_invalid_answers_than_half_over_three_steps_are_a_collapse() -> None:
    watch = watched(part(invalid=16), part(invalid=9), part(invalid=0))
    assert watch.lines() == ("write collapsed at step 3: 52% of the answers in its last 3 steps are invalid",)


@pytest.mark.parametrize("counts", [(8, 8, 8), (16, 16), (16, 8, 0)])
def test_half_of_the_answers_or_fewer_steps_are_none(counts: tuple[int, ...]) -> None:
    assert watched(*(part(invalid=count) for count in counts)).lines() == ()


def test_three_steps_of_groups_that_all_fail_are_a_collapse_and_one_other_group_ends_it() -> None:
    watch = watched(*(part(flat=2) for _ in range(STEPS)), part(flat=2), part(flat=1))
    assert watch.lines() == ()
    assert [(found.since, found.until) for found in watch.ended] == [(3, 5)]


def test_a_collapse_is_told_once_while_it_lasts_and_again_when_it_comes_back() -> None:
    watch, told = CollapseWatch(), []
    for step, flat in enumerate((2, 2, 2, 2, 0, 2, 2, 2), 1):
        told += [(found.name, found.since) for found in watch.see(step, {"write": part(flat=flat)})]
    assert told == [("write", 3), ("write", 8)]


def test_steps_without_the_family_do_not_count() -> None:
    watch = CollapseWatch()
    for step in range(1, 6):
        watch.see(step, {"write": part(flat=2)} if step % 2 else {"move": part()})
    assert [found.name for found in watch.lasting.values()] == ["write"]
    assert watch.lasting["write"].since == 5


def test_the_collapses_of_a_run_come_from_its_steps_by_family_and_source() -> None:
    steps = [
        {"step": step, "families": {"write": part(flat=2 if step < 5 else 0)}, "sources": {"shell": part(invalid=10)}}
        for step in range(1, 7)
    ]
    told = [(found.name, found.since, found.until) for found in collapses(steps)]
    assert told == [("shell", 3, None), ("write", 3, 5)]


@pytest.mark.parametrize("damaged", [{"families": 3}, {"families": {"write": {"rollouts": "x"}}}, {"step": None}, {}])
def test_a_damaged_record_is_left_out(damaged: dict[str, Any]) -> None:
    steps: list[dict[str, Any]] = [{"step": step, "families": {"write": part(flat=2)}} for step in (1, 2)]
    assert collapses([*steps, {"step": 3, **damaged}]) == ()
    assert collapses([*steps, {"step": 3, **damaged}, {"step": 4, "families": {"write": part(flat=2)}}]) == (
        Collapse(name="write", since=4, reason="all groups of its last 3 steps have equal rewards of at most 0"),
    )


def batch_of(*members: tuple[str, str, float, bool]) -> Batch:
    """A batch of rollouts, given as family, group, reward and whether the answer was invalid."""
    batch = make_batch([(0.0, [make_row((1, 2), (False, True))]) for _ in members])
    items = tuple(
        replace(item, family=family, group_id=GroupId(group), reward=reward, invalid=invalid)
        for item, (family, group, reward, invalid) in zip(batch.items, members, strict=True)
    )
    return replace(batch, items=items)


def test_the_parts_of_a_batch_count_invalid_answers_and_groups_of_equal_failures() -> None:
    batch = batch_of(
        ("write", "a", 0.0, True),
        ("write", "a", 0.0, False),
        ("write", "b", 1.0, False),
        ("write", "b", 1.0, False),
        ("move", "c", -1.0, True),
        ("move", "c", -1.0, True),
        ("move", "d", -1.0, False),
        ("move", "d", 0.0, False),
        ("", "e", 0.0, True),
    )
    parts = parts_of(batch, lambda item: item.family)
    counts = {name: (each.rollouts, each.invalid, each.groups, each.flat_groups) for name, each in parts.items()}
    assert counts == {"move": (4, 2, 2, 1), "write": (4, 1, 2, 1)}
