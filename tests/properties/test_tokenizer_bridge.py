"""Rendering is prefix-stable, bridges are suffixes, text survives the ids, and contents stay contents."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.policies.models.tiny import PIECES
from headrace.policies.tokens.added_tokens import pattern_of
from headrace.policies.tokens.pieces import PieceEncoder
from headrace.policies.tokens.tokenizer import ChatTokenizer
from headrace.serve.gateway.conversation import Message, Reasoning, Role, Text, ToolCall, ToolResult, ToolSpec, say
from headrace.serve.gateway.rendering.render import Renderer
from headrace.serve.gateway.rendering.template_renderer import load_renderer
from support import chat_templates as templates

TOKENIZER = ChatTokenizer(Path(__file__).resolve().parents[2] / "scripts" / "models" / "tiny")
BRIDGING = ("qwen3", "qwen3-thinking", "qwen2.5", "llama3.1", "glm4", "deepseek-v3", "strict")
EXACT = ("qwen2.5", "llama3.1", "glm4", "deepseek-v3")
"""Families that show a turn as it was sampled for ever."""
SPELLINGS = (
    "<|im_end|>", "<|im_start|>", "<|eot_id|>", "<|user|>", "<|observation|>", "</s>", "[INST]", "[gMASK]",
    "<｜User｜>", "<｜end▁of▁sentence｜>", "<｜tool▁output▁begin｜>",  # noqa: RUF001
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
)  # fmt: skip


@dataclass(frozen=True)
class Said:
    role: str
    content: str


texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.lists(st.sampled_from((*PIECES, "<|end|>", "<|user|>", " ", "\n")), max_size=8).map("".join),
)
messages = st.lists(
    st.builds(Said, st.sampled_from(["system", "user", "assistant", "tool"]), texts), min_size=1, max_size=6
)
observations = st.lists(st.builds(Said, st.sampled_from(["user", "tool"]), texts), min_size=1, max_size=3)


@given(text=texts)
def test_text_round_trips_through_ids(text: str) -> None:
    plain = text.replace("<|", "< |")
    ids = TOKENIZER.encode(plain)
    assert all(0 <= token < TOKENIZER.vocab_size for token in ids)
    assert TOKENIZER.decode(ids) == plain


@given(talk=messages, cut=st.integers(0, 6))
def test_rendering_more_messages_only_appends(talk: list[Said], cut: int) -> None:
    whole = TOKENIZER.text(talk, add_generation_prompt=True)
    assert whole.startswith(TOKENIZER.text(talk[:cut], add_generation_prompt=False))


@given(talk=messages, answer=texts, follows=observations, closed=st.booleans())
def test_the_next_prompt_consists_of_history_output_and_bridge(
    talk: list[Said], answer: str, follows: list[Said], closed: bool
) -> None:
    """With or without a sampled end of turn, the appended ids are those of the whole conversation."""
    plain = answer.replace("<|", "< |")
    output = TOKENIZER.encode(plain) + ((TOKENIZER.eos_id,) if closed else ())
    last = output[-1] if output else TOKENIZER.encode("<|assistant|>")[0]
    appended = TOKENIZER.render(talk) + output + TOKENIZER.bridge(last, follows)
    assert appended == TOKENIZER.render([*talk, Said("assistant", plain), *follows])


@given(follows=observations, sampled=st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=6))
def test_the_bridge_depends_only_on_how_the_turn_ended(follows: list[Said], sampled: list[int]) -> None:
    last = sampled[-1] if sampled else 0
    closed, cut = TOKENIZER.bridge(TOKENIZER.eos_id, follows), TOKENIZER.bridge(0, follows)
    assert cut == (TOKENIZER.eos_id, *closed)
    assert TOKENIZER.bridge(last, follows) == (closed if last in TOKENIZER.stop_ids else cut)


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
contents = st.lists(st.one_of(words, st.sampled_from((*SPELLINGS, "\n", " "))), max_size=4).map("".join)
safe = st.from_regex(r"[a-z][a-z ,.\n]{0,30}[a-z.]", fullmatch=True)
"""What the policy says where its tokens must be those of its text: blanks at the edges belong to the template."""
values = st.one_of(safe, st.integers(-9, 99), st.booleans(), st.lists(safe, max_size=2))
tool_specs = st.builds(
    ToolSpec,
    st.sampled_from(["bash", "edit"]),
    contents,
    st.fixed_dictionaries({"properties": st.dictionaries(contents, contents, max_size=2)}),
)


@st.composite
def called(draw: st.DrawFn, *, at_most: int) -> tuple[ToolCall, ...]:
    count = draw(st.integers(0, at_most))
    arguments = draw(st.lists(st.dictionaries(safe, values, max_size=2), min_size=count, max_size=count))
    names = draw(st.lists(st.sampled_from(["bash", "edit"]), min_size=count, max_size=count))
    return tuple(
        ToolCall(f"call_{n}", name, json.dumps(args))
        for n, (name, args) in enumerate(zip(names, arguments, strict=True))
    )


@st.composite
def rounds(draw: st.DrawFn, *, at_most: int = 2) -> list[list[Message]]:
    """Rounds of a turn of the policy and what follows it; the turn stands first."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        calls = draw(called(at_most=at_most))
        text = "" if calls and at_most == 1 else draw(safe)
        results = tuple(ToolResult(call.id, draw(contents)) for call in calls)
        follows = [Message(Role.TOOL, results)] if results else []
        further = draw(st.lists(st.builds(say, st.sampled_from([Role.USER, Role.SYSTEM]), contents), max_size=2))
        if not follows and not further:
            further = [say(Role.USER, draw(contents))]
        blocks = (*((Text(text),) if text else ()), *calls)
        found.append([Message(Role.ASSISTANT, blocks), *follows, *further])
    return found


