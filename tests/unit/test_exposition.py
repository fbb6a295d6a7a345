"""Metrics of a run: counts from its files, whoever reads them and whenever, in valid text of bounded size."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
import subprocess
import sys
import tracemalloc
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from aiohttp.web import Application
from benches.scrape import measure
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from headrace.actors.record.files.metrics import METRICS, MetricsLog, StallMetric, StationMeans, StationsMetric
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.record.files.running import FOLDER, RunningFile, RunningRollout, write_running
from headrace.actors.simulation.virtual.plan import SimulationPlan
from headrace.actors.simulation.virtual.simulate import run_plan
from headrace.actors.telemetry.prometheus import records, series, table
from headrace.actors.telemetry.prometheus.exposition import PATH, Exposition, metrics_handler
from headrace.actors.telemetry.prometheus.ledger import number
from headrace.actors.telemetry.prometheus.records import NewestRecords, name_of
from headrace.actors.telemetry.prometheus.series import Series
from headrace.buffer.audit.verify import verify
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.primitives.file_lock import FileLock
from headrace.buffer.trajectories.breakdown import Breakdown
from headrace.buffer.trajectories.types import Batch, Cause, RolloutOrder, RolloutResult, StepReport
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.serve.tracing.retention import RetentionConfig, older_files
from support import replay_cases as cases
from support.ledger_life import BROKE
from support.scrapes import (
    by_label,
    exposition_app,
    fresh,
    lasting,
    needs_promtool,
    refused_by_promtool,
    samples_of,
    scraped,
)
from support.striking import Moment

NOW = 1_800_000_000.0
GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in virtual time, with evaluations beside training and an archive; only read it."""
    folder = tmp_path_factory.mktemp("simulated") / "run"
    plan = SimulationPlan(steps=4, slots=32, batch_size=16, group_size=4, hosts=2, evaluate_every=2, heldout=8, boots=4)
    run_plan(plan, folder)
    return folder


def result_of(order: RolloutOrder, version: PolicyVersion, tool: str = "bash", **more: Any) -> RolloutResult:
    """Return a result with a breakdown of ten seconds, two of them in the queue, and a trace of its own."""
    breakdown = Breakdown(
        wall_s=10.0,
        parts_s={"queue": 2.0, "engine.decode": 4.5, f"tool.{tool}": 3.5},
        labels={"agent": "shell", "engines": ("e0",), "sampled_tokens": 40.0, "prompt_tokens": 300.0, "warm": True},
    )
    trace_id = f"{abs(hash(order.rollout_id)) % 16**16:032x}"
    return replace(cases.result(order, version, **more), breakdown=breakdown, trace_id=trace_id)


async def train(store: ReplayStore, batch: Batch, version: PolicyVersion) -> PolicyVersion:
    """Commit a step, and return the version after it."""
    after = PolicyVersion(version.epoch, version.step + 1)
    await store.commit(batch.lease, StepReport(batch_id=batch.lease.batch_id, version=after, skipped=False, metrics={}))
    return after


def test_counts_agree_with_the_audit_of_the_ledger(simulated: Path) -> None:
    values, report = scraped(fresh(simulated)), verify(simulated)
    states = by_label(values, "headrace_rollouts", "state")
    assert sum(states.values()) == report.issued > 60
    same = ("trained", "sealed", "waiting", "in_flight", "leased", "evicted", "filtered", "poison")
    assert {name: states[name] for name in same} == {name: getattr(report, name) for name in same}
    assert sum(by_label(values, "headrace_steps_total", "outcome").values()) == report.steps == 4
    assert values["headrace_trained_staleness_count", ()] == report.trained
    mean = values["headrace_trained_staleness_sum", ()] / values["headrace_trained_staleness_count", ()]
    assert mean == pytest.approx(report.mean_staleness)


