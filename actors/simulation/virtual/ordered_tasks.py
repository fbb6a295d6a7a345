"""Tasks and futures that are hashed by a number, so that the order of sets is the same in every process."""

from __future__ import annotations

import asyncio
from typing import Any


class _Numbered:
    """Mixin that hashes an object by its number instead of its address."""

    def __init__(self, number: int, *arguments: Any, **options: Any) -> None:
        self._number = number
        super().__init__(*arguments, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class NumberedTask(_Numbered, asyncio.Task[Any]):
    """Task that is hashed by its number: `NumberedTask(number, coroutine, ...)`."""


class NumberedFuture(_Numbered, asyncio.Future[Any]):
    """Future that is hashed by its number: `NumberedFuture(number, loop=...)`."""
