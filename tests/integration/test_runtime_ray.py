"""Actors over a real Ray: typed errors, cancellation, pickling, restarts."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import types
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

import pytest

from headrace.actors.errors import ActorLost, ConfigError, StartFailed
from headrace.actors.record.files.logs import LogTerms
from headrace.actors.runtime.actors.call_guard import guard
from headrace.actors.runtime.actors.operations import until_back
from headrace.actors.runtime.actors.runtime import BeginsUnasked, RayRuntime, Resources, _unless_forgotten
from headrace.serve.tracing.retention import RetentionConfig

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Counter:
    """Counts, fails, waits."""

    def __init__(self, start: int) -> None:
        self._value = start
        self._entered = False
        self._cancelled = asyncio.Event()
        self._waiting = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._entered = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._entered = False

    async def add(self, by: int) -> int:
        self._value += by
        return self._value

    async def entered(self) -> bool:
        return self._entered

    async def fail(self) -> None:
        raise ConfigError("buffer.max_staleness: too large")

    async def wait_for_ever(self) -> None:
        self._waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self._cancelled.set()
            raise

    async def is_waiting(self) -> None:
        await self._waiting.wait()

    async def was_cancelled(self) -> bool:
        async with asyncio.timeout(30):
            await self._cancelled.wait()
        return True

    async def pid(self) -> int:
        return os.getpid()


class Relay:
    """Holds a proxy of another actor."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter

    async def add(self, by: int) -> int:
        return await self._counter.add(by)


class Fragile:
    """Has a background task that fails when told."""

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        self._may_fail = asyncio.Event()
        self._tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._tasks.create_task(self._fail())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def pid(self) -> int:
        return os.getpid()

    async def break_in_the_background(self) -> None:
        self._may_fail.set()
        await asyncio.Event().wait()

    async def _fail(self) -> None:
        await self._may_fail.wait()
        raise ConfigError("the background task met this")


class SlowToExit(Fragile):
    """After the failure its exit waits until a call of `work` has been refused."""

    async def __aenter__(self) -> Self:
        self._refused = asyncio.Event()
        return await super().__aenter__()

    async def __aexit__(self, *_: object) -> None:
        try:
            await super().__aexit__()
        finally:
            if self._may_fail.is_set():
                await self._refused.wait()

    async def work(self) -> None:
        working = asyncio.sleep(0)
        try:
            await self._tasks.create_task(working)
        except RuntimeError:
            working.close()
            self._refused.set()
            raise


class Broken:
    async def __aenter__(self) -> Self:
        raise ConfigError("learner.model_dir: missing")

    async def __aexit__(self, *_: object) -> None: ...


class Dying:
    async def __aenter__(self) -> Self:
        os._exit(3)

    async def __aexit__(self, *_: object) -> None: ...


async def test_an_actor_whose_only_node_is_gone_is_a_lost_one() -> None:
    """Ray has an error of its own for it, which is not one of actors: it ended the actor that asked."""
    runtime = RayRuntime("unplaced-", roles={})
    with pytest.raises(StartFailed, match="died while starting"):
        await runtime.spawn(Counter, 0, name="counter", resources=Resources(node="0" * 56))


async def test_an_actor_can_be_entered_called_and_passed_to_another_actor() -> None:
    runtime = RayRuntime("passed-")
    counter = await runtime.spawn(Counter, 40, name="counter")
    relay = await runtime.spawn(Relay, counter, name="relay")
    assert await counter.entered()
    assert await relay.add(2) == 42
    assert await (await runtime.find(Counter, "counter")).add(0) == 42
    assert await counter.pid() != os.getpid()
    assert (await runtime.stats(counter))[1] == 4
    for actor in (relay, counter):
        await runtime.stop(actor)


async def test_actors_do_not_starve_behind_other_processes() -> None:
    """Left alone, Ray gives its workers only what everybody else leaves (nice 15)."""
    runtime = RayRuntime("nice-")
    counter = await runtime.spawn(Counter, 0, name="counter")
    assert os.getpriority(os.PRIO_PROCESS, await counter.pid()) == os.getpriority(os.PRIO_PROCESS, 0)
    await runtime.stop(counter)


async def test_errors_keep_their_type_across_processes() -> None:
    runtime = RayRuntime("errors-")
    counter = await runtime.spawn(Counter, 0, name="counter")
    with pytest.raises(ConfigError, match="too large"):
        await counter.fail()
    with pytest.raises(ConfigError, match="missing"):
        await runtime.spawn(Broken, name="broken")
    await runtime.stop(counter)


