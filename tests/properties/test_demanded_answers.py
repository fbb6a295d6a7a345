"""Every complete output of a demand's grammar parses as what was demanded, whatever tokens were chosen."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headrace.policies.cpu_engine.grammars import Grammars
from headrace.serve.gateway.conversation import (
    Constraint,
    ConstraintKind,
    Reasoning,
    Role,
    Text,
    ToolSpec,
    TurnRequest,
    say,
)
from headrace.serve.gateway.parsing.base import OutputParser, ParsedCall
from headrace.serve.gateway.parsing.grammars import Reasons, grammar_of
from headrace.serve.gateway.parsing.hermes import HermesParser
from headrace.serve.gateway.parsing.parser_choice import PlainParser
from headrace.serve.gateway.parsing.qwen3_coder import Qwen3CoderParser
from support.chat_templates import QWEN3

VALUES: list[dict[str, Any]] = [
    {"enum": ["ls", 'a "b" <c>', ""]},
    {"type": "integer", "minimum": -3, "maximum": 120},
    {"type": "boolean"},
    {"type": "array", "items": {"enum": [1, "two"]}, "maxItems": 2},
    {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"], "additionalProperties": False},
]
MOST = 4000


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(["path", "a b", "été"]), unique=True, max_size=3))
    properties = {name: draw(st.sampled_from(VALUES)) for name in names}
    needed = draw(st.sets(st.sampled_from(names))) if names else set()
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(needed),
        "additionalProperties": False,
    }


TOOLS = st.lists(st.sampled_from(["bash", "mcp__look", "été"]), unique=True, min_size=1, max_size=3).flatmap(
    lambda names: st.tuples(*(schemas().map(lambda schema, name=name: ToolSpec(name, "", schema)) for name in names))
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = QWEN3.write(tmp_path_factory.mktemp("walks"))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def walk(tokenizer: Tokenizer, request: TurnRequest, parser: OutputParser, reasons: Reasons, random: Random) -> str:
    """Return a random output of the grammar; closing tokens are preferred, so that it ends."""
    assert request.constraint is not None
    grammar = grammar_of(request, request.constraint, parser.call_syntax, reasons)
    assert grammar is not None
    end, size = tokenizer.token_to_id("<|im_end|>"), tokenizer.get_vocab_size()
    state = Grammars(tokenizer, vocab_size=size, eos_ids=frozenset({end})).compile(grammar.kind, grammar.text, ())
    preferred = [end, *map(tokenizer.token_to_id, ("</think>", "</tool_call>", '"', "}"))]
    ids: list[int] = []
    while True:
        allowed = np.flatnonzero(state.allowed_V).tolist()
        liked = [token for token in preferred if token in allowed]
        token = random.choice(liked) if liked and random.random() < 0.3 else random.choice(allowed)
        if token == end:
            return tokenizer.decode(ids, skip_special_tokens=False)
        ids.append(token)
        state.advance(token)
        assert not state.error
        assert len(ids) < MOST


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a value fits a schema of `VALUES` or `schemas`."""
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "array":
            return len(value) <= schema["maxItems"] and all(fits(item, schema["items"]) for item in value)
    known = schema["properties"]
    required = set(schema["required"]) <= value.keys() <= known.keys()
    return required and all(fits(item, known[name]) for name, item in value.items())


@settings(max_examples=150, deadline=None)
@given(
    tools=TOOLS,
    parser=st.sampled_from([HermesParser(), Qwen3CoderParser()]),
    reasons=st.sampled_from(list(Reasons)),
    kind=st.sampled_from([ConstraintKind.CALL, ConstraintKind.NAMED_CALL]),
    seed=st.integers(0, 2**32),
)
def test_demanded_calls_parse_as_calls_with_fitting_arguments(
    tokenizer: Tokenizer,
    tools: tuple[ToolSpec, ...],
    parser: OutputParser,
    reasons: Reasons,
    kind: ConstraintKind,
    seed: int,
) -> None:
    random = Random(seed)
    names = (random.choice(tools).name,) if kind is ConstraintKind.NAMED_CALL else ()
    request = TurnRequest(messages=(say(Role.USER, "go"),), tools=tools, constraint=Constraint(kind, names))
    said = walk(tokenizer, request, parser, reasons, random)
    parsed = parser.parse(said, tools, in_reasoning=reasons is Reasons.ALREADY)
    blocks = [block for block in parsed.blocks if not isinstance(block, Reasoning)]
    assert len(blocks) >= 1
    assert kind is ConstraintKind.CALL or len(blocks) == 1
    for block in blocks:
        assert isinstance(block, ParsedCall), said
        [tool] = [tool for tool in tools if tool.name == block.name]
        assert tool.name in names or not names
        assert fits(json.loads(block.arguments), dict(tool.parameters)), said
    assert parsed.lost_calls == 0


@settings(max_examples=60, deadline=None)
@given(
    schema=schemas(),
    tools=st.one_of(st.just(()), TOOLS),
    reasons=st.sampled_from(list(Reasons)),
    seed=st.integers(0, 2**32),
)
def test_demanded_json_parses_as_a_fitting_value_or_as_calls(
    tokenizer: Tokenizer, schema: dict[str, Any], tools: tuple[ToolSpec, ...], reasons: Reasons, seed: int
) -> None:
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, schema=json.dumps(schema))
    request = TurnRequest(messages=(say(Role.USER, "go"),), tools=tools, constraint=constraint)
    parser = HermesParser()
    said = walk(tokenizer, request, parser, reasons, Random(seed))
    parsed = parser.parse(said, tools, in_reasoning=reasons is Reasons.ALREADY)
    blocks = [block for block in parsed.blocks if not isinstance(block, Reasoning)]
    if tools and isinstance(blocks[0], ParsedCall):
        assert all(isinstance(block, ParsedCall) for block in blocks)
        return
    [text] = blocks
    assert isinstance(text, Text)
    assert fits(json.loads(text.text), schema), said


def test_calls_without_a_known_syntax_have_no_grammar() -> None:
    tool = ToolSpec("bash")
    free = TurnRequest(messages=(say(Role.USER, "go"),), tools=(tool,))
    syntax = PlainParser().call_syntax
    for kind in ConstraintKind:
        assert grammar_of(free, Constraint(kind), syntax, Reasons.NEVER) is None
    for request in (
        TurnRequest(messages=free.messages),
        TurnRequest(messages=free.messages, tools=(tool,), calls_allowed=False),
    ):
        found = grammar_of(request, Constraint(ConstraintKind.JSON_SCHEMA, schema='{"a":1}'), syntax, Reasons.NEVER)
        assert found is not None
        assert (found.kind, found.text) == ("json_schema", '{"a":1}')
