"""Errors of engines and of the weight push. Every one survives pickling and names the knob to turn.

PolicyError
|- ModelInvalid            a model directory or snapshot cannot be used
|- EngineError             a call to an inference engine failed
|  |- EngineUnavailable    no connection, connection lost, or a 5xx reply
|  |  `- EngineDown        nothing listens there: the request never arrived
|  |- EngineTimeout        no reply within the deadline
|  |- EngineRefused        a 4xx reply: `status`, `message`
|  |  |- SessionAlreadyOpen  somebody else's weight update is open, or one was left open
|  |  |- NoSession         weights came, or an update was to end, without one that is open
|  |  |- UnknownGroup      the engine is in no process group of that name
|  |  |- FlushRefused      requests hold the cache: pause them by retract or abort first
|  |  `- WeightsMixed      some weights or some of the cache are of another version: discard the engine
|  |- EngineReplyInvalid   a reply without the keys of the contract
|  |- RequestInvalid       our own check refused the request; nothing was sent
|  `- EngineStartFailed    an engine process did not announce itself
|     `- EngineSettingsInvalid  no process was started: port, environment or model
`- PushError               a weight push failed
   |- GroupFailed          a process group could not be formed or used
   |- SenderFailed         the sender process died or reported an error
   `- SenderTimeout        the sender missed a deadline; it was killed

Invariant: nothing here imports torch, aiohttp or any other heavy library.
"""

from __future__ import annotations


class PolicyError(Exception):
    """Root of all errors of this folder but the learner's."""


class ModelInvalid(PolicyError):
    """A model directory, a config or a snapshot cannot be used; the message names the file."""


class EngineError(PolicyError):
    """A call to an inference engine failed."""


class EngineUnavailable(EngineError):
    """The engine is not there: no connection, a connection lost in mid-call, or a 5xx reply."""


class EngineDown(EngineUnavailable):
    """Nothing listens at the engine's address: the request never arrived."""


class EngineTimeout(EngineError):
    """No reply within the deadline that the message names."""


class EngineRefused(EngineError):
    """The engine answered with a 4xx status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message

    def __str__(self) -> str:
        return f"engine answered {self.status}: {self.message}"


class SessionAlreadyOpen(EngineRefused):
    """A weight update session is open already: somebody else's, or one that nobody ended."""


class NoSession(EngineRefused):
    """Weights came, or a session was to end, while none was open."""


class UnknownGroup(EngineRefused):
    """The engine is in no process group of that name."""


class FlushRefused(EngineRefused):
    """Requests hold the cache: pause them by retract or abort first, or let them end."""


class WeightsMixed(EngineRefused):
    """The engine changed some of its weights and not all, or kept a cache of others: only a new one is clean again."""


class EngineReplyInvalid(EngineError):
    """The reply lacks a key or has a wrong type: not the contract this client speaks."""


class RequestInvalid(EngineError):
    """The request was refused before it was sent (ids outside the vocabulary, nothing to sample)."""


class EngineStartFailed(EngineError):
    """An engine process ended or stayed silent before it announced its address."""


class EngineSettingsInvalid(EngineStartFailed):
    """No engine process was started: its port is taken, or its environment or model is missing."""


class PushError(PolicyError):
    """A weight push, or one part of it, failed."""


class GroupFailed(PushError):
    """A process group could not be formed or used; it is discarded, never reused."""


class SenderFailed(PushError):
    """The sender process died or reported an error."""


class SenderTimeout(SenderFailed):
    """The sender missed its deadline and was killed: a hung transfer costs the sender."""
