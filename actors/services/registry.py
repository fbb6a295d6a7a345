"""The registry of services that recipes can name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import aiohttp

from headrace.actors.errors import ConfigError
from headrace.actors.services.calls import ServiceCalls, ServiceRefused, ServiceUnavailable, Usage
from headrace.actors.services.chat import ChatMessage
from headrace.actors.services.config import ServiceConfig, ServiceKind
from headrace.actors.services.http import HttpEndpoint, HttpHelperModel, HttpRetriever, HttpRewardServer
from headrace.actors.services.service import Passage
from headrace.buffer.primitives.registry import Registry

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceParts:
    """Everything that a client is made of."""

    name: str
    config: ServiceConfig
    calls: ServiceCalls
    session: aiohttp.ClientSession | None
    """The worker's session; None to check a table without sending anything."""
    key: str | None

    def endpoint(self, path: str) -> HttpEndpoint:
        """Return the endpoint at a path below the service's URL."""
        assert self.session is not None
        return HttpEndpoint(self.session, self.config.url + path, self.key)


class OutsideService:
    """A service of another package, whose calls have the same slots, deadlines, retries and counts as those over HTTP.
    Every error that it raises is taken for an outage."""

    def __init__(self, calls: ServiceCalls, inner: Any) -> None:
        self._calls, self.inner = calls, inner

    def offers(self, kind: ServiceKind) -> bool:
        """Return True if the service has the method of this kind."""
        return hasattr(self.inner, METHODS[kind])

    async def retrieve(self, queries: Sequence[str], *, top_k: int) -> list[list[Passage]]:
        """See `Retriever.retrieve`."""
        if not queries:
            return []

        def whole(found: list[list[Passage]]) -> bool:
            return len(found) == len(queries)

        return await self._guarded(lambda: self.inner.retrieve(queries, top_k=top_k), whole)

    async def complete(
        self, messages: Sequence[ChatMessage], *, max_tokens: int, temperature: float, seed: int | None = None
    ) -> str:
        """See `HelperModel.complete`."""
        options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        return await self._guarded(lambda: self.inner.complete(messages, **options), lambda text: bool(text.strip()))

    async def score(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `RewardServer.score`."""

        def whole(answer: Mapping[str, Any]) -> bool:
            return isinstance(answer, Mapping) and "reward" in answer

        return await self._guarded(lambda: self.inner.score(document), whole)

    async def _guarded(self, call: Callable[[], Awaitable[R]], is_whole: Callable[[R], bool]) -> R:
        async def send() -> R:
            try:
                answer = await call()
            except TimeoutError:
                raise
            except Exception as error:
                raise ServiceUnavailable(f"{type(error).__name__}: {error}") from error
            self._calls.used(Usage())
            if not is_whole(answer):
                raise ServiceRefused(
                    "the answer is not one list of passages for each query, a text, or an object with reward"
                )
            return answer

        return await self._calls(send)


AnyService: TypeAlias = HttpRetriever | HttpHelperModel | HttpRewardServer | OutsideService
MakeService: TypeAlias = Callable[[ServiceParts], AnyService]

METHODS: Final = {ServiceKind.RETRIEVER: "retrieve", ServiceKind.MODEL: "complete", ServiceKind.REWARD: "score"}
"""The method that a service of each kind has."""


def _of_another_package(found: object) -> MakeService:
    """Return a factory that calls `found` with `settings`, which must return a Retriever, a HelperModel or a
    RewardServer."""
    if not callable(found):
        raise TypeError("it is not callable; give a class that takes the table's settings")
    make: Callable[..., Any] = found

    def made(parts: ServiceParts) -> AnyService:
        key = f"services.{parts.name}"
        try:
            service = OutsideService(parts.calls, make(**parts.config.settings))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{key}.settings: {parts.config.kind} does not accept them: {error}") from error
        if not any(service.offers(kind) for kind in ServiceKind):
            raise ConfigError(
                f"{key}.kind: {parts.config.kind!r} did not return a service: it has none of "
                f"{', '.join(METHODS.values())} (guide 'Services')"
            )
        return service

    return made


SERVICES: Final[Registry[MakeService]] = Registry(
    kind="service",
    group="headrace.services",
    own={
        ServiceKind.RETRIEVER: lambda parts: HttpRetriever(parts.calls, parts.endpoint("/retrieve")),
        ServiceKind.MODEL: lambda parts: HttpHelperModel(
            parts.calls, parts.endpoint("/v1/chat/completions"), parts.config.model
        ),
        ServiceKind.REWARD: lambda parts: HttpRewardServer(parts.calls, parts.endpoint("")),
    },
    accept=_of_another_package,
)
