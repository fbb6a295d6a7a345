"""Finds the messages in the text of a prompt, of which a session keeps only the ids.

Invariants:
- A message begins where the template's opening of a user's or of the policy's message is. Openings have a control
  token, which no message can contain, so that a message cannot pretend to be another one.
- No text is lost except openings, closings and the opening of the policy's turn. A prompt that cannot be split is one
  message, markup included.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from headrace.policies.errors import TemplateRefused
from headrace.serve.gateway.conversation import Role, say
from headrace.serve.gateway.rendering.render import Renderer

Source: TypeAlias = Literal["system", "user", "agent"]
"""Who wrote a message, in the words of ATIF; results of tools are the user's."""
_SYSTEM: Final = "moss"
_USER: Final = "kelp"
_AGENT: Final = "fern"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageShape:
    """Texts around the messages of a template: `openings` maps those that begin a message to its source, and `closings`
    are those that end one. `system` is the text before a first system message. Without openings, every prompt is one
    message."""

    visible: Callable[[str], str]
    openings: Mapping[str, Source] = field(default_factory=dict)
    closings: tuple[str, ...] = ()
    system: str = ""

    @classmethod
    def of(cls, renderer: Renderer) -> MessageShape:
        """Return the shape of a renderer's template. It has no openings if those of the template have no control tokens
        or cannot be told apart."""
        probes = (say(Role.SYSTEM, _SYSTEM), say(Role.USER, _USER), say(Role.ASSISTANT, _AGENT), say(Role.USER, _USER))
        none = cls(visible=renderer.visible)
        try:
            text = renderer.decode(renderer.render(probes, ()))
        except TemplateRefused:
            return none
        system, *between = re.split(f"{_SYSTEM}|{_USER}|{_AGENT}", text)
        if len(between) != len(probes):
            return none
        (closes_system, user), (closes_user, agent), (closes_agent, again), (_, turn) = (
            _closing_and_opening(part, renderer.visible) for part in between
        )
        openings: dict[str, Source] = {user: "user", again: "user", agent: "agent", turn: "agent"}
        is_clear = {user, again}.isdisjoint({agent, turn})
        if not is_clear or any(renderer.visible(opening) == opening for opening in openings):
            return none
        closings = tuple(filter(None, dict.fromkeys((closes_user, closes_system, closes_agent))))
        return cls(visible=renderer.visible, openings=openings, closings=closings, system=system)

    def messages(self, text: str, *, is_root: bool, is_open: bool) -> list[tuple[Source, str]]:
        """Return the messages in the text of a prompt. It ends with the opening of the policy's turn, or if it
        `is_open`, with the policy's own message. If it is not a root, it begins with what closes the turn before."""
        if not self.openings:
            return [("user", text)]
        pattern = "|".join(map(re.escape, sorted(self.openings, key=len, reverse=True)))
        first, *others = re.split(f"({pattern})", text)
        if is_root:
            first = first.removeprefix(self.system)
        found: list[tuple[Source, str]] = [("system" if is_root else "user", first)]
        found += [(self.openings[opening], body) for opening, body in zip(others[::2], others[1::2], strict=True)]
        if len(found) > 1 and not is_open:
            del found[-1]
        messages = []
        for index, (source, body) in enumerate(found):
            # What comes first is a message only if the template shows one without an opening.
            if index or self.visible(body).strip():
                closing = next((closing for closing in self.closings if body.endswith(closing)), "")
                messages.append((source, body.removesuffix(closing)))
        return messages


def _closing_and_opening(between: str, visible: Callable[[str], str]) -> tuple[str, str]:
    """Return the text that closes a message and the one that opens the next. If there are several control tokens
    between two messages, the first one closes."""
    controls = [found for found in re.finditer(r"<[^<>]+>", between) if not visible(found[0])]
    start = controls[1].start() if len(controls) > 1 else 0
    return between[:start], between[start:]
