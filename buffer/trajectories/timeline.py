"""Timeline of an attempt: its parts as segments with positions, which may overlap.

Invariants:
- A settled timeline has at most `MAX_SEGMENTS` segments, in order of their begin. The shortest of more are merged into
  the sum of their part, so that the seconds of each part, segments and merged ones together, stay exact.
- However many segments are added, at most twice as many are held.
- No segment has a negative length, whatever clocks do.
- Texts of a policy are on one line, without control characters, and short.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

from headrace.buffer.primitives.critical_path import Segment

MAX_SEGMENTS: Final = 256
MAX_MERGED_PARTS: Final = 64
MAX_DETAIL_CHARACTERS: Final = 80
ALL_DETAILS_CHARACTERS: Final = 2_560
"""Characters of all different details of a timeline: with more details than fit, each is cut shorter."""
LEAST_DETAIL_CHARACTERS: Final = 8
TICKS_PER_S: Final = 10_000
"""Resolution of stored times: a tenth of a millisecond."""
_REST: Final = "other"


class Merged(NamedTuple):
    """Number and total seconds of the segments of one part that were merged."""

    number: int
    seconds: float


@dataclass(slots=True)
class Timeline:
    """Timeline of one attempt or session, in seconds since it began. `merged` has the sums of short segments by part;
    `left_out` counts intervals that are in no sum, since a clock had `MAX_INTERVALS` already or their times were
    reversed. `began_at_s` is the Unix time of the begin on its worker's clock; None in
    virtual time."""

    segments: list[Segment] = field(default_factory=list)
    merged: dict[str, Merged] = field(default_factory=dict)
    left_out: int = 0
    began_at_s: float | None = None

    def add(self, segment: Segment) -> None:
        """Add a segment; one without a length is ignored."""
        if segment.end_s > segment.start_s:
            self.segments.append(segment)
            if len(self.segments) >= 2 * MAX_SEGMENTS:
                self._merge_shortest()

    def add_all(self, segments: Iterable[Segment], *, shift_s: float = 0.0) -> None:
        """Add segments, moved by `shift_s`."""
        for each in segments:
            self.add(each.moved(shift_s))

    def add_merged(self, part: str, number: int, seconds: float) -> None:
        """Add the sum of segments that somebody else has merged."""
        if part not in self.merged and len(self.merged) >= MAX_MERGED_PARTS:
            part = _REST
        known = self.merged.get(part, Merged(0, 0.0))
        self.merged[part] = Merged(known.number + number, known.seconds + seconds)

    def include(self, other: Timeline, *, shift_s: float = 0.0) -> None:
        """Add the segments and sums of another timeline, moved by `shift_s`."""
        self.add_all(other.segments, shift_s=shift_s)
        for part, each in other.merged.items():
            self.add_merged(part, each.number, each.seconds)
        self.left_out += other.left_out

    def settled(self) -> Self:
        """Return the same timeline within its bounds and in order; this one is not to be used any more."""
        self._merge_shortest()
        self.segments.sort(key=lambda each: (each.start_s, each.end_s))
        details = {each.detail for each in self.segments}
        longest = min(
            MAX_DETAIL_CHARACTERS, max(LEAST_DETAIL_CHARACTERS, ALL_DETAILS_CHARACTERS // (len(details) or 1))
        )
        if any(len(detail) > longest for detail in details):
            self.segments = [each._replace(detail=each.detail[:longest]) for each in self.segments]
        return self

    def _merge_shortest(self) -> None:
        if len(self.segments) <= MAX_SEGMENTS:
            return
        self.segments.sort(key=lambda each: each.start_s - each.end_s)
        for each in self.segments[MAX_SEGMENTS:]:
            self.add_merged(each.part, 1, each.seconds)
        del self.segments[MAX_SEGMENTS:]

    def to_json(self) -> str:
        """Return the form in which the ledger stores a timeline: a table of texts, and for each segment the place of
        its part there, the time from the begin of the one before to its own and its length in tenths of a
        millisecond, its turn, and the place of its detail."""
        texts: dict[str, int] = {"": 0}
        rows, before = [], 0
        for each in self.segments:
            begin = round(each.start_s * TICKS_PER_S)
            row = [
                texts.setdefault(each.part, len(texts)),
                begin - before,
                round(each.end_s * TICKS_PER_S) - begin,
                each.turn,
                texts.setdefault(each.detail, len(texts)),
            ]
            before = begin
            while not row[-1]:
                row.pop()
            rows.append(row)
        merged = {part: [each.number, round(each.seconds, 4)] for part, each in self.merged.items()}
        document: dict[str, Any] = {"texts": list(texts), "segments": rows}
        document |= {"merged": merged} if merged else {}
        document |= {"left_out": self.left_out} if self.left_out else {}
        document |= {} if self.began_at_s is None else {"began_at_s": round(self.began_at_s, 4)}
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the result of `to_json`. Raises KeyError, IndexError, TypeError, ValueError."""
        document = json.loads(text)
        texts = document["texts"]

        def segments() -> Iterator[Segment]:
            begin = 0
            for row in document["segments"]:
                part, since, length, turn, detail = (*row, 0, 0, 0, 0)[:5]
                begin += since
                begin_s, end_s = begin / TICKS_PER_S, (begin + length) / TICKS_PER_S
                yield Segment(texts[part], begin_s, end_s, turn, texts[detail])

        return cls(
            segments=list(segments()),
            merged={part: Merged(number, seconds) for part, (number, seconds) in document.get("merged", {}).items()},
            left_out=document.get("left_out", 0),
            began_at_s=document.get("began_at_s"),
        )


def head_of(text: str) -> str:
    """Return the beginning of a text of a policy on one line, without control characters."""
    beginning = text[: 4 * MAX_DETAIL_CHARACTERS]
    plain = "".join(letter if letter.isprintable() else " " for letter in beginning)
    return " ".join(plain.split())[:MAX_DETAIL_CHARACTERS]


def head_of_call(arguments: str) -> str:
    """Return the head of a tool call from the JSON text of its arguments: its `command`, or else its first text. Of
    arguments that are no JSON object, or long, the text itself."""
    # An edit of a large file is not parsed for 80 characters.
    if len(arguments) <= _PARSED_CHARACTERS:
        try:
            given = json.loads(arguments)
        except (ValueError, RecursionError):
            given = None
        if isinstance(given, dict):
            values = [given[name] for name in ("command", "cmd") if name in given] or list(given.values())
            first = next((value for value in values if isinstance(value, str | list)), "")
            return head_of(first if isinstance(first, str) else " ".join(map(str, first[:MAX_DETAIL_CHARACTERS])))
    return head_of(arguments)


_PARSED_CHARACTERS: Final = 16_384
