"""Errors of the actors.

ActorError
├── ActorLost           the actor's process died or is restarting: transient, call again (idempotently)
│   └── ActorMissing    the cluster has no actor of this name
├── ActorGone           a lost actor did not return in time: permanent
└── StartFailed         an actor could not be started: permanent, names actor and reason
RunError
├── ConfigError         a key, the reason and the fix, on one line
│   └── RoleTooSmall    the key of the control API may not name what the recipe names
├── RunExists           the run directory is in use
├── RunMissing          the run does not exist or cannot be resumed
├── DiskFull            the run directory's disk is full
├── RunFenced           a newer incarnation of the run has taken over: this one must end, and is not retried
├── StorageLost         the run's storage could not be written for too long: transient
├── TasksParked         every training task is parked, so there is nothing left to train on
├── RunInterrupted      the run was interrupted during startup, so there is no summary yet
├── RunStalled          the run made no progress for too long: contains the diagnosis
├── RunsMissing         the cluster has no actor that supervises runs
├── RunUnknown          no run with this id, or it belongs to another owner
├── RunRefused          the request does not fit the state of the run, or the name is taken
├── SubmissionConflict  an idempotency key came again with another request
├── QuotaExceeded       the run needs more than its owner's quota, so it could never start
├── CannotBePlaced      no node has the label or the resources that the run needs
└── ApiRefused          the control API refused a request: its key, role, size or form
"""

from __future__ import annotations


class ActorError(Exception):
    """An actor could not answer."""


class ActorLost(ActorError):
    """The process of an actor died or is restarting; its current calls may or may not have had an effect."""


class ActorMissing(ActorLost):
    """The cluster has no actor of this name."""


class ActorGone(ActorError):
    """A lost actor did not return in time."""


class StartFailed(ActorError):
    """An actor did not start."""


class RunError(Exception):
    """The run cannot start or continue; the message is one line with the fix."""


class ConfigError(RunError):
    """A recipe, key, value, model directory or task file is invalid."""


class RoleTooSmall(ConfigError):
    """The role of a key does not allow a request, or what its recipe names."""


class RunExists(RunError):
    """The run directory exists already, or another process drives the run."""


class RunMissing(RunError):
    """The run does not exist or cannot be resumed."""


class DiskFull(RunError):
    """The disk of the run directory is full."""


class RunFenced(RunError):
    """A newer incarnation has taken over the run, so this one must end at once."""


class StorageLost(RunError):
    """The run's storage could not be written for so long that a newer incarnation may have taken over."""


class TasksParked(RunError):
    """Every training task is parked, after repeated infrastructure failures of its rollouts."""


class RunStalled(RunError):
    """The run made no progress for `service.stall_s`."""


class RunsMissing(RunError):
    """The cluster has no actor that supervises runs."""


class RunUnknown(RunError):
    """There is no such run, or it belongs to another owner."""


class RunRefused(RunError):
    """The request does not fit the state of the run."""


class SubmissionConflict(RunError):
    """The idempotency key was used for another request."""


class QuotaExceeded(RunError):
    """The run needs more than the quota of its owner allows, even when no other run is live."""


class CannotBePlaced(RunError):
    """No node of the cluster has a label or the resources that the run needs."""


class ApiRefused(RunError):
    """The control API refused the request."""


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
