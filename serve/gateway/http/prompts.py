"""The prompts of turns as ids: what is short is rendered on the event loop, what is long apart from it.

Invariants:
- The event loop renders at most `LONG_TEXT_CHARACTERS` of new text at a time, and no descriptions of tools.
- A session has at most one long text rendered at a time.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, TypeVar

from headrace.buffer.trajectories.token_kinds import KindRuns
from headrace.policies.errors import TemplateRefused
from headrace.policies.tokens.chat_template import Ending
from headrace.serve.gateway.capture.session import Session
from headrace.serve.gateway.capture.trie import Match
from headrace.serve.gateway.conversation import Role, TurnRequest, say
from headrace.serve.gateway.errors import BadRequest
from headrace.serve.gateway.rendering.render import Renderer, TokenIds
from headrace.serve.gateway.rendering.work import RendererCall, Renders, Work

T = TypeVar("T")

LONG_TEXT_CHARACTERS = 16_384
"""New text longer than this, and descriptions of tools, are rendered apart from the event loop: rendering them takes
milliseconds, which would block all sessions."""


class RendersFor(Protocol):
    """What is needed of a session."""

    core: Session
    rendering: asyncio.Lock
    """Held while a long text of the session is rendered."""


class Prompts:
    """Renders the prompts of all sessions."""

    def __init__(self, renderer: Renderer, renders: Renders) -> None:
        self._renderer = renderer
        self._renders = renders

    async def count_tokens(self, live: RendersFor, request: TurnRequest) -> int:
        """Return the length of a request's prompt, in tokens. Raises BadRequest, SessionUnknown."""
        match = live.core.match(request)
        match, delta = await self.render(live, match, request)
        return len(live.core.trie.prompt_ids(match, delta))

    async def tokenize(self, live: RendersFor, request: TurnRequest, *, opens_turn: bool = True) -> TokenIds:
        """Return the ids of a request's prompt, rendered afresh; without `opens_turn`, they end with its last message.
        Raises ContextExceeded, BadRequest."""
        ending = None if opens_turn else Ending.CLOSED
        _, ids = await self.render(live, live.core.fresh(request), request, ending)
        return ids

    async def tokenize_text(self, live: RendersFor, text: str) -> TokenIds:
        """Return the ids of a text as it would be inserted into a message. Raises ContextExceeded, BadRequest."""
        request = TurnRequest(messages=(say(Role.ASSISTANT, text),), continues=True)
        _, ids = await self.render(live, replace(live.core.fresh(request), resumes=True), request)
        return ids

    async def render(
        self, live: RendersFor, match: Match, request: TurnRequest, ending: Ending | None = None
    ) -> tuple[Match, TokenIds]:
        """Return the request's new ids. A history that the template cannot continue is rendered again, as a separate
        row."""
        if match.parent is not None and match.prompt is None:
            # An insertion into a recorded turn needs no template.
            if self._renderer.bridges or match.resumes:
                with suppress(TemplateRefused):
                    return match, await self._delta(live, match, request, ending)
            match = live.core.trie.as_root(match, request)
        try:
            return match, await self._delta(live, match, request, ending)
        except TemplateRefused as error:
            if request.continues:
                name = "continue_final_message"
                raise BadRequest(f"{name}: the last message cannot be left open: {error}", name) from None
            raise BadRequest(f"These messages cannot be rendered: {error}", "messages") from None

    async def _delta(self, live: RendersFor, match: Match, request: TurnRequest, ending: Ending | None) -> TokenIds:
        if match.prompt is not None:
            return match.prompt.ids
        work = live.core.render_work(match, request, ending)
        shows_tools = match.parent is None and bool(request.tools)
        if shows_tools or work.characters > LONG_TEXT_CHARACTERS:
            return await self.apart(live, work)
        return work(self._renderer)

    async def kinds(self, live: RendersFor, match: Match, request: TurnRequest, delta: TokenIds) -> KindRuns | None:
        """Return the kinds of a request's new ids, if they are asked for. They need a second render, so the event loop
        never computes them."""
        kinds = live.core.kinds(match, request, delta, self._renderer)
        if not isinstance(kinds, RendererCall):
            return kinds
        found: KindRuns | None = await self.apart(live, kinds)
        return found

    async def apart(self, live: RendersFor, work: Work[T]) -> T:
        """Return the result of a work for a session, done apart from the event loop: one at a time."""
        async with live.rendering:
            return await self._renders.run(live.core.spec.session_id, work)

    def forget(self, live: RendersFor) -> None:
        """Forget what a session's works took."""
        self._renders.forget(live.core.spec.session_id)
