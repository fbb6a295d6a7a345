"""Renders messages with a Hugging Face chat template, without transformers.

Invariants:
- The text equals that of transformers' apply_chat_template: templates get the same environment and variables, `None` is
  omitted from messages, and the reasoning is passed under both its names.
- Every error that a template raises for messages that it does not support becomes TemplateRefused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from headrace.policies.errors import TemplateRefused, TokenizerInvalid

if TYPE_CHECKING:
    from jinja2.parser import Parser

TemplateMessage: TypeAlias = "dict[str, Any]"
"""Message with `role`, `content`, and optionally `reasoning_content`, `tool_calls`, `tool_call_id`, `name`."""


class Ending(StrEnum):
    """What follows the last message of a rendered conversation."""

    TURN = "turn"
    """The opening of the policy's turn."""
    OPEN = "open"
    """Nothing: the last message is the policy's, and it is not closed, so that the policy continues it."""
    CLOSED = "closed"
    """The end of the last message."""


class SharedTool(dict[str, Any]):
    """Description of a tool, `{"type": "function", "function": {...}}`, which must not be changed, because its JSON is
    cached."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._json: dict[tuple[object, ...], str] = {}

    def json(
        self,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        style = ensure_ascii, indent, separators, sort_keys
        if (known := self._json.get(style)) is None:
            known = self._json[style] = _dumps(self, *style)
        return known


class ChatTemplate:
    """Chat template from `chat_template.jinja` or tokenizer_config.json. Raises TokenizerInvalid."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        sources = _sources(folder, config)
        self.source: str = sources["default"]
        """Source text of the default template."""
        # The same environment as in transformers.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_from_template
        environment.globals["strftime_now"] = time.strftime
        try:
            self._compiled = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateError as error:
            raise TokenizerInvalid(f"{folder}: the chat template does not compile: {error}") from error
        self._tokens = {
            name: text for name, value in config.items() if name.endswith("_token") and (text := token_text(value))
        }

    def text(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool,
    ) -> str:
        """Render a conversation. Raises TemplateRefused."""
        shown = [{name: value for name, value in message.items() if value is not None} for message in messages]
        for message in shown:
            if "reasoning_content" in message:
                # The name that the template of gpt-oss reads.
                message["thinking"] = message["reasoning_content"]
        template = self._compiled["tool_use" if tools and "tool_use" in self._compiled else "default"]
        try:
            return template.render(
                self._tokens,
                messages=shown,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            reason = " ".join(str(error).split())
            raise TemplateRefused(f"the chat template refuses the messages: {reason}") from error
        except RecursionError as error:
            raise TemplateRefused("the chat template refuses the messages: nested too deeply") from error

    def ended(self, messages: Sequence[TemplateMessage], tools: Sequence[Mapping[str, Any]], ending: Ending) -> str:
        """Render a conversation with an ending. Raises TemplateRefused, also for a last message that the template does
        not show as a turn's opening followed by the message's text."""
        if ending is not Ending.OPEN:
            return self.text(messages, tools, add_generation_prompt=ending is Ending.TURN)
        opening = self.text(messages[:-1], tools, add_generation_prompt=True)
        opened = opening + str(messages[-1]["content"])
        if not self.text(messages, tools, add_generation_prompt=False).startswith(opened):
            raise TemplateRefused("the chat template rewrites the last message, so the message cannot be left open")
        return opened


def token_text(value: object) -> str:
    """Return the text of a token in tokenizer_config.json (a string, or an object with `content`); "" for none."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates by name. There may be a separate template for conversations with tools."""
    path = folder / "chat_template.jinja"
    found = path.read_text(encoding="utf-8") if path.exists() else config.get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    named = {}
    if isinstance(found, list):
        named = {item["name"]: item["template"] for item in found if isinstance(item, dict) and "template" in item}
    if not isinstance(named.get("default"), str):
        raise TokenizerInvalid(f"{folder} has no chat template: add chat_template.jinja")
    return named


class _Generation(jinja2.ext.Extension):
    """Extension for `{% generation %}`, which marks the policy's text for masks that are not needed here."""

    tags = {"generation"}  # noqa: RUF012 declared so in the base class

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return the JSON of a value, without Jinja's escaping of HTML."""
    if isinstance(value, SharedTool):
        return value.json(ensure_ascii, indent, (separators[0], separators[1]) if separators else None, sort_keys)
    return _dumps(value, ensure_ascii, indent, separators, sort_keys)


def _dumps(
    value: object, ensure_ascii: bool, indent: int | None, separators: tuple[str, str] | None, sort_keys: bool
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_from_template(message: str) -> None:
    raise jinja2.TemplateError(message)
