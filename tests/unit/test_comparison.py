"""Comparing what a check computed, as JSON and nothing else."""

from __future__ import annotations

import pytest

from headrace.actors.evaluation.graders.comparison import last_answer, same_json


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([1, {"a": None}], [1, {"a": None}], True),
        (1, True, False),
        (1, 1.0, False),
        (0, None, False),
        ([1], [1, 2], False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": [1]}, {"a": [2]}, False),
        ("1", 1, False),
        (float("nan"), float("nan"), False),
    ],
)
def test_equality_needs_the_same_types_and_values(one: object, other: object, same: bool) -> None:
    assert same_json(one, other) is same


@pytest.mark.parametrize(
    ("stdout", "answer"),
    [
        (b'noise\n{"result": 1}', {"result": 1}),
        (b'{"result": 1}\n{"error": "X"}', {"error": "X"}),
        (b"", None),
        (b"[1]", None),
        (b"{", None),
        (b"\xff", None),
        (b"[" * 100_000, None),
        (b'{"result": ' + b"9" * 10_000 + b"}", None),
    ],
)
def test_only_an_object_on_the_last_line_counts_as_an_answer(stdout: bytes, answer: object) -> None:
    assert last_answer(stdout) == answer
