"""The share of sampled tokens that is trained, and the alarm when it is low."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headrace.serve.gateway.capture.coverage import LEAST_SESSIONS, REASONS, WINDOW_SESSIONS, Coverage, CoverageWindow
from headrace.serve.gateway.capture.rows import Masked

if TYPE_CHECKING:
    import pytest

FULL = Coverage(sessions=1, sampled=10, trained=10)
LOW = Coverage(sessions=1, sampled=40, trained=8, masked={"side": 2, "abandoned": 30})


def test_the_alarm_needs_several_sessions_and_names_the_main_reason() -> None:
    window = CoverageWindow()
    for _ in range(LEAST_SESSIONS - 1):
        window.add(LOW)
    assert window.coverage.alarm == ""
    window.add(LOW)
    assert window.coverage.alarm == "20% of the sampled tokens are trained (abandoned)"


def test_the_alarm_ends_when_the_latest_sessions_are_trained() -> None:
    window = CoverageWindow()
    for session in [LOW] * LEAST_SESSIONS + [FULL] * WINDOW_SESSIONS:
        window.add(session)
    assert window.coverage == Coverage(sessions=64, sampled=640, trained=640)
    assert window.coverage.alarm == ""


def test_sessions_that_sampled_nothing_do_not_count() -> None:
    window = CoverageWindow()
    for _ in range(2 * LEAST_SESSIONS):
        window.add(Coverage(sessions=1))
    assert window.coverage == Coverage()


def test_an_alarm_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    window = CoverageWindow()
    with caplog.at_level(logging.WARNING):
        for _ in range(3 * LEAST_SESSIONS):
            window.add(LOW)
    [record] = caplog.records
    assert "20% of the sampled tokens are trained (abandoned): the agent continues" in record.message


def test_each_reason_has_an_advice() -> None:
    assert set(REASONS) == {reason.value for reason in Masked}
