"""The ids of root spans, and the links to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.serve.observing import span_names as names
from headrace.serve.observing.tracing import attempt_context, start_rollout_span
from support.recorded_spans import RUN_ID, recorded_spans

if TYPE_CHECKING:
    import pytest


def test_the_context_of_an_attempt_is_that_of_its_root_span(monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded_spans(monkeypatch) as recorded:
        root = start_rollout_span(recorded.tracer, "r", 2)
        recorded.tracer.start_span("unrelated").end()
        root.end()
        expected, found = attempt_context(RUN_ID, "r", 2), root.get_span_context()
        assert (found.trace_id, found.span_id) == (expected.trace_id, expected.span_id)
        unrelated = recorded.one("unrelated").context
        assert unrelated is not None and unrelated.span_id != found.span_id


def test_attempts_and_runs_have_roots_of_their_own() -> None:
    contexts = [attempt_context(run, "r", attempt) for run in ("a", "b") for attempt in (1, 2)]
    assert len({each.trace_id for each in contexts}) == len({each.span_id for each in contexts}) == 4
    assert all(each.is_valid and each.trace_flags.sampled for each in contexts)
    assert names.ROLLOUT == "rollout"
