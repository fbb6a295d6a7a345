"""Lines that an actor logs: their fields, rotation, torn lines, full disks, secrets."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from headrace.actors.record.files.logs import (
    MAX_LINE_BYTES,
    EventFormatter,
    LogFile,
    Redaction,
)
from headrace.actors.runtime.actors.batching import Batcher
from headrace.serve.tracing.attempts import ROLLOUT_ATTEMPT
from headrace.serve.tracing.retention import RetentionConfig, kept_files, older_files
from headrace.serve.tracing.tracing import trace_id_for
from support.full_disks import files_of_at_most

SMALL = RetentionConfig(file_bytes=4096, log_bytes=8192)
ORIGIN: dict[str, str | int] = {"run": "a" * 32, "actor": "worker-0", "node": "n1", "pid": 7}
TOKEN = "hunter2-and-more"


def opened(
    path: Path, *, retention: RetentionConfig = SMALL, environment: dict[str, str] | None = None
) -> logging.Logger:
    """Return a logger of its own that writes to the file at `path`."""
    logger = logging.getLogger(f"headrace.tests.{uuid.uuid4().hex}")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(LogFile(path, retention, EventFormatter(ORIGIN, Redaction(environment or {}))))
    return logger


def events_in(path: Path) -> list[dict[str, Any]]:
    """Return the events of all files, of which each line must be one."""
    return [json.loads(line) for file in kept_files(path) for line in file.read_bytes().splitlines()]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "worker-0.jsonl"


def test_a_line_has_the_fields_of_its_event_and_of_its_process(log: Path) -> None:
    opened(log).warning("host %s is %d s late", "h1", 3)
    [event] = events_in(log)
    assert event.pop("time") == pytest.approx(log.stat().st_mtime, abs=60)
    assert event.pop("logger").startswith("headrace.tests.")
    assert event == {**ORIGIN, "level": "WARNING", "message": "host h1 is 3 s late"}


async def test_rollout_attempt_and_trace_are_those_of_the_task(log: Path) -> None:
    logger = opened(log)

    async def rollout(number: int) -> None:
        ROLLOUT_ATTEMPT.set((f"r{number}", number))
        context = SpanContext(number, 1, is_remote=False, trace_flags=TraceFlags(1))
        with trace.use_span(NonRecordingSpan(context)):
            await asyncio.to_thread(logger.info, "in a thread")

    async with asyncio.TaskGroup() as tasks:
        for number in (1, 2):
            tasks.create_task(rollout(number))
    logger.info("outside")
    *inside, outside = events_in(log)
    found = sorted((event["rollout"], event["attempt"], event["trace"]) for event in inside)
    run = str(ORIGIN["run"])
    assert found == [(f"r{number}", number, f"{trace_id_for(run, f'r{number}', number):032x}") for number in (1, 2)]
    assert not {"rollout", "attempt", "trace"} & outside.keys()


async def test_a_batched_call_is_not_attributed_to_its_first_rollout(log: Path) -> None:
    logger = opened(log)

    async def call(requests: list[str]) -> list[None]:
        logger.info("%d requests", len(requests))
        return [None] * len(requests)

    async with Batcher[str, None](call) as batcher:
        ROLLOUT_ATTEMPT.set(("r1", 1))
        context = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(1))
        with trace.use_span(NonRecordingSpan(context)):
            await batcher("one")
    [event] = events_in(log)
    assert not {"rollout", "attempt", "trace"} & event.keys()


def test_an_exception_is_one_string_with_its_error_at_the_end(log: Path) -> None:
    try:
        raise ValueError("no such host")
    except ValueError:
        opened(log).exception("boot failed")
    [event] = events_in(log)
    assert event["exception"].startswith("Traceback")
    assert event["exception"].endswith("ValueError: no such host")


def test_any_text_becomes_one_line_of_bounded_size(log: Path) -> None:
    logger = opened(log, retention=RetentionConfig())
    logger.info("two\nlines \ud800 \x00")
    try:
        raise ValueError("\x01" * 100_000)
    except ValueError:
        logger.exception("\x01" * 100_000)
    first, second = log.read_bytes().splitlines()
    assert json.loads(first)["message"] == "two\nlines ? \x00"
    assert len(second) < MAX_LINE_BYTES
    assert json.loads(second)["exception"].endswith("\x01")


def test_files_rotate_and_the_oldest_are_removed(log: Path) -> None:
    logger = opened(log)
    for number in range(500):
        logger.info("event %d", number)
    assert older_files(log)
    assert sum(older.stat().st_size for older in older_files(log)) <= SMALL.log_bytes
    left = [event["message"] for event in events_in(log)]
    assert left == [f"event {number}" for number in range(500 - len(left), 500)]
    assert 0 < len(left) < 500


def test_a_line_after_a_torn_one_is_intact(log: Path) -> None:
    log.parent.mkdir()
    log.write_bytes(b'{"time":1.0,"mess')
    opened(log).info("after the crash")
    torn, line = log.read_bytes().splitlines()
    assert torn == b'{"time":1.0,"mess'
    assert json.loads(line)["message"] == "after the crash"


def test_lines_that_a_full_disk_refuses_are_counted_in_the_next(log: Path) -> None:
    logger = opened(log)
    logger.info("before")
    with files_of_at_most(log.stat().st_size + 20):
        # Of the first one 20 bytes are written, of the second one nothing.
        logger.info("lost")
        logger.info("lost, too")
    logger.info("after")
    logger.info("later")
    before, torn, after, later = log.read_bytes().splitlines()
    assert len(torn) == 20
    assert "dropped" not in json.loads(before)
    assert json.loads(after)["message"] == "after"
    assert json.loads(after)["dropped"] == 2
    assert "dropped" not in json.loads(later)


def test_a_log_whose_folder_cannot_be_made_stops_no_actor(log: Path) -> None:
    log.parent.write_text("a file")
    logger = opened(log)
    logger.info("lost")
    log.parent.unlink()
    logger.info("after")
    [event] = events_in(log)
    assert (event["message"], event["dropped"]) == ("after", 1)


def test_a_file_that_cannot_be_rotated_grows_without_losing_lines(log: Path) -> None:
    logger = opened(log)
    lock = log.with_name(f".{log.name}.lock")
    logger.info("first")
    lock.mkdir()
    for number in range(35):
        logger.info("event %d", number)
    assert not older_files(log)
    assert log.stat().st_size > SMALL.file_bytes
    lock.rmdir()
    logger.info("last")
    assert len(older_files(log)) == 1
    events = events_in(log)
    assert len(events) == 37
    assert not any("dropped" in event for event in events)


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "E2B_API_KEY", "AWS_SECRET_ACCESS_KEY", "redis_password", "SECRET"])
def test_values_of_secret_variables_are_replaced(log: Path, name: str) -> None:
    logger = opened(log, environment={name: TOKEN})
    try:
        raise ValueError(f"refused {TOKEN}")
    except ValueError:
        logger.exception("key %s is refused", TOKEN)
    assert TOKEN not in log.read_text()
    [event] = events_in(log)
    assert event["message"] == "key [secret] is refused"
    assert event["exception"].endswith("refused [secret]")


def test_paths_and_short_values_are_not_secrets() -> None:
    redact = Redaction({"RAY_AUTH_TOKEN_PATH": "/etc/ray/token", "SOME_KEY": "1", "KEYBOARD": "german-layout"})
    text = "/etc/ray/token has 1 line, german-layout"
    assert redact(text) == text


def test_the_longer_of_two_secrets_is_replaced_whole() -> None:
    assert Redaction({"A_KEY": "abcdefgh", "B_KEY": "abcdefghij"})("abcdefghij abcdefgh") == "[secret] [secret]"


@pytest.mark.parametrize("text", ["Authorization: Bearer abc.def-123", "{'authorization': 'bearer abc.def-123'}"])
def test_bearer_tokens_are_replaced(text: str) -> None:
    redacted = Redaction({})(text)
    assert "abc.def-123" not in redacted
    assert "[secret]" in redacted


def test_an_event_with_invalid_arguments_is_reported_and_raises_nothing(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = opened(log)
    logger.info("%d hosts", "many")
    logger.info("after")
    assert [event["message"] for event in events_in(log)] == ["after"]
    assert "Logging error" in capsys.readouterr().err


PROGRAM = """
import logging, sys
from pathlib import Path
from headrace.actors.record.files.logs import LogTerms, begin_logs
from headrace.serve.tracing.retention import RetentionConfig

terms = LogTerms(
    run_id="a" * 32, folder=Path(sys.argv[1]), retention=RetentionConfig(), json_stderr=sys.argv[2] == "True"
)
begin_logs(terms, actor="pool", node="")
logging.getLogger("headrace.actors").info("an event")
logging.getLogger("headrace.actors").warning("a warning with %s", "hunter2-and-more")
logging.getLogger("elsewhere").info("of no interest")
"""


@pytest.mark.parametrize("json_stderr", [True, False])
def test_standard_error_has_json_lines_on_a_cluster_and_warnings_as_text_otherwise(
    tmp_path: Path, json_stderr: bool
) -> None:
    actor = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(json_stderr)],
        env={**os.environ, "TESTS_TOKEN": TOKEN},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    events = events_in(tmp_path / "pool.jsonl")
    assert [event["message"] for event in events] == ["an event", "a warning with [secret]"]
    assert {event["node"] for event in events} == {socket.gethostname()}
    lines = actor.stderr.splitlines()
    if json_stderr:
        assert [json.loads(line) for line in lines] == events
    else:
        assert lines == ["a warning with [secret]"]
