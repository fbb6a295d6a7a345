"""`--restarts`: which ends are followed by another try, after which wait, and what an interrupt does."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.restarts import LONGEST_WAIT_S, RestartLoop, RestartPolicy, saved_step

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
    """F10: neither a run that has completed nor one that was drained is restarted."""
    assert RestartPolicy(9).wait_after(code, saved_step=0) is None


def waits(policy: RestartPolicy, saved_steps: list[int], code: int = 75) -> list[float]:
    found = [policy.wait_after(code, saved_step=step) for step in saved_steps]
    assert None not in found
    return [wait_s for wait_s in found if wait_s is not None]


@pytest.mark.parametrize("code", [75, -signal.SIGKILL, -signal.SIGSEGV])
def test_f10_waits_double_up_to_a_limit_while_no_checkpoint_is_saved(code: int) -> None:
    bounds = [5, 10, 20, 40, 80, 160, LONGEST_WAIT_S, LONGEST_WAIT_S]
    found = waits(RestartPolicy(8, chance=random.Random(1)), [20] * 8, code)
    assert all(bound / 2 <= wait_s <= bound for wait_s, bound in zip(found, bounds, strict=True)), found
    assert waits(RestartPolicy(5000, chance=random.Random(1)), [0] * 5000)[-1] <= LONGEST_WAIT_S


def test_f10_an_attempt_that_saved_a_checkpoint_resets_the_wait() -> None:
    """However long an attempt took: one that ends before it saves repeats its steps. Storage that cannot be read for a
    while, and a checkpoint that is set aside, are no progress either."""
    first, second, progress, *others = waits(RestartPolicy(6), [20, 20, 30, 0, 30, 20])
    assert first <= 5 <= second <= 10
    assert 2.5 <= progress <= 5
    assert [5 * 2**n <= wait_s <= 10 * 2**n for n, wait_s in enumerate(others)] == [True] * 3, others


def test_f10_runs_that_one_outage_ended_do_not_come_back_together() -> None:
    clock = sorted(waits(RestartPolicy(1), [0])[0] for _ in range(200))
    assert clock[-1] - clock[0] > 2, "the waits are spread over 2.5 s"
    assert max(later - sooner for sooner, later in itertools.pairwise(clock)) < 0.5


def test_f10_there_is_no_further_wait_after_the_last_restart() -> None:
    policy = RestartPolicy(1)
    assert policy.wait_after(75, saved_step=0) is not None
    assert policy.wait_after(75, saved_step=10) is None


def test_the_saved_step_is_that_of_the_newest_checkpoint(tmp_path: Path) -> None:
    directory = RunDirectory(path=tmp_path)
    assert saved_step(directory) == 0
    for name in ("1.10", "2.20", "aside-2.30", "kept-1.5", "tmp-2.40"):
        (directory.checkpoints / name).mkdir(parents=True)
    assert saved_step(directory) == 20


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
    loop = RestartLoop(RestartPolicy(restarts, first_wait_s=0.0), said.append, lambda: 0)
    assert loop.run(command, command) == code
    assert len((tmp_path / "tries").read_text()) == tries
    assert len(said) == tries - 1


def test_a_full_disk_uses_up_one_restart_however_long_it_lasts(tmp_path: Path) -> None:
    said: list[str] = []
    command = [sys.executable, "-c", COUNTED, str(tmp_path / "tries"), "75", "0"]
    full = iter([*["the disk of the run"] * 200, ""])
    loop = RestartLoop(RestartPolicy(1, first_wait_s=0.0), said.append, lambda: 0, lambda: next(full))
    assert loop.run(command, command) == 0
    assert next(full, None) is None, "no attempt while it is full"
    assert said == ["ended with exit code 75: resuming in 0.0 s, once there is space (0 restarts left)"]


LOOP = """
import sys
from headrace.actors.run.restarts import RestartLoop, RestartPolicy
child = [sys.executable, "-c", sys.argv[1]]
policy = RestartPolicy(5, first_wait_s=float(sys.argv[2]))
sys.exit(RestartLoop(policy, lambda line: print(line, flush=True), lambda: 0).run(child, child))
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
        assert re.search(r"resuming in 1\d\d\.\d s", loop.stdout.readline())
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
    loop = RestartLoop(RestartPolicy(restarts=1, first_wait_s=200.0), said, lambda: 0)
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
