"""Errors of the engine group.

RunError
`- EngineGroupError
   |- EngineAddressTaken    two engines would have one address
   |- EngineUnknown         no engine of that name
   |- EngineNotAdded        the server at that address does not answer as an engine
   `- EngineNotServing      the engine was added but did not take the newest weights
"""

from __future__ import annotations

from headrace.actors.errors import RunError


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
