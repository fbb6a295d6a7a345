"""Work for a renderer that may run in another process: what it needs, and nothing of the session that it is for.

Invariant: a work is a pure function of its fields and the renderer (except caches), and survives pickling.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from headrace.policies.tokens.chat_template import Ending
from headrace.serve.gateway.conversation import Message, ToolCall, ToolSpec
from headrace.serve.gateway.errors import WireError
from headrace.serve.gateway.rendering.render import Renderer, TokenIds

TEMPLATE_CHARACTERS: Final = 32
T = TypeVar("T")
Work: TypeAlias = "Callable[[Renderer], T]"


class Renders(Protocol):
    """Does works apart from the event loop: `RenderProcesses` or `RenderThread`."""

    async def run(self, owner: str, work: Work[T]) -> T:
        """Return the result of a work for this owner. Raises what the work raises."""

    def forget(self, owner: str) -> None:
        """Forget what is known of an owner."""

    async def aclose(self) -> None:
        """Stop without waiting for works in progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderWork:
    """Rendering of messages: a whole conversation with its tools; what follows a sampled turn, whose last id and calls
    are `after`; or with `inserts` the text of the last message, inserted into a sampled turn. If the texts
    alone have `max_tokens` or more, what `refusal` makes of their characters is raised."""

    messages: Sequence[Message]
    tools: Sequence[ToolSpec]
    ending: Ending
    max_tokens: int
    refusal: Callable[[int], WireError]
    after: tuple[int, Sequence[ToolCall]] | None = None
    inserts: bool = False

    @property
    def characters(self) -> int:
        """Total length of what is rendered, with what a template adds to each message."""
        shown = sum(tool.size for tool in self._shown_tools)
        return shown + sum(message.characters + TEMPLATE_CHARACTERS for message in self.messages)

    @property
    def _shown_tools(self) -> Sequence[ToolSpec]:
        return self.tools if self.after is None and not self.inserts else ()

    def __call__(self, renderer: Renderer) -> TokenIds:
        """Return the ids. Raises TemplateRefused, and the refusal."""
        # Rendering megabytes of nested arguments takes seconds and a gigabyte. Counting stops at the limit, so that its
        # cost is bounded.
        if self.characters > self.max_tokens:
            of_messages = (text for message in self.messages for text in message.rendered_texts)
            of_tools = (text for tool in self._shown_tools for text in (tool.name, tool.description, tool.schema))
            if renderer.count_tokens(chain(of_messages, of_tools), stop_at=self.max_tokens) >= self.max_tokens:
                raise self.refusal(self.characters)
        if self.inserts:
            return renderer.insert(self.messages[-1].text)
        if self.after is None:
            return renderer.render(self.messages, self.tools, self.ending)
        return renderer.bridge(*self.after, self.messages, self.ending)


@dataclass(frozen=True, slots=True)
class RendererCall:
    """A call of one of the renderer's methods, and the result in place of None."""

    method: str
    arguments: Sequence[Any]
    named: Mapping[str, Any] = field(default_factory=dict)
    otherwise: Any = None

    def __call__(self, renderer: Renderer) -> Any:
        found = getattr(renderer, self.method)(*self.arguments, **self.named)
        return self.otherwise if found is None else found


class DaemonThread:
    """Thread that runs functions for an event loop, one at a time, in the order in which they were submitted: `await
    thread.run(function)`, and finally `stop`. A call whose waiter is cancelled before it begins does not run; one that
    has begun cannot be stopped, and its result is discarded. An executor would join its threads when the interpreter
    exits, so that a call that never ends would keep the process alive after SIGTERM."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[[], T]) -> T:
        """Run the function in the thread; return its result or raise its exception."""
        future: Future[T] = Future()
        self._calls.put((future, function))
        return await asyncio.wrap_future(future)

    def stop(self) -> None:
        """Stop the thread after the current call, without waiting for it; calls that have not begun are cancelled."""
        # Not with `empty()`: the thread may take the last call in between, and `get` would block for ever.
        with suppress(queue.Empty):
            while True:
                if (call := self._calls.get_nowait()) is not None:
                    call[0].cancel()
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised again where the future is awaited
                future.set_exception(error)


class RenderThread:
    """Does the works of all owners in one thread, in their order."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._thread = DaemonThread("render")

    async def run(self, owner: str, work: Work[T]) -> T:
        """Return the result of a work. Raises what the work raises."""
        return await self._thread.run(lambda: work(self._renderer))

    def forget(self, owner: str) -> None:
        """Do nothing: nothing is remembered of an owner."""

    async def aclose(self) -> None:
        """Stop the thread without waiting for a work in progress."""
        self._thread.stop()
