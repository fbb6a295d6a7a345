"""Runtime that spawns plain classes as actors: `pool = await runtime.spawn(SandboxPool, config, name="pool")`.

Invariants:
- Only this file and the learners' ranks (`training.rank_group`) use `ray.remote`. Everywhere else an actor is an object
  with async methods.
- A class may be spawned only if all its public methods are async (else TypeError), so that no call can block an event
  loop.
- An actor that has `__aenter__` is entered once before its first call, and exited by `stop`, both in a task of its own,
  so that a failure in its context (in a background task) is noticed. After its process restarts, it is also entered
  when its stats are requested: others may depend on its background work without calling it.
- When an actor's context fails, its process ends and Ray starts another: no actor continues with a failed part.
- Errors keep their type across processes. A dead or restarting process raises `ActorLost`, whatever error Ray raises.
- Cancelling the await of a call cancels the coroutine in the actor; a call that the actor cancelled raises `ActorLost`.
- The actor that runs a long call is polled. If it reports twice that it does not know the call, the call was lost in
  transit and raises `ActorLost`.
- Proxies are picklable and may be passed to other actors.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import pickle
import secrets
import sys
import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn, Protocol, TypeVar, cast

from headrace.actors.errors import ActorGone, ActorLost, ActorMissing, ConfigError, StartFailed
from headrace.actors.record.files.logs import LogTerms, begin_logs
from headrace.actors.runtime.actors.nodes import (
    AGENT_TIMEOUT_S,
    NAMESPACE,
    NODE_LABEL,
    ROLE_LABEL,
    Bundle,
    NodeProcess,
    NodeRole,
    agent_name,
    kill_here,
    started,
    this_process,
)
from headrace.actors.runtime.actors.operations import ABSENCE, until_back
from headrace.actors.runtime.actors.ticker import begin_ticking
from headrace.buffer.primitives.daemon_thread import start_in_thread
from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.sandboxes.host.private_folders import temporary_folder

T = TypeVar("T")

logger = logging.getLogger(__name__)

BROKEN_EXIT_CODE = 70
BREAKING_S = 10.0
"""Time limit for a failed actor to close its resources."""
STOP_TIMEOUT_S = 60.0
"""Time limit for an actor to exit its context; after that it is killed."""
START_TRIES = 2
"""Number of attempts to start a local Ray."""
PING_TIMEOUT_S = 5.0
"""Time within which an actor that is being stopped must report its process id; otherwise it counts as hung and is
killed."""
BEGIN_S = 2.0
"""Wait after an actor that begins unasked could not be entered."""
WATCH_S = 15.0
"""Interval at which the actor that runs a long call is polled."""
RAY_SOCKET: Final = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""Longest path that Ray creates below the folder for temporary files."""
_NO_RAY_METRICS: Final = {
    "RAY_enable_metrics_collection": "0",
    # A port that these exporters cannot open; they log that and continue.
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
}
"""Disables Ray's metrics, which it exports on every interface without authentication; ours are in metrics.jsonl and
OpenTelemetry."""
_HIDE_UNRESERVED_GPUS: Final = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
"""Variable that makes Ray hide all GPUs from an actor that has reserved none. By default such an actor sees all."""
_SOCKET_PATH_BYTES: Final = 107
"""Longest path of a Unix socket, see unix(7)."""
ENDING: ContextVar[Callable[[], None] | None] = ContextVar("headrace.ending", default=None)
"""Function that ends the current actor, for actors without a process of their own."""
DEFAULT_MAX_CONCURRENCY = 2048
"""Maximum number of concurrent calls of one actor; dispatcher, workers and status calls together stay far below."""


def end_actor() -> NoReturn:
    """End the current actor immediately, so that a replacement starts from its state on disk."""
    end = ENDING.get()
    if end is None:
        os._exit(BROKEN_EXIT_CODE)
    end()
    raise asyncio.CancelledError


