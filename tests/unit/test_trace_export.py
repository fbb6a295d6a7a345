"""Which traces a collector gets, that it gets none twice, and that its failures cost nothing."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import orjson
import pyarrow.parquet as pq
import pytest

import headrace.actors.cli.app as cli
from headrace.actors.record.files.node_copies import NODES
from headrace.actors.record.files.running import FOLDER as RUNNING
from headrace.actors.record.files.running import RunningFile, RunningRollout, write_running
from headrace.actors.run.config import load_recipe, recorded
from headrace.actors.telemetry.page.actor import Observer
from headrace.actors.telemetry.spans.attempts import slow_or_failed
from headrace.actors.telemetry.spans.exporting import CURSOR, Cursor, TraceExport
from headrace.actors.telemetry.spans.exporting import FOLDER as OBSERVER
from headrace.actors.telemetry.spans.receiver import Receiver
from headrace.actors.telemetry.spans.store import FOLDER, SpanFolder
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.primitives.file_lock import FileLock
from headrace.buffer.trajectories.types import Cause, RolloutOrder
from headrace.serve.tracing import span_names as names
from headrace.serve.tracing.telemetry import TelemetryConfig, configure
from headrace.serve.tracing.tracing import describe, start_rollout_span, trace_id_for
from support import replay_cases as cases
from support.collectors import grpc_collector, http_collector
from support.gateway_rig import until

TASKS = cases.SMALL.model_copy(update={"group_size": 60, "batch_size": 60})
KILLED = """
import os, signal, sys
from pathlib import Path
from headrace.actors.telemetry.spans.exporting import TraceExport
from headrace.actors.telemetry.spans.receiver import Receiver

class Dying:
    def __init__(self, url, number):
        self.receiver, self.number = Receiver(url, "http/protobuf"), number

    def send(self, spans):
        self.number -= 1
        if self.number < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        sent = self.receiver.send(spans)
        if self.number == 0 and sys.argv[4] == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return sent

