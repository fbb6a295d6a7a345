"""For any conversation, the rendered ids equal those of transformers' apply_chat_template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.serve.gateway.conversation import Message, Reasoning, Role, Text, ToolCall, ToolResult, ToolSpec, say
from headrace.serve.gateway.rendering.render import Renderer
from headrace.serve.gateway.rendering.template_renderer import load_renderer
from support.chat_templates import DEEPSEEK3, GLM4, LLAMA31, QWEN3, QWEN25, Family, as_dicts

PIECES = (
    "calc.py", " ", "\n", "\r\n", "\t", "\n\n\n", "\0", "e\u0301", "\u1100\u1161", "\u212b", "\ufb01", "\ufeff",
    "\u200d", "漢字", "\U0001f600", "1234567", "1.0", "'s", "</tool_response>", "{{ x }}", "{% raw %}", "<b>&amp;\"'",
)  # fmt: skip
"""Also what changes under NFC, and what a template engine could take for its own."""
words = st.lists(st.sampled_from(PIECES) | st.text(st.characters(exclude_categories=["Cs"]), max_size=4), max_size=8)
contents = words.map("".join)
long = st.builds(lambda text, times: text * times, contents, st.sampled_from([1, 1, 1, 400]))
numbers = st.sampled_from([0, -1, 1.0, 1, 2**70, 1e300, 0.1])
values = st.one_of(contents, numbers, st.booleans(), st.lists(numbers))
arguments = st.dictionaries(contents.filter(bool), values, max_size=3)
schemas = st.fixed_dictionaries(
    {"type": st.just("object"), "properties": st.dictionaries(contents, contents, max_size=2)}
)
tools = st.lists(st.builds(ToolSpec, st.sampled_from(["bash", "edit"]), contents, schemas), max_size=2)


@st.composite
def conversations(draw: st.DrawFn, *, parallel: bool) -> list[Message]:
    """Conversations that end before the policy's turn."""
    talk = [say(Role.SYSTEM, draw(contents))] if draw(st.booleans()) else []
    talk.append(say(Role.USER, draw(long)))
    for number in range(draw(st.integers(0, 4))):
        given = draw(st.lists(arguments, max_size=2 if parallel else 1))
        calls = [ToolCall(f"c{number}{index}", "bash", json.dumps(one)) for index, one in enumerate(given)]
        thought = (Reasoning(draw(contents)),) if draw(st.booleans()) else ()
        talk.append(Message(Role.ASSISTANT, (*thought, Text(draw(contents)), *calls)))
        results = tuple(ToolResult(call.id, draw(long)) for call in calls)
        talk.append(Message(Role.TOOL, results) if results else say(Role.USER, draw(long)))
    return talk


@pytest.fixture(scope="module", params=[QWEN3, QWEN25, LLAMA31, GLM4, DEEPSEEK3], ids=lambda family: family.name)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Family, Renderer, Any]:
    from transformers import AutoTokenizer

    family: Family = request.param
    folder: Path = family.write(tmp_path_factory.mktemp(family.name))
    return family, load_renderer(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.whole(but_first=True)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_conversation_is_rendered_to_the_same_ids_as_transformers(
    model: tuple[Family, Renderer, Any], data: st.DataObject
) -> None:
    family, renderer, theirs = model
    talk, offered = data.draw(conversations(parallel=family is not LLAMA31)), data.draw(tools)
    shown = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in offered
    ]
    expected = theirs.apply_chat_template(as_dicts(talk), tools=shown or None, add_generation_prompt=True)["input_ids"]
    assert renderer.render(talk, offered).tolist() == expected
