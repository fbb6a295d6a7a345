"""Span files: bounded, compressed, and with an exact count of what is lost."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.telemetry.spans import limit
from headrace.actors.telemetry.spans.limit import keep_within, make_room
from headrace.actors.telemetry.spans.store import SpanFolder
from headrace.buffer.primitives.file_lock import FileLock
from headrace.serve.tracing.telemetry import TelemetryConfig, TelemetryHandle, configure
from support.full_disks import files_of_at_most

WRITER = """
import sys
from pathlib import Path
from headrace.buffer.primitives.file_lock import FileLock
from headrace.serve.tracing.telemetry import TelemetryConfig, configure
config = TelemetryConfig(flush_interval_s=0.01, max_file_bytes=4096)
telemetry = configure(config, process=sys.argv[2], spans_dir=Path(sys.argv[1]), install=False)
tracer, number = telemetry.tracer("test"), 0
while True:
    tracer.start_span(f"span-{number}").end()
    number += 1
    if number % 200 == 0 and telemetry.flush():
        print(number, flush=True)
"""


def writing(folder: Path, process: str = "worker-0-123456", **fields: Any) -> TelemetryHandle:
    return configure(TelemetryConfig(**fields), process=process, spans_dir=folder, run_id="run", install=False)


def names(folder: Path) -> list[str]:
    return [span["name"] for span in SpanFolder(folder).spans()]


def end_spans(telemetry: TelemetryHandle, numbers: range) -> None:
    for number in numbers:
        telemetry.tracer("test").start_span(f"span-{number}", attributes={"random": random.random()}).end()


def test_full_files_are_compressed_and_every_span_is_read_once(tmp_path: Path) -> None:
    telemetry = writing(tmp_path, max_file_bytes=4096)
    for start in range(0, 200, 10):
        end_spans(telemetry, range(start, start + 10))
        assert telemetry.flush()
    telemetry.shutdown()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files[0] == "worker-0-123456.000001.jsonl.zst"
    assert len(files) > 5
    assert all(name.endswith(".zst") for name in files), "the end of the process ends its file"
    assert sorted(names(tmp_path)) == sorted(f"span-{number}" for number in range(200))
    assert SpanFolder(tmp_path).lost() == {}


def test_spans_beyond_the_queue_are_counted_and_the_rest_is_written(tmp_path: Path) -> None:
    telemetry = writing(tmp_path, max_queue_spans=512, flush_interval_s=3600)
    # While another has the lock, the writer waits, as for a disk that does not answer.
    with FileLock(tmp_path / "worker-0-123456.jsonl"):
        end_spans(telemetry, range(2000))
    telemetry.shutdown()
    lost = SpanFolder(tmp_path).lost()
    assert sum(lost.values()) + len(names(tmp_path)) == 2000
    assert lost["queue_full"] > 0


@pytest.mark.parametrize("before", [0, 5])
def test_a_full_disk_loses_nothing_if_it_is_freed_in_time(tmp_path: Path, before: int) -> None:
    telemetry = writing(tmp_path, flush_interval_s=3600)
    path = tmp_path / "worker-0-123456.jsonl"
    end_spans(telemetry, range(before))
    assert telemetry.flush()
    size = path.stat().st_size if path.exists() else 0
    with files_of_at_most(size + 100):
        end_spans(telemetry, range(before, 10))
        assert not telemetry.flush()
        assert path.stat().st_size == size, "no half of a batch remains"
    assert telemetry.flush()
    telemetry.shutdown()
    assert names(tmp_path) == [f"span-{number}" for number in range(10)]
    assert SpanFolder(tmp_path).lost() == {}


def test_a_removed_file_and_a_removed_folder_are_counted_as_losses(tmp_path: Path) -> None:
    telemetry = writing(tmp_path)
    end_spans(telemetry, range(3))
    assert telemetry.flush()
    (tmp_path / "worker-0-123456.jsonl").unlink()
    telemetry.shutdown()
    assert SpanFolder(tmp_path).lost() == {"removed": 3}


def test_a_deleted_folder_does_not_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "spans"
    telemetry = writing(folder)
    folder.rmdir()
    telemetry.tracer("test").start_span("lost").end()
    assert not telemetry.flush()
    telemetry.shutdown()
    assert "cannot be written" in caplog.text
    assert not folder.exists()


def test_a_killed_process_leaves_whole_lines_that_are_compressed_later(tmp_path: Path) -> None:
    for number in range(3):
        arguments = [sys.executable, "-c", WRITER, str(tmp_path), f"worker-{number}"]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            written = [int(process.stdout.readline()) for _ in range(5 + 3 * number)][-1]
            process.kill()
        spans = list(SpanFolder(tmp_path).spans())
        read = {span["name"] for span in spans if span["resource"]["service.instance.id"] == f"worker-{number}"}
        assert {f"span-{each}" for each in range(written)} <= read, "what was flushed is there"
    found = names(tmp_path)
    assert keep_within(tmp_path, 10**9, 1.0, frozenset) == {}
    for path in tmp_path.glob("*.jsonl"):
        os.utime(path, (1.7e9, 1.7e9))
    keep_within(tmp_path, 10**9, 10**6, frozenset)
    assert not list(tmp_path.glob("*.jsonl"))
    assert sorted(names(tmp_path)) == sorted(found)


def test_the_file_of_a_live_process_is_not_touched(tmp_path: Path) -> None:
    telemetry = writing(tmp_path)
    end_spans(telemetry, range(3))
    assert telemetry.flush()
    os.utime(tmp_path / "worker-0-123456.jsonl", (1.7e9, 1.7e9))
    keep_within(tmp_path, 1, 10**6, frozenset)
    assert (tmp_path / "worker-0-123456.jsonl").exists()
    telemetry.shutdown()
    assert len(names(tmp_path)) == 3


def stored(folder: Path, number: int, traces: int, spans: int) -> None:
    """Write one ended file with spans of several traces, older for lower numbers."""
    telemetry = writing(folder, process=f"worker-{number}")
    for trace in range(traces):
        with telemetry.tracer("test").start_as_current_span(f"root-{number}-{trace}"):
            for _ in range(spans - 1):
                telemetry.tracer("test").start_span("turn", attributes={"text": os.urandom(200).hex()}).end()
    telemetry.shutdown()
    (path,) = folder.glob(f"worker-{number}.*.zst")
    os.utime(path, (1.7e9 + number, 1.7e9 + number))


def test_the_oldest_ordinary_spans_go_first_and_each_removal_is_counted(tmp_path: Path) -> None:
    for number in range(6):
        stored(tmp_path, number, traces=4, spans=5)
    roots = {span["name"]: span["trace_id"] for span in SpanFolder(tmp_path).spans() if span["name"] != "turn"}
    slow = {roots["root-0-1"], roots["root-5-2"]}
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    gone = keep_within(tmp_path, total // 2, 10**6, lambda: slow)
    left = list(SpanFolder(tmp_path).spans())
    assert gone == {"removed_ordinary": 6 * 4 * 5 - len(left)}
    assert SpanFolder(tmp_path).lost() == gone
    assert sum(path.stat().st_size for path in tmp_path.glob("*.zst")) <= total // 2
    assert slow <= {span["trace_id"] for span in left}
    assert roots["root-0-0"] not in {span["trace_id"] for span in left}
    assert roots["root-5-0"] in {span["trace_id"] for span in left}, "the newest ordinary ones stay"
    again = keep_within(tmp_path, 1, 10**6, lambda: slow)
    assert again["removed_slow_or_failed"] == 2 * 5
    assert list(SpanFolder(tmp_path).spans()) == []
    assert sum(SpanFolder(tmp_path).lost().values()) == 6 * 4 * 5


def test_room_is_made_on_a_full_disk_without_writing_first(tmp_path: Path) -> None:
    for number in range(3):
        stored(tmp_path, number, traces=1, spans=4)
    size = (tmp_path / "worker-0.000001.jsonl.zst").stat().st_size
    assert make_room(tmp_path, size) == {"removed_ordinary": 4}
    assert {span["resource"]["service.instance.id"] for span in SpanFolder(tmp_path).spans()} == {
        "worker-1",
        "worker-2",
    }
    assert SpanFolder(tmp_path).lost() == {"removed_ordinary": 4}


def test_a_crash_between_two_steps_of_compression_repeats_and_loses_nothing(tmp_path: Path) -> None:
    stored(tmp_path, 0, traces=1, spans=4)
    (whole,) = tmp_path.glob("*.zst")
    whole.with_suffix("").write_bytes(zstandard.ZstdDecompressor().stream_reader(whole.read_bytes()).read())
    limit.replace_file(tmp_path / "worker-0.000001.kept.jsonl.zst", whole.read_bytes())
    assert len(names(tmp_path)) == 4


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 2000), noise=st.binary(max_size=64))
def test_torn_and_foreign_lines_are_counted_and_harm_no_neighbour(
    tmp_path_factory: pytest.TempPathFactory, cut: int, noise: bytes
) -> None:
    folder = tmp_path_factory.mktemp("spans")
    telemetry = writing(folder)
    end_spans(telemetry, range(4))
    assert telemetry.flush()
    content = (folder / "worker-0-123456.jsonl").read_bytes()
    telemetry.shutdown()
    for path in folder.glob("*.zst"):
        path.unlink()
    cut = min(cut, len(content) - 1)
    (folder / "a.jsonl").write_bytes(content[:cut] + b"\n" + noise + b"\n" + content)
    (folder / "b.000001.jsonl.zst").write_bytes(b"x" + noise)
    store = SpanFolder(folder)
    found = [span["name"] for span in store.spans()]
    assert found[-4:] == [f"span-{number}" for number in range(4)]
    assert store.lost()["torn"] >= 1 + (content[:cut].count(b"\n") < len(content[:cut].splitlines()))
