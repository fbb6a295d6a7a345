"""Commands of one sandbox that have an `exec_id`: each runs once, and its result can be requested again.

Invariants:
- An id is never forgotten while its sandbox is alive, so that nothing runs twice; its result may be.
- Results are stored in memory files that the first caller filled: the launcher copies no output.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from headrace.sandboxes.launcher.connections import Waiter
    from headrace.sandboxes.launcher.wire import Channel, Message

_MAX_RESULTS: Final = 32
"""Stored results of one sandbox; above it the oldest is dropped."""


class Execution:
    """Command with an `exec_id`. `answer` is None while it runs; `output` is a descriptor, or -1; `run` authenticates
    the first caller."""

    __slots__ = ("answer", "exec_id", "output", "run", "runner", "waiters")

    def __init__(self, exec_id: str, run: str, runner: Waiter) -> None:
        self.exec_id = exec_id
        self.run = run
        self.runner = runner
        self.answer: Message | None = None
        self.output = -1
        self.waiters: list[Waiter] = []

    def settle(self, answer: Message, output: int) -> list[Waiter]:
        """Store the result and return those who waited for it."""
        self.answer, self.output = answer, output
        waiters, self.waiters = self.waiters, []
        return waiters

    def forget(self) -> None:
        """Close the output; the id stays used."""
        self.answer = self.lost()
        if self.output >= 0:
            os.close(self.output)
            self.output = -1

    def lost(self) -> Message:
        """Return the answer for a request whose result is lost."""
        text = f"exec_id {self.exec_id!r} has run, but its result is lost: check its effects, or use a new id"
        return {"error": "ExecResultLost", "message": text}


class Executions:
    """Executions of one sandbox, in the order in which they began."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Execution] = OrderedDict()
        self._retained: list[Execution] = []

    def find(self, exec_id: str) -> Execution | None:
        return self._by_id.get(exec_id)

    def begin(self, exec_id: str, run: str, runner: Waiter) -> None:
        execution = self._by_id[exec_id] = Execution(exec_id, run, runner)
        self._retained.append(execution)
        settled = [execution for execution in self._retained if execution.answer is not None]
        for oldest in settled[: max(0, len(self._retained) - _MAX_RESULTS)]:
            oldest.forget()
            self._retained.remove(oldest)

    def of(self, client: Channel) -> list[Execution]:
        """Return the unfinished executions that this client began."""
        unfinished = (execution for execution in self._retained if execution.answer is None)
        return [execution for execution in unfinished if execution.runner.client is client]

    def end(self) -> list[Waiter]:
        """Drop all results of a dead sandbox and return those who waited for one."""
        waiters = [one for execution in self._retained for one in execution.settle(execution.lost(), execution.output)]
        for execution in self._retained:
            execution.forget()
        self._retained.clear()
        return waiters
