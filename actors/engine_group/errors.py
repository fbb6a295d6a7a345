"""Errors of the engine group; each names what to do.

RunError
`- EngineGroupError
   |- EngineAddressTaken    two engines would have one address
   |- EngineUnknown         no engine of that name
   |- EngineNotAdded        the server at that address does not answer as an engine
   `- EngineNotServing      it joined, and did not take the newest weights
"""

from __future__ import annotations

from headrace.actors.errors import RunError


class EngineGroupError(RunError):
    """What an operator asked of the engines cannot be done."""


class EngineAddressTaken(EngineGroupError):
    """Two engines would have one address."""


class EngineUnknown(EngineGroupError):
    """There is no engine of that name."""


class EngineNotAdded(EngineGroupError):
    """What answers at the address, if anything does, is no engine that can join."""


class EngineNotServing(EngineGroupError):
    """It joined, and did not take the newest weights: no traffic until it did."""
