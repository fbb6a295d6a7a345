"""The breakdown of an attempt: what a session measures, what a worker adds, and what the ledger keeps."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import get_tracer

from headrace.actors.record.files.parts import in_part
from headrace.actors.rollouts.attempt_time import AttemptTime
from headrace.actors.services.figures import current_service_time
from headrace.actors.simulation.virtual.virtual_time import run_virtual
from headrace.buffer.core.classification import classify
from headrace.buffer.core.records import RolloutState
from headrace.buffer.primitives.critical_path import Segment
from headrace.buffer.primitives.timed_span import interval_clock, moment_between
from headrace.buffer.trajectories.breakdown import MAX_NAMES, MAX_PARTS, PARTS, Breakdown, is_of_agent, place_of, summed
from headrace.buffer.trajectories.sanitizer import plain_breakdown, plain_timeline
from headrace.buffer.trajectories.timeline import MAX_DETAIL_CHARACTERS, MAX_SEGMENTS, Merged, Timeline, head_of_call
from headrace.buffer.trajectories.types import Cause, Outcome
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import Completion, FinishReason
from headrace.sandboxes.base import SandboxId, SandboxRef
from headrace.sandboxes.pool.boot import Lease
from headrace.serve.gateway.capture.rows import SessionReport, report_of
from headrace.serve.gateway.capture.session import Session, SessionId, SessionSpec
from headrace.serve.gateway.capture.session_usage import MAX_INTERVALS, UsageClock
from headrace.serve.gateway.conversation import ToolCall
from support import replay_cases as cases

V0 = PolicyVersion(1, 0)
TRACER = get_tracer("test")


TWO_BOOTS = Lease(
    ref=SandboxRef(id=SandboxId("s"), provider="local", endpoint="", secret=""),
    segments=(
        Segment("queue", -3.0, -1.0, detail="host-1"),
        Segment("boot", -1.0, -0.75, detail="host-1: BootFailed"),
        Segment("boot", -0.5, 0.0, detail="host-2"),
    ),
)
EVALUATED = (
    Segment("evaluate.boot", 0.0, 1.0, detail="host-3"),
    Segment("evaluate.check", 1.0, 2.5),
    Segment("other", 2.5, 3.0),
)


def calls(*names: str, arguments: str = "{}") -> list[ToolCall]:
    return [ToolCall(id=f"c{number}", name=name, arguments=arguments) for number, name in enumerate(names)]


def completion(**times: float) -> Completion:
    return Completion(
        output_ids=(1,),
        logprobs=(-0.5,),
        spans=(),
        finish=FinishReason.STOP,
        text="",
        prompt_tokens=7,
        cached_tokens=3,
        retractions=1,
        **times,
    )


def seconds(usage: Any) -> dict[str, float]:
    totals: dict[str, float] = {}
    for part, start, end in usage.segments:
        totals[part] = round(totals.get(part, 0.0) + end - start, 6)
    return totals


# What a session measures.


def test_a_turn_is_split_as_the_engine_reports_and_the_time_to_the_next_request_is_the_tool_s() -> None:
    clock = UsageClock(since_s=100.0)
    clock.add("render", 101.0, 102.0)
    clock.add("gate", 102.0, 104.0)
    clock.called("e0", completion(queue_s=1.0, prefill_s=2.0), 104.0, 112.0, held_s=0.0)
    clock.answered("t1", 112.0)
    clock.delivered("t1", calls("bash"), 113.0)
    clock.asked("t1", 118.0)
    usage = clock.usage(120.0)
    assert seconds(usage) == {
        "own": 3.0,
        "render": 1.0,
        "gate": 2.0,
        "engine.queue": 1.0,
        "engine.prefill": 2.0,
        "engine.decode": 5.0,
        "record": 1.0,
        "tool.bash": 5.0,
    }
    assert (usage.engines, usage.tools) == (("e0",), ("bash",))
    assert (usage.prompt_tokens, usage.cached_tokens, usage.retractions) == (7, 3, 1)
    assert (usage.segments[0][1], usage.segments[-1][2]) == (-20.0, 0.0)


def test_an_engine_that_reports_nothing_is_one_part_and_a_closed_gate_is_told_apart() -> None:
    clock = UsageClock(since_s=0.0)
    clock.called("e0", completion(), 0.0, 10.0, held_s=4.0)
    assert seconds(clock.usage(10.0)) == {"gate": 4.0, "engine": 6.0}


def test_the_way_to_an_engine_and_back_is_not_the_engine_s_own_time() -> None:
    clock = UsageClock(since_s=0.0)
    clock.called("e0", completion(queue_s=1.0, prefill_s=2.0, total_s=4.5), 0.0, 10.0, held_s=0.0)
    parts = seconds(clock.usage(10.0))
    assert parts == {"engine": 5.5, "engine.queue": 1.0, "engine.prefill": 2.0, "engine.decode": 1.5}


def test_reported_times_longer_than_the_call_are_cut() -> None:
    clock = UsageClock(since_s=0.0)
    clock.called("e0", completion(queue_s=50.0, prefill_s=9.0, total_s=99.0), 0.0, 10.0, held_s=2.0)
    assert seconds(clock.usage(10.0)) == {"engine.queue": 8.0, "gate": 2.0}


def test_calls_of_one_answer_are_named_together_and_a_repeated_request_counts_no_tool_twice() -> None:
    clock = UsageClock(since_s=0.0)
    clock.answered("t1", 1.0)
    clock.delivered("t1", calls("read", "bash", "read"), 1.0)
    clock.asked("t1", 3.0)
    clock.asked("t1", 9.0)
    assert seconds(clock.usage(10.0)) == {"own": 8.0, "tool.bash+read": 2.0}


def test_names_of_tools_are_bounded() -> None:
    clock = UsageClock(since_s=0.0)
    for number in range(10_000):
        clock.answered(f"t{number}", float(number))
        clock.delivered(f"t{number}", calls(f"tool-{number}" * 100), float(number))
        clock.asked(f"t{number}", number + 0.5)
    usage = clock.usage(10_000.0)
    assert len(usage.tools) == MAX_NAMES
    assert len(seconds(usage)) == MAX_NAMES + 2, "the names, other tools and the agent's own time"


def test_a_request_with_an_edited_history_continues_the_only_open_answer() -> None:
    clock = UsageClock(since_s=0.0)
    clock.answered("t1", 0.0)
    clock.delivered("t1", calls("bash"), 0.0)
    clock.asked("", 4.0)
    assert seconds(clock.usage(4.0)) == {"tool.bash": 4.0}


def test_each_turn_and_each_call_of_an_answer_is_a_segment() -> None:
    clock = UsageClock(since_s=0.0)
    for turn, start_s in ((clock.next_turn(), 0.0), (clock.next_turn(), 20.0)):
        clock.add("gate", start_s, start_s + 1.0, turn=turn)
        clock.called("e1", completion(queue_s=1.0, prefill_s=2.0), start_s + 1, start_s + 8, held_s=0.0, turn=turn)
        clock.answered(f"t{turn}", start_s + 8, turn=turn)
        made = [*calls("bash", arguments='{"command": "pytest -x"}'), *calls("read", arguments='{"path": "a.py"}')]
        clock.delivered(f"t{turn}", made, start_s + 8)
        clock.asked(f"t{turn}", start_s + 15)
    usage = clock.usage(40.0)
    assert Timeline.from_json(usage.timeline).segments[:6] == [
        Segment("gate", -40.0, -39.0, 1),
        Segment("engine.queue", -39.0, -38.0, 1, "e1"),
        Segment("engine.prefill", -38.0, -36.0, 1, "e1"),
        Segment("engine.decode", -36.0, -32.0, 1, "e1"),
        Segment("tool.bash", -32.0, -25.0, 1, "pytest -x"),
        Segment("tool.read", -32.0, -25.0, 1, "a.py"),
    ]
    assert seconds(usage)["tool.bash+read"] == 14.0, "the path has one part for both"


def test_a_session_of_100000_calls_has_a_bounded_usage_and_exact_sums() -> None:
    clock = UsageClock(since_s=0.0)
    for number in range(100_000):
        clock.add("engine", number, number + (0.25 if number != 777 else 0.75), turn=number + 1)
    assert len(clock._intervals) == MAX_INTERVALS
    assert len(clock._timeline.segments) < 2 * MAX_SEGMENTS
    timeline = Timeline.from_json(clock.usage(100_000.0).timeline)
    assert len(timeline.segments) == MAX_SEGMENTS
    assert Segment("engine", 777.0 - 1e5, 777.75 - 1e5, 778) in timeline.segments, "the longest stay"
    merged = timeline.merged["engine"]
    assert merged.number == 100_000 - MAX_SEGMENTS
    assert merged.seconds + sum(each.seconds for each in timeline.segments) == pytest.approx(25_000.5)
    assert timeline.left_out == 100_000 - MAX_INTERVALS


# What a worker adds.


def ended_session(clock: UsageClock, now_s: float) -> SessionReport:
    empty = report_of(Session(SessionSpec(session_id=SessionId("s")), opened_at=0.0))
    return replace(empty, usage=clock.usage(now_s))


def test_the_parts_of_all_processes_meet_on_the_worker_s_clock_and_add_up() -> None:
    async def main() -> Breakdown:
        time, now = AttemptTime(), asyncio.get_running_loop().time
        with time.measured():
            with time.clock(TRACER, "boot", "boot", "boot"):
                await asyncio.sleep(3.0)
                time.booted(TWO_BOOTS, 0.0)
            time.split("queue", 2.0)
            with time.clock(TRACER, "agent", "agent", "agent"), time.services():
                # Another process, whose clock is hours ahead.
                session = UsageClock(since_s=9000.0)
                session.called("e0", completion(queue_s=0.5, prefill_s=0.5), 9000.0, 9004.0, held_s=0.0)
                session.answered("t1", 9004.0)
                session.delivered("t1", calls("search"), 9004.0)
                session.asked("t1", 9008.0)
                await asyncio.sleep(5.0)
                with current_service_time().within("retriever"):
                    await asyncio.sleep(2.0)
                await asyncio.sleep(3.0)
            time.session_ended(ended_session(session, 9010.0), now())
            began_s = now()
            with time.clock(TRACER, "evaluate", "evaluate", "evaluate"):
                await asyncio.sleep(4.0)
                time.evaluated(EVALUATED, began_s, None)
            await asyncio.sleep(0.25)
        return time.breakdown()

    found = run_virtual(main())
    assert {part: round(value, 6) for part, value in found.parts_s.items()} == {
        "queue": 2.0,
        "boot": 1.0,
        "engine.queue": 0.5,
        "engine.prefill": 0.5,
        "engine.decode": 3.0,
        "own": 2.0,
        "service.retriever": 2.0,
        "tool.search": 2.0,
        "evaluate.queue": 1.0,
        "evaluate.boot": 1.0,
        "evaluate.check": 1.5,
        "other": 0.75,
    }
    assert round(found.wall_s, 6) == round(sum(found.parts_s.values()), 6) == 17.25
    assert list(found.parts_s) == sorted(found.parts_s, key=place_of)


def test_the_timeline_shows_parallel_calls_beside_each_other_and_every_boot() -> None:
    async def main() -> Breakdown:
        time = AttemptTime(began_at_s=1e9)
        with time.measured():
            with time.clock(TRACER, "boot", "boot", "boot"):
                await asyncio.sleep(3.0)
                time.booted(TWO_BOOTS, 0.0)

            async def call(name: str, seconds: float) -> None:
                with in_part(f"tool.{name}", f"{name} it"):
                    await asyncio.sleep(seconds)

            with time.clock(TRACER, "agent", "agent", "agent"):
                await asyncio.gather(call("slow", 6.0), call("quick", 2.0))
            with time.clock(TRACER, "evaluate", "evaluate", "evaluate"):
                await asyncio.sleep(4.0)
                time.evaluated(EVALUATED, 9.0, None)
        return time.breakdown()

    found = run_virtual(main())
    assert found.parts_s == pytest.approx(
        {
            "queue": 2.0,
            "boot": 1.0,
            "tool.slow": 4.0,
            "tool.quick": 2.0,
            "evaluate.queue": 1.0,
            "evaluate.boot": 1.0,
            "evaluate.check": 1.5,
            "other": 0.5,
        }
    ), "each moment once: of both calls the one that began last"
    assert sum(found.parts_s.values()) == pytest.approx(found.wall_s)
    assert found.timeline == Timeline(
        began_at_s=1e9,
        segments=[
            Segment("queue", 0.0, 2.0, 0, "host-1"),
            Segment("boot", 2.0, 2.25, 0, "host-1: BootFailed"),
            Segment("boot", 2.25, 2.5),
            Segment("boot", 2.5, 3.0, 0, "host-2"),
            Segment("tool.quick", 3.0, 5.0, 0, "quick it"),
            Segment("tool.slow", 3.0, 9.0, 0, "slow it"),
            Segment("evaluate.queue", 9.0, 10.0),
            Segment("evaluate.boot", 10.0, 11.0, 0, "host-3"),
            Segment("evaluate.check", 11.0, 12.5),
            Segment("other", 12.5, 13.0),
        ],
    )
    assert found.within_s["boot"] == (2.0, 3.0)
    assert found.within_s["tool.slow"] == (5.0, 9.0)


async def test_clocks_that_agree_place_what_another_process_did() -> None:
    now_s, unix_now_s = interval_clock()(), time.time()
    assert moment_between(now_s - 9.0, now_s + 9.0, unix_now_s + 2.0) == pytest.approx(now_s + 2.0, abs=0.5)
    assert moment_between(now_s - 9.0, now_s + 9.0, unix_now_s + 3600.0) == now_s + 9.0, "but not where it cannot be"
    assert moment_between(now_s - 9.0, now_s + 9.0, 0.0) == now_s - 9.0
    assert moment_between(now_s - 9.0, now_s + 9.0, None) == pytest.approx(now_s)


def turn_before_a_tool(*, calls_s: float, replies_s: float, late_s: float = 3.0, restart_s: float = 0.0) -> Breakdown:
    """Return the breakdown of a turn of a second before a tool of the worker's own. Calls of the gateway and their
    replies take so long, the report's reply `late_s`; the gateway restarted `restart_s` after the session's opening, if
    it did."""

    async def main() -> Breakdown:
        time, now = AttemptTime(), asyncio.get_running_loop().time
        with time.measured(), time.clock(TRACER, "agent", "agent", "agent"):
            with time.session_opens():
                await asyncio.sleep(calls_s)
                opened_s = now()
                await asyncio.sleep(replies_s)
            await asyncio.sleep(2.0)
            session = UsageClock(since_s=opened_s + restart_s)
            session.called("e0", completion(queue_s=0.25, prefill_s=0.25), now(), now() + 1.0, held_s=0.0)
            await asyncio.sleep(1.0)
            with in_part("tool.run"):
                await asyncio.sleep(4.0)
        asked_s = now()
        with time.clock(TRACER, "finish", "finish", "agent"):
            await asyncio.sleep(0.5)
            report = ended_session(session, now())
            await asyncio.sleep(late_s)
            time.session_ended(report, asked_s)
        return time.breakdown()

    return run_virtual(main())


def test_a_late_report_does_not_hide_the_end_of_a_turn_below_a_tool() -> None:
    parts_s = turn_before_a_tool(calls_s=0.0, replies_s=0.0).parts_s
    assert parts_s["engine.decode"] == pytest.approx(0.5)
    assert parts_s["tool.run"] == pytest.approx(4.0)
    parts_s = turn_before_a_tool(calls_s=0.1, replies_s=0.3).parts_s
    assert parts_s["engine.decode"] == pytest.approx(0.4)


def test_without_the_opening_a_session_is_placed_by_its_report_alone() -> None:
    # In the middle of the 1.2 s between call and reply, 0.1 s after the report itself.
    parts_s = turn_before_a_tool(calls_s=0.0, replies_s=0.0, late_s=0.7, restart_s=1.5).parts_s
    assert parts_s["engine.decode"] == pytest.approx(0.4)
    assert parts_s["tool.run"] == pytest.approx(4.0)


def test_an_action_that_the_worker_runs_itself_is_its_own_part_of_the_agent() -> None:
    async def main() -> Breakdown:
        time = AttemptTime()
        with time.measured(), time.clock(TRACER, "agent", "agent", "agent"):
            await asyncio.sleep(1.0)
            with in_part("tool.run"):
                await asyncio.sleep(2.0)
        return time.breakdown()

    assert run_virtual(main()).parts_s == pytest.approx({"own": 1.0, "tool.run": 2.0})


@pytest.mark.parametrize("phase", ["boot", "evaluate"])
def test_an_attempt_that_is_cancelled_says_where_it_was(phase: str) -> None:
    async def main() -> tuple[str, float, Breakdown]:
        time = AttemptTime()

        async def work() -> None:
            with time.measured(), time.clock(TRACER, phase, phase, phase):
                await asyncio.sleep(1e6)

        task = asyncio.ensure_future(work())
        await asyncio.sleep(7.0)
        part, part_s, _ = time.in_progress()
        task.cancel()
        await asyncio.wait([task])
        return part, part_s, time.breakdown()

    part, part_s, found = run_virtual(main())
    assert (part, part_s) == (phase, 7.0)
    assert found.parts_s == {phase: 7.0}


# What the ledger keeps.


def test_a_breakdown_survives_the_ledger_and_is_bounded() -> None:
    wild = Breakdown(
        wall_s=12.3456789,
        parts_s={f"tool.{number}": 1.0 for number in range(1000)},
        labels={"tools": tuple(map(str, range(1000))), "image": "a\ud800b" * 100, "warm": True, "turns": 3},
    )
    plain = plain_breakdown(wild)
    assert len(plain.parts_s) == MAX_PARTS
    assert sum(plain.parts_s.values()) == 1000.0
    assert Breakdown.from_json(plain.to_json()) == replace(plain, wall_s=12.3457)
    assert len(plain.to_json()) < 8000


HOSTILE = "a\ud800\nb\x1b[1m "


def test_a_timeline_survives_the_ledger_and_is_bounded() -> None:
    chance = random.Random(5)
    wild = Timeline(
        segments=[
            Segment(
                f"tool.{number % 90}", start, start + chance.uniform(0, 9), number, f"a\ud800\nb\x1b[1m{number} " * 99
            )
            for number in range(10_000)
            for start in [chance.uniform(0, 1e5)]
        ],
        merged={f"tool.{number}": Merged(3, 1.5) for number in range(1000)},
        began_at_s=1.7e9,
    )
    whole_s = sum(each.seconds for each in wild.segments) + 1500.0
    plain = plain_timeline(wild)
    assert len(plain.segments) == MAX_SEGMENTS
    assert sum(each.number for each in plain.merged.values()) == 10_000 - MAX_SEGMENTS + 3000
    kept_s = sum(each.seconds for each in plain.segments) + sum(each.seconds for each in plain.merged.values())
    assert kept_s == pytest.approx(whole_s)
    assert all(each.detail.isprintable() and len(each.detail) <= MAX_DETAIL_CHARACTERS for each in plain.segments)
    text = plain.to_json()
    assert len(text.encode()) < 14_000, "8 KB, and the merged sums of 64 parts"
    stored = Timeline.from_json(text)
    assert stored.to_json() == text
    assert [each.part for each in stored.segments] == [each.part for each in plain.segments]


def test_a_usual_timeline_takes_8_kilobytes() -> None:
    timeline = Timeline()
    for number in range(43):
        at_s = 20.0 * number
        for part, length_s in (("gate", 0.1), ("engine.queue", 0.5), ("engine.prefill", 1.2), ("engine.decode", 9.1)):
            timeline.add(Segment(part, at_s, at_s + length_s, number, "engine-3"))
            at_s += length_s
        timeline.add(Segment("tool.bash", at_s, at_s + 6.5, number, f"python -m pytest tests/test_{number}.py -x"))
        timeline.add(Segment("own", at_s + 6.5, at_s + 7.25))
    assert len(timeline.segments) == 258
    assert len(timeline.settled().to_json()) < 8_192


def test_reversed_segments_are_counted_and_none_is_negative() -> None:
    plain = plain_timeline(Timeline(segments=[Segment("boot", 5.0, 3.0), Segment("own", -2.0, 1.0)]))
    assert (plain.segments, plain.left_out) == ([Segment("own", 0.0, 1.0)], 1)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, "much"])
def test_times_that_are_none_are_refused(seconds: Any) -> None:
    buffer = cases.core()
    buffer.open_epoch(None, 0.0)
    (order,) = buffer.issue(1, V0, 0.0)
    result = replace(cases.ended(order, Cause.INFRA), breakdown=Breakdown(parts_s={"boot": seconds}))
    assert classify(result, buffer.state.path.tree).outcome.detail.startswith("malformed result")


def test_an_attempt_cut_off_by_its_group_still_tells_where_its_time_went() -> None:
    """It is the straggler itself: the result of its cancellation comes after the group was sealed."""
    buffer = cases.core(cases.SMALL.model_copy(update={"group_size": 4, "rule": "count(2)", "unfinished": "abort"}))
    buffer.open_epoch(None, 0.0)
    orders = buffer.issue(4, V0, 0.0)
    for order in orders[:2]:
        buffer.offer(cases.result(order, V0), 5.0)
    late = orders[-1]
    assert buffer.state.rollouts[late.rollout_id].state is RolloutState.CANCELLED
    assert (late.rollout_id, late.attempt) in buffer.to_cancel(V0)
    outcome = Outcome(reward=None, trainable=False, cause=Cause.CANCELLED)
    spent = Breakdown(wall_s=5.0, parts_s=summed([("boot", 5.0)]), labels={"image": "slow"})
    told = replace(
        cases.ended(late, Cause.CANCELLED), outcome=outcome, breakdown=spent, trace_id="abc", host="h", turns=2
    )
    buffer.offer(told, 6.0)
    attempt = buffer.state.attempts[late.rollout_id]
    assert (attempt.breakdown, attempt.trace_id, attempt.host, attempt.turns) == (spent, "abc", "h", 2)
    assert (attempt.cause, attempt.ended_at_s, attempt.offered) == (Cause.CANCELLED, 5.0, False)
    assert attempt.detail == "cancelled: its group was sealed without it"


def test_parts_of_tools_are_the_agent_s() -> None:
    assert [part for part in (*PARTS, "tool.bash", "service.x") if is_of_agent(part)] == [
        *("gate", "engine", "engine.queue", "engine.prefill", "engine.decode", "render", "record", "own"),
        *("tool.bash", "service.x"),
    ]


@pytest.mark.parametrize(
    ("arguments", "head"),
    [
        ('{"timeout": 5, "command": "git  diff\\nHEAD"}', "git diff HEAD"),
        ('{"command": ["bash", "-lc", "ls"]}', "bash -lc ls"),
        ('{"line": 3, "path": "src/a.py", "text": "x"}', "src/a.py"),
        ('{"depth": 3}', ""),
        ("not json", "not json"),
        ('["a"]', '["a"]'),
        ("[" * 100_000, "[" * 80),
        ('{"command": "' + "x" * 100_000 + '"}', '{"command": "' + "x" * 67),
    ],
)
def test_the_head_of_a_call_is_its_command_or_first_text(arguments: str, head: str) -> None:
    assert head_of_call(arguments) == head


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["boot", "gate", "tool.bash"]),
            st.integers(0, 3),
            st.integers(0, 3),
            st.integers(0, 2),
            st.sampled_from(["", "ls"]),
        ),
        max_size=6,
    )
)
def test_a_timeline_of_tiny_segments_is_read_as_it_was_stored(rows: list[tuple[str, int, int, int, str]]) -> None:
    segments = [Segment(part, at / 1e4, (at + ticks) / 1e4, turn, detail) for part, at, ticks, turn, detail in rows]
    timeline = Timeline(segments=sorted(segments, key=lambda each: each.start_s))
    assert Timeline.from_json(timeline.to_json()) == timeline