TraceExport(Path(sys.argv[1]), Dying(sys.argv[2], int(sys.argv[3])), 1.0).round(grace_s=0.0)
"""


def trace_of(order: RolloutOrder) -> str:
    return f"{trace_id_for('r', order.rollout_id, order.attempt):032x}"


async def make_run(
    folder: Path, *, slow_s: float = 100.0, turns: int = 3, ago_s: float = 400.0
) -> dict[str, RolloutOrder]:
    """A run of sixty rollouts, of which one was slow, one failed, and one is stuck, with spans; by what it is."""
    now = time.time() - ago_s
    clock = [now]
    async with await ReplayStore.open(
        folder, TASKS, cases.tasks(1), run_id="r", seed=3, clock=lambda: clock[0]
    ) as store:
        version = await store.open_epoch(None)
        orders = await store.issue(60, version)
        clock[0] = now + 10
        await store.offer_many([cases.result(order, version) for order in orders[:57]])
        failed = cases.ended(orders[57], Cause.INFRA)
        await store.offer_many([failed])
        clock[0] = now + slow_s
        await store.offer_many([cases.result(orders[58], version)])
    (folder / "run_id").write_text("r")
    telemetry = configure(
        TelemetryConfig(recipe="quickstart"), process="worker-0-1", spans_dir=folder / FOLDER, run_id="r", install=False
    )
    tracer = telemetry.tracer("test")
    for order in orders:
        root = start_rollout_span(tracer, order.rollout_id, order.attempt, {names.TASK_ID: order.task_id})
        with tracer.start_as_current_span(names.AGENT, context=_in(root)):
            for number in range(turns):
                attributes = {names.TURN_NUMBER: number, names.INPUT_TOKENS: 100 + number, names.OUTPUT_TOKENS: 7}
                with tracer.start_as_current_span(names.TURN, attributes=attributes):
                    pass
        if order is orders[57]:
            describe(root, failed.outcome)
        elif order is not orders[59]:
            describe(root, cases.result(order, version).outcome)
        if order is not orders[59]:
            root.end()
    tracer.start_span(names.STEP, attributes={names.STEP_NUMBER: 1}).end()
    telemetry.shutdown()
    stuck = RunningRollout(
        rollout_id=orders[59].rollout_id,
        attempt=orders[59].attempt,
        task=orders[59].task_id,
        purpose="train",
        agent="shell",
        host="h",
        part="agent",
        started_s=now,
        part_since_s=now,
    )
    write_running(folder / RUNNING, RunningFile(worker="w", node="n", pid=1, written_s=time.time(), rollouts=(stuck,)))
    return {"ordinary": orders[0], "failed": orders[57], "slow": orders[58], "stuck": orders[59]}


def _in(root: object) -> object:
    from opentelemetry import trace
    from opentelemetry.context import Context

    return trace.set_span_in_context(root, Context())  # type: ignore[arg-type]


def ids(spans: Iterable[dict[str, object]]) -> list[tuple[object, object]]:
    return [(span["trace_id"], span["span_id"]) for span in spans]


@pytest.mark.parametrize("collector", [http_collector, grpc_collector])
async def test_slow_failed_and_stuck_traces_are_sent_once_with_what_they_hold(tmp_path: Path, collector) -> None:
    rollouts = await make_run(tmp_path)
    assert trace_of(rollouts["slow"]) in slow_or_failed(tmp_path)
    with collector() as (url, collected), FileLock(tmp_path / "driver.lock"):
        protocol = "grpc" if collector is grpc_collector else "http/protobuf"
        export = TraceExport(tmp_path, Receiver(url, protocol), share=0.0)
        assert export.round(grace_s=0.0)
        export.round(grace_s=0.0)
        spans = collected.spans()
    sent = {span["trace_id"] for span in spans}
    assert {trace_of(rollouts[what]) for what in ("slow", "failed", "stuck")} < sent
    assert trace_of(rollouts["ordinary"]) not in sent
    assert len(sent) == 4, "and the step's"
    assert len(set(ids(spans))) == len(spans) == 2 * 5 + 4 + 1
    by_name = {span["name"]: span for span in spans if span["trace_id"] in (trace_of(rollouts["failed"]), *sent)}
    assert {"rollout", "step", "chat", "invoke_agent"} == set(by_name)
    failed = next(span for span in spans if span["trace_id"] == trace_of(rollouts["failed"]) and not span["parent_id"])
    assert (failed["status"], failed["attributes"]["error.type"]) == (2, "infra")
    assert failed["resource"]["openinference.project.name"] == failed["resource"]["headrace.run.id"] == "r"
    turn = by_name["chat"]["attributes"]
    assert turn["gen_ai.usage.input_tokens"] == 100 + turn["headrace.turn.number"]


async def test_a_share_of_ordinary_traces_is_sent_whole(tmp_path: Path) -> None:
    await make_run(tmp_path)
    with http_collector() as (url, collected):
        TraceExport(tmp_path, Receiver(url, "http/protobuf"), share=1.0).round(grace_s=0.0)
        spans = collected.spans()
    assert len({span["trace_id"] for span in spans if span["name"] == "rollout"}) == 59
    wanted = ids(
        span for span in SpanFolder.of_run(tmp_path).spans() if span["trace_id"] in {s["trace_id"] for s in spans}
    )
    assert sorted(ids(spans)) == sorted(wanted)


async def test_a_collector_that_refuses_gets_everything_once_when_it_takes_spans(tmp_path: Path) -> None:
    await make_run(tmp_path)
    with http_collector() as (url, collected):
        collected.refusing = 503
        export = TraceExport(tmp_path, Receiver(url, "http/protobuf"), share=1.0)
        assert not export.round(grace_s=0.0)
        assert not export.round(grace_s=0.0)
        collected.refusing = None
        # Another process continues.
        export = TraceExport(tmp_path, Receiver(url, "http/protobuf"), share=1.0)
        assert export.round(grace_s=0.0)
        spans = collected.spans()
    assert len(set(ids(spans))) == len(spans) == 59 * 5 + 1
    assert export.cursor.unconfirmed == 0


@pytest.mark.parametrize("when", ["before", "after"])
async def test_no_span_is_sent_twice_after_kill_9_and_doubtful_traces_are_counted(tmp_path: Path, when: str) -> None:
    await make_run(tmp_path, turns=40)
    with http_collector() as (url, collected):
        arguments = [sys.executable, "-c", KILLED, str(tmp_path), url, "2", when]
        process = await asyncio.create_subprocess_exec(*arguments)
        assert await asyncio.wait_for(process.wait(), 60) == -9
        before = len(collected.spans())
        export = TraceExport(tmp_path, Receiver(url, "http/protobuf"), share=1.0)
        assert export.round(grace_s=0.0)
        spans = collected.spans()
    assert before > 0
    assert len(set(ids(spans))) == len(spans)
    assert 0 < export.cursor.unconfirmed < 59
    whole = len({span["trace_id"] for span in spans if span["name"] == "rollout"})
    assert whole == (59 if when == "after" else 59 - export.cursor.unconfirmed)
    assert export.cursor.open == {}


async def test_a_trace_that_the_collector_refuses_is_counted_and_the_others_follow(tmp_path: Path) -> None:
    await make_run(tmp_path)
    with http_collector() as (url, collected):
        collected.poison = names.STEP
        receiver = Receiver(url, "http/protobuf")
        export = TraceExport(tmp_path, receiver, share=1.0)
        assert export.round(grace_s=0.0)
        spans = collected.spans()
    assert len(set(ids(spans))) == len(spans) == 59 * 5
    assert (export.cursor.refused, export.cursor.open) == (1, {})
    assert Cursor.read(tmp_path / OBSERVER / CURSOR).refused == 1


async def test_a_stored_span_that_is_not_otlp_is_counted_and_the_others_follow(tmp_path: Path) -> None:
    await make_run(tmp_path)
    path = tmp_path / FOLDER / "engines-9.jsonl"
    now = str(time.time_ns() - 10**9)
    odd = {"traceId": "5" * 32, "spanId": "6" * 16, "parentSpanId": "zz", "name": "odd", "endTimeUnixNano": now}
    odd |= {"startTimeUnixNano": now}
    group = {"resource": {"attributes": []}, "scopeSpans": [{"scope": {"name": "x"}, "spans": [odd]}]}
    path.write_bytes(orjson.dumps({"resourceSpans": [group]}) + b"\n")
    with http_collector() as (url, collected):
        export = TraceExport(tmp_path, Receiver(url, "http/protobuf"), share=1.0)
        assert export.round(grace_s=0.0)
        spans = collected.spans()
    assert len(set(ids(spans))) == len(spans) == 59 * 5 + 1
    assert (export.cursor.refused, export.cursor.open) == (1, {})


async def test_spans_of_other_nodes_that_come_after_the_observer_has_ended_are_sent_by_the_next(tmp_path: Path) -> None:
    rollouts = await make_run(tmp_path, ago_s=101.0)
    (tmp_path / FOLDER).rename(tmp_path / "elsewhere")
    with http_collector() as (url, collected):
        config = TelemetryConfig(otlp_endpoint=url, otlp_share=1.0)
        async with Observer(tmp_path, config):
            path = tmp_path / OBSERVER / CURSOR
            await until(lambda: path.exists() and Cursor.read(path).through_s > 0)
        assert collected.spans() == []
        (tmp_path / NODES / "n").mkdir(parents=True)
        (tmp_path / "elsewhere").rename(tmp_path / NODES / "n" / FOLDER)
        async with Observer(tmp_path, config) as last:
            await last.finish()
            await last.finish()
        spans = collected.spans()
    assert len(set(ids(spans))) == len(spans)
    slow = [span for span in spans if span["trace_id"] == trace_of(rollouts["slow"])]
    assert sorted(span["name"] for span in slow) == ["chat", "chat", "chat", "invoke_agent", "rollout"]
    assert "step" in {span["name"] for span in spans}


def write_span(
    path: Path, name: str, trace_id: str, ended_s: float, *, took_s: float = 1.0, parent: bool = False
) -> None:
    """Append the line of a span, the only one of its trace with or without a parent, to a file that changes then."""
    times = {"startTimeUnixNano": str(int((ended_s - took_s) * 1e9)), "endTimeUnixNano": str(int(ended_s * 1e9))}
    span = {"traceId": trace_id, "spanId": f"{parent:d}{trace_id[:15]}", "name": name} | times
    if parent:
        span["parentSpanId"] = f"0{trace_id[:15]}"
    group = {"resource": {"attributes": []}, "scopeSpans": [{"scope": {"name": "x"}, "spans": [span]}]}
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        file.write(orjson.dumps({"resourceSpans": [group]}) + b"\n")
    os.utime(path, (ended_s, ended_s))


@pytest.mark.parametrize("round_is", ["before", "between", "after"])
async def test_a_clock_set_back_by_an_hour_between_two_ends_loses_no_trace_and_sends_none_twice(
    tmp_path: Path, round_is: str
) -> None:
    """With a round before the clock is set, one between that and the second end, or only one after both."""
    clock = [time.time()]
    spans = tmp_path / FOLDER / "worker.jsonl"
    steps = [f"{number:032x}" for number in (1, 2, 3)]
    (tmp_path / "run_id").write_text("r")

    async def end(order: RolloutOrder) -> None:
        await store.offer_many([cases.ended(order, Cause.INFRA)])
        write_span(spans, names.ROLLOUT, trace_of(order), clock[0])

    with http_collector() as (url, collected):
        async with await ReplayStore.open(
            tmp_path, cases.SMALL, cases.tasks(2), run_id="r", seed=3, clock=lambda: clock[0]
        ) as store:
            export = TraceExport(tmp_path, Receiver(url, "http/protobuf"), 0.0, clock=lambda: clock[0])
            before, first, second, last = await store.issue(4, await store.open_epoch(None))
            write_span(spans, names.STEP, steps[0], clock[0] - 100)
            await end(before)
            clock[0] += 1
            assert export.round(grace_s=0.0)
            await end(first)
            if round_is == "before":
                assert export.round(grace_s=0.0)
            clock[0] -= 3600
            if round_is == "between":
                # The file's writer goes on, and the observer comes later.
                os.utime(spans, (clock[0], clock[0]))
                clock[0] += 300
                assert export.round(grace_s=0.0)
            await end(second)
            assert export.round(grace_s=0.0)
            assert {trace_of(each) for each in (before, first, second)} <= {
                each["trace_id"] for each in collected.spans()
            }
            # The same times pass again.
            clock[0] += 1000
            write_span(spans, names.STEP, steps[1], clock[0] - 1)
            assert export.round(grace_s=0.0)
            clock[0] += 9000
            await end(last)
            write_span(spans, names.STEP, steps[2], clock[0] - 1)
            # Another process continues.
            export = TraceExport(tmp_path, Receiver(url, "http/protobuf"), 0.0, clock=lambda: clock[0])
            assert export.round(grace_s=0.0)
            assert export.round(grace_s=0.0)
        found = [str(each["trace_id"]) for each in collected.spans()]
    assert sorted(found) == sorted([*map(trace_of, (before, first, second, last)), *steps])
    assert (export.cursor.unconfirmed, export.cursor.decided) == (0, {})


async def test_an_end_waits_for_its_spans_by_the_clock_that_is_never_set(tmp_path: Path) -> None:
    """An attempt that ended a day ago, or tomorrow, may have ended just now."""
    (tmp_path / "run_id").write_text("r")
    clock = [time.time() - 86400.0]
    with http_collector() as (url, collected):
        async with await ReplayStore.open(
            tmp_path, cases.SMALL, cases.tasks(2), run_id="r", seed=3, clock=lambda: clock[0]
        ) as store:
            orders = await store.issue(2, await store.open_epoch(None))
            export = TraceExport(tmp_path, Receiver(url, "http/protobuf"), 0.0)
            for order in orders:
                await store.offer_many([cases.ended(order, Cause.INFRA)])
                write_span(tmp_path / FOLDER / "worker.jsonl", names.ROLLOUT, trace_of(order), clock[0])
                clock[0] += 2 * 86400.0
            assert export.round(grace_s=3600.0)
            assert (export.cursor.through, collected.spans()) == (0, [])
            # After a reboot its own clock begins again.
            seen_s, newest = export.cursor.seen[0]
            export.cursor.seen.insert(0, (seen_s + 86400.0, newest))
            assert export.round(grace_s=3600.0)
            assert collected.spans() == []
            # Another process knows when they were seen.
            export.cursor.seen[:] = [(seen_s - 3600.0, newest)]
            (tmp_path / OBSERVER / CURSOR).write_bytes(orjson.dumps(asdict(export.cursor)))
            export = TraceExport(tmp_path, Receiver(url, "http/protobuf"), 0.0)
            assert export.round(grace_s=3600.0)
            assert {each["trace_id"] for each in collected.spans()} == {trace_of(order) for order in orders}


async def test_traces_are_sent_from_their_begin_however_long_they_took(tmp_path: Path) -> None:
    """A push of ten minutes, and an attempt whose worker died after them, so that nobody told how long it took."""
    (tmp_path / "run_id").write_text("r")
    began_s = time.time() - 1000
    clock = [began_s]
    early, late, push = tmp_path / FOLDER / "early.jsonl", tmp_path / FOLDER / "late.jsonl", "5" * 32
    with http_collector() as (url, collected):
        async with await ReplayStore.open(
            tmp_path, cases.SMALL, cases.tasks(2), run_id="r", seed=3, clock=lambda: clock[0]
        ) as store:
            [order] = await store.issue(1, await store.open_epoch(None))
            write_span(early, names.TURN, trace_of(order), began_s + 10, parent=True)
            write_span(early, names.PUSH_PHASE, push, began_s + 10, parent=True)
            export = TraceExport(tmp_path, Receiver(url, "http/protobuf"), 0.0, clock=lambda: clock[0])
            clock[0] += 590
            assert export.round(grace_s=0.0)
            clock[0] += 5
            await store.abandon([(order.rollout_id, order.attempt)])
            assert export.round(grace_s=0.0)
            clock[0] += 5
            write_span(late, names.PUSH, push, clock[0] - 1, took_s=595)
            assert export.round(grace_s=0.0)
        found = [(each["trace_id"], each["name"]) for each in collected.spans()]
    assert sorted(found) == sorted([(trace_of(order), names.TURN), (push, names.PUSH_PHASE), (push, names.PUSH)])


async def test_a_damaged_record_of_what_was_sent_is_refused(tmp_path: Path) -> None:
    await make_run(tmp_path)
    (tmp_path / "observer").mkdir()
    (tmp_path / "observer" / CURSOR).write_bytes(b"{")
    with pytest.raises(ValueError, match="unexpected end"):
        TraceExport(tmp_path, Receiver("http://127.0.0.1:9/v1/traces", "http/protobuf"), share=1.0)


def exported(monkeypatch: pytest.MonkeyPatch, run: Path, *options: str) -> int:
    """Return the exit code of `headrace trace export`."""
    monkeypatch.setattr(sys, "argv", ["headrace", "trace", "export", str(run), *options])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


async def test_spans_are_exported_for_perfetto_and_as_parquet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    await make_run(run)
    recipe = Path(__file__).parents[2] / "scripts" / "recipes" / "simulated.toml"
    document = recorded(load_recipe(recipe, (), tmp_path).model_dump(mode="json"))
    (run / "config.json").write_bytes(orjson.dumps(document))
    assert exported(monkeypatch, run, "--perfetto", str(tmp_path / "trace.json")) == 0
    events = orjson.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == 59 * 5 + 4 + 1
    assert exported(monkeypatch, run, "--parquet", str(tmp_path / "out"), "--slow") == 0
    table = pq.read_table(tmp_path / "out" / "spans.parquet")
    assert table.num_rows == 2 * 5 + 4, "slow, failed and stuck"
    assert str(table.schema.field("start").type) == "timestamp[ns, tz=UTC]"
    for options, expected in (
        ((), "name one target"),
        (("--otlp", "collector"), "not the full URL"),
        (("--otlp", "http://127.0.0.1:9/v1/traces", "--protocol", "tcp"), "unknown protocol 'tcp'"),
        (("--otlp", "http://127.0.0.1:9/v1/traces"), "does not take spans"),
    ):
        capsys.readouterr()
        assert exported(monkeypatch, run, *options) == 2
        assert expected in capsys.readouterr().err