async def test_cancelling_the_await_cancels_the_coroutine_in_the_actor() -> None:
    runtime = RayRuntime("cancel-")
    counter = await runtime.spawn(Counter, 0, name="counter")
    call = asyncio.ensure_future(counter.wait_for_ever())
    await counter.is_waiting()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await counter.was_cancelled()
    await runtime.stop(counter)


async def test_a_killed_actor_is_restarted_and_entered_again() -> None:
    runtime = RayRuntime("killed-")
    counter = await runtime.spawn(Counter, 7, name="counter")
    waiting = asyncio.ensure_future(counter.wait_for_ever())
    await counter.is_waiting()
    os.kill(await counter.pid(), signal.SIGKILL)
    with pytest.raises(ActorLost):
        await waiting
    assert await until_back(lambda: counter.add(1)) == 8, "the constructor's arguments are those of before"
    assert await counter.entered()
    await runtime.stop(counter)


async def test_a_restarted_actor_continues_the_log_of_its_name(tmp_path: Path) -> None:
    import ray

    terms = LogTerms(run_id="a" * 32, folder=tmp_path / "logs", retention=RetentionConfig(), json_stderr=False)
    runtime = RayRuntime("logged-", logs=terms)
    counter = await runtime.spawn(Counter, 7, name="counter")
    before = await counter.pid()
    os.kill(before, signal.SIGKILL)
    after = await until_back(counter.pid)
    await runtime.stop(counter)
    events = [json.loads(line) for line in (terms.folder / "logged-counter.jsonl").read_bytes().splitlines()]
    assert [(event["pid"], event["message"]) for event in events] == [
        (before, "Counter starts"),
        (after, "Counter starts"),
        (after, "Counter is closed"),
    ]
    assert {event["node"] for event in events} == {ray.get_runtime_context().get_node_id()}
    assert {(event["run"], event["actor"]) for event in events} == {("a" * 32, "logged-counter")}


