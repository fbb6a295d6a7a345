"""A run whose ledger disk is lost again and again: it is restored from storage and trains to its end."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.actors.cluster.runs.driver import restore_marked
from headrace.actors.cluster.runs.layout import TO_RESTORE
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.record.storage.restore import restore_run
from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.audit.resume_report import resume_report
from headrace.buffer.audit.verify import verify
from headrace.buffer.trajectories.versions import PolicyVersion
from support.ledger_copies import newest_copy
from support.simulated_lives import CONFIG, SAVE_EVERY

GUARD_S = 120
STEPS = 14


def live(state: Path, storage: Path, saves: int) -> tuple[int, list[str]]:
    """One life of the run; return its exit code and what it printed."""
    command = [sys.executable, "-m", "support.simulated_lives", str(state), str(storage), str(STEPS), str(saves)]
    done = subprocess.run(command, capture_output=True, timeout=GUARD_S, check=False, text=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode, done.stdout.split()


@pytest.mark.timeout(GUARD_S)
def test_a_run_that_loses_its_ledger_twice_trains_to_the_end(tmp_path: Path) -> None:
    state, storage = tmp_path / "state", tmp_path / "storage"
    storage.mkdir()
    for saves in (2, 4):
        code, [copied, reached] = live(state, storage, saves)
        assert code == -signal.SIGKILL
        copy = newest_copy(storage)
        assert copy is not None
        shutil.rmtree(state)
        report = restore_run(state, storage)
        assert report.version == str(copy.version)
        assert copy.version >= PolicyVersion.parse(copied)
        assert 0 < int(reached) - copy.version.step <= SAVE_EVERY, "only the steps since the checkpoint are lost"
        assert report.issued_again >= 1
        plan = resume_report(state, max_staleness=CONFIG.max_staleness)
        assert (plan.checkpoint, plan.lost, plan.checkpoint_is_foreign) == (report.version, 0, False)
        assert plan.restarted == report.issued_again
        assert verify(state).clean
    assert live(state, storage, 0) == (0, [])
    end = verify(state)
    assert end.clean, end.problems
    assert (end.steps, end.trained_twice, end.lost) == (STEPS, 0, 0)
    assert end.max_staleness_seen <= CONFIG.max_staleness
    assert [epoch.epoch for epoch in read_evidence(state).epochs] == [1, 102, 203]
    last = newest_copy(storage)
    assert last is not None
    assert last.version == PolicyVersion(203, STEPS)


@pytest.mark.timeout(GUARD_S)
def test_a_mark_that_outlived_its_restoration_only_goes(tmp_path: Path) -> None:
    """The driver was killed, or the disk was full, between the restored ledger and the removal of the mark."""
    directory = RunDirectory(path=tmp_path / "state", shared=tmp_path / "storage")
    directory.storage.mkdir()
    live(directory.path, directory.storage, 2)
    shutil.rmtree(directory.path)
    said: list[str] = []
    for _ in range(2):
        directory.path.mkdir(exist_ok=True)
        (directory.path / TO_RESTORE).touch()
        restore_marked(directory, said.append)
        assert not (directory.path / TO_RESTORE).exists()
    assert sum(line.startswith("restored the ledger") for line in said) == 1
    assert live(directory.path, directory.storage, 0) == (0, [])
    assert verify(directory.path).clean
