"""Mismatch between learner and engines, and lag, by the staleness of each token."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from headrace.actors.record.files.logprob_drift import drift_totals, mismatch_alarm
from headrace.actors.record.files.metrics import MetricsLog, StepMetric, read_metrics
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.trajectories.types import (
    Batch,
    BatchId,
    BatchLease,
    CheckpointRef,
    LogprobDrift,
    Row,
    StepReport,
    TokenRatios,
    VersionSpan,
)
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.logprob_drift import DriftMeter, DriftSums
from support import replay_cases as cases

TRAINED = PolicyVersion(2, 7)
REPEATED = PolicyVersion(1, 7)
"""The same weights as TRAINED, in an epoch before it."""
OLDER = PolicyVersion(1, 5)
STALENESS = {TRAINED: 0, REPEATED: 0, OLDER: 2}


def row(*spans: tuple[int, PolicyVersion, bool]) -> Row:
    """A prompt of two tokens, then spans of (tokens, version, stale_kv); the second token of each span is masked."""
    start, versions, mask = 2, [], [False, False]
    for count, version, stale_kv in spans:
        versions.append(VersionSpan(start=start, end=start + count, version=version, stale_kv=stale_kv))
        mask += [index != 1 for index in range(count)]
        start += count
    logprobs = np.where(mask, -1.0 - 0.1 * np.arange(start), 0.0)
    return Row(
        tokens_T=np.arange(start, dtype=np.int32),
        loss_mask_T=np.array(mask),
        logprobs_T=logprobs.astype(np.float32),
        versions=tuple(versions),
    )


def meter(*, cap: float = 2.0) -> DriftMeter:
    lease = BatchLease(batch_id=BatchId("b0"), epoch=2)
    return DriftMeter(Batch(lease=lease, version=TRAINED, items=(), staleness=STALENESS), cap=cap)


def current(rows: list[Row], differences: list[float]) -> np.ndarray:
    """Log-probabilities of the trained tokens that differ from the recorded ones by these values."""
    behaviour = np.concatenate([each.logprobs_T[each.loss_mask_T] for each in rows])
    return (behaviour.astype(np.float64) + differences).astype(np.float32)


ROWS = [row((3, TRAINED, False), (3, OLDER, False)), row((2, REPEATED, False), (3, TRAINED, True))]
DIFFERENCES = [0.01, -0.03, 0.5, -0.5, 0.02, 1.0, 3.0]
"""Of: two tokens of the trained version, two older ones, one of the same weights, two with stale keys and values."""


def test_tokens_of_the_trained_weights_are_compared_separately_from_lag_and_stale_kv() -> None:
    measured = meter()
    measured.add(ROWS, current(ROWS, DIFFERENCES), positions=16)
    drift = measured.sums.drift()
    assert drift is not None
    assert set(drift.by_staleness) == {0, 2}
    own, lagging, stale_kv = drift.mismatch, drift.by_staleness[2], drift.stale_kv
    assert own is not None
    assert (own.tokens, lagging.tokens) == (3, 2)
    assert own.mean_abs_log_ratio == pytest.approx(0.02, abs=1e-6)
    assert own.max_abs_log_ratio == pytest.approx(0.03, abs=1e-6)
    assert lagging.mean_ratio == pytest.approx((math.exp(0.5) + math.exp(-0.5)) / 2, abs=1e-6)
    assert stale_kv is not None
    assert (stale_kv.tokens, stale_kv.mean_abs_log_ratio) == (2, pytest.approx(2.0, abs=1e-6))


def test_the_shares_count_padding_and_tokens_over_the_cap() -> None:
    measured = meter(cap=2.0)
    assert measured.sums.shares() == {}
    measured.add(ROWS, current(ROWS, DIFFERENCES), positions=16)
    assert measured.sums.shares() == {"padding_share": (16 - 8 - 7) / 16, "capped_share": 2 / 7}


def test_micro_batches_do_not_change_the_comparison() -> None:
    together, apart = meter(), meter()
    together.add(ROWS, current(ROWS, DIFFERENCES), positions=16)
    apart.add(ROWS[:1], current(ROWS[:1], DIFFERENCES[:4]), positions=8)
    apart.add(ROWS[1:], current(ROWS[1:], DIFFERENCES[4:]), positions=8)
    assert together.sums.drift() == apart.sums.drift()
    assert together.sums.shares() == apart.sums.shares()


def test_ranks_do_not_change_the_comparison() -> None:
    together, ranks = meter(), [meter(), meter(), meter()]
    together.add(ROWS, current(ROWS, DIFFERENCES), positions=16)
    ranks[0].add(ROWS[:1], current(ROWS[:1], DIFFERENCES[:4]), positions=8)
    ranks[2].add(ROWS[1:], current(ROWS[1:], DIFFERENCES[4:]), positions=8)
    total = sum((rank.sums for rank in ranks), DriftSums())
    assert total.drift() == together.sums.drift()
    assert total.shares() == together.sums.shares()


def test_without_tokens_of_the_trained_weights_there_is_no_mismatch() -> None:
    assert meter().sums.drift() is None
    measured, rows = meter(), [row((3, OLDER, False))]
    measured.add(rows, current(rows, [0.5, 0.5]), positions=5)
    drift = measured.sums.drift()
    assert drift is not None
    assert drift.mismatch is None
    assert mismatch_alarm(report(drift), 0.05) is None


def report(drift: LogprobDrift | None) -> StepReport:
    return StepReport(batch_id=BatchId("b0"), version=PolicyVersion(2, 8), skipped=False, drift=drift)


def ratios(mean: float, tokens: int = 10) -> TokenRatios:
    return TokenRatios(tokens=tokens, mean_ratio=1.0, mean_abs_log_ratio=mean, max_abs_log_ratio=2 * mean)


@pytest.mark.parametrize(("mean", "alarms"), [(0.04, False), (0.05, False), (0.06, True), (math.nan, True)])
def test_an_alarm_is_raised_above_the_threshold_and_for_values_that_are_not_numbers(mean: float, alarms: bool) -> None:
    alarm = mismatch_alarm(report(LogprobDrift(by_staleness={0: ratios(mean), 1: ratios(9.0)})), 0.05)
    assert (alarm is not None) == alarms
    if alarm is not None:
        assert (alarm.step, alarm.version, alarm.tokens, alarm.alarm) == (8, "2.8", 10, 0.05)
        assert "learner.mismatch_alarm (0.05)" in alarm.line()


def test_lag_alone_raises_no_alarm() -> None:
    assert mismatch_alarm(report(LogprobDrift(by_staleness={1: ratios(9.0)}, stale_kv=ratios(9.0))), 0.05) is None
    assert mismatch_alarm(report(None), 0.05) is None


def step_record(number: int, **drift: object) -> StepMetric:
    return StepMetric(
        batch_id=f"b{number}",
        step=number,
        version=f"1.{number}",
        skipped=False,
        reward=0.5,
        metrics={"capped_share": 0.1 * number, "padding_share": 0.3},
        staleness={"0": 4},
        stale_kv_tokens=0,
        step_s=1.0,
        idle_s=0.0,
        push_s=0.0,
        **drift,  # type: ignore[arg-type]
    )


def test_the_report_pools_steps_by_their_tokens(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(step_record(1, mismatch=ratios(0.01, 30), ratio_by_staleness={"0": ratios(0.01, 30)}))
    both = {"0": ratios(0.05, 10), "10": ratios(0.3), "2": ratios(0.2)}
    log.append(step_record(2, mismatch=both["0"], ratio_by_staleness=both, stale_kv=ratios(0.9)))
    log.append(step_record(3, mismatch=ratios(math.nan), ratio_by_staleness={"0": ratios(math.nan)}))
    alarm = mismatch_alarm(report(LogprobDrift(by_staleness={0: ratios(0.07)})), 0.05)
    assert alarm is not None
    log.append(alarm)
    totals = drift_totals(read_metrics(tmp_path / "metrics.jsonl"))
    assert totals is not None
    assert totals.mismatch is not None
    assert totals.mismatch.tokens == 40
    assert totals.mismatch.mean_abs_log_ratio == pytest.approx(0.02)
    assert totals.mismatch.max_abs_log_ratio == pytest.approx(0.1)
    assert list(totals.by_staleness) == ["0", "2", "10"]
    assert (totals.capped_share, totals.padding_share) == (pytest.approx(0.2), pytest.approx(0.3))
    assert (totals.alarms, totals.last_alarm) == (1, 8)
    text = "\n".join(totals.lines())
    assert "MISMATCH ALARM in 1 steps, last in step 8" in text
    assert "stale_kv: 1.000" in text


def test_records_of_older_versions_have_no_totals() -> None:
    older = step_record(1).document() | {"kind": "step"}
    for key in ("mismatch", "ratio_by_staleness", "stale_kv"):
        del older[key]
    assert drift_totals([older]) is None


async def test_a_batch_has_the_staleness_of_each_version_that_sampled_it(tmp_path: Path) -> None:
    """2.1 was opened at 1.1, so 1.1 has the same weights."""
    store = await ReplayStore.open(tmp_path, cases.SMALL, cases.tasks(), run_id="run", seed=3)
    async with store:
        head = await store.open_epoch(None)
        batch = await filled(store, head, head)
        after = PolicyVersion(1, 1)
        await store.commit(batch.lease, StepReport(batch_id=batch.lease.batch_id, version=after, skipped=False))
        saved = CheckpointRef(path="x", version=after, batch_ids=(batch.lease.batch_id,), chain=store.status().chain)
        await store.checkpointed(saved)
        assert await store.open_epoch(saved) == PolicyVersion(2, 1)
        batch = await filled(store, PolicyVersion(2, 1), head, after)
        assert batch.staleness == {head: 1, after: 0}
        assert (batch.staleness_of(after), batch.staleness_of(PolicyVersion(2, 0))) == (0, 1)


async def filled(store: ReplayStore, version: PolicyVersion, *sampled: PolicyVersion) -> Batch:
    """The next batch, of new rollouts sampled by these versions."""
    orders = await store.issue(4, version)
    results = [cases.result(order, *sampled, reward=float(index % 2)) for index, order in enumerate(orders)]
    await store.offer_many(results)
    batch = await store.take(version, version.epoch, timeout_s=0.0)
    assert batch is not None
    return batch
