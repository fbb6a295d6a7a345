"""What happens to a session, as values that can be kept and applied again.

Invariant: applying the same events in the same order gives the same session.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from headrace.serve.conversation import Purpose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.policies.engine import TokenSpan
    from headrace.serve.capture.matching import Drift
    from headrace.serve.conversation import TurnAnswer
    from headrace.serve.rendering.render import TokenIds


class Status(StrEnum):
    """What became of a sampled turn."""

    FINISHED = "finished"
    """Sampled to its end; its last byte has not left yet."""
    DELIVERED = "delivered"
    """Its last byte was handed to the connection."""
    ACCEPTED = "accepted"
    """The agent came back with it."""
    ABORTED = "aborted"
    """Cut: agent gone, wall time over, engine failed after partial output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What tells one lineage from another; `untrained`: the model name is served, not trained."""

    agent: str = ""
    purpose: Purpose = Purpose.TURN
    has_tools: bool = False
    knows_us: bool = False
    """Its messages echo a turn of the session's agents that is not on its path."""
    untrained: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether its root is one of the session's agents, and no side call beside them: where there are agents with
        tools, their conversations, summaries of these, and what quotes them."""
        return self.has_tools or self.knows_us or self.purpose is Purpose.COMPACTION


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
