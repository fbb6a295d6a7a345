"""A ledger whose process is killed again and again, at random or at the worst moment, loses nothing that it
acknowledged, trains nothing twice and keeps the bound; every run ends with its steps."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen
from threading import Timer

import pytest

from headrace.buffer.audit.evidence import has_begun, read_evidence
from headrace.buffer.audit.verify import verify
from headrace.sandboxes.linux import syscalls
from support.ledger_life import BROKE, Plan
from support.striking import Moment

HANG_S = 60.0
KILLS = 4
"""Of one run, before a life that nobody strikes."""
LATEST = {Moment.STATEMENT: 150, Moment.TORN_WRITE: 150, Moment.DISK_FULL: 150, Moment.FILE: 25, Moment.CHECKPOINT: 12}
FROM_OUTSIDE_LINES = 20


@dataclass(slots=True)
class Told:
    """What all lives of a run have said that was acknowledged to them."""

    offered: set[tuple[str, str]] = field(default_factory=set)
    commits: set[tuple[str, str]] = field(default_factory=set)
    path: list[list[str]] = field(default_factory=list)
    """Rollouts of each update that still counts, in order; skipped steps train nothing."""
    stand: tuple[int, int] = (0, 0)
    done: bool = False

    def hear(self, line: str) -> None:
        word, *words = line.split()
        if word == "offered":
            self.offered.add((words[0], words[1]))
        elif word == "opened":
            self.stand = version(words[0])
            self.path = self.path[: self.stand[1]]
        elif word == "committed":
            self.commits.add((words[0], words[1]))
            if version(words[0]) != self.stand:
                self.stand = version(words[0])
                self.path.append([member.split("#")[0] for member in words[2:]])
        self.done = word == "done" or self.done


def version(text: str) -> tuple[int, int]:
    epoch, step = text.split(".")
    return int(epoch), int(step)


@contextmanager
def not_for_ever(process: Popen[str]) -> Iterator[None]:
    """Kill what hangs, which fails the test."""
    guard = Timer(HANG_S, process.kill)
    guard.start()
    try:
        yield
        assert guard.is_alive(), f"it hung for {HANG_S:g} s"
    finally:
        process.kill()
        guard.cancel()


def live(
    run_dir: Path, seed: int, life: int, moment: Moment, at: int, strike: Callable[[Popen[str]], None] = Popen.kill
) -> tuple[list[str], int]:
    """One life to its end; all lines that it said in full, and its exit code. `COUNT` is struck from outside when it
    has said `at` lines; it waits for that."""
    command = [sys.executable, "-m", "support.ledger_life", str(run_dir), str(seed), str(life), moment.value, str(at)]
    said = []
    with Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as process, not_for_ever(process):
        # To the end by one reader: another one would not see what this one has read ahead.
        for line in process.stdout:
            said.append(line)
            if moment is Moment.COUNT and len(said) == at:
                strike(process)
                with suppress(BrokenPipeError):
                    os.write(process.stdin.fileno(), b"\n")
        errors = process.stderr.read()
    assert process.returncode in (0, -9, BROKE), errors
    return [line.strip() for line in said if line.endswith("\n")], process.returncode


def check(run_dir: Path, plan: Plan, told: Told) -> None:
    """What must hold whenever the process is dead."""
    if not has_begun(run_dir):
        assert (told.offered, told.commits) == (set(), set())
        return
    report = verify(run_dir)
    assert report.problems == ()
    assert (report.trained_twice, report.lost) == (0, 0)
    assert report.max_staleness_seen <= plan.config.max_staleness
    evidence = read_evidence(run_dir)
    assert told.offered <= {(rollout_id, str(attempt)) for rollout_id, attempt in evidence.files}
    assert told.commits <= {(str(commit.version), commit.batch_id) for commit in evidence.commits}


def check_ended(run_dir: Path, plan: Plan, told: Told) -> None:
    """All steps are there, and they are those that were acknowledged."""
    trained = [rollout for batch in told.path for rollout in batch]
    assert len(told.path) == plan.steps
    assert len(trained) == len(set(trained)) == plan.steps * plan.config.batch_size
    evidence = read_evidence(run_dir)
    batches = {batch.batch_id: [str(member.rollout_id) for member in batch.members] for batch in evidence.batches}
    kept = [commit for commit in evidence.commits if commit.rolled_back_by is None and not commit.skipped]
    assert [batches[commit.batch_id] for commit in kept] == told.path


def live_through(run_dir: Path, seed: int, moments: list[Moment]) -> int:
    """A run from its first life to its end; how many of its lives were cut short."""
    chance, plan, told = random.Random(f"strikes {seed}"), Plan.draw(seed), Told()
    struck = 0
    for life, moment in enumerate([*moments, Moment.COUNT]):
        last = life == len(moments)
        at = 0 if last else chance.randint(1, LATEST.get(moment, FROM_OUTSIDE_LINES))
        print(f"seed {seed}, life {life}: {moment} {at}")
        lines, code = live(run_dir, seed, life, moment, at)
        for line in lines:
            told.hear(line)
        struck += code != 0
        check(run_dir, plan, told)
        if told.done:
            break
    assert told.done
    check_ended(run_dir, plan, told)
    return struck


def moments_of(seed: int, count: int) -> list[Moment]:
    return random.Random(f"moments {seed}").choices(list(Moment), k=count)


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("seed", range(5))
def test_runs_killed_at_any_moment_complete_after_a_restart(tmp_path: Path, seed: int) -> None:
    # Each kind of moment in each few runs, in an order of its own.
    """F9."""
    moments = [list(Moment)[(seed + number) % len(Moment)] for number in range(KILLS)]
    assert live_through(tmp_path / "run", seed, moments) >= KILLS - 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_many_runs_killed_at_any_moment_complete_after_a_restart(tmp_path: Path, seed: int) -> None:
    assert live_through(tmp_path / "run", seed, moments_of(seed, 6)) >= 5


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """One with room for a few lives, and for what a ledger wants to see free."""
    folder.mkdir()
    syscalls.mount("tmpfs", str(folder), "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=24m,mode=700")
    try:
        yield folder
    finally:
        syscalls.detach(str(folder))


@pytest.mark.namespaces
def test_a_run_completes_even_if_its_disk_fills_up_repeatedly(tmp_path: Path) -> None:
    """Checkpoints and backups are on it too: what fails half-way is no checkpoint."""
    seed = 7
    plan, told = Plan.draw(seed), Told()
    with small_disk(tmp_path / "disk") as disk:
        run_dir, other = disk / "run", disk / "of somebody else"

        def fill(_: Popen[str]) -> None:
            with other.open("wb", buffering=0) as file, suppress(OSError):
                while file.write(b"x" * 4096):
                    pass

        for life, lines in enumerate((5, 20, 15)):
            said, code = live(run_dir, seed, life, Moment.COUNT, lines, fill)
            for line in said:
                told.hear(line)
            assert code == BROKE
            check(run_dir, plan, told)
            said, code = live(run_dir, seed, 50 + life, Moment.COUNT, 0)
            assert (code, "is full" in said[0]) == (BROKE, True), "it is refused before anything is written"
            other.unlink()
        said, code = live(run_dir, seed, 99, Moment.COUNT, 0)
        for line in said:
            told.hear(line)
        assert told.done
        check(run_dir, plan, told)
        check_ended(run_dir, plan, told)
