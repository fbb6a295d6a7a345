"""The search environment: the policy asks a retriever and answers a question (Search-R1).

Invariants:
- A retriever that fails raises ServiceDown; the policy never reads an empty block of passages because of an outage.
- The passages of a search are shown in the order of the retriever.
"""

from __future__ import annotations

import re
from typing import Final

from pydantic import Field

from headrace.actors.environments.environment import (
    ANSWER,
    SEARCH,
    Action,
    Clock,
    EpisodeEnd,
    Observation,
    ObservationPart,
    PartKind,
    observed,
)
from headrace.actors.services.chat import ChatMessage, ChatTool
from headrace.actors.services.service import Passage, Retriever, Services
from headrace.buffer.primitives.sections import Section
from headrace.buffer.tasks.task import Task
from headrace.sandboxes.base import Sandbox

NO_PASSAGE: Final = "No passage was found."
"""Text in place of the passages if the retriever has none."""
EMPTY_QUERY: Final = "\nThe query is empty. Write it between <search> and </search>.\n"
"""Text that the policy reads after a search without words."""
_TITLED: Final = re.compile(r'\s*"(.*?)"\s*\n(.*)', re.DOTALL)


class SearchConfig(Section):
    """Settings of the search environment."""

    retriever: str = "retriever"
    """Name of the retriever, a table of [services]."""
    top_k: int = Field(default=3, ge=1, le=100)
    """Number of passages of one search."""
    max_characters: int = Field(default=2000, ge=1)
    """Length to which the passages of one search are cut."""


class SearchEnvironment:
    """Environment with the actions `search {query}` and `answer {text}`, which ends the episode."""

    needs_sandbox = False
    actions = frozenset({SEARCH, ANSWER})

    def __init__(self, config: SearchConfig) -> None:
        self._config = config

    @property
    def services(self) -> tuple[str, ...]:
        return (self._config.retriever,)

    async def open(self, task: Task, sandbox: Sandbox | None, services: Services, clock: Clock) -> SearchEpisode:
        return SearchEpisode(self._config, services.retriever(self._config.retriever))


class SearchEpisode:
    """One question."""

    messages: tuple[ChatMessage, ...] = ()
    tools: tuple[ChatTool, ...] = ()

    def __init__(self, config: SearchConfig, retriever: Retriever) -> None:
        self._config = config
        self._retriever = retriever

    async def act(self, action: Action) -> Observation:
        """Search, or end with an answer. Raises ServiceDown."""
        if action.name == ANSWER:
            return Observation(ends=True)
        query = str(action.arguments.get("query", "")).strip()
        if not query:
            warning = ObservationPart(text=EMPTY_QUERY, kind=PartKind.WARNING)
            return Observation(parts=(warning,))
        (found,) = await self._retriever.retrieve([query], top_k=self._config.top_k)
        return observed(shown(found, self._config.max_characters))

    async def close(self) -> EpisodeEnd:
        return EpisodeEnd()


def shown(passages: list[Passage], max_characters: int) -> str:
    """Return the text of passages that the policy reads."""
    texts = []
    for number, passage in enumerate(passages, start=1):
        titled = _TITLED.fullmatch(passage.contents)
        title, text = (titled[1], titled[2]) if titled else ("", passage.contents)
        texts.append(f"Doc {number}(Title: {title}) {text.strip()}")
    joined = "\n".join(texts)[:max_characters]
    return f"\n\n<information>{joined or NO_PASSAGE}</information>\n\n"