def test_counts_agree_with_the_rows_of_ledger_and_archive(simulated: Path) -> None:
    values = scraped(fresh(simulated))
    counted: dict[tuple[str, str], int] = {}
    ended: set[tuple[str, int]] = set()
    for name in ("ledger.db", "archive.db"):
        with closing(sqlite3.connect(simulated / name)) as database:
            for purpose, query in (
                ("train", "SELECT rollout_id, attempt, cause FROM attempts WHERE ended_at_s NOTNULL"),
                ("evaluation", "SELECT rollout_id, attempt, cause FROM evaluations"),
            ):
                for rollout_id, attempt, cause in database.execute(query):
                    if (rollout_id, attempt) not in ended:
                        ended.add((rollout_id, attempt))
                        counted[cause, purpose] = counted.get((cause, purpose), 0) + 1
    found = {
        (dict(labels)["cause"], dict(labels)["purpose"]): value
        for (name, labels), value in values.items()
        if name == "headrace_attempts_total" and value
    }
    assert found == counted
    assert {purpose for _, purpose in counted} == {"train", "evaluation"}
    assert values["headrace_attempt_seconds_count", (("purpose", "evaluation"),)] == 24


def test_every_sample_is_of_a_metric_in_the_table_or_a_field_of_a_record(simulated: Path) -> None:
    known = {name for metric in table.TABLE for name in metric.samples}
    others = {sample.name for sample in samples_of(fresh(simulated))} - known
    of_records = [f"headrace_{record.kind}_" for record in METRICS]
    assert others
    assert [name for name in others if not name.startswith(tuple(of_records))] == []
    assert len({metric.name for metric in table.TABLE}) == len(table.TABLE)


@needs_promtool
def test_promtool_accepts_the_metrics_of_a_run(simulated: Path) -> None:
    text, _ = fresh(simulated).render("")
    assert b"headrace_part_seconds_bucket" in text
    assert refused_by_promtool(text) == ""
    assert refused_by_promtool(text + text) != "", "every series has two values"


@pytest.mark.parametrize(
    ("seed", "at"), [(3, 150), *(pytest.param(seed, 40 * seed, marks=pytest.mark.slow) for seed in range(4, 12))]
)
def test_a_reader_across_kills_and_restarts_counts_like_one_that_reads_afterwards(
    tmp_path: Path, seed: int, at: int
) -> None:
    """Lives of a run whose process is killed within a transaction, resumed from checkpoints that undo steps."""
    seen = fresh(tmp_path)
    for life, strike in enumerate((at, 3 * at, 2 * at, 5 * at, sys.maxsize)):
        arguments = [str(tmp_path), str(seed), str(life), Moment.STATEMENT.value, str(strike)]
        command = [sys.executable, "-m", "support.ledger_life", *arguments]
        ended = subprocess.run(command, capture_output=True, check=False, timeout=100)
        assert ended.returncode in (0, BROKE, -9), ended.stderr
        assert lasting(seen) == lasting(fresh(tmp_path)), f"after life {life}"
    report = verify(tmp_path)
    values = lasting(seen)
    assert by_label(values, "headrace_rollouts", "state")["trained"] == report.trained > 0
    assert values["headrace_steps_rolled_back_total", ()] == report.steps_rolled_back


async def test_a_reader_beside_the_run_counts_each_attempt_once(tmp_path: Path) -> None:
    clock = [NOW]
    seen = fresh(tmp_path)
    config = BufferConfig(batch_size=4, group_size=2, max_staleness=1)
    async with await ReplayStore.open(
        tmp_path, config, cases.tasks(4), run_id="r", seed=3, clock=lambda: clock[0]
    ) as store:
        version = await store.open_epoch(None)
        for _ in range(4):
            for order in await store.issue(8, version):
                clock[0] += 1
                infra = order.attempt == 1 and order.rollout_id.endswith("1")
                given = cases.ended(order, Cause.INFRA) if infra else result_of(order, version, tool=f"t{clock[0]}")
                await store.offer_many([given])
                clock[0] -= 3600 * infra
                assert lasting(seen) == lasting(fresh(tmp_path))
            if (batch := await store.take(version, version.epoch, timeout_s=0)) is None:
                continue
            version = await train(store, batch, version)
            assert lasting(seen) == lasting(fresh(tmp_path))
    causes = by_label(lasting(seen), "headrace_attempts_total", "cause")
    assert causes["infra"] > 0 and causes["solved"] > 0
    assert by_label(lasting(seen), "headrace_steps_total", "outcome")["updated"] > 0


