"""Reading of request bodies, within budgets and a deadline.

Invariants:
- The bytes of an agent's body count for the budgets of `BodyBudget` from the moment they are read off the connection
  until the body has been parsed, or refused. A body that ends any other way than parsed is dropped at once.
- Not counted: up to `connections.READ_BYTES` * 2 bytes of each connection that have not been read off it, and what the
  parser made of the body, whose size is bounded by the context length and the number of running turns of a session.
- A body that is not complete in time is refused: with 408 if its client was slow, and as busy if it waited for room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web

from headrace.serve.gateway.capture.session import SessionId
from headrace.serve.gateway.errors import BodyTooLarge, BodyUnreadable, GatewayBusy, RequestTimeout
from headrace.serve.gateway.http.body_budget import BodyBudget, HeldBody

Parsed = TypeVar("Parsed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bodies:
    """Reads the request bodies of a gateway's agents and workers. `max_bytes` is the limit of one."""

    budget: BodyBudget
    max_bytes: int
    timeout_s: float

    @property
    def most_dropped_bytes(self) -> int:
        """Most bytes of a refused body that are read and dropped, so that its client can read the refusal."""
        return 8 * self.max_bytes

    async def parsed(
        self, request: web.Request, session: SessionId, parse: Callable[[bytes], Awaitable[Parsed]]
    ) -> Parsed:
        """Read an agent's body and return what `parse` makes of it. Raises the errors of `parse` and `read_body`, and
        TooManyRequests."""
        with self.budget.hold(session) as held:
            return await parse(await read_body(request, self.max_bytes, timeout_s=self.timeout_s, held=held))

    async def of_worker(self, request: web.Request) -> bytes:
        """Read the body of a worker, to which no budget applies. Raises the errors of `read_body`."""
        return await read_body(request, self.max_bytes, timeout_s=self.timeout_s)


async def read_body(
    request: web.Request, max_bytes: int, *, timeout_s: float | None = None, held: HeldBody | None = None
) -> bytes:
    """Read the request body, and count it for `held`. Raises BodyTooLarge, BodyUnreadable, RequestTimeout,
    GatewayBusy."""
    # Refused by its declared length before a byte is read.
    if (request.content_length or 0) > max_bytes:
        raise BodyTooLarge(f"The body is larger than {max_bytes} bytes.")
    body = bytearray()
    try:
        # Most bodies are here, with room for them; a timer would take longer than reading them.
        has_room = held is None or held.budget.has_room(request.content.total_bytes)
        async with asyncio.timeout(None if request.content.is_eof() and has_room else timeout_s):
            while piece := await request.content.readany():
                if len(body) + len(piece) > max_bytes:
                    raise BodyTooLarge(f"The body is larger than {max_bytes} bytes.")
                if held is not None:
                    await held.add(len(piece))
                body += piece
        return bytes(body)
    except TimeoutError:
        if held is not None and held.is_waiting:
            raise GatewayBusy(f"no room for a request body in {timeout_s} s") from None
        raise RequestTimeout(f"The body did not arrive within {timeout_s} s.") from None
    except web.RequestPayloadError as error:
        # The sender's encoding is broken. Classified as our failure it would make the rollout infra.
        raise BodyUnreadable(f"The body cannot be decoded: {' '.join(str(error).split())}") from None
    finally:
        # A traceback may keep this frame.
        body.clear()
