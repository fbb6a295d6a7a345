"""Pages of logs: cursors over rotated files, torn lines, limits, refusals; and the command that prints them."""

from __future__ import annotations

import base64
import json
import logging
import random
import shutil
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from headrace.actors.cli.app import app
from headrace.actors.cli.logs import as_text
from headrace.actors.cluster.runs.contract import LogPage
from headrace.actors.cluster.runs.log_pages import read_logs
from headrace.actors.errors import RunRefused
from headrace.actors.record.files.logs import EventFormatter, LogFile, Redaction
from headrace.serve.tracing.retention import RetentionConfig, older_files

ALL = 1 << 30
CONFIG = Path(__file__).resolve().parents[1] / "golden" / "config.json"


def actor_log(folder: Path, actor: str, *, log_bytes: int = 1 << 30) -> logging.Logger:
    """Return the logger of an actor, whose file rotates often."""
    logger = logging.getLogger(f"headrace.tests.{uuid.uuid4().hex}")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    events = EventFormatter({"run": "a" * 32, "actor": actor, "node": "n1", "pid": 7}, Redaction({}))
    retention = RetentionConfig(file_bytes=4096, log_bytes=log_bytes)
    logger.addHandler(LogFile(folder / f"{actor}.jsonl", retention, events))
    return logger


def messages(page: LogPage) -> list[str]:
    return [json.loads(line)["message"] for line in page.lines]


def test_actors_follow_each_other_by_name_and_each_in_its_own_order(tmp_path: Path) -> None:
    worker, pool = actor_log(tmp_path, "worker-0"), actor_log(tmp_path, "pool")
    for number in (1, 2):
        worker.info("w%d", number)
        pool.info("p%d", number)
    assert messages(read_logs(tmp_path, None, after="", limit_bytes=ALL)) == ["p1", "p2", "w1", "w2"]
    assert messages(read_logs(tmp_path, "worker-0", after="", limit_bytes=ALL)) == ["w1", "w2"]


def test_a_cursor_continues_after_the_last_line_of_every_actor(tmp_path: Path) -> None:
    worker, pool = actor_log(tmp_path, "worker-0"), actor_log(tmp_path, "pool")
    worker.info("w1")
    first = read_logs(tmp_path, None, after="", limit_bytes=ALL)
    assert read_logs(tmp_path, None, after=first.cursor, limit_bytes=ALL).lines == ()
    worker.info("w2")
    pool.info("p1")
    second = read_logs(tmp_path, None, after=first.cursor, limit_bytes=ALL)
    assert messages(second) == ["p1", "w2"]
    assert read_logs(tmp_path, None, after=second.cursor, limit_bytes=ALL).lines == ()