class Keeper(BeginsUnasked):
    """Notes each of its lives in a folder. It cannot be entered while `closed` exists there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def __aenter__(self) -> Self:
        if (self._folder / "closed").exists():
            (self._folder / "closed").unlink()
            raise ConfigError("closed")
        (self._folder / str(os.getpid())).touch()
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def pid(self) -> int:
        return os.getpid()


class LosesItsCall(Keeper):
    """In its second life Ray loses the call by which its process enters itself."""

    begins_within_s = 2.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        if (folder / "loses").exists():
            (folder / "loses").unlink()
            import ray

            nobody = types.SimpleNamespace(begin=types.SimpleNamespace(remote=lambda: None))
            ray.get_runtime_context = lambda: types.SimpleNamespace(current_actor=nobody)


async def test_an_actor_whose_own_call_is_lost_is_started_again(tmp_path: Path) -> None:
    runtime = RayRuntime("unasked-lost-")
    keeper = await runtime.spawn(LosesItsCall, tmp_path, name="keeper")
    (tmp_path / "loses").touch()
    os.kill(await keeper.pid(), signal.SIGKILL)
    async with asyncio.timeout(60):
        while len(await asyncio.to_thread(lambda: list(tmp_path.glob("[0-9]*")))) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert not (tmp_path / "loses").exists()
    await runtime.stop(keeper)


async def test_an_actor_that_begins_unasked_is_entered_again_without_a_call(tmp_path: Path) -> None:
    runtime = RayRuntime("unasked-")
    keeper = await runtime.spawn(Keeper, tmp_path, name="keeper")
    (tmp_path / "closed").touch()
    os.kill(await keeper.pid(), signal.SIGKILL)

    def lives() -> list[str]:
        return [path.name for path in tmp_path.iterdir() if path.name != "closed"]

    async with asyncio.timeout(60):
        while len(await asyncio.to_thread(lives)) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    await runtime.stop(keeper)


@pytest.mark.slow
async def test_an_actor_is_restarted_when_its_background_task_fails() -> None:
    runtime = RayRuntime("fragile-")
    fragile = await runtime.spawn(Fragile, name="fragile")
    before = await fragile.pid()
    with pytest.raises(ActorLost):
        await fragile.break_in_the_background()
    assert await until_back(fragile.pid) != before
    await runtime.stop(fragile)


class Asking(RayRuntime):
    """Tells when it has had an answer."""

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix)
        self.answered = asyncio.Event()

    async def stats(self, actor: object) -> tuple[int, int]:
        answer = await super().stats(actor)
        self.answered.set()
        return answer


async def test_a_call_to_an_actor_whose_background_task_failed_is_lost_and_not_an_error() -> None:
    runtime = RayRuntime("exiting-")
    fragile = await runtime.spawn(SlowToExit, name="fragile")
    breaking = asyncio.ensure_future(fragile.break_in_the_background())
    with pytest.raises(ActorLost):
        # Its task group refuses work from the failure on, and the process ends after the first refused call.
        while True:
            await fragile.work()
    with pytest.raises(ActorLost):
        await breaking
    await until_back(fragile.work)
    await runtime.stop(fragile)


async def test_a_guard_kills_a_hung_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.actors.runtime.actors.call_guard.GUARD_S", 0.1)
    runtime = Asking("guarded-")
    counter = await runtime.spawn(Counter, 7, name="counter")
    before = await counter.pid()
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(60):
        guarding = tasks.create_task(guard(runtime, "counter", counter, 5.0))
        await runtime.answered.wait()
        os.kill(before, signal.SIGSTOP)
        with pytest.raises(ActorLost):
            await counter.wait_for_ever()
        assert await until_back(counter.pid) != before
        guarding.cancel()
    await runtime.stop(counter)


async def test_a_call_that_its_actor_does_not_know_is_reported_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr("headrace.actors.runtime.actors.runtime.WATCH_S", 0.1)
    runtime = RayRuntime("forgotten-")
    counter, other = await runtime.spawn(Counter, 0, name="counter"), await runtime.spawn(Counter, 0, name="other")
    running = ray.get_actor("forgotten-counter").call.remote("the call", "wait_for_ever", (), {})
    await counter.is_waiting()
    with pytest.raises(ActorLost, match="does not know a call"):
        async with asyncio.timeout(60):
            await _unless_forgotten("other", running, lambda: ray.get_actor("forgotten-other").knows.remote("the call"))
    for actor in (counter, other):
        await runtime.stop(actor)


async def test_a_long_call_is_awaited_until_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr("headrace.actors.runtime.actors.runtime.WATCH_S", 0.1)
    runtime = RayRuntime("lasting-")
    counter = await runtime.spawn(Counter, 0, name="counter")
    handle, asked, asked_often = ray.get_actor("lasting-counter"), itertools.count(), asyncio.Event()

    def ask() -> object:
        if next(asked) > 3:
            asked_often.set()
        return handle.knows.remote("the call")

    lasting = handle.call.remote("the call", "is_waiting", (), {})
    watched = asyncio.ensure_future(_unless_forgotten("counter", lasting, ask))
    await asked_often.wait()
    waiting = asyncio.ensure_future(counter.wait_for_ever())
    assert await watched is None
    waiting.cancel()
    await runtime.stop(counter)


async def test_non_async_classes_and_unknown_names_are_refused() -> None:
    class Synchronous:
        def work(self) -> None: ...

    runtime = RayRuntime("refused-")
    with pytest.raises(TypeError):
        await runtime.spawn(Synchronous, name="sync")
    with pytest.raises(ActorLost):
        await runtime.find(Counter, "nobody")


async def test_an_actor_that_dies_during_startup_raises_a_typed_error() -> None:
    runtime = RayRuntime("dying-")
    with pytest.raises(StartFailed, match="dying"):
        await runtime.spawn(Dying, name="dying")


@pytest.mark.slow
def test_a_client_without_the_token_cannot_join() -> None:
    import ray

    code = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False)"
    address = ray.get_runtime_context().gcs_address
    environment = {"PATH": os.environ["PATH"], "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    stranger = subprocess.run(
        [sys.executable, "-c", code, address], env=environment, capture_output=True, text=True, timeout=110
    )
    assert stranger.returncode != 0
    assert "auth" in stranger.stderr.lower()


def test_an_already_imported_ray_is_refused(tmp_path: Path) -> None:
    code = (
        "import ray, sys; from headrace.actors.runtime.actors.runtime import start_local_ray; "
        "start_local_ray(sys.argv[1], object_store_bytes=128 << 20)"
    )
    embedding = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert embedding.returncode != 0
    assert "StartFailed: ray was imported before" in embedding.stderr.replace("headrace.actors.errors.", "")
