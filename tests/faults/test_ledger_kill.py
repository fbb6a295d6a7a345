"""A buffer that is killed with -9 again and again loses nothing that it acknowledged and trains nothing twice."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from headrace.buffer.verify import verify

LIVES = 10
PROGRAM = Path(__file__).with_name("ledger_life.py")


def live_and_die(run_dir: Path, seed: int, lines: int) -> list[list[str]]:
    """Run one life and kill it once it has said `lines` lines; returns all it said."""
    command = [sys.executable, str(PROGRAM), str(run_dir), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        said = []
        try:
            for line in process.stdout:
                said.append(line.split())
                if len(said) >= lines:
                    break
        finally:
            process.kill()
        rest, errors = process.communicate()
        assert process.returncode == -9, errors
    # The kill may have cut the last line.
    return said + [line.split() for line in rest.splitlines(keepends=True) if line.endswith("\n")]


def stored_offers(run_dir: Path) -> set[tuple[str, str]]:
    with closing(sqlite3.connect(f"{(run_dir / 'ledger.db').as_uri()}?mode=ro", uri=True)) as database:
        rows = database.execute(
            "SELECT rollout_id, attempt FROM attempts WHERE offered AND trajectory_file IS NOT NULL"
        )
        return {(rollout_id, str(attempt)) for rollout_id, attempt in rows}


def stored_commits(run_dir: Path) -> set[tuple[str, str]]:
    with closing(sqlite3.connect(f"{(run_dir / 'ledger.db').as_uri()}?mode=ro", uri=True)) as database:
        return set(database.execute("SELECT version, batch_id FROM commits"))


@pytest.mark.parametrize("seed", [1])
def test_lives_of_a_killed_buffer(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    offered: set[tuple[str, str]] = set()
    committed: set[tuple[str, str]] = set()
    saved, reports = [], []
    for life in range(LIVES):
        said = live_and_die(tmp_path, seed * 100 + life, chance.randint(1, 120))
        offered |= {(words[1], words[2]) for words in said if words[0] == "offered"}
        committed |= {(words[1], words[2]) for words in said if words[0] == "committed"}
        saved += [words[1] for words in said if words[0] == "saved"]
        assert said[0][0] == "opened"
        report = verify(tmp_path)
        assert report.problems == ()
        assert (report.trained_twice, report.lost) == (0, 0)
        assert report.max_staleness_seen <= 2
        assert offered <= stored_offers(tmp_path)
        assert committed <= stored_commits(tmp_path)
        reports.append(report)
    assert reports[-1].steps_rolled_back > 0, "steps after a checkpoint were undone"
    assert reports[-1].steps > reports[0].steps
    assert reports[-1].checkpoints >= len(saved) > 0
