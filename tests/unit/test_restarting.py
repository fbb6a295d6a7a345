"""`--restarts`: which ends are followed by another try, after which wait, and what an interrupt does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.actors.run.restarts import LONGEST_WAIT_S, RestartLoop, RestartPolicy

ROOT = Path(__file__).parents[2]
COUNTED = """
import os, signal, sys
path, *ends = sys.argv[1:]
tries = len(open(path).read()) if os.path.exists(path) else 0
with open(path, "a") as file:
    file.write("x")
end = ends[min(tries, len(ends) - 1)]
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(end))
"""
"""Ends as its arguments say, one for each time it is started."""


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 130])
def test_only_transient_failures_are_retried(code: int) -> None:
    assert RestartPolicy(9).wait_after(code, 0.0) is None


@pytest.mark.parametrize("code", [75, -signal.SIGKILL, -signal.SIGSEGV])
def test_restart_waits_grow_and_are_reset_after_a_long_attempt(code: int) -> None:
    policy = RestartPolicy(20)
    assert [policy.wait_after(code, 1.0) for _ in range(4)] == [5.0, 10.0, 20.0, 40.0]
    assert policy.wait_after(code, 3600.0) == 5.0
    assert [policy.wait_after(code, 1.0) for _ in range(9)][-1] == LONGEST_WAIT_S
    assert policy.restarts == 6


def test_there_is_no_further_wait_after_the_last_restart() -> None:
    policy = RestartPolicy(1)
    assert policy.wait_after(75, 0.0) is not None
    assert policy.wait_after(75, 0.0) is None


@pytest.mark.parametrize(
    ("ends", "restarts", "code", "tries"),
    [
        (["75", "killed", "0"], 5, 0, 3),
        (["75", "2"], 5, 2, 2),
        (["75", "4"], 5, 4, 2),
        (["1"], 5, 1, 1),
        (["75"], 2, 75, 3),
        (["killed"], 1, 137, 2),
    ],
    ids=["success", "bad input", "drained", "would come again", "used up", "killed"],
)
def test_attempts_run_until_success_or_the_last_restart(
    tmp_path: Path, ends: list[str], restarts: int, code: int, tries: int
) -> None:
    said: list[str] = []
    command = [sys.executable, "-c", COUNTED, str(tmp_path / "tries"), *ends]
    assert RestartLoop(RestartPolicy(restarts, first_wait_s=0.0), said.append).run(command, command) == code
    assert len((tmp_path / "tries").read_text()) == tries
    assert len(said) == tries - 1


LOOP = """
import sys
from headrace.actors.run.restarts import RestartLoop, RestartPolicy
child = [sys.executable, "-c", sys.argv[1]]
policy = RestartPolicy(5, first_wait_s=float(sys.argv[2]))
sys.exit(RestartLoop(policy, lambda line: print(line, flush=True)).run(child, child))
"""
DRAINS = """
import signal, sys, os
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("group", os.getpgid(0), os.getpgid(os.getppid()), flush=True)
signal.sigwait({signal.SIGTERM})
sys.exit(4)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupt_is_forwarded_and_ends_the_loop(number: signal.Signals) -> None:
    child = DRAINS.replace("SIGTERM", number.name)
    with subprocess.Popen([sys.executable, "-c", LOOP, child, "0"], stdout=subprocess.PIPE, text=True) as loop:
        assert loop.stdout is not None
        _, group, of_parent = loop.stdout.readline().split()
        assert group == of_parent, "one process group"
        loop.send_signal(number)
        assert loop.wait(30) == 4


def test_an_interrupt_between_two_attempts_ends_the_loop() -> None:
    failing = [sys.executable, "-c", LOOP, "import sys; sys.exit(75)", "200"]
    with subprocess.Popen(failing, stdout=subprocess.PIPE, text=True) as loop:
        assert loop.stdout is not None
        assert "resuming in 200 s" in loop.stdout.readline()
        os.kill(loop.pid, signal.SIGTERM)
        assert loop.wait(30) == 4


AT_LINE = """
import os, signal, sys, threading
from headrace.actors.run.restarts import RestartLoop, RestartPolicy
failing = ["/bin/bash", "-c", "exit 75"]
def strike():
    os.kill(os.getpid(), signal.SIGTERM)
def ended_by_a_strike_at(number):
    lines = None
    later = threading.Timer(0.2, strike)
    def said(_):
        nonlocal lines
        lines = 0
        later.start()
    def trace(frame, event, _):
        nonlocal lines
        if lines is not None and event == "line":
            lines += 1
            if lines == number:
                later.cancel()
                strike()
        return trace
    loop = RestartLoop(RestartPolicy(restarts=1, first_wait_s=200.0), said)
    sys.settrace(trace)
    try:
        return loop.run(failing, failing)
    finally:
        sys.settrace(None)
        later.cancel()
        later.join()
print({ended_by_a_strike_at(number) for number in range(1, 40)})
"""


def test_an_interrupt_at_any_line_of_the_wait_ends_the_loop() -> None:
    """Also one that comes while the wait begins, and holds what a handler must not wait for."""
    ended = subprocess.run([sys.executable, "-c", AT_LINE], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "{4}\n"), ended.stderr
