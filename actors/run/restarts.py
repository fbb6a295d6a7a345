"""Restart loop of `--restarts N`, which runs `headrace resume` after transient failures.

Invariants:
- Each attempt is a separate process (of the same process group), so that one that is killed or runs out of memory is
  retried like any other.
- An attempt is followed by another only after a transient exit code or a signal that this loop did not forward; not
  after success, a drain, a bad configuration or a failure that would recur.
- The wait before a restart grows exponentially, up to a limit, while the attempts save no new checkpoint: such a run
  repeats the same steps. It is drawn at random, so that runs which one outage ended do not come back together.
- An interrupt ends the loop: the current attempt receives it once and drains, and the loop returns its exit code.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Final

from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.exit_codes import EXIT_DRAINED, EXIT_TRANSIENT
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.checkpoints import list_checkpoints

FIRST_WAIT_S: Final = 5.0
LONGEST_WAIT_S: Final = 300.0
"""Upper bound of every wait, in seconds."""
MOST_DOUBLINGS: Final = 32
"""Limit of the exponent, which keeps the bound finite."""
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class RestartPolicy:
    """Restart policy: the number of restarts left, and the exponential wait before each. It performs no I/O."""

    restarts: int
    """Number of restarts left."""
    first_wait_s: float = FIRST_WAIT_S
    chance: random.Random = field(default_factory=random.Random)
    """Source of the jitter."""
    _in_a_row: int = 0
    _saved_step: int = -1

    def wait_after(self, code: int, *, saved_step: int) -> float | None:
        """Return the number of seconds to wait before the next attempt, or None if there is to be none. A negative code
        is a negated signal number. `saved_step` is the step of the run's newest checkpoint: if the attempt that ended
        has saved one, the waits begin again with the first."""
        if not (code == EXIT_TRANSIENT or code < 0) or self.restarts == 0:
            return None
        self.restarts -= 1
        self._in_a_row = 1 if saved_step > self._saved_step else self._in_a_row + 1
        self._saved_step = max(saved_step, self._saved_step)
        bound_s = min(LONGEST_WAIT_S, self.first_wait_s * 2.0 ** min(self._in_a_row - 1, MOST_DOUBLINGS))
        # At least half of it, unlike full jitter: an attempt that comes at once costs a restart of a limited number.
        return self.chance.uniform(bound_s / 2, bound_s)


def saved_step(directory: RunDirectory) -> int:
    """Return the step of a run's newest checkpoint; 0 if it has none or its storage cannot be read."""
    try:
        found = list_checkpoints(directory.checkpoints)
    except OSError:
        return 0
    return PolicyVersion.parse(found[-1].name).step if found else 0


class RestartLoop:
    """Restart loop for the main thread, which runs commands until the policy allows no more attempts. It can be used
    only once."""

    def __init__(
        self,
        policy: RestartPolicy,
        say: Callable[[str], object],
        saved_step: Callable[[], int],
        lacks_space: Callable[[], object] = lambda: False,
    ) -> None:
        """`saved_step` returns the step of the run's newest checkpoint; `lacks_space` a true value while a disk of the
        run is full."""
        self._policy, self._say, self._saved_step, self._lacks_space = policy, say, saved_step, lacks_space
        self._interrupted = 0
        """Number of the signal that interrupted the loop; 0 if there was none."""
        # The interpreter writes to this pipe: a handler runs only after a system call that its signal came just before.
        self._wakes, self._wake = -1, -1
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, first: Sequence[str], again: Sequence[str]) -> int:
        """Run `first` once and then `again`; return the exit code of the last attempt, or of a drain if an interrupt
        arrived between two attempts."""
        command = first
        with self._forwarding():
            while True:
                with subprocess.Popen(command) as self._child:
                    if self._interrupted:
                        # The signal came before there was a child to forward it to.
                        self._child.send_signal(self._interrupted)
                    code = self._child.wait()
                wait_s = None if self._interrupted else self._policy.wait_after(code, saved_step=self._saved_step())
                if wait_s is None:
                    return code if code >= 0 else 128 - code
                how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
                when = f"in {wait_s:.1f} s" + (", once there is space" if self._lacks_space() else "")
                self._say(f"ended with {how}: resuming {when} ({self._policy.restarts} restarts left)")
                select.select([self._wakes], [], [], wait_s)
                # An attempt would only use up a restart.
                while not self._interrupted and self._lacks_space():
                    select.select([self._wakes], [], [], self._policy.first_wait_s)
                if self._interrupted:
                    return EXIT_DRAINED
                command = again

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        """Forward signals to the child. A terminal or a scheduler also sends them to the whole process group; the child
        counts signals in quick succession as one."""

        def interrupted(number: int, _: FrameType | None) -> None:
            self._interrupted = number
            if self._child is not None and self._child.poll() is None:
                self._child.send_signal(number)

        self._wakes, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        woken = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        before = {number: signal.signal(number, interrupted) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(woken)
            os.close(self._wakes)
            os.close(self._wake)
