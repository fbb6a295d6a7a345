"""A policy that continues its own message: how turns are found again, and how templates leave a message open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.policies.engine import FinishReason
from headrace.serve.gateway.capture.rows import Masked, SessionReport, report_of, tree_of
from headrace.serve.gateway.capture.session import Session, SessionId, SessionSpec
from headrace.serve.gateway.conversation import Message, Reasoning, Role, Text, ToolSpec, TurnAnswer, TurnRequest, say
from headrace.serve.gateway.rendering.template_renderer import load_renderer
from support import chat_templates as templates
from support.session_rig import END, ByteChat, Rig, asks, call, echo, results, user

SEARCH = "<search>q</search>"
FOUND = "\n\n<information>bog</information>\n\n"
STOPS = ("</search>", "</answer>")


def rig() -> Rig:
    return Rig(Session(SessionSpec(session_id=SessionId("rollout-1")), opened_at=0.0))


def continues(*messages: Message, text: str, **fields: object) -> TurnRequest:
    fields = {"stop": STOPS, "keeps_stop": True} | fields
    return asks(*messages, say(Role.ASSISTANT, text), continues=True, **fields)


def searched(played: Rig, *messages: Message) -> TurnAnswer:
    """Play a turn that ends with a search."""
    return played.turn(asks(*messages, stop=STOPS, keeps_stop=True), [*SEARCH.encode()])


def check(played: Rig) -> SessionReport:
    report = report_of(played.core)
    assert report.sampled_tokens == report.trained_tokens + sum(report.masked.values())
    assert report.sampled_tokens == sum(map(len, played.outputs))
    return report


def trained(report: SessionReport) -> list[str]:
    rows = report.trajectory.rows if report.trajectory else ()
    return [bytes(row.tokens_T[row.loss_mask_T & (row.tokens_T < 256)].astype("uint8")).decode() for row in rows]


def test_an_inserted_text_continues_the_recorded_turn_in_its_row() -> None:
    played = rig()
    first = searched(played, user("a"))
    second = played.turn(continues(user("a"), text=SEARCH + FOUND), [*SEARCH.encode()])
    whole = SEARCH + FOUND + second.text + FOUND
    third = played.turn(continues(user("a"), text=whole), "<answer>kelp</answer>")
    assert (first.text, second.text, third.text) == (SEARCH, SEARCH, "<answer>kelp</answer>")
    assert played.prompts[1] == [*played.prompts[0], *SEARCH.encode(), *FOUND.encode()]
    assert played.prompts[2] == [*played.prompts[1], *SEARCH.encode(), *FOUND.encode()]
    assert END not in played.prompts[2][len(played.prompts[0]) :]
    report = check(played)
    assert trained(report) == [SEARCH + SEARCH + "<answer>kelp</answer>"]
    assert (report.rerendered, len(report.lineages), report.drift) == (0, 1, {})
    assert [event.resumes for event in played.events if hasattr(event, "resumes")] == [False, True, True]
    assert [turn["resumes"] for turn in tree_of(played.core)] == [False, True, True]


def test_a_conversation_goes_on_after_a_message_in_pieces() -> None:
    played = rig()
    searched(played, user("a"))
    last = played.turn(continues(user("a"), text=SEARCH + FOUND), "so")
    said = say(Role.ASSISTANT, SEARCH + FOUND + last.text)
    played.turn(asks(user("a"), said, user("b")), "on")
    assert played.prompts[2][: len(played.prompts[1]) + 3] == [*played.prompts[1], *b"so", END]
    report = check(played)
    assert (trained(report), report.rerendered, report.drift) == ([f"{SEARCH}soon"], 0, {})


def test_a_message_whose_last_piece_has_a_call_matches_unless_its_words_differ() -> None:
    played, tools = rig(), (ToolSpec("bash"),)
    played.turn(asks(user("a"), stop=STOPS, keeps_stop=True, tools=tools), [*SEARCH.encode()])
    last = played.turn(continues(user("a"), text=SEARCH + FOUND, tools=tools), call("bash", command="ls"))
    [called] = last.calls
    edited = replace(called, arguments='{"command": "pwd"}')
    for text, sent, is_echo in (
        (SEARCH + FOUND, called, True),
        ("other", called, False),
        (SEARCH + FOUND, edited, False),
    ):
        said = Message(Role.ASSISTANT, (Text(text), sent))
        played.turn(asks(user("a"), said, results((called.id, "x")), user(text), tools=tools), "on")
        sampled = played.prompts[1] + played.outputs[1]
        assert (played.prompts[-1][: len(sampled)] == sampled) == is_echo
        assert sent.arguments.encode() in bytes(item for item in played.prompts[-1] if item < 256)
    assert check(played).masked == {}


def test_a_text_without_its_stop_string_is_continued_with_it() -> None:
    """As OpenAI's API strips it: the agent writes it back, and the ids have it once."""
    played = rig()
    first = played.turn(asks(user("a"), stop=STOPS), [*SEARCH.encode()])
    assert (first.text, first.stop_string) == ("<search>q", "</search>")
    played.turn(continues(user("a"), text=SEARCH + FOUND), "so")
    assert played.prompts[1] == [*played.prompts[0], *SEARCH.encode(), *FOUND.encode()]
    played.turn(continues(user("a"), text="<search>q and more"), "new")
    assert bytes(played.prompts[2][-len("<search>q and more") :]).decode() == "<search>q and more"
    assert check(played).rerendered == 1, "the ids have a stop string that this message lacks"
    played.turn(asks(user("a"), say(Role.ASSISTANT, SEARCH), user("b")), "on")
    assert played.prompts[3][: len(played.prompts[0]) + len(SEARCH)] == played.prompts[1][: -len(FOUND)]