def require_async(cls: type[object]) -> None:
    """Raise TypeError if `cls` has a public method or property that is not a coroutine function."""
    for name, member in inspect.getmembers_static(cls):
        if name.startswith("_"):
            continue
        if isinstance(member, property | staticmethod | classmethod):
            raise TypeError(f"{cls.__name__}.{name} must be an async method: only those can be called on an actor")
        if inspect.isfunction(member) and not inspect.iscoroutinefunction(member):
            raise TypeError(f"{cls.__name__}.{name} is not async: make it `async def` or private")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources and place of an actor. `spread` places actors on different hosts where possible; without `restarts` a
    dead actor is not restarted. On a cluster the actor runs on a node with this `role`; if it names a `bundle`
    (see `RayRuntime.reserve`), where that bundle is, or on the `node` with this Ray id; a local Ray has one node. An
    actor with a role is not placed on the nodes in `avoid` (Ray ids)."""

    cpus: float = 0.0
    gpus: float = 0.0
    memory_bytes: int = 0
    role: NodeRole | None = None
    bundle: str = ""
    node: str = ""
    avoid: tuple[str, ...] = ()
    spread: bool = False
    restarts: bool = True


PLAIN = Resources()
"""Resources of actors that mostly wait for others."""


class Runtime(Protocol):
    """Environment in which actors run."""

    isolates_actors: ClassVar[bool]
    """True if an actor may hang or die separately from this process, so that it needs a guard."""

    async def spawn(self, cls: type[T], *args: Any, name: str, resources: Resources = PLAIN, **kwargs: Any) -> T:
        """Start an actor and return it once it is ready. Raises TypeError for a class with synchronous public methods,
        and StartFailed if the actor does not start."""

    async def stop(self, actor: object) -> None:
        """Exit the actor's context and end the actor. Idempotent; a dead actor is not an error."""

    def found(self, actor: object) -> bool:
        """Return True if `spawn` found the actor already running, spawned by another process."""

    async def stats(self, actor: object) -> tuple[int, int]:
        """Return the process id and the number of calls received so far. Raises ActorLost when its process is gone."""

    async def restart(self, actor: object, process_id: int) -> None:
        """Kill the process of a hung actor; a new one is started. Idempotent."""

    def processes(self) -> list[NodeProcess]:
        """Return the processes of the actors that `stats` has seen last."""

    async def reserve(self, name: str, bundle: Bundle) -> None:
        """Reserve resources on one node, for the actors whose `Resources` name this bundle. Idempotent. Raises
        StartFailed."""


class InlineRuntime:
    """Runtime whose actors are plain instances in this process, for unit tests, virtual time and the orchestration
    bench's baseline."""

    isolates_actors: ClassVar[bool] = False

    def __init__(self) -> None:
        self._stacks: dict[int, AsyncExitStack] = {}

    async def spawn(self, cls: type[T], *args: Any, name: str, resources: Resources = PLAIN, **kwargs: Any) -> T:
        """See `Runtime.spawn`. Nothing is reserved: all actors share the resources of this process."""
        require_async(cls)
        instance = cls(*args, **kwargs)
        stack = AsyncExitStack()
        if hasattr(instance, "__aenter__"):
            await stack.enter_async_context(cast("Any", instance))
        self._stacks[id(instance)] = stack
        return instance

    async def stop(self, actor: object) -> None:
        if stack := self._stacks.pop(id(actor), None):
            await stack.aclose()

    def found(self, actor: object) -> bool:
        """Return False: an instance belongs to its spawner."""
        return False

    async def stats(self, actor: object) -> tuple[int, int]:
        """Return the id of this process, and 0: inline calls are not counted."""
        return os.getpid(), 0

    async def restart(self, actor: object, process_id: int) -> None:
        """Do nothing: an instance in this process cannot hang on its own."""

    def processes(self) -> list[NodeProcess]:
        return []

    async def reserve(self, name: str, bundle: Bundle) -> None:
        """Do nothing: all actors share the resources of this process."""


@dataclass(frozen=True, slots=True)
class _Raised:
    """Error of an actor's method, returned as a value so that it keeps its type."""

    error: BaseException


