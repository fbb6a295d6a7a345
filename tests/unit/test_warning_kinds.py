"""Warnings: from the parts of an environment's observation, through Chat Completions, to the kinds of tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.actors.environments.environment import Observation, ObservationPart, PartKind
from headrace.actors.services.chat import ChatCall, ChatMessage
from headrace.actors.services.templates import MarkedText, filled_around
from headrace.buffer.trajectories.token_kinds import OBSERVED, TokenKind, to_runs
from headrace.buffer.trajectories.types import Row
from headrace.policies.tokens.tokenizer import ChatTokenizer
from headrace.serve.gateway.capture.rows import report_of
from headrace.serve.gateway.capture.session import Session, SessionId, SessionSpec
from headrace.serve.gateway.conversation import Message, Role, Text, ToolResult, ToolSpec, WarningText
from headrace.serve.gateway.dialects.chat import ChatCompletions
from headrace.serve.gateway.rendering.body_marks import marked, without_marks
from headrace.serve.gateway.rendering.template_renderer import TemplateRenderer
from support import chat_templates as templates
from support.session_rig import Rig, asks, call

BASH = (ToolSpec("bash"),)
FORM = "WARNINGS:\n- only the first of 2 calls is run\n\n"
OUTPUT = 'out "a"\n'
ASIDE, REMARK, WHY = "Seen.\n", "One line!\n", "Why?"
SEEN, WARNED = TokenKind.OBSERVATION, TokenKind.WARNING
_LINES = [(WARNED, FORM), (SEEN, 'out "a"\n\n'), (SEEN, ASIDE), (WARNED, REMARK), (SEEN, WHY)]
LABELS = {
    # The line end that the template writes after a result is in one token with the output's own.
    "qwen3": _LINES,
    "qwen2.5": _LINES,
    "glm4": _LINES,
    # It writes results as JSON.
    "llama3.1": [
        (WARNED, FORM.replace("\n", "\\n")),
        (SEEN, 'out \\"a\\"\\n'),
        (SEEN, ASIDE),
        (WARNED, REMARK),
        (SEEN, WHY),
    ],
    "deepseek-v3": [(WARNED, FORM), (SEEN, OUTPUT), (SEEN, ASIDE), (WARNED, REMARK), (SEEN, WHY)],
}
"""Observed tokens of a conversation by hand: a result with a warning before it, and a user's text with one inside."""
FAMILIES = {family.name: family for family in templates.FAMILIES}


