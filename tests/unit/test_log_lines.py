"""Lines of a rollout over all actors and nodes: order, rotation, torn and huge lines; and `headrace logs --follow`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.actors.cli.app import app
from headrace.actors.errors import ConfigError
from headrace.actors.record.files.log_lines import LogReader, RunLogs, Wanted, event_of, lines_of_rollout
from headrace.actors.record.files.logs import EventFormatter, LogFile, Redaction
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.launch import sole_driver
from headrace.serve.tracing.attempts import working_for
from headrace.serve.tracing.retention import RetentionConfig, older_files
from headrace.serve.tracing.tracing import trace_id_for

CONFIG = Path(__file__).resolve().parents[1] / "golden" / "config.json"
RUN = "a" * 32
GUARD_S = 60.0


class ActorLog:
    """The log of an actor, whose file rotates often; `say` logs at a given time."""

    def __init__(self, folder: Path, actor: str) -> None:
        self.path = folder / f"{actor}.jsonl"
        events = EventFormatter({"run": RUN, "actor": actor, "node": "n1", "pid": 7}, Redaction({}))
        self._file = LogFile(self.path, RetentionConfig(file_bytes=4096), events)

    def say(self, text: str, time_s: float = 0.0, *, level: int = logging.INFO, exc_info: Any = None) -> None:
        record = logging.LogRecord("headrace.tests", level, "", 0, text, (), exc_info)
        record.created = time_s
        self._file.emit(record)


def messages(lines: Iterator[Any]) -> list[str]:
    return [line.event["message"] for line in lines]


def test_lines_of_a_rollout_come_from_all_actors_and_nodes_in_the_order_of_time(tmp_path: Path) -> None:
    here, there = tmp_path / "logs", tmp_path / "nodes" / "0123456789ab" / "logs"
    worker, gateway, pool = ActorLog(there, "worker-0"), ActorLog(there, "gateway"), ActorLog(here, "pool")
    lines = [(pool, "boots", 1.0), (worker, "begins", 0.5), (gateway, "answers", 2.0), (worker, "ends", 3.0)]
    for log, text, time_s in lines:
        with working_for(("g1-0.1", 1)):
            log.say(text, time_s)
        with working_for(("g1-0.1", 2)):
            log.say(f"{text} again", time_s + 10)
        with working_for(("g1-0.11", 1)):
            log.say("another rollout", time_s)
        log.say("g1-0.1 is mentioned", time_s)
    assert messages(lines_of_rollout(here, "g1-0.1", 1)) == ["begins", "boots", "answers", "ends"]
    assert len(messages(lines_of_rollout(here, "g1-0.1"))) == 8
    assert messages(lines_of_rollout(here, "g1-0")) == []
    traces = {line.event["trace"] for line in lines_of_rollout(here, "g1-0.1", 2)}
    assert traces == {f"{trace_id_for(RUN, 'g1-0.1', 2):032x}"}


@pytest.mark.parametrize("seed", range(10))
def test_each_line_is_read_once_in_the_order_of_its_actor_while_files_rotate(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    logs = [ActorLog(tmp_path / "logs", name) for name in ("pool", "worker-0", "gateway")]
    run_logs, written, read = RunLogs(tmp_path / "logs", Wanted(rollout="r1")), [], []
    for number in range(400):
        rollout = random_.choice(("r1", "r2"))
        with working_for((rollout, 1)):
            random_.choice(logs).say(f"{number} {'x' * random_.randrange(200)}", float(number))
        if rollout == "r1":
            written.append(number)
        if random_.random() < 0.1:
            read += messages(run_logs.new_lines())
    read += messages(run_logs.new_lines())
    assert older_files(logs[0].path)
    assert [int(text.split()[0]) for text in read] == written


def test_torn_foreign_and_huge_lines_are_left_out_and_the_next_one_is_read(tmp_path: Path) -> None:
    log = ActorLog(tmp_path / "logs", "pool")
    log.say("before")
    rubbish = (
        b'{"time": 1.0, "mess\n',
        b"\xff\xfe\r\n",
        b"{}\n[]\nnull\n\n",
        b'{"time": "x", "level": "INFO", "actor": "a", "message": "no time"}\n',
        b'{"time": 1e300, "level": "INFO", "actor": "a", "message": "after all times"}\n',
        b'{"time": 1.0, "level": "INFO", "actor": "a", "message": "' + b"y" * (10 << 20) + b'"}\n',
    )
    with log.path.open("ab") as file:
        file.writelines(rubbish)
        file.write(b'{"time": 2.0, "level": "INFO", "actor": "a", "message": "after"}\n{"time": 3.0, "tor')
    logs = RunLogs(tmp_path / "logs")
    assert messages(logs.new_lines()) == ["before", "after"]
    with log.path.open("ab") as file:
        file.write(b'n": 1, "level": "INFO", "actor": "a", "message": "whole at last"}\n')
    assert messages(logs.new_lines()) == ["whole at last"]


def test_the_level_and_the_end_so_far_limit_what_is_read(tmp_path: Path) -> None:
    log = ActorLog(tmp_path / "logs", "pool")
    log.say("long ago", level=logging.ERROR)
    logs = RunLogs(tmp_path / "logs", Wanted(level=logging.WARNING), from_now=True)
    log.say("of no interest")
    log.say("a warning", level=logging.WARNING)
    ActorLog(tmp_path / "logs", "late").say("of a new actor", 1.0, level=logging.CRITICAL)
    assert messages(logs.new_lines()) == ["a warning", "of a new actor"]
    assert messages(logs.new_lines()) == []


def test_a_file_that_lost_its_end_is_read_from_there(tmp_path: Path) -> None:
    log = ActorLog(tmp_path / "logs", "pool")
    log.say("one")
    size_bytes = log.path.stat().st_size
    log.say("two")
    reader = LogReader(log.path)
    assert messages(reader.lines()) == ["one", "two"]
    os.truncate(log.path, size_bytes)
    assert messages(reader.lines()) == []
    log.say("three")
    assert messages(reader.lines()) == ["three"]


def test_an_event_needs_time_level_actor_and_message() -> None:
    whole = {"time": 1, "level": "INFO", "actor": "pool", "message": "m"}
    assert event_of(json.dumps(whole).encode()) == whole
    for key in whole:
        assert event_of(json.dumps({name: value for name, value in whole.items() if name != key}).encode()) is None


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with the logs of two actors."""
    path = tmp_path / "run"
    path.mkdir()
    shutil.copyfile(CONFIG, path / "config.json")
    for number, name in enumerate(("worker-0", "pool")):
        with working_for(("g1-0.1", number)):
            ActorLog(path / "logs", name).say(f"event of {name}", float(number))
    return path


