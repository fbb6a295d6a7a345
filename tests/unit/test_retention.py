"""Retention of a run's own records: files rotate, readers read across them, the oldest are removed."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest

from headrace.actors.record.files.housekeeping import keep_house, thin_out_evaluations
from headrace.actors.record.files.metrics import (
    MetricsLog,
    RolloutPhasesMetric,
    each_metric,
    last_metric,
    read_metrics,
)
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.serve.tracing.retention import DAY_S, RetentionConfig, RotatingFile, Tail, kept_files, older_files

SMALL = RetentionConfig(file_bytes=4096, metrics_bytes=16384, log_bytes=8192, evaluations_bytes=4096, days=30)


def ended(rollouts: float, phase: str = "agent") -> RolloutPhasesMetric:
    return RolloutPhasesMetric(rollouts=float(rollouts), phases_s={phase: 1.0})


def test_inline_fields_become_keys_of_the_json_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(RolloutPhasesMetric(rollouts=2.0, phases_s={"boot": 0.5, "agent": 3.0}), time_s=7.0)
    line = b'{"kind":"rollout_phases","time_s":7.0,"rollouts":2.0,"boot":0.5,"agent":3.0}\n'
    assert (tmp_path / "metrics.jsonl").read_bytes() == line


def test_metrics_start_a_new_file_at_a_size_and_are_read_across_files(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, SMALL)
    for number in range(200):
        log.append(ended(number))
    assert (
        len(kept_files(path))
        == 200 * len(path.with_name("metrics-000001.jsonl").read_bytes().splitlines()[0]) // 4096 + 1
    )
    assert [record["rollouts"] for record in read_metrics(path)] == list(range(200))
    assert last_metric(path, "rollout_phases")["rollouts"] == 199
    assert last_metric(path, "push") is None


def test_the_oldest_files_are_removed_and_the_newest_is_retained(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, SMALL)
    for number in range(2000):
        log.append(ended(number, "x" * 50))
    assert sum(older.stat().st_size for older in older_files(path)) <= SMALL.metrics_bytes
    left = [record["rollouts"] for record in read_metrics(path)]
    assert left == list(range(int(left[0]), 2000))
    assert left[0] > 0


def test_files_past_their_maximum_age_are_removed_whatever_their_size(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, SMALL)
    while len(older_files(path)) < 2:
        log.append(ended(0, "x" * 500))
    first, second = older_files(path)
    long_ago = first.stat().st_mtime - 31 * DAY_S
    os.utime(first, (long_ago, long_ago))
    while len(older_files(path)) < 2 or first.exists():
        log.append(ended(0, "x" * 500))
    assert second.exists()


def append_some(path: Path, process: int) -> None:
    log = MetricsLog(path, SMALL.model_copy(update={"metrics_bytes": 1 << 30}))
    for number in range(300):
        log.append(ended(number, f"process-{process}"))


def test_concurrent_processes_lose_no_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    # No fork of this process: Ray may have threads in it.
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(append_some, path), range(3)))
    records = read_metrics(path)
    written = [(next(key for key in record if key.startswith("process")), record["rollouts"]) for record in records]
    assert sorted(written) == [(f"process-{process}", number) for process in range(3) for number in range(300)]
    assert len(older_files(path)) > 1


@pytest.mark.parametrize(
    "bad", [b"\x00\xff\xfe\x80" * 40, b'{"kind": "step", "st', b'["step"]', b"17", b'{"step": 3}', b""]
)
def test_torn_and_binary_lines_are_skipped(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.append(ended(1))
    with path.open("ab") as file:
        file.write(bad + b"\n")
    log.append(ended(2))
    with path.open("ab") as file:
        file.write(bad)
    assert [record["rollouts"] for record in each_metric(path, ("rollout_phases",))] == [1, 2]
    assert [record["rollouts"] for record in each_metric(path)] == [1, 2]
    assert last_metric(path, "rollout_phases")["rollouts"] == 2


def test_logs_of_other_processes_are_truncated(tmp_path: Path) -> None:
    directory = RunDirectory(path=tmp_path)
    (tmp_path / "engines").mkdir()
    log = tmp_path / "engines" / "engine-0.log"
    with log.open("ab", buffering=0) as writer:
        for _ in range(4):
            writer.write(b"x" * 4096)
            keep_house(directory, SMALL)
        writer.write(b"last")
    assert log.read_bytes() == b"last"
    assert [older.name for older in older_files(log)] == ["engine-0-000003.log", "engine-0-000004.log"]


def test_ended_evaluations_lose_their_rollouts_and_keep_their_results(tmp_path: Path) -> None:
    for number in range(4):
        folder = tmp_path / f"step-{number}"
        (folder / "rollouts" / "task-0").mkdir(parents=True)
        (folder / "rollouts" / "task-0" / "conversation.jsonl").write_bytes(b"x" * 2000)
        (folder / "results.jsonl").write_bytes(b"{}\n")
        if number != 3:
            (folder / "summary.json").write_bytes(b"{}")
        os.utime(folder, (1.8e9 + number, 1.8e9 + number))
    removed = thin_out_evaluations(tmp_path, SMALL, now_s=1.8e9)
    assert removed == (tmp_path / "step-0" / "rollouts",)
    assert (tmp_path / "step-0" / "results.jsonl").exists()
    assert (tmp_path / "step-3" / "rollouts").exists(), "it has not ended"
    assert len(thin_out_evaluations(tmp_path, SMALL, now_s=1.8e9 + 31 * DAY_S)) == 2


def test_a_tail_reads_each_line_once_over_rotations_and_removals(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail, read = Tail(path), []
    log = RotatingFile(path, SMALL)
    for number in range(4000):
        log.append(b"%06d %s\n" % (number, b"x" * (number % 97)))
        if number % 37 == 0:
            read += [int(line[:6]) for line in tail.lines()]
    read += [int(line[:6]) for line in tail.lines()]
    assert read == list(range(4000))
    assert len(older_files(path)) > 1


def test_a_tail_waits_for_the_end_of_a_line_and_begins_at_the_newest_files(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for number in range(1, 4):
        (tmp_path / f"metrics-00000{number}.jsonl").write_bytes(b"older %d\n" % number)
    path.write_bytes(b"new\nhal")
    tail = Tail(path, newest=2)
    assert list(tail.lines()) == [b"older 3\n", b"new\n"]
    with path.open("ab") as file:
        file.write(b"f\n")
    assert list(tail.lines()) == [b"half\n"]
    path.write_bytes(b"cut\n")
    assert list(tail.lines()) == [b"cut\n"]
