"""Kinds of tokens: labels by hand on five templates, and their way from the renderer to stored rows."""

# ruff: noqa: RUF001 - DeepSeek's tokens are spelled with full-width bars
from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.buffer.errors import CodecError
from headrace.buffer.trajectories import codec
from headrace.buffer.trajectories.row_limits import RowLimits
from headrace.buffer.trajectories.token_kinds import TokenKind, from_runs, to_runs
from headrace.buffer.trajectories.types import Row, Trajectory
from headrace.policies.errors import TokenizerInvalid
from headrace.policies.tokens.tokenizer import ChatTokenizer
from headrace.serve.gateway.capture.rows import report_of
from headrace.serve.gateway.capture.session import Session, SessionId, SessionSpec
from headrace.serve.gateway.capture.session_log import Opened, SessionLog
from headrace.serve.gateway.conversation import Message, Role, ToolResult, ToolSpec, say
from headrace.serve.gateway.http.codec import read_report, write_report
from headrace.serve.gateway.rendering.render import Renderer
from headrace.serve.gateway.rendering.template_renderer import TemplateRenderer, load_renderer
from support import chat_templates as templates
from support.objective_cases import make_row
from support.session_rig import ByteChat, Rig, asks, call, echo, results, user

GOLDEN = Path(__file__).parents[1] / "golden" / "trajectory.bin"
BASH = (ToolSpec("bash"),)
BRIEF, TASK = "Be brief.", "Repair it."
OUTPUT, WHY = ' "a" <|im_end|> é漢\n', "\n\nWhy?"

