"""Our names of spans and attributes in the words of OpenTelemetry: the one table to change when a convention changes.

Sources: the semantic conventions for generative AI (`gen_ai.*`: chat, invoke_agent, execute_tool), which collectors
know, and the proposed ones for reinforcement learning (`rl.*`: open-telemetry/semantic-conventions-genai, issue 88).
Files keep our names; a span that is sent has its conventional name, and ours as `headrace.span`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from opentelemetry.trace import SpanKind

from headrace.serve.tracing import span_names as names

OUR_NAME: Final = "headrace.span"


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """Name of a span elsewhere, followed by the value of the attribute `subject` where the span has it, and the
    attributes that such a span has there."""

    name: str
    subject: str = ""
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Mapping[str, str] = ()  # type: ignore[assignment]


SPANS: Final[Mapping[str, Convention]] = {
    names.TURN: Convention(
        name="chat",
        subject="gen_ai.request.model",
        kind=SpanKind.SERVER,
        attributes={names.OPERATION: "chat", "gen_ai.provider.name": "headrace"},
    ),
    names.ENGINE: Convention(name="engine", kind=SpanKind.CLIENT),
    names.AGENT: Convention(
        name="invoke_agent", subject="gen_ai.agent.name", attributes={names.OPERATION: "invoke_agent"}
    ),
    names.TOOL: Convention(name="execute_tool", subject=names.TOOL_NAME, attributes={names.OPERATION: "execute_tool"}),
    names.ROLLOUT: Convention(name="rl.sample", attributes={"rl.phase": "sample"}),
    names.EVALUATE: Convention(name="rl.reward", attributes={"rl.phase": "reward"}),
    names.STEP: Convention(name="rl.train", attributes={"rl.phase": "train"}),
    "push": Convention(name="rl.sync", attributes={"rl.phase": "sync"}),
}
"""Spans with a conventional name; the others keep ours."""

ATTRIBUTES: Final[Mapping[str, str]] = {
    names.CACHED_TOKENS: "gen_ai.usage.cache_read.input_tokens",
    names.REWARD: "rl.reward.value",
    names.STEP_NUMBER: "rl.loop.iteration",
    names.RUN_ID: "rl.run.id",
}
"""Attributes that are sent under a conventional name beside ours."""

PROJECT: Final = "openinference.project.name"
"""By this attribute arize-phoenix keeps traces apart: each run is a project."""
RESOURCE: Final[Mapping[str, str]] = {"rl.system": "headrace"}


def conventional_name(name: str, attributes: Mapping[str, Any]) -> str:
    """Return the name under which a span is sent."""
    convention = SPANS.get(name)
    if convention is None:
        return name
    subject = attributes.get(convention.subject)
    return f"{convention.name} {subject}" if subject else convention.name


def conventional_attributes(name: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes with which a span is sent."""
    convention = SPANS.get(name)
    also = {ATTRIBUTES[key]: value for key, value in attributes.items() if key in ATTRIBUTES}
    fixed = dict(convention.attributes) if convention is not None and convention.attributes else {}
    return {**fixed, **attributes, **also, OUR_NAME: name}


def conventional_resource(resource: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resource with which spans are sent."""
    also = {ATTRIBUTES[key]: value for key, value in resource.items() if key in ATTRIBUTES}
    return {**resource, **also, **RESOURCE, PROJECT: resource.get(names.RUN_ID) or "headrace"}


def kind_of(name: str) -> SpanKind:
    """Return the kind of a span in OpenTelemetry's sense."""
    convention = SPANS.get(name)
    return SpanKind.INTERNAL if convention is None else convention.kind
