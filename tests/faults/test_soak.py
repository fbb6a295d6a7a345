"""Soak of simulated runs over real Ray, whose actors, learner and driver are killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from benches.long_runs.soak import DRIVER, Fault, Soak, SoakPlan


@pytest.mark.timeout(900)
def test_a_run_survives_kills_of_its_engines_learner_and_driver(tmp_path: Path) -> None:
    """The newest checkpoint may be lost too."""
    plan = SoakPlan(folder=tmp_path, kills=3, seed=2834, steps=12, faults=(Fault.CHECKPOINT_SPOILT,), fault_every=3)
    report = Soak(plan, print).run()
    assert report.problems == ()
    assert report.faults == {Fault.CHECKPOINT_SPOILT: 1}
    assert list((tmp_path / "soak-1" / "checkpoints").glob("aside-*")) != []
    assert report.kills == {DRIVER: 1, "engines": 1, "learner": 1}
    assert (report.runs, report.drivers, report.steps) == (1, 2, 12)
    assert report.max_staleness_seen <= report.max_staleness


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_soak_with_fifty_kills_reports_no_problems(tmp_path: Path) -> None:
    report = Soak(SoakPlan(folder=tmp_path, kills=50, seed=2, steps=40), print).run()
    assert report.problems == ()
    assert set(report.faults) == set(Fault)
    assert sum(report.kills.values()) == 50
    assert report.steps == 40 * report.runs
    assert report.max_staleness_seen <= report.max_staleness