class _Life:
    """Enters an instance's context, holds it open and exits it, all in one task. The process ends if the context
    fails."""

    def __init__(self, instance: object) -> None:
        self._instance: Any = instance
        self._closing = asyncio.Event()
        self._breaking = False
        self._entered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # The root task of the actor: it outlives the call that started it, and `close` awaits it.
        self._task = asyncio.get_running_loop().create_task(self._live())

    @property
    def failed(self) -> bool:
        """True if entering the context failed."""
        return self._entered.done() and self._entered.exception() is not None

    @property
    def broken(self) -> bool:
        """True from the moment at which a background task of the open context failed: the process will end."""
        return self._breaking or (self._task.cancelling() > 0 and not self._closing.is_set())

    async def entered(self) -> None:
        """Wait until the context is open. Raises any error from entering it."""
        await asyncio.shield(self._entered)

    async def close(self) -> None:
        """Exit the context, or cancel entering it. Raises any error from exiting."""
        self._closing.set()
        if not self._entered.done():
            self._task.cancel()
            await asyncio.wait([self._task])
            return
        await asyncio.shield(self._task)

    async def _live(self) -> None:
        async with AsyncExitStack() as stack:
            try:
                if hasattr(self._instance, "__aenter__"):
                    await stack.enter_async_context(self._instance)
            except Exception as error:  # noqa: BLE001 - raised by `entered`
                self._entered.set_exception(error)
                # Mark the exception as retrieved, in case nothing waits: the next call enters again and gets it.
                self._entered.exception()
                return
            except asyncio.CancelledError:
                self._entered.set_exception(
                    ActorGone(f"{type(self._instance).__name__} was closed while it was starting")
                )
                self._entered.exception()
                raise
            self._entered.set_result(None)
            try:
                await self._closing.wait()
            except asyncio.CancelledError:
                # The task group takes its cancellation back when it exits, before the other exits have ended.
                self._breaking = True
                asyncio.get_running_loop().call_later(BREAKING_S, os._exit, BROKEN_EXIT_CODE)
                self._task.add_done_callback(_end_process)
                raise


def _end_process(life: asyncio.Task[None]) -> None:
    error = None if life.cancelled() else life.exception()
    logger.critical("the actor's context failed; its process ends and is restarted", exc_info=error)
    os._exit(BROKEN_EXIT_CODE)


class BeginsUnasked:
    """Base of actors that Ray restarts with nobody left to call them: they are entered as soon as their process has
    started. Other actors are entered by the first call.

    Ray may lose the call by which a process enters itself, if the head was away shortly before (seen once in 33 faults
    of a soak, with Ray 2.60): the process then ends after `begins_within_s`, and its successor tries again."""

    begins_within_s: ClassVar[float] = 20.0


