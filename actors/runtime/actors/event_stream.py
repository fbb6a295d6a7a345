"""Numbered events as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html).

Invariants:
- The id of an event is its number, for example in the table of runs. A client that reconnects with the last id that it
  saw gets all later events, from whichever replica, each once and in order.
- The last event, for example of a run that ended, is `end`. A stream that ends without it was cut, and has to be
  resumed.
- A comment comes at least every `POLL_S` seconds, so that neither side takes a quiet run for a lost connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, Protocol

import orjson

from headrace.actors.errors import ActorGone, ActorLost

POLL_S: Final = 10.0
AGAIN_S: Final = 1.0
"""Time between two tries to reach the actor while it is away."""
END: Final = "end"


class Numbered(Protocol):
    """Event that is sent as JSON."""

    @property
    def number(self) -> int: ...


class Page(Protocol):
    """Next events. If it is `ended`, none follow."""

    @property
    def events(self) -> Sequence[Numbered]: ...

    @property
    def ended(self) -> bool: ...


async def event_stream(
    first: Page, after: int, next_page: Callable[[int], Awaitable[Page]], *, name: str = "run"
) -> AsyncIterator[bytes]:
    """Yield the events of `first`, which follow number `after`, and of the pages after it, until one is the last. All
    are of the type `name`."""
    events, ended = first.events, first.ended
    # Browsers wait this long before they reconnect.
    yield b"retry: 1000\n\n"
    while True:
        for event in events:
            after = event.number
            yield b"id: %d\nevent: %s\ndata: %s\n\n" % (after, name.encode(), orjson.dumps(event))
        if ended:
            yield b"event: %s\ndata: {}\n\n" % END.encode()
            return
        if not events:
            yield b": still here\n\n"
        try:
            page = await next_page(after)
            events, ended = page.events, page.ended
        except (ActorLost, ActorGone, TimeoutError):
            # The stream stays open: a browser would not reconnect after an answer of 503.
            yield b": the service of runs is away\n\n"
            await asyncio.sleep(AGAIN_S)
            events, ended = (), False
