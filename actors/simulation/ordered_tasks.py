"""Tasks and futures whose sets have an order that repeats: it does not hang on addresses."""

from __future__ import annotations

import asyncio
from typing import Any


class _Numbered:
    """Hashed by its number."""

    def __init__(self, number: int, *arguments: Any, **options: Any) -> None:
        self._number = number
        super().__init__(*arguments, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class NumberedTask(_Numbered, asyncio.Task[Any]):
    """`NumberedTask(number, coroutine, ...)`."""


class NumberedFuture(_Numbered, asyncio.Future[Any]):
    """`NumberedFuture(number, loop=...)`."""
