"""Connections to sandboxes by ref, from any process and without Ray calls per command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from headrace.actors.places.providers import attaching_provider
from headrace.actors.runtime.resources import ResourceOwner

if TYPE_CHECKING:
    from headrace.sandboxes.base import Sandbox, SandboxProvider, SandboxRef


class SandboxConnections(ResourceOwner):
    """Attaching providers of all kinds, with one connection per launcher; closing them ends no sandbox."""

    def __init__(self) -> None:
        super().__init__()
        self._providers: dict[str, SandboxProvider] = {}

    async def __aenter__(self) -> Self:
        return self

    async def attach(self, ref: SandboxRef) -> Sandbox:
        """Attach to the sandbox of a ref. Raises SpecRefused for an unknown provider."""
        provider = self._providers.get(ref.provider)
        if provider is None:
            provider = self._providers[ref.provider] = attaching_provider(ref.provider)
            self._stack.push_async_callback(provider.aclose)
        return await provider.attach(ref)
