"""The engine's torch thread, the only one that uses the scheduler, runner and cache.

Invariants:
- Other threads act only through `submit`: their functions run in this thread, between two steps.
- Each generation's future is resolved exactly once. A failed forward pass fails the running generations only.
- The thread sleeps when nothing can run.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from headrace.policies.cpu_engine.grammars import GrammarState
from headrace.policies.cpu_engine.requests import Prompt
from headrace.policies.cpu_engine.scheduler import Generation, Scheduler
from headrace.policies.engine import PauseMode
from headrace.policies.errors import EngineUnavailable, RequestInvalid

if TYPE_CHECKING:
    from headrace.policies.cpu_engine.runner import Runner

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EngineThread:
    """Torch thread. Call `start` first and `stop` last; the other methods may be called from any thread."""

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
        """End the thread after the current step."""

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
            except BaseException as error:  # noqa: BLE001 - raised in the caller, who awaits the future
                future.set_exception(error)

        self._work.put(work)
        return future

    def generate(
        self, prompts: Sequence[Prompt], states: Sequence[GrammarState | None] | None = None
    ) -> tuple[list[Generation], list[Future[Generation]]]:
        """Queue prompts, with the states of their grammars if any has one. All are refused (RequestInvalid in each
        future) if any of the request ids is already in use."""
        generations = [
            Generation(prompt=prompt, arrived_s=time.monotonic(), grammar=state)
            for prompt, state in zip(prompts, states or [None] * len(prompts), strict=True)
        ]
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
        """Finish generations whose client has disconnected."""
        return self.submit(lambda: self._deliver(self.scheduler.drop(generations)))

    def abort(self, request_id: str | None) -> Future[None]:
        return self.submit(lambda: self._deliver(self.scheduler.abort(request_id)))

    def pause(self, mode: PauseMode) -> Future[None]:
        return self.submit(lambda: self._deliver(self.scheduler.pause(mode)))

    def resume(self) -> Future[None]:
        return self.submit(lambda: self._deliver(self.scheduler.resume()))

    def hold(self) -> Future[None]:
        """Admit no requests until `release`. The future is done once nothing is being sampled any more."""
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
            if not self.scheduler.runnable:
                self._work.get()()
            while not self._work.empty():
                self._work.get_nowait()()
            if self.scheduler.runnable:
                try:
                    self._deliver(self.runner.step(self.scheduler))
                    self.steps += 1
                except Exception:
                    # An error of a forward pass must not end the thread: it serves other requests.
                    logger.exception("forward pass failed")
                    failed = list(self.scheduler.running)
                    self.scheduler.drop(failed)
                    self.runner.forget(failed)
                    for generation in failed:
                        self._results.pop(id(generation)).set_exception(
                            EngineUnavailable("the forward pass failed; see the log")
                        )
            if self.scheduler.drained:
                while self._drained:
                    self._drained.pop().set_result(None)
        for future in self._results.values():
            future.set_exception(EngineUnavailable("the engine stopped"))
        self._results.clear()

    def _deliver(self, finished: Sequence[Generation]) -> None:
        self.runner.forget(finished)
        for generation in finished:
            self._results.pop(id(generation)).set_result(generation)
