"""The torch thread of the engine: the only place that touches scheduler, runner and cache.

Invariants:
- Others act only by `submit`: their functions run here, between two steps, never during one.
- Each generation's future is resolved exactly once; a failed forward pass fails the generations that ran and nothing
  else.
- The thread sleeps when nothing can run.
"""

from __future__ import annotations

import logging
import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from headrace.policies.cpu_engine.scheduler import Generation
from headrace.policies.errors import EngineUnavailable, RequestInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.policies.cpu_engine.requests import Prompt
    from headrace.policies.cpu_engine.runner import Runner
    from headrace.policies.cpu_engine.scheduler import Scheduler
    from headrace.policies.engine import PauseMode

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EngineThread:
    """`start`, then `submit` and the calls below from any thread, then `stop`."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.steps = 0
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._results: dict[int, Future[Generation]] = {}
        self._drained: list[Future[None]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="torch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends after the step under way."""

        def stop() -> None:
            self._stopping = True

        self._work.put(stop)
        self._thread.join()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` between two steps."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def work() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - handed to the caller, who awaits the future
                future.set_exception(error)

        self._work.put(work)
        return future

    def generate(self, prompts: Sequence[Prompt]) -> tuple[list[Generation], list[Future[Generation]]]:
        """Queue prompts; all of them are refused (RequestInvalid in each future) when one id is in flight already."""
        generations = [Generation(prompt=prompt) for prompt in prompts]
        futures: list[Future[Generation]] = [Future() for _ in prompts]
        for future in futures:
            future.set_running_or_notify_cancel()

        def work() -> None:
            known = next((item for item in generations if self.scheduler.knows(item.prompt.request_id)), None)
            if known is not None:
                for future in futures:
                    future.set_exception(RequestInvalid(f"Duplicate request ID detected: {known.prompt.request_id}"))
                return
            for generation, future in zip(generations, futures, strict=True):
                self._results[id(generation)] = future
                self._deliver(self.scheduler.add(generation))

        self._work.put(work)
        return generations, futures

    def drop(self, generations: Sequence[Generation]) -> Future[None]:
        """The client of these generations is gone."""
        return self.submit(lambda: self._deliver(self.scheduler.drop(generations)))

    def abort(self, request_id: str | None) -> Future[None]:
        return self.submit(lambda: self._deliver(self.scheduler.abort(request_id)))

    def pause(self, mode: PauseMode) -> Future[None]:
        return self.submit(lambda: self._deliver(self.scheduler.pause(mode)))

    def resume(self) -> Future[None]:
        return self.submit(lambda: self._deliver(self.scheduler.resume()))

    def hold(self) -> Future[None]:
        """Let nothing enter; done when nothing is sampled any more. `release` undoes it."""
        drained: Future[None] = Future()
        drained.set_running_or_notify_cancel()

        def work() -> None:
            self.scheduler.holding = True
            self._drained.append(drained)

        self._work.put(work)
        return drained

    def release(self) -> Future[None]:
        def work() -> None:
            self.scheduler.holding = False

        return self.submit(work)

    def _run(self) -> None:
        import torch

        torch.set_num_threads(1)
        while not self._stopping:
            self._take_work()
            if self.scheduler.runnable:
                self._step()
            if self.scheduler.drained:
                while self._drained:
                    self._drained.pop().set_result(None)
        self._fail_all(EngineUnavailable("the engine stopped"))

    def _take_work(self) -> None:
        if not self.scheduler.runnable:
            self._work.get()()
        while not self._work.empty():
            self._work.get_nowait()()

    def _step(self) -> None:
        try:
            self._deliver(self.runner.step(self.scheduler))
            self.steps += 1
        except Exception:
            # The boundary: whatever a forward pass raises must not end the thread that serves everybody else.
            logger.exception("forward pass failed")
            failed = list(self.scheduler.running)
            self.scheduler.drop(failed)
            self.runner.forget(failed)
            for generation in failed:
                self._results.pop(id(generation)).set_exception(
                    EngineUnavailable("the forward pass failed; see the log")
                )

    def _deliver(self, finished: Sequence[Generation]) -> None:
        self.runner.forget(finished)
        for generation in finished:
            self._results.pop(id(generation)).set_result(generation)

    def _fail_all(self, error: EngineUnavailable) -> None:
        for future in self._results.values():
            future.set_exception(error)
        self._results.clear()
