"""Votes of a model, for the judge of steps and the judge of outcomes."""

from __future__ import annotations

import re
import zlib
from typing import Final

_BOXED: Final = re.compile(r"\\boxed\{\s*([+-]?\d{1,12}(?:\.\d{1,12})?)\s*\}")


def vote_seed(subject: str, vote: int) -> int:
    """Return the seed of a vote, which depends on what is judged and on the vote's number alone."""
    return zlib.crc32(subject.encode()) % (1 << 20) * 1000 + vote


def last_score(text: str, lowest: float, highest: float) -> float | None:
    r"""Return the last number in a `\boxed{}`, or None if there is none or it is out of range. The last one, since a
    judge may quote what the agent wrote before it decides."""
    found = _BOXED.findall(text)
    return float(found[-1]) if found and lowest <= float(found[-1]) <= highest else None
