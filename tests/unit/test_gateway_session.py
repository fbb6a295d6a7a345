"""Core of a session: budgets, sampling, and the token trie for every change that agents make to their history."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import orjson
import pytest

from headrace.policies.engine import FinishReason
from headrace.policies.tokens.chat_template import Ending
from headrace.serve.gateway.capture.events import Exhausted, Replayed, Status
from headrace.serve.gateway.capture.rows import Masked, SessionReport, report_of, tree_of
from headrace.serve.gateway.capture.session import Budgets, Sampling, Session, SessionId, SessionSpec
from headrace.serve.gateway.conversation import (
    Message,
    Reasoning,
    RequestPurpose,
    Role,
    Text,
    ToolCall,
    ToolSpec,
    TurnAnswer,
    TurnEnd,
    TurnRequest,
    say,
)
from headrace.serve.gateway.errors import BadRequest, ContextExceeded
from headrace.serve.gateway.http import codec
from headrace.serve.gateway.rendering.render import TokenIds
from support.session_rig import END, ByteChat, Rig, asks, call, echo, results, statuses, user

TOOLS = (ToolSpec("bash"), ToolSpec("edit"))
SYSTEM = say(Role.SYSTEM, "You repair things.")


def session(*, opened_at: float = 0.0, **budgets: Any) -> Session:
    spec = codec.read_spec(orjson.dumps({"budgets": budgets}), SessionId("r-1"))
    return Session(spec, opened_at)


def rig(**spec: Any) -> Rig:
    return Rig(Session(SessionSpec(session_id=SessionId("r-1"), **spec), 0.0))


def check(report: SessionReport) -> SessionReport:
    """Check the invariants of every report."""
    rows = report.trajectory.rows if report.trajectory else ()
    assert report.sampled_tokens == report.trained_tokens + sum(report.masked.values())
    assert report.trained_tokens == sum(int(row.loss_mask_T.sum()) for row in rows)
    assert set(report.masked) <= {reason.value for reason in Masked}
    assert len(report.lineages) == len(rows)
    return report


def trained(report: SessionReport) -> list[str]:
    """Return the trained text of each row."""
    rows = report.trajectory.rows if report.trajectory else ()
    return [bytes(int(item) for item in row.tokens_T[row.loss_mask_T] if item < 256).decode() for row in rows]


# Budgets and sampling.


def test_the_turn_budget_ends_the_agent() -> None:
    played = Rig(session(max_turns=1))
    assert played.core.spent(0.0) is Exhausted.NONE
    assert played.core.spent(0.0, running=1) is Exhausted.TURNS, "a turn in flight counts"
    played.turn(asks(user("a")), "x")
    assert played.core.spent(0.0) is Exhausted.TURNS


def test_the_token_budget_ends_the_agent_and_limits_its_last_turn() -> None:
    played = Rig(session(max_sampled_tokens=5))
    played.turn(asks(user("a")), "xy")
    assert played.plan(asks(user("b"))).max_new_tokens == 2
    played.turn(asks(user("b")), "z")
    assert played.core.spent(0.0) is Exhausted.TOKENS


def test_wall_time_counts_from_the_opening_of_the_session() -> None:
    core = session(opened_at=100.0, wall_s=10.0)
    assert core.spent(109.9) is Exhausted.NONE
    assert core.wall_left_s(104.0) == 6.0
    assert core.spent(110.0) is Exhausted.WALL


def test_an_exhausted_budget_gives_the_final_text_or_a_truncated_answer() -> None:
    said = session(final_text="Enough.").final_answer()
    assert (said.text, said.end) == ("Enough.", TurnEnd.STOP)
    assert (session(final_text="").final_answer().blocks, session(final_text="").final_answer().end) == (
        (),
        TurnEnd.LENGTH,
    )


def test_max_new_tokens_is_the_minimum_of_request_budget_and_context() -> None:
    prompt = len(ByteChat().render([user("a")], ()))
    played = Rig(session(max_tokens_per_turn=20, max_context_tokens=prompt + 30))
    assert played.plan(asks(user("a"))).max_new_tokens == 20
    assert played.plan(asks(user("a"), max_tokens=4)).max_new_tokens == 4
    assert played.plan(asks(user("a"), max_tokens=64_000)).max_new_tokens == 20
    tight = Rig(session(max_tokens_per_turn=20, max_context_tokens=prompt + 3)).plan(asks(user("a")))
    assert (tight.max_new_tokens, tight.truncates) == (3, True)


def test_a_prompt_that_exceeds_the_context_is_refused_with_its_length() -> None:
    prompt = len(ByteChat().render([user("a")], ()))
    with pytest.raises(ContextExceeded, match=f"maximum context length is {prompt} tokens") as refused:
        Rig(session(max_context_tokens=prompt)).plan(asks(user("a")))
    assert (refused.value.tokens, refused.value.limit) == (prompt, prompt)


@pytest.mark.parametrize("messages", [["x" * 20 * 257], ["x"] * 21])
def test_messages_that_cannot_fit_are_refused_before_rendering(messages: list[str]) -> None:
    request = TurnRequest(messages=tuple(user(text) for text in messages))
    with pytest.raises(ContextExceeded, match="maximum context length is 20 tokens"):
        session(max_context_tokens=20).match(request)


def calling(arguments: str) -> Message:
    return Message(Role.ASSISTANT, (ToolCall("a", "bash", arguments),))


@pytest.mark.parametrize(
    "request_",
    [
        TurnRequest(messages=(user("go"), calling("[1]" * 20 * 257), user("on"))),
        TurnRequest(messages=(user("go"),), tools=(ToolSpec("bash", "x" * 20 * 257),)),
        TurnRequest(messages=(user("go"),), tools=(ToolSpec("bash", parameters={"type": "x" * 20 * 257}),)),
    ],
    ids=["arguments", "description", "schema"],
)
def test_arguments_and_tools_count_towards_the_size_limit(request_: TurnRequest) -> None:
    with pytest.raises(ContextExceeded, match="maximum context length is 20 tokens"):
        session(max_context_tokens=20).match(request_)


class NeverRenders(ByteChat):
    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], ending: Ending = Ending.TURN) -> TokenIds:
        raise AssertionError("rendered")


@pytest.mark.parametrize("message", [user("x" * 1000), calling(json.dumps([[[0]]] * 100))], ids=["text", "arguments"])
def test_messages_with_far_too_many_tokens_are_refused_before_rendering(message: Message) -> None:
    core = session(max_context_tokens=50)
    request = TurnRequest(messages=(user("go"), message))
    match = core.match(request)
    with pytest.raises(ContextExceeded, match="maximum context length is 50 tokens"):
        core.delta(match, request, NeverRenders())


def test_messages_that_may_shrink_into_the_context_are_rendered() -> None:
    core = session(max_context_tokens=50)
    request = TurnRequest(messages=(user("x" * 399),))
    with pytest.raises(AssertionError, match="rendered"):
        core.delta(core.match(request), request, NeverRenders())


@pytest.mark.parametrize(
    ("sampling", "exact"),
    [
        (Sampling(temperature=0.7), True),
        (Sampling(temperature=0.0), False),
        (Sampling(top_p=0.9), False),
        (Sampling(top_k=5), False),
    ],
)
def test_only_exact_logprobs_are_trained(sampling: Sampling, exact: bool) -> None:
    played = rig(sampling=sampling)
    played.turn(asks(user("a")), "xy")
    report = check(report_of(played.core))
    assert report.trajectory is not None
    assert report.trajectory.temperature == sampling.temperature
    assert report.masked == ({} if exact else {"sampling": 3})
    assert report.trajectory.rows[0].versions, "also what is not trained says who sampled it"


def test_a_turn_cut_by_the_context_is_flagged_and_masked_if_configured() -> None:
    prompt = len(ByteChat().render([user("a")], ()))
    for train, masked in ((True, {}), (False, {"truncated": 2})):
        played = rig(budgets=Budgets(max_context_tokens=prompt + 2), train_truncated=train)
        played.turn(asks(user("a")), "xy", finish=FinishReason.LENGTH)
        report = check(report_of(played.core))
        assert (report.masked, report.lineages[0].truncated) == (masked, True)


# What a faithful agent does.


def test_each_prompt_begins_with_the_previous_turns_prompt_and_output() -> None:
    played = rig()
    messages = [SYSTEM, user("go")]
    for number in range(4):
        answer = played.turn(asks(*messages, tools=TOOLS), f"THINK so {number}\n" + call("bash", command=str(number)))
        messages += [echo(answer), results((answer.blocks[-1].id, f"out {number}"))]  # type: ignore[union-attr]
    for (prompt, output), (following, _) in pairwise(zip(played.prompts, played.outputs, strict=True)):
        assert following[: len(prompt) + len(output)] == prompt + output
    report = check(report_of(played.core))
    assert report.trajectory is not None
    [row] = report.trajectory.rows
    assert row.tokens_T.tolist() == played.prompts[-1] + played.outputs[-1]
    assert row.tokens_T[row.loss_mask_T].tolist() == [token for output in played.outputs for token in output]
    assert (report.turns, report.rerendered, report.masked, report.drift) == (4, 0, {}, {})
    assert statuses(played.core) == [Status.ACCEPTED] * 3 + [Status.DELIVERED]


def test_a_turn_cut_by_length_is_trained_and_closed_by_the_bridge() -> None:
    played = rig()
    answer = played.turn(asks(user("a")), "xy", finish=FinishReason.LENGTH)
    assert answer.end is TurnEnd.LENGTH
    played.turn(asks(user("a"), echo(answer), user("b")), "z")
    bridge = played.prompts[1][len(played.prompts[0]) + 2 :]
    assert bridge[0] == END
    report = check(report_of(played.core))
    assert report.trajectory is not None
    row = report.trajectory.rows[0]
    assert not row.loss_mask_T[len(played.prompts[0]) + 2], "the closing id was not sampled"
    assert row.loss_mask_T[-1]


def test_a_stop_string_is_trimmed_from_the_text_but_remains_in_the_ids() -> None:
    played = rig()
    answer = played.turn(asks(user("a"), stop=("###", "YY")), [*b"ab###"])
    assert (answer.text, answer.end, answer.stop_string) == ("ab", TurnEnd.STOP_STRING, "###")
    assert trained(check(report_of(played.core))) == ["ab###"]


# Echoes that are not what was served.


def dropped_reasoning(answer: TurnAnswer) -> Message:
    return Message(Role.ASSISTANT, tuple(block for block in answer.blocks if not isinstance(block, Reasoning)))


def respelled(answer: TurnAnswer) -> Message:
    return with_arguments(answer, '{"n":1,"command":"ls -l"}')


def with_arguments(answer: TurnAnswer, arguments: str, *, own_ids: bool = False) -> Message:
    blocks = [
        ToolCall(f"own{index}" if own_ids else block.id, block.name, arguments)
        if isinstance(block, ToolCall)
        else block
        for index, block in enumerate(answer.blocks)
    ]
    return Message(Role.ASSISTANT, tuple(blocks))


def moved_text(answer: TurnAnswer) -> Message:
    return Message(Role.ASSISTANT, tuple(sorted(answer.blocks, key=lambda block: isinstance(block, ToolCall))))


def dropped_text(answer: TurnAnswer) -> Message:
    return Message(Role.ASSISTANT, tuple(block for block in answer.blocks if not isinstance(block, Text)))


def other_ids(answer: TurnAnswer) -> Message:
    return with_arguments(answer, '{"command": "ls -l", "n": 1.0}', own_ids=True)


def defaulted(answer: TurnAnswer) -> Message:
    return with_arguments(answer, '{"command": "ls -l", "n": "1", "replace_all": false}')


def shortened(answer: TurnAnswer) -> Message:
    return with_arguments(answer, '{"command": "ls"}')


def renamed(answer: TurnAnswer) -> Message:
    return Message(Role.ASSISTANT, tuple(ToolCall(one.id, "read", one.arguments) for one in answer.calls))


CLAUDE_CODE = "claude-cli/2.1.281 (external, cli)"


def play_echo(mutate: Any, client: str, *, keeps_order: bool = True) -> SessionReport:
    """Play a turn and one that continues it after its echo was changed; check that the second prompt goes on from the
    sampled ids if there is one row, and has the words that the agent sent if there are two."""
    played = rig()
    output = "THINK hm\n" + call("bash", command="ls -l", n=1) + "after\n"
    answer = played.turn(asks(user("a"), tools=TOOLS), output)
    echoed = mutate(answer)
    shown = results((echoed.calls[0].id, "out"))
    asked = asks(user("a"), echoed, shown, tools=TOOLS, client=client, keeps_order=keeps_order)
    played.turn(asked, "done")
    first = played.prompts[0] + played.outputs[0]
    report = check(report_of(played.core))
    assert report.masked == {}
    assert (played.prompts[1][: len(first)] == first) == (len(report.lineages) == 1)
    if len(report.lineages) == 2:
        said = bytes(item for item in played.prompts[1] if item < 256).decode()
        [called] = echoed.calls
        assert said.count("CALL") == said.count(f"CALL {called.name} {called.arguments}") == 1
    return report


@pytest.mark.parametrize(
    ("mutate", "drift"),
    [(dropped_reasoning, {}), (respelled, {"spelling": 1}), (other_ids, {"calls": 1})],
)
def test_an_echo_with_equal_values_matches_its_turn_from_any_program(mutate: Any, drift: dict[str, int]) -> None:
    report = play_echo(mutate, "a program in no table")
    assert (len(report.lineages), report.drift) == (1, drift)


@pytest.mark.parametrize(("mutate", "drift"), [(defaulted, {"arguments": 1}), (moved_text, {"order": 1})])
def test_a_known_change_is_an_echo_from_its_program_and_an_edit_from_any_other(mutate: Any, drift: Any) -> None:
    assert play_echo(mutate, CLAUDE_CODE).drift == drift
    report = play_echo(mutate, "a program in no table")
    assert (len(report.lineages), report.drift) == (2, {"edited": 1})


def test_text_before_calls_is_an_echo_where_the_api_has_no_other_order() -> None:
    report = play_echo(moved_text, "a program in no table", keeps_order=False)
    assert (len(report.lineages), report.drift) == (1, {"order": 1})


@pytest.mark.parametrize("client", ["", CLAUDE_CODE])
@pytest.mark.parametrize("mutate", [shortened, renamed, dropped_text])
def test_an_edit_under_a_kept_id_is_shown_as_it_is(mutate: Any, client: str) -> None:
    report = play_echo(mutate, client)
    assert (len(report.lineages), report.drift) == (2, {"edited": 1})


def test_trimmed_text_is_an_edit() -> None:
    played = rig()
    played.turn(asks(user("a")), "  one\n two ")
    played.turn(asks(user("a"), say(Role.ASSISTANT, "one two"), user("b")), "c")
    report = check(report_of(played.core))
    assert (len(report.lineages), report.drift, report.masked) == (2, {"edited": 1}, {})


def test_of_two_turns_with_equal_words_the_one_with_the_same_reasoning_is_continued() -> None:
    played = rig()
    twins = [played.turn(asks(user("a")), f"THINK {why}\nYes.\n") for why in ("one", "two")]
    for answer in twins:
        reasoning = Reasoning(answer.blocks[0].text)  # type: ignore[union-attr]
        echoed = Message(Role.ASSISTANT, (reasoning, *answer.blocks[1:]))
        played.turn(asks(user("a"), echoed, user("b")), "on")
    for prompt, output, after in zip(played.prompts[:2], played.outputs[:2], played.prompts[2:], strict=True):
        assert after[: len(prompt) + len(output)] == prompt + output


def test_a_dropped_result_is_not_shown() -> None:
    played = rig()
    first = played.turn(asks(user("a"), tools=TOOLS), call("bash", command="1") + call("bash", command="2"))
    one, two = (block.id for block in first.blocks if isinstance(block, ToolCall))
    shown = (user("a"), echo(first))
    second = played.turn(asks(*shown, results((one, "x"), (two, "dropped")), tools=TOOLS), "done")
    played.turn(asks(*shown, results((one, "x")), echo(second), user("on"), tools=TOOLS), "on")
    assert bytes(item for item in played.prompts[1] if item < 256).count(b"dropped") == 1
    assert bytes(item for item in played.prompts[2] if item < 256).count(b"dropped") == 0
    report = check(report_of(played.core))
    assert (len(report.lineages), report.masked) == (2, {})


def test_parallel_results_match_when_reordered_or_duplicated() -> None:
    played = rig()
    first = played.turn(asks(user("a"), tools=TOOLS), call("bash", command="1") + call("bash", command="2"))
    one, two = (block.id for block in first.blocks if isinstance(block, ToolCall))
    shown = (user("a"), echo(first))
    second = played.turn(asks(*shown, results((two, "y"), (one, "x")), tools=TOOLS), call("bash", command="3"))
    third = second.blocks[0].id  # type: ignore[union-attr]
    history = [
        results((one, "x"), (two, "y")),
        results((one, "x"), (two, "y"), (one, "x")),
    ]
    for number, shape in enumerate(history):
        request = asks(*shown, shape, echo(second), results((third, f"z{number}")), tools=TOOLS)
        known = played.prompts[1] + played.outputs[1]
        assert list(played.plan(request).prompt_ids[: len(known)]) == known
    assert played.prompts[1].index(ord("x")) < played.prompts[1].index(ord("y")), "in the order of the calls"


def test_parallel_calls_echoed_one_by_one_are_matched_as_one_turn() -> None:
    played = rig()
    first = played.turn(asks(user("a"), tools=TOOLS), call("bash", command="1") + call("bash", command="2"))
    one, two = first.blocks
    assert isinstance(one, ToolCall)
    assert isinstance(two, ToolCall)
    request = asks(
        user("a"),
        Message(Role.ASSISTANT, (one,)),
        results((one.id, "x")),
        Message(Role.ASSISTANT, (two,)),
        results((two.id, "y")),
        tools=TOOLS,
    )
    played.turn(request, "done")
    assert len(check(report_of(played.core)).lineages) == 1
    assert bytes(item for item in played.prompts[1] if item < 256).count(b"CALL") == 2, "neither call stands twice"


def test_a_missing_message_makes_a_different_history() -> None:
    played = rig()
    first = played.turn(asks(user("a"), user("b"), user("c")), "x")
    request = asks(user("a"), user("c"), echo(first), user("on"))
    assert played.core.match(request).parent is None


def test_an_empty_echo_does_not_match_an_aborted_turn() -> None:
    played = rig()
    played.cut(asks(user("a")), [*b"xy"])
    request = asks(user("a"), Message(Role.ASSISTANT, ()), user("on"))
    assert played.core.match(request).parent is None


# Branches.


def test_edited_history_is_a_new_row_and_each_token_is_trained_once() -> None:
    played = rig()
    first = played.turn(asks(user("a"), tools=TOOLS), call("bash", command="1"))
    shown = (user("a"), echo(first))
    second = played.turn(asks(*shown, results((first.blocks[0].id, "long output")), tools=TOOLS), "then")  # type: ignore[union-attr]
    pruned = results((first.blocks[0].id, "[pruned]"))  # type: ignore[union-attr]
    played.turn(asks(*shown, pruned, echo(second), user("on"), tools=TOOLS), "more")
    report = check(report_of(played.core))
    assert (len(report.lineages), report.masked) == (2, {})
    assert sum(text.count("CALL") for text in trained(report)) == 1


def test_a_dropped_answer_is_abandoned() -> None:
    played = rig()
    first = played.turn(asks(user("a"), tools=TOOLS), call("bash", command="1"))
    result = results((first.blocks[0].id, "x"))  # type: ignore[union-attr]
    played.turn(asks(user("a"), echo(first), result, tools=TOOLS), "garbled")
    played.turn(asks(user("a"), echo(first), result, user("That was no call."), tools=TOOLS), "sorry")
    report = check(report_of(played.core))
    assert report.masked == {"abandoned": len(b"garbled") + 1}
    assert len(report.lineages) == 1


def test_a_dropped_first_answer_is_abandoned() -> None:
    played = rig()
    played.turn(asks(SYSTEM, user("a")), "garbled")
    played.turn(asks(SYSTEM, user("a"), user("That was no call.")), "sorry")
    assert check(report_of(played.core)).masked == {"abandoned": len(b"garbled") + 1}


def test_agents_of_the_same_kind_do_not_abandon_each_others_turns() -> None:
    played = rig()
    for task in ("one", "two"):
        played.turn(asks(SYSTEM, user(task)), "done")
    report = check(report_of(played.core))
    assert (report.masked, len(report.lineages)) == ({}, 2)


def test_subagents_get_their_own_rows_and_the_parent_continues() -> None:
    played = rig()
    parent = [SYSTEM, user("go")]
    asked = played.turn(asks(*parent, tools=TOOLS), call("bash", command="sub 1") + call("bash", command="sub 2"))
    children = [[say(Role.SYSTEM, "You explore."), user(f"part {number}")] for number in (1, 2)]
    answers = [
        played.turn(asks(*child, tools=TOOLS[:1], agent=f"child-{number}"), call("bash", command="look"))
        for number, child in enumerate(children)
    ]
    for number, (child, answer) in enumerate(zip(children, answers, strict=True)):
        said = (*child, echo(answer), results((answer.blocks[0].id, "seen")))  # type: ignore[union-attr]
        played.turn(asks(*said, tools=TOOLS[:1], agent=f"child-{number}"), f"found {number}")
    ids = [block.id for block in asked.blocks]  # type: ignore[union-attr]
    played.turn(asks(*parent, echo(asked), results((ids[0], "1"), (ids[1], "2")), tools=TOOLS), "done")
    report = check(report_of(played.core))
    assert [lineage.name for lineage in report.lineages] == ["1.child-0", "2.child-1", "0"]
    assert report.masked == {}
    assert played.prompts[-1][: len(played.prompts[0])] == played.prompts[0]


def test_a_compaction_is_a_branch_and_its_continuation_is_a_new_row() -> None:
    played = rig()
    messages = [SYSTEM, user("go")]
    answers = []
    for number in range(2):
        answer = played.turn(asks(*messages, tools=TOOLS), call("bash", command=str(number)))
        answers.append(answer)
        messages += [echo(answer), results((answer.blocks[0].id, f"out {number}"))]  # type: ignore[union-attr]
    # Refused for its length, so nothing is sampled; the last pair is then left out of the request for a summary.
    for event in played.core.accepted(played.core.match(asks(*messages, tools=TOOLS))):
        played.record(event)
    played.turn(asks(*messages[:-2], user("CRITICAL: summarise"), tools=TOOLS), "summary")
    kept = (user("This is what happened: summary"), *messages[-2:])
    played.turn(asks(SYSTEM, *kept, tools=TOOLS), "going on")
    report = check(report_of(played.core))
    assert report.masked == {}
    assert len(report.lineages) == 3, "the way so far, the summary, what came after"
    assert sum(text.count("CALL") for text in trained(report)) == 2, "the kept turn is context in the new row"


def test_tokens_shared_by_rows_are_trained_in_the_longest_row() -> None:
    played = rig()
    first = played.turn(asks(user("a")), "one ")
    shown = (user("a"), echo(first))
    played.turn(asks(*shown, user("Sum up"), purpose=RequestPurpose.COMPACTION), "short")
    second = played.turn(asks(*shown, user("b")), "two ")
    played.turn(asks(*shown, user("b"), echo(second), user("c")), "three")
    report = check(report_of(played.core))
    assert trained(report) == ["short", "one two three"]
    assert report.masked == {}


def test_a_conversation_without_tools_that_quotes_a_turn_is_not_a_side_call() -> None:
    played = rig()
    first = played.turn(asks(SYSTEM, user("go"), tools=TOOLS), call("bash", command="1"))
    shown = (user("go"), echo(first), results((first.blocks[0].id, "x")))  # type: ignore[union-attr]
    played.turn(asks(say(Role.SYSTEM, "You summarise."), *shown), "summary")
    assert check(report_of(played.core)).masked == {}


def test_a_summary_without_tools_is_trained_but_a_title_is_not() -> None:
    played = rig()
    played.turn(asks(say(Role.SYSTEM, "Name it."), user("go")), "A title")
    first = played.turn(asks(SYSTEM, user("go"), tools=TOOLS), call("bash", command="1"))
    shown = (SYSTEM, user("go"), echo(first), results((first.blocks[0].id, "x")))  # type: ignore[union-attr]
    played.turn(asks(*shown, user("Summarise."), purpose=RequestPurpose.COMPACTION), "summary")
    report = check(report_of(played.core))
    assert report.masked == {"side": len(b"A title") + 1}
    assert [lineage.name for lineage in report.lineages] == ["1", "2.compaction"]


def test_turns_of_a_served_model_are_not_trained() -> None:
    played = rig()
    played.turn(asks(user("a")), "x", untrained=True)
    assert check(report_of(played.core)).masked == {"side": 2}


def test_a_fabricated_assistant_turn_is_context() -> None:
    played = rig()
    shown = (user("context"), say(Role.ASSISTANT, "Got it. Thanks for the context!"), user("go"))
    answer = played.turn(asks(*shown), "x")
    played.turn(asks(*shown, echo(answer), user("on")), "y")
    report = check(report_of(played.core))
    assert (len(report.lineages), trained(report)) == (1, ["xy"])


def test_a_template_without_bridges_opens_a_row_for_each_turn() -> None:
    played = Rig(Session(SessionSpec(session_id=SessionId("r-1")), 0.0), ByteChat(bridges=False))
    messages = [user("a")]
    for number in range(3):
        messages += [echo(played.turn(asks(*messages), f"x{number}")), user("on")]
    report = check(report_of(played.core))
    assert (len(report.lineages), report.rerendered, report.masked) == (3, 2, {})
    assert trained(report) == ["x0", "x1", "x2"]


# Cuts, retries and what was not delivered.


def test_tokens_of_an_aborted_turn_are_recorded_but_not_trained() -> None:
    played = rig()
    played.cut(asks(user("a")), [*b"xy"])
    played.turn(asks(user("a")), "whole")
    report = check(report_of(played.core))
    assert (report.masked, report.turns, len(report.lineages)) == ({"aborted": 2}, 1, 1)


@pytest.mark.parametrize("by_clock", [True, False])
def test_turns_that_were_cut_off_use_up_the_turn_budget_without_being_turns(by_clock: bool) -> None:
    played = Rig(session(max_turns=2))
    played.cut(asks(user("a")), [*b"xy"], by_clock=by_clock)
    assert (played.core.spent(0.0), played.core.turns) == (Exhausted.NONE, 0)
    played.cut(asks(user("a")), [*b"z"], by_clock=by_clock)
    assert (played.core.spent(0.0), played.core.turns) == (Exhausted.TURNS, 0)


@pytest.mark.parametrize(
    ("train", "by_clock", "masked", "turns"),
    [(True, True, {}, 2), (True, False, {"aborted": 2}, 1), (False, True, {"aborted": 2}, 1)],
)
def test_a_turn_cut_by_the_clock_is_trained_if_configured(
    train: bool, by_clock: bool, masked: dict[str, int], turns: int
) -> None:
    played = rig(train_cut=train)
    answer = played.turn(asks(user("a")), "x")
    played.cut(asks(user("a"), echo(answer), user("b")), [*b"yz"], by_clock=by_clock)
    report = check(report_of(played.core))
    assert (report.masked, report.turns, report.exhausted) == (masked, turns, Exhausted.NONE)
    assert trained(report) == (["xyz"] if train and by_clock else ["x"])
    assert report.trajectory is not None
    [row] = report.trajectory.rows
    owned = sum(span.end - span.start for span in row.versions)
    assert owned == int(row.loss_mask_T.sum()), "spans cover what is trained"


@pytest.mark.parametrize(
    ("spec", "reason"), [({"sampling": Sampling(top_k=5)}, "sampling"), ({"sampling": Sampling(top_p=0.9)}, "sampling")]
)
def test_a_turn_cut_by_the_clock_is_masked_for_the_reasons_of_whole_turns(spec: dict[str, Any], reason: str) -> None:
    played = rig(train_cut=True, **spec)
    played.cut(asks(user("a")), [*b"yz"], by_clock=True)
    assert check(report_of(played.core)).masked == {reason: 2}


def test_an_undelivered_answer_is_replayed_or_else_abandoned() -> None:
    played = rig()
    request = asks(user("a"))
    answer = played.turn(request, "x", deliver=False)
    found = played.core.replay(played.core.match(request), request, repeats=False)
    assert found is not None
    assert found.answer == answer
    assert check(report_of(played.core)).masked == {"abandoned": 2}


def test_a_delivered_answer_is_replayed_to_a_request_that_says_so() -> None:
    played = rig()
    request = asks(user("a"))
    answer = played.turn(request, "x")
    match = played.core.match(request)
    assert played.core.replay(match, request, repeats=False) is None, "who asks again wants another sample"
    for number in (1, 2):
        found = played.core.replay(match, request, repeats=True)
        assert found is not None
        assert found.answer == answer
        played.record(Replayed(turn_id=answer.turn_id))
        assert report_of(played.core).replays == number


def test_an_answer_that_is_being_sent_is_not_replayed_to_another_request() -> None:
    played = rig()
    request = asks(user("a"))
    answer = played.turn(request, "x", deliver=False)
    match = played.core.match(request)
    assert played.core.replay(match, request, repeats=False, delivering={answer.turn_id}) is None
    assert played.core.replay(match, request, repeats=True, delivering={answer.turn_id}) is not None


def test_a_request_with_other_sampling_parameters_gets_a_new_answer() -> None:
    played = rig()
    request = asks(user("a"))
    played.turn(request, "x", deliver=False)
    other = replace(request, sampling="other")
    assert played.core.replay(played.core.match(other), other, repeats=True) is None


def test_a_repeated_request_with_more_max_tokens_gets_a_new_answer() -> None:
    played = rig()
    played.turn(asks(user("a"), max_tokens=2), "xy", finish=FinishReason.LENGTH)
    more = asks(user("a"), max_tokens=50)
    assert played.core.replay(played.core.match(more), more, repeats=True) is None
    played.turn(more, "xyz")
    assert check(report_of(played.core)).masked == {"abandoned": 2}


def test_an_accepted_answer_is_never_replayed() -> None:
    played = rig()
    answer = played.turn(asks(user("a")), "x")
    played.turn(asks(user("a"), echo(answer), user("b")), "y")
    assert played.core.replay(played.core.match(asks(user("a"))), asks(user("a")), repeats=True) is None


def test_the_continued_one_of_two_answers_to_one_request_is_trained() -> None:
    played = rig()
    request = asks(user("a"))
    first, second = played.turn(request, "first"), played.turn(request, "second")
    played.turn(asks(user("a"), echo(second), user("b")), "on")
    report = check(report_of(played.core))
    assert report.masked == {"abandoned": len(b"first") + 1}
    assert first.turn_id != second.turn_id


def test_the_tree_lists_every_turn_with_its_status() -> None:
    played = rig()
    played.cut(asks(user("a")), [*b"x"])
    answer = played.turn(asks(user("a"), tools=TOOLS), call("bash", command="1"))
    tree = tree_of(played.core)
    assert [node["masked"] for node in tree] == ["aborted", None]
    assert tree[1]["calls"] == [{"id": answer.blocks[0].id, "name": "bash"}]  # type: ignore[union-attr]
    assert orjson.loads(orjson.dumps(tree)) == tree


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
def test_invalid_specs_are_refused_naming_the_key(spec: dict[str, object], where: str) -> None:
    with pytest.raises(BadRequest, match=where):
        codec.read_spec(orjson.dumps(spec), SessionId("other"))