async def test_the_time_of_a_straggler_counts_once_though_it_is_told_after_its_end(tmp_path: Path) -> None:
    """Its group was sealed without it, and later the clock was set back."""
    clock = [NOW]
    config = BufferConfig(batch_size=4, group_size=4, max_staleness=1, rule="count(3)", unfinished="abort")
    seen = fresh(tmp_path)
    async with await ReplayStore.open(
        tmp_path, config, cases.tasks(1), run_id="r", seed=3, clock=lambda: clock[0]
    ) as store:
        version = await store.open_epoch(None)
        *others, late = await store.issue(4, version)
        await store.offer_many([result_of(order, version) for order in others])
        values = lasting(seen)
        assert by_label(values, "headrace_attempts_total", "cause")["cancelled"] == 1
        assert by_label(values, "headrace_part_seconds_count", "part")["engine.decode"] == 3
        clock[0] -= 3600.0
        told = replace(cases.ended(late, Cause.CANCELLED), breakdown=result_of(late, version).breakdown)
        await store.offer_many([told])
        for _ in range(2):
            values = lasting(seen)
            assert by_label(values, "headrace_attempts_total", "cause")["cancelled"] == 1
            assert by_label(values, "headrace_part_seconds_count", "part")["engine.decode"] == 4
        assert values == lasting(fresh(tmp_path))


async def test_what_was_not_trained_is_counted_as_waste_when_its_group_has_ended(tmp_path: Path) -> None:
    config = BufferConfig(batch_size=2, group_size=2, max_staleness=1)
    async with await ReplayStore.open(tmp_path, config, cases.tasks(1), run_id="r", seed=3, clock=lambda: NOW) as store:
        version = await store.open_epoch(None)
        first, second = await store.issue(2, version)
        await store.offer_many([cases.ended(first, Cause.INFRA), result_of(second, version, reward=0.0)])
        values = scraped(fresh(tmp_path))
        assert values["headrace_wasted_attempts_total", (("reason", "infra"),)] == 0, "the group may still end well"
        [again] = [order for order in await store.issue(2, version) if order.rollout_id == first.rollout_id]
        await store.offer_many([result_of(again, version)])
        batch = await store.take(version, version.epoch, timeout_s=0)
        assert batch is not None
        await train(store, batch, version)
    values = scraped(fresh(tmp_path))
    wasted = by_label(values, "headrace_wasted_attempts_total", "reason")
    assert {reason for reason, number in wasted.items() if number} == {"infra"}
    assert wasted["infra"] == 1
    assert values["headrace_sandbox_seconds_total", (("purpose", "train"),)] == 16.0, "not the two seconds of queueing"
    assert by_label(values, "headrace_tokens_total", "kind") == {"prompt": 600.0, "cached": 0.0, "sampled": 80.0}


async def test_exemplars_are_the_newest_trace_of_each_bucket_and_exist_in_the_ledger(tmp_path: Path) -> None:
    clock = [NOW]
    async with await ReplayStore.open(
        tmp_path, cases.SMALL, cases.tasks(2), run_id="r", seed=3, clock=lambda: clock[0]
    ) as store:
        version = await store.open_epoch(None)
        orders = await store.issue(4, version)
        for order in orders:
            clock[0] += 1
            await store.offer_many([result_of(order, version)])
    found = [sample for sample in samples_of(fresh(tmp_path)) if sample.exemplar is not None]
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as database:
        newest = database.execute("SELECT trace_id FROM attempts ORDER BY ended_at_s DESC LIMIT 1").fetchone()[0]
    decode = [each for each in found if each.labels.get("part") == "engine.decode"]
    assert [(each.labels["le"], each.exemplar and each.exemplar.labels) for each in decode] == [
        ("10.0", {"trace_id": newest})
    ]
    assert decode[0].exemplar is not None
    assert decode[0].exemplar.value == 4.5
    assert {each.name for each in found} >= {"headrace_attempt_seconds_bucket", "gen_ai_client_token_usage_bucket"}