ASKED, FRAME, SEEN, DONE = TokenKind.PROMPT, TokenKind.SCAFFOLD, TokenKind.OBSERVATION, TokenKind.SAMPLED
SAID = ('CALL bash {"command": "ls"}\n', "Done.", "So.")
_TOOL = '{"type": "function", "function": {"name": "bash", "description": "", "parameters": {}}}'
_IM_TOOLS = (
    f"\n# Tools\n<tools>\n{_TOOL}\n</tools>\nCall one as <tool_call>\n"
    '{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|><|im_start|>user\n'
)
_IM = [
    # A line end of the template after a body is in one token with it, if the tokenizer joins them.
    (FRAME, "<|im_start|>system\n"),
    (ASKED, "Be brief.\n"),
    (FRAME, _IM_TOOLS),
    (ASKED, TASK),
    (FRAME, "<|im_end|>\n<|im_start|>assistant\n"),
    (DONE, f"{SAID[0]}<|im_end|>"),
    (FRAME, "\n<|im_start|>user\n<tool_response>\n"),
    (SEEN, ' "a" < |im_end|> é漢\n\n'),
    (FRAME, "</tool_response><|im_end|>\n<|im_start|>assistant\n"),
    (DONE, f"{SAID[1]}<|im_end|>"),
    (FRAME, "\n<|im_start|>user"),
    (SEEN, "\n\n\nWhy?"),
    (FRAME, "<|im_end|>\n<|im_start|>assistant\n"),
    (DONE, f"{SAID[2]}<|im_end|>"),
]
_LLAMA_TOOL = (
    '{\n    "type": "function",\n    "function": {\n        "name": "bash",\n        "description": "",\n'
    '        "parameters": {}\n    }\n}\n\n'
)
LABELS = {
    "qwen3": _IM,
    "qwen2.5": _IM,
    "llama3.1": [
        # It trims messages, and writes results as JSON: the escaped body is the observation, its quotes are not.
        (
            FRAME,
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\nToday Date: DAY\n\n",
        ),
        (ASKED, BRIEF),
        (
            FRAME,
            "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nThese functions may be called:\n\n" + _LLAMA_TOOL,
        ),
        (ASKED, TASK),
        (FRAME, "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
        (DONE, f"{SAID[0]}<|eot_id|>"),
        (FRAME, '<|start_header_id|>ipython<|end_header_id|>\n\n"'),
        (SEEN, ' \\"a\\" <|im_end|> é漢\\n'),
        (FRAME, '"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'),
        (DONE, f"{SAID[1]}<|eot_id|>"),
        (FRAME, "<|start_header_id|>user<|end_header_id|>\n\n"),
        (SEEN, "Why?"),
        (FRAME, "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
        (DONE, f"{SAID[2]}<|eot_id|>"),
    ],
    "glm4": [
        (FRAME, f"[gMASK]<sop><|system|>\n# Tools\n{_TOOL}\n<|system|>\n"),
        (ASKED, BRIEF),
        (FRAME, "<|user|>\n"),
        (ASKED, TASK),
        (FRAME, "<|assistant|>"),
        (DONE, f"{SAID[0]}<|endoftext|>"),
        (FRAME, "<|observation|>\n<tool_response>\n"),
        (SEEN, ' "a" <|im_end|> é漢\n\n'),
        (FRAME, "</tool_response><|assistant|>"),
        (DONE, f"{SAID[1]}<|endoftext|>"),
        (FRAME, "<|user|>"),
        (SEEN, "\n\n\nWhy?"),
        (FRAME, "<|assistant|>"),
        (DONE, f"{SAID[2]}<|endoftext|>"),
    ],
    "deepseek-v3": [
        (FRAME, "<｜begin▁of▁sentence｜>"),
        (ASKED, "Be brief.\n"),
        (FRAME, f"\n## Tools\n\n```json\n{_TOOL}\n```<｜User｜>"),
        (ASKED, TASK),
        (FRAME, "<｜Assistant｜>"),
        (DONE, f"{SAID[0]}<｜end▁of▁sentence｜>"),
        (FRAME, "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>"),
        (SEEN, ' "a" <|im_end|> é漢\n'),
        (FRAME, "<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"),
        (DONE, f"{SAID[1]}<｜end▁of▁sentence｜>"),
        (FRAME, "<｜User｜>"),
        (SEEN, "\n\nWhy?"),
        (FRAME, "<｜Assistant｜>"),
        (DONE, f"{SAID[2]}<｜end▁of▁sentence｜>"),
    ],
}
"""Rows of one conversation, labelled by hand: each piece of text with the kind of its tokens."""
FAMILIES = {family.name: family for family in templates.FAMILIES}


def marking(family: templates.Family, folder: Path) -> tuple[TemplateRenderer, ChatTokenizer]:
    tokenizer = ChatTokenizer(family.write(folder))
    return TemplateRenderer(tokenizer, token_kinds=True), tokenizer


def rig(renderer: Renderer, tokenizer: ChatTokenizer | None = None) -> Rig:
    core = Session(SessionSpec(session_id=SessionId("rollout-1")), opened_at=0.0)
    return Rig(core, renderer, tokenize=tokenizer.encode) if tokenizer else Rig(core, renderer)


def play(played: Rig) -> list[Row]:
    """A call, its result, an answer, and a question of the user."""
    talk = [say(Role.SYSTEM, BRIEF), user(TASK)]
    called = played.turn(asks(*talk, tools=BASH), call("bash", command="ls"))
    talk += [echo(called), results((called.calls[0].id, OUTPUT))]
    talk += [echo(played.turn(asks(*talk, tools=BASH), SAID[1])), user(WHY)]
    played.turn(asks(*talk, tools=BASH), SAID[2])
    trajectory = report_of(played.core).trajectory
    assert trajectory is not None
    return list(trajectory.rows)


def pieces(row: Row, renderer: Renderer) -> list[tuple[TokenKind, str]]:
    assert row.kinds_T is not None
    found, at = [], 0
    for kind, length in to_runs(row.kinds_T):
        found.append((TokenKind(kind), renderer.decode(row.tokens_T[at : at + length].tolist())))
        at += length
    assert at == len(row.tokens_T)
    return found


@pytest.mark.parametrize("name", LABELS)
def test_kinds_equal_labels_by_hand(name: str, tmp_path: Path) -> None:
    renderer, tokenizer = marking(FAMILIES[name], tmp_path)
    [row] = play(rig(renderer, tokenizer))
    found = pieces(row, renderer)
    if name == "llama3.1":
        opening = found[0][1]
        found[0] = (FRAME, f"{opening[: opening.index('Date: ') + 6]}DAY\n\n")
    assert found == LABELS[name]
    assert row.kinds_T is not None
    assert np.array_equal(row.kinds_T == DONE, row.loss_mask_T)


def test_a_history_that_is_rendered_again_has_each_observation_once(tmp_path: Path) -> None:
    """F16."""
    renderer, tokenizer = marking(templates.DEEPSEEK3_LEAKY, tmp_path)
    assert not renderer.bridges
    rows = play(rig(renderer, tokenizer))
    observed = [[text for kind, text in pieces(row, renderer) if kind is SEEN] for row in rows]
    assert observed == [[], [OUTPUT], ["\n\nWhy?"]]


def test_rows_that_share_an_observation_have_it_once() -> None:
    played = rig(ByteChat())
    first = played.turn(asks(user("task")), "one")
    shared = [user("task"), echo(first), user("seen")]
    second = played.turn(asks(*shared), "two")
    other = played.turn(asks(*shared, max_tokens=9), "three")
    played.turn(asks(*shared, echo(second), user("next, longer")), "four")
    played.turn(asks(*shared, echo(other), user("other")), "five")
    trajectory = report_of(played.core).trajectory
    assert trajectory is not None
    observed = [
        bytes(row.tokens_T[row.kinds_T == SEEN].tolist()).decode() for row in trajectory.rows if row.kinds_T is not None
    ]
    assert sorted(observed) == ["other", "seennext, longer"]


def test_examples_of_answers_in_the_first_request_are_prompt() -> None:
    played = rig(ByteChat())
    played.turn(asks(user("2+2"), say(Role.ASSISTANT, "4"), user("3+3")), "6")
    trajectory = report_of(played.core).trajectory
    assert trajectory is not None
    [row] = trajectory.rows
    assert row.kinds_T is not None
    assert bytes(row.tokens_T[row.kinds_T == ASKED].tolist()) == b"2+23+3"
    assert not (row.kinds_T == SEEN).any()


def test_a_template_that_hides_bodies_is_refused_if_kinds_are_asked_for(tmp_path: Path) -> None:
    hidden = replace(
        templates.QWEN3,
        template=templates.QWEN3_TEMPLATE.replace(
            "<tool_response>\\n' ~ message.content",
            "<tool_response>\\n' ~ (message.content | tojson(ensure_ascii=true))",
        ),
    )
    renderer, tokenizer = marking(hidden, tmp_path)
    assert not renderer.marks_bodies
    [row] = play(rig(renderer, tokenizer))
    assert row.kinds_T is None
    with pytest.raises(TokenizerInvalid, match=r"rewrites the bodies of messages.* set learner.observation_coef to 0"):
        load_renderer(tmp_path, token_kinds=True)
    assert not load_renderer(tmp_path).marks_bodies


@pytest.mark.parametrize("text", ["\ufdd0", "a\ufdd1b\ufdd2c", "\ufdd2", "\ufdd3a\ufdd2"])
def test_marks_in_a_body_leave_the_row_without_kinds(text: str, tmp_path: Path) -> None:
    renderer, _ = marking(templates.QWEN3, tmp_path)
    messages = [Message(Role.TOOL, (ToolResult("c1", text),))]
    assert renderer.bridge_kinds(renderer.bridge(0, (), messages), (), messages) is None


def test_kinds_are_not_computed_unless_they_are_asked_for(tmp_path: Path) -> None:
    folder = templates.QWEN3.write(tmp_path)
    [row] = play(rig(load_renderer(folder), ChatTokenizer(folder)))
    assert row.kinds_T is None


def test_a_session_restored_from_its_log_has_the_same_kinds(tmp_path: Path) -> None:
    played = rig(ByteChat())
    rows = play(played)
    log = SessionLog(tmp_path)
    log.open(Opened(spec=played.core.spec, token="t", opened_at=0.0))
    for event in played.events:
        log.append(played.core.spec.session_id, event)
    trajectory = report_of(log.load(played.core.spec.session_id)).trajectory
    assert trajectory is not None
    for row, restored in zip(rows, trajectory.rows, strict=True):
        assert row.kinds_T is not None
        assert restored.kinds_T is not None
        assert np.array_equal(row.kinds_T, restored.kinds_T)


runs = st.lists(st.tuples(st.sampled_from(TokenKind), st.integers(1, 5)), max_size=6)


@given(runs=runs, others=st.booleans())
def test_kinds_survive_pickles_storage_and_the_gateways_wire(runs: list[tuple[int, int]], others: bool) -> None:
    kinds = from_runs(runs)
    assert np.array_equal(from_runs(to_runs(kinds)), kinds)
    row = replace(make_row([1] * len(kinds), [False] * len(kinds)), kinds_T=kinds)
    rows = (row, make_row([1, 2], [False, True])) if others else (row,)
    trajectory = Trajectory(rows=rows, temperature=1.0)
    codec.refuse_unstorable(trajectory)
    stored = codec.encode(trajectory)
    report = replace(report_of(Session(SessionSpec(session_id=SessionId("s")), 0.0)), trajectory=trajectory)
    wire = read_report(json.loads(json.dumps(write_report(report)))).trajectory
    assert wire is not None
    for copy in (pickle.loads(pickle.dumps(trajectory)), codec.decode(stored), wire):
        assert np.array_equal(copy.rows[0].kinds_T, kinds)
        assert copy.rows[0].kinds_T.dtype == np.uint8
        assert [one.kinds_T for one in copy.rows[1:]] == [None] * (len(rows) - 1)
    assert codec.encode(codec.decode(stored)) == stored


def test_a_stored_trajectory_with_kinds_stays_readable() -> None:
    trajectory = codec.decode(GOLDEN.read_bytes())
    with_kinds, without = trajectory.rows
    assert with_kinds.tokens_T.tolist() == [5, 6, 7, 8, 9, 10]
    assert with_kinds.loss_mask_T.tolist() == [False, False, True, False, False, True]
    assert with_kinds.kinds_T is not None
    assert with_kinds.kinds_T.tolist() == [FRAME, ASKED, DONE, SEEN, TokenKind.WARNING, DONE]
    assert without.kinds_T is None
    assert trajectory.temperature == 0.75


@pytest.mark.parametrize("kinds", [[0, 1], [0, 1, 9], [[0, 1, 2]]])
def test_kinds_that_do_not_fit_their_row_are_refused(kinds: list[int]) -> None:
    row = replace(make_row([1, 2, 3], [False, True, True]), kinds_T=np.array(kinds, dtype=np.uint8))
    with pytest.raises(CodecError):
        codec.refuse_unstorable(Trajectory(rows=(row,), temperature=1.0))


def test_a_learner_refuses_kinds_of_another_length() -> None:
    row = replace(make_row([1, 2, 3], [False, True, True]), kinds_T=np.zeros(2, dtype=np.uint8))
    limits = RowLimits(vocabulary=11, tokens=100)
    assert "kinds differ in length" in limits.violation(Trajectory(rows=(row,), temperature=1.0))


def test_damaged_runs_of_kinds_are_refused() -> None:
    row = replace(make_row([1, 2], [False, True]), kinds_T=np.array([1, 4], dtype=np.uint8))
    plain = codec.zstandard.ZstdDecompressor().decompress(codec.encode(Trajectory(rows=(row,), temperature=1.0)))
    damaged = plain[:-4] + (2**31).to_bytes(4, "little")
    with pytest.raises(CodecError, match="do not cover its tokens"):
        codec.decode(codec.zstandard.ZstdCompressor().compress(damaged))
