"""Actors as plain classes: `pool = await runtime.spawn(SandboxPool, config, name="pool")`.

Invariants:
- This is the only file that talks to `ray.remote`. Everywhere else an actor is an object with async methods.
- A class may be spawned only when all its public methods are async (else TypeError), so that no call can block an
  event loop.
- An actor that has `__aenter__` is entered once before its first call (after Ray restarted its process also when it is
  asked for its stats: somebody may wait for what it does and not call it), and exited by `stop`; both in one task of
  its own, so that a context that breaks (a background task failed) is noticed.
- An actor whose context breaks ends its process, and Ray starts another: no actor lives on with half of itself dead.
- Errors cross with their own type. A dead or restarting process is `ActorLost`, whatever Ray calls it.
- Cancelling the await of a call cancels the coroutine in the actor; a call cancelled over there is `ActorLost` here.
- A call that lasts is asked after: when its actor knows nothing of it, twice, it was lost on the way: `ActorLost`.
- Proxies are picklable and may be handed to other actors.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import pickle
import secrets
import signal
import sys
import uuid
from contextlib import AsyncExitStack, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn, Protocol, TypeVar, cast

from headrace.actors.errors import ActorGone, ActorLost, ConfigError, StartFailed
from headrace.actors.runtime.loop_lag import begin_ticking
from headrace.actors.runtime.retry import ABSENCE, until_back
from headrace.sandboxes.private_folders import temporary_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

T = TypeVar("T")

logger = logging.getLogger(__name__)

BROKEN_EXIT_CODE = 70
BREAKING_S = 10.0
"""How long a broken actor may take to close what it has open."""
STOP_TIMEOUT_S = 60.0
"""How long one actor may take to exit its context; then it is killed."""
START_TRIES = 2
"""Of a local Ray."""
PING_TIMEOUT_S = 5.0
"""An actor that is to be stopped and does not tell its process id within this time hangs: it is killed."""
WATCH_S = 15.0
"""How often a call that lasts is asked after."""
RAY_SOCKET: Final = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""The longest path that Ray makes below the folder for temporary files."""
_NO_RAY_METRICS: Final = {
    "RAY_enable_metrics_collection": "0",
    # A port that these exporters cannot open; they log that and go on.
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
}
"""Ray exports metrics on every interface and asks for no credential; ours are in metrics.jsonl and OpenTelemetry."""
_SOCKET_PATH_BYTES: Final = 107
"""unix(7)"""
ENDING: ContextVar[Callable[[], None] | None] = ContextVar("headrace.ending", default=None)
"""How the actor whose code runs ends itself, where it has no process of its own."""
DEFAULT_MAX_CONCURRENCY = 2048
"""Calls one actor may have in flight: dispatcher, workers and status calls together stay far below."""


def end_actor() -> NoReturn:
    """End the actor whose code runs, at once, so that another one starts from its disk."""
    end = ENDING.get()
    if end is None:
        os._exit(BROKEN_EXIT_CODE)
    end()
    raise asyncio.CancelledError


def require_async(cls: type[object]) -> None:
    """TypeError when `cls` has a public method or property that is not a coroutine function."""
    for name, member in inspect.getmembers_static(cls):
        if name.startswith("_"):
            continue
        if isinstance(member, property | staticmethod | classmethod):
            raise TypeError(f"{cls.__name__}.{name} must be an async method: only those can be called on an actor")
        if inspect.isfunction(member) and not inspect.iscoroutinefunction(member):
            raise TypeError(f"{cls.__name__}.{name} is not async: make it `async def` or private")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What an actor asks of its host. `spread` puts actors on different hosts as far as there are some; without
    `restarts` its death is its end."""

    cpus: float = 0.0
    gpus: float = 0.0
    spread: bool = False
    restarts: bool = True


PLAIN = Resources()
"""Of actors that wait for others most of their time."""


class Runtime(Protocol):
    """Where actors live."""

    isolates_actors: ClassVar[bool]
    """Whether an actor may hang or die alone, so that it needs a guard."""

    async def spawn(self, cls: type[T], *args: Any, name: str, **kwargs: Any) -> T:
        """A ready actor. TypeError for a class with synchronous public methods, StartFailed when it does not come
        up."""
        ...

    async def stop(self, actor: object) -> None:
        """Exit the actor's context and end it. Idempotent; a dead actor is no error."""
        ...

    def found(self, actor: object) -> bool:
        """Whether `spawn` found it alive, spawned by somebody else."""
        ...

    async def stats(self, actor: object) -> tuple[int, int]:
        """(process id, calls received so far) of an actor. ActorLost when its process is gone."""
        ...

    async def restart(self, actor: object, process_id: int) -> None:
        """Kill the process of an actor that answers nothing any more; another is started. Idempotent."""
        ...


