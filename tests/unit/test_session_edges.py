"""Edge cases in which a session could lose a token, train it twice, or report a row that no engine saw."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from headrace.policies.engine import FinishReason
from headrace.serve.gateway.capture.events import Status
from headrace.serve.gateway.capture.rows import SessionReport, report_of
from headrace.serve.gateway.capture.session import Budgets, Session, SessionId, SessionSpec
from headrace.serve.gateway.conversation import Message, Role, Text, ToolCall, ToolSpec, TurnAnswer, say
from support.session_rig import ByteChat, Rig, asks, call, echo, results, user

TOOLS = (ToolSpec("bash"), ToolSpec("edit"))
SYSTEM = say(Role.SYSTEM, "You repair things.")


def rig() -> Rig:
    return Rig(Session(SessionSpec(session_id=SessionId("r-1")), 0.0))


def calls_of(answer: TurnAnswer) -> list[ToolCall]:
    return [block for block in answer.blocks if isinstance(block, ToolCall)]


def result_of(answer: TurnAnswer, text: str) -> Message:
    return results(*((call.id, text) for call in calls_of(answer)))


def check(played: Rig) -> SessionReport:
    """Check that rows are what engines saw, that every token is counted, and that the events restore the session."""
    report = report_of(played.core)
    rows = report.trajectory.rows if report.trajectory else ()
    assert report.sampled_tokens == report.trained_tokens + sum(report.masked.values())
    seen = [prompt + output for prompt, output in zip(played.prompts, played.outputs, strict=True)]
    assert all(row.tokens_T.tolist() in seen for row in rows), "a row is what an engine was sent and answered"
    for node, whole in zip(played.core.trie.sampled, seen, strict=True):
        assert list(played.core.trie.path_ids(node)) == whole
    again = Session(played.core.spec, 0.0)
    for event in played.events:
        again.apply(event)
    assert (report_of(again).masked, report_of(again).lineages) == (report.masked, report.lineages)
    return report


# Requests that mean the same and are not the same.


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (asks(user("go")), asks(user("go\n\n"))),
        (asks(user("go")), asks(user("go"), user(" "))),
        (asks(say(Role.SYSTEM, " s"), user("go")), asks(say(Role.SYSTEM, "s"), user("go"))),
    ],
)
def test_concurrent_requests_rendered_to_different_ids_are_separate_prompts(one: Any, other: Any) -> None:
    played = rig()
    plans = [played.plan(one), played.plan(other)]
    for plan in plans:
        completion = played.completion("x")
        played.prompts.append(list(plan.prompt_ids))
        played.outputs.append(list(completion.output_ids))
        turn_id = played.core.next_turn_id()
        played.record(played.core.recorded(turn_id, plan, completion, played.renderer, played.parser))
    assert played.prompts[0] != played.prompts[1]
    check(played)


def test_identical_requests_in_sequence_share_one_prompt() -> None:
    played = rig()
    played.turn(asks(user("go")), "x")
    played.turn(asks(user("go\n")), "y")
    assert played.prompts[0] == played.prompts[1]
    check(played)


# Models that are served and not trained.


@pytest.mark.parametrize(("untrained", "trained"), [((True, False), ["yy"]), ((False, True), ["x"])])
def test_a_turn_is_trained_only_if_its_model_is_trained(untrained: tuple[bool, bool], trained: list[str]) -> None:
    played = rig()
    for text, flag in zip(("x", "yy"), untrained, strict=True):
        played.turn(asks(user("go")), text, untrained=flag)
    report = check(played)
    assert report.masked == {"side": 4 - len(trained[0])}
    assert report.trained_tokens == len(trained[0]) + 1


# Outputs of nothing.


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_turn_without_tokens_can_be_continued(finish: FinishReason) -> None:
    played = rig()
    answer = played.turn(asks(user("go")), [], finish=finish)
    played.turn(asks(user("go"), echo(answer), user("on")), "x")
    assert played.prompts[1][: len(played.prompts[0])] == played.prompts[0]
    assert (check(played).masked, len(check(played).lineages)) == ({}, 1)


# Echoes that agents wrote anew.


def cut_short(answer: TurnAnswer) -> Message:
    return say(Role.ASSISTANT, answer.text[: len(answer.text) // 2])


def without_calls(answer: TurnAnswer) -> Message:
    return Message(Role.ASSISTANT, tuple(block for block in answer.blocks if isinstance(block, Text)))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("rewrite", [cut_short, without_calls])
def test_a_turn_that_was_rewritten_in_place_is_not_abandoned(rewrite: Any, depth: int) -> None:
    played = rig()
    history: tuple[Message, ...] = (SYSTEM, user("go"))
    for number in range(depth):
        history += (echo(played.turn(asks(*history, tools=TOOLS), f"step {number}")), user("on"))
    answer = played.turn(asks(*history, tools=TOOLS), "I look.\n" + call("bash", command="ls"))
    history += (rewrite(answer), user("It printed calc.py."))
    history += (echo(played.turn(asks(*history, tools=TOOLS), "Now I know.")), user("And?"))
    played.turn(asks(*history, tools=TOOLS), "Done.")
    report = check(played)
    assert (report.masked, len(report.lineages)) == ({}, 2)
    assert report.drift == {"edited": 1}
    assert bytes(item for item in played.prompts[-1] if item < 256).count(b"CALL") == 0, "it is what the agent says"


def test_a_resampled_turn_is_abandoned_even_if_another_answer_is_in_its_place() -> None:
    played = rig()
    for text in ("first", "second"):
        played.turn(asks(user("go")), text)
    played.turn(asks(user("go"), say(Role.ASSISTANT, "sec"), user("on")), "x")
    assert check(played).masked == {"abandoned": len(b"first") + 1}


def test_a_turn_with_a_reused_call_id_is_still_matched_by_its_content() -> None:
    played = rig()
    first = played.turn(asks(user("go"), tools=TOOLS), call("bash", command="1"))
    history = (user("go"), echo(first), result_of(first, "x"))
    second = played.turn(asks(*history, tools=TOOLS), call("bash", command="2"))
    reused = calls_of(first)[0].id
    renamed = Message(Role.ASSISTANT, (ToolCall(reused, "bash", calls_of(second)[0].arguments),))
    played.turn(asks(*history, renamed, results((reused, "y")), tools=TOOLS), "done")
    report = check(played)
    assert (report.masked, len(report.lineages)) == ({}, 1)


def test_joining_the_text_around_reasoning_does_not_count_as_drift() -> None:
    played = rig()
    played.turn(asks(user("go")), "one\nTHINK hm\ntwo\n")
    played.turn(asks(user("go"), say(Role.ASSISTANT, "one\ntwo\n"), user("on")), "x")
    assert check(played).drift == {}


def test_drift_in_a_turn_that_is_quoted_twice_counts_once() -> None:
    played = rig()
    answer = played.turn(asks(user("go"), tools=TOOLS), call("bash", command="1"))
    changed = Message(Role.ASSISTANT, (ToolCall(calls_of(answer)[0].id, "bash", "{}"),))
    quoted = (changed, result_of(answer, "x"))
    played.turn(asks(user("other"), *quoted, *quoted, tools=TOOLS), "done")
    assert check(played).drift == {"edited": 1}


def test_all_results_without_ids_are_rendered() -> None:
    played = rig()
    answer = played.turn(asks(user("go"), tools=TOOLS), call("bash", command="1") + call("bash", command="2"))
    played.turn(asks(user("go"), echo(answer), results(("", "same"), ("", "same")), tools=TOOLS), "done")
    assert bytes(item for item in played.prompts[1] if item < 256).count(b"same") == 2
    check(played)


OUTPUT = "I look.\n" + call("bash", command="1") + call("bash", command="2")


@pytest.mark.parametrize("own_ids", [False, True])
@pytest.mark.parametrize("output", [OUTPUT, call("bash", command="1") + "And that is it.\n", "one\nTHINK hm\ntwo\n"])
def test_a_turn_echoed_as_several_messages_is_matched_as_one_turn(output: str, own_ids: bool) -> None:
    played = rig()
    answer = played.turn(asks(user("go"), tools=TOOLS), output)
    blocks = [
        ToolCall(f"own{index}", block.name, block.arguments) if own_ids and isinstance(block, ToolCall) else block
        for index, block in enumerate(answer.blocks)
    ]
    parts = [Message(Role.ASSISTANT, (block,)) for block in blocks]
    given = [(block.id, "x") for block in blocks if isinstance(block, ToolCall)]
    played.turn(asks(user("go"), *parts, results(*given) if given else user("on"), tools=TOOLS), "done")
    report = check(played)
    assert (report.masked, len(report.lineages)) == ({}, 1)
    assert report.drift == ({"calls": 1} if own_ids and given else {})
    shown = bytes(item for item in played.prompts[1] if item < 256)
    assert all(shown.count(word) == output.encode().count(word) for word in (b"CALL", b"look", b"And", b"two"))


def test_adjacent_echoes_of_two_turns_match_both_turns() -> None:
    played = rig()
    first = played.turn(asks(user("go")), "one")
    second = played.turn(asks(user("go"), echo(first), user("on")), "two")
    played.turn(asks(user("go"), echo(first), echo(second), user("and")), "three")
    assert bytes(item for item in played.prompts[2] if item < 256) == b"goonetwoand"
    report = check(played)
    assert (report.masked, len(report.lineages)) == ({}, 2)


# The same words again and again.


def test_consecutive_identical_turns_are_matched_by_position() -> None:
    played = rig()
    history: tuple[Message, ...] = (user("go"),)
    for _ in range(5):
        history += (say(Role.ASSISTANT, played.turn(asks(*history), "ls").text), user("nothing"))
    report = check(played)
    assert (report.masked, len(report.lineages), report.rerendered) == ({}, 1, 0)


def test_rewritten_turns_are_matched_after_a_fabricated_one() -> None:
    played = rig()
    history = (user("context"), say(Role.ASSISTANT, "Got it."), user("go"))
    for _ in range(3):
        answer = played.turn(asks(*history), "A long answer of many words.")
        history += (cut_short(answer), user("on"))
    report = check(played)
    assert (report.masked, len(report.lineages), report.drift) == ({}, 3, {"edited": 2})


@pytest.mark.parametrize("tools", [(), TOOLS])
def test_a_changing_first_message_adds_rows_but_loses_no_token(tools: tuple[ToolSpec, ...]) -> None:
    played = rig()
    history: tuple[Message, ...] = ()
    for number in range(5):
        answer = played.turn(asks(user(f"It is {number} o'clock."), *history, tools=tools), call("bash", command="ls"))
        history += (echo(answer), result_of(answer, "x") if tools else user("x"))
    report = check(played)
    assert (report.masked, len(report.lineages)) == ({}, 5)
    assert report.trajectory is not None
    for row, output in zip(report.trajectory.rows, played.outputs, strict=True):
        assert row.tokens_T[row.loss_mask_T].tolist() == output, "earlier turns are context"


def test_agents_with_identical_requests_continue_their_own_answers() -> None:
    played = rig()
    twins = [played.turn(asks(SYSTEM, user("look")), text) for text in ("left", "right")]
    for answer in reversed(twins):
        played.turn(asks(SYSTEM, user("look"), echo(answer), user("on")), f"on from {answer.text}")
    report = check(played)
    assert (report.masked, len(report.lineages)) == ({}, 2)


# Side calls.


def test_a_side_call_that_edits_its_history_remains_a_side_call() -> None:
    played = rig()
    played.turn(asks(SYSTEM, user("go"), tools=TOOLS), "x")
    title = played.turn(asks(user("Name it.")), "A title")
    played.turn(asks(user("Name it, please."), echo(title), user("Shorter.")), "Title")
    assert check(played).masked == {"side": len(b"A title") + len(b"Title") + 2}


def test_a_summary_of_a_summary_is_trained() -> None:
    played = rig()
    first = played.turn(asks(SYSTEM, user("go"), tools=TOOLS), call("bash", command="1"))
    quoted = (user("go"), echo(first), result_of(first, "x"))
    summary = played.turn(asks(say(Role.SYSTEM, "You summarise."), *quoted), "long summary")
    played.turn(asks(say(Role.SYSTEM, "You shorten."), user("Shorten"), echo(summary), user("now")), "summary")
    assert check(played).masked == {}


def test_a_delivered_turn_that_was_rewritten_counts_as_accepted() -> None:
    played = rig()
    answer = played.turn(asks(user("go")), "A long answer.")
    request = asks(user("go"), cut_short(answer), user("on"))
    played.turn(request, "x")
    assert [node.status for node in played.core.trie.sampled] == [Status.ACCEPTED, Status.DELIVERED]
    assert played.core.replay(played.core.match(asks(user("go"))), asks(user("go")), repeats=True) is None


# What a turn costs.


def lines_run(work: Callable[[], object]) -> int:
    """Return the number of executed Python lines, which is the same on every machine."""
    count = 0

    def trace(frame: object, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("kind", ["appends", "edits its first message", "is rendered again"])
def test_the_cost_of_a_turn_is_linear_in_its_history(kind: str) -> None:
    room = Budgets(max_turns=1000, max_context_tokens=1_000_000)
    spec = SessionSpec(session_id=SessionId("r-1"), budgets=room)
    played = Rig(Session(spec, 0.0), ByteChat(bridges=kind != "is rendered again"))
    history: tuple[Message, ...] = ()
    lines = {}
    for number in range(161):
        first = user(f"It is {number} o'clock.") if kind == "edits its first message" else user("go")
        request = asks(first, *history, tools=TOOLS)
        if number in (80, 160):
            lines[number] = lines_run(partial(played.core.match, request))
        answer = played.turn(request, call("bash", command=f"ls {number}"))
        history += (echo(answer), result_of(answer, "x"))
    assert lines[160] < 2.3 * lines[80]
