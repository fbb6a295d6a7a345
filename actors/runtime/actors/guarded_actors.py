"""The actors of a service: spawned under a name, guarded, and stopped with the service.

Invariants:
- Every actor has a name and is stopped when the service's context exits, in reverse order. All but those that nothing
  depends on are listed in `_actors`, so that they are guarded.
- An actor that does not answer, and a bundle of resources that no node has free, are listed in `absences` for as long.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

from headrace.actors.errors import first_cause
from headrace.actors.record.files.absences import Absences
from headrace.actors.runtime.actors.call_guard import guard
from headrace.actors.runtime.actors.nodes import Bundle
from headrace.actors.runtime.actors.runtime import PLAIN, Resources, Runtime
from headrace.buffer.primitives.exit_stack import ResourceOwner

R = TypeVar("R")


class GuardedActors(ResourceOwner):
    """Actors of one service; the class below decides which there are."""

    def __init__(self, runtime: Runtime, *, hang_s: float, absences: Absences) -> None:
        super().__init__()
        self._runtime = runtime
        self._hang_s = hang_s
        self.absences = absences
        self._actors: dict[str, object] = {}
        self._roles: dict[str, str] = {}
        """Role of the node of each actor, on a cluster."""
        self._failed_to_start = False

    async def process_ids(self) -> dict[str, int]:
        """Return the process id of each actor by name, for operators and fault tests."""
        return {name: (await self._runtime.stats(actor))[0] for name, actor in self._actors.items()}

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """If the block fails, stop the actors that it started, and raise the first cause. Actors that were already
        running stay alive: they belong to the run, and the next service finds them."""
        self.absences.begin()
        try:
            yield
        except BaseException as error:
            self._failed_to_start = True
            await self._stack.aclose()
            if isinstance(error, BaseExceptionGroup):
                raise first_cause(error) from error
            raise

    @asynccontextmanager
    async def guarded(self, supervision: Coroutine[Any, Any, NoReturn]) -> AsyncIterator[asyncio.TaskGroup]:
        """Guard every actor and run `supervision` during the block. Raises DiskFull if the disk is full, whatever
        failed because of that, and otherwise the first cause."""
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(supervision)]
                if self._runtime.isolates_actors:
                    beside += [
                        tasks.create_task(
                            guard(
                                self._runtime,
                                name,
                                actor,
                                self._hang_s,
                                absences=self.absences,
                                role=self._roles[name],
                            )
                        )
                        for name, actor in self._actors.items()
                    ]
                yield tasks
                for task in beside:
                    task.cancel()
        except BaseExceptionGroup as group:
            self.refuse_full_disk()
            raise first_cause(group) from group

    def refuse_full_disk(self) -> None:
        """Raise DiskFull if the disk of the run is full; the class below knows it."""

    async def _reserve(self, name: str, bundle: Bundle) -> None:
        """Reserve a bundle; while no node has its resources free, it is listed as absent."""
        self.absences.lost(name, role=bundle.role, waits_for=bundle.described())
        await self._runtime.reserve(name, bundle)
        self.absences.back(name)

    async def spawn(self, name: str, cls: type[R], *args: object, resources: Resources = PLAIN, **kwargs: object) -> R:
        actor = await self._spawn_beside(name, cls, *args, resources=resources, **kwargs)
        self._actors[name], self._roles[name] = actor, resources.role or ""
        return actor

    async def _spawn_beside(
        self, name: str, cls: type[R], *args: object, resources: Resources = PLAIN, **kwargs: object
    ) -> R:
        """Spawn an actor that is not guarded, since nothing depends on it: its loss ends nothing."""
        actor = await self._runtime.spawn(cls, *args, name=name, resources=resources, **kwargs)
        self._stack.push_async_callback(self._stop, actor)
        return actor

    async def _stop(self, actor: object) -> None:
        if not (self._failed_to_start and self._runtime.found(actor)):
            await self._runtime.stop(actor)
