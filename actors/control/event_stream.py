"""Events of a run as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html).

Invariants:
- The id of an event is its number in the table of runs. A client that reconnects with the last id that it saw gets all
  later events, from whichever replica, each once and in order.
- The last event of a run that ended is `end`. A stream that ends without it was cut, and has to be resumed.
- A comment comes at least every `POLL_S` seconds, so that neither side takes a quiet run for a lost connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Final

import orjson

from headrace.actors.errors import ActorGone, ActorLost

if TYPE_CHECKING:
    from headrace.actors.runs.contract import EventPage

POLL_S: Final = 10.0
AGAIN_S: Final = 1.0
"""Time between two tries to reach the actor while it is away."""
END: Final = "end"


async def event_stream(
    first: EventPage, after: int, next_page: Callable[[int], Awaitable[EventPage]]
) -> AsyncIterator[bytes]:
    """Yield the events of `first`, which follow number `after`, and of the pages after it, until the run has ended."""
    page = first
    # Browsers wait this long before they reconnect.
    yield b"retry: 1000\n\n"
    while True:
        for event in page.events:
            after = event.number
            yield b"id: %d\nevent: run\ndata: %s\n\n" % (after, orjson.dumps(event))
        if page.ended:
            yield b"event: %s\ndata: {}\n\n" % END.encode()
            return
        if not page.events:
            yield b": still here\n\n"
        try:
            page = await next_page(after)
        except (ActorLost, ActorGone, TimeoutError):
            # The stream stays open: a browser would not reconnect after an answer of 503.
            yield b": the service of runs is away\n\n"
            await asyncio.sleep(AGAIN_S)
            page = type(page)(events=(), ended=False)
