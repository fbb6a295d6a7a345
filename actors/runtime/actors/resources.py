"""Base class of async context managers that close their resources in reverse order."""

from __future__ import annotations

from headrace.buffer.primitives.exit_stack import AsyncExitStack


class ResourceOwner:
    """Base of a class whose `__aenter__` pushes the resources that it opens onto `_stack`; exiting the context closes
    them."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
