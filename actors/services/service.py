"""The interfaces of services that environments and evaluators call.

Invariants:
- A service that does not answer raises ServiceDown, which ends the rollout as infra: an outage is never a reward.
- Clients are shared by all rollouts of a worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from headrace.actors.errors import ConfigError
from headrace.actors.services.chat import ChatMessage


class ServiceDown(Exception):
    """A service did not answer in time, refused the request, or answered with something else. The message names it."""

    def __init__(self, service: str, reason: str) -> None:
        super().__init__(service, reason)
        self.service = service
        self.reason = reason

    def __str__(self) -> str:
        return f"service {self.service}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A document that a retriever found. `contents` is a title in double quotes, a newline and the text, as in
    Search-R1's corpora."""

    contents: str
    score: float | None = None


class Retriever(Protocol):
    """Retriever of passages."""

    async def retrieve(self, queries: Sequence[str], *, top_k: int) -> list[list[Passage]]:
        """Return the best passages for each query, best first; none if nothing matches. Raises ServiceDown."""


class HelperModel(Protocol):
    """Model other than the policy, for simulators and judges. Its tokens are never trained."""

    async def complete(
        self, messages: Sequence[ChatMessage], *, max_tokens: int, temperature: float, seed: int | None = None
    ) -> str:
        """Return the answer to a conversation. Raises ServiceDown."""


class RewardServer(Protocol):
    """Server that scores rollouts, for the evaluator `http`."""

    async def score(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer to a rollout's document, an object with `reward`, whose values are not checked. Raises
        ServiceDown."""


class Services(Protocol):
    """The services of a recipe, by name (`[services.NAME]`)."""

    def retriever(self, name: str) -> Retriever:
        """Return a retriever. Raises ConfigError if there is none with this name."""

    def model(self, name: str) -> HelperModel:
        """Return a helper model. Raises ConfigError if there is none with this name."""

    def reward(self, name: str) -> RewardServer:
        """Return a reward server. Raises ConfigError if there is none with this name."""


class NoServices:
    """The services of a recipe without any."""

    def retriever(self, name: str) -> Retriever:
        """Always raises ConfigError."""
        raise _missing(name)

    def model(self, name: str) -> HelperModel:
        """Always raises ConfigError."""
        raise _missing(name)

    def reward(self, name: str) -> RewardServer:
        """Always raises ConfigError."""
        raise _missing(name)


def _missing(name: str) -> ConfigError:
    return ConfigError(f"services.{name} is missing; add a table [services.{name}] to the recipe")


NO_SERVICES: Final = NoServices()
