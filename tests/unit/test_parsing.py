"""Parsers of well-formed, malformed and cut outputs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from headrace.serve.gateway.conversation import Reasoning, Text, ToolSpec
from headrace.serve.gateway.errors import ParserMissing, ParserUnknown
from headrace.serve.gateway.parsing.base import ParsedBlock, ParsedCall, ParsedOutput
from headrace.serve.gateway.parsing.hermes import HermesParser
from headrace.serve.gateway.parsing.parser_choice import PlainParser, choose_parser
from headrace.serve.gateway.parsing.qwen3_coder import Qwen3CoderParser
from support import chat_templates as templates

TOOLS = (
    ToolSpec("bash", "", {"type": "object", "properties": {"command": {"type": "string"}}}),
    ToolSpec(
        "edit",
        "",
        {
            "properties": {
                "path": {"type": "string"},
                "line": {"type": "integer"},
                "share": {"type": ["number", "null"]},
                "all": {"type": "boolean"},
                "edits": {"type": "array"},
                "to": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "level": {"enum": [1, 2]},
                "any": {"description": "no type"},
            }
        },
    ),
)
LS = '{"name": "bash", "arguments": {"command": "ls -l"}}'
X_AS_SAMPLED = ParsedCall("x", '{"b": 1,  "a": "\\u00e9"}')
TAGS_AS_TEXT = ParsedCall("bash", '{"command": "</tool_call><think>"}')
LS_CALL = ParsedCall("bash", '{"command": "ls -l"}')


def hermes(text: str, *, in_reasoning: bool = False, tools: tuple[ToolSpec, ...] = TOOLS) -> ParsedOutput:
    return HermesParser().parse(text, tools, in_reasoning=in_reasoning)


def coder(text: str, *, in_reasoning: bool = False) -> ParsedOutput:
    return Qwen3CoderParser().parse(text, TOOLS, in_reasoning=in_reasoning)


def wrapped(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("", ()),
        (" hello\n", (Text(" hello\n"),)),
        (wrapped(LS), (LS_CALL,)),
        (f"I look.\n\n{wrapped(LS, LS)}\n", (Text("I look."), LS_CALL, LS_CALL)),
        (f"a {wrapped(LS)} b {wrapped(LS)} c", (Text("a"), LS_CALL, Text("b"), LS_CALL, Text("c"))),
        ("<tool_call>" + LS + "</tool_call>", (LS_CALL,)),
        (wrapped('{"arguments": {"b": 1,  "a": "\\u00e9"}, "name":"x"}'), (X_AS_SAMPLED,)),
        (wrapped('{"name": "x", "arguments": "{\\"a\\": 1}"}'), (ParsedCall("x", '{"a": 1}'),)),
        (wrapped('{"name": "x", "parameters": {"a": 1}}'), (ParsedCall("x", '{"a": 1}'),)),
        (wrapped('{"name": "x"}'), (ParsedCall("x", "{}"),)),
        (wrapped('{"name": "x", "arguments": {}}'), (ParsedCall("x", "{}"),)),
        (wrapped('{"name": "x", "arguments": null}'), (ParsedCall("x", "{}"),)),
        (wrapped(LS.replace("ls -l", "</tool_call><think>")), (TAGS_AS_TEXT,)),
        (f"<tool_call>\n{LS}", (LS_CALL,)),
        (f"<tool_call>\n{LS}\n{wrapped(LS)}", (LS_CALL, LS_CALL)),
    ],
)  # fmt: skip
def test_hermes_calls_keep_their_positions(text: str, blocks: tuple[ParsedBlock, ...]) -> None:
    assert hermes(text) == ParsedOutput(blocks)


@pytest.mark.parametrize(
    "broken",
    [
        wrapped('{"name": "bash", "arguments": {"command": "ls}'),
        wrapped('{"name": "bash", "arguments": {"command": "a\nb"}}'),
        wrapped('{"name": "bash", "arguments": {"n": NaN}}'),
        wrapped('{"name": "bash", "arguments": {"n": 1,}}'),
        wrapped('{"name": "bash", "arguments": [1]}'),
        wrapped('{"name": "bash", "arguments": "ls"}'),
        wrapped('{"name": "bash", "arguments": "[1]"}'),
        wrapped('{"name": "", "arguments": {}}'),
        wrapped('{"name": 3, "arguments": {}}'),
        wrapped('{"name": "\\ud800", "arguments": {}}'),
        wrapped('{"arguments": {}}'),
        wrapped("[1]"),
        wrapped("bash ls"),
        wrapped('{"name": "bash", "arguments": ' + '{"a":' * 5000),
        wrapped(LS + "}"),
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls',
        "<tool_call>",
        "well</tool_call>",
    ],
)
def test_invalid_calls_remain_text_and_are_counted(broken: str) -> None:
    assert hermes(f"a {broken}") == ParsedOutput((Text(f"a {broken}"),), 1)
    if not broken.endswith(("ls", "<tool_call>")):
        assert hermes(f"{broken} b {wrapped(LS)}") == ParsedOutput((Text(f"{broken} b"), LS_CALL), 1)


def test_a_malformed_call_does_not_hide_the_next_one() -> None:
    broken = '<tool_call>\n{"name": "bash", "arguments": {"command": \n'
    assert hermes(broken + wrapped(LS)) == ParsedOutput((Text(broken.rstrip()), LS_CALL), 1)


def test_a_truncated_call_with_reasoning_tags_is_one_text_block() -> None:
    cut = '<tool_call>\n{"name": "write", "arguments": {"text": "<think></think> and </think>'
    assert hermes(cut) == ParsedOutput((Text(cut),), 1)


def test_big_numbers_and_unknown_tools_are_parsed_as_calls() -> None:
    call = f'{{"name": "nobody_offered", "arguments": {{"n": {"9" * 5000}}}}}'
    assert hermes(wrapped(call)).blocks == (ParsedCall("nobody_offered", f'{{"n": {"9" * 5000}}}'),)


def test_without_tools_calls_remain_text() -> None:
    text = f"<think>hm</think>{wrapped(LS)}"
    assert hermes(text, tools=()) == ParsedOutput((Reasoning("hm"), Text(wrapped(LS))))
    assert PlainParser().parse(text, TOOLS, in_reasoning=False) == ParsedOutput((Reasoning("hm"), Text(wrapped(LS))))


@pytest.mark.parametrize(
    ("text", "in_reasoning", "blocks"),
    [
        ("<think>\nhm\n</think>\n\nhi", False, (Reasoning("hm"), Text("hi"))),
        ("\n<think>hm</think>hi ", False, (Reasoning("hm"), Text("hi "))),
        ("hm\n</think>\n\nhi", True, (Reasoning("hm"), Text("hi"))),
        ("<think>hm</think>hi", True, (Reasoning("hm"), Text("hi"))),
        ("hm</think>hi", False, (Reasoning("hm"), Text("hi"))),
        ("<think>cut", False, (Reasoning("cut"),)),
        ("cut", True, (Reasoning("cut"),)),
        ("", True, ()),
        ("<think>\n\n</think>\n\nhi", False, (Text("hi"),)),
        ("</think>hi", True, (Text("hi"),)),
        ("a<think>b</think>c<think>d", False, (Text("a"), Reasoning("b"), Text("c"), Reasoning("d"))),
        ("<think>a</think>b</think>c", False, (Reasoning("a"), Text("b</think>c"))),
        (f"<think>{wrapped(LS)}</think>{wrapped(LS)}", False, (Reasoning(wrapped(LS)), LS_CALL)),
        (f"{wrapped(LS)} hm</think>{wrapped(LS)}", True, (Reasoning(f"{wrapped(LS)} hm"), LS_CALL)),
        (f"so <tool_call> is a tag</think>{wrapped(LS)}", False, (Reasoning("so <tool_call> is a tag"), LS_CALL)),
        (f"<think>never closed {wrapped(LS)}", False, (Reasoning(f"never closed {wrapped(LS)}"),)),
        (f"{wrapped(LS)}<think>hm</think>", False, (LS_CALL, Reasoning("hm"))),
    ],
)
def test_reasoning_is_separated_from_text(text: str, in_reasoning: bool, blocks: tuple[ParsedBlock, ...]) -> None:
    assert hermes(text, in_reasoning=in_reasoning) == ParsedOutput(blocks)


def function(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def arguments_of(output: ParsedOutput) -> dict[str, object]:
    (call,) = output.blocks
    assert isinstance(call, ParsedCall)
    found: dict[str, object] = json.loads(call.arguments)
    return found


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("path", "42", "42"),
        ("path", "null", "null"),
        ("path", "", ""),
        ("path", "  two\n\nlines \n", "  two\n\nlines \n"),
        ("line", "42", 42),
        ("line", " -1 ", -1),
        ("line", "4.5", "4.5"),
        ("line", "true", "true"),
        ("line", "many", "many"),
        ("line", "", ""),
        ("line", "9" * 5000, "9" * 5000),
        ("share", "4.5", 4.5),
        ("share", "4", 4),
        ("share", "null", None),
        ("share", "1e999", "1e999"),
        ("share", "NaN", "NaN"),
        ("all", "True", True),
        ("all", "false", False),
        ("all", "yes", "yes"),
        ("edits", '[{"a": "é"}]', [{"a": "é"}]),
        ("edits", "['a', True, None]", ["a", True, None]),
        ("edits", "[1, {2}]", "[1, {2}]"),
        ("edits", "[" * 3000, "[" * 3000),
        ("to", "{'a': 1}", {"a": 1}),
        ("to", "none", None),
        ("note", "null", None),
        ("note", "4", "4"),
        ("level", "2", 2),
        ("any", "2", "2"),
        ("unknown", "2", "2"),
    ],
)
def test_coder_values_have_the_types_of_the_schema(key: str, text: str, value: object) -> None:
    assert arguments_of(coder(function("edit", **{key: text}))) == {key: value}


def test_coder_calls_keep_their_positions() -> None:
    ls = ParsedCall("bash", '{"command": "ls"}')
    call = function("bash", command="ls")
    assert coder(f"<think>hm</think>a\n{call}\nb {call}") == ParsedOutput(
        (Reasoning("hm"), Text("a"), ls, Text("b"), ls)
    )
    bare = "<function=bash><parameter=command>ls</parameter></function>"
    assert coder(f"a {bare} b") == ParsedOutput((Text("a"), ls, Text("b")))
    assert coder(f"<tool_call>{bare}") == ParsedOutput((ls,))
    assert coder(bare.replace("</parameter>", "")) == ParsedOutput((ls,))
    assert coder("<tool_call><function=list></function></tool_call>") == ParsedOutput((ParsedCall("list", "{}"),))
    assert coder(function("nobody_offered", n="1")) == ParsedOutput((ParsedCall("nobody_offered", '{"n": "1"}'),))


def test_coder_values_may_contain_tags() -> None:
    text = "a </parameter> b\n</function>\n<tool_call>\n<think> </think>"
    assert arguments_of(coder(function("bash", command=text, more="x"))) == {"command": text, "more": "x"}


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>\n<function=bash>\n<parameter=command>\nls",
        "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n",
        "<tool_call>\n<function=ba",
        "<tool_call>\n",
        f"<tool_call>\n{LS}\n</tool_call>",
        "<tool_call>\n<function=bash>\nls\n</function>\n</tool_call>",
        "<function=bash><parameter=command",
        "<tool_call>\n<function=bash>\n<parameter=command>\n" * 2000,
    ],
)
def test_invalid_coder_calls_remain_text_and_are_counted(broken: str) -> None:
    parsed = coder(f"a {broken}")
    assert parsed.blocks == (Text(f"a {broken}"),)
    assert parsed.lost_calls >= 1


def test_the_coder_parser_escapes_lone_surrogates() -> None:
    parsed = coder(function("edit", edits='["\\ud800é"]'))
    assert parsed.blocks == (ParsedCall("edit", '{"edits": ["\\ud800\\u00e9"]}'),)


def test_the_parser_is_chosen_by_the_template() -> None:
    assert isinstance(choose_parser("auto", templates.QWEN3.template), HermesParser)
    assert isinstance(choose_parser("auto", templates.QWEN25.template), HermesParser)
    assert isinstance(choose_parser("auto", templates.STRICT.template), HermesParser)
    coder_template = "{{ '<tool_call>\\n<function=' + call.name + '>' }}"
    assert isinstance(choose_parser("auto", coder_template), Qwen3CoderParser)
    assert isinstance(choose_parser("none", templates.QWEN3.template), PlainParser)
    assert isinstance(choose_parser("qwen3_coder", ""), Qwen3CoderParser)
    with pytest.raises(ParserUnknown, match="'bogus'; set it to auto, hermes, qwen3_coder, none or sglang:NAME"):
        choose_parser("bogus", "")


WITHOUT_SGLANG = """
import sys
sys.modules["sglang"] = None
from pathlib import Path
from headrace.serve.gateway.parsing.parser_choice import choose_parser
from headrace.serve.gateway.errors import ParserMissing
for line in sys.stdin.read().split("\\0"):
    try:
        choose_parser("auto", line)
    except ParserMissing as error:
        print(str(error).split(" needs ")[0].rpartition(":")[2], "pip install sglang" in str(error))
"""


def test_sglang_parsers_require_sglang() -> None:
    """Runs in a separate process in which SGLang cannot be imported."""
    glm47 = templates.GLM4.template.replace("{{- '\\n<tool_call>' ~", "{{- '<tool_call>' ~")
    asked = [
        (templates.GLM4.template, "glm45"),
        (glm47, "glm47"),
        (templates.DEEPSEEK3.template, "deepseekv3"),
        (templates.DEEPSEEK3.template.replace("```json", ""), "deepseekv31"),
        (templates.LLAMA31.template, "llama3"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<|start|>assistant<|channel|>", "gpt-oss"),
        ("[TOOL_CALLS]", "mistral"),
    ]
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_SGLANG],
        input="\0".join(template for template, _ in asked),
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines() == [f"{name} True" for _, name in asked]
    assert issubclass(ParserMissing, ParserUnknown)