async def test_names_beyond_the_limit_are_summed_into_other_in_the_same_way_after_a_restart(tmp_path: Path) -> None:
    clock = [NOW]
    seen = fresh(tmp_path)
    config = cases.SMALL.model_copy(update={"group_size": 8, "batch_size": 80})
    async with await ReplayStore.open(
        tmp_path, config, cases.tasks(20), run_id="r", seed=3, clock=lambda: clock[0]
    ) as store:
        version = await store.open_epoch(None)
        for place, order in enumerate(await store.issue(80, version)):
            clock[0] += 1
            await store.offer_many([result_of(order, version, tool=f"tool-{place}", host=f"host-{place}")])
            if place % 20 == 0:
                scraped(seen)
    values = lasting(seen)
    assert values == lasting(fresh(tmp_path))
    parts = by_label(values, "headrace_part_seconds_count", "part")
    assert len(parts) <= series.MAX_VALUES
    assert sum(parts.values()) == 3 * 80
    assert parts["engine.decode"] == 80, "the parts with a fixed name keep it"
    hosts = by_label(values, "headrace_host_attempts_total", "host")
    assert (len(hosts), hosts["other"]) == (series.MAX_VALUES, 80 - series.MAX_VALUES + 1)


def test_a_million_values_of_a_label_take_no_more_memory_and_output_than_fifty() -> None:
    counts = Series()
    for place in range(990_000):
        counts.of(table.HOST_ATTEMPTS, str(place), "infra").inc()
    tracemalloc.start()
    try:
        for place in range(990_000, 1_000_000):
            counts.of(table.HOST_ATTEMPTS, str(place), "infra").inc()
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    [family] = counts.registry.collect()
    found = [sample for sample in family.samples if sample.name.endswith("_total")]
    assert len(found) == series.MAX_VALUES
    assert sum(sample.value for sample in found) == 1_000_000
    assert held_bytes < 10_000


NAMES = ('a"b\\c', "two\nlines", "nul\x00", "\ud800", "עברית", "x" * 500, "# EOF", "")


@pytest.mark.parametrize("name", NAMES)
def test_any_name_gives_text_that_both_parsers_read(name: str) -> None:
    counts = Series()
    counts.of(table.HOST_ATTEMPTS, name, "infra").inc(7)
    for generate, parse in ((generate_openmetrics, parse_openmetrics), (generate_latest, parse_plain)):
        families = parse(generate(counts.registry).decode())
        [sample] = (
            each for family in families for each in family.samples if each.name == "headrace_host_attempts_total"
        )
        assert sample.value == 7
        assert len(sample.labels["host"]) == min(len(name), series.MAX_CHARACTERS)
        assert sample.labels["host"].isprintable()


@needs_promtool
async def test_promtool_accepts_strange_names_from_the_ledger(tmp_path: Path) -> None:
    async with await ReplayStore.open(tmp_path, cases.SMALL, cases.tasks(2), run_id="r", seed=3) as store:
        version = await store.open_epoch(None)
        orders = await store.issue(4, version)
        await store.offer_many([result_of(order, version, tool='b"\n', host=NAMES[0]) for order in orders])
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as database, database:
        strange = [name for name in NAMES if name != "\ud800"]
        for order, name in zip(orders, strange, strict=False):
            database.execute(
                "UPDATE attempts SET host = ?, trace_id = ? WHERE rollout_id = ?", (name, name, order.rollout_id)
            )
    text, _ = fresh(tmp_path).render("")
    assert refused_by_promtool(text) == ""
    assert by_label(scraped(fresh(tmp_path)), "headrace_host_attempts_total", "cause")["solved"] == 4
    exemplars = {each.exemplar.labels["trace_id"] for each in samples_of(fresh(tmp_path)) if each.exemplar}
    assert exemplars
    assert all(len(trace) <= series.MAX_CHARACTERS and trace.isprintable() for trace in exemplars)


