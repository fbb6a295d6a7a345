"""Attaching to sandboxes by their refs, from any process: no Ray call per command, one connection for each launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from headrace.actors.places.providers import attaching_providers
from headrace.actors.runtime.resources import ResourceOwner
from headrace.sandboxes.errors import SpecRefused

if TYPE_CHECKING:
    from headrace.sandboxes.base import Sandbox, SandboxRef


class SandboxConnections(ResourceOwner):
    """One provider of each kind, none of which boots anything; closing them ends no sandbox."""

    def __init__(self) -> None:
        super().__init__()
        self._providers = attaching_providers()

    async def __aenter__(self) -> Self:
        for provider in self._providers.values():
            self._stack.push_async_callback(provider.aclose)
        return self

    async def attach(self, ref: SandboxRef) -> Sandbox:
        """The sandbox behind a ref. Raises SpecRefused for a provider that is unknown here."""
        provider = self._providers.get(ref.provider)
        if provider is None:
            raise SpecRefused(f"provider {ref.provider!r} is unknown; known: {sorted(self._providers)}")
        return await provider.attach(ref)
