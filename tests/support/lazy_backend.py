"""Backend `lazy` of torch.distributed: gloo with the habits of NCCL, for tests of pushes on a CPU.

- A group exists at once. Its members meet at their first collective.
- A collective never times out. After the loss of a member it does not end, not even with an error.
- Destroying a group waits for pending collectives.
- A trainer and the schedulers of SGLang queue what they do on a stream: an update is answered before its bytes have
  arrived, and everything that reads the weights waits for them.

While the file that HOLD names exists, no collective begins.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HOLD = "HEADRACE_TEST_HOLD"
"""Environment variable with the path of a file."""
_FOREVER = timedelta(days=1)
_WORK: Any = vars(dist)["_Work"]


def register(*, queued: bool = False) -> None:
    """Make the backend known to this process. With `queued` it does not wait for its own collectives, like a process
    that only queues them on a stream; it must not change what it sends."""
    LazyWork.queued = queued
    if "lazy" not in dist.Backend.backend_list:
        dist.Backend.register_backend("lazy", LazyGroup, devices=["cpu"])
        destroy = dist.destroy_process_group

        def destroy_when_idle(group: Any = None) -> None:
            if not isinstance(group, LazyGroup):
                destroy(group)
                return
            group.settle()
            # torch keeps the names of its own kinds of groups only.
            world = dist.distributed_c10d._world
            torch._C._distributed_c10d._unregister_process_group(world.pg_names[group])
            for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
                table.pop(group, None)

        dist.destroy_process_group = destroy_when_idle


class LazyWork(_WORK):  # type: ignore[misc]
    """Collective that runs in a thread of its own."""

    queued = False

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.queued:
            self._thread.join()
        return True

    def settle(self) -> None:
        """Wait for the end, also in a process that queues."""
        self._thread.join()

    def is_completed(self) -> bool:
        return not self._thread.is_alive()


class LazyGroup(dist.ProcessGroup):
    """Process group whose members meet at their first collective."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store = store
        self._inner: Any = None
        self._works: list[LazyWork] = []
        self._turn = threading.Lock()

    def getBackendName(self) -> str:
        return "lazy"

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> LazyWork:  # type: ignore[override]
        before = self._works[-1] if self._works else None

        def work() -> None:
            # In the order of the calls, as on a stream.
            if before is not None:
                before.settle()
            while (held := os.environ.get(HOLD)) and Path(held).exists():
                time.sleep(0.02)
            try:
                if self._inner is None:
                    self._inner = dist.ProcessGroupGloo(self._store, self.rank(), self.size(), _FOREVER)
                self._inner.broadcast(tensors, options).wait()
            except RuntimeError:
                # NCCL does not notice that a member is gone.
                threading.Event().wait()

        self._works.append(LazyWork(work))
        return self._works[-1]

    def settle(self) -> None:
        """Wait for all collectives."""
        for work in self._works:
            work.settle()


class Stream:
    """Queue of work that one thread does, like a GPU's."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._last: Future[Any] | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._last = future
        self._queue.put((future, work))
        return future

    def synchronize(self) -> None:
        if self._last is not None:
            self._last.result()

    def _run(self) -> None:
        while True:
            future, work = self._queue.get()
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - raised where the result is read
                future.set_exception(error)


def queue_updates(updater: Any) -> None:
    """Have the schedulers of SGLang (the module of its model runner's `WeightUpdater`) answer before the bytes."""
    stream = Stream()
    kind = updater.WeightUpdater
    receive, load = kind.receive_weights_from_distributed, kind.load_weights_from_distributed

    def receive_later(self: Any, **asked: Any) -> Any:
        if not isinstance(self._model_update_group[asked["group_name"]], LazyGroup):
            return receive(self, **asked)
        return stream.submit(lambda: receive(self, **asked))

    def load_later(self: Any, weights: Any) -> Any:
        if not isinstance(weights, Future):
            return load(self, weights)
        stream.submit(lambda: load(self, weights.result()))
        return True, "queued"

    kind.receive_weights_from_distributed, kind.load_weights_from_distributed = receive_later, load_later
    updater.STREAM = stream


def wait_in_checks(checker: Any) -> None:
    """Have the checksums of SGLang (the module of its `WeightChecker`) wait for the updates."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    handle = checker.WeightChecker.handle

    def handle_when_idle(self: Any, *args: Any, **asked: Any) -> Any:
        weight_updater.STREAM.synchronize()
        return handle(self, *args, **asked)

    checker.WeightChecker.handle = handle_when_idle