@st.composite
def heads(draw: st.DrawFn) -> list[Message]:
    system = draw(st.lists(st.builds(say, st.just(Role.SYSTEM), contents), max_size=2))
    return [*system, say(Role.USER, draw(contents))]


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    return {
        family.name: load_renderer(family.write(tmp_path_factory.mktemp(family.name))) for family in templates.BRIDGING
    }


def family_of(name: str) -> Any:
    return next(family for family in templates.FAMILIES if family.name == name)


modest = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.whole(but_first=True)
@pytest.mark.parametrize("name", EXACT)
@modest
@given(data=st.data())
def test_prompt_output_and_bridge_form_the_whole_conversation(
    renderers: dict[str, Renderer], name: str, data: st.DataObject
) -> None:
    renderer, family = renderers[name], family_of(name)
    head, tools = data.draw(heads()), data.draw(st.lists(tool_specs, max_size=2))
    spelled = {renderer.decode([stop]): stop for stop in renderer.stop_ids}
    talk, prompt = list(head), renderer.render(head, tools)
    for turn, *follows in data.draw(rounds(at_most=1 if name == "llama3.1" else 2)):
        end = (family.end_of_calls if turn.calls else family.end_of_turn) or family.eos
        prompt.extend(renderer._tokenizer.encode(family.spell(turn)))  # type: ignore[attr-defined]
        if data.draw(st.booleans()):
            prompt.append(spelled[end])
        prompt.extend(renderer.bridge(prompt[-1], turn.calls, follows))
        talk.extend([turn, *follows])
        assert prompt == renderer.render(talk, tools)


@pytest.mark.whole(but_first=True)
@pytest.mark.parametrize("name", BRIDGING)
@modest
@given(data=st.data())
def test_a_bridge_is_a_suffix_of_the_whole_conversation(
    renderers: dict[str, Renderer], name: str, data: st.DataObject
) -> None:
    """Also where earlier turns are rewritten: what comes after the last turn is not."""
    renderer = renderers[name]
    talk, tools = data.draw(heads()), data.draw(st.lists(tool_specs, max_size=2))
    for turn, *follows in data.draw(rounds()):
        reasoned = Message(Role.ASSISTANT, (Reasoning(data.draw(safe)), *turn.blocks))
        talk.extend([reasoned if data.draw(st.booleans()) else turn, *follows])
        whole, cut = renderer.render(talk, tools), renderer.bridge(0, turn.calls, follows)
        assert whole[-len(cut) :] == cut
        closed = [renderer.bridge(stop, turn.calls, follows) for stop in renderer.stop_ids]
        assert all(cut[-len(bridge) :] == bridge and len(cut) - len(bridge) <= 1 for bridge in closed)
        assert any(len(bridge) < len(cut) for bridge in closed)


@pytest.mark.whole(but_first=True)
@pytest.mark.parametrize("name", BRIDGING)
@modest
@given(data=st.data())
def test_the_control_tokens_in_a_prompt_depend_only_on_its_structure(
    renderers: dict[str, Renderer], name: str, data: st.DataObject
) -> None:
    """Whatever the contents spell, the control tokens are those of the same conversation about nothing."""
    renderer, family = renderers[name], family_of(name)
    controls = {text for text in (*family.special, *family.plain) if text in family.special or text[1] == "｜"}  # noqa: RUF001
    talk = [*data.draw(heads()), *(message for part in data.draw(rounds()) for message in part)]

    def skeleton(messages: list[Message]) -> list[str]:
        return [piece for token in renderer.render(messages, []) if (piece := renderer.decode([token])) in controls]

    def about_nothing(message: Message) -> Message:
        blocks = (
            ToolResult(block.call_id, "x")
            if isinstance(block, ToolResult)
            else Text("x")
            if isinstance(block, Text)
            else block
            for block in message.blocks
        )
        return Message(message.role, tuple(blocks))

    assert skeleton(talk) == skeleton([about_nothing(message) for message in talk])


repeated = st.lists(
    st.tuples(
        st.one_of(words, st.sampled_from((*SPELLINGS, "\n", "a b", "x\ny", "it's\n'll", ".\n/", "1\n2"))),
        st.integers(1, 400),
    ),
    max_size=12,
)


@pytest.mark.whole(but_first=True)
@pytest.mark.parametrize("name", BRIDGING)
@modest
@given(parts=repeated)
def test_encoding_in_pieces_gives_the_same_ids_as_encoding_the_whole(
    renderers: dict[str, Renderer], name: str, parts: list[tuple[str, int]]
) -> None:
    text = "".join(part * times for part, times in parts)
    encoder: PieceEncoder = renderers[name]._tokenizer._pieces  # type: ignore[attr-defined]
    whole = encoder._tokenizer.encode(text, add_special_tokens=False).ids
    assert encoder.ids(text).tolist() == whole
    assert encoder.ids(text).tolist() == whole, "from the cache"


tokens = st.lists(st.text("<|ab1>", min_size=1, max_size=5), min_size=1, max_size=12)


@given(tokens=tokens, text=st.text("<|ab1>", max_size=40))
def test_the_leftmost_longest_spelling_is_matched(tokens: list[str], text: str) -> None:
    longest_first = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
    assert [found.span() for found in pattern_of(tokens).finditer(text)] == [
        found.span() for found in longest_first.finditer(text)
    ]
