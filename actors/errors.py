"""Errors of the actors.

ActorError
├── ActorLost           the actor's process died or is restarting: transient, call again (idempotently)
├── ActorGone           a lost actor did not return in time: permanent
└── StartFailed         an actor could not be started: permanent, names actor and reason
RunError
├── ConfigError         a key, the reason and the fix, on one line
├── RunExists           the run directory is in use
├── RunMissing          the run does not exist or cannot be resumed
├── DiskFull            the run directory's disk is full
├── TasksParked         every training task is parked, so there is nothing left to train on
├── RunInterrupted      the run was interrupted during startup, so there is no summary yet
└── RunStalled          the run made no progress for too long: contains the diagnosis
"""

from __future__ import annotations


class ActorError(Exception):
    """An actor could not answer."""


class ActorLost(ActorError):
    """The process of an actor died or is restarting; its current calls may or may not have had an effect."""


class ActorGone(ActorError):
    """A lost actor did not return in time."""


class StartFailed(ActorError):
    """An actor did not start."""


class RunError(Exception):
    """The run cannot start or continue; the message is one line with the fix."""


class ConfigError(RunError):
    """A recipe, key, value, model directory or task file is invalid."""


class RunExists(RunError):
    """The run directory exists already, or another process drives the run."""


class RunMissing(RunError):
    """The run does not exist or cannot be resumed."""


class DiskFull(RunError):
    """The disk of the run directory is full."""


class TasksParked(RunError):
    """Every training task is parked, after repeated infrastructure failures of its rollouts."""


class RunStalled(RunError):
    """The run made no progress for `service.stall_s`."""


class RunInterrupted(RunError):
    """The run was interrupted before its service had started; it can be resumed."""


def first_cause(error: BaseException) -> BaseException:
    """Return the first error in a TaskGroup's (possibly nested) exception group; the others are consequences of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class EngineGroupError(RunError):
    """An operator's request to the engine group failed."""


class EngineAddressTaken(EngineGroupError):
    """Two engines would have the same address."""


class EngineUnknown(EngineGroupError):
    """There is no engine with that name."""


class EngineNotAdded(EngineGroupError):
    """No server at the address answers as an engine that can be attached."""


class EngineNotServing(EngineGroupError):
    """The engine was added but has not loaded the latest weights; it receives no traffic until it has."""
