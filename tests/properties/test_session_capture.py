"""Whatever an engine samples and an agent appends, a row is prompt, output, bridge, output, token for token."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.buffer.versions import PolicyVersion
from headrace.policies.engine import Completion, FinishReason, TokenSpan
from headrace.policies.tiny import write_description
from headrace.policies.tokenizer import ChatTokenizer
from headrace.serve import codec
from headrace.serve.conversation import Message, Role, TurnRequest
from headrace.serve.session import Budgets, Sampling, Session, SessionId, SessionSpec, TurnPlan

if TYPE_CHECKING:
    from pathlib import Path

ROOM = Budgets(max_turns=1000, max_tokens_per_turn=10_000, max_context_tokens=1_000_000, wall_s=1e9)
TEXT = st.text(max_size=30)
AGENT_MESSAGES = st.lists(
    st.builds(Message, role=st.sampled_from([Role.USER, Role.TOOL, Role.SYSTEM]), content=TEXT), min_size=1, max_size=3
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_description(folder)
    return ChatTokenizer(folder)


@st.composite
def completions(draw: st.DrawFn, vocab_size: int, stop_id: int) -> tuple[tuple[int, ...], bool, int]:
    """Sampled ids, whether they end with the stop id, and where the version changes."""
    ids = tuple(draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=12)))
    closed = draw(st.booleans())
    return (*ids, stop_id) if closed else ids, closed, draw(st.integers(0, len(ids)))


def completion_of(tokenizer: ChatTokenizer, drawn: tuple[tuple[int, ...], bool, int], number: int) -> Completion:
    ids, closed, split = drawn
    spans = (
        TokenSpan(start=0, end=split, version=PolicyVersion(1, number)),
        TokenSpan(start=split, end=len(ids), version=PolicyVersion(1, number + 1)),
    )
    return Completion(
        output_ids=ids,
        logprobs=tuple(-0.5 - 0.25 * (number % 4) - index for index in range(len(ids))),
        spans=tuple(span for span in spans if span.end > span.start),
        finish=FinishReason.STOP if closed else FinishReason.LENGTH,
        text=tokenizer.decode(ids),
        prompt_tokens=0,
        cached_tokens=0,
        retractions=0,
    )


def session(sampling: Sampling | None = None) -> Session:
    return Session(
        SessionSpec(session_id=SessionId("rollout-1"), budgets=ROOM, sampling=sampling or Sampling()), opened_at=0.0
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_prompt_of_a_turn_begins_with_prompt_and_output_of_the_one_before(
    tokenizer: ChatTokenizer, data: st.DataObject
) -> None:
    core, messages = session(), tuple[Message, ...]()
    turns: list[tuple[TurnPlan, Completion]] = []
    for number in range(data.draw(st.integers(1, 5))):
        messages += tuple(data.draw(AGENT_MESSAGES))
        plan = core.plan(TurnRequest(messages=messages), tokenizer)
        drawn = data.draw(completions(tokenizer.vocab_size, tokenizer.stop_ids[0]))
        completion = completion_of(tokenizer, drawn, number)
        answer = core.record(plan, completion)
        turns.append((plan, completion))
        messages += (Message(role=Role.ASSISTANT, content=answer.text),)

    for (before, completion), (after, _) in pairwise(turns):
        expected = before.prompt_ids + completion.output_ids
        assert after.prompt_ids[: len(expected)] == expected

    report = core.report()
    assert report.trajectory is not None
    [row] = report.trajectory.rows
    last_plan, last = turns[-1]
    assert tuple(row.tokens_T) == last_plan.prompt_ids + last.output_ids
    sampled = [token for _, completion in turns for token in completion.output_ids]
    assert row.tokens_T[row.loss_mask_T].tolist() == sampled
    logprobs = np.array([value for _, completion in turns for value in completion.logprobs], dtype=np.float32)
    assert np.array_equal(row.logprobs_T[row.loss_mask_T], logprobs)
    assert not row.logprobs_T[~row.loss_mask_T].any()
    covered = np.zeros(len(row.tokens_T), dtype=bool)
    for span in row.versions:
        covered[span.start : span.end] = True
    assert np.array_equal(covered, row.loss_mask_T)
    assert (report.turns, report.rerendered) == (len(turns), 0)
    assert report.sampled_tokens == report.trained_tokens == len(sampled)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_edited_history_opens_a_new_row_and_no_sampled_token_is_lost(
    tokenizer: ChatTokenizer, data: st.DataObject
) -> None:
    core, messages, sampled, rows = session(), tuple[Message, ...](), 0, 0
    for number in range(data.draw(st.integers(2, 5))):
        edited = number > 0 and data.draw(st.booleans())
        if edited:
            messages = (Message(role=Role.USER, content=f"{messages[0].content}, edited {number}"), *messages[1:])
        messages += tuple(data.draw(AGENT_MESSAGES))
        plan = core.plan(TurnRequest(messages=messages), tokenizer)
        rows += not plan.extends
        assert plan.extends == (number > 0 and not edited)
        drawn = data.draw(completions(tokenizer.vocab_size, tokenizer.stop_ids[0]))
        answer = core.record(plan, completion_of(tokenizer, drawn, number))
        sampled += len(drawn[0])
        messages += (Message(role=Role.ASSISTANT, content=answer.text),)
    report = core.report()
    assert report.trajectory is not None
    assert len(report.trajectory.rows) == rows == report.rerendered + 1
    assert sum(int(row.loss_mask_T.sum()) for row in report.trajectory.rows) == sampled == report.trained_tokens


@settings(max_examples=30, deadline=None)
@given(data=st.data(), temperature=st.sampled_from([0.0, 0.7, 1.0]), cut=st.integers(0, 50))
def test_the_report_survives_the_wire_and_its_counts_add_up(
    tokenizer: ChatTokenizer, data: st.DataObject, temperature: float, cut: int
) -> None:
    core = session(Sampling(temperature=temperature))
    plan = core.plan(TurnRequest(messages=(Message(role=Role.USER, content="x"),)), tokenizer)
    drawn = data.draw(completions(tokenizer.vocab_size, tokenizer.stop_ids[0]))
    core.record(plan, completion_of(tokenizer, drawn, 3))
    core.cut(cut)
    sent = core.report()
    got = codec.ReportForm.model_validate(codec.write_report(sent)).to_report()
    assert got.sampled_tokens == got.trained_tokens + sum(got.masked.values()) == len(drawn[0]) + cut
    assert got.masked.get("sampling", 0) == (len(drawn[0]) if temperature == 0 else 0)
    assert sent.trajectory is not None
    assert got.trajectory is not None
    for mine, theirs in zip(sent.trajectory.rows, got.trajectory.rows, strict=True):
        assert np.array_equal(mine.tokens_T, theirs.tokens_T)
        assert theirs.tokens_T.dtype == np.int32
        assert np.array_equal(mine.loss_mask_T, theirs.loss_mask_T)
        assert np.array_equal(mine.logprobs_T, theirs.logprobs_T)
        assert mine.versions == theirs.versions
