"""Warnings and errors of actors as lines for the terminal of a run, of which a storm shows only a few.

Invariants:
- Of lines that differ only in numbers and ids, one is shown every `REPEAT_S`, with the number of those that were left
  out meanwhile; and at most `MOST` lines of all kinds are shown every `REPEAT_S`.
- Nothing is left out silently: the number of lines that were not shown is told, with the command that prints them.
- A line has no control characters, since agents write parts of some messages, and at most `MAX_CHARACTERS`.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace.actors.record.files.log_lines import RunLogs, Wanted

REPEAT_S: Final = 60.0
MOST: Final = 20
MAX_CHARACTERS: Final = 400
MAX_KINDS: Final = 1000
"""Kinds of lines that are remembered; the oldest are forgotten first."""
SHOWN: Final = Wanted(level=logging.WARNING)
_NAMES_OF_ONE = re.compile(r"\w*\d[\w.-]*")


@dataclass(slots=True)
class _Kind:
    """When a kind of line was shown last, and how many of it were left out since."""

    shown_s: float
    left_out: int = 0


class WarningLines:
    """Chooses and words the lines. `command` is the one that prints all of them; times are of any clock."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._kinds: dict[tuple[str, ...], _Kind] = {}
        self._began_s = float("-inf")
        self._shown = 0
        self._untold = 0
        """Lines that were left out, and whose number nothing has told yet."""

    def told(self, events: Iterable[Mapping[str, Any]], now_s: float) -> list[str]:
        """Return the lines to show for new events."""
        lines = []
        if now_s >= self._began_s + REPEAT_S:
            lines = self.left_out() if self._shown >= MOST else []
            self._began_s, self._shown = now_s, 0
        for event in events:
            kind = self._kinds.get(key := kind_of(event))
            is_repeated = kind is not None and now_s < kind.shown_s + REPEAT_S
            if self._shown >= MOST or is_repeated:
                self._untold += 1
                if kind is not None:
                    kind.left_out += 1
                continue
            self._shown += 1
            more = kind.left_out if kind is not None else 0
            self._untold = max(0, self._untold - more)
            lines.append(line_of(event) + (f" ({more} more like this before)" if more else ""))
            self._kinds.pop(key, None)
            self._kinds[key] = _Kind(now_s)
            if len(self._kinds) > MAX_KINDS:
                del self._kinds[next(iter(self._kinds))]
        return lines

    def left_out(self) -> list[str]:
        """Return a line about what was not shown, if anything was, and count anew."""
        count, self._untold = self._untold, 0
        for kind in self._kinds.values():
            kind.left_out = 0
        return [f"{count} more warnings: {self._command}"] if count else []


class TerminalWarnings:
    """What the actors of a run warn of from now on, for the terminal of its driver. `folder` has their logs."""

    def __init__(self, folder: Path, command: str) -> None:
        self._logs = RunLogs(folder, SHOWN, from_now=True)
        self._chosen = WarningLines(command)

    def new(self) -> list[str]:
        """Return the lines to show for what was logged since the last call. Blocks."""
        return self._chosen.told((line.event for line in self._logs.new_lines()), time.monotonic())

    def last(self) -> list[str]:
        """Return the lines to show at the end of the run. Blocks."""
        return [*self.new(), *self._chosen.left_out()]


def kind_of(event: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what lines have in common that differ only in numbers, ids and the number of the actor."""
    texts = (event["level"], str(event.get("logger", "")), event["actor"], event["message"][:MAX_CHARACTERS])
    return tuple(_NAMES_OF_ONE.sub("#", text) for text in texts)


def line_of(event: Mapping[str, Any]) -> str:
    """Return an event in plain words."""
    message = " ".join(event["message"].split())
    error = event.get("exception")
    if isinstance(error, str) and (last := error.rstrip().rpartition("\n")[2]) and last not in message:
        message = f"{message}: {last}"
    rollout = event.get("rollout")
    if isinstance(rollout, str) and rollout not in message:
        message = f"{message} (rollout {rollout} attempt {event.get('attempt', '?')})"
    noun = "warning" if event["level"] == "WARNING" else "error"
    line = f"{noun} of {event['actor']}: {message}"
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return shown if len(shown) <= MAX_CHARACTERS else f"{shown[:MAX_CHARACTERS]} ..."
