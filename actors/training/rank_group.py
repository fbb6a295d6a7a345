"""Group of training processes (ranks) of one learner incarnation, each a Ray actor, and their common end.

Invariants:
- A call ends as soon as one rank has failed, not when the others' collective gives up. Then all ranks are killed: what
  is left of a group after a failure refuses everything. A rank that hangs in no collective is given up too, if the
  group has a limit.
- `close` returns when the ranks of this node have ended. One that does not react to Ray, for example because it is
  stopped, is killed by signal.
- If this process dies, Ray kills the ranks, which it owns.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import psutil

from headrace.policies.errors import RankFailed

logger = logging.getLogger(__name__)

CHECK_S: Final = 0.25
"""Interval at which a waiting call looks whether the group is being closed."""
KILL_S: Final = 1.0
"""Time after which ranks that Ray has killed are killed by signal."""
END_S: Final = 30.0
"""Time limit for killed ranks of this node to end."""


class RankGroup:
    """Ranks of one learner incarnation. Its methods block, and are called from one thread; `interrupt` from any."""

    passed_on: tuple[type[Exception], ...] = ()
    """Errors of a rank that are raised as they are; any other becomes RankFailed. All of them end the group."""

    def __init__(self) -> None:
        self.lag_s: float | None = None
        """Time after which a rank counts as hung if another one has answered the same call; None: never."""
        self.lost_process = False
        """Whether the call that failed last failed because the process of a rank has ended."""
        self._interrupted = threading.Event()
        self._reason = ""
        self._ranks: list[Any] = []
        """Handles of the Ray actors; empty once the group has ended."""
        self._processes: Mapping[int, psutil.Process] = {}
        """Processes on this node, by rank."""

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method on every rank, and return the results by rank. Raises RankFailed."""
        self._refuse_closed()
        return self._answers([getattr(rank, method).remote(*arguments) for rank in self._ranks])

    def call_first(self, method: str, *arguments: object) -> Any:
        """Call a method on rank 0 only, and return its result. Raises RankFailed."""
        self._refuse_closed()
        [answer] = self._answers([getattr(self._ranks[0], method).remote(*arguments)])
        return answer

    def call_within(self, limit_s: float, method: str, *arguments: object) -> list[Any]:
        """Do what `call` does, and end all ranks if one has not answered after `limit_s`."""
        self._refuse_closed()
        return self._answers([getattr(rank, method).remote(*arguments) for rank in self._ranks], limit_s)

    def interrupt(self, reason: str = "the learner was closed while its training processes worked") -> None:
        """Make a waiting call fail for this reason, so that the group can be closed."""
        self._reason = reason
        self._interrupted.set()

    def close(self) -> None:
        """Kill all ranks. Idempotent."""
        import ray

        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            ray.kill(rank, no_restart=True)
        _, alive = psutil.wait_procs(list(self._processes.values()), timeout=KILL_S)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _, alive = psutil.wait_procs(alive, timeout=END_S)
        if alive:
            logger.error("ranks are still alive after they were killed: %s", [process.pid for process in alive])

    def _find_processes(self) -> None:
        """Learn the processes of the ranks, which have a method `place`. Raises RankFailed."""
        import ray

        here = ray.get_runtime_context().get_node_id()
        self._processes = {
            rank: psutil.Process(process_id)
            for rank, (node, process_id) in enumerate(self.call("place"))
            if node == here and psutil.pid_exists(process_id)
        }

    def _refuse_closed(self) -> None:
        if not self._ranks:
            self.lost_process = True
            raise RankFailed("the training processes have ended: open a new learner")

    def _answers(self, references: Sequence[Any], limit_s: float = math.inf) -> list[Any]:
        """Return the answers by rank. Raises an error for the first failure, after killing all ranks."""
        import ray
        from ray.exceptions import RayError

        answers: list[Any] = [None] * len(references)
        waiting = {reference: rank for rank, reference in enumerate(references)}
        deadline_s, last_s = math.inf, time.monotonic() + limit_s
        self.lost_process = False
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=CHECK_S)
            if self._interrupted.is_set():
                raise RankFailed(self._reason)
            for reference in done:
                rank = waiting.pop(reference)
                try:
                    answers[rank] = ray.get(reference)
                except RayError as error:
                    failure = self._failure(rank, error, waiting.values())
                    self.close()
                    raise failure from error
                if self.lag_s is not None:
                    deadline_s = min(deadline_s, time.monotonic() + self.lag_s)
            if waiting and time.monotonic() > min(deadline_s, last_s):
                self.close()
                hung = ", ".join(map(str, waiting.values()))
                late = f"within {limit_s:g} s" if deadline_s > last_s else f"{self.lag_s:g} s after another"
                raise RankFailed(f"rank {hung} of {len(references)} has not answered {late}")
        return answers

    def _failure(self, rank: int, error: Exception, silent: Collection[int]) -> Exception:
        """Return the error to raise when a call failed on `rank` and is still unanswered on the ranks `silent`."""
        from ray.exceptions import RayActorError

        ended = [other for other in silent if (process := self._processes.get(other)) and not process.is_running()]
        cause = getattr(error, "cause", None)
        self.lost_process = bool(ended) or isinstance(error, RayActorError)
        if isinstance(cause, self.passed_on) and not ended:
            return cause
        # Ray's text has the rank's own traceback; what is raised is one line.
        logger.error("rank %d failed: %s", rank, error)
        parts = [f"rank {rank} of {len(self._ranks)} failed: {_reason(error)}"]
        # They may be the cause: a rank notices the death of another one sooner than Ray does.
        parts += [f"the process of rank {other} has ended" for other in ended]
        parts += [f"rank {other} has not answered" for other in silent if other not in ended]
        return RankFailed("; ".join(parts))


def end_after(process_id: int) -> None:
    """End this process when another one of the same node has ended. Blocks until then."""
    with suppress(psutil.NoSuchProcess):
        psutil.Process(process_id).wait()
    os._exit(0)


def _reason(error: Exception) -> str:
    """Return the rank's own error on one line, without Ray's traceback."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return f"{type(cause).__name__}: {' '.join(str(cause).split())[:500]}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