def test_a_stop_token_that_ended_a_turn_stays_before_what_is_inserted() -> None:
    played = rig()
    played.turn(asks(user("a")), "ab")
    played.turn(continues(user("a"), text="ab, and"), "more")
    assert played.prompts[1] == [*played.prompts[0], *b"ab", played.renderer.stop_ids[0], *b", and"]
    report = check(played)
    assert (len(report.lineages), report.rerendered, report.masked) == (1, 0, {})


def test_a_stop_token_within_a_message_stays_too() -> None:
    played = rig()
    searched(played, user("a"))
    played.turn(continues(user("a"), text=SEARCH + FOUND), "so")
    played.turn(continues(user("a"), text=f"{SEARCH}{FOUND}so, then"), "x")
    assert played.prompts[2] == [*played.prompts[1], *b"so", played.renderer.stop_ids[0], *b", then"]
    report = check(played)
    assert (len(report.lineages), report.masked) == (1, {})


def test_an_edited_message_is_rendered_from_its_words() -> None:
    played = rig()
    searched(played, user("a"))
    played.turn(continues(user("a"), text="<search>r</search>" + FOUND), "so")
    assert played.prompts[1] == [*played.prompts[0], *b"<search>r</search>", *FOUND.encode()]
    report = check(played)
    assert (trained(report), report.rerendered) == ([SEARCH, "so"], 1)
    assert report.drift == {"edited": 1}


def test_a_first_request_may_open_the_policys_message() -> None:
    played = rig()
    opening = "Let me think."
    played.turn(continues(user("a"), text=opening), [*b" yes</search>"])
    assert played.prompts[0] == [*ByteChat().render([user("a")], ()), *opening.encode()]
    played.turn(continues(user("a"), text=f"{opening} yes</search>{FOUND}"), "so")
    assert played.prompts[1] == [*played.prompts[0], *b" yes</search>", *FOUND.encode()]
    played.turn(asks(user("a"), say(Role.ASSISTANT, f"{opening} yes</search>{FOUND}so"), user("b")), "on")
    assert played.prompts[2][: len(played.prompts[1])] == played.prompts[1]
    assert trained(check(played)) == [" yes</search>soon"]


def test_a_later_message_of_the_policy_may_be_opened_and_continued() -> None:
    played = rig()
    first = played.turn(asks(user("a")), "ab")
    shown = (user("a"), echo(first), user("b"))
    played.turn(continues(*shown, text="So:"), [*b" x</search>"])
    assert played.prompts[1] == [*played.prompts[0], *b"ab", END, *ByteChat().render([user("b")], ()), *b"So:"]
    played.turn(continues(*shown, text=f"So: x</search>{FOUND}"), "y")
    assert played.prompts[2] == [*played.prompts[1], *b" x</search>", *FOUND.encode()]
    assert trained(check(played)) == ["ab x</search>y"]


@pytest.mark.parametrize("text", [SEARCH + FOUND, SEARCH, f"{SEARCH}{FOUND}{SEARCH}{FOUND}"])
def test_a_repeated_continuation_gets_the_same_answer(text: str) -> None:
    played = rig()
    searched(played, user("a"))
    if text.count(SEARCH) == 2:
        played.turn(continues(user("a"), text=SEARCH + FOUND), [*SEARCH.encode()])
    request = continues(user("a"), text=text)
    answer = played.turn(request, "so")
    found = played.core.replay(played.core.match(request), request, repeats=True)
    assert found is not None
    assert found.answer == answer