def test_each_number_of_the_newest_record_is_a_gauge(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    busy = StationMeans(in_use=0.5, capacity=1.0, mean_s=None)
    for in_flight in (7.0, 8.0):
        log.append(
            StationsMetric(
                seconds=10.0,
                in_flight=in_flight,
                held_up_by="learner",
                stations={"learner": busy},
                pacing={"rollout_limit": 9, "slowed_by": "x"},
            ),
            time_s=NOW,
        )
    log.append(StallMetric(ended=True, reason="no step"), time_s=NOW + 1)
    push = b'"seconds":{"gate":1.5,"open":0.5},"quarantined":["e0","e1"],"updated":[],"gate_s":[0.5],"stall_share":null'
    log.write([b'{"kind":"push","time_s":1,"total_s":2,%s}\n' % push])
    found = {
        (name.removeprefix("headrace_"), *(value for _, value in labels)): value
        for (name, labels), value in scraped(fresh(tmp_path)).items()
        if name.startswith(("headrace_stations_", "headrace_stall_", "headrace_push_"))
    }
    assert found == {
        ("stations_seconds",): 10.0,
        ("stations_in_flight",): 8.0,
        ("stations_timestamp_seconds",): NOW,
        ("stations_rollout_limit",): 9.0,
        ("stations_stations", "in_use", "learner"): 0.5,
        ("stations_stations", "capacity", "learner"): 1.0,
        ("stall_ended",): 1.0,
        ("stall_timestamp_seconds",): NOW + 1,
        ("push_timestamp_seconds",): 1.0,
        ("push_total_seconds",): 2.0,
        ("push_seconds", "gate"): 1.5,
        ("push_seconds", "open"): 0.5,
        ("push_quarantined",): 2.0,
        ("push_updated",): 0.0,
    }
    assert name_of("push", "total_s") == "headrace_push_total_seconds"


def test_records_give_a_bounded_number_of_series_of_distinct_names(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    many = ",".join(f'"{number}":1' for number in range(records.MAX_SERIES))
    log.write(
        [
            b'{"kind":"step","time_s":1,"a/b":1,"a.b":2,"c\\nd":{"\\"x\\n":3},"nested":{"a":{"b":{"c":1}}}}\n',
            # The name of a counter of the ledger.
            b'{"kind":"attempts","time_s":1,"total":5}\n',
            b'{"kind":"z","time_s":1,"many":{%s}}\n' % many.encode(),
            *(b'{"kind":"k%d"}\n' % number for number in range(records.MAX_KINDS)),
        ]
    )
    exposition = fresh(tmp_path)
    values = scraped(exposition)
    assert values["headrace_step_a_b", ()] == 1.0
    assert values["headrace_step_c_d", (("name", '"x\N{REPLACEMENT CHARACTER}'),)] == 3.0
    # A counter of the ledger has this name.
    assert ("headrace_attempts_total", ()) not in values
    # Before the many come three of the step, and the times of two records.
    assert sum(name == "headrace_z_many" for name, _ in values) == records.MAX_SERIES - 5
    assert values["headrace_metrics_left_out", ()] == len(("a.b", "total")) + 5
    assert values["headrace_metrics_bad_lines", ()] == 3


def test_sums_do_not_depend_on_the_order_of_the_attempts() -> None:
    values = [random.Random(seed).uniform(0, 10_000) for seed in range(1000)]
    sums, plain = set(), set()
    for seed in range(20):
        random.Random(seed).shuffle(values)
        counts = Series()
        for value in values:
            counts.of(table.SANDBOX_S, "train").inc(number(value))
        [family] = counts.registry.collect()
        sums.add(next(sample.value for sample in family.samples if sample.name.endswith("_total")))
        total = 0.0
        for value in values:
            total += value
        plain.add(total)
    assert len(sums) == 1
    assert len(plain) > 1, "sums of the values themselves differ"
    assert sums.pop() == pytest.approx(plain.pop(), abs=1e-3)
    assert [number(value) for value in (-1, float("nan"), float("inf"), None, "3", True)] == [0, 0, 0, 0, 0, 1]


def stations(in_flight: float) -> StationsMetric:
    return StationsMetric(seconds=10.0, in_flight=in_flight, held_up_by=None, stations={})


def test_counts_do_not_change_when_old_metrics_files_are_removed(simulated: Path, tmp_path: Path) -> None:
    before = lasting(fresh(simulated))
    with (
        closing(sqlite3.connect(simulated / "ledger.db")) as source,
        closing(sqlite3.connect(tmp_path / "ledger.db")) as copy,
    ):
        source.backup(copy)
    (tmp_path / "archive.db").write_bytes((simulated / "archive.db").read_bytes())
    log = MetricsLog(tmp_path / "metrics.jsonl", RetentionConfig(file_bytes=4096, metrics_bytes=8192))
    seen = fresh(tmp_path)
    for place in range(400):
        log.append(stations(place))
        if place % 39 == 0:
            assert scraped(seen)["headrace_stations_in_flight", ()] == place
    assert older_files(tmp_path / "metrics.jsonl")[0].stem > "metrics-000003", "some were removed"
    after = lasting(fresh(tmp_path))
    assert after["headrace_stations_in_flight", ()] == 399
    counts = {key: value for key, value in before.items() if key[0].endswith(("_total", "_count", "_bucket", "_sum"))}
    assert {key: after[key] for key in counts} == counts


def test_an_archive_that_was_away_is_counted_when_it_is_back(
    simulated: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        closing(sqlite3.connect(simulated / "ledger.db")) as source,
        closing(sqlite3.connect(tmp_path / "ledger.db")) as copy,
    ):
        source.backup(copy)
    seen = fresh(tmp_path)
    lost = by_label(lasting(seen), "headrace_attempts_total", "purpose")
    assert "archive.db is missing" in caplog.text
    shutil.copy(simulated / "archive.db", tmp_path / "archive.db")
    found = lasting(seen)
    assert found == lasting(fresh(tmp_path))
    assert by_label(found, "headrace_attempts_total", "purpose")["train"] > lost["train"]


@pytest.mark.parametrize(
    "breakdown",
    [
        "{",
        "[]",
        '{"parts_s": {"boot": "long"}, "labels": {}}',
        '{"parts_s": {"boot": NaN}, "labels": {}}',
        '{"parts_s": {"boot": -1.0}, "labels": {"cpu_s": -5, "engines": [["e"], {}], "agent": ["a"], "warm": null}}',
        '{"parts_s": {"own": 1.0}, "labels": {"sampled_tokens": "many", "engines": "e", "agent": {}}}',
    ],
)
async def test_a_strange_breakdown_costs_its_own_figures_only(breakdown: str, tmp_path: Path) -> None:
    async with await ReplayStore.open(tmp_path, cases.SMALL, cases.tasks(2), run_id="r", seed=3) as store:
        version = await store.open_epoch(None)
        first, *others = await store.issue(4, version)
        await store.offer_many([result_of(order, version) for order in (first, *others)])
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as database, database:
        database.execute("UPDATE attempts SET breakdown = ? WHERE rollout_id = ?", (breakdown, first.rollout_id))
    values = scraped(fresh(tmp_path))
    assert by_label(values, "headrace_attempts_total", "cause")["solved"] == 4
    assert by_label(values, "headrace_part_seconds_count", "part")["engine.decode"] == 3
    assert min(values.values()) >= 0


def test_torn_and_foreign_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    newest = NewestRecords(path)
    log.append(StallMetric(ended=False, reason="first"), time_s=1.0)
    log.write([b"\x00\xff not json\n", b"[1]\n", b'{"kind": 7}\n'])
    # A reader may see the first half of a line that is being written; a writer never continues a torn one.
    with path.open("ab") as file:
        file.write(b'{"kind":"stall","time_s":2,"ended":true,')
    newest.update()
    assert (newest.newest["stall"]["reason"], newest.bad_lines) == ("first", 3), "the last line is not whole yet"
    with path.open("ab") as file:
        file.write(b'"reason":"second"}\n')
    newest.update()
    assert (newest.newest["stall"]["reason"], newest.bad_lines) == ("second", 3)


def test_a_folder_without_a_ledger_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    exposition = fresh(tmp_path)
    for _ in range(2):
        values = scraped(exposition)
        assert values["headrace_ledger_readable", ()] == 0
        assert "headrace_disk_free_bytes" in {name for name, _ in values}
    assert caplog.text.count("has no ledger.db") == 1


async def test_a_ledger_of_a_newer_schema_is_refused(tmp_path: Path) -> None:
    async with await ReplayStore.open(tmp_path, cases.SMALL, cases.tasks(2), run_id="r", seed=3) as store:
        await store.open_epoch(None)
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as database:
        database.execute("PRAGMA user_version = 999")
    assert scraped(fresh(tmp_path))["headrace_ledger_readable", ()] == 0


def test_the_golden_ledger_answers(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "ledger", tmp_path / "run")
    exposition = fresh(tmp_path / "run")
    values = lasting(exposition)
    report = verify(tmp_path / "run")
    assert by_label(values, "headrace_rollouts", "state")["trained"] == report.trained > 0
    assert sum(by_label(values, "headrace_part_seconds_count", "part").values()) > 0
    assert lasting(exposition) == values


async def test_a_rollout_far_beyond_its_cohort_is_stuck_while_the_run_is_driven(tmp_path: Path) -> None:
    clock = [NOW]
    config = cases.SMALL.model_copy(update={"group_size": 12, "batch_size": 12})
    async with await ReplayStore.open(
        tmp_path, config, cases.tasks(1), run_id="r", seed=3, clock=lambda: clock[0]
    ) as store:
        version = await store.open_epoch(None)
        orders = await store.issue(12, version)
        clock[0] = NOW + 10
        await store.offer_many([cases.result(order, version) for order in orders[:9]])
    seen = RunningRollout(
        rollout_id=orders[9].rollout_id,
        attempt=1,
        task=orders[9].task_id,
        purpose="train",
        agent="shell",
        host="h",
        part="tool.bash",
        started_s=NOW,
        part_since_s=NOW,
    )
    write_running(tmp_path / FOLDER, RunningFile(worker="w", node="n", pid=1, written_s=NOW + 31, rollouts=(seen,)))
    exposition = Exposition(RunDirectory.at(tmp_path), clock=lambda: clock[0])
    clock[0] = NOW + 32
    with FileLock(RunDirectory.at(tmp_path).lock):
        values = scraped(exposition)
        assert values["headrace_stuck_rollouts", ()] == 3
        assert values["headrace_oldest_rollout_seconds", ()] == 32
        assert by_label(values, "headrace_running_rollouts", "part") == {"dispatch": 2.0, "tool.bash": 1.0}
        clock[0] = NOW + 29
        assert scraped(exposition)["headrace_stuck_rollouts", ()] == 0, "three times the p95 are 30 s"
        clock[0] = NOW + 99
        assert by_label(scraped(exposition), "headrace_running_rollouts", "part") == {"dispatch": 2.0}, (
            "a silent worker"
        )
    values = scraped(exposition)
    assert values["headrace_stuck_rollouts", ()] == 0, "nobody drives the run"
    assert by_label(values, "headrace_running_rollouts", "part") == {}


async def serve(app: Application) -> TestClient[Any, Any]:
    client = TestClient(TestServer(app))
    await client.start_server()
    return client


async def test_the_format_follows_the_request(simulated: Path) -> None:
    async with await serve(exposition_app(simulated)) as client:
        asked = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
        async with client.get(PATH, headers={"Accept": asked}) as answer:
            assert (answer.status, answer.content_type) == (200, "application/openmetrics-text")
            text = await answer.text()
        assert text.endswith("# EOF\n")
        assert {family.name for family in parse_openmetrics(text)} >= {"headrace_attempts", "headrace_part_seconds"}
        for accept in ("text/plain", "*/*", "", "application/openmetrics-text;version=x"):
            async with client.get(PATH, headers={"Accept": accept}) as answer:
                assert (answer.status, answer.content_type) == (200, "text/plain")
                plain = await answer.text()
            assert "# EOF" not in plain
            assert {family.name for family in parse_plain(plain)} >= {"headrace_attempts", "headrace_part_seconds"}


@pytest.mark.slow
def test_the_bench_of_scrapes_reads_a_simulated_run(tmp_path: Path) -> None:
    figures = measure(tmp_path, rollouts=128, run_dir=None)
    assert figures["attempts"] >= 128
    assert figures["memory_mb"] < 300


async def test_many_scrapes_at_once_get_the_same_counts(simulated: Path) -> None:
    async with await serve(exposition_app(simulated)) as client:

        async def attempts() -> list[str]:
            async with client.get(PATH) as answer:
                return [
                    line for line in (await answer.text()).splitlines() if line.startswith("headrace_attempts_total")
                ]

        first, *others = await asyncio.gather(*(attempts() for _ in range(8)))
    assert first
    assert all(other == first for other in others)


async def test_a_scrape_does_not_wait_for_a_long_reading(simulated: Path) -> None:
    exposition = fresh(simulated)
    app = Application()
    app.router.add_get("/hasty", metrics_handler(exposition, wait_s=0))
    async with await serve(app) as client, client.get("/hasty") as answer:
        assert answer.status == 503
        assert "Retry-After" in answer.headers
