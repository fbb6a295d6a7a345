"""Errors of the actors.

ActorError
├── ActorLost           the actor's process died or is restarting: transient, call again (idempotently)
├── ActorGone           a lost actor did not come back in time: permanent
└── StartFailed         an actor could not be started: permanent, names actor and reason
RunError
├── ConfigError         a key, the reason and the fix, on one line
├── RunExists           the run directory is taken
├── RunMissing          there is no such run, or it cannot be resumed
├── DiskFull            the run directory's disk has no room left
├── TasksParked         every training task is parked: nothing is left to train on
├── RunInterrupted      it was interrupted while it started: there is nothing to sum up yet
└── RunStalled          nothing progressed for too long: carries the diagnosis
"""

from __future__ import annotations


class ActorError(Exception):
    """An actor could not answer."""


class ActorLost(ActorError):
    """The process behind an actor died or is restarting; what it was doing may or may not have happened."""


class ActorGone(ActorError):
    """A lost actor did not come back in time."""


class StartFailed(ActorError):
    """An actor did not start."""


class RunError(Exception):
    """The run cannot start or go on; the message is one line with the fix."""


class ConfigError(RunError):
    """A wrong recipe, key, value, model directory or task file."""


class RunExists(RunError):
    """The run directory is taken."""


class RunMissing(RunError):
    """There is no such run, or nothing in it to resume."""


class DiskFull(RunError):
    """The disk of the run directory has no room left."""


class TasksParked(RunError):
    """Every training task is parked: its rollouts died of infrastructure again and again."""


class RunStalled(RunError):
    """No stage made progress for the configured time."""


class RunInterrupted(RunError):
    """The run was interrupted before its service was up; it can be resumed."""


def first_cause(error: BaseException) -> BaseException:
    """The first single error in a group of a TaskGroup; the others are its consequences."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class EngineGroupError(RunError):
    """An operator's request to the engine group failed."""


class EngineAddressTaken(EngineGroupError):
    """Two engines would have one address."""


class EngineUnknown(EngineGroupError):
    """There is no engine of that name."""


class EngineNotAdded(EngineGroupError):
    """No engine that could be attached answers at the address."""


class EngineNotServing(EngineGroupError):
    """The engine was added but did not take the newest weights; it gets no traffic until it does."""
