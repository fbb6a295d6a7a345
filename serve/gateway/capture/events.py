"""The events of a session, as values that can be stored and replayed.

Invariant: applying the same events in the same order produces the same session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from headrace.buffer.trajectories.token_kinds import KindRuns
from headrace.buffer.trajectories.types import VersionSpan
from headrace.serve.gateway.capture.echoes import Drift
from headrace.serve.gateway.conversation import RequestPurpose, TurnAnswer
from headrace.serve.gateway.rendering.render import TokenIds


class Status(StrEnum):
    """Delivery status of a sampled turn."""

    FINISHED = "finished"
    """Sampled to the end; its last byte has not been sent yet."""
    DELIVERED = "delivered"
    """Its last byte has been passed to the connection."""
    ACCEPTED = "accepted"
    """The agent has sent it back in a request."""
    ABORTED = "aborted"
    """Cut off: the agent disconnected, or the engine failed after partial output."""
    CUT = "cut"
    """Cut off because the session's wall time ran out."""

    @property
    def is_partial(self) -> bool:
        """True for a turn without an end, which has no answer."""
        return self in (Status.ABORTED, Status.CUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageOrigin:
    """Origin of a lineage, by which lineages are distinguished. `untrained` means that the model name is served but not
    trained."""

    agent: str = ""
    purpose: RequestPurpose = RequestPurpose.TURN
    has_tools: bool = False
    knows_us: bool = False
    """True when the lineage's messages echo a turn of the session's agents that is not on the lineage's path."""
    untrained: bool = False

    @property
    def is_ours(self) -> bool:
        """True for a conversation of the session's agents, false for a side call. In sessions with tools, the agents'
        conversations are those that have tools, and those that summarise or quote such a conversation."""
        return self.has_tools or self.knows_us or self.purpose is RequestPurpose.COMPACTION


class Exhausted(StrEnum):
    """Budget whose exhaustion ended the agent."""

    NONE = ""
    """The agent ended on its own."""
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
    """Event: a turn was sampled, completely or (status ABORTED or CUT) in part. `parent` is the id of the turn
    that it follows; `delta` are the ids of its prompt below the parent, and `options` is the `options_digest` of its
    request. `kinds` are those of `delta`, None if they are not known.

    `opened` is the number of characters of the policy's message that the agent wrote at the end of the prompt, for the
    policy to continue (None: the policy begins the message). With `resumes`, these characters are the whole delta: the
    agent inserted them into the message of the turn `parent`, as an observation. `dropped` ids were sampled after the
    first stop string; they are not in `ids`. With `border`, the stop string ends within the last of `ids`.

    `constraint` is the kind of the request's constraint ("" for none). If it was `honoured`, `ids` were sampled from
    the distribution over what its grammar allows, whose log-probabilities they have."""

    parent: str
    parts: tuple[bytes, ...]
    delta: TokenIds
    origin: LineageOrigin
    options: str
    answer: TurnAnswer
    ids: Sequence[int]
    logprobs: Sequence[float]
    spans: tuple[VersionSpan, ...]
    status: Status
    truncated: bool
    lost_calls: int
    opened: int | None = None
    resumes: bool = False
    dropped: int = 0
    border: bool = False
    kinds: KindRuns | None = None
    constraint: str = ""
    honoured: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Event: the agent echoed a turn, so it has received that turn and all turns before it; `drift` is how the echo
    differs."""

    turn_id: str
    drift: Drift


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """Event: the last byte of an answer was passed to the connection."""

    turn_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Event: a request got the answer of an earlier, equal one again, since that answer was lost."""

    turn_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Event: a failure that the agent did not cause has reached it."""

    failure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Event: a budget ran out; only the first such event counts."""

    budget: Exhausted


Event: TypeAlias = Recorded | Accepted | Delivered | Replayed | Failed | Spent
