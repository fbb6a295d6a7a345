"""Parsers of actions: each turns one answer of the policy into an action, or says why it cannot.

Invariants:
- A parser is a pure function of the answer. It never changes the policy's text: an action's arguments are parts of it.
- `actions` are the names that a parser can produce; None for tool calls, whose names the policy chooses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from headrace.actors.environments.environment import ANSWER, DONE, RESPOND, RUN, SEARCH, Action
from headrace.actors.services.chat import ChatReply


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """An answer that contains no action. `reason` is for the record; the policy reads the recipe's text."""

    reason: str


Parse: TypeAlias = "Callable[[ChatReply], Action | Malformed]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionParser:
    """A way to read actions. `stop` are the strings that end an answer after an action."""

    parse: Parse
    actions: frozenset[str] | None
    stop: tuple[str, ...] = ()
    uses_calls: bool = False
    is_raw: bool = False
    """Whether the parser reads the sampled text, reasoning included."""


def parse_line(reply: ChatReply) -> Action | Malformed:
    """Read an answer of one line as a command."""
    if not reply.text.strip() or "\n" in reply.text or "\0" in reply.text:
        return Malformed(reason="the answer is not one line")
    return Action(name=RUN, arguments={"command": reply.text})


_FENCE: Final = re.compile(r"```bash[ \t]*\n(.*?)```", re.DOTALL)


def parse_fence(reply: ChatReply) -> Action | Malformed:
    """Read the first block fenced by ```bash and ``` as a command."""
    found = _FENCE.search(reply.text)
    if found is None or not found[1].strip() or "\0" in found[1]:
        return Malformed(reason="the answer has no block ```bash ... ``` with a command")
    blocks = _FENCE.findall(reply.text)
    remarks = _one_of(len(blocks), "first", "code blocks")
    return Action(name=RUN, arguments={"command": found[1].strip("\n")}, remarks=remarks)


_DONE_TAG: Final = re.compile(r"<action>\s*done\s*</action>")
_COMMAND_TAG: Final = re.compile(r"<command>(.*?)</command>", re.DOTALL)


def parse_tags(reply: ChatReply) -> Action | Malformed:
    """Read `<action>done</action>` anywhere as the end, otherwise the last `<command>...</command>` as a command
    (kanishkg/endless-terminals). The command `done` ends, too."""
    if _DONE_TAG.search(reply.text):
        return Action(name=DONE)
    found = _COMMAND_TAG.findall(reply.text)
    if not found or not (command := found[-1].strip()) or "\0" in command:
        return Malformed(reason="the answer has neither <command>...</command> nor <action>done</action>")
    remarks = _one_of(len(found), "last", "commands")
    return Action(name=DONE) if command == DONE else Action(name=RUN, arguments={"command": command}, remarks=remarks)


def parse_calls(reply: ChatReply) -> Action | Malformed:
    """Read the first tool call; an answer without one is text for the user (the action `respond`)."""
    if not reply.calls:
        if not reply.text.strip():
            return Malformed(reason="the answer is empty")
        return Action(name=RESPOND, arguments={"content": reply.text})
    call = reply.calls[0]
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        return Malformed(reason=f"the arguments of {call.name} are not valid JSON")
    if not isinstance(arguments, dict):
        return Malformed(reason=f"the arguments of {call.name} are not an object")
    return Action(name=call.name, arguments=arguments, remarks=_one_of(len(reply.calls), "first", "calls"))


_SEARCH_TAGS: Final = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


def parse_search_tags(reply: ChatReply) -> Action | Malformed:
    """Read the first `<search>...</search>` or `<answer>...</answer>` (PeterGriffinJin/Search-R1)."""
    found = _SEARCH_TAGS.search(reply.text)
    if found is None:
        return Malformed(reason="the answer has neither <search>...</search> nor <answer>...</answer>")
    text = found[2].strip()
    if found[1] == ANSWER:
        return Action(name=ANSWER, arguments={"text": text})
    return Action(name=SEARCH, arguments={"query": text})


def _one_of(count: int, which: str, what: str) -> tuple[str, ...]:
    """Return the remark about an answer with more actions than are performed."""
    return (f"only the {which} of {count} {what} is run",) if count > 1 else ()


class ParserKind(StrEnum):
    """Form of the policy's actions."""

    LINE = "line"
    """The whole answer is one command line."""
    FENCE = "fence"
    """The first block fenced by ```bash is a command."""
    TAGS = "tags"
    """`<command>...</command>`, or `<action>done</action>`."""
    CALLS = "calls"
    """Tool calls; an answer without one is text for the user."""
    SEARCH = "search"
    """`<search>...</search>`, or `<answer>...</answer>`, at which an answer ends."""


PARSERS: Final = {
    ParserKind.LINE: ActionParser(parse=parse_line, actions=frozenset({RUN})),
    ParserKind.FENCE: ActionParser(parse=parse_fence, actions=frozenset({RUN})),
    ParserKind.TAGS: ActionParser(parse=parse_tags, actions=frozenset({RUN, DONE}), is_raw=True),
    ParserKind.CALLS: ActionParser(parse=parse_calls, actions=None, uses_calls=True),
    ParserKind.SEARCH: ActionParser(
        parse=parse_search_tags, actions=frozenset({SEARCH, ANSWER}), stop=("</search>", "</answer>"), is_raw=True
    ),
}