class InlineRuntime:
    """The instance itself, in this process: for unit tests, virtual time and as the baseline of the orchestration
    bench."""

    isolates_actors: ClassVar[bool] = False

    def __init__(self) -> None:
        self._stacks: dict[int, AsyncExitStack] = {}

    async def spawn(self, cls: type[T], *args: Any, name: str, **kwargs: Any) -> T:
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
        """Never: an instance belongs to whoever spawned it."""
        return False

    async def stats(self, actor: object) -> tuple[int, int]:
        """This process; inline calls are not counted."""
        return os.getpid(), 0

    async def restart(self, actor: object, process_id: int) -> None:
        """Nothing: an instance in this process cannot hang without it."""


@dataclass(frozen=True, slots=True)
class _Raised:
    """An error of the actor's method, carried as a value so that it keeps its type."""

    error: BaseException


class _Life:
    """Enters an instance's context, keeps it open, and exits it, all in one task; the process ends when it breaks."""

    def __init__(self, instance: object) -> None:
        self._instance: Any = instance
        self._closing = asyncio.Event()
        self._entered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # It outlives the call that started it, and is awaited by `close`: the actor's own root task.
        self._task = asyncio.get_running_loop().create_task(self._live())

    @property
    def failed(self) -> bool:
        """Entering was tried and went wrong."""
        return self._entered.done() and self._entered.exception() is not None

    async def entered(self) -> None:
        """Return once the context is open. Raises the error of entering."""
        await asyncio.shield(self._entered)

    async def close(self) -> None:
        """Exit the context, or break off its entering. Raises the error of exiting."""
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
            except Exception as error:  # noqa: BLE001 - carried to whoever waits for the opening
                self._entered.set_exception(error)
                # Seen, also when nobody waits: whoever comes next enters again and meets it.
                self._entered.exception()
                return
            except asyncio.CancelledError:
                self._entered.set_exception(ActorGone(f"{type(self._instance).__name__} was closed while it opened"))
                self._entered.exception()
                raise
            self._entered.set_result(None)
            try:
                await self._closing.wait()
            except asyncio.CancelledError:
                asyncio.get_running_loop().call_later(BREAKING_S, os._exit, BROKEN_EXIT_CODE)
                self._task.add_done_callback(_end_process)
                raise


def _end_process(life: asyncio.Task[None]) -> None:
    error = None if life.cancelled() else life.exception()
    logger.critical("the actor broke; its process ends and starts again", exc_info=error)
    os._exit(BROKEN_EXIT_CODE)