@pytest.mark.parametrize("seed", range(20))
def test_pages_have_every_line_once_while_files_rotate(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    logs = [actor_log(tmp_path, name) for name in ("pool", "worker-0")]
    written: dict[int, list[str]] = {0: [], 1: []}
    read: list[str] = []
    cursor = ""
    for number in range(300):
        which = random_.randrange(2)
        written[which].append(f"{which} {number} {'x' * random_.randrange(300)}")
        logs[which].info(written[which][-1])
        if random_.random() < 0.2:
            page = read_logs(tmp_path, None, after=cursor, limit_bytes=random_.randrange(600, 20_000))
            read += messages(page)
            cursor = page.cursor
    while (page := read_logs(tmp_path, None, after=cursor, limit_bytes=5000)).lines:
        read += messages(page)
        cursor = page.cursor
    assert len(older_files(tmp_path / "pool.jsonl")) > 3
    for which, lines in written.items():
        assert [line for line in read if line.startswith(f"{which} ")] == lines


def test_no_line_is_missed_while_another_thread_writes_and_rotates(tmp_path: Path) -> None:
    log, expected = actor_log(tmp_path, "pool"), [f"event {number}" for number in range(4000)]

    def write() -> None:
        for message in expected:
            log.info("%s", message)

    read: list[str] = []
    cursor = ""
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        while True:
            was_done = writing.done()
            page = read_logs(tmp_path, None, after=cursor, limit_bytes=ALL)
            read += messages(page)
            cursor = page.cursor
            if was_done:
                break
    assert read == expected


def test_a_position_whose_file_is_removed_continues_with_the_oldest_line_left(tmp_path: Path) -> None:
    log = actor_log(tmp_path, "pool", log_bytes=4200)
    log.info("first")
    cursor = read_logs(tmp_path, None, after="", limit_bytes=ALL).cursor
    for number in range(200):
        log.info("event %d", number)
    left = messages(read_logs(tmp_path, None, after=cursor, limit_bytes=ALL))
    assert left == [f"event {number}" for number in range(200 - len(left), 200)]
    assert len(left) < 200


def test_a_new_file_under_a_removed_ones_name_is_read_from_its_beginning(tmp_path: Path) -> None:
    """If no older file is left, numbers begin again: a name does not say which file it was."""
    log, path = actor_log(tmp_path, "pool"), tmp_path / "pool.jsonl"
    log.info("first")
    cursor = read_logs(tmp_path, None, after="", limit_bytes=ALL).cursor
    path.unlink()
    log.handlers[0].close()
    log = actor_log(tmp_path, "pool")
    log.info("second, in a file that is longer than the first one was")
    assert messages(read_logs(tmp_path, None, after=cursor, limit_bytes=ALL)) == [
        "second, in a file that is longer than the first one was"
    ]


def test_a_cursor_stays_valid_in_a_copy_of_the_run_directory(tmp_path: Path) -> None:
    log = actor_log(tmp_path / "run", "pool")
    log.info("first")
    cursor = read_logs(tmp_path / "run", None, after="", limit_bytes=ALL).cursor
    log.info("second")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert messages(read_logs(tmp_path / "copy", None, after=cursor, limit_bytes=ALL)) == ["second"]


def test_torn_lines_are_left_out_and_a_torn_end_waits(tmp_path: Path) -> None:
    log, path = actor_log(tmp_path, "pool"), tmp_path / "pool.jsonl"
    log.info("before")
    with path.open("ab") as file:
        file.write(b'{"time":1.0,"message":"tor')
    page = read_logs(tmp_path, None, after="", limit_bytes=ALL)
    assert messages(page) == ["before"]
    actor_log(tmp_path, "pool").info("after")
    page = read_logs(tmp_path, None, after=page.cursor, limit_bytes=ALL)
    assert messages(page) == ["after"]


def test_a_page_is_at_most_as_large_as_its_limit(tmp_path: Path) -> None:
    log = actor_log(tmp_path, "pool")
    for number in range(9):
        log.info("event %d", number)
    size_bytes = (tmp_path / "pool.jsonl").stat().st_size
    assert len(read_logs(tmp_path, None, after="", limit_bytes=size_bytes).lines) == 9
    assert len(read_logs(tmp_path, None, after="", limit_bytes=size_bytes - 1).lines) == 8


def test_a_limit_below_the_next_line_is_refused_with_its_size(tmp_path: Path) -> None:
    actor_log(tmp_path, "pool").info("an event")
    size_bytes = (tmp_path / "pool.jsonl").stat().st_size
    with pytest.raises(RunRefused, match=f"at least {size_bytes}$"):
        read_logs(tmp_path, None, after="", limit_bytes=size_bytes - 1)


@pytest.mark.parametrize("actor", ["absent", "", "../secret", "pool.jsonl", "/etc/passwd"])
def test_an_unknown_actor_is_refused(tmp_path: Path, actor: str) -> None:
    (tmp_path / "secret.jsonl").write_text('{"message": "secret"}\n', encoding="utf-8")
    folder = tmp_path / "logs"
    actor_log(folder, "pool").info("an event")
    with pytest.raises(RunRefused, match="actors with a log on this node: pool"):
        read_logs(folder, actor, after="", limit_bytes=ALL)


def test_a_run_without_logs_has_an_empty_page(tmp_path: Path) -> None:
    page = read_logs(tmp_path / "absent", None, after="", limit_bytes=ALL)
    assert page.lines == ()
    assert read_logs(tmp_path / "absent", None, after=page.cursor, limit_bytes=ALL) == page


def packed(document: object) -> str:
    return base64.urlsafe_b64encode(orjson.dumps(document)).decode()


@pytest.mark.parametrize(
    "cursor",
    [
        *("x", "%%%", "\u00e9", "bm90IGpzb24=", "A" * 400_000),
        *map(packed, ([], 7, {"pool": 7}, {"pool": []}, {"pool": ["a", -1]}, {"pool": ["a", True]}, {"pool": [1, 1]})),
    ],
)
def test_an_invalid_cursor_is_refused(tmp_path: Path, cursor: str) -> None:
    actor_log(tmp_path, "pool").info("an event")
    with pytest.raises(RunRefused, match="cursor is not one of this run's logs"):
        read_logs(tmp_path, None, after=cursor, limit_bytes=ALL)


def test_a_cursor_beyond_the_end_of_its_file_is_refused(tmp_path: Path) -> None:
    actor_log(tmp_path, "pool").info("an event")
    page = read_logs(tmp_path, None, after="", limit_bytes=ALL)
    [(mark, offset)] = orjson.loads(base64.urlsafe_b64decode(page.cursor)).values()
    assert read_logs(tmp_path, None, after=packed({"pool": [mark, offset]}), limit_bytes=ALL).lines == ()
    with pytest.raises(RunRefused, match="cursor is not one of this run's logs"):
        read_logs(tmp_path, None, after=packed({"pool": [mark, offset + 1]}), limit_bytes=ALL)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with the logs of two actors."""
    path = tmp_path / "run"
    path.mkdir()
    shutil.copyfile(CONFIG, path / "config.json")
    for name in ("worker-0", "pool"):
        actor_log(path / "logs", name).warning("event of %s", name)
    return path


def test_the_command_prints_time_level_actor_and_message(run: Path) -> None:
    result = CliRunner().invoke(app, ["logs", str(run)], catch_exceptions=False)
    times, levels, actors, texts = zip(*(line.split(" ", 3) for line in result.stdout.splitlines()), strict=True)
    assert all(time.endswith("Z") and len(time) == 24 for time in times)
    assert levels == ("WARNING", "WARNING")
    assert actors == ("worker-0", "pool")
    assert texts == ("event of worker-0", "event of pool")
    one = CliRunner().invoke(app, ["logs", str(run), "worker-0"], catch_exceptions=False)
    assert one.stdout.splitlines() == result.stdout.splitlines()[:1]


def test_the_command_writes_the_lines_as_they_are_with_json(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.jsonl"
    CliRunner().invoke(app, ["logs", str(run), "--json", str(out)], catch_exceptions=False)
    lines = b"".join((run / "logs" / f"{name}.jsonl").read_bytes() for name in ("worker-0", "pool"))
    assert out.read_bytes() == lines
    limit = str(len(lines) - 1)
    to_stdout = ["logs", str(run), "--json", "-", "--limit-bytes", limit]
    result = CliRunner().invoke(app, to_stdout, catch_exceptions=False)
    assert result.stdout_bytes == lines.splitlines(keepends=True)[0]


def test_the_command_ends_quietly_when_its_reader_has_gone(run: Path) -> None:
    log = actor_log(run / "logs", "pool")
    for _ in range(1000):
        # More than what a pipe holds.
        log.info("x" * 400)
    program = [sys.executable, "-c", "from headrace.actors.cli.app import main; main()", "logs", str(run)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        assert command.stdout.readline().endswith(b"event of worker-0\n")
        command.stdout.close()
        assert command.stderr.read() == b""
        assert command.wait(timeout=60) == 0


def test_the_command_refuses_an_unknown_actor(run: Path) -> None:
    result = CliRunner().invoke(app, ["logs", str(run), "absent"])
    assert isinstance(result.exception, RunRefused)


def test_text_of_agents_cannot_control_the_terminal() -> None:
    event = {"time": 0.0, "level": "ERROR", "actor": "pool", "message": "a\x1b[2Jb", "exception": "x\ny"}
    assert as_text(event) == "1970-01-01T00:00:00.000Z ERROR pool a\\x1b[2Jb\n  x\n  y"