@pytest.mark.parametrize("text", ["", "P"])
def test_a_repeated_opening_gets_the_same_answer(text: str) -> None:
    played = rig()
    request = continues(user("a"), text=text)
    answer = played.turn(request, "THINK hm")
    for event in played.core.accepted(played.core.match(request)):
        played.record(event)
    found = played.core.replay(played.core.match(request), request, repeats=True)
    assert found is not None
    assert found.answer == answer


def test_a_cut_answer_is_continued_without_an_insertion() -> None:
    played = rig()
    played.turn(asks(user("a")), "ab", finish=FinishReason.LENGTH)
    played.turn(continues(user("a"), text="ab"), "cd", finish=FinishReason.LENGTH)
    played.turn(continues(user("a"), text="abcd"), "ef")
    assert played.prompts[2] == [*played.prompts[0], *b"abcd"]
    assert trained(check(played)) == ["abcdef"]


def test_reasoning_that_was_cut_is_continued_if_it_is_sent_back() -> None:
    played = rig()
    first = played.turn(asks(user("a")), "THINK hm", finish=FinishReason.LENGTH)
    said = Message(Role.ASSISTANT, first.blocks)
    played.turn(asks(user("a"), said, continues=True), "so")
    assert played.prompts[1] == [*played.prompts[0], *b"THINK hm"]
    played.turn(continues(user("a"), text=""), "new")
    assert played.prompts[2] == played.prompts[0]


def test_several_insertions_into_one_turn_are_rows_of_their_own() -> None:
    played = rig()
    searched(played, user("a"))
    for text in ("one", "two"):
        played.turn(continues(user("a"), text=SEARCH + text), [*SEARCH.encode()])
    for text in ("one", "two"):
        played.turn(continues(user("a"), text=SEARCH + text + SEARCH + FOUND), text)
    assert bytes(played.prompts[4][-len(f"{SEARCH}two{SEARCH}{FOUND}") :]).decode() == f"{SEARCH}two{SEARCH}{FOUND}"
    report = check(played)
    assert sorted(trained(report)) == sorted([SEARCH + SEARCH + "one", SEARCH + "two"])
    assert report.masked == {}


def test_a_policy_continues_in_its_reasoning_if_the_earlier_part_opened_it(tmp_path: Path) -> None:
    renderer = load_renderer(templates.QWEN25.write(tmp_path))
    from headrace.policies.tokens.tokenizer import ChatTokenizer
    from headrace.serve.gateway.parsing.hermes import HermesParser

    encode = ChatTokenizer(tmp_path).encode
    played = Rig(rig().core, renderer, HermesParser(), tokenize=encode)
    played.turn(asks(user("a"), stop=STOPS, keeps_stop=True), encode(f"<think>{SEARCH}"))
    reasoned = Message(Role.ASSISTANT, (Reasoning(SEARCH), Text("x")))
    second = played.turn(asks(user("a"), reasoned, continues=True), "I know</think>kelp")
    assert second.blocks == (Reasoning("I know", second.turn_id), Text("kelp"))
    third = played.turn(continues(user("b"), text="<think>hm"), "aha</think>bog")
    assert third.blocks == (Reasoning("aha", third.turn_id), Text("bog"))


# Stop strings.


def overrun(*pieces: str, stop: Sequence[str] = STOPS, keeps: bool = True) -> tuple[Rig, TurnAnswer]:
    """Play a turn of a renderer whose ids above 300 are whole texts."""
    played, ids = Rig(rig().core, Pieces(pieces)), range(300, 300 + len(pieces))
    request = asks(user("a"), stop=tuple(stop), keeps_stop=keeps)
    return played, played.turn(request, ids, finish=FinishReason.LENGTH)


class Pieces(ByteChat):
    """Renderer with one further token for each text."""

    vocab_size = 400

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__()
        self._texts = texts

    def decode(self, ids: Sequence[int]) -> str:
        spelled = (self._texts[item - 300].encode() if item >= 300 else bytes([item]) for item in ids if item != END)
        return b"".join(piece for piece in spelled).decode(errors="replace")


