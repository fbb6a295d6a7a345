"""Probes the features of a chat template by rendering.

Invariant: a feature is supported if its text appears in the result; a template that drops or refuses it does not
support it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.policies.errors import TemplateRefused
from headrace.policies.tokens.chat_template import ChatTemplate, SharedTool, TemplateMessage

USER: TemplateMessage = {"role": "user", "content": "kelp"}
SYSTEM: TemplateMessage = {"role": "system", "content": "moss"}
TOOL = SharedTool(
    {
        "type": "function",
        "function": {
            "name": "fern",
            "description": "reed",
            "parameters": {"type": "object", "properties": {"sedge": {"type": "string"}}},
        },
    }
)
_IDS = ("callprobe1", "call1pro2")
"""Call ids for probing. Mistral's templates accept only ids of nine letters and digits: the first is too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateShape:
    """Features that a template supports. `calls`, `results` and `tools`: tool calls in an assistant turn, messages of
    the role `tool`, and tool descriptions. `parallel`: several calls in one turn. `text_arguments`: arguments must be a
    JSON string instead of an object; `any_arguments`: text that is not valid JSON is accepted too. `short_ids`: a call
    id must have nine letters or digits. `repeated_users`: two user messages may follow each other."""

    system: bool
    tools: bool
    calls: bool
    results: bool
    parallel: bool
    text_arguments: bool
    any_arguments: bool
    short_ids: bool
    repeated_users: bool

    def call(self, call_id: str, name: str, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
        """Return a tool call in the format of this template. `arguments` is a string if it is not a JSON object."""
        taken: object = arguments
        if isinstance(arguments, str):
            taken = arguments if self.any_arguments or self.text_arguments else {"arguments": arguments}
        elif self.text_arguments:
            taken = json.dumps(arguments, ensure_ascii=False)
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": taken}}


def shape_of(template: ChatTemplate) -> TemplateShape:
    """Return the features of a template. Raises TemplateRefused if it refuses a single user message."""
    template.text([USER], add_generation_prompt=True)
    style = _call_style(template)
    text_arguments, call_id = style or (False, _IDS[0])
    one = _turn(_call("fern", "sedge", text=text_arguments, call_id=call_id))
    broken = _turn({**one["tool_calls"][0], "function": {"name": "fern", "arguments": "{peat"}})
    other = _call("fern", "heath", text=text_arguments, call_id=call_id)
    result: TemplateMessage = {"role": "tool", "content": "bog", "tool_call_id": call_id, "name": "fern"}
    with_calls = style is not None
    return TemplateShape(
        system=_shows(template, [SYSTEM, USER], "moss"),
        tools=_shows(template, [USER], "fern", tools=[TOOL]),
        calls=with_calls,
        results=_shows(template, [USER, one if with_calls else _answer(), result], "bog"),
        parallel=with_calls and _shows(template, [USER, _turn(*one["tool_calls"], other)], "sedge", "heath"),
        text_arguments=text_arguments,
        any_arguments=with_calls and _shows(template, [USER, broken], "{peat"),
        short_ids=call_id == _IDS[1],
        repeated_users=_shows(template, [USER, USER, _answer(), USER, USER], "kelp"),
    )


def _call_style(template: ChatTemplate) -> tuple[bool, str] | None:
    """Return the format in which the template shows calls: True if arguments are a string, and an id that the template
    accepts."""
    for text in (False, True):
        for call_id in _IDS:
            turn = _turn(_call("fern", "sedge", text=text, call_id=call_id))
            result = {"role": "tool", "content": "bog", "tool_call_id": call_id, "name": "fern"}
            if _shows(template, [USER, turn], "fern", "sedge") and _shows(template, [USER, turn, result]):
                return text, call_id
    for text in (False, True):
        if _shows(template, [USER, _turn(_call("fern", "sedge", text=text, call_id=_IDS[0]))], "fern", "sedge"):
            return text, _IDS[0]
    return None


def _shows(
    template: ChatTemplate, messages: Sequence[TemplateMessage], *texts: str, tools: Sequence[SharedTool] = ()
) -> bool:
    try:
        shown = template.text(messages, tools, add_generation_prompt=True)
    except TemplateRefused:
        return False
    return all(text in shown for text in texts)


def _answer() -> TemplateMessage:
    return {"role": "assistant", "content": "turf"}


def _turn(*calls: dict[str, Any]) -> TemplateMessage:
    return {"role": "assistant", "content": "turf", "tool_calls": list(calls)}


def _call(name: str, value: str, *, text: bool, call_id: str) -> dict[str, Any]:
    arguments: object = {"rush": value}
    if text:
        arguments = json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
