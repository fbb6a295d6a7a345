"""Runtime with fault injection for virtual time: calls are delayed, lost, repeated or reordered, and actors are killed.

Invariants:
- Randomness comes from one seed and time from the event loop, so that a history repeats under a virtual-time loop.
- A killed actor has no further effect: its tasks are cancelled, its calls are not delivered, its open files are closed
  without a commit (`_Incarnation.at_death`). Its callers get ActorLost; a new incarnation starts from its disk.
- A call whose request or answer was lost ends with ActorLost after `runtime.WATCH_S`, as over Ray.
- Actors are restarted until `stop` is called, even when entering their context fails.
- Arguments and results are copied, so that no two actors share an object.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import pickle
import random
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, TypeVar, cast

from headrace.actors.errors import ActorGone, ActorLost
from headrace.actors.runtime.actors.nodes import Bundle, NodeProcess
from headrace.actors.runtime.actors.runtime import ENDING, PLAIN, WATCH_S, Resources, require_async
from headrace.buffer.primitives.exit_stack import AsyncExitStack

T = TypeVar("T")

logger = logging.getLogger(__name__)

BURIAL_S = 0.001
BURIAL_TIME_S = 1.0

RUNNING: contextvars.ContextVar[_Incarnation | None] = contextvars.ContextVar("headrace.incarnation", default=None)
"""The incarnation whose code is running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFaults:
    """Fault probabilities of one call, from 0 to 1, and times in seconds."""

    delay_s: float = 0.002
    """Mean latency of a message, exponentially distributed."""
    slow: float = 0.01
    """Probability that a message takes up to `slow_s` instead."""
    slow_s: float = 20.0
    """Longest latency of a slow message."""
    lost: float = 0.003
    """Probability that the request is lost."""
    answer_lost: float = 0.003
    """Probability that the answer is lost."""
    repeated: float = 0.003
    """Probability that the request is delivered a second time later; its second answer is dropped."""
    restart_s: float = 5.0
    """Mean time from the death of an actor to its restart."""


NO_FAULTS = CallFaults(delay_s=0.0, slow=0.0, lost=0.0, answer_lost=0.0, repeated=0.0)


@dataclass(frozen=True, slots=True)
class _Raised:
    """Error of an actor's method, copied to the caller like any result."""

    error: Exception


