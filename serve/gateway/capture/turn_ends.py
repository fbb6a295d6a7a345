"""The end of a sampled turn: its stop token or its first stop string, and the ids that remain of it.

Invariants:
- A turn ends with the token that completes its first stop string, even if the engine went on: engines stop after whole
  tokens, some only after several, and a request for stop strings may reach an engine that ignores them.
- The remaining ids are a prefix of the sampled ids, with their log-probabilities and version spans.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.policies.engine import Completion

if TYPE_CHECKING:
    from headrace.serve.gateway.rendering.render import Renderer


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCut:
    """A completion up to its end. `text` is the sampled text without the stop token, up to and including `stop_string`
    ("" if there was none). `dropped` counts the ids after the stop string, and `border` is True if the stop string ends
    inside the last remaining token."""

    completion: Completion
    text: str
    stop_string: str
    dropped: int
    border: bool


def cut_at_stop(completion: Completion, stop: Sequence[str], renderer: Renderer) -> TurnCut:
    """Return the completion up to the end of the first stop string in it."""
    ids = completion.output_ids
    closed = bool(ids) and ids[-1] in renderer.stop_ids
    text = renderer.decode(ids[:-1] if closed else ids)
    # The string that ends first is the one that an engine finds first; of several that end together, the longest.
    found = [(text.find(string) + len(string), -len(string), string) for string in stop if string in text]
    if not found:
        return TurnCut(completion=completion, text=text, stop_string="", dropped=0, border=False)
    end, _, string = min(found)

    def contains(length: int) -> bool:
        return string in renderer.decode(ids[:length])

    # From the end, where the stop string nearly always is: each probe decodes a prefix.
    most, step = len(ids), 1
    while step < most and contains(most - step):
        most, step = most - step, 2 * step
    length = bisect_left(range(most), True, lo=max(0, most - step), key=contains)
    if length < len(ids):
        completion = replace(
            completion,
            output_ids=ids[:length],
            logprobs=completion.logprobs[:length],
            spans=tuple(replace(span, end=min(span.end, length)) for span in completion.spans if span.start < length),
        )
    return TurnCut(
        completion=completion,
        text=text[:end],
        stop_string=string,
        dropped=len(ids) - length,
        border=len(renderer.decode(ids[:length])) != end,
    )
