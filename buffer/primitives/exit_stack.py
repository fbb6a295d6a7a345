"""Exit stack that always ends, even if its exits are cancelled.

Invariants:
- No exception that leaves the stack is in its own chain of contexts. Python 3.11's `contextlib.AsyncExitStack` makes an
  exception its own context when an exit raises the exception that it was given, as the exit of a cancelled task group
  does. The stack around it then follows this circle forever, without yielding to the event loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import wraps
from typing import Any


class AsyncExitStack(contextlib.AsyncExitStack):  # noqa: TID251 - the one place
    """`contextlib.AsyncExitStack` without circles of exceptions."""

    def _push_exit_callback(self, callback: Callable[..., Any], is_sync: bool = True) -> None:
        """Register an exit. Every public method of the base class registers its exits with this one."""

        @wraps(callback)
        def sync_exit(kind: Any, error: BaseException | None, trace: Any) -> Any:
            try:
                return callback(kind, error, trace)
            except BaseException as raised:
                if raised is error:
                    # The same as not handling it.
                    return False
                _cut_circle(raised)
                raise

        @wraps(callback)
        async def async_exit(kind: Any, error: BaseException | None, trace: Any) -> Any:
            try:
                return await callback(kind, error, trace)
            except BaseException as raised:
                if raised is error:
                    return False
                _cut_circle(raised)
                raise

        super()._push_exit_callback(sync_exit if is_sync else async_exit, is_sync)  # type: ignore[misc]


def _cut_circle(error: BaseException) -> None:
    """End the chain of contexts of an exception where it would repeat."""
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None:
        if any(link is known for known in seen):
            seen[-1].__context__ = None
            return
        seen.append(link)
        link = link.__context__


class ResourceOwner:
    """Base of a class whose `__aenter__` pushes what it opens onto `_stack`; exiting the context closes that."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
