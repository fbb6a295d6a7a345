"""Budgets, sampling and failures of a session, without a clock or an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from headrace.buffer.versions import PolicyVersion
from headrace.policies.engine import Completion, FinishReason, TokenSpan
from headrace.policies.tiny import write_description
from headrace.policies.tokenizer import ChatTokenizer
from headrace.serve import codec
from headrace.serve.conversation import Message, Role, TurnEnd, TurnRequest
from headrace.serve.errors import BadRequest, ContextExceeded
from headrace.serve.session import Budgets, Exhausted, Sampling, Session, SessionId, SessionSpec

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_description(folder)
    return ChatTokenizer(folder)


class _NeverAsked:
    """A renderer that fails a test by being asked."""

    vocab_size, stop_ids = 1, (0,)

    def render(self, messages: object) -> tuple[int, ...]:
        raise AssertionError(messages)

    def bridge(self, last_id: int, messages: object) -> tuple[int, ...]:
        raise AssertionError(messages)


NEVER_ASKED = _NeverAsked()


def session(*, opened_at: float = 0.0, **budgets: float) -> Session:
    form = codec.SpecForm.model_validate({"session_id": "r-1", "budgets": budgets})
    return Session(form.to_spec(), opened_at)


def ask(text: str, max_tokens: int | None = None) -> TurnRequest:
    return TurnRequest(messages=(Message(role=Role.USER, content=text),), max_tokens=max_tokens)


def completion(ids: tuple[int, ...], finish: FinishReason = FinishReason.STOP) -> Completion:
    return Completion(
        output_ids=ids,
        logprobs=(-1.0,) * len(ids),
        spans=(TokenSpan(start=0, end=len(ids), version=PolicyVersion(1, 2)),),
        finish=finish,
        text="x",
        prompt_tokens=3,
        cached_tokens=1,
        retractions=0,
    )


def test_turns_are_counted_and_end_the_agent(tokenizer: ChatTokenizer) -> None:
    core = session(max_turns=1)
    assert core.spent(0.0) is Exhausted.NONE
    core.record(core.plan(ask("a"), tokenizer), completion((65,)))
    assert core.spent(0.0) is Exhausted.TURNS
    assert core.report().exhausted is Exhausted.TURNS


def test_wall_time_counts_from_the_opening(tokenizer: ChatTokenizer) -> None:
    core = session(opened_at=100.0, wall_s=10.0)
    assert core.spent(109.9) is Exhausted.NONE
    assert core.wall_left_s(104.0) == 6.0
    assert core.spent(110.0) is Exhausted.WALL


def test_new_tokens_are_the_least_of_wish_budget_and_context(tokenizer: ChatTokenizer) -> None:
    prompt = len(tokenizer.render(ask("a").messages))
    core = session(max_tokens_per_turn=20, max_context_tokens=prompt + 30)
    assert core.plan(ask("a"), tokenizer).max_new_tokens == 20
    assert core.plan(ask("a", max_tokens=4), tokenizer).max_new_tokens == 4
    assert core.plan(ask("a", max_tokens=64_000), tokenizer).max_new_tokens == 20
    tight = session(max_tokens_per_turn=20, max_context_tokens=prompt + 3)
    assert tight.plan(ask("a"), tokenizer).max_new_tokens == 3


def test_a_prompt_without_room_is_the_wires_own_context_error(tokenizer: ChatTokenizer) -> None:
    prompt = len(tokenizer.render(ask("a").messages))
    core = session(max_context_tokens=prompt)
    with pytest.raises(ContextExceeded, match=f"maximum context length is {prompt} tokens"):
        core.plan(ask("a"), tokenizer)
    assert core.report().exhausted is Exhausted.CONTEXT
    assert core.report().trajectory is None


@pytest.mark.parametrize("messages", [["x" * 20 * 257], ["x"] * 21])
def test_what_cannot_fit_is_refused_before_it_is_rendered(messages: list[str]) -> None:
    core = session(max_context_tokens=20)
    request = TurnRequest(messages=tuple(Message(role=Role.USER, content=text) for text in messages))
    with pytest.raises(ContextExceeded, match="maximum context length is 20 tokens"):
        core.plan(request, NEVER_ASKED)
    assert core.report().exhausted is Exhausted.CONTEXT


def test_a_turn_cut_by_length_is_trained_and_closed_by_the_bridge(tokenizer: ChatTokenizer) -> None:
    core = session()
    plan = core.plan(ask("a"), tokenizer)
    answer = core.record(plan, completion((65, 66), FinishReason.LENGTH))
    assert answer.end is TurnEnd.LENGTH
    said = (Message(role=Role.ASSISTANT, content=answer.text), Message(role=Role.USER, content="b"))
    following = core.plan(TurnRequest(messages=plan.request.messages + said), tokenizer)
    bridge = following.prompt_ids[len(plan.prompt_ids) + 2 :]
    assert bridge[0] == tokenizer.stop_ids[0]
    core.record(following, completion((67, tokenizer.stop_ids[0])))
    report = core.report()
    assert report.trajectory is not None
    row = report.trajectory.rows[0]
    assert not row.loss_mask_T[row.tokens_T == tokenizer.stop_ids[0]][0], "the closing id was not sampled"
    assert row.loss_mask_T[-1]


@pytest.mark.parametrize(
    ("sampling", "exact"),
    [
        (Sampling(temperature=0.7), True),
        (Sampling(temperature=0.0), False),
        (Sampling(top_p=0.9), False),
        (Sampling(top_k=5), False),
    ],
)
def test_only_exact_logprobs_are_trained(tokenizer: ChatTokenizer, sampling: Sampling, exact: bool) -> None:
    core = Session(SessionSpec(session_id=SessionId("r-1"), sampling=sampling, budgets=Budgets()), 0.0)
    core.record(core.plan(ask("a"), tokenizer), completion((65, 66)))
    report = core.report()
    assert report.trajectory is not None
    assert report.trajectory.temperature == sampling.temperature
    assert report.trained_tokens == int(report.trajectory.rows[0].loss_mask_T.sum()) == (2 if exact else 0)
    assert report.masked == ({} if exact else {"sampling": 2})


@pytest.mark.parametrize(
    ("spec", "where"),
    [
        ({"session_id": ""}, "session_id"),
        ({"session_id": "a\nb"}, "session_id"),
        ({"session_id": "a", "sampling": {"temperature": -1}}, "temperature"),
        ({"session_id": "a", "budgets": {"max_turns": 0}}, "max_turns"),
        ({"session_id": "a", "budget": {}}, "budget"),
    ],
)
def test_wrong_specs_are_refused_by_key(spec: dict[str, object], where: str) -> None:
    import orjson

    with pytest.raises(BadRequest, match=where):
        codec.read_form(codec.OpenForm, orjson.dumps({"sessions": [spec]}))
