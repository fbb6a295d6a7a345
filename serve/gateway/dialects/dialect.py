"""The interface of a dialect: the translation between a model API and the conversation model.

Invariants:
- Dialects know nothing about sessions, tokens or engines. Unknown fields, betas, tool types and model names never break
  a run; a request that cannot be honoured raises a BadRequest, whose plain sentence is sent in the API's own error
  body.
- A stream ends with the API's terminator or with its error event, never otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.serve.gateway.conversation import TurnAnswer, TurnRequest
from headrace.serve.gateway.errors import WireError


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """Wire format of calls to a tool that is not a plain function. `freeform`: the call carries a single string instead
    of a JSON object (for us, the argument `input`)."""

    name: str
    namespace: str = ""
    freeform: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFields:
    """What a request asks to be told of the sampled tokens: their log-probabilities, and the ids of prompt and answer.
    With `names_ids`, the token of a log-probability is spelled `token_id:N` instead of its text."""

    logprobs: bool = False
    ids: bool = False
    names_ids: bool = False

    @property
    def any(self) -> bool:
        return self.logprobs or self.ids


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRequest:
    """Parsed request body. `model` is the name that the response repeats; `include_usage` requests a usage chunk at the
    end of the stream, in APIs where that is optional; `call_shapes` maps the names of the tools in `turn.tools` that
    are not plain functions to their shapes; `samples` is the number of answers, in APIs that can ask for several. The
    answers to a request with `token_fields` are `AnswerWithTokens`. `legacy_calls` answers with the field that OpenAI's
    API had before `tool_calls`."""

    turn: TurnRequest
    stream: bool
    model: str
    include_usage: bool = True
    call_shapes: Mapping[str, CallShape] = field(default_factory=dict)
    samples: int = 1
    token_fields: TokenFields = TokenFields()
    legacy_calls: bool = False


class Dialect(Protocol):
    """Model API that agents use. Stateless; `created_s` is in seconds since 1970."""

    @property
    def ping(self) -> bytes:
        """Bytes to write while a stream is waiting for its turn; agents ignore their content and take them as a sign of
        life."""

    def parse(self, body: bytes, headers: Mapping[str, str]) -> WireRequest:
        """Parse a request. Raises BadRequest, whose `field` is the JSON path of the invalid part."""

    def answer(
        self, request: WireRequest, turn: TurnAnswer, *, created_s: int, others: Sequence[TurnAnswer] = ()
    ) -> dict[str, object]:
        """Return the body of a response that is not streamed; `others` are further samples of the same request."""

    def stream(
        self, request: WireRequest, turn: TurnAnswer, *, created_s: int, others: Sequence[TurnAnswer] = ()
    ) -> bytes:
        """Return the same as server-sent events, terminator included."""

    def status(self, failure: WireError) -> int:
        """Return the HTTP status for a failure, chosen so that this API's clients stop after failures of the agent and
        retry after ours."""

    def error(self, failure: WireError) -> dict[str, object]:
        """Return the error body."""

    def refuses_in_stream(self, failure: WireError) -> bool:
        """Return whether this failure of a streaming request is sent as status 200 and `stream_error`, even if nothing
        has been sent yet."""

    def stream_error(self, request: WireRequest, failure: WireError) -> bytes:
        """Return the error as an event, for a stream that has sent only pings. It is the last event, and the body ends
        cleanly: if the connection were cut after it, Codex would assume a network failure and retry a request that was
        permanently refused."""

    def models(self, created_s: int) -> dict[str, object]:
        """Return the response to `GET /v1/models`: a single model, although every name is accepted."""

    def model(self, name: str, created_s: int) -> dict[str, object]:
        """Return the response to `GET /v1/models/{name}`, for any name."""
