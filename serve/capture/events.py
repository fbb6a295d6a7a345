"""What happens to a session, as values that can be kept and applied again.

Invariant: applying the same events in the same order gives the same session.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.policies.engine import TokenSpan
    from headrace.serve.capture.matching import Drift
    from headrace.serve.capture.trie import Origin, Status
    from headrace.serve.conversation import TurnAnswer
    from headrace.serve.rendering.render import TokenIds


class Exhausted(StrEnum):
    """The budget that ended the agent first."""

    NONE = ""
    """None: the agent ended by itself."""
    TURNS = "turns"
    """budgets.max_turns"""
    TOKENS = "tokens"
    """budgets.max_sampled_tokens"""
    CONTEXT = "context"
    """budgets.max_context_tokens"""
    WALL = "wall"
    """budgets.wall_s"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """A turn was sampled, whole or (status ABORTED) in part. `parent` is the id of the turn it
    continues; `delta` are the ids of its prompt below the parent,
    `wishes` is what `wishes_of` gives for its request."""

    parent: str
    parts: tuple[bytes, ...]
    delta: TokenIds
    origin: Origin
    wishes: str
    answer: TurnAnswer
    ids: Sequence[int]
    logprobs: Sequence[float]
    spans: tuple[TokenSpan, ...]
    status: Status
    truncated: bool
    lost_calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The agent came back with a turn, so it has that and all before it; `drift` says how the echo differs."""

    turn_id: str
    drift: Drift


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """The last byte of an answer was handed to the connection, at `at` (monotonic seconds of this host)."""

    turn_id: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A failure that is not the agent's reached it."""

    failure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """A budget ran out; the first one counts."""

    budget: Exhausted


Event: TypeAlias = Recorded | Accepted | Delivered | Failed | Spent
