"""Commands of one sandbox that were given an id by their caller: each runs once, and its result can be asked for again.

Invariants:
- An id that was seen is never forgotten while its sandbox lives, so that nothing runs twice; its result may be.
- Results are held as files of memory that the first caller filled: the launcher copies none of their bytes.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from headrace.sandboxes.launcher.connections import Waiter
    from headrace.sandboxes.launcher.wire import Channel, Message

_MAX_KEPT: Final = 32
"""Results of one sandbox; above it the oldest is lost."""


class Execution:
    """`answer` is None while it runs; `output` is a descriptor, or -1; who knows `run` is its first caller."""

    __slots__ = ("answer", "exec_id", "output", "run", "runner", "waiters")

    def __init__(self, exec_id: str, run: str, runner: Waiter) -> None:
        self.exec_id = exec_id
        self.run = run
        self.runner = runner
        self.answer: Message | None = None
        self.output = -1
        self.waiters: list[Waiter] = []

    def keep(self, answer: Message, output: int) -> list[Waiter]:
        """Settle it; returns who waited."""
        self.answer, self.output = answer, output
        waiters, self.waiters = self.waiters, []
        return waiters

    def forget(self) -> None:
        """Let go of the output; the id stays used."""
        self.answer = self.lost()
        if self.output >= 0:
            os.close(self.output)
            self.output = -1

    def lost(self) -> Message:
        text = f"exec_id {self.exec_id!r} has run, and its result is lost: look at what it did, or use a new id"
        return {"error": "ExecResultLost", "message": text}


class Executions:
    """By id, in the order in which they began."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Execution] = OrderedDict()
        self._kept: list[Execution] = []

    def find(self, exec_id: str) -> Execution | None:
        return self._by_id.get(exec_id)

    def begin(self, exec_id: str, run: str, runner: Waiter) -> None:
        execution = self._by_id[exec_id] = Execution(exec_id, run, runner)
        self._kept.append(execution)
        settled = [kept for kept in self._kept if kept.answer is not None]
        for old in settled[: max(0, len(self._kept) - _MAX_KEPT)]:
            old.forget()
            self._kept.remove(old)

    def of(self, client: Channel) -> list[Execution]:
        """Those that this client was running."""
        return [execution for execution in self._kept if execution.answer is None and execution.runner.client is client]

    def end(self) -> list[Waiter]:
        """The sandbox is dead: let go of everything; returns who waited."""
        waiters = [waiter for execution in self._kept for waiter in execution.keep(execution.lost(), execution.output)]
        for execution in self._kept:
            execution.forget()
        self._kept.clear()
        return waiters
