"""The checks in the order of their value, and their run: each in a process of its own, with a time limit.

Invariants:
- Every check that was asked for has an entry in the report, whatever became of it.
- A check that hangs costs its own limit. Its process is killed with all that it started, and the next check runs.
- With a budget, no check runs past the end of it; those that are left are reported as not run.

Needs no torch: only the checks' own processes import it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Final

from pydantic import TypeAdapter

from gpu_checks.outcome import Entry, Outcome, State
from gpu_checks.place import Place

OUTCOMES: Final = TypeAdapter(Outcome)
LOG_LINES: Final = 15
"""Lines of a failed check's own output in the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check: a function of `Place`, by its name below `gpu_checks`. `needs_cuda` says why a CPU shows nothing of
    it."""

    name: str
    function: str
    limit_s: float
    shows: str
    needs_cuda: str = ""

    def run(self, place: Place) -> Outcome:
        """Import the check and run it in this process."""
        outcome = resolve_name(f"gpu_checks.{self.function}")(place)
        assert isinstance(outcome, Outcome)
        return outcome


CHECKS: Final = (
    Check(
        name="environment",
        function="environment:check_environment",
        limit_s=60,
        shows="packages, devices and NCCL are there",
    ),
    Check(
        name="fp32",
        function="learner:check_fp32",
        limit_s=120,
        shows="the learner on the device computes in fp32 what it computes on a CPU",
        needs_cuda="a CPU would be compared with itself",
    ),
    Check(
        name="bf16",
        function="learner:check_bf16",
        limit_s=120,
        shows="with bf16 and recompute, it computes nearly what it computes on a CPU in fp32",
    ),
    Check(
        name="resume",
        function="learner:check_resume",
        limit_s=120,
        shows="a learner that resumes goes on bit for bit",
    ),
    Check(
        name="rows",
        function="learner:check_rows",
        limit_s=150,
        shows="rows of 8k and 32k tokens train at the sizes of Qwen3-0.6B with recompute; tokens per second",
    ),
    Check(
        name="memory",
        function="learner:check_memory",
        limit_s=150,
        shows="these rows take no more memory than recipes are laid out for",
        needs_cuda="torch counts the peak of a CUDA device's memory only (scripts/bench learner measures a CPU's)",
    ),
    Check(
        name="sender",
        function="sender:check_sender",
        limit_s=120,
        shows="the sender of weight pushes forms a group and sends",
    ),
    Check(
        name="missing_peer",
        function="sender:check_missing_peer",
        limit_s=120,
        shows="the group's timeout ends a transfer whose other end never comes",
    ),
    Check(
        name="next_sender",
        function="sender:check_next_sender",
        limit_s=120,
        shows="after a sender was killed in a call that hung, the next one sends, and the device has its memory back",
    ),
)
"""The most valuable first: a loan may end early."""


def run_checks(place: Place, only: Collection[str], budget_s: float | None) -> Iterator[tuple[str, Entry]]:
    """Run the checks, or those in `only`, and yield the entry of each as soon as it has ended."""
    ends_s = None if budget_s is None else time.monotonic() + budget_s
    unusable = False
    for check in CHECKS:
        if only and check.name not in only:
            continue
        limit_s = check.limit_s * place.patience
        left_s = limit_s if ends_s is None else min(limit_s, ends_s - time.monotonic())
        reason = ""
        if check.needs_cuda and place.device == "cpu":
            yield check.name, Entry(state=State.NOT_RUN, shows=check.shows, not_run=check.needs_cuda)
            continue
        if unusable:
            reason = "the environment failed its check"
        elif left_s <= 0:
            reason = f"the budget of {budget_s:g} s was spent: raise --budget-s, or name this check with --only"
        if reason:
            yield check.name, Entry(state=State.NOT_RUN, shows=check.shows, reason=reason)
            continue
        entry = run_apart(check, place, left_s)
        unusable = unusable or (check.name == "environment" and entry.state is State.FAILED)
        yield check.name, entry


def run_apart(check: Check, place: Place, limit_s: float) -> Entry:
    """Run a check in a process of its own for at most `limit_s`, and judge it."""
    outcome, log = place.folder / f"{check.name}.json", place.folder / f"{check.name}.log"
    command = [sys.executable, "-W", "ignore", "-m", "gpu_checks.worker", check.name, str(outcome), str(os.getpid())]
    started_s = time.monotonic()
    with log.open("wb") as output:
        # A group of its own, so that its senders and their threads end with it.
        process = subprocess.Popen(
            [*command, *place.words()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # Also after it has ended by itself: what it started may live on.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - started_s
    if code == 0:
        return Entry.of(OUTCOMES.validate_json(outcome.read_bytes()), shows=check.shows, seconds=seconds)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    if code is None:
        left = ", all that was left of --budget-s," if limit_s < check.limit_s * place.patience else ""
        reason = f"it did not end within {round(limit_s, 2):g} s{left} and was killed"
    elif code < 0:
        reason = f"its process was killed by {signal.Signals(-code).name}"
    else:
        reason = lines[-1] if lines else f"its process ended with exit code {code}"
    return Entry(
        state=State.FAILED,
        shows=check.shows,
        reason=reason,
        seconds=round(seconds, 2),
        log=tuple(lines[-LOG_LINES:]),
    )