class _Incarnation:
    """One incarnation of an actor, with the tasks and calls that end with it."""

    def __init__(self, cell: Cell, number: int) -> None:
        self.cell, self.number, self.alive = cell, number, True
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.at_death: list[Callable[[], None]] = []
        """Callbacks for its death, called before any of its code can run again."""
        self.waiting: dict[asyncio.Future[Any], None] = {}
        self.context = contextvars.copy_context()
        self.context.run(RUNNING.set, self)
        self.context.run(ENDING.set, self._end_itself)
        self.instance: Any = None
        self.life: asyncio.Task[None] | None = None
        self.over = asyncio.Event()
        """Set when its context has ended or it has died."""
        self.breaking = False
        """True once a background task of its context has failed."""

    def _end_itself(self) -> None:
        self.cell.kill("it ended itself")

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task of this incarnation."""
        return asyncio.get_running_loop().create_task(work, context=self.context.copy())

    def forget(self, task: asyncio.Task[Any]) -> None:
        """Remove a task that has ended."""
        self.tasks.pop(task, None)
        if not self.alive and not task.cancelled():
            # Retrieved, so that asyncio does not log the errors of a killed actor.
            task.exception()

    def die(self) -> None:
        """Kill this incarnation; its callers get ActorLost."""
        self.alive = False
        self.over.set()
        for close in self.at_death:
            close()
        for answer in list(self.waiting):
            if not answer.done():
                answer.set_exception(ActorLost(f"actor {self.cell.name} died"))
                # Retrieved here, because the caller may be dead too.
                answer.exception()
        for task in list(self.tasks):
            task.cancel()
        self._bury()

    def _bury(self) -> None:
        """Cancel the remaining tasks repeatedly, because cleanup code may wait for other dead actors.

        The task of the actor's context is cancelled only once: contextlib of Python 3.11 loops forever when a task
        group in a nested exit stack is cancelled twice."""
        for task in [task for task in self.tasks if task is not self.life]:
            task.cancel()
        if self.tasks:
            asyncio.get_running_loop().call_later(BURIAL_S, self._bury)


class Cell:
    """One named actor across all its incarnations."""

    def __init__(self, runtime: FaultyRuntime, name: str, make: Callable[[], object]) -> None:
        self.name = name
        self.make = make
        self.runtime = runtime
        self.current: _Incarnation | None = None
        self.lives = 0
        self.stopped = False
        self.entered = asyncio.Event()
        self.closing = asyncio.Event()

    async def live(self) -> None:
        """Run one incarnation after another until the actor is stopped."""
        while not self.stopped:
            self.lives += 1
            incarnation = self.current = _Incarnation(self, self.lives)
            life = incarnation.life = incarnation.begin(self._live(incarnation))
            await incarnation.over.wait()
            if incarnation.alive:
                # The context ended by itself, because the actor was stopped or its context failed.
                await asyncio.wait([life])
                if self.stopped:
                    self.current = None
                    incarnation.die()
                else:
                    error = None if life.cancelled() else life.exception()
                    logger.warning("the context of actor %s failed", self.name, exc_info=error)
                    self.kill("its context broke")
            if not self.stopped:
                await asyncio.sleep(self.runtime.chance.expovariate(1 / self.runtime.faults.restart_s))

    async def _live(self, incarnation: _Incarnation) -> None:
        try:
            incarnation.instance = self.make()
            async with AsyncExitStack() as stack:
                if hasattr(incarnation.instance, "__aenter__"):
                    await stack.enter_async_context(incarnation.instance)
                if incarnation.alive:
                    self.entered.set()
                try:
                    await self.closing.wait()
                except asyncio.CancelledError:
                    incarnation.breaking = True
                    raise
        finally:
            incarnation.over.set()

    def kill(self, why: str) -> None:
        """Kill the current incarnation, if there is one, without cleanup."""
        incarnation, self.current = self.current, None
        self.entered.clear()
        if incarnation is not None and incarnation.alive:
            self.runtime.note("died", self.name, why)
            incarnation.die()


class Proxy:
    """Proxy of an actor, whose attributes are async callables."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._cell.runtime.call(self._cell, method, args, kwargs)

        return call