def test_F15_tokens_after_the_stop_string_are_dropped() -> None:
    played, answer = overrun("<search>", "q", "</", "search>", " and", " more", "</answer>")
    assert (answer.text, answer.stop_string, answer.end) == (SEARCH, "</search>", "stop_string")
    assert answer.completion_tokens == 7
    report = check(played)
    assert (report.trained_tokens, report.masked) == (4, {"overrun": 3})
    assert report.trajectory is not None
    [row] = report.trajectory.rows
    assert row.tokens_T.tolist() == [*played.prompts[0], 300, 301, 302, 303]
    assert row.logprobs_T[row.loss_mask_T].tolist() == [-0.5, -1.5, -2.5, -3.5]
    assert [(span.start, span.end) for span in row.versions] == [
        (len(played.prompts[0]), len(played.prompts[0]) + 3),
        (len(played.prompts[0]) + 3, len(played.prompts[0]) + 4),
    ]
    played.turn(continues(user("a"), text=SEARCH + FOUND), "x")
    assert played.prompts[1] == [*played.prompts[0], 300, 301, 302, 303, *FOUND.encode()]
    assert check(played).masked == {"overrun": 3}


def test_F15_a_turn_whose_stop_string_ends_inside_a_token_is_masked() -> None:
    played, answer = overrun("<search>", "q", "</search", ">\n\n", "more")
    assert answer.text == SEARCH
    played.turn(continues(user("a"), text=SEARCH + FOUND), "x")
    assert played.prompts[1] == [*played.prompts[0], 300, 301, 302, 303, *FOUND.encode()]
    report = check(played)
    assert report.masked == {"overrun": 1, "stop_border": 4}
    assert trained(report) == ["x"]
    assert report.trajectory is not None
    assert len(report.trajectory.rows) == 1, "the masked turn is context of the next one"
    assert [turn["masked"] for turn in tree_of(played.core)] == ["stop_border", None]


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "kept", "border"),
    [
        (("ab", "cd", "ef"), ("cd",), "abcd", 2, False),
        (("ab", "cd", "ef"), ("ef", "bc"), "abc", 2, True),
        (("a###", "#"), ("##", "###"), "a##", 1, True),
        (("a", "##", "#"), ("##", "###"), "a##", 2, False),
        (("a", "##", "#"), ("###",), "a###", 3, False),
        (("a", "##"), ("##", "a##"), "a##", 2, False),
        (("é", "é", "x"), ("éé",), "éé", 2, False),
        (("x", "ab", "y", "ab", "z"), ("ab",), "xab", 2, False),
        (("x",) * 40 + ("!",) + ("y",) * 40, ("!",), "x" * 40 + "!", 41, False),
        (("!",) + ("y",) * 9, ("!",), "!", 1, False),
        (("a", "b"), ("c",), "ab", 2, False),
        (("a", "b"), (), "ab", 2, False),
    ],
)
def test_a_turn_ends_with_its_first_stop_string(
    pieces: tuple[str, ...], stop: tuple[str, ...], text: str, kept: int, border: bool
) -> None:
    played, answer = overrun(*pieces, stop=stop)
    assert answer.text == text
    node = played.core.trie.sampled[0]
    assert (len(node.ids), node.dropped, node.border) == (kept, len(pieces) - kept, border)
    check(played)
    stripped = overrun(*pieces, stop=stop, keeps=False)[1]
    assert stripped.text == text.removesuffix(answer.stop_string)


def test_a_stop_token_does_not_hide_an_earlier_stop_string() -> None:
    played = rig()
    answer = played.turn(asks(user("a"), stop=("b",)), "abc")
    assert (answer.text, answer.stop_string) == ("a", "b")
    report = check(played)
    assert (trained(report), report.masked) == (["ab"], {"overrun": 2})
    played.turn(asks(user("a"), echo(answer), user("x")), "on")
    assert played.prompts[1][len(played.prompts[0]) :][:3] == [*b"ab", END]


def test_text_after_a_stop_string_is_dropped_from_turns_that_were_cut() -> None:
    played = Rig(Session(SessionSpec(session_id=SessionId("r"), train_cut=True), 0.0), Pieces(("ab", "##", "c")))
    played.outputs.append([300, 301, 302])
    played.cut(asks(user("a"), stop=("##",)), [300, 301, 302], by_clock=True)
    report = check(played)
    assert (report.trained_tokens, report.masked) == (2, {"overrun": 1})


def test_all_reasons_for_masking_are_documented() -> None:
    from pathlib import Path

    text = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()
    assert [reason.value for reason in Masked if f"| `{reason.value}` |" not in text] == []