def parsed(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """The messages as the gateway reads them from our client."""
    body = {"messages": [message.to_json() for message in messages]}
    return ChatCompletions().parse(json.dumps(body).encode(), {}).turn.messages


def play(folder: Path, name: str, *, allowed: bool = True, marks: bool = True) -> tuple[Row, ChatTokenizer]:
    """The row of the conversation, in a session that may mark warnings or may not; with `marks` the agent does."""
    tokenizer = ChatTokenizer(FAMILIES[name].write(folder))
    core = Session(SessionSpec(session_id=SessionId("r"), marks_warnings=allowed), opened_at=0.0)
    played = Rig(core, TemplateRenderer(tokenizer, token_kinds=True), tokenize=tokenizer.encode)

    def warnings(*spans: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        return spans if marks else ()

    # A warning of the first prompt is prompt, as everything there.
    talk = [
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content="Repair it.", warnings=warnings((0, 6))),
    ]
    called = played.turn(asks(*parsed(talk), tools=BASH), call("bash", command="ls"))
    [one] = called.calls
    calls = (ChatCall(id=one.id, name=one.name, arguments=one.arguments),)
    talk.append(ChatMessage(role="assistant", content="", calls=calls))
    talk.append(ChatMessage(role="tool", content=FORM + OUTPUT, call_id=one.id, warnings=warnings((0, len(FORM)))))
    said = played.turn(asks(*parsed(talk), tools=BASH), "Done.")
    talk.append(ChatMessage(role="assistant", content=said.text))
    start = len(ASIDE)
    inside = warnings((start, start + len(REMARK)))
    talk.append(ChatMessage(role="user", content=ASIDE + REMARK + WHY, warnings=inside))
    played.turn(asks(*parsed(talk), tools=BASH), "So.")
    trajectory = report_of(played.core).trajectory
    assert trajectory is not None
    [row] = trajectory.rows
    return row, tokenizer


def observed(row: Row, tokenizer: ChatTokenizer) -> list[tuple[TokenKind, str]]:
    assert row.kinds_T is not None
    found, at = [], 0
    for kind, length in to_runs(row.kinds_T):
        if kind in OBSERVED:
            found.append((TokenKind(kind), tokenizer.spell(row.tokens_T[at : at + length].tolist())))
        at += length
    return found


@pytest.mark.parametrize("name", LABELS)
def test_kinds_of_warnings_equal_labels_by_hand(name: str, tmp_path: Path) -> None:
    row, tokenizer = play(tmp_path, name)
    assert observed(row, tokenizer) == LABELS[name]


@pytest.mark.parametrize("name", ["qwen3", "llama3.1"])
def test_a_session_that_may_not_mark_warnings_has_observations(name: str, tmp_path: Path) -> None:
    """So a program in a sandbox cannot take its output out of the objective."""
    row, tokenizer = play(tmp_path / "forbidden", name, allowed=False)
    plain, _ = play(tmp_path / "plain", name, marks=False)
    assert row.kinds_T is not None
    assert np.array_equal(row.kinds_T, plain.kinds_T)
    assert {kind for kind, _ in observed(row, tokenizer)} == {SEEN}


@pytest.mark.parametrize("name", LABELS)
def test_marks_change_neither_tokens_nor_what_is_trained(name: str, tmp_path: Path) -> None:
    marked_row, _ = play(tmp_path / "marked", name)
    plain, _ = play(tmp_path / "plain", name, marks=False)
    assert np.array_equal(marked_row.tokens_T, plain.tokens_T)
    assert np.array_equal(marked_row.loss_mask_T, plain.loss_mask_T)
    assert marked_row.kinds_T is not None
    assert plain.kinds_T is not None
    # Observation may become warning, and nothing else: the denominator n, which counts both, stays as it is.
    changed = marked_row.kinds_T != plain.kinds_T
    assert set(plain.kinds_T[changed].tolist()) == {SEEN}
    assert set(marked_row.kinds_T[changed].tolist()) == {WARNED}


parts = st.lists(
    st.builds(ObservationPart, text=st.text(max_size=8), kind=st.sampled_from(PartKind)), min_size=1, max_size=5
)


@given(parts=parts, role=st.sampled_from(["user", "tool"]))
def test_the_wire_keeps_the_text_and_the_parts(parts: list[ObservationPart], role: str) -> None:
    observation = Observation(parts=tuple(parts))
    message = ChatMessage(
        role="tool" if role == "tool" else "user",
        content=observation.text,
        call_id="c" if role == "tool" else "",
        warnings=observation.warnings,
    )
    [heard] = parsed([message])
    assert heard.text == observation.text
    expected = "".join(
        "w" * len(part.text) if part.kind is PartKind.WARNING else "o" * len(part.text) for part in parts
    )
    assert "".join(kinds_by_character(heard)) == expected


def kinds_by_character(message: Message) -> list[str]:
    found: list[str] = []
    for block in message.blocks:
        if isinstance(block, ToolResult):
            cuts = [0, *(at for span in block.warnings for at in span), len(block.text)]
            found += ["ow"[number % 2] * (end - start) for number, (start, end) in enumerate(pairwise(cuts))]
        elif isinstance(block, Text):
            found.append(("w" if isinstance(block, WarningText) else "o") * len(block.text))
    return found


def test_parts_that_say_their_kinds_are_joined_as_they_are() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "headrace_kind": "warning"}]
    body = {"messages": [{"role": "user", "content": "q"}, {"role": "tool", "tool_call_id": "c", "content": content}]}
    [_, result] = ChatCompletions().parse(json.dumps(body).encode(), {}).turn.messages
    assert result.text == "ab"
    del content[1]["headrace_kind"]
    [_, result] = ChatCompletions().parse(json.dumps(body).encode(), {}).turn.messages
    assert result.text == "a\nb", "parts of other agents are lines"