class Host:
    """Ray actor that owns one instance, enters it once, and returns errors as values."""

    def __init__(self, pickled: bytes) -> None:
        # As bytes, because Ray cannot restart an actor whose arguments hold object references.
        ABSENCE.seconds, logs, name, cls, args, kwargs = pickle.loads(pickled)
        if logs is not None:
            begin_logs(logs, actor=name, node=this_process().node)
        logger.info("%s starts", cls.__name__)
        self._instance: Any = cls(*args, **kwargs)
        self._life: _Life | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._closed = False
        self._calls = 0
        self._running: set[str] = set()
        if issubclass(cls, BeginsUnasked):
            import ray

            ray.get_runtime_context().current_actor.begin.remote()
            waiting = threading.Timer(cls.begins_within_s, self._end_unless_begun)
            waiting.daemon = True
            waiting.start()

    def _end_unless_begun(self) -> None:
        if self._life is None and not self._closed:
            logger.error("%s has not begun: this process ends, and Ray starts another one", type(self._instance))
            os._exit(BROKEN_EXIT_CODE)

    async def begin(self) -> None:
        """Enter the instance's context, again after failures, until it is open or closed."""
        while not self._closed:
            try:
                await self._opened()
            except Exception:
                logger.exception("%s does not open; next try in %g s", type(self._instance).__name__, BEGIN_S)
                await asyncio.sleep(BEGIN_S)
            else:
                return

    async def open(self) -> object:
        """Enter the instance's context unless it is open. Returns None, or the error from entering it."""
        try:
            await self._opened()
        except Exception as error:  # noqa: BLE001 - raised in the caller with its type
            return _Raised(error)
        return None

    async def call(self, call_id: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        self._calls += 1
        self._running.add(call_id)
        try:
            await self._opened()
            return await getattr(self._instance, method)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the one boundary: raised in the caller with its type
            if self._life is not None and self._life.broken:
                # Such as that a task group is shutting down: the caller must wait for the restart, as after any death.
                return _Raised(ActorLost(f"{type(self._instance).__name__} failed and restarts: {error!r}"))
            return _Raised(error)
        finally:
            self._running.discard(call_id)

    async def call_raising(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Do what `call` does for code that waits with `ray.get`, see `reference`."""
        value = await self.call(uuid.uuid4().hex, method, args, kwargs)
        if isinstance(value, _Raised):
            raise value.error
        return value

    async def knows(self, call_id: str) -> bool:
        """Return True if this call is running in this actor."""
        return call_id in self._running

    async def stats(self, *, begin: bool) -> tuple[NodeProcess, int]:
        """Return the process and the number of calls received. With `begin`, start entering an instance whose context
        is not open or failed to open, without waiting for it."""
        if begin and not self._closed:
            self._begun()
        return this_process(), self._calls

    async def close(self) -> None:
        """Exit the instance's context."""
        self._closed = True
        life, self._life = self._life, None
        if life is not None:
            await life.close()
        logger.info("%s is closed", type(self._instance).__name__)

    async def _opened(self) -> None:
        if self._closed:
            raise ActorGone(f"{type(self._instance).__name__} is closed")
        await self._begun().entered()

    def _begun(self) -> _Life:
        """Return the instance's life, a new one if there is none or its entering failed."""
        if self._life is None or self._life.failed:
            self._life = _Life(self._instance)
            self._ticking = self._ticking or begin_ticking(type(self._instance).__name__)
        return self._life


class ActorProxy:
    """Proxy of a named actor in another process: attribute access returns an async callable. Pickled by its name and
    its Ray namespace (empty: that of the process)."""

    def __init__(self, name: str, handle: Any = None, *, namespace: str = "") -> None:
        self._name = name
        self._handle = handle
        self._namespace = namespace
        self._looking: asyncio.Future[Any] | None = None

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            handle = await self._resolved()
            call_id = uuid.uuid4().hex
            reference = handle.call.remote(call_id, method, args, kwargs)
            try:
                return await _await_call(self._name, reference, lambda: handle.knows.remote(call_id))
            except ActorLost:
                self._forget(handle)
                raise

        return call

    async def _resolved(self) -> Any:
        """Return the Ray handle, looked up by name once. Raises ActorMissing if there is none, and ActorLost."""
        if self._handle is None:
            import ray
            from ray.exceptions import RayError

            # Ray's look-up blocks while the head of the cluster is away: one thread looks up for all callers.
            looking = self._looking
            if looking is None or looking.done() or looking.get_loop() is not asyncio.get_running_loop():
                look_up = partial(ray.get_actor, self._name, self._namespace or None)
                looking = self._looking = start_in_thread(look_up, name=f"find-{self._name}")
            try:
                self._handle = await asyncio.shield(looking)
            except ValueError as error:
                raise ActorMissing(f"there is no actor named {self._name}") from error
            except RayError as error:
                raise ActorLost(f"the cluster does not answer a look-up of {self._name}") from error
        return self._handle

    def _forget(self, handle: Any) -> None:
        """Look the actor up again at the next call: the handle of an actor that Ray moved to another node may say for
        ever that the actor has died."""
        if self._handle is handle:
            self._handle = None

    def __reduce__(self) -> tuple[Callable[[str, str], ActorProxy], tuple[str, str]]:
        return _proxy_of, (self._name, self._namespace)

    def __repr__(self) -> str:
        return f"ActorProxy({self._name})"


def reference(actor: object, method: str, *args: Any) -> Any:
    """Begin a call of an actor, and return Ray's reference to its result, for code of others that waits with `ray.get`:
    that raises the method's error. Blocks to look the actor up."""
    import ray

    proxy = cast("ActorProxy", actor)
    handle = ray.get_actor(proxy._name, proxy._namespace or None)  # noqa: SLF001 - the proxy is ours
    return handle.call_raising.remote(method, args, {})


def _proxy_of(name: str, namespace: str) -> ActorProxy:
    return ActorProxy(name, namespace=namespace)


async def _await_call(name: str, reference: Any, ask: Callable[[], Any] | None = None) -> Any:
    """Return the value of a Ray call. Raises the method's own error, ActorLost, or CancelledError (after cancelling the
    call in the actor). `ask` asks the actor whether it is still running the call."""
    import ray
    from ray.exceptions import ActorUnschedulableError, RayActorError, TaskCancelledError

    try:
        value = await (reference if ask is None else _unless_forgotten(name, reference, ask))
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise
    except TaskCancelledError as error:
        # The actor cancelled the call, because it is closing or failed.
        raise ActorLost(f"actor {name} cancelled a call") from error
    except (RayActorError, ActorUnschedulableError) as error:  # unschedulable: its one node is gone, as an agent's is
        raise ActorLost(f"actor {name} is gone or restarting") from error
    if isinstance(value, _Raised):
        raise value.error
    return value


async def _unless_forgotten(name: str, reference: Any, ask: Callable[[], Any]) -> Any:
    """Return the value of a call. Raises ActorLost when its actor reports twice in a row that it is not running the
    call: the first time, the answer may have been in transit."""
    answer, denials = asyncio.wrap_future(reference.future()), 0
    try:
        while not (await asyncio.wait([answer], timeout=WATCH_S))[0]:
            # An actor that does not answer restarts or hangs, which is detected elsewhere.
            with suppress(ActorLost, TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    denials = 0 if await _await_call(name, ask()) else denials + 1
            if denials > 1 and not answer.done():
                raise ActorLost(f"actor {name} does not know a call")
        return answer.result()
    finally:
        answer.cancel()


class RayRuntime:
    """Runtime whose actors are named, detached Ray actors (with a local Ray they still die with the driver). Ray
    restarts them without limit unless their `Resources` forbid it, and never retries calls: that is left to the
    callers, which know which calls are idempotent."""

    isolates_actors: ClassVar[bool] = True

    def __init__(
        self,
        prefix: str = "",
        *,
        namespace: str = "",
        roles: Mapping[NodeRole, str] | None = None,
        absent_s: float | None = None,
        logs: LogTerms | None = None,
    ) -> None:
        """`namespace` is the Ray namespace of the actors (empty: that of the process). `roles` has the value of the
        label `headrace/role` for each role, on a cluster; None on a local Ray, whose one node has all roles. `absent_s`
        is the time for which the actors wait for lost ones (None: as this process). Without `logs` the actors log to
        standard error only."""
        self._absent_s = absent_s
        self._logs = logs
        self._prefix = prefix
        self._namespace = namespace
        self._roles = roles
        self._processes: dict[str, NodeProcess] = {}
        self._found: set[str] = set()
        self._bundles: dict[str, Any] = {}

    async def spawn(
        self,
        cls: type[T],
        *args: Any,
        name: str,
        resources: Resources = PLAIN,
        max_concurrency: int = DEFAULT_MAX_CONCURRENCY,
        **kwargs: Any,
    ) -> T:
        import ray
        from ray import cloudpickle

        require_async(cls)
        name = self._prefix + name
        exists = await asyncio.to_thread(_exists, name, self._namespace)
        handle = (
            # A subclass with the actor's own name, for `ps` and Ray's pages.
            ray.remote(type(cls.__name__, (Host,), {}))
            .options(
                name=name,
                num_cpus=resources.cpus,
                num_gpus=resources.gpus,
                max_restarts=-1 if resources.restarts else 0,
                max_task_retries=0,
                max_concurrency=max_concurrency,
                lifetime="detached",
                get_if_exists=True,
                **({"namespace": self._namespace} if self._namespace else {}),
                **({"memory": resources.memory_bytes} if resources.memory_bytes else {}),
                **self._place(resources),
            )
            .remote(cloudpickle.dumps((self._absent_s or ABSENCE.seconds, self._logs, name, cls, args, kwargs)))
        )
        try:
            # An actor of another spawner may be restarting; a new one that dies is not retried.
            async with asyncio.timeout(ABSENCE.seconds):
                await until_back(lambda: _await_call(name, handle.open.remote()), deadline_s=None if exists else 0.0)
        except (ActorGone, TimeoutError) as error:
            ray.kill(handle, no_restart=True)
            raise StartFailed(f"actor {name} died while starting; see the Ray logs of this run") from error
        except asyncio.CancelledError:
            if not exists:
                # Nobody has a proxy of it to stop it later, and it may hold a device or other actors.
                try:
                    await self.stop(ActorProxy(name, handle, namespace=self._namespace))
                finally:
                    ray.kill(handle, no_restart=True)
            raise
        if exists:
            self._found.add(name)
        return cast("T", ActorProxy(name, handle, namespace=self._namespace))

    def processes(self) -> list[NodeProcess]:
        return list(self._processes.values())

    @property
    def is_cluster(self) -> bool:
        """True if the actors are on the nodes of a cluster."""
        return self._roles is not None

    def _place(self, resources: Resources) -> dict[str, Any]:
        """Return Ray's options for the place of an actor."""
        if self._roles is None or not (resources.role or resources.bundle or resources.node):
            return {"scheduling_strategy": "SPREAD" if resources.spread else "DEFAULT"}
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        if resources.node:
            return {"scheduling_strategy": NodeAffinitySchedulingStrategy(resources.node, soft=False)}
        if resources.bundle:
            group = self._bundles[resources.bundle]
            return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)}
        assert resources.role is not None
        labels = {ROLE_LABEL: self._roles[resources.role]}
        if resources.avoid:
            labels[NODE_LABEL] = f"!in({','.join(resources.avoid)})"
        return {"label_selector": labels, **({"scheduling_strategy": "SPREAD"} if resources.spread else {})}

    async def reserve(self, name: str, bundle: Bundle) -> None:
        """Reserve resources on one node with the bundle's role, for actors that stay together: when that node is lost,
        Ray moves the bundle and its actors to another one. Idempotent; does nothing on a local Ray.

        Raises StartFailed if no node can take the bundle within `cluster.absent_s`."""
        if self._roles is None or name in self._bundles:
            return
        group = await asyncio.to_thread(bundle.group, f"{self._namespace}-{name}", self._roles[bundle.role])
        if not await asyncio.to_thread(group.wait, ABSENCE.seconds):
            raise StartFailed(
                f"{name} cannot be placed: no node with the label {ROLE_LABEL}={self._roles[bundle.role]} has "
                f"{bundle.described()} free; add a node, or lower what the recipe reserves"
            )
        self._bundles[name] = group

    async def release(self) -> None:
        """Give back all bundles that this runtime reserved; their actors end. Idempotent."""
        from ray.util import remove_placement_group

        while self._bundles:
            await asyncio.to_thread(remove_placement_group, self._bundles.popitem()[1])

    def found(self, actor: object) -> bool:
        """Return True if `spawn` found the actor already running, spawned by another process."""
        return cast("ActorProxy", actor)._name in self._found  # noqa: SLF001 - the proxy is ours

    def named(self, name: str) -> Any:
        """Return the proxy of an actor that need not be running yet."""
        return ActorProxy(self._prefix + name, namespace=self._namespace)

    async def find(self, cls: type[T], name: str) -> T:
        """Return the named actor, which another process spawned. Raises ActorLost if there is none."""
        require_async(cls)
        proxy = self.named(name)
        await proxy._resolved()  # noqa: SLF001 - the proxy is ours
        return cast("T", proxy)

    async def kill(self, actor: object) -> None:
        """Kill the actor, whichever host it is on, without restarting it. Idempotent."""
        import ray

        with suppress(ActorLost):
            ray.kill(await cast("ActorProxy", actor)._resolved(), no_restart=True)  # noqa: SLF001 - the proxy is ours

    async def stop(self, actor: object) -> None:
        import ray
        from ray.exceptions import RayError

        proxy = cast("ActorProxy", actor)
        try:
            handle = await proxy._resolved()  # noqa: SLF001 - the proxy is ours
        except ActorLost:
            return
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                await self._ask_stats(proxy, begin=False)
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await handle.close.remote()
        except TimeoutError:
            # A stopped process does not react to Ray.
            if process := self._processes.get(repr(proxy)):
                await self.restart(actor, process.id)
        except (ActorLost, RayError):
            pass
        ray.kill(handle, no_restart=True)

    async def stats(self, actor: object) -> tuple[int, int]:
        """Return the process id and the number of calls received so far. Raises ActorLost when its process is gone."""
        return await self._ask_stats(cast("ActorProxy", actor), begin=True)

    async def _ask_stats(self, proxy: ActorProxy, *, begin: bool) -> tuple[int, int]:
        handle = await proxy._resolved()  # noqa: SLF001 - the proxy is ours
        try:
            process, calls = await _await_call(repr(proxy), handle.stats.remote(begin=begin))
        except ActorLost:
            proxy._forget(handle)  # noqa: SLF001 - the proxy is ours
            raise
        self._processes[repr(proxy)] = process
        return process.id, calls

    async def restart(self, actor: object, process_id: int) -> None:
        """Kill the process of a hung actor, on whichever node it is; Ray starts a new one. Idempotent. On a cluster it
        does nothing if `stats` has not seen the process: nobody knows then on which node it is."""
        process = self._processes.get(repr(cast("ActorProxy", actor)))
        if process is None or process.id != process_id:
            if self.is_cluster:
                return
            try:
                process = replace(this_process(), id=process_id, started=started(process_id))
            except ProcessLookupError:
                return
        if process.node == this_process().node:
            kill_here(process)
            return
        try:
            async with asyncio.timeout(AGENT_TIMEOUT_S):
                await ActorProxy(agent_name(process.node), namespace=NAMESPACE).kill(process)
        except (ActorLost, TimeoutError) as error:
            # Ray declares a lost node dead, and restarts its actors elsewhere.
            logger.warning("process %d of node %s could not be killed: %r", process_id, process.node, error)


def namespace_of(run_id: str) -> str:
    """Return the Ray namespace of a run's actors."""
    return f"{NAMESPACE}-{run_id}"


def node_address() -> str:
    """Return the address at which other hosts reach this one."""
    import ray.util

    address: str = ray.util.get_node_ip_address()
    return address


def _exists(name: str, namespace: str) -> bool:
    import ray

    try:
        ray.get_actor(name, namespace or None)
    except ValueError:
        return False
    return True


def check_ray_folder() -> Path:
    """Return the folder for temporary files, where Ray creates its sockets. Raises FolderRefused, ConfigError."""
    folder = temporary_folder()
    longest = _SOCKET_PATH_BYTES - len(RAY_SOCKET)
    if len(os.fsencode(folder)) > longest:
        raise ConfigError(
            f"TMPDIR {folder} is too long for Ray's unix sockets: set TMPDIR to a path of at most {longest} bytes"
        )
    return folder


def start_local_ray(
    run_id: str, *, object_store_bytes: int, logs: bool = False, gpus: int | None = None, **settings: Any
) -> None:
    """Start a local Ray, which dies with this process. It offers `gpus` GPUs, by default those that it finds.
    `settings` are further arguments of `ray.init`.

    Raises StartFailed when Ray does not start, or was imported before it was configured to require a token. Raises
    FolderRefused and ConfigError when TMPDIR is not usable for Ray.
    """
    check_ray_folder()
    if "ray" in sys.modules and os.environ.get("RAY_AUTH_MODE") != "token":
        raise StartFailed("ray was imported before headrace started it: set RAY_AUTH_MODE=token before that import")
    # Even a local Ray listens on every interface, and anybody who reaches it can run code. So it requires a token that
    # only this process and its children know; by default, Ray would write one into the user's home.
    os.environ["RAY_AUTH_MODE"] = "token"
    # Ray reads the token once per process, so a second start reuses it.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # By default, Ray's workers run at nice 15. Gateway, learner and engines would starve and miss their deadlines.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ[_HIDE_UNRESERVED_GPUS] = "1"
    for name, value in _NO_RAY_METRICS.items():
        os.environ.setdefault(name, value)
    import ray

    for tries_left in reversed(range(START_TRIES)):
        try:
            ray.init(
                address="local",
                num_gpus=gpus,
                namespace=namespace_of(run_id),
                object_store_memory=object_store_bytes,
                include_dashboard=False,
                log_to_driver=logs,
                configure_logging=False,
                **settings,
            )
        except Exception as error:  # Ray raises bare exceptions. It waits at most 30 s for a slow node.
            stop_local_ray()
            if not tries_left:
                raise StartFailed(f"Ray did not start: {error}; is this machine overloaded?") from error
        else:
            return


def offered_gpus() -> int:
    """Return the number of GPUs of the Ray that is running."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))


def stop_local_ray() -> None:
    """Shut down the Ray that `start_local_ray` started, if it is running."""
    import ray

    if ray.is_initialized():
        ray.shutdown()
