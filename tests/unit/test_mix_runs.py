"""Several sources of tasks in one run, in virtual time: shares, throughput, slow sources, and sources that fail."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest

from headrace.actors.errors import RunStalled
from headrace.buffer.audit.evidence import Evidence
from headrace.buffer.audit.source_report import source_reports
from headrace.buffer.audit.verify import verify
from support import mixes

SHARES = {"fast": 0.45, "middle": 0.35, "slow": 0.2}
DURATIONS_S = {"fast": 10.0, "middle": 100.0, "slow": 1000.0}
WARMUP_STEPS = 10


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Evidence]:
    """Fifty steps of three sources with durations 1:10:100."""
    folder = tmp_path_factory.mktemp("mix") / "ledger"
    sources = [mixes.source(name, share, DURATIONS_S[name]) for name, share in SHARES.items()]
    return folder, mixes.run_mix(mixes.mix_config(sources), folder)


@pytest.mark.whole
def test_the_trained_shares_are_held_at_every_step(mixed: tuple[Path, Evidence]) -> None:
    """Acceptance: an error of at most 1 % over 50 steps. It is below one rollout after every step."""
    steps = mixes.trained_by_step(mixed[1])
    assert len(steps) == 50
    trained = list(accumulate(steps, lambda one, other: {name: one[name] + other[name] for name in one}))
    for each in trained:
        whole = sum(each.values())
        assert max(abs(each[name] - share * whole) for name, share in SHARES.items()) < 1
    whole = sum(trained[-1].values())
    assert max(abs(trained[-1][name] / whole - share) for name, share in SHARES.items()) <= 0.01


@pytest.mark.whole
def test_the_throughput_is_that_of_the_mix(mixed: tuple[Path, Evidence]) -> None:
    """Acceptance: at least 0.95 of the ideal. By Little's law, a step takes at least the slot time of its rollouts
    (each source's share times its mean duration, boot and evaluation included), divided by the slots."""
    evidence = mixed[1]
    reports, commits = source_reports(evidence), evidence.surviving
    mean_s = sum(share * (reports[name].mean_s or 0.0) for name, share in SHARES.items())
    ideal_s = max(mixes.PLAN.learner_s, mixes.PLAN.batch_size * mean_s / mixes.PLAN.slots)
    measured = commits[WARMUP_STEPS - 1 :]
    step_s = (measured[-1].committed_at_s - measured[0].committed_at_s) / (len(measured) - 1)
    assert 200 < mean_s < 280
    assert ideal_s / step_s >= 0.95


def test_a_fast_source_is_not_trained_staler_than_a_slow_one(mixed: tuple[Path, Evidence]) -> None:
    folder, evidence = mixed
    report = verify(folder)
    assert report.clean, report.problems
    assert report.max_staleness_seen <= mixes.PLAN.max_staleness
    reports = source_reports(evidence)
    staleness = [reports[name].mean_staleness or 0.0 for name in SHARES]
    assert staleness == sorted(staleness)
    assert reports["fast"].evictions == reports["middle"].evictions == 0


def test_a_source_slower_than_the_bound_keeps_its_share(tmp_path: Path) -> None:
    """Without waiting, a rollout of the slow source would be over the bound when it ends: ten batches of the fast one
    fit in its time, and the bound is one step."""
    plan = mixes.PLAN.model_copy(update={"max_staleness": 1, "steps": 8, "slots": 64})
    sources = [mixes.source("fast", 0.5, 10.0), mixes.source("slow", 0.5, 1000.0)]
    evidence = mixes.run_mix(mixes.mix_config(sources, plan), tmp_path / "ledger")
    assert mixes.trained_by_step(evidence) == [{"fast": 8, "slow": 8}] * 8
    report = verify(tmp_path / "ledger")
    assert (report.clean, report.max_staleness_seen) == (True, 1)


def test_a_source_that_always_fails_is_named(tmp_path: Path) -> None:
    """The run cannot keep the shares, so it ends with an error that names the source; the ledger is intact."""
    plan = mixes.PLAN.model_copy(update={"steps": 10})
    sources = [mixes.source("works", 0.5, 10.0), mixes.source("broken", 0.5, 10.0, simulated={"failing_turns": 1.0})]
    clocks = {"queue_timeout_s": 100, "boot_timeout_s": 100, "agent_timeout_s": 100, "lease_s": 3600}
    config = mixes.mix_config(sources, plan, rollout=clocks, service={"stall_s": 3000, "hang_s": 60})
    with pytest.raises(RunStalled, match=r"lacks \d+ rollouts of source broken.*attempts failed, over \d+ tasks"):
        mixes.run_mix(config, tmp_path / "ledger")
    reports = source_reports(mixes.read_evidence(tmp_path / "ledger"))
    assert reports["broken"].trained == 0
    assert reports["broken"].infra > 0
    assert "failing_turns" in reports["broken"].last_failure
    assert reports["works"].infra == 0
    # It gets one probe a minute most of the time; all slots would have made 2400 attempts.
    assert reports["broken"].infra < 240
    assert verify(tmp_path / "ledger").clean


def test_a_source_that_fails_half_of_the_time_keeps_its_share(tmp_path: Path) -> None:
    plan = mixes.PLAN.model_copy(update={"steps": 12})
    sources = [mixes.source("works", 0.5, 10.0), mixes.source("frail", 0.5, 10.0, simulated={"failing_turns": 0.4})]
    evidence = mixes.run_mix(mixes.mix_config(sources, plan), tmp_path / "ledger")
    assert mixes.trained_by_step(evidence) == [{"works": 8, "frail": 8}] * 12
    assert source_reports(evidence)["frail"].infra > 20
