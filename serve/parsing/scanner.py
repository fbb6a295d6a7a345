"""From left to right through an output: reasoning, text and calls, in the order sampled.

Invariants:
- Only what became reasoning or a call leaves the text; of the rest nothing is lost but blanks beside such markup.
- Calls inside reasoning are no calls, and tags of reasoning inside a call are its arguments.
- Reasoning that is never closed was cut: all that follows is reasoning. A closing tag without an opening one closes
  what the prompt opened unknown to us: all before it is reasoning.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from headrace.serve.conversation import Reasoning, Text
from headrace.serve.parsing.base import ParsedCall, ParsedOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.serve.parsing.base import ParsedBlock

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Found:
    """Calls that one piece of markup holds, and where it ends in the text."""

    calls: Sequence[ParsedCall]
    end: int


class CallMarkup(Protocol):
    """How a family writes calls. `opening`, `closing` and `wrapping` are patterns: of tags that begin and end a call,
    and of tags around several calls (`NOTHING` where there are none). `begins` matches what follows an opening tag that
    means a call; else the tag is only talked about."""

    @property
    def opening(self) -> str: ...

    @property
    def closing(self) -> str: ...

    @property
    def wrapping(self) -> str: ...

    @property
    def begins(self) -> str: ...

    def read(self, text: str, start: int) -> Found | None:
        """The call whose opening tag is at `start`; None when it is broken, or cut before it was complete."""
        ...


NOTHING = r"(?!)"


def scan(text: str, markup: CallMarkup | None, *, in_reasoning: bool) -> ParsedOutput:
    """Read a whole output. Without `markup` calls stay text."""
    return _Scan(text, markup).run(in_reasoning=in_reasoning)


@dataclass(slots=True)
class _Scan:
    text: str
    markup: CallMarkup | None
    parts: list[tuple[int, int, Sequence[ParsedBlock]]] = field(default_factory=list)
    """Start, end and blocks of what is no text."""
    wraps: list[tuple[int, int, Sequence[ParsedBlock]]] = field(default_factory=list)
    lost_calls: int = 0
    reasoned: bool = False

    def run(self, *, in_reasoning: bool) -> ParsedOutput:
        tags = re.compile(_tags_of(self.markup))
        position = self._reason(0, 0) if in_reasoning else 0
        while found := tags.search(self.text, position):
            position = self._at(found)
        if any(isinstance(block, ParsedCall) for _, _, blocks in self.parts for block in blocks):
            self.parts = sorted((*self.parts, *self.wraps), key=lambda part: part[:2])
        return ParsedOutput(tuple(self._blocks()), self.lost_calls)

    def _at(self, found: re.Match[str]) -> int:
        """What a tag begins; returns where it ends."""
        match found.lastgroup:
            case "think":
                return self._reason(*found.span())
            case "end_think":
                return self._end_unopened(*found.span())
            case "opening":
                return self._call(found)
            case "wrapping":
                self.wraps.append((*found.span(), ()))
            case _:
                self.lost_calls += 1
        return found.end()

    def _reason(self, start: int, inside: int) -> int:
        closing = self.text.find(END_THINK, inside)
        end = len(self.text) if closing < 0 else closing + len(END_THINK)
        thought = self.text[inside : len(self.text) if closing < 0 else closing].strip().removeprefix(THINK).strip()
        self.parts.append((start, end, (Reasoning(thought),) if thought else ()))
        self.reasoned = True
        return end

    def _end_unopened(self, start: int, end: int) -> int:
        if not self.reasoned:
            thought = self.text[:start].strip()
            self.parts, self.wraps = [(0, end, (Reasoning(thought),) if thought else ())], []
            self.lost_calls, self.reasoned = 0, True
        return end

    def _call(self, found: re.Match[str]) -> int:
        assert self.markup is not None
        if call := self.markup.read(self.text, found.start()):
            self.parts.append((found.start(), call.end, call.calls))
            return call.end
        self.lost_calls += 1
        return self._past_broken(self.markup, found.end())

    def _past_broken(self, markup: CallMarkup, start: int) -> int:
        """The end of a broken call, which may be where the next one begins; `start`, if its tag was only talked
        about."""
        edge = re.compile(f"(?P<opening>{markup.opening})|{markup.closing}").search(self.text, start)
        closes = edge is not None and edge.lastgroup is None
        inside = self.text[start : edge.start() if edge else len(self.text)]
        if not re.match(markup.begins, inside) and (THINK in inside or END_THINK in inside or not closes):
            return start
        if edge is None:
            return len(self.text)
        return edge.end() if closes else edge.start()

    def _blocks(self) -> list[ParsedBlock]:
        blocks: list[ParsedBlock] = []
        position = 0
        for start, end, found in (*self.parts, (len(self.text), len(self.text), None)):
            between = self.text[position:start]
            between = between.lstrip() if position else between
            between = between if found is None else between.rstrip()
            blocks.extend((Text(between),) if between else ())
            blocks.extend(found or ())
            position = end
        return blocks


def _tags_of(markup: CallMarkup | None) -> str:
    think = f"(?P<think>{THINK})|(?P<end_think>{END_THINK})"
    if markup is None:
        return think
    return f"{think}|(?P<opening>{markup.opening})|(?P<closing>{markup.closing})|(?P<wrapping>{markup.wrapping})"
