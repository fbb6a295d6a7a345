"""The critical path through overlapping intervals."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.buffer.primitives.critical_path import Segment, critical_path, overlaid


def of(*parts):
    return [Segment(*part) for part in parts]


def path(intervals, start=0.0, end=10.0):
    return [(each.part, each.start_s, each.end_s) for each in critical_path(intervals, start, end, idle="own")]


def test_intervals_in_a_row_are_the_path_and_gaps_are_idle():
    assert path(of(("a", 1, 3), ("b", 3, 6))) == [("own", 0, 1), ("a", 1, 3), ("b", 3, 6), ("own", 6, 10)]


def test_of_two_that_overlap_the_one_that_ends_last_holds_up_the_end():
    assert path(of(("a", 0, 6), ("b", 4, 10))) == [("a", 0, 4), ("b", 4, 10)]
    assert path(of(("long", 0, 10), ("short", 2, 4))) == [("long", 0, 10)]


def test_what_began_after_another_ended_followed_from_it_though_a_third_was_running():
    assert path(of(("background", 0, 9), ("tool", 1, 4), ("turn", 4, 10))) == [
        ("background", 0, 1),
        ("tool", 1, 4),
        ("turn", 4, 10),
    ]


def test_overlays_replace_the_path_in_their_time():
    base = critical_path(of(("tool.search", 2, 8)), 0, 10, idle="own")
    over = overlaid(base, of(("service.retriever", 3, 5), ("service.retriever", 7, 9)))
    assert [(each.part, each.start_s, each.end_s) for each in over] == [
        ("own", 0, 2),
        ("tool.search", 2, 3),
        ("service.retriever", 3, 5),
        ("tool.search", 5, 7),
        ("service.retriever", 7, 9),
        ("own", 9, 10),
    ]


TIMES = st.floats(-5, 15, allow_nan=False)
INTERVALS = st.lists(st.builds(Segment, st.sampled_from("abcd"), TIMES, TIMES), max_size=30)


@given(INTERVALS, st.floats(0, 10))
def test_the_path_covers_exactly_the_time_in_order(intervals, end):
    segments = critical_path(intervals, 0.0, end, idle="own")
    intervals = [each for each in intervals if each.end_s > each.start_s]
    assert abs(sum(each.seconds for each in segments) - end) < 1e-6
    places = [0.0]
    for each in segments:
        assert each.start_s == places[-1]
        assert each.end_s > each.start_s
        places.append(each.end_s)
    assert places[-1] == (end if segments else 0.0)
    for each in segments:
        if each.part == "own":
            assert not any(min(one.end_s, each.end_s) - max(one.start_s, each.start_s) > 1e-3 for one in intervals)
        else:
            assert any(one.part == each.part and one.start_s < each.end_s for one in intervals)
