"""Adapter of SGLang's parsers. Needs SGLang (no GPU, no kernels); skipped if it cannot be imported."""

from __future__ import annotations

import json

import pytest

from headrace.serve.gateway.conversation import Reasoning, Text, ToolSpec
from headrace.serve.gateway.errors import ParserMissing, ParserUnknown
from headrace.serve.gateway.parsing.base import ParsedCall, ParsedOutput
from headrace.serve.gateway.parsing.parser_choice import choose_parser

pytestmark = pytest.mark.filterwarnings("ignore")

TOOLS = (
    ToolSpec("bash", "", {"type": "object", "properties": {"command": {"type": "string"}, "n": {"type": "integer"}}}),
)
NAMES = ("glm45", "glm47", "deepseekv3", "deepseekv31", "kimi_k2")


@pytest.fixture(scope="module", autouse=True)
def sglang() -> None:
    try:
        choose_parser("sglang:glm45", "")
    except ParserMissing as error:
        pytest.skip(f"SGLang's parsers are tested only where it is installed: {error}")


def parse(name: str, text: str, *, in_reasoning: bool = False) -> ParsedOutput:
    parsed = choose_parser(f"sglang:{name}", "").parse(text, TOOLS, in_reasoning=in_reasoning)
    blocks = (
        ParsedCall(block.name, json.dumps(json.loads(block.arguments))) if isinstance(block, ParsedCall) else block
        for block in parsed.blocks
    )
    return ParsedOutput(tuple(blocks), parsed.lost_calls)


def call(family: str, tool: str, command: str) -> str:
    """Return one call in the family's markup, without the tags around several calls."""
    bar, gap = "\uff5c", "\u2581"
    arguments = json.dumps({"command": command})
    begin, end = f"<{bar}tool{gap}call{gap}begin{bar}>", f"<{bar}tool{gap}call{gap}end{bar}>"
    separator = f"<{bar}tool{gap}sep{bar}>"
    return {
        "glm45": f"<tool_call>{tool}\n<arg_key>command</arg_key>\n<arg_value>{command}</arg_value>\n</tool_call>",
        "glm47": f"<tool_call>{tool}<arg_key>command</arg_key><arg_value>{command}</arg_value></tool_call>",
        "deepseekv3": f"{begin}function{separator}{tool}\n```json\n{arguments}\n```{end}",
        "deepseekv31": f"{begin}{tool}{separator}{arguments}{end}",
        "kimi_k2": f"<|tool_call_begin|>functions.{tool}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
    }[family]


def section(family: str, calls: str) -> str:
    bar, gap = "\uff5c", "\u2581"
    if family.startswith("glm"):
        return calls
    if family == "kimi_k2":
        return f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"
    return f"<{bar}tool{gap}calls{gap}begin{bar}>{calls}<{bar}tool{gap}calls{gap}end{bar}>"


def parsed_call(command: str, tool: str = "bash") -> ParsedCall:
    return ParsedCall(tool, json.dumps({"command": command}))


@pytest.mark.parametrize("name", NAMES)
def test_calls_to_known_and_unknown_tools_keep_their_positions(name: str) -> None:
    calls = call(name, "bash", "ls") + call(name, "nobody_offered", "x")
    text = f"<think>hm {call(name, 'bash', 'no')}</think>I look.\n{section(name, calls)}\nDone."
    expected = (
        Reasoning(f"hm {call(name, 'bash', 'no')}"),
        Text("I look."),
        parsed_call("ls"),
        parsed_call("x", "nobody_offered"),
        Text("Done."),
    )
    assert parse(name, text) == ParsedOutput(expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_truncated_call_remains_text(name: str) -> None:
    whole, cut = call(name, "bash", "ls"), call(name, "bash", "cat calc.py")[:-12]
    head = section(name, whole + cut).partition(cut)[0] + cut
    parsed = parse(name, head)
    assert parsed.blocks == (parsed_call("ls"), Text(cut))
    assert parsed.lost_calls == 1
    assert parse(name, cut) == ParsedOutput((Text(cut),), 1)


@pytest.mark.parametrize("name", NAMES)
def test_text_without_markup_is_unchanged(name: str) -> None:
    assert parse(name, " plain\ntext ") == ParsedOutput((Text(" plain\ntext "),))
    assert parse(name, "hm</think>x", in_reasoning=True) == ParsedOutput((Reasoning("hm"), Text("x")))
    without = choose_parser(f"sglang:{name}", "").parse(section(name, call(name, "bash", "ls")), (), in_reasoning=False)
    assert without == ParsedOutput((Text(section(name, call(name, "bash", "ls"))),))


def test_calls_from_model_families_without_known_tags_are_parsed() -> None:
    assert parse("llama3", '{"name": "bash", "parameters": {"command": "ls"}}') == ParsedOutput((parsed_call("ls"),))
    listed = '[TOOL_CALLS] [{"name": "bash", "arguments": {"command": "ls"}}]'
    assert parse("mistral", f"Yes. {listed}").blocks[-1] == parsed_call("ls")
    harmony = "<|start|>assistant<|channel|>"
    called = f'{harmony}commentary to=functions.bash <|constrain|>json<|message|>{{"command": "ls"}}<|call|>'
    assert parse("gpt-oss", f"<|channel|>analysis<|message|>hm<|end|>{called}") == ParsedOutput(
        (Reasoning("hm"), parsed_call("ls"))
    )
    assert parse("gpt-oss", f"<|channel|>analysis<|message|>hm<|end|>{harmony}final<|message|>Hello") == ParsedOutput(
        (Reasoning("hm"), Text("Hello"))
    )


def test_an_unknown_parser_name_lists_the_known_ones() -> None:
    with pytest.raises(ParserUnknown, match=r"has no parser 'bogus'; it has .*kimi_k2"):
        choose_parser("sglang:bogus", "")
