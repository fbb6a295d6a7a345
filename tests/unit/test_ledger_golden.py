"""Ledgers written by older versions load, verify and can be continued."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.buffer.records import RolloutState
from headrace.buffer.store import ReplayStore
from headrace.buffer.verify import verify
from headrace.buffer.versions import PolicyVersion

TESTS = Path(__file__).parents[1]
cases = SimpleNamespace(**runpy.run_path(str(TESTS / "replay_cases.py")))


@pytest.mark.parametrize("name", ["ledger_v1"])
async def test_an_old_run_goes_on(tmp_path, name):
    run_dir = tmp_path / name
    shutil.copytree(TESTS / "golden" / name, run_dir)
    report = verify(run_dir)
    assert report.problems == ()
    assert (report.issued, report.trained, report.leased, report.steps_rolled_back) == (24, 12, 4, 1)
    async with await ReplayStore.open(run_dir, cases.SMALL, cases.tasks(), run_id="golden", seed=3) as store:
        status = store.status()
        assert (status.head, status.evaluations) == (PolicyVersion(2, 3), 1)
        assert status.rollouts[RolloutState.IN_FLIGHT] == 2
        batch = await store.take(PolicyVersion(2, 3), 2, timeout_s=0.0)
        assert batch.items[1].reward == 1.0
        assert batch.items[1].trajectory.rows[0].tokens_T.shape == (8,)
