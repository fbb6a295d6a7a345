"""Grammars of the embedded engine: which tokens they allow, and what they refuse."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace.policies.cpu_engine.grammars import Grammars, GrammarState
from headrace.policies.engine import MAX_GRAMMAR_CHARACTERS, GrammarKind
from headrace.policies.errors import GrammarMissing, RequestInvalid
from headrace.policies.sglang.transport import refusal

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
    "additionalProperties": False,
}
END = "<|end|>"
SPECIAL, PLAIN = "<|call|>", "<tool_call>"
"""An added token that is special, and one that is not."""


def tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, special=True), AddedToken(SPECIAL, special=True)])
    made.add_tokens([AddedToken(PLAIN, special=False, normalized=False)])
    return made


TOKENIZER = tokenizer()
SIZE = TOKENIZER.get_vocab_size() + 5
"""Models have more rows than their tokenizers have tokens."""
END_ID = TOKENIZER.token_to_id(END)
GRAMMARS = Grammars(TOKENIZER, vocab_size=SIZE, eos_ids=frozenset({END_ID}))


def tag(form: dict[str, Any]) -> GrammarState:
    text = json.dumps({"type": "structural_tag", "format": form})
    return GRAMMARS.compile(GrammarKind.STRUCTURAL_TAG, text, ())


def follow(state: GrammarState, ids: Sequence[int]) -> bool:
    """Return whether an output of these ids is allowed and complete."""
    state = state.fork()
    for token in ids:
        if not state.allowed_V[token]:
            return False
        state.advance(token)
        assert not state.error
    return bool(state.allowed_V[END_ID])


def accepts(state: GrammarState, text: str) -> bool:
    return follow(state, TOKENIZER.encode(text, add_special_tokens=False).ids)


def test_a_json_schema_allows_the_values_that_fit_it_in_one_spelling() -> None:
    state = GRAMMARS.compile(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), ())
    assert accepts(state, '{"city": "Oslo"}')
    assert accepts(state, '{"city": "Rome", "days": 12}')
    for wrong in (
        '{"city": "Paris"}',
        '{"city":"Oslo"}',
        '{"city": "Oslo", "days": 0}',
        '{"days": 2}',
        '{"city": "Oslo", "more": 1}',
        '{"city": "Oslo"',
        " {}",
        "",
    ):
        assert not accepts(state, wrong), wrong


def test_only_a_stop_id_follows_a_complete_output() -> None:
    stops = (7, END_ID + 1000)
    state = GRAMMARS.compile(GrammarKind.JSON_SCHEMA, json.dumps({"const": "x"}), stops)
    for token in TOKENIZER.encode('"x"').ids:
        assert not state.allowed_V[[7, END_ID]].any()
        state.advance(token)
    assert np.flatnonzero(state.allowed_V).tolist() == [7, END_ID], "stop ids outside the vocabulary count for nothing"


def test_forks_advance_on_their_own() -> None:
    state = GRAMMARS.compile(GrammarKind.JSON_SCHEMA, json.dumps({"enum": ["a", "b"]}), ())
    one, other = state.fork(), state.fork()
    one.advance(*TOKENIZER.encode('"').ids)
    assert (other.allowed_V == state.allowed_V).all()
    assert (one.allowed_V != state.allowed_V).any()


CALL = {
    "type": "tags_with_separator",
    "tags": [
        {
            "type": "tag",
            "begin": f'{PLAIN}\n{{"name": "{name}", "arguments": ',
            "content": {"type": "json_schema", "json_schema": SCHEMA},
            "end": "}\n</tool_call>",
        }
        for name in ("weather", "été")
    ],
    "separator": "\n",
    "at_least_one": True,
}


def spelled(name: str) -> str:
    return f'{PLAIN}\n{{"name": "{name}", "arguments": {{"city": "Rome"}}}}\n</tool_call>'


def test_calls_are_one_of_the_named_tags_or_several() -> None:
    state = tag(CALL)
    assert accepts(state, spelled("weather"))
    assert accepts(state, spelled("été") + "\n" + spelled("weather"))
    assert not accepts(state, spelled("other"))
    assert not accepts(state, "I call " + spelled("weather"))
    assert not accepts(state, "")
    once = tag(CALL | {"stop_after_first": True})
    assert accepts(once, spelled("weather"))
    assert not accepts(once, spelled("weather") + "\n" + spelled("weather"))
    assert accepts(tag(CALL | {"at_least_one": False}), "")


def test_reasoning_comes_before_calls_and_is_free() -> None:
    end = "</think>\n\n"
    optional = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": end}
    state = tag({"type": "sequence", "elements": [{"type": "optional", "content": optional}, CALL]})
    assert accepts(state, spelled("weather"))
    assert accepts(state, f"<think>\nIs it </thin? {{{end}{spelled('weather')}")
    assert not accepts(state, f"<think>never closed {spelled('weather')}")
    opened = tag({"type": "sequence", "elements": [optional | {"begin": ""}, CALL]})
    assert accepts(opened, f"rain?{end}{spelled('weather')}")
    assert not accepts(opened, spelled("weather"))


def test_special_tokens_stand_for_themselves_in_tags_and_match_no_text() -> None:
    special = TOKENIZER.token_to_id(SPECIAL)
    letters = [TOKENIZER.token_to_id(letter) for letter in "ab"]
    text = {"type": "tag", "begin": "a", "content": {"type": "any_text"}, "end": f"{SPECIAL}b"}
    state = tag(text)
    assert follow(state, [letters[0], letters[1], special, letters[1]])
    assert not accepts(state, "ab<|call|b")
    alphabet = {letter: TOKENIZER.token_to_id(letter) for letter in SPECIAL}
    assert not follow(state, [*letters, *(alphabet[letter] for letter in SPECIAL), special, letters[1]])
    assert not follow(tag(text | {"end": "b"}), [letters[0], special, letters[1]])
    assert follow(tag({"type": "const_string", "value": f"a{SPECIAL}"}), [letters[0], special])


XML = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "mode": {"enum": ["r", "w"]},
        "line": {"$ref": "#/$defs/line"},
        "deep": {"type": "array", "items": {"type": "boolean"}},
    },
    "required": ["path"],
    "$defs": {"line": {"type": "integer"}},
}


def element(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


@pytest.mark.parametrize("style", [{"type": "qwen_xml_parameter"}, {"type": "json_schema", "style": "qwen_xml"}])
def test_xml_parameters_are_text_for_strings_and_json_for_other_types(style: dict[str, str]) -> None:
    state = tag({"type": "tag", "begin": "<f>", "content": style | {"json_schema": XML}, "end": "</f>"})
    path = element("path", 'a "b"\n</param')
    assert accepts(state, f"<f>{path}</f>")
    assert accepts(state, f"<f>{path}{element('mode', 'w')}{element('line', '-3')}{element('deep', '[true]')}</f>")
    assert not accepts(state, f"<f>{element('mode', 'w')}</f>"), "path is required"
    assert not accepts(state, f"<f>{path}{element('mode', 'x')}</f>")
    assert not accepts(state, f"<f>{path}{element('line', 'one')}</f>")
    assert not accepts(state, f"<f>{path}{element('other', 'x')}</f>")


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "nope"}, "nope"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
        ({"not": {}}, "not"),
        ([], "object"),
        ({"enum": ["x" * MAX_GRAMMAR_CHARACTERS]}, str(MAX_GRAMMAR_CHARACTERS)),
    ],
)
def test_invalid_and_unsupported_schemas_are_refused(schema: object, named: str) -> None:
    with pytest.raises(RequestInvalid, match=f"^Failed to compile json_schema grammar: .*{named}"):
        GRAMMARS.compile(GrammarKind.JSON_SCHEMA, json.dumps(schema), ())


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "property name"),
        ("[]", "format"),
        ('{"format": {"type": "regex"}}', "regex"),
        ('{"format": {"type": "or", "elements": []}}', "elements"),
        ('{"format": {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": ""}}', "needs an end"),
        ('{"format": {"type": "qwen_xml_parameter", "json_schema": {"required": ["a"]}}}', "required names 'a'"),
        ('{"format": ' + '{"type": "optional", "content": ' * 2000 + "{}" + "}" * 2001, "recursion"),
    ],
)
def test_invalid_structural_tags_are_refused(text: str, named: str) -> None:
    with pytest.raises(RequestInvalid, match=f"^Failed to compile structural_tag grammar: .*{named}"):
        GRAMMARS.compile(GrammarKind.STRUCTURAL_TAG, text, ())


def test_an_engine_without_llguidance_refuses_grammars_with_sglangs_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestInvalid, match="install the package llguidance") as refused:
        GRAMMARS.compile(GrammarKind.JSON_SCHEMA, "{}", ())
    assert type(refusal(400, "/generate", str(refused.value), "cpu")) is GrammarMissing


def test_a_model_without_stop_id_needs_one_in_the_request() -> None:
    endless = Grammars(TOKENIZER, vocab_size=SIZE, eos_ids=frozenset())
    with pytest.raises(RequestInvalid, match="stop_token_ids"):
        endless.compile(GrammarKind.JSON_SCHEMA, "{}", ())
    assert accepts(endless.compile(GrammarKind.JSON_SCHEMA, "{}", (END_ID,)), "[1, {}]")
