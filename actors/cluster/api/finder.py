"""Finder of the actor that supervises runs, by its name in the Ray cluster.

Invariants:
- A handle that was found is kept: calls over it go on while the head of the cluster is away, and look-ups do not.
- Ray's look-up blocks while the head is away. One thread looks up for all requests, and none waits longer than
  `LOOK_UP_S` for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, cast

from headrace.actors.cluster.runs.contract import ACTOR_NAME, RunsApi
from headrace.actors.errors import ActorLost, RunsMissing
from headrace.actors.runtime.actors.nodes import NAMESPACE
from headrace.actors.runtime.actors.runtime import ActorProxy

LOOK_UP_S: Final = 5.0


class RunsFinder:
    """Finds the actor and keeps its handle until it is forgotten."""

    def __init__(self, look_up: Callable[[], Any] | None = None) -> None:
        """Use `look_up`, which blocks and raises ValueError if there is no actor; by default that of Ray."""
        self._look_up = look_up or _look_up
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="find-runs")
        self._looking: Future[Any] | None = None
        self._found: RunsApi | None = None

    async def __call__(self) -> RunsApi:
        """Return the actor. Raises RunsMissing, and ActorLost if the cluster does not answer in time."""
        if self._found is None:
            self._found = cast("RunsApi", ActorProxy(ACTOR_NAME, await self._handle(), namespace=NAMESPACE))
        return self._found

    def forget(self) -> None:
        """Look the actor up again next time."""
        self._found = None

    async def _handle(self) -> Any:
        from ray.exceptions import RayError

        if self._looking is None or self._looking.done():
            self._looking = self._thread.submit(self._look_up)
        try:
            async with asyncio.timeout(LOOK_UP_S):
                return await asyncio.shield(asyncio.wrap_future(self._looking))
        except ValueError as error:
            raise RunsMissing(
                "this cluster has no service of runs: start it with `headrace run --address ADDRESS --detach RECIPE`"
            ) from error
        except (TimeoutError, RayError) as error:
            raise ActorLost("the cluster does not answer a look-up of the service of runs") from error


def _look_up() -> Any:
    import ray

    return ray.get_actor(ACTOR_NAME, namespace=NAMESPACE)
