"""Conversion of conversations to the messages and tools that chat templates accept.

Invariants:
- Contents are data: every text in a message, call or tool is split wherever a control token is spelled out.
- The result for a message depends only on the message and the template, so that a growing conversation only appends.
- Nothing is dropped. Content that the template cannot render is converted: system messages after the first to user
  messages; unsupported tools, calls and results to text in the Hermes format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import orjson

from headrace.policies.tokens.added_tokens import ControlTokens
from headrace.policies.tokens.chat_template import SharedTool, TemplateMessage
from headrace.policies.tokens.pieces import BoundedCache
from headrace.policies.tokens.template_shape import TemplateShape
from headrace.serve.gateway.conversation import Message, Reasoning, Role, Text, ToolCall, ToolResult, ToolSpec

_TOOLS_BYTES = 16 * 2**20
_GAP = "\n\n"
_TOOLS_BEFORE = "# Tools\n\nYou may call these functions:\n<tools>\n"
_TOOLS_AFTER = (
    "\n</tools>\n\nFor each call, write a JSON object with the function's name and its arguments within "
    '<tool_call></tool_call> tags:\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'
)


class TemplateMessages:
    """Converter of messages and tools for one template."""

    def __init__(self, shape: TemplateShape, control: ControlTokens) -> None:
        self._shape = shape
        self._as_data = control.as_data
        self._tools: BoundedCache[bytes, list[SharedTool]] = BoundedCache(_TOOLS_BYTES)

    def tools(self, tools: Sequence[ToolSpec]) -> list[SharedTool]:
        """Return the converted tools; equal descriptions yield the same objects in every request."""
        described = [(tool.name, tool.description, tool.parameters) for tool in tools]
        try:
            key = orjson.dumps(described, default=dict, option=orjson.OPT_NON_STR_KEYS)
        except TypeError:
            # Too deeply nested for a key; converted anew each time.
            key = b""
        shown = self._tools.get(key) if key else None
        if shown is None:
            shown = []
            for tool in tools:
                function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
                shown.append(SharedTool({"type": "function", "function": self._data(function)}))
            if key:
                self._tools.put(key, shown, 10 * len(key))
        return shown

    def whole(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> tuple[list[TemplateMessage], list[SharedTool]]:
        """Return the messages and tools of a whole conversation."""
        first = next((i for i, message in enumerate(messages) if message.role is not Role.SYSTEM), len(messages))
        lead = [self._as_data(message.text) for message in messages[:first]]
        shown_tools = self.tools(tools)
        if shown_tools and not self._shape.tools:
            listed = "\n".join(tool.json() for tool in shown_tools)
            lead.append(_TOOLS_BEFORE + listed + _TOOLS_AFTER)
            shown_tools = []
        shown = list(self._following(messages[first:], {}))
        if lead:
            role = "system" if self._shape.system else "user"
            shown.insert(0, {"role": role, "content": _GAP.join(lead)})
        return self._joined(shown, among_first=bool(lead) and not self._shape.system), shown_tools

    def after(
        self, calls: Sequence[ToolCall], messages: Sequence[Message]
    ) -> tuple[list[dict[str, Any]], list[TemplateMessage]]:
        """Return the calls of a sampled turn and the messages that follow it. For results of calls that the parser did
        not find, calls are added, since templates refuse results without calls."""
        names = {call.id: call.name for call in calls}
        shown = self._joined(list(self._following(messages, names)))
        if not (shown and shown[0]["role"] == "tool" and self._shape.calls):
            return [], shown
        if calls:
            return [self._call(call) for call in calls], shown
        lone = [message["tool_call_id"] for message in shown if message["role"] == "tool"]
        return [self._shape.call(call_id, "unknown", {}) for call_id in lone], shown

    def _following(self, messages: Sequence[Message], names: dict[str, str]) -> Iterator[TemplateMessage]:
        """Convert the messages; `names` maps the ids of the calls so far to their tool names."""
        for message in messages:
            if message.role is Role.ASSISTANT:
                names.update((call.id, call.name) for call in message.calls)
                yield from self._assistant(message)
            elif message.role is Role.TOOL:
                yield from self._results(message, names)
            else:
                yield {"role": "user", "content": self._as_data(message.text)}

    def _assistant(self, message: Message) -> Iterator[TemplateMessage]:
        said = self._as_data("".join(block.text for block in message.blocks if isinstance(block, Text)))
        shown: TemplateMessage = {"role": "assistant", "content": said}
        if reasoning := "".join(block.text for block in message.blocks if isinstance(block, Reasoning)):
            shown["reasoning_content"] = self._as_data(reasoning)
        calls = message.calls
        if not self._shape.calls:
            shown["content"] = "\n".join(part for part in (said, *map(self._call_as_text, calls)) if part)
            calls = ()
        at_once = len(calls) if self._shape.parallel else 1
        if calls:
            shown["tool_calls"] = [self._call(call) for call in calls[:at_once]]
        yield shown
        for call in calls[at_once:]:
            yield {"role": "assistant", "content": "", "tool_calls": [self._call(call)]}

    def _results(self, message: Message, names: Mapping[str, str]) -> Iterator[TemplateMessage]:
        results = [block for block in message.blocks if isinstance(block, Text | ToolResult)]
        if not self._shape.results:
            texts = (f"<tool_response>\n{self._as_data(result.text)}\n</tool_response>" for result in results)
            yield {"role": "user", "content": "\n".join(texts)}
            return
        for result in results:
            call_id = result.call_id if isinstance(result, ToolResult) else ""
            shown: TemplateMessage = {
                "role": "tool",
                "content": self._as_data(result.text),
                "tool_call_id": self._call_id(call_id),
            }
            if name := names.get(call_id):
                shown["name"] = self._as_data(name)
            yield shown

    def _call(self, call: ToolCall) -> dict[str, Any]:
        arguments = _object_of(call.arguments)
        shown = self._as_data(call.arguments) if arguments is None else self._data(arguments)
        return self._shape.call(self._call_id(call.id), self._as_data(call.name), shown)

    def _call_as_text(self, call: ToolCall) -> str:
        arguments = _object_of(call.arguments)
        shown = call.arguments if arguments is None else arguments
        text = json.dumps({"name": call.name, "arguments": shown}, ensure_ascii=False)
        return f"<tool_call>\n{self._as_data(text)}\n</tool_call>"

    def _call_id(self, call_id: str) -> str:
        if self._shape.short_ids:
            # Mistral's templates accept only ids of nine letters or digits.
            return blake2b(call_id.encode(errors="replace"), digest_size=5).hexdigest()[:9]
        return self._as_data(call_id)

    def _data(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._as_data(value)
        if isinstance(value, Mapping):
            return {self._as_data(str(key)): self._data(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._data(item) for item in value]
        return value

    def _joined(self, shown: list[TemplateMessage], *, among_first: bool = False) -> list[TemplateMessage]:
        """Join consecutive user messages if the template refuses them; otherwise join only a system message that has
        been given the user role with the first message."""
        joined: list[TemplateMessage] = []
        for number, message in enumerate(shown):
            joins = not self._shape.repeated_users or (among_first and number == 1)
            if joins and joined and message["role"] == joined[-1]["role"] == "user":
                joined[-1] = {"role": "user", "content": joined[-1]["content"] + _GAP + message["content"]}
            else:
                joined.append(message)
        return joined


def _object_of(arguments: str) -> dict[str, Any] | None:
    """Return the arguments as a JSON object; None if they are not one."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
