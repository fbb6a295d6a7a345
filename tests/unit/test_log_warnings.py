"""Warnings of actors on the driver's terminal: in plain words, few of a storm, and without damage to the panel."""

from __future__ import annotations

import asyncio
import io
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace.actors.record.files.log_warnings import (
    MAX_CHARACTERS,
    MAX_KINDS,
    MOST,
    REPEAT_S,
    TerminalWarnings,
    WarningLines,
    line_of,
)
from headrace.actors.record.files.logs import EventFormatter, LogFile, Redaction
from headrace.actors.run.launch import watch
from headrace.actors.run.progress import Progress, ProgressDisplay
from headrace.serve.tracing.retention import RetentionConfig
from support.gateway_rig import until

GUARD_S = 30.0
PROGRESS = Progress(phase="training", step=1, total_steps=4, version="1.1", elapsed_s=60.0)


def event(message: str, *, actor: str = "worker-0", level: str = "WARNING", **more: Any) -> dict[str, Any]:
    return {"time": 0.0, "level": level, "actor": actor, "logger": "headrace.tests", "message": message, **more}


def test_a_warning_is_told_in_plain_words() -> None:
    assert line_of(event("host h1 does\nnot answer")) == "warning of worker-0: host h1 does not answer"
    trace = "Traceback (most recent call last):\n  File x\nValueError: no such host"
    failed = event("boot failed", level="ERROR", exception=trace, rollout="g1-0.1", attempt=2)
    assert line_of(failed) == "error of worker-0: boot failed: ValueError: no such host (rollout g1-0.1 attempt 2)"
    assert line_of(event("rollout g1-0.1 is slow", rollout="g1-0.1", attempt=2)).endswith("g1-0.1 is slow")


def test_text_of_agents_cannot_control_the_terminal_or_fill_it() -> None:
    assert line_of(event("a\x1b[2Jb\u202ec")) == "warning of worker-0: a\\x1b[2Jb\\u202ec"
    assert len(line_of(event("x" * 8000))) <= MAX_CHARACTERS + 4


def test_of_lines_that_differ_in_numbers_one_a_minute_is_shown_with_the_count_of_the_others() -> None:
    lines = WarningLines("headrace logs RUN")
    storm = [event(f"rollout g{n}-1.{n} took {n}.5 s", actor=f"worker-{n}") for n in range(1000)]
    assert lines.told(storm, 0.0) == ["warning of worker-0: rollout g0-1.0 took 0.5 s"]
    assert lines.told(storm, REPEAT_S - 1) == []
    assert lines.told(storm[:1], REPEAT_S) == [
        "warning of worker-0: rollout g0-1.0 took 0.5 s (1999 more like this before)"
    ]
    assert lines.left_out() == []


def test_a_storm_of_different_lines_shows_a_few_and_counts_the_rest() -> None:
    lines = WarningLines("headrace logs RUN")
    storm = [event(f"cause {chr(65 + n // 26)}{chr(65 + n % 26)}") for n in range(100)]
    assert len(lines.told(storm, 0.0)) == MOST
    later = lines.told([event("something else")], REPEAT_S)
    assert later == [f"{100 - MOST} more warnings: headrace logs RUN", "warning of worker-0: something else"]
    assert lines.left_out() == []


def test_kinds_that_are_remembered_are_bounded() -> None:
    lines = WarningLines("headrace logs RUN")
    letters = "abcdefghijklmnopqrstuvwxyz"
    for number in range(2 * MAX_KINDS):
        word = letters[number // 676 % 26] + letters[number // 26 % 26] + letters[number % 26]
        assert len(lines.told([event(word)], number * REPEAT_S)) == 1
    # The first one is forgotten, and so counts as new.
    assert lines.told([event("aaa")], (2 * MAX_KINDS - 1) * REPEAT_S) == ["warning of worker-0: aaa"]


@pytest.fixture
def log(tmp_path: Path) -> LogFile:
    events = EventFormatter({"run": "a" * 32, "actor": "pool", "node": "n1", "pid": 7}, Redaction({}))
    return LogFile(tmp_path / "run" / "logs" / "pool.jsonl", RetentionConfig(), events)


def warn(log: LogFile, text: str, level: int = logging.WARNING) -> None:
    log.emit(logging.LogRecord("headrace.tests", level, "", 0, text, (), None))


class Moving:
    """A service that makes progress."""

    def __init__(self) -> None:
        self.asked = 0

    async def progress(self) -> Progress:
        self.asked += 1
        return replace(PROGRESS, step=self.asked)


@pytest.mark.parametrize("is_terminal", [True, False])
async def test_warnings_appear_above_the_panel_of_a_run(tmp_path: Path, log: LogFile, is_terminal: bool) -> None:
    warn(log, "of an earlier driver")
    warnings = TerminalWarnings(tmp_path / "run" / "logs", f"headrace logs {tmp_path / 'run'}")
    out, service = io.StringIO(), Moving()
    console = Console(file=out, force_terminal=is_terminal, width=200, color_system=None)
    async with asyncio.timeout(GUARD_S):
        watching = asyncio.create_task(watch(service, warnings, display=ProgressDisplay(console)))
        await until(lambda: service.asked > 0)
        warn(log, "[bold]of no interest[/]", logging.INFO)
        warn(log, "a [red]host[/] is :smile: away")
        warn(log, "a [red]host[/] is :smile: away")
        await until(lambda: "away" in out.getvalue())
        seen = service.asked
        await until(lambda: service.asked >= seen + 2)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
    text = out.getvalue()
    assert text.count("warning of pool: a [red]host[/] is :smile: away\n") == 1
    assert "of no interest" not in text
    assert "earlier" not in text
    assert text.count("training") >= (3 if is_terminal else 1)
    # The panel is drawn again below the warning.
    assert text.rindex("training") > text.index("away") or not is_terminal
    assert warnings.last() == ["1 more warnings: headrace logs " + str(tmp_path / "run")]
