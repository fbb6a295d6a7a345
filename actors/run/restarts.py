"""Restart loop of `--restarts N`, which runs `headrace resume` after transient failures.

Invariants:
- Each attempt is a separate process (of the same process group), so that one that is killed or runs out of memory is
  retried like any other.
- An attempt is followed by another only after a transient exit code or a signal that this loop did not forward; not
  after success, a drain, a bad configuration or a failure that would recur.
- An interrupt ends the loop: the current attempt receives it once and drains, and the loop returns its exit code.
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
"""An attempt that lasted at least this long, in seconds, did not fail at startup, so the wait before the next attempt
is reset to its initial value."""
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class RestartPolicy:
    """Restart policy: the number of restarts left, and the exponential wait before each. It performs no I/O."""

    restarts: int
    """Number of restarts left."""
    first_wait_s: float = FIRST_WAIT_S
    _in_a_row: int = 0

    def wait_after(self, code: int, lasted_s: float) -> float | None:
        """Return the number of seconds to wait before the next attempt, or None if there is to be none. A negative code
        is a negated signal number."""
        if not (code == EXIT_TRANSIENT or code < 0) or self.restarts == 0:
            return None
        self.restarts -= 1
        self._in_a_row = 1 if lasted_s >= LASTED_S else self._in_a_row + 1
        return float(min(LONGEST_WAIT_S, self.first_wait_s * 2 ** (self._in_a_row - 1)))


class RestartLoop:
    """Restart loop for the main thread, which runs commands until the policy allows no more attempts. It can be used
    only once."""

    def __init__(self, policy: RestartPolicy, say: Callable[[str], object]) -> None:
        self._policy, self._say = policy, say
        self._interrupted = 0
        """Number of the signal that interrupted the loop; 0 if there was none."""
        # A pipe, because the code that the signal interrupted may hold the lock of a threading.Event.
        self._wakes, self._wake = -1, -1
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, first: Sequence[str], again: Sequence[str]) -> int:
        """Run `first` once and then `again`; return the exit code of the last attempt, or of a drain if an interrupt
        arrived between two attempts."""
        command = first
        with self._forwarding():
            while True:
                began_s = time.monotonic()
                with subprocess.Popen(command) as self._child:
                    if self._interrupted:
                        # The signal came before there was a child to forward it to.
                        self._child.send_signal(self._interrupted)
                    code = self._child.wait()
                wait_s = None if self._interrupted else self._policy.wait_after(code, time.monotonic() - began_s)
                if wait_s is None:
                    return code if code >= 0 else 128 - code
                how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
                self._say(f"ended with {how}: resuming in {wait_s:g} s ({self._policy.restarts} restarts left)")
                select.select([self._wakes], [], [], wait_s)
                if self._interrupted:
                    return EXIT_DRAINED
                command = again

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        """Forward signals to the child. A terminal or a scheduler also sends them to the whole process group; the child
        counts signals in quick succession as one."""

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
