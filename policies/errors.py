"""Errors of engines and weight pushes. All can be pickled, and name the setting to change.

PolicyError
|- ModelInvalid            a model directory or snapshot cannot be used
|- EngineError             a call to an inference engine failed
|  |- EngineUnavailable    no connection, a lost connection, or a 5xx reply
|  |  `- EngineDown        nothing is listening there: the request never arrived
|  |- EngineTimeout        no reply within the deadline
|  |- EngineRefused        a 4xx reply: `status`, `message`
|  |  |- SessionAlreadyOpen  a weight update session is already open
|  |  |- NoSession         no weight update session is open
|  |  |- UnknownGroup      the engine is not in a process group of that name
|  |  |- PromptTooLong     the prompt leaves no room in the engine's context
|  |  |- GrammarRefused    the engine's grammar cannot express the form that was asked for
|  |  |- GrammarMissing    the engine has no grammar
|  |  |- FlushRefused      requests use the cache: pause them by retract or abort first
|  |  `- WeightsMixed      some weights or cached values belong to another version: discard the engine
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

import re
from collections.abc import Mapping

from headrace.buffer.trajectories.types import RolloutId


class PolicyError(Exception):
    """Base class of all errors in policies, except the learner's."""


class ModelInvalid(PolicyError):
    """A model directory, a config or a snapshot cannot be used; the message names the file."""


class EngineError(PolicyError):
    """A call to an inference engine failed."""


class EngineUnavailable(EngineError):
    """The engine could not be reached, the connection was lost during a call, or the reply was a 5xx."""


class EngineDown(EngineUnavailable):
    """Nothing is listening at the engine's address: the request never arrived."""


class EngineTimeout(EngineError):
    """The engine did not reply within the deadline given in the message."""


class EngineRefused(EngineError):
    """The engine answered with a 4xx status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message

    def __str__(self) -> str:
        return f"engine answered {self.status}: {self.message}"


class SessionAlreadyOpen(EngineRefused):
    """A weight update session is already open, because another client opened it or it was not ended."""


class NoSession(EngineRefused):
    """Weights were sent, or the end of a session was requested, without an open session."""


class UnknownGroup(EngineRefused):
    """The engine is not in a process group of that name."""


class PromptTooLong(EngineRefused):
    """The prompt, or the prompt with the tokens to sample, is longer than the engine's context length."""

    @property
    def limit(self) -> int | None:
        """The context length in tokens, if the engine's sentence names it."""
        named = re.search(r"context length(?: of)? \(?(\d+)", self.message)
        return int(named[1]) if named else None


class GrammarRefused(EngineRefused):
    """The engine's grammar cannot express the form that was asked for: an invalid or unsupported JSON schema."""

    @property
    def reason(self) -> str:
        """Why, in the grammar's own words and without the engine's name."""
        stated = self.message.partition(" grammar: ")[2] or "it takes too long to compile"
        # XGrammar begins with the time and the place in its source.
        return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", stated).strip()


class GrammarMissing(EngineRefused):
    """The engine has no grammar: an SGLang server with `--grammar-backend none`, or an embedded engine without the
    package llguidance."""


class FlushRefused(EngineRefused):
    """Requests are using the cache: pause them by retract or abort first, or let them finish."""


class WeightsMixed(EngineRefused):
    """The engine changed only some of its weights, or kept keys and values that were cached with other weights: it must
    be replaced by a new one."""


class EngineReplyInvalid(EngineError):
    """The reply lacks a key or has a wrong type."""


class RequestInvalid(EngineError):
    """The client refused the request before sending it (ids outside the vocabulary, nothing to sample)."""


class EngineStartFailed(EngineError):
    """An engine process exited, or failed to announce its address in time."""


class EngineSettingsInvalid(EngineStartFailed):
    """No engine process was started: its port is taken, or its environment or model is missing."""


class PushError(PolicyError):
    """A weight push, or one part of it, failed."""


class GroupFailed(PushError):
    """A process group could not be formed or used; it is discarded, never reused."""


class SenderFailed(PushError):
    """The sender process died or reported an error."""


class SenderTimeout(SenderFailed):
    """The sender missed its deadline and was killed, because a transfer cannot be cancelled."""


class TokenizerInvalid(ModelInvalid):
    """A tokenizer file is missing, unreadable or incomplete."""


class TokenizerMismatch(TokenizerInvalid):
    """The ids of the tokenizer do not match the model; the message has both numbers."""


class TemplateRefused(TokenizerInvalid):
    """The chat template refuses the messages, or cannot be extended turn by turn."""


class LearnerError(Exception):
    """Base class of all errors that a learner itself raises."""


class LearnerAlreadyOpen(LearnerError):
    """The process already has a learner; Megatron and the default process group are process-wide."""


class LearnerNotOpen(LearnerError):
    """The learner has no model: `open` was not called or failed, or `close` was called."""


class DeviceMissing(LearnerError):
    """The learner should train on a CUDA device, and torch finds none."""


class RowUnusable(LearnerError):
    """A row does not match the model, or cannot be trained with its mask. `refused` has the reason by rollout id, if
    the learner knows which rollouts to leave out; it can train the others."""

    def __init__(self, message: str, refused: Mapping[RolloutId, str] | None = None) -> None:
        super().__init__(message, refused)
        self.refused = dict(refused or {})

    def __str__(self) -> str:
        return str(self.args[0])


class CheckpointUnreadable(LearnerError):
    """A directory is not a complete checkpoint of a known format."""


class CheckpointDamaged(CheckpointUnreadable):
    """Files in a checkpoint directory are missing, truncated or altered, or contradict each other."""


class CheckpointMismatch(CheckpointUnreadable):
    """A checkpoint was trained with another architecture, vocabulary or objective; the message names both."""


class NonFiniteRun(LearnerError):
    """`max_skipped_in_a_row` steps in a row were skipped: the run has diverged."""


class LearnerSettingsInvalid(LearnerError):
    """A learner cannot work with its settings, its devices or the installed trainer; the message names both sides."""


class RankFailed(LearnerError):
    """A training process died or raised; the other ranks were killed, and only a new learner can go on."""


class BatchReleased(LearnerError):
    """The trainer of the user gave a batch back untrained; it can be trained later."""


class LeaseLost(LearnerError):
    """The trainer of the user no longer has the right to its batch or version, and must ask what to load."""


class TrainerRefused(LearnerError):
    """A request of the user's trainer does not fit its batch or the state of the run."""


class TrainerStateLost(LearnerError):
    """The trainer of the user lost its state: the steps since the last checkpoint are undone in a new epoch."""
