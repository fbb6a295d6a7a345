"""Lines that a session can cause in a log: a few in a period, and one that counts the others."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from headrace.serve.gateway.http.limited_log import MAX_LINES, LimitedLog

if TYPE_CHECKING:
    import pytest


async def test_a_session_gets_a_few_lines_and_one_that_counts_the_others(caplog: pytest.LogCaptureFixture) -> None:
    log = LimitedLog()
    for number in range(MAX_LINES + 7):
        log.warning("noisy", "line %d of %s", number, "many")
    log.warning("", "of nobody")
    log.warning("quiet", "of another")
    log.close()
    noisy = [f"session noisy: line {number} of many" for number in range(MAX_LINES)]
    others = ["no known session: of nobody", "session quiet: of another"]
    assert caplog.messages == [*noisy, *others, "session noisy: 7 more lines were left out"]


async def test_a_new_period_begins_with_a_line_about_the_last(caplog: pytest.LogCaptureFixture) -> None:
    ended = asyncio.Event()

    class Watching(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "left out" in record.getMessage():
                ended.set()

    log, handler = LimitedLog(period_s=0.01), Watching()
    logging.getLogger("headrace.serve.gateway.http").addHandler(handler)
    try:
        for _ in range(MAX_LINES + 1):
            log.warning("noisy", "again")
        async with asyncio.timeout(10):
            await ended.wait()
    finally:
        logging.getLogger("headrace.serve.gateway.http").removeHandler(handler)
    log.warning("noisy", "later")
    log.close()
    assert caplog.messages[-2:] == ["session noisy: 1 more lines were left out", "session noisy: later"]


async def test_errors_have_their_traceback(caplog: pytest.LogCaptureFixture) -> None:
    log = LimitedLog()
    try:
        raise ZeroDivisionError("a defect")
    except ZeroDivisionError as error:
        log.exception("s", "handled")
        defect = error
    log.error("s", "kept", exc_info=defect)
    log.close()
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [defect, defect]