@pytest.mark.parametrize("inside", [False, True])
def test_marks_around_parts_are_found_again(inside: bool) -> None:
    message = Message(Role.USER, (WarningText("  w "), Text(" o\n"), WarningText("\n"), Text("")))
    [shown], count = marked([message], observed_from=0, inside=inside)
    found = without_marks(shown.text, count)
    assert found is not None
    text, spans = found
    assert text == message.text
    pieces = [(kind, text[start:end]) for start, end, kind in spans]
    if inside:
        assert pieces == [(WARNED, "w "), (SEEN, " o")]
    else:
        assert pieces == [(WARNED, "  w "), (SEEN, " o\n"), (WARNED, "\n")]


SAID = MarkedText(text="bad form\nout", warnings=((0, 9),))


@pytest.mark.parametrize(
    ("template", "text", "warnings"),
    [
        ("{{ observation }}", "bad form\nout", ("bad form\n",)),
        ("bad form\n{{ observation }} [{{ turns_left }} left]", "bad form\nbad form\nout [3 left]", ("bad form\n",)),
        # Where the observation is cannot be told, so all of it is an observation.
        ("{{ observation | upper }}", "BAD FORM\nOUT", ()),
        ("{{ observation }}{{ observation }}", "bad form\noutbad form\nout", ()),
        ("{{ observation | length }}", "12", ()),
        ("{% if 'bad' in observation %}{{ observation }}!{% endif %}", "bad form\nout!", ()),
    ],
)
def test_a_template_around_an_observation_keeps_its_warnings(
    template: str, text: str, warnings: tuple[str, ...]
) -> None:
    found = filled_around(template, "observation", SAID, turns_left=3)
    assert found.text == text
    assert tuple(found.text[start:end] for start, end in found.warnings) == warnings


def test_an_output_cannot_pretend_where_the_warning_is() -> None:
    said = MarkedText(text="\ufdd4w\ufdd4 {{ observation }}", warnings=((1, 2),))
    found = filled_around("<{{ observation }}>", "observation", said)
    assert (found.text, found.warnings) == (f"<{said.text}>", ((2, 3),))


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "glm4"])
def test_a_warning_inserted_into_the_policy_s_message_has_its_kind(name: str, allowed: bool, tmp_path: Path) -> None:
    """Inline turns: the policy's message grows, and only what is new of it is inserted."""
    tokenizer = ChatTokenizer(FAMILIES[name].write(tmp_path))
    core = Session(SessionSpec(session_id=SessionId("r"), marks_warnings=allowed), opened_at=0.0)
    played = Rig(core, TemplateRenderer(tokenizer, token_kinds=True), tokenize=tokenizer.encode)
    question = ChatMessage(role="user", content="Who?")
    said = played.turn(asks(*parsed([question])), "<search> </search>").text
    parts = [(said, False), ("\nEmpty query. ", True), ("Found: bog\n", False)]
    for _ in range(2):
        ends = list(accumulate(len(text) for text, _ in parts))
        warnings = tuple((end - len(text), end) for end, (text, warns) in zip(ends, parts, strict=True) if warns)
        message = ChatMessage(role="assistant", content="".join(text for text, _ in parts), warnings=warnings)
        body = {"messages": [question.to_json(), message.to_json()], "continue_final_message": True}
        turn = ChatCompletions().parse(json.dumps(body).encode(), {}).turn
        parts += [(played.turn(turn, "so").text, False), ("\nAgain: ", True), ("go\n", False)]
    trajectory = report_of(core).trajectory
    assert trajectory is not None
    [row] = trajectory.rows
    expected = [(WARNED, "\nEmpty query. "), (SEEN, "Found: bog\n"), (WARNED, "\nAgain: "), (SEEN, "go\n")]
    if not allowed:
        expected = [(SEEN, "\nEmpty query. Found: bog\n"), (SEEN, "\nAgain: go\n")]
    assert observed(row, tokenizer) == expected
