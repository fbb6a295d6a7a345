"""Readers for what a request demands of its answer: the choice of tools, and the format of the text.

Invariants:
- A forced call names only tools of the request; any other choice is refused, with the field that holds it.
- A forced call counts more than a format, which is about text.
- An unknown format is ignored, like other unknown fields; an unknown choice of tools is refused, because agents rely on
  it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.serve.gateway.conversation import Constraint, ConstraintKind, ToolSpec
from headrace.serve.gateway.dialects import fields
from headrace.serve.gateway.dialects.fields import JsonObject
from headrace.serve.gateway.errors import BadRequest

CHOICE = "tool_choice"


class Choice(NamedTuple):
    """Choice of tools: `allowed` is false if there must be no call, and `forced` is the constraint if there must be
    one."""

    allowed: bool = True
    forced: Constraint | None = None


def openai_choice(
    value: object, tools: Sequence[ToolSpec], name_of: Callable[[JsonObject, str], str], field: str = CHOICE
) -> Choice:
    """Return the choice of OpenAI's APIs: auto, none, required, an object with `name_of` a tool, or `allowed_tools`
    with the mode required. Raises BadRequest."""
    if value is None or value == "auto":
        return Choice()
    if value == "none":
        return Choice(allowed=False)
    if value == "required":
        return _forced(ConstraintKind.CALL, [], tools, field)
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        # Chat Completions has the two fields one level deeper.
        inner = value.get("allowed_tools")
        given = inner if isinstance(inner, dict) else value
        if given.get("mode") == "required":
            entries = fields.as_list(given.get("tools"), f"{field}.tools")
            objects = [(fields.as_object(entry, f"{field}.tools"), f"{field}.tools") for entry in entries]
            names = [name_of(entry, path) for entry, path in objects]
            if names:
                return _forced(ConstraintKind.CALL, names, tools, field)
    elif isinstance(value, dict):
        return _forced(ConstraintKind.NAMED_CALL, [name_of(value, field)], tools, field)
    raise BadRequest(f"{field} must be auto, none, required, a tool, or allowed_tools with the mode required.", field)


def anthropic_choice(value: object, tools: Sequence[ToolSpec]) -> Choice:
    """Return the choice of Anthropic's API: auto, none, any or a tool. Raises BadRequest."""
    if value is None:
        return Choice()
    choice = fields.as_object(value, CHOICE)
    match choice.get("type"):
        case None | "auto":
            return Choice()
        case "none":
            return Choice(allowed=False)
        case "any":
            return _forced(ConstraintKind.CALL, [], tools, CHOICE)
        case "tool":
            return _forced(ConstraintKind.NAMED_CALL, [fields.string(choice, "name", CHOICE)], tools, CHOICE)
    raise BadRequest(f"{CHOICE}.type must be auto, none, any or tool.", CHOICE)


def _forced(kind: ConstraintKind, names: Sequence[str], tools: Sequence[ToolSpec], field: str) -> Choice:
    known = {tool.name for tool in tools}
    if not known:
        raise BadRequest(f"{field} forces a call, but the request has no tools.", field)
    for name in names:
        if name not in known:
            raise BadRequest(f"{field}: the request has no tool {name!r}.", field)
    return Choice(forced=Constraint(kind, names=tuple(sorted(set(names))), field=field))


def text_format(value: object, where: str, *, nested: str = "") -> Constraint | None:
    """Return the constraint of a format of type `json_schema`, whose schema is in it or in its field `nested`, or
    `json_object`; None for others. Raises BadRequest."""
    if value is None:
        return None
    form = fields.as_object(value, where)
    if form.get("type") == "json_object":
        return Constraint(ConstraintKind.JSON_OBJECT, field=where)
    if form.get("type") != "json_schema":
        return None
    path = where
    if nested:
        path = f"{where}.{nested}"
        form = fields.as_object(form.get(nested), path)
    schema = fields.as_object(form.get("schema"), f"{path}.schema")
    fields.check_depth(schema, f"{path}.schema")
    return Constraint(ConstraintKind.JSON_SCHEMA, schema=fields.json_text(schema, path), field=where)
