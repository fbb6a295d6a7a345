"""What every wire offers the gateway: a thin translation both ways.

Invariants:
- Nothing here knows sessions, tokens or engines. Unknown fields, betas, tool types and model names never break a run;
  what cannot be honoured is a BadRequest with a plain sentence, and the wire's own error body.
- A stream ends with the wire's terminator or with its error event, never otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.serve.conversation import TurnAnswer, TurnRequest
    from headrace.serve.errors import WireError


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """How a wire spells the calls of a tool that is no plain function there. `freeform`: the call carries one text
    instead of a JSON object (for us the argument `input`)."""

    name: str
    namespace: str = ""
    freeform: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRequest:
    """A parsed body. `model` is the name that is echoed; `include_usage`: the stream ends with a usage chunk where the
    wire makes that a choice; `call_shapes`: by the names of `turn.tools`, those that are no plain functions."""

    turn: TurnRequest
    stream: bool
    model: str
    include_usage: bool = True
    call_shapes: Mapping[str, CallShape] = field(default_factory=dict)


class Dialect(Protocol):
    """A wire. Stateless; `created_s` is in seconds since 1970."""

    @property
    def ping(self) -> bytes:
        """What may be written while a stream waits for its turn, before `stream`; agents pass over it, and count it as
        a sign of life."""
        ...

    def parse(self, body: bytes, headers: Mapping[str, str]) -> WireRequest:
        """Raises BadRequest, whose `field` names the JSON path at fault."""
        ...

    def answer(self, request: WireRequest, turn: TurnAnswer, *, created_s: int) -> dict[str, object]:
        """The body of an answer that is not streamed."""
        ...

    def stream(self, request: WireRequest, turn: TurnAnswer, *, created_s: int) -> bytes:
        """The whole turn as server-sent events, terminator included."""
        ...

    def status(self, failure: WireError) -> int:
        """The HTTP status with which this wire's clients react as they should: at once for what the agent did wrong,
        with a retry for what we did."""
        ...

    def error(self, failure: WireError) -> dict[str, object]:
        """The error body."""
        ...

    def refuses_in_stream(self, failure: WireError) -> bool:
        """Whether a request for a stream is told of this failure by status 200 and `stream_error`, even if nothing was
        written yet."""
        ...

    def stream_error(self, request: WireRequest, failure: WireError) -> bytes:
        """The error as an event, for a stream that has begun (with pings alone). Nothing follows, and the body ends
        cleanly: Codex takes a cut after it for a failure of the network, and tries again what was refused for good."""
        ...

    def models(self, created_s: int) -> dict[str, object]:
        """`GET /v1/models`: one name stands for all, every name is accepted."""
        ...
