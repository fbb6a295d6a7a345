"""All clients of services in one worker, and the checks of services at start.

Invariants:
- All clients of a worker share one HTTP session, which is closed with the context.
- A table that cannot work, a service that a part of the run lacks, and a service that does not answer at start are each
  refused in one line with the key to change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final, Self

import aiohttp

from headrace.actors.errors import ConfigError
from headrace.actors.services.calls import ServiceCalls
from headrace.actors.services.config import RetrySection, ServiceConfig, ServiceKind
from headrace.actors.services.corpus import CorpusRefused, read_passages
from headrace.actors.services.figures import ServiceFigures
from headrace.actors.services.http import HttpHelperModel, HttpRetriever, HttpRewardServer
from headrace.actors.services.registry import SERVICES, AnyService, OutsideService, ServiceParts
from headrace.actors.services.service import HelperModel, Retriever, RewardServer, ServiceDown
from headrace.buffer.primitives.exit_stack import ResourceOwner
from headrace.buffer.primitives.registry import PartRefused
from headrace.sandboxes.errors import SecretRefused
from headrace.sandboxes.host.key_files import read_key

CHECK_S: Final = 30.0
"""Time limit for a service to answer the check at start."""
CHECKED_PASSAGES: Final = 1000
CHECK_QUERY: Final = "headrace"
NOT_IMPLEMENTED: Final = 501


class ServiceClients(ResourceOwner):
    """Implementation of `Services` for one worker: `async with ServiceClients(configs) as services`. Every retriever
    has its `url`, also one that the run has started for a corpus (`started.resolved`)."""

    def __init__(self, configs: Mapping[str, ServiceConfig]) -> None:
        super().__init__()
        self._configs = configs
        self._calls = {name: ServiceCalls(name, config) for name, config in configs.items()}
        self._services: dict[str, AnyService] = {}

    async def __aenter__(self) -> Self:
        """Open the clients. Raises ConfigError."""
        if not self._configs:
            return self
        try:
            # The limits of the services bound the connections; a session has no timeout, since each request has one.
            self.session = await self._stack.enter_async_context(
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
                )
            )
            for name, config in self._configs.items():
                service = self._services[name] = make_service(name, config, self._calls[name], self.session)
                if isinstance(service, OutsideService) and hasattr(service.inner, "__aenter__"):
                    await self._stack.enter_async_context(service.inner)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    def retriever(self, name: str) -> Retriever:
        """Return a retriever. Raises ConfigError if there is none with this name."""
        service = self._find(name, ServiceKind.RETRIEVER)
        assert isinstance(service, HttpRetriever | OutsideService)
        return service

    def model(self, name: str) -> HelperModel:
        """Return a helper model. Raises ConfigError if there is none with this name."""
        service = self._find(name, ServiceKind.MODEL)
        assert isinstance(service, HttpHelperModel | OutsideService)
        return service

    def reward(self, name: str) -> RewardServer:
        """Return a reward server. Raises ConfigError if there is none with this name."""
        service = self._find(name, ServiceKind.REWARD)
        assert isinstance(service, HttpRewardServer | OutsideService)
        return service

    def figures(self) -> dict[str, ServiceFigures]:
        """Return the figures of each service up to now."""
        return {name: calls.figures() for name, calls in self._calls.items()}

    def _find(self, name: str, kind: ServiceKind) -> AnyService:
        refuse_missing_services((name,), self._configs, kind=kind)
        service = self._services[name]
        if isinstance(service, OutsideService) and not service.offers(kind):
            raise ConfigError(f"services.{name}.kind: {self._configs[name].kind} is not a {kind} (guide 'Services')")
        return service


def make_service(
    name: str, config: ServiceConfig, calls: ServiceCalls, session: aiohttp.ClientSession | None
) -> AnyService:
    """Create the client of a service. Raises ConfigError."""
    key = key_of(name, config)
    try:
        make = SERVICES.find(config.kind)
    except PartRefused as error:
        raise ConfigError(f"services.{name}.kind: {error}") from error
    if config.kind is not ServiceKind.REWARD:
        # Clients of the API take the path from /v1 on in their base URL, and people write it here, too.
        config = config.model_copy(update={"url": config.url.removesuffix("/v1")})
    return make(ServiceParts(name=name, config=config, calls=calls, session=session, key=key))


def key_of(name: str, config: ServiceConfig) -> str | None:
    """Return the key of a service, or None if it has none. Raises ConfigError."""
    try:
        return None if config.key_file is None else read_key(config.key_file, f"services.{name}.key_file")
    except SecretRefused as error:
        raise ConfigError(str(error)) from error


def refuse_missing_services(
    needed: Iterable[str], services: Mapping[str, ServiceConfig], *, kind: ServiceKind | None = None, user: str = ""
) -> None:
    """Raise ConfigError if a needed service is not in the recipe, or is of headrace's other kind. `user` is the key of
    what needs it, such as `agent.environment`."""
    needs = f"; {user} needs it" if user else ""
    for name in needed:
        if name not in services:
            known = ", ".join(sorted(services)) or "none"
            raise ConfigError(
                f"services.{name} is missing{needs}; add the table (guide 'Services'). The recipe has: {known}"
            )
        config = services[name]
        if kind is not None and not config.is_outside and config.kind is not kind:
            raise ConfigError(f"services.{name}.kind is {config.kind}{needs} as a {kind}; correct the kind or the name")


def check_services(services: Mapping[str, ServiceConfig]) -> None:
    """Check what the tables name: classes with their settings, key files, and the beginnings of corpora. Raises
    ConfigError."""
    for name, config in services.items():
        key_of(name, config)
        if config.is_outside:
            make_service(name, config, ServiceCalls(name, config), None)
        if config.corpus is not None:
            try:
                # The retriever checks the rest, before it answers: a large corpus takes minutes.
                for _ in islice(read_passages(config.corpus), CHECKED_PASSAGES):
                    pass
            except CorpusRefused as error:
                raise ConfigError(f"services.{name}.corpus: {error}") from error


async def refuse_silent_services(services: Mapping[str, ServiceConfig]) -> None:
    """Send each service with a URL one request. Raises ConfigError for the first one that does not answer it."""
    once = {
        name: config.model_copy(update={"retry": RetrySection(attempts=1, total_s=CHECK_S)})
        for name, config in services.items()
        if config.url
    }
    async with ServiceClients(once) as clients:
        for name, config in once.items():
            try:
                if config.kind is ServiceKind.RETRIEVER:
                    await clients.retriever(name).retrieve((CHECK_QUERY,), top_k=1)
                elif config.kind is ServiceKind.REWARD:
                    await _ask(name, config, config.url, clients.session)
                else:
                    # The list of models costs nothing. Servers without it answer too, and that is enough.
                    await _ask(name, config, config.url.removesuffix("/v1") + "/v1/models", clients.session)
            except ServiceDown as error:
                raise ConfigError(
                    f"service {name} does not answer at {config.url}: {error.reason}; start it or correct "
                    f"services.{name}.url"
                ) from error


async def _ask(name: str, config: ServiceConfig, url: str, session: aiohttp.ClientSession) -> None:
    """Send a server a GET request. Raises ServiceDown if it does not answer, ConfigError if it refuses the key."""
    key = key_of(name, config)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        async with asyncio.timeout(CHECK_S), session.get(url, headers=headers, allow_redirects=False) as response:
            status = response.status
    except TimeoutError as error:
        raise ServiceDown(name, f"no answer within {CHECK_S:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise ServiceDown(name, f"{type(error).__name__}: {error}") from error
    if status in (401, 403):
        raise ConfigError(
            f"service {name} at {url} answered {status}: set services.{name}.key_file to a file with a valid key"
        )
    if status == 404 and config.kind is ServiceKind.REWARD:
        raise ConfigError(
            f"service {name}: {url} answered GET with 404, which looks like a wrong path: correct services.{name}.url, "
            "or let the server answer GET there with another status"
        )
    # A server that knows no GET answers 405, or 501 (Python's http.server).
    if status >= 500 and status != NOT_IMPLEMENTED:
        raise ServiceDown(name, f"{url} answered {status}")
