"""Scanner for sampled outputs, which finds reasoning, text and calls in the order in which they were sampled.

Invariants:
- Only reasoning and calls are removed from the text; nothing else is lost except whitespace next to such markup.
- Calls inside reasoning are ignored, and reasoning tags inside a call are part of its arguments.
- Reasoning that is never closed was cut off: everything that follows is reasoning. A closing tag without an opening one
  closes reasoning that the prompt opened without our knowledge: everything before it is reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.serve.gateway.conversation import Reasoning, Text
from headrace.serve.gateway.parsing.base import ParsedBlock, ParsedCall, ParsedOutput

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ScannedCalls:
    """Calls in one piece of markup, and the position at which the markup ends."""

    calls: Sequence[ParsedCall]
    end: int


class CallMarkup(Protocol):
    """Call markup of one model family. `opening`, `closing` and `wrapping` are patterns of tags that begin and end a
    call, and of tags around several calls (`NOTHING` for none). `begins` matches the text after an opening tag of a
    call; otherwise the tag is only mentioned."""

    @property
    def opening(self) -> str: ...

    @property
    def closing(self) -> str: ...

    @property
    def wrapping(self) -> str: ...

    @property
    def begins(self) -> str: ...

    def read(self, text: str, start: int) -> ScannedCalls | None:
        """Return the calls in the markup whose opening tag is at `start`; None if it is malformed or cut off before its
        end."""


NOTHING = r"(?!)"


def scan(text: str, markup: CallMarkup | None, *, in_reasoning: bool) -> ParsedOutput:
    """Parse a whole output. Without `markup`, calls remain text."""
    return _Scan(text, markup).run(in_reasoning=in_reasoning)


@dataclass(slots=True)
class _Scan:
    text: str
    markup: CallMarkup | None
    parts: list[tuple[int, int, Sequence[ParsedBlock]]] = field(default_factory=list)
    """Start, end and blocks of the parts that are not text."""
    wraps: list[tuple[int, int, Sequence[ParsedBlock]]] = field(default_factory=list)
    lost_calls: int = 0
    reasoned: bool = False

    def run(self, *, in_reasoning: bool) -> ParsedOutput:
        tags, markup = f"(?P<think>{THINK})|(?P<end_think>{END_THINK})", self.markup
        if markup is not None:
            tags += f"|(?P<opening>{markup.opening})|(?P<closing>{markup.closing})|(?P<wrapping>{markup.wrapping})"
        pattern = re.compile(tags)
        position = self._reason(0, 0) if in_reasoning else 0
        while found := pattern.search(self.text, position):
            position = found.end()
            match found.lastgroup:
                case "think":
                    position = self._reason(*found.span())
                case "end_think":
                    if not self.reasoned:
                        thought = self.text[: found.start()].strip()
                        self.parts, self.wraps = [(0, position, (Reasoning(thought),) if thought else ())], []
                        self.lost_calls, self.reasoned = 0, True
                case "opening":
                    position = self._call(found)
                case "wrapping":
                    self.wraps.append((*found.span(), ()))
                case _:
                    self.lost_calls += 1
        if any(isinstance(block, ParsedCall) for _, _, blocks in self.parts for block in blocks):
            self.parts = sorted((*self.parts, *self.wraps), key=lambda part: part[:2])
        return ParsedOutput(tuple(self._blocks()), self.lost_calls)

    def _reason(self, start: int, inside: int) -> int:
        closing = self.text.find(END_THINK, inside)
        end = len(self.text) if closing < 0 else closing + len(END_THINK)
        thought = self.text[inside : len(self.text) if closing < 0 else closing].strip().removeprefix(THINK).strip()
        self.parts.append((start, end, (Reasoning(thought),) if thought else ()))
        self.reasoned = True
        return end

    def _call(self, found: re.Match[str]) -> int:
        """Read the call at an opening tag; return the position of its end."""
        markup, start = self.markup, found.end()
        assert markup is not None
        if call := markup.read(self.text, found.start()):
            self.parts.append((found.start(), call.end, call.calls))
            return call.end
        self.lost_calls += 1
        # A malformed call ends at its closing tag or at the next opening tag. A tag that is only mentioned ends itself.
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
