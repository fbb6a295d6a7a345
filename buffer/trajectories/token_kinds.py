"""Kinds of the tokens of a row: who wrote them.

Invariants:
- The kinds of a row cover all its tokens, or the row has none: a template may hide where messages begin and end.
- Tokens at the beginning of several rows of a trajectory are observations (or warnings) in one of them. In the others,
  they are part of the prompt.
- Kinds are stored and sent as runs of equal kinds, since a row has few changes of kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

KindRuns: TypeAlias = tuple[tuple[int, int], ...]
"""Pairs of a kind and the number of consecutive tokens that have it; neighbours differ in kind."""


class TokenKind(IntEnum):
    """Kind of a token. The numbers are stored, and must not change."""

    PROMPT = 0
    """Body of a message before the policy's first turn, or of an observation that another row has."""
    SCAFFOLD = 1
    """Everything else that is not sampled: role markers, generation prompts, tool descriptions, and messages in the
    policy's role that it did not sample."""
    OBSERVATION = 2
    """Body of a user's, tool's or system's message that came after the policy's first turn."""
    WARNING = 3
    """Part of such a body that is marked as a warning, for example about the format of a turn (Chat Completions, in
    sessions that may mark warnings)."""
    SAMPLED = 4
    """Sampled by the policy, trained or not."""


KINDS: Final = len(TokenKind)
OBSERVED: Final = (TokenKind.OBSERVATION, TokenKind.WARNING)
"""Kinds of the bodies that came after the policy's first turn."""


def to_runs(kinds_T: npt.NDArray[np.uint8]) -> KindRuns:
    """Return the runs of an array of kinds."""
    if not len(kinds_T):
        return ()
    starts = np.concatenate(([0], np.flatnonzero(np.diff(kinds_T)) + 1))
    lengths = np.diff(starts, append=len(kinds_T))
    return tuple(zip(kinds_T[starts].tolist(), lengths.tolist(), strict=True))


def from_runs(runs: Iterable[Iterable[int]]) -> npt.NDArray[np.uint8]:
    """Return the kinds, of shape T. Raises ValueError for an unknown kind or an empty run."""
    pairs = [(int(kind), int(length)) for kind, length in runs]
    if not all(0 <= kind < KINDS and length > 0 for kind, length in pairs):
        raise ValueError(f"a run of token kinds is not a kind below {KINDS} with a positive length")
    kinds = np.array([kind for kind, _ in pairs], dtype=np.uint8)
    return np.repeat(kinds, [length for _, length in pairs])
