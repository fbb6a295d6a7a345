from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.serve.gateway.parsing.parser_choice import BATCH_TURNS, ParserAlarm

if TYPE_CHECKING:
    import pytest


def saw(alarm: ParserAlarm, turns: int, *, calls: int = 0, lost_calls: int = 1) -> None:
    for _ in range(turns):
        alarm.saw(calls=calls, lost_calls=lost_calls)


def test_a_batch_without_a_parsed_call_raises_the_alarm_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """F17."""
    alarm = ParserAlarm()
    saw(alarm, BATCH_TURNS - 1)
    saw(alarm, 10 * BATCH_TURNS, calls=0, lost_calls=0)
    assert not alarm.raised, "turns without call markup say nothing"
    saw(alarm, 1)
    assert alarm.raised
    saw(alarm, BATCH_TURNS)
    assert caplog.text.count("set gateway.parser to") == 1


def test_one_parsed_call_in_a_batch_ends_the_alarm() -> None:
    alarm = ParserAlarm()
    saw(alarm, 1, calls=1, lost_calls=0)
    saw(alarm, BATCH_TURNS - 1)
    assert not alarm.raised
    saw(alarm, BATCH_TURNS)
    assert alarm.raised
    saw(alarm, BATCH_TURNS, calls=2)
    assert not alarm.raised