class Host:
    """What Ray really runs: owns one instance, opens it once, and turns errors into values."""

    def __init__(self, made_of: bytes) -> None:
        # As bytes, since Ray could not restart an actor whose arguments hold references of its own kind.
        ABSENCE.seconds, cls, args, kwargs = pickle.loads(made_of)
        self._instance: Any = cls(*args, **kwargs)
        self._life: _Life | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._closed = False
        self._calls = 0
        self._running: set[str] = set()

    async def open(self) -> object:
        """Enter the instance's context if that was not done; None, or the error of entering."""
        try:
            await self._opened()
        except Exception as error:  # noqa: BLE001 - carried to the caller with its type
            return _Raised(error)
        return None

    async def call(self, call_id: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        self._calls += 1
        self._running.add(call_id)
        try:
            await self._opened()
            return await getattr(self._instance, method)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the one boundary: the caller gets it with its type
            return _Raised(error)
        finally:
            self._running.discard(call_id)

    async def knows(self, call_id: str) -> bool:
        """Whether this call is running here."""
        return call_id in self._running

    async def stats(self, *, begin: bool) -> tuple[int, int]:
        """(process id, calls received). With `begin` an actor that is not entered begins to be, without being waited
        for; one whose entering failed tries again."""
        if begin and not self._closed:
            self._begun()
        return os.getpid(), self._calls

    async def close(self) -> None:
        """Exit the instance's context."""
        self._closed = True
        life, self._life = self._life, None
        if life is not None:
            await life.close()

    async def _opened(self) -> None:
        if self._closed:
            raise ActorGone(f"{type(self._instance).__name__} is closed")
        await self._begun().entered()

    def _begun(self) -> _Life:
        """The instance's life; a new one where there is none or its entering failed."""
        if self._life is None or self._life.failed:
            self._life = _Life(self._instance)
            self._ticking = self._ticking or begin_ticking(type(self._instance).__name__)
        return self._life


def _host_of(cls: type) -> type[Host]:
    """With the actor's own name, for `ps` and Ray's pages."""
    return type(cls.__name__, (Host,), {})


class ActorProxy:
    """Stands for a named actor in another process: attribute access gives an async callable. Pickled by name."""

    def __init__(self, name: str, handle: Any = None) -> None:
        self._name = name
        self._handle = handle

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            handle = await self._resolved()
            call_id = uuid.uuid4().hex
            reference = handle.call.remote(call_id, method, args, kwargs)
            return await _await_call(self._name, reference, lambda: handle.knows.remote(call_id))

        return call

    async def _resolved(self) -> Any:
        """The Ray handle; looked up by name once, in a thread since Ray's look-up blocks."""
        if self._handle is None:
            import ray

            try:
                self._handle = await asyncio.to_thread(ray.get_actor, self._name)
            except ValueError as error:
                raise ActorLost(f"there is no actor named {self._name}") from error
        return self._handle

    def __reduce__(self) -> tuple[type[ActorProxy], tuple[str]]:
        return ActorProxy, (self._name,)

    def __repr__(self) -> str:
        return f"ActorProxy({self._name})"


async def _await_call(name: str, reference: Any, ask: Callable[[], Any] | None = None) -> Any:
    """The value of a Ray call; raises the method's own error, ActorLost, or CancelledError (after cancelling the
    remote). `ask` asks the actor whether it runs the call."""
    import ray
    from ray.exceptions import ActorDiedError, ActorUnavailableError, TaskCancelledError

    try:
        value = await (reference if ask is None else _unless_forgotten(name, reference, ask))
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise
    except TaskCancelledError as error:
        # Not cancelled here, so over there: the actor is closing or breaking.
        raise ActorLost(f"actor {name} broke off a call") from error
    except (ActorDiedError, ActorUnavailableError) as error:
        raise ActorLost(f"actor {name} is gone or restarting") from error
    if isinstance(value, _Raised):
        raise value.error
    return value


async def _unless_forgotten(name: str, reference: Any, ask: Callable[[], Any]) -> Any:
    """The value of a call. ActorLost when its actor says twice in a row that it runs no such call: the answer may
    have been on its way the first time, not the second."""
    answer, denials = asyncio.wrap_future(reference.future()), 0
    try:
        while not (await asyncio.wait([answer], timeout=WATCH_S))[0]:
            # An actor that says nothing restarts or hangs; what that means for the call is found out by others.
            with suppress(ActorLost, TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    denials = 0 if await _await_call(name, ask()) else denials + 1
            if denials > 1 and not answer.done():
                raise ActorLost(f"actor {name} knows nothing of a call")
        return answer.result()
    finally:
        answer.cancel()


class RayRuntime:
    """Actors as named, detached Ray actors (with a local Ray they still die with the driver): restarted for ever unless
    their `Resources` say otherwise, never retried by Ray (retries are ours, by idempotency key)."""

    isolates_actors: ClassVar[bool] = True

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._process_ids: dict[str, int] = {}
        self._found: set[str] = set()

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
        exists = await asyncio.to_thread(_exists, name)
        handle = (
            ray.remote(_host_of(cls))
            .options(
                name=name,
                num_cpus=resources.cpus,
                num_gpus=resources.gpus,
                scheduling_strategy="SPREAD" if resources.spread else "DEFAULT",
                max_restarts=-1 if resources.restarts else 0,
                max_task_retries=0,
                max_concurrency=max_concurrency,
                lifetime="detached",
                get_if_exists=True,
            )
            .remote(cloudpickle.dumps((ABSENCE.seconds, cls, args, kwargs)))
        )
        try:
            # One that somebody else spawned may be restarting just now; a new one that dies is not worth another try.
            async with asyncio.timeout(ABSENCE.seconds):
                await until_back(lambda: _await_call(name, handle.open.remote()), deadline_s=None if exists else 0.0)
        except (ActorGone, TimeoutError) as error:
            ray.kill(handle, no_restart=True)
            raise StartFailed(f"actor {name} died while starting; see the Ray logs of this run") from error
        except asyncio.CancelledError:
            if not exists:
                # Nobody has a proxy of it, and it may hold a device, and actors of its own.
                try:
                    await self.stop(ActorProxy(name, handle))
                finally:
                    ray.kill(handle, no_restart=True)
            raise
        if exists:
            self._found.add(name)
        return cast("T", ActorProxy(name, handle))

    def found(self, actor: object) -> bool:
        """Whether `spawn` found it alive, spawned by somebody else."""
        return cast("ActorProxy", actor)._name in self._found  # noqa: SLF001 - the proxy is ours

    async def find(self, cls: type[T], name: str) -> T:
        """The named actor, spawned by somebody else. ActorLost when there is none."""
        require_async(cls)
        proxy = ActorProxy(self._prefix + name)
        await proxy._resolved()  # noqa: SLF001 - the proxy is ours
        return cast("T", proxy)

    async def kill(self, actor: object) -> None:
        """End the actor at once, wherever it is, and do not start it again. Idempotent."""
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
            # A stopped process does not hear Ray either.
            if process_id := self._process_ids.get(repr(proxy)):
                await self.restart(actor, process_id)
        except (ActorLost, RayError):
            pass
        ray.kill(handle, no_restart=True)

    async def stats(self, actor: object) -> tuple[int, int]:
        """(process id, calls received so far) of an actor. ActorLost when its process is gone."""
        return await self._ask_stats(cast("ActorProxy", actor), begin=True)

    async def _ask_stats(self, proxy: ActorProxy, *, begin: bool) -> tuple[int, int]:
        handle = await proxy._resolved()  # noqa: SLF001 - the proxy is ours
        answer = cast("tuple[int, int]", await _await_call(repr(proxy), handle.stats.remote(begin=begin)))
        self._process_ids[repr(proxy)] = answer[0]
        return answer

    async def restart(self, actor: object, process_id: int) -> None:
        """Kill the process of an actor that answers nothing any more; Ray starts another. Idempotent.

        By signal, since a stopped process does not hear Ray either: the actor must be on this host.
        """
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)


def node_address() -> str:
    """The address by which other hosts reach this one."""
    import ray.util

    address: str = ray.util.get_node_ip_address()
    return address


def _exists(name: str) -> bool:
    import ray

    try:
        ray.get_actor(name)
    except ValueError:
        return False
    return True


def check_ray_folder() -> Path:
    """Return the folder for temporary files, where Ray makes its sockets. Raises FolderRefused, ConfigError."""
    folder = temporary_folder()
    longest = _SOCKET_PATH_BYTES - len(RAY_SOCKET)
    if len(os.fsencode(folder)) > longest:
        raise ConfigError(
            f"TMPDIR {folder} is too long for Ray's unix sockets: set TMPDIR to a path of at most {longest} bytes"
        )
    return folder


def start_local_ray(run: Path, *, object_store_bytes: int, logs: bool = False) -> None:
    """Start a Ray of our own on this machine; it dies with this process.

    Ray listens on every interface, also when it is local, and whoever reaches it runs code: so it always wants a token,
    one of our own that only this process and its children know. Left alone, Ray would write one into the user's home.

    Raises StartFailed when Ray does not come up, and when it was imported before: it has read by then that it wants no
    token. Raises FolderRefused and ConfigError when TMPDIR is of no use to it.
    """
    check_ray_folder()
    if "ray" in sys.modules and os.environ.get("RAY_AUTH_MODE") != "token":
        raise StartFailed("ray was imported before headrace started it: set RAY_AUTH_MODE=token before that import")
    os.environ["RAY_AUTH_MODE"] = "token"
    # Ray reads the token once per process, so a second start keeps it.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # Left alone, Ray's workers only get what everything else on the machine leaves (nice 15): gateway, learner and
    # engines are the work here, and their deadlines pass while they starve.
    os.environ.setdefault("RAY_worker_niceness", "0")
    for name, value in _NO_RAY_METRICS.items():
        os.environ.setdefault(name, value)
    for tries_left in reversed(range(START_TRIES)):
        try:
            _init_ray(run, object_store_bytes=object_store_bytes, logs=logs)
        except Exception as error:  # Ray raises bare ones; a node that is slow to start gets 30 s of it, no more.
            stop_local_ray()
            if not tries_left:
                raise StartFailed(f"Ray did not start: {error}; is this machine overloaded?") from error
        else:
            return


def _init_ray(run: Path, *, object_store_bytes: int, logs: bool) -> None:
    import ray

    ray.init(
        address="local",
        namespace=f"headrace-{run.name}",
        object_store_memory=object_store_bytes,
        include_dashboard=False,
        log_to_driver=logs,
        configure_logging=False,
    )


def stop_local_ray() -> None:
    """Shut down the Ray that `start_local_ray` started; nothing to do when it is not running."""
    import ray

    if ray.is_initialized():
        ray.shutdown()


__all__ = [
    "ActorProxy",
    "InlineRuntime",
    "RayRuntime",
    "Resources",
    "Runtime",
    "check_ray_folder",
    "node_address",
    "start_local_ray",
    "stop_local_ray",
]
