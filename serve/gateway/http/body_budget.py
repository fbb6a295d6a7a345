"""Byte budgets for the request bodies that a gateway holds in memory: one for each session, and one for all together.

Invariants:
- Only bytes that were received are counted, until their body is released. A declared length reserves nothing.
- Bytes over a session's budget are refused at once. Bytes over the gateway's budget wait, those of the session that
  holds the least first.
- Bodies that wait for each other cannot lock up: while the gateway's budget is used up, one body at a time may go
  beyond it until it is released. So all bodies together hold at most the gateway's budget and one more body, apart
  from the bytes of each waiting body that just arrived.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.serve.gateway.capture.session import SessionId
from headrace.serve.gateway.errors import TooManyRequests


@dataclass(slots=True, eq=False)
class HeldBody:
    """A body that is being received or parsed. `received` bytes count for its session, `admitted` ones for the
    gateway. `is_waiting`: it waits for room, or waited when it was cancelled."""

    budget: BodyBudget
    session: SessionId
    received: int = 0
    admitted: int = 0
    is_waiting: bool = False

    async def add(self, number: int) -> None:
        """Count bytes that were received; return once there is room for them. Raises TooManyRequests."""
        await self.budget.add(self, number)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    body: HeldBody
    number: int
    admitted: asyncio.Future[None]


class BodyBudget:
    """Counts the held bytes of bodies, by session and together."""

    def __init__(self, *, session_bytes: int, total_bytes: int) -> None:
        self._session_bytes = session_bytes
        self._total_bytes = total_bytes
        self._by_session: Counter[SessionId] = Counter()
        self._total = 0
        self._waiting: list[_Waiting] = []
        """In the order of their arrival."""
        self._beyond: HeldBody | None = None
        """The body that may go beyond the gateway's budget."""

    @property
    def total(self) -> int:
        """Bytes that are held now, without those that wait for room."""
        return self._total

    def has_room(self, number: int) -> bool:
        """Return whether there is room for so many bytes, without waiting."""
        return not self._waiting and self._fits(number)

    @contextmanager
    def hold(self, session: SessionId) -> Iterator[HeldBody]:
        """Yield a body, whose bytes are released at the end of the block."""
        body = HeldBody(self, session)
        try:
            yield body
        finally:
            self._release(body)

    async def add(self, body: HeldBody, number: int) -> None:
        """Count bytes of a body like `HeldBody.add`."""
        if self._by_session[body.session] + number > self._session_bytes:
            raise TooManyRequests(
                f"The request bodies that this session is sending have more than {self._session_bytes} bytes together; "
                "send fewer at a time."
            )
        self._by_session[body.session] += number
        body.received += number
        if body is self._beyond or self.has_room(number):
            self._admit(body, number)
            return
        one = _Waiting(body, number, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        body.is_waiting = True
        self._admit_waiting()
        try:
            await one.admitted
        finally:
            if one in self._waiting:
                self._waiting.remove(one)
        body.is_waiting = False

    def _release(self, body: HeldBody) -> None:
        self._total -= body.admitted
        self._by_session[body.session] -= body.received
        if not self._by_session[body.session]:
            del self._by_session[body.session]
        if body is self._beyond:
            self._beyond = None
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting:
            # The earliest of equal ones.
            first = min(self._waiting, key=lambda one: self._by_session[one.body.session])
            if first.body is not self._beyond and not self._fits(first.number):
                if self._beyond is not None:
                    return
                self._beyond = first.body
            self._waiting.remove(first)
            self._admit(first.body, first.number)
            if not first.admitted.done():
                first.admitted.set_result(None)

    def _fits(self, number: int) -> bool:
        return self._total + number <= self._total_bytes

    def _admit(self, body: HeldBody, number: int) -> None:
        self._total += number
        body.admitted += number
