"""A run on a disk that cannot be written is refused at start, and read all the same."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.actors.errors import ConfigError
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.launch import sole_driver
from headrace.buffer.audit.verify import verify
from headrace.buffer.errors import LedgerRefused
from headrace.buffer.ledger.ledger import Ledger

GOLDEN = Path(__file__).parents[1] / "golden" / "ledger"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a disk")


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", disk], capture_output=True).returncode:
        pytest.skip("this machine mounts no tmpfs")
    try:
        shutil.copytree(GOLDEN, disk / "run")
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("name", ["run", "new"])
def test_opening_a_ledger_on_a_read_only_file_system_is_refused(read_only: Path, name: str) -> None:
    with pytest.raises(LedgerRefused, match="Read-only file system: choose a run directory"):
        Ledger.open(read_only / name, {"run_id": "run"})


def test_driving_a_run_on_a_read_only_file_system_is_refused(read_only: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"), sole_driver(RunDirectory(path=read_only / "run")):
        pytest.fail("it is driven")


def test_verify_accepts_a_read_only_ledger(read_only: Path, tmp_path: Path) -> None:
    assert verify(read_only / "run").steps == verify(shutil.copytree(GOLDEN, tmp_path / "copy")).steps
