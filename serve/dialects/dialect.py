"""The interface of a dialect: the translation between a model API and the conversation model.

Invariants:
- Dialects know nothing of sessions, tokens or engines. Unknown fields, betas, tool types and model names never break a
  run; a request that cannot be honoured is a BadRequest with a plain sentence, in the API's own error body.
- A stream ends with the API's terminator or with its error event, never otherwise.
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
    """Form of the calls of a tool that is not a plain function on the wire. `freeform`: the call carries one text
    instead of a JSON object (for us the argument `input`)."""

    name: str
    namespace: str = ""
    freeform: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRequest:
    """Parsed request body. `model` is the name that is echoed; `include_usage`: the stream ends with a usage chunk, if
    that is optional; `call_shapes`: shapes of the tools in `turn.tools` that are not plain functions, by name."""

    turn: TurnRequest
    stream: bool
    model: str
    include_usage: bool = True
    call_shapes: Mapping[str, CallShape] = field(default_factory=dict)


class Dialect(Protocol):
    """Model API that agents use. Stateless; `created_s` is in seconds since 1970."""

    @property
    def ping(self) -> bytes:
        """Bytes to write while a stream waits for its turn; agents ignore them, and take them as a sign of life."""
        ...

    def parse(self, body: bytes, headers: Mapping[str, str]) -> WireRequest:
        """Parse a request. Raises BadRequest, whose `field` names the JSON path at fault."""
        ...

    def answer(self, request: WireRequest, turn: TurnAnswer, *, created_s: int) -> dict[str, object]:
        """Return the body of an answer that is not streamed."""
        ...

    def stream(self, request: WireRequest, turn: TurnAnswer, *, created_s: int) -> bytes:
        """Return the whole turn as server-sent events, terminator included."""
        ...

    def status(self, failure: WireError) -> int:
        """Return the HTTP status at which this API's clients stop for failures of the agent, and retry for ours."""
        ...

    def error(self, failure: WireError) -> dict[str, object]:
        """Return the error body."""
        ...

    def refuses_in_stream(self, failure: WireError) -> bool:
        """Return whether a streaming request gets this failure as status 200 and `stream_error`, even if nothing was
        sent yet."""
        ...

    def stream_error(self, request: WireRequest, failure: WireError) -> bytes:
        """Return the error as an event, for a stream that has sent only pings. It is the last event, and the body ends
        cleanly: Codex takes a cut after it for a network failure, and retries what was refused for good."""
        ...

    def models(self, created_s: int) -> dict[str, object]:
        """Return the answer of `GET /v1/models`: a single model, although every name is accepted."""
        ...
