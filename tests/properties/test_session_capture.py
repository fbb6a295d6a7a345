"""For any sampled output and any echo: rows are prompt, output, bridge, output, token for token, and each sampled token
is trained once or masked for a reason."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.policies.engine import FinishReason
from headrace.policies.tokens.tokenizer import ChatTokenizer
from headrace.serve.gateway.capture.events import Delivered, Replayed
from headrace.serve.gateway.capture.rows import Masked, SessionReport, report_of
from headrace.serve.gateway.capture.session import Budgets, Sampling, Session, SessionId, SessionSpec
from headrace.serve.gateway.conversation import Message, Reasoning, Role, ToolCall, ToolSpec, TurnAnswer, say
from headrace.serve.gateway.http import codec
from headrace.serve.gateway.rendering.render import Renderer
from headrace.serve.gateway.rendering.template_renderer import load_renderer
from support.chat_templates import DEEPSEEK3, GLM4, LLAMA31, QWEN3, QWEN3_THINKING, QWEN25
from support.session_rig import END, ByteChat, Rig, asks, results, user

ROOM = Budgets(max_turns=1000, max_tokens_per_turn=10_000, max_context_tokens=1_000_000, wall_s=1e9)
TOOLS = (ToolSpec("bash"), ToolSpec("edit"))
WORDS = st.text(
    alphabet=st.characters(codec="utf-8", exclude_characters="\r\n\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"), max_size=12
)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["command", "description", "path", "new_string"]), WORDS | st.integers() | st.booleans(), max_size=3
)
CALLS = st.builds(lambda name, given: f"CALL {name} {json.dumps(given)}", st.sampled_from(["bash", "edit"]), ARGUMENTS)
LINES = st.lists(CALLS | WORDS | WORDS.map("THINK {}".format), min_size=1, max_size=4)
SAMPLED = st.tuples(LINES.map("\n".join), st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
"""Text with calls and reasoning, and how it ended."""


def rig(sampling: Sampling | None = None, *, bridges: bool = True) -> Rig:
    spec = SessionSpec(session_id=SessionId("rollout-1"), budgets=ROOM, sampling=sampling or Sampling())
    return Rig(Session(spec, opened_at=0.0), ByteChat(bridges=bridges))


def check(played: Rig) -> SessionReport:
    """Check the invariants of every report."""
    report = report_of(played.core)
    rows = report.trajectory.rows if report.trajectory else ()
    assert report.sampled_tokens == report.trained_tokens + sum(report.masked.values())
    assert report.sampled_tokens == sum(map(len, played.outputs))
    assert set(report.masked) <= {reason.value for reason in Masked}
    assert report.trained_tokens == sum(int(row.loss_mask_T.sum()) for row in rows)
    seen = [played.prompts[i] + played.outputs[i] for i in range(len(played.outputs))]
    for row in rows:
        assert row.tokens_T.tolist() in seen, "a row is what an engine was sent and answered"
        assert not row.logprobs_T[~row.loss_mask_T].any()
        covered = np.zeros(len(row.tokens_T), dtype=bool)
        for span in row.versions:
            assert not covered[span.start : span.end].any()
            covered[span.start : span.end] = True
        assert np.array_equal(covered, row.loss_mask_T)
    return report


CLAUDE_CODE = "claude-cli/2.1.281 (external, cli)"


def rewritten(draw: st.DrawFn, call: ToolCall) -> ToolCall:
    """The same call as Claude Code writes it back: keys moved, defaults added, types coerced, line ends trimmed."""
    given: dict[str, Any] = json.loads(call.arguments)
    kinds = draw(st.sets(st.sampled_from(["order", "default", "types", "blanks", "compact"])))
    if "order" in kinds:
        given = dict(reversed(given.items()))
    if "default" in kinds:
        given["replace_all"] = False
    if "types" in kinds:
        given = {key: json.dumps(value) if isinstance(value, int) else value for key, value in given.items()}
    if "blanks" in kinds:
        given = {key: value.rstrip(" \t") if isinstance(value, str) else value for key, value in given.items()}
    separators = (",", ":") if "compact" in kinds else None
    return ToolCall(call.id, call.name, json.dumps(given, separators=separators, ensure_ascii="compact" in kinds))


@st.composite
def echoes(draw: st.DrawFn, answer: TurnAnswer) -> Message:
    """The answer as Claude Code sends it back, with and without its changes."""
    blocks: list[Any] = []
    has_calls = any(isinstance(block, ToolCall) for block in answer.blocks)
    for block in answer.blocks:
        if isinstance(block, Reasoning):
            kept = draw(st.sampled_from(["dropped", "kept", "summary"]))
            blocks += [] if kept == "dropped" else [Reasoning("short" if kept == "summary" else block.text)]
        elif isinstance(block, ToolCall):
            blocks.append(rewritten(draw, block))
        elif block.text.strip() or not draw(st.booleans()):
            blocks.append(block)
    if has_calls and draw(st.booleans()):
        blocks.sort(key=lambda block: isinstance(block, ToolCall))
    return Message(Role.ASSISTANT, tuple(blocks))


@st.composite
def following(draw: st.DrawFn, answer: TurnAnswer, number: int) -> tuple[Message, ...]:
    """What an agent says after a turn: the results of its calls in some order, perhaps twice, or words."""
    calls = [block.id for block in answer.blocks if isinstance(block, ToolCall)]
    words = (user(f"go on {number}"), *([say(Role.SYSTEM, "a reminder")] if draw(st.booleans()) else []))
    if not calls:
        return words
    given = draw(st.permutations([(call_id, f"result {number} {call_id}") for call_id in calls]))
    twice = given[:1] if draw(st.booleans()) else []
    return (results(*given, *twice), *(words if draw(st.booleans()) else ()))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_mutated_echo_never_loses_a_token_or_splits_a_lineage(data: st.DataObject) -> None:
    """F16."""
    played = rig()
    history: tuple[Message, ...] = (say(Role.SYSTEM, "s"), user("task"))
    for number in range(data.draw(st.integers(1, 6))):
        text, finish = data.draw(SAMPLED)
        answer = played.turn(asks(*history, tools=TOOLS, client=CLAUDE_CODE), f"{number} {text}", finish=finish)
        # Every request sends the whole history again; what differs from last time is the last echo.
        history += (data.draw(echoes(answer)), *data.draw(following(answer, number)))
    for (prompt, output), (after, _) in pairwise(zip(played.prompts, played.outputs, strict=True)):
        assert after[: len(prompt) + len(output)] == prompt + output
    report = check(played)
    assert report.masked == {}
    assert len(report.lineages) == 1
    assert report.rerendered == 0


@pytest.fixture(scope="module", params=[QWEN3, QWEN3_THINKING, QWEN25, LLAMA31, GLM4, DEEPSEEK3], ids=lambda f: f.name)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Renderer, ChatTokenizer]:
    """A renderer and the tokenizer under it, in the shape of a family."""
    folder: Path = request.param.write(tmp_path_factory.mktemp(request.param.name))
    return load_renderer(folder), ChatTokenizer(folder)


@pytest.mark.whole(but_first=True)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_mutated_echo_loses_no_token_under_any_model_familys_template(
    model: tuple[Renderer, ChatTokenizer], data: st.DataObject
) -> None:
    renderer, tokenizer = model
    assert renderer.bridges
    spec = SessionSpec(session_id=SessionId("rollout-1"), budgets=ROOM)
    played = Rig(Session(spec, opened_at=0.0), renderer, tokenize=tokenizer.encode)
    history: tuple[Message, ...] = (say(Role.SYSTEM, "s"), user("task"))
    for number in range(data.draw(st.integers(1, 4))):
        text, finish = data.draw(SAMPLED)
        answer = played.turn(asks(*history, tools=TOOLS, client=CLAUDE_CODE), f"{number} {text}", finish=finish)
        history += (data.draw(echoes(answer)), *data.draw(following(answer, number)))
    for (prompt, output), (after, _) in pairwise(zip(played.prompts, played.outputs, strict=True)):
        assert after[: len(prompt) + len(output)] == prompt + output
        joint = after[len(prompt) + len(output) - 1 : len(prompt) + len(output) + 1]
        assert not (joint[0] == joint[1] and joint[0] in renderer.stop_ids), "a turn is closed once"
    report = check(played)
    assert (report.masked, len(report.lineages), report.rerendered) == ({}, 1, 0)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_token_counts_add_up_after_any_change_to_the_history(data: st.DataObject) -> None:
    played = rig(bridges=data.draw(st.booleans()))
    histories: list[tuple[Message, ...]] = [(user("task"),)]
    for number in range(data.draw(st.integers(1, 8))):
        history = data.draw(st.sampled_from(histories))
        kind = data.draw(st.sampled_from(["turn", "turn", "turn", "cut", "lost", "edited", "agent", "side"]))
        agent = "child" if kind == "agent" else ""
        if kind == "edited":
            history = (user(f"edited {number}"), *history[1:])
        request = asks(*history, tools=() if kind == "side" else TOOLS, agent=agent, client=CLAUDE_CODE)
        text, finish = data.draw(SAMPLED)
        if kind == "cut":
            ids = [*f"{number} {text}".encode()]
            played.prompts.append(list(played.plan(request).prompt_ids))
            played.outputs.append(ids)
            played.cut(request, ids)
            continue
        answer = played.turn(request, f"{number} {text}", finish=finish, deliver=kind != "lost")
        histories.append((*history, data.draw(echoes(answer)), *data.draw(following(answer, number))))
    report = check(played)
    assert report.turns + sum(node.status == "aborted" for node in played.core.trie.sampled) == len(played.outputs)

    again = Session(played.core.spec, 0.0)
    for event in played.events:
        again.apply(event)
    assert codec.write_report(report_of(again)) == codec.write_report(report), "the events are the session"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_repeated_request_gets_the_same_tokens_as_long_as_its_answer_may_have_been_lost(data: st.DataObject) -> None:
    played = rig()
    history: tuple[Message, ...] = (user("task"),)
    for number in range(data.draw(st.integers(1, 4))):
        request = asks(*history, tools=TOOLS, client=CLAUDE_CODE)
        text, finish = data.draw(SAMPLED)
        is_sent = data.draw(st.booleans())
        answer = played.turn(request, f"{number} {text}", finish=finish, deliver=is_sent)
        for _ in range(data.draw(st.integers(0, 3))):
            found = played.core.replay(played.core.match(request), request, repeats=is_sent)
            assert found is not None
            assert found.answer == answer
            played.record(Replayed(turn_id=answer.turn_id))
            played.record(Delivered(turn_id=answer.turn_id))
            is_sent = True
        history += (data.draw(echoes(answer)), *data.draw(following(answer, number)))
    report = check(played)
    assert len(report.lineages) <= 1


@settings(max_examples=30, deadline=None)
@given(data=st.data(), temperature=st.sampled_from([0.0, 0.7, 1.0]), cut=st.integers(1, 50))
def test_a_report_survives_encoding_and_decoding(data: st.DataObject, temperature: float, cut: int) -> None:
    played = rig(Sampling(temperature=temperature))
    text, finish = data.draw(SAMPLED)
    played.turn(asks(user("x")), text, finish=finish)
    played.cut(asks(user("y")), [END] * cut)
    report = report_of(played.core)
    again = codec.read_report(json.loads(json.dumps(codec.write_report(report))))
    assert again.sampled_tokens == again.trained_tokens + sum(again.masked.values())
    assert (again.trajectory is None) == (report.trajectory is None)
    for name in ("turns", "masked", "drift", "lineages", "failures", "exhausted", "lost_calls", "rerendered"):
        assert getattr(again, name) == getattr(report, name)
    if again.trajectory and report.trajectory:
        for row, copy in zip(report.trajectory.rows, again.trajectory.rows, strict=True):
            assert np.array_equal(row.tokens_T, copy.tokens_T)
            assert np.array_equal(row.loss_mask_T, copy.loss_mask_T)
            assert np.array_equal(row.logprobs_T, copy.logprobs_T)
            assert row.versions == copy.versions
