"""`--restarts N`: a loop around `headrace resume`, in the same process group.

Invariants:
- Each try is a process of its own, so that one that is killed, or runs out of memory, is tried again like any other.
- A try is followed by another only when its exit code says that its failure may pass, or when a signal that nobody sent
  through this loop ended it; not after success, a drain, a bad configuration or a failure that would come again.
- An interrupt ends the loop: the try under way is told once, drains, and its exit code is that of the loop.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headrace.actors.run.exit_codes import EXIT_DRAINED, EXIT_TRANSIENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

FIRST_WAIT_S: Final = 5.0
LONGEST_WAIT_S: Final = 300.0
LASTED_S: Final = 600.0
"""A try that lasted this long was no failure at start: the waits begin anew."""
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class RestartPolicy:
    """How often, and after which wait, another try is made. Pure."""

    restarts: int
    """That are left."""
    first_wait_s: float = FIRST_WAIT_S
    _in_a_row: int = 0

    def wait_after(self, code: int, lasted_s: float) -> float | None:
        """Seconds until the next try, None when there is none. A negative code is that of a signal."""
        if not (code == EXIT_TRANSIENT or code < 0) or self.restarts == 0:
            return None
        self.restarts -= 1
        self._in_a_row = 1 if lasted_s >= LASTED_S else self._in_a_row + 1
        return float(min(LONGEST_WAIT_S, self.first_wait_s * 2 ** (self._in_a_row - 1)))


class Restarting:
    """Runs one command after the other until the policy says that it is enough. In the main thread, once."""

    def __init__(self, policy: RestartPolicy, say: Callable[[str], object]) -> None:
        self._policy, self._say = policy, say
        self._interrupted = 0
        """By this signal."""
        # No threading.Event: its lock may be held by the very code that the signal broke into.
        self._wakes, self._wake = -1, -1
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, first: Sequence[str], again: Sequence[str]) -> int:
        """The exit code of the last try, `first` once and then `again`; that of a drain when it was interrupted
        between two tries."""
        command = first
        with self._forwarding():
            while True:
                began_s = time.monotonic()
                code = self._try(command)
                wait_s = None if self._interrupted else self._policy.wait_after(code, time.monotonic() - began_s)
                if wait_s is None:
                    return code if code >= 0 else 128 - code
                how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
                self._say(f"ended with {how}: resumed in {wait_s:g} s ({self._policy.restarts} restarts are left then)")
                select.select([self._wakes], [], [], wait_s)
                if self._interrupted:
                    return EXIT_DRAINED
                command = again

    def _try(self, command: Sequence[str]) -> int:
        with subprocess.Popen(command) as self._child:
            if self._interrupted:
                # The signal came before there was anybody to pass it on to.
                self._child.send_signal(self._interrupted)
            return self._child.wait()

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        """Pass signals on. A terminal, or a scheduler, sends them to the whole group: who drains takes signals that
        come together as one."""

        def interrupted(number: int, _: FrameType | None) -> None:
            self._interrupted = number
            with suppress(BlockingIOError):
                os.write(self._wake, b"!")
            if self._child is not None and self._child.poll() is None:
                self._child.send_signal(number)

        self._wakes, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        before = {number: signal.signal(number, interrupted) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._wakes)
            os.close(self._wake)
