"""Renders the text that a chat template writes after an assistant turn, without rendering the history before it.

Invariants:
- The text is the part after a mark inside the last assistant turn of a short artificial conversation, so it does not
  matter how the template shows, rewrites or strips that turn.
- `history_free` is True if all probed conversations continue in the same way after such a turn. Otherwise, this module
  must not be used.
- `leaves_open` is True if all probed conversations can end with an open turn. It does not depend on `history_free`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

from headrace.policies.errors import TemplateRefused
from headrace.policies.tokens.chat_template import ChatTemplate, Ending, TemplateMessage
from headrace.policies.tokens.template_shape import SYSTEM, TOOL, USER, TemplateShape

_MARK = "quagmire4zt"
_OPEN_TEXTS = ("turf", "turf\n\n<peat>bog</peat>\n\n", " turf ", "<think>mire</think>\n\nturf", "")
"""Texts of an open turn, with the blanks and the markup that templates strip or rewrite."""
_MAX_ENDS = 1024
"""Maximum size of the cache that is keyed by tool names: the policy writes these names, so their number is
unbounded."""


@dataclass(frozen=True, slots=True)
class _End:
    """End of an assistant turn that is the last message: the number of marks in it, the text after the last mark, and
    the position in that text where the turn is closed. `closes` is True if a stop token closes it."""

    marks: int
    text: str
    closing: int
    closes: bool


class Continuation:
    """Continuation texts of one template. `stops` are the texts of the tokens that end a turn."""

    def __init__(self, template: ChatTemplate, shape: TemplateShape, stops: Sequence[str]) -> None:
        self._template = template
        self._shape = shape
        self._stops = stops
        self._ends: dict[tuple[str, ...], _End] = {}
        self.history_free = self._is_history_free()
        self.leaves_open = self._leaves_open()

    def after(
        self,
        calls: Sequence[dict[str, Any]],
        messages: Sequence[TemplateMessage],
        ending: Ending = Ending.TURN,
    ) -> tuple[bool, str]:
        """Return True if the template closes an assistant turn with a stop token, and the text from there (or else from
        the end of the turn) up to the ending. Raises TemplateRefused."""
        history = [USER, self._turn(calls)]
        names = tuple(call["function"]["name"] for call in calls)
        if (end := self._ends.get(names)) is None:
            end = self._end_of(history, [])
            # Mistral's templates write a call's id, which differs for every call, after its arguments.
            if len(self._ends) < _MAX_ENDS and not any(call["id"] in end.text for call in calls):
                self._ends[names] = end
        return self._tail(end, history, messages, [], ending)

    def _end_of(self, history: Sequence[TemplateMessage], tools: Sequence[Any]) -> _End:
        alone = self._template.text(history, tools, add_generation_prompt=False)
        text = alone[alone.rfind(_MARK) + len(_MARK) :]
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        return _End(alone.count(_MARK), text, min(found, default=len(text)), bool(found))

    def _tail(
        self,
        end: _End,
        history: Sequence[TemplateMessage],
        messages: Sequence[TemplateMessage],
        tools: Sequence[Any],
        ending: Ending = Ending.TURN,
    ) -> tuple[bool, str]:
        whole = self._template.ended([*history, *messages], tools, ending)
        behind = whole.split(_MARK, end.marks)
        if not end.marks or len(behind) <= end.marks or not behind[-1].startswith(end.text):
            raise TemplateRefused("the chat template rewrites earlier turns when messages follow")
        return end.closes, behind[-1][end.closing :]

    def _turn(self, calls: Sequence[dict[str, Any]]) -> TemplateMessage:
        """Return an assistant turn with the mark everywhere that the turn may end."""
        turn: TemplateMessage = {"role": "assistant", "content": _MARK}
        if calls and self._shape.calls:
            shown = list(calls) if self._shape.parallel else [calls[-1]]
            last = shown[-1]
            shown[-1] = self._shape.call(last["id"], last["function"]["name"], {"text": _MARK})
            turn["tool_calls"] = shown
        return turn

    def _is_history_free(self) -> bool:
        for calls, messages in self._continuations():
            try:
                expected = self.after(calls, messages)
            except TemplateRefused:
                return False
            for (history, tools), reasoned in product(self._histories(), (False, True)):
                turn = self._turn(calls)
                if reasoned:
                    turn["reasoning_content"] = "mire"
                try:
                    end = self._end_of([*history, turn], tools)
                    if self._tail(end, [*history, turn], messages, tools) != expected:
                        return False
                except TemplateRefused:
                    # Not a difference if the template refuses the conversation itself.
                    with suppress(TemplateRefused):
                        self._template.text([*history, turn, *messages], tools, add_generation_prompt=True)
                        return False
        return True

    def _leaves_open(self) -> bool:
        for history, tools in self._histories():
            try:
                self._template.text(history, tools, add_generation_prompt=True)
            except TemplateRefused:
                continue
            for text in _OPEN_TEXTS:
                try:
                    self._template.ended([*history, {"role": "assistant", "content": text}], tools, Ending.OPEN)
                except TemplateRefused:
                    return False
        return True

    def _call(self, number: int) -> dict[str, Any]:
        return self._shape.call(f"callprob{number}", "fern", {"rush": "sedge"})

    def _result(self, number: int) -> TemplateMessage:
        return {"role": "tool", "content": "bog", "tool_call_id": f"callprob{number}", "name": "fern"}

    def _continuations(self) -> Iterator[tuple[list[dict[str, Any]], list[TemplateMessage]]]:
        """Yield calls of a turn with messages that may follow it."""
        yield [], [USER]
        if self._shape.repeated_users:
            yield [], [USER, USER]
        if not self._shape.results:
            return
        yield [self._call(1)], [self._result(1)]
        yield [self._call(1)], [self._result(1), USER]
        if self._shape.parallel:
            yield [self._call(1), self._call(2)], [self._result(1), self._result(2)]

    def _histories(self) -> Iterator[tuple[list[TemplateMessage], list[Any]]]:
        """Yield messages and tools of conversations that continue with the policy's turn."""
        said: TemplateMessage = {"role": "assistant", "content": "turf"}
        reasoned: TemplateMessage = {**said, "reasoning_content": "mire"}
        lead = [SYSTEM] if self._shape.system else []
        plain = [[USER], [*lead, USER], [*lead, USER, said, USER, said, USER], [USER, reasoned, USER]]
        if self._shape.results:
            plain.extend(self._tool_histories(lead, said))
        for history in plain:
            yield history, []
            if self._shape.tools:
                yield history, [TOOL]

    def _tool_histories(self, lead: list[TemplateMessage], said: TemplateMessage) -> Iterator[list[TemplateMessage]]:
        called, result = self._shown_calls(1), self._result(1)
        reasoned = {**called, "reasoning_content": "mire"}
        yield [*lead, USER, called, result]
        yield [*lead, USER, called, result, called, result]
        yield [USER, called, result, said, USER]
        yield [USER, reasoned, result, reasoned, result]
        if self._shape.parallel:
            yield [*lead, USER, self._shown_calls(1, 2), result, self._result(2)]
            yield [*lead, USER, self._shown_calls(1, 2), result, self._result(2), said, USER]

    def _shown_calls(self, *numbers: int) -> TemplateMessage:
        turn: TemplateMessage = {"role": "assistant", "content": "turf"}
        if self._shape.calls:
            turn["tool_calls"] = [self._call(number) for number in numbers]
        return turn