@dataclass(slots=True)
class FaultyRuntime:
    """Runtime of one driver, which `kill_all` kills. It satisfies `runtime.Runtime` and is an async context manager.

    `note` is called for every event of the history with its kind, the affected actor and details.
    """

    faults: CallFaults
    chance: random.Random
    note: Callable[[str, str, str], None] = lambda _kind, _who, _what: None
    cells: dict[str, Cell] = field(default_factory=dict)
    cut_off: set[str] = field(default_factory=set)
    """Actors that are currently unreachable."""
    slowed: dict[str, float] = field(default_factory=dict)
    """Latency factor of each slowed actor, by name."""
    is_dead: bool = False
    """True after the driver has been killed."""
    isolates_actors: ClassVar[bool] = True
    _lives: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _found: set[str] = field(default_factory=set)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def __aenter__(self) -> Self:
        asyncio.get_running_loop().set_task_factory(cast("Any", self._task_of_incarnation))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end_all()
        # Virtual time for the tasks of killed actors to end, before the event loop cancels them a second time.
        await asyncio.sleep(BURIAL_TIME_S)

    def _task_of_incarnation(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        """Create a task and register it with the incarnation whose code creates it."""
        task = NumberedTask(next(self._numbers), work, loop=loop, **options)
        context = options.get("context")
        incarnation = RUNNING.get() if context is None else context.get(RUNNING)
        if incarnation is not None:
            incarnation.tasks[task] = None
            task.add_done_callback(incarnation.forget)
            if not incarnation.alive:
                task.cancel()
        return task

    async def spawn(self, cls: type[T], *args: Any, name: str, resources: Resources = PLAIN, **kwargs: Any) -> T:
        require_async(cls)
        require_alive()
        if (known := self.cells.get(name)) is not None and not known.stopped:
            self._found.add(name)
            await known.entered.wait()
            return cast("T", Proxy(known))
        self._found.discard(name)
        cell = self.cells[name] = Cell(self, name, lambda: cls(*args, **kwargs))
        # The task belongs to the driver, so it gets an empty context instead of the context of the spawning actor.
        self._lives[name] = asyncio.get_running_loop().create_task(cell.live(), context=contextvars.Context())
        await cell.entered.wait()
        return cast("T", Proxy(cell))

    def actor(self, name: str, cls: type[T]) -> T:
        """Return the proxy of an actor. Raises KeyError if the actor was never spawned."""
        return cast("T", Proxy(self.cells[name]))

    def found(self, actor: object) -> bool:
        """Return True if a restarted service found the actor alive."""
        return cast("Proxy", actor)._cell.name in self._found  # noqa: SLF001 - the proxy is ours

    async def stop(self, actor: object) -> None:
        # No error here, because contextlib of Python 3.11 may loop forever when several exits of a dead actor raise.
        if not _is_alive():
            return
        cell = cast("Proxy", actor)._cell  # noqa: SLF001 - the proxy is ours
        cell.stopped = True
        cell.closing.set()
        if cell.current is None:
            self._lives[cell.name].cancel()
        await asyncio.wait([self._lives[cell.name]])

    async def stats(self, actor: object) -> tuple[int, int]:
        """Return (incarnation number, 0). Raises ActorLost while the actor is down."""
        cell = cast("Proxy", actor)._cell  # noqa: SLF001 - the proxy is ours
        if cell.current is None:
            raise ActorLost(f"actor {cell.name} is down")
        return cell.lives, 0

    def processes(self) -> list[NodeProcess]:
        return []

    async def reserve(self, name: str, bundle: Bundle) -> None:
        """Do nothing: all actors share the resources of this process."""

    async def restart(self, actor: object, process_id: int) -> None:
        cell = cast("Proxy", actor)._cell  # noqa: SLF001 - the proxy is ours
        if cell.lives == process_id:
            cell.kill("it was killed by its guard")

    def calm(self) -> None:
        """Deliver all calls from now on, with ordinary latency only."""
        self.faults = replace(NO_FAULTS, delay_s=self.faults.delay_s, restart_s=self.faults.restart_s)
        self.cut_off.clear()
        self.slowed.clear()

    async def kill_all(self) -> None:
        """Kill the driver and all actors."""
        self.is_dead = True
        await self._end_all()

    async def _end_all(self) -> None:
        for cell in self.cells.values():
            cell.stopped = True
            cell.kill("the driver died")
        for life in self._lives.values():
            life.cancel()
        if self._lives:
            await asyncio.wait(self._lives.values())

    async def call(self, cell: Cell, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of an actor, subject to the faults. Raises the method's error, ActorLost or ActorGone."""
        require_alive()
        name = f"{cell.name}.{method}"
        made_of = pickle.dumps((args, kwargs))
        await self._travel(cell)
        if self._strikes("lost", self.faults.lost, name) or cell.name in self.cut_off:
            await self._lose(cell)
        answer = self._arrive(cell, method, made_of)
        if self._strikes("repeated", self.faults.repeated, name):
            later = self.chance.uniform(0, self.faults.slow_s)
            asyncio.get_running_loop().call_later(later, self._arrive_again, cell, method, made_of)
        try:
            result = await asyncio.shield(answer)
        except asyncio.CancelledError:
            # The cancellation of a dead caller does not reach the actor.
            if _is_alive():
                answer.cancel()
            raise
        await self._travel(cell)
        if self._strikes("answer lost", self.faults.answer_lost, name):
            await self._lose(cell)
        require_alive()
        value = pickle.loads(result)
        if isinstance(value, _Raised):
            raise value.error
        return value

    def _arrive(self, cell: Cell, method: str, made_of: bytes) -> asyncio.Future[bytes]:
        """Deliver a request; the future holds its answer, or ActorLost if the actor is down."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        incarnation = cell.current
        if incarnation is None:
            answer.set_exception(
                ActorGone(f"actor {cell.name} is stopped") if cell.stopped else ActorLost(f"actor {cell.name} is down")
            )
            return answer
        incarnation.waiting[answer] = None
        work = incarnation.begin(_execute(incarnation, method, made_of, answer))
        answer.add_done_callback(lambda _: incarnation.waiting.pop(answer, None))
        answer.add_done_callback(lambda _: work.cancel() if answer.cancelled() else None)
        return answer

    def _arrive_again(self, cell: Cell, method: str, made_of: bytes) -> None:
        answer = self._arrive(cell, method, made_of)
        answer.add_done_callback(lambda _: answer.cancelled() or answer.exception())

    async def _travel(self, cell: Cell) -> None:
        if self.faults.delay_s == 0.0:
            return
        seconds = self.chance.expovariate(1 / self.faults.delay_s) * self.slowed.get(cell.name, 1.0)
        if self.chance.random() < self.faults.slow:
            seconds = self.chance.uniform(0, self.faults.slow_s)
        await asyncio.sleep(seconds)

    async def _lose(self, cell: Cell) -> None:
        """Raise ActorLost after the time that a caller needs to poll twice for a lost call."""
        await asyncio.sleep(2 * WATCH_S)
        raise ActorLost(f"actor {cell.name} does not know a call")

    def _strikes(self, kind: str, chance: float, name: str) -> bool:
        struck = self.chance.random() < chance
        if struck:
            self.note(kind, name, "")
        return struck


async def _execute(incarnation: _Incarnation, method: str, made_of: bytes, answer: asyncio.Future[bytes]) -> None:
    """Execute a request. As in `runtime.Host`, a call waits until its actor has been entered."""
    args, kwargs = pickle.loads(made_of)
    try:
        await incarnation.cell.entered.wait()
        result = pickle.dumps(await getattr(incarnation.instance, method)(*args, **kwargs))
    except asyncio.CancelledError:
        if not answer.done():
            answer.set_exception(ActorLost(f"a call of {method} was broken off"))
            answer.exception()
        raise
    except Exception as error:  # noqa: BLE001 - the boundary of the actor: the caller gets the error with its type
        life = incarnation.life
        if incarnation.breaking or (life is not None and life.cancelling()):
            # As in `runtime.Host`: a background task of the actor failed, and the actor is about to end.
            error = ActorLost(f"actor {incarnation.cell.name} failed and restarts: {error!r}")
        result = pickle.dumps(_Raised(error))
    if not answer.done():
        answer.set_result(result)


def _is_alive() -> bool:
    """Return whether the running code belongs to a living actor, or to none."""
    incarnation = RUNNING.get()
    return incarnation is None or incarnation.alive


def require_alive() -> None:
    """Raise CancelledError in code of a killed incarnation, which must have no further effect."""
    if not _is_alive():
        raise asyncio.CancelledError


__all__ = ["NO_FAULTS", "RUNNING", "CallFaults", "FaultyRuntime", "require_alive"]


class _Numbered:
    """Mixin that hashes an object by its number instead of its address."""

    def __init__(self, number: int, *arguments: Any, **options: Any) -> None:
        self._number = number
        super().__init__(*arguments, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class NumberedTask(_Numbered, asyncio.Task[Any]):
    """Task that is hashed by its number: `NumberedTask(number, coroutine, ...)`."""


class NumberedFuture(_Numbered, asyncio.Future[Any]):
    """Future that is hashed by its number: `NumberedFuture(number, loop=...)`."""
