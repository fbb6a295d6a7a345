"""Grammars for the answers that requests demand, in the engines' form.

Invariants:
- Calls are spelled as the model's parser reads them, so an answer that follows its grammar to the end parses as
  demanded.
- Reasoning is never forbidden or forced. A model whose template knows `<think>` may reason before the demanded form;
  if the prompt has opened the reasoning, the form begins after the policy has closed it.
- Where text is demanded as JSON and calls are allowed, the policy has the choice between both.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, Final

import orjson

from headrace.policies.engine import Grammar, GrammarKind
from headrace.serve.gateway.conversation import Constraint, ConstraintKind, ToolSpec, TurnRequest
from headrace.serve.gateway.parsing.base import CallSyntax
from headrace.serve.gateway.parsing.scanner import END_THINK, THINK

MAX_BLANKS: Final = 16
"""Blanks in a row between the parts of JSON: enough to indent it, and a weak policy cannot go on in them. Older
releases of XGrammar have no limit."""


class Reasons(Enum):
    """How reasoning may precede an answer."""

    NEVER = auto()
    MAY = auto()
    """The policy may open it."""
    ALREADY = auto()
    """The prompt has opened it."""


def grammar_of(
    request: TurnRequest, constraint: Constraint, syntax: CallSyntax | None, reasons: Reasons
) -> Grammar | None:
    """Return the grammar of a request's constraint; None if it may need calls whose `syntax` is not known."""
    forces_call = constraint.kind.forces_call
    forms: list[dict[str, Any]] = []
    if forces_call or (request.tools and request.calls_allowed):
        if syntax is None:
            return None
        named = [tool for tool in request.tools if tool.name in constraint.names or not constraint.names]
        forms.append(_calls(named, syntax, single=constraint.kind is ConstraintKind.NAMED_CALL))
    if not forces_call:
        schema = constraint.schema or '{"type":"object"}'
        if not forms and reasons is Reasons.NEVER:
            return Grammar(kind=GrammarKind.JSON_SCHEMA, text=schema)
        forms.append({"type": "json_schema", "json_schema": orjson.loads(schema), "max_whitespace_cnt": MAX_BLANKS})
    form = forms[0] if len(forms) == 1 else {"type": "or", "elements": forms}
    # The blank line is that of Qwen's templates.
    reasoning = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": f"{END_THINK}\n\n"}
    if reasons is Reasons.ALREADY:
        form = {"type": "sequence", "elements": [reasoning, form]}
    elif reasons is Reasons.MAY:
        optional = {"type": "optional", "content": reasoning | {"begin": THINK}}
        form = {"type": "sequence", "elements": [optional, form]}
    document = {"type": "structural_tag", "format": form}
    text = orjson.dumps(document, default=dict, option=orjson.OPT_NON_STR_KEYS).decode()
    return Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=text)


def _calls(tools: list[ToolSpec], syntax: CallSyntax, *, single: bool) -> dict[str, Any]:
    """Return the structural tag of one call, or of one or more."""
    # Between elements of XML, more blanks than the line break of its usual form would become part of a string.
    style: dict[str, Any] = {"max_whitespace_cnt": MAX_BLANKS}
    if syntax.style != "json":
        style = {"style": syntax.style, "max_whitespace_cnt": 1}
    tags = [
        {
            "type": "tag",
            "begin": syntax.begin(tool.name),
            # Arguments are always an object, also of a tool whose schema does not say so.
            "content": {"type": "json_schema", "json_schema": {"type": "object"} | dict(tool.parameters)} | style,
            "end": syntax.end,
        }
        for tool in tools
    ]
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": syntax.separator,
        "at_least_one": True,
        "stop_after_first": single,
    }
