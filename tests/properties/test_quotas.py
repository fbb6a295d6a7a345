"""The choice of runs to start, for any records and quotas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.actors.cluster.runs.quotas import Quota, Quotas, load_quotas, next_to_start, refuse_oversized
from headrace.actors.cluster.runs.records import ActualState, Demands, RunId, RunRecord
from headrace.actors.errors import ConfigError, QuotaExceeded

OWNERS = ("alice", "bob")
LIMITS = st.one_of(st.none(), st.integers(0, 8))
QUOTA = st.builds(Quota, runs=LIMITS, rollouts=LIMITS, engines=LIMITS)
QUOTAS = st.builds(Quotas, default=QUOTA, owners=st.dictionaries(st.sampled_from(OWNERS), QUOTA))
NOW_S = 100.0


def record(position: int, owner: str, actual: ActualState, demands: Demands, next_try_s: float | None) -> RunRecord:
    return RunRecord(
        run_id=RunId(f"{position:032x}"),
        name=f"run-{position}",
        owner=owner,
        idempotency_key=str(position),
        submitted_s=0.0,
        position=position,
        actual=actual,
        next_try_s=next_try_s if actual is ActualState.WAITING else None,
        config_digest="",
        headrace_version="",
        demands=demands,
    )


@st.composite
def records(draw: st.DrawFn) -> list[RunRecord]:
    parts = st.tuples(
        st.sampled_from(OWNERS),
        st.sampled_from([ActualState.WAITING, *ActualState]),
        st.builds(Demands, rollouts=st.integers(0, 6), engines=st.integers(0, 3)),
        st.sampled_from([None, None, None, NOW_S - 1, NOW_S + 1]),
    )
    made = [record(position, *values) for position, values in enumerate(draw(st.lists(parts, max_size=12)))]
    return draw(st.permutations(made))


def held(runs: list[RunRecord]) -> tuple[int, int, int]:
    return len(runs), sum(run.demands.rollouts for run in runs), sum(run.demands.engines for run in runs)


def holds(run: RunRecord) -> bool:
    return run.is_live and (run.actual is not ActualState.WAITING or run.next_try_s is not None)


@given(records(), QUOTAS)
def test_every_waiting_run_is_started_or_has_a_reason(runs: list[RunRecord], quotas: Quotas) -> None:
    plan = next_to_start(runs, quotas, now_s=NOW_S)
    waiting = {run.run_id for run in runs if run.actual is ActualState.WAITING}
    assert {*plan.start, *plan.reasons} == waiting
    assert not set(plan.start) & set(plan.reasons)
    assert len(set(plan.start)) == len(plan.start)
    assert all(reason and "\n" not in reason for reason in plan.reasons.values())


@given(records(), QUOTAS)
def test_no_start_exceeds_a_quota(runs: list[RunRecord], quotas: Quotas) -> None:
    start = set(next_to_start(runs, quotas, now_s=NOW_S).start)
    for owner in OWNERS:
        own = [run for run in runs if run.owner == owner]
        began = [run for run in own if run.run_id in start and not holds(run)]
        quota = quotas.of(owner)
        after = held([run for run in own if holds(run)] + began)
        new = held(began)
        for limit, amount, added in zip((quota.runs, quota.rollouts, quota.engines), after, new, strict=True):
            assert limit is None or amount <= limit or not added


@given(records(), QUOTAS)
def test_no_run_overtakes_another_of_its_owner(runs: list[RunRecord], quotas: Quotas) -> None:
    start = set(next_to_start(runs, quotas, now_s=NOW_S).start)
    for owner in OWNERS:
        queue = sorted(
            (
                run
                for run in runs
                if run.owner == owner and run.actual is ActualState.WAITING and run.next_try_s is None
            ),
            key=lambda run: run.position,
        )
        starts = [run.run_id in start for run in queue]
        assert starts == sorted(starts, reverse=True)


@given(records(), QUOTAS)
def test_the_first_of_a_queue_waits_only_for_what_would_exceed_a_quota(runs: list[RunRecord], quotas: Quotas) -> None:
    plan = next_to_start(runs, quotas, now_s=NOW_S)
    start = set(plan.start)
    for owner in OWNERS:
        own = sorted((run for run in runs if run.owner == owner), key=lambda run: run.position)
        stuck = [
            run
            for run in own
            if run.actual is ActualState.WAITING and run.next_try_s is None and run.run_id not in start
        ]
        if not stuck:
            continue
        quota = quotas.of(owner)
        amounts = held([run for run in own if holds(run) or run.run_id in start])
        needs = (1, stuck[0].demands.rollouts, stuck[0].demands.engines)
        limits = (quota.runs, quota.rollouts, quota.engines)
        over = [
            name
            for name, limit, amount, need in zip(("runs", "rollouts", "engines"), limits, amounts, needs, strict=True)
            if limit is not None and need and amount + need > limit
        ]
        assert any(f"needs {name} " in plan.reasons[stuck[0].run_id] for name in over)
        assert all(f"behind {stuck[0].name} " in plan.reasons[run.run_id] for run in stuck[1:])


@given(records(), QUOTAS)
def test_owners_do_not_affect_each_other(runs: list[RunRecord], quotas: Quotas) -> None:
    plan = next_to_start(runs, quotas, now_s=NOW_S)
    for owner in OWNERS:
        own = [run for run in runs if run.owner == owner]
        alone = next_to_start(own, quotas, now_s=NOW_S)
        ids = {run.run_id for run in own}
        assert alone.start == tuple(run for run in plan.start if run in ids)
        assert alone.reasons == {run: reason for run, reason in plan.reasons.items() if run in ids}


@given(records(), QUOTAS)
def test_what_fits_alone_starts_in_the_end(runs: list[RunRecord], quotas: Quotas) -> None:
    """Runs start and finish, until nothing changes: what then waits could never start."""
    table = {run.run_id: replace(run, next_try_s=None) for run in runs}
    while True:
        plan = next_to_start(table.values(), quotas, now_s=NOW_S)
        live = [run.run_id for run in table.values() if holds(run)]
        if not plan.start and not live:
            break
        for run_id in (*plan.start, *live):
            table[run_id] = replace(table[run_id], actual=ActualState.FINISHED)
    for owner in OWNERS:
        queue = sorted(
            (run for run in table.values() if run.owner == owner and run.is_live), key=lambda run: run.position
        )
        if queue:
            with pytest.raises(QuotaExceeded, match="raise the quota"):
                refuse_oversized(owner, queue[0].demands, quotas)


def test_runs_that_start_together_share_the_quota() -> None:
    waiting = [record(number, "alice", ActualState.WAITING, Demands(rollouts=4), None) for number in range(4)]
    assert next_to_start(waiting, Quotas(default=Quota(runs=2)), now_s=0.0).start == tuple(
        run.run_id for run in waiting[:2]
    )
    assert len(next_to_start(waiting, Quotas(default=Quota(rollouts=12)), now_s=0.0).start) == 3
    assert len(next_to_start(waiting, Quotas(), now_s=0.0).start) == 4


def test_the_reason_names_the_limit_and_who_holds_it() -> None:
    running = record(1, "alice", ActualState.RUNNING, Demands(rollouts=400, engines=1), None)
    second = record(2, "alice", ActualState.WAITING, Demands(rollouts=256, engines=1), None)
    third = record(3, "alice", ActualState.WAITING, Demands(), None)
    other = record(4, "bob", ActualState.WAITING, Demands(rollouts=256), None)
    quotas = Quotas(default=Quota(rollouts=512))
    plan = next_to_start([third, second, running, other], quotas, now_s=0.0)
    assert plan.start == (other.run_id,)
    assert plan.reasons == {
        second.run_id: "needs rollouts 256; the quota of alice is 512, held: 400 by run-1 (00000000)",
        third.run_id: "waits behind run-2 (00000000), which came earlier",
    }


def test_quotas_are_read_from_toml_and_json(tmp_path: Path) -> None:
    toml, json = tmp_path / "quotas.toml", tmp_path / "quotas.json"
    toml.write_text("[default]\nruns = 2\nrollouts = 512\n[owners.alice]\nruns = 4\n")
    json.write_text('{"default": {"runs": 2, "rollouts": 512}, "owners": {"alice": {"runs": 4}}}')
    for path in (toml, json):
        quotas = load_quotas(path)
        assert quotas.of("alice") == Quota(runs=4, rollouts=512)
        assert quotas.of("bob") == Quota(runs=2, rollouts=512)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[default]\nrun = 2", r"default\.run: Extra inputs .* the tables \[default\]"),
        ("[default]\nruns = -1", r"default\.runs: .*greater than or equal to 0"),
        ("[default]\nruns = '2'", r"default\.runs: .*valid integer"),
        ("[owners.'a b']\nruns = 1", "names of owners"),
        ("[default", "cannot be parsed"),
    ],
)
def test_wrong_quotas_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "quotas.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        load_quotas(path)
    assert "\n" not in str(raised.value)


def test_an_unreadable_file_of_quotas_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name a readable file"):
        load_quotas(tmp_path / "none.toml")