def command(*words: str) -> str:
    return CliRunner().invoke(app, ["logs", *words], catch_exceptions=False).stdout


def test_the_command_prints_the_lines_of_a_rollout_and_of_an_attempt(run: Path) -> None:
    ActorLog(run / "logs", "pool").say("of no rollout")
    both = command(str(run), "--rollout", "g1-0.1").splitlines()
    assert [line.rpartition(" INFO ")[2] for line in both] == ["worker-0 event of worker-0", "pool event of pool"]
    assert command(str(run), "--rollout", "g1-0.1", "--attempt", "1").splitlines() == both[1:]
    assert command(str(run), "pool", "--rollout", "g1-0.1").splitlines() == both[1:]


@pytest.mark.parametrize(
    ("rollout", "answer"),
    [
        ("nosuch", "none of this id"),
        ("g00000", "rollouts begin with this"),
        ("g000008-0", "nothing was logged for g000008-0"),
    ],
)
def test_a_rollout_without_lines_gives_one_line_that_says_why(tmp_path: Path, rollout: str, answer: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(CONFIG.parent / "ledger", run)
    shutil.copyfile(CONFIG, run / "config.json")
    result = CliRunner().invoke(app, ["logs", str(run), "--rollout", rollout])
    assert answer in f"{result.output}{result.exception}".replace("\n", "")


def test_the_beginning_of_an_id_is_enough(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(CONFIG.parent / "ledger", run)
    shutil.copyfile(CONFIG, run / "config.json")
    with closing(sqlite3.connect(run / "ledger.db")) as ledger, ledger:
        ledger.execute("UPDATE rollouts SET rollout_id = 'h000001-0' WHERE rollout_id = 'g000008-0'")
    with working_for(("h000001-0", 1)):
        ActorLog(run / "logs", "pool").say("boots")
    whole, beginning = (command(str(run), "--rollout", name) for name in ("h000001-0", "h"))
    assert whole.endswith("boots\n")
    assert beginning == whole


def test_an_attempt_without_its_rollout_is_refused(run: Path) -> None:
    assert isinstance(CliRunner().invoke(app, ["logs", str(run), "--attempt", "1"]).exception, ConfigError)


def test_following_a_run_that_nobody_drives_ends_at_once(run: Path) -> None:
    assert len(command(str(run), "--follow").splitlines()) == 2


@pytest.mark.parametrize("ends", ["with the run", "by Ctrl-C"])
async def test_following_prints_new_lines_over_rotations_until_it_ends(run: Path, ends: str) -> None:
    log = ActorLog(run / "logs", "pool")
    # What a shell runs in the background, these tests perhaps, ignores Ctrl-C.
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    starts = f"{heeds}; from headrace.actors.cli.app import main; main()"
    program = [sys.executable, "-c", starts, "logs", str(run), "--follow"]
    async with asyncio.timeout(GUARD_S):
        with sole_driver(RunDirectory(path=run)):
            follower = await asyncio.create_subprocess_exec(*program, stdout=subprocess.PIPE)
            try:
                assert follower.stdout is not None
                assert (await follower.stdout.readline()).endswith(b"event of worker-0\n")
                assert (await follower.stdout.readline()).endswith(b"event of pool\n")
                for number in range(100):
                    log.say(f"new {number}", float(number))
                for number in range(100):
                    assert (await follower.stdout.readline()).endswith(b"new %d\n" % number)
                assert older_files(log.path)
                log.say("the last one", 1000.0)
                if ends == "by Ctrl-C":
                    assert (await follower.stdout.readline()).endswith(b"the last one\n")
                    follower.send_signal(signal.SIGINT)
                    assert await follower.wait() == 130
            finally:
                if follower.returncode is None and ends == "by Ctrl-C":
                    follower.kill()
        if ends == "with the run":
            assert (await follower.stdout.read()).endswith(b"the last one\n")
            assert await follower.wait() == 0
