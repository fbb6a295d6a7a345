"""Exceptions raised by the package `serve`.

    ServeError
    ├── WireError                error response to an agent or operator: status, code, message
    │   ├── BadRequest           400, the request is wrong
    │   │   └── BodyUnreadable   the body's encoding or framing is broken
    │   ├── ContextExceeded      400, prompt over the context budget
    │   ├── SessionUnknown       400, no such session, or it is closed
    │   │   └── ExportUnknown    404, no finished session to export
    │   ├── SessionUnfinished    409, the session to export is still open
    │   ├── RequestTimeout       408, the request did not arrive in time
    │   ├── BodyTooLarge         413
    │   ├── TooManyRequests      429, the session has too much under way
    │   ├── AdminDenied          401
    │   ├── SessionExists        409
    │   └── InfraError           502, not the agent's fault: the session is marked
    │       ├── NoEngineOpen     503, every gate stayed closed until the deadline
    │       ├── GatewayBusy      503, no room for a request body until its deadline
    │       ├── LogBroken        500, the session log cannot be written or read
    │       └── GatewayBroken    500, a bug in the gateway
    ├── OptionRefused            an option of the command line is invalid
    └── GatewayUnreachable       the worker's client cannot reach the gateway, or got no usable answer

Invariant: every error survives pickling (all arguments after the message have defaults and live in `__dict__`).
"""

from __future__ import annotations

from typing import ClassVar, Final

SERVER_FAILED: Final = "The model server failed. Try again."


class ServeError(Exception):
    """Base class of the errors of this package."""


class WireError(ServeError):
    """Error that a dialect can report to its client. `code` is a stable word for programs, and the message is a
    sentence for people."""

    status: ClassVar[int] = 400
    code: ClassVar[str] = "invalid_request"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    @property
    def public_message(self) -> str:
        """The message that is sent to an agent."""
        return str(self)


class BadRequest(WireError):
    """The request cannot be honoured as it is; `field` names the part at fault."""


class BodyUnreadable(BadRequest):
    """The request body cannot be decoded: its content encoding or its chunks are broken."""


class ContextExceeded(WireError):
    """The rendered prompt leaves no room for a token. `tokens` is its length (None: too long to count), and `limit` is
    the context length. Every dialect words this error so that its agents compact their history. Knob:
    budgets.max_context_tokens."""

    code = "context_length_exceeded"

    def __init__(self, message: str, field: str | None = None, *, tokens: int | None = None, limit: int = 0) -> None:
        super().__init__(message, field)
        self.tokens = tokens
        self.limit = limit


class SessionUnknown(WireError):
    """No open session has this token or id (it was closed, or lost in a restart). The status is 400, so that agents
    stop immediately."""

    code = "unknown_session"


class ExportUnknown(SessionUnknown):
    """No finished session with this id is kept. Knobs: gateway.session_log_dir (`--state`) and
    gateway.finished_grace_s."""

    status = 404


class SessionUnfinished(WireError):
    """The session is still open: it can be exported once it has been finished."""

    status = 409
    code = "session_unfinished"


class RequestTimeout(WireError):
    """The head or the body of the request was not complete in time. Knobs: GatewayConfig.header_timeout_s and
    GatewayConfig.body_timeout_s."""

    status = 408
    code = "request_timeout"


class TooManyRequests(WireError):
    """The session has too many running requests, or the gateway holds too many bytes of its request bodies. Knob:
    GatewayConfig.max_body_bytes."""

    status = 429
    code = "rate_limit_exceeded"


class BodyTooLarge(WireError):
    """The request body is too large. Knob: gateway.max_body_bytes."""

    status = 413
    code = "body_too_large"


class AdminDenied(WireError):
    """The request to an admin route has no `Authorization: Bearer <admin token>`."""

    status = 401
    code = "admin_token_required"


class SessionExists(WireError):
    """A session with this id is already open."""

    status = 409
    code = "session_exists"


class InfraError(WireError):
    """An engine, the gateway or the network failed. If the failure reaches the agent, the outcome is infra, whatever
    the score. The message is for the session's record only, since it names hosts and paths that an agent must not
    see."""

    status = 502
    code = "engine_failed"

    @property
    def public_message(self) -> str:
        return SERVER_FAILED


class NoEngineOpen(InfraError):
    """No engine was available in time. Knobs: GatewayConfig.gate_wait_s, and the length of a push's gate lease."""

    status = 503
    code = "no_engine_open"


class GatewayBusy(InfraError):
    """The gateway had no room for a request body in time. Knobs: GatewayConfig.max_total_body_bytes and
    GatewayConfig.body_timeout_s."""

    status = 503
    code = "gateway_busy"


class LogBroken(InfraError):
    """The session log cannot be written or read, so that a restarted gateway would not know the answer. Knobs:
    gateway.session_log_dir, and its disk."""

    status = 500
    code = "session_log_broken"


class GatewayBroken(InfraError):
    """A bug in the gateway; the traceback is in the log."""

    status = 500
    code = "gateway_error"


class OptionRefused(ServeError):
    """A command-line option is invalid; the message names the option and the fix."""


class GatewayUnreachable(ServeError):
    """The gateway did not answer an admin call, or refused it (`answered` is true, and `code` is that of its error);
    the worker reports it as infra."""

    def __init__(self, message: str, *, answered: bool = False, code: str = "") -> None:
        super().__init__(message)
        self.answered = answered
        self.code = code


class ParserUnknown(ServeError):
    """No parser has this name. Knob: gateway.parser."""


class ParserMissing(ParserUnknown):
    """The parser needs SGLang, which is not installed. Set gateway.parser to another parser, or install SGLang beside
    the gateway."""
