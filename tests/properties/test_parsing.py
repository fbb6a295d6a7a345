"""For any text, parsers lose nothing and find the calls that were written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.serve.gateway.conversation import Reasoning, Text, ToolSpec
from headrace.serve.gateway.parsing.base import OutputParser, ParsedBlock, ParsedCall, ParsedOutput
from headrace.serve.gateway.parsing.hermes import HermesParser
from headrace.serve.gateway.parsing.parser_choice import PlainParser
from headrace.serve.gateway.parsing.qwen3_coder import Qwen3CoderParser

PARSERS: dict[str, OutputParser] = {"hermes": HermesParser(), "coder": Qwen3CoderParser(), "plain": PlainParser()}
TOOLS = (ToolSpec("bash", "", {"properties": {"n": {"type": "integer"}, "o": {"type": "object"}}}),)
CALL = '{"name": "bash", "arguments": {"command": "ls"}}'
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")
ELEMENTS = ("<function=bash>", "</function>", "<parameter=n>", "</parameter>")
TAGS = (*MARKUP, *ELEMENTS, CALL, '{"name": "bash", "arguments": "', '"}', "{", "}", '"', "\n", " ")
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
outputs = st.lists(st.one_of(st.sampled_from(TAGS), words), max_size=14).map("".join)

patient = settings(deadline=None)


def without_blanks(text: str) -> str:
    return "".join(text.split())


def is_part(part: str, whole: str) -> bool:
    """Return whether the characters of `part` occur in `whole` in this order."""
    rest = iter(whole)
    return all(character in rest for character in part)


def parse(name: str, text: str, *, in_reasoning: bool = False) -> ParsedOutput:
    return PARSERS[name].parse(text, TOOLS, in_reasoning=in_reasoning)


@pytest.mark.parametrize("name", PARSERS)
@patient
@given(text=outputs, in_reasoning=st.booleans())
def test_any_text_is_parsed_without_empty_blocks(name: str, text: str, in_reasoning: bool) -> None:
    parsed = parse(name, text, in_reasoning=in_reasoning)
    for block in parsed.blocks:
        assert block.name if isinstance(block, ParsedCall) else block.text
        if isinstance(block, ParsedCall):
            assert isinstance(json.loads(block.arguments), dict)
    assert parsed.lost_calls >= 0
    assert name != "plain" or parsed.lost_calls == 0


@pytest.mark.parametrize("name", ["hermes", "plain"])
@patient
@given(text=outputs, in_reasoning=st.booleans())
def test_every_character_outside_markup_is_in_a_block_in_order(name: str, text: str, in_reasoning: bool) -> None:
    """What a block holds stands in the output in order, and what is left over is tags and the frame of calls."""
    parsed = parse(name, text, in_reasoning=in_reasoning)
    kept = without_blanks("".join(b.arguments if isinstance(b, ParsedCall) else b.text for b in parsed.blocks))
    called = any(isinstance(block, ParsedCall) for block in parsed.blocks)
    left = without_blanks(text)
    assert "\\" in text or is_part(kept, left)
    if not called:
        tags = sum(text.count(tag) for tag in ("<think>", "</think>"))
        assert len(left) - len(kept) <= 8 * tags
        return
    frames = sum(
        len(without_blanks(f'{{"name":"{b.name}","arguments":}}')) for b in parsed.blocks if isinstance(b, ParsedCall)
    )
    tags = sum(text.count(tag) * len(tag) for tag in MARKUP)
    # Arguments given as a JSON string are unescaped, so their quotes and backslashes may go.
    escapes = text.count('"') + text.count("\\")
    assert len(left) - len(kept) <= frames + tags + escapes + 2 * len(parsed.blocks)


@patient
@given(text=outputs)
def test_text_without_markup_is_unchanged(text: str) -> None:
    for tag in (*MARKUP, "<function=bash>", "<function="):
        text = text.replace(tag, "")
    if any(tag in text for tag in (*MARKUP, "<function=")):
        return
    for name in PARSERS:
        assert parse(name, text) == ParsedOutput((Text(text),) if text else ())


json_values = st.recursive(
    st.one_of(words, st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False, allow_infinity=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=6,
)
names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.:-]{0,12}", fullmatch=True)
plain = st.from_regex(r"[a-z0-9{}\[\]\"'.,é漢]{1,12}( [a-z]{1,5})?", fullmatch=True)
layouts = st.sampled_from([{}, {"indent": 2}, {"ensure_ascii": False}, {"separators": (",", ":")}])


@st.composite
def turns(draw: st.DrawFn, *, values: st.SearchStrategy[object]) -> list[ParsedBlock]:
    """Reasoning or none, then text and calls in any order, no two texts side by side."""
    blocks: list[ParsedBlock] = [Reasoning(draw(plain))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 4))):
        if draw(st.booleans()) and not (blocks and isinstance(blocks[-1], Text)):
            blocks.append(Text(draw(plain)))
        else:
            arguments = draw(st.dictionaries(names, values, max_size=3))
            blocks.append(ParsedCall(draw(names), json.dumps(arguments, **draw(layouts))))
    return blocks


def spelled(block: ParsedBlock) -> str:
    if isinstance(block, ParsedCall):
        return f'<tool_call>\n{{"name": {json.dumps(block.name)}, "arguments": {block.arguments}}}\n</tool_call>'
    return f"<think>\n{block.text}\n</think>\n" if isinstance(block, Reasoning) else block.text


def spelled_for_coder(block: ParsedBlock) -> str:
    if not isinstance(block, ParsedCall):
        return spelled(block)
    values = json.loads(block.arguments).items()
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
    return f"<tool_call>\n<function={block.name}>\n{parameters}</function>\n</tool_call>"


@patient
@given(blocks=turns(values=json_values), opened=st.booleans())
def test_hermes_calls_are_parsed_as_written(blocks: list[ParsedBlock], opened: bool) -> None:
    """Arguments are returned as exactly the same text."""
    text = "\n".join(map(spelled, blocks))
    opened = opened and bool(blocks) and isinstance(blocks[0], Reasoning)
    text = text.removeprefix("<think>\n") if opened else text
    assert parse("hermes", text, in_reasoning=opened) == ParsedOutput(tuple(blocks))


@patient
@given(blocks=turns(values=st.one_of(plain, words)))
def test_coder_calls_are_parsed_as_written(blocks: list[ParsedBlock]) -> None:
    expected = tuple(
        ParsedCall(block.name, json.dumps(json.loads(block.arguments), ensure_ascii=False))
        if isinstance(block, ParsedCall)
        else block
        for block in blocks
    )
    tools = tuple(ToolSpec(block.name) for block in blocks if isinstance(block, ParsedCall)) or TOOLS
    text = "\n".join(map(spelled_for_coder, blocks))
    assert Qwen3CoderParser().parse(text, tools, in_reasoning=False) == ParsedOutput(expected)


@patient
@given(blocks=turns(values=json_values), cut=st.integers(0, 400))
def test_complete_calls_are_parsed_from_truncated_output(blocks: list[ParsedBlock], cut: int) -> None:
    text = "\n".join(map(spelled, blocks))[:cut]
    parsed = parse("hermes", text)
    calls = [block for block in parsed.blocks if isinstance(block, ParsedCall)]
    assert calls == [block for block in blocks if isinstance(block, ParsedCall)][: len(calls)]
    assert len(calls) >= text.count("</tool_call>")
    assert parsed.lost_calls <= 1
