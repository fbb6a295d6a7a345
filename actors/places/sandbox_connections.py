"""Connections to sandboxes by ref, from any process and without Ray calls per command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from headrace.actors.places.providers import attaching_providers
from headrace.actors.runtime.resources import ResourceOwner
from headrace.sandboxes.errors import SpecRefused

if TYPE_CHECKING:
    from headrace.sandboxes.base import Sandbox, SandboxRef


class SandboxConnections(ResourceOwner):
    """Attaching providers of all kinds, with one connection per launcher; closing them ends no sandbox."""

    def __init__(self) -> None:
        super().__init__()
        self._providers = attaching_providers()

    async def __aenter__(self) -> Self:
        for provider in self._providers.values():
            self._stack.push_async_callback(provider.aclose)
        return self

    async def attach(self, ref: SandboxRef) -> Sandbox:
        """Attach to the sandbox of a ref. Raises SpecRefused for an unknown provider."""
        provider = self._providers.get(ref.provider)
        if provider is None:
            raise SpecRefused(f"provider {ref.provider!r} is unknown; known: {sorted(self._providers)}")
        return await provider.attach(ref)
