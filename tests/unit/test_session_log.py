"""Session log: sessions are restored from its complete lines."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.serve.gateway.capture.events import Exhausted, Failed, Spent
from headrace.serve.gateway.capture.rows import SessionReport, report_of, tree_of
from headrace.serve.gateway.capture.session import Budgets, Sampling, Session, SessionId, SessionSpec
from headrace.serve.gateway.capture.session_log import Opened, SessionLog
from headrace.serve.gateway.conversation import ToolSpec
from headrace.serve.gateway.errors import LogBroken
from headrace.serve.gateway.http import codec
from support.session_rig import Rig, asks, call, echo, results, user

SPEC = SessionSpec(session_id=SessionId("rollout/1"), sampling=Sampling(temperature=0.7), traceparent="00-a-b-01")
TOOLS = (ToolSpec("bash"),)


def played() -> Rig:
    """Return a session with every kind of event."""
    rig = Rig(Session(SPEC, 12.5))
    rig.cut(asks(user("a"), tools=TOOLS), [*b"xy"])
    first = rig.turn(asks(user("a"), tools=TOOLS), "THINK hm\n" + call("bash", command="é"))
    shown = (user("a"), echo(first), results((first.blocks[1].id, "out")))  # type: ignore[union-attr]
    rig.turn(asks(*shown, tools=TOOLS), "garbled")
    rig.turn(asks(*shown, user("again"), tools=TOOLS), "on")
    rig.turn(asks(user("other"), tools=TOOLS), "late", deliver=False)
    rig.record(Failed(failure="engine_failed: x"))
    rig.record(Spent(budget=Exhausted.WALL))
    return rig


def kept(folder: Path, rig: Rig) -> SessionLog:
    log = SessionLog(folder)
    log.open(Opened(spec=SPEC, token="t" * 32, opened_at=12.5))
    for event in rig.events:
        log.append(SPEC.session_id, event)
    return log


def same(one: SessionReport, other: SessionReport) -> None:
    for name in SessionReport.__dataclass_fields__:
        if name != "trajectory":
            assert getattr(one, name) == getattr(other, name), name
    assert one.trajectory is not None
    assert other.trajectory is not None
    for row, copy in zip(one.trajectory.rows, other.trajectory.rows, strict=True):
        for field in ("tokens_T", "loss_mask_T", "logprobs_T"):
            assert np.array_equal(getattr(row, field), getattr(copy, field))
        assert row.versions == copy.versions


def test_a_session_is_restored_from_its_log(tmp_path: Path) -> None:
    rig = played()
    kept(tmp_path, rig)
    log = SessionLog(tmp_path)
    [opened] = log.known()
    assert replace(opened, opened_at=12.5) == Opened(spec=SPEC, token="t" * 32, opened_at=12.5)
    assert opened.opened_at == pytest.approx(12.5, abs=1e-3)
    again = log.load(SPEC.session_id)
    same(report_of(again), report_of(rig.core))
    assert tree_of(again) == tree_of(rig.core)
    assert again.next_turn_id() == rig.core.next_turn_id()
    assert again.spec == SPEC
    request = asks(user("other"), tools=TOOLS)
    found = again.replay(again.match(request), request, repeats=False)
    assert found is not None, "what was not delivered is replayed"
    assert found.answer == rig.core.trie.sampled[-1].answer
    assert (tmp_path / next(os.walk(tmp_path))[2][0]).stat().st_mode & 0o077 == 0


def host(folder: Path, *, started_s: float, now_s: float) -> SessionLog:
    """The logs as a gateway sees them at the Unix time `now_s`, on a host that was started at `started_s`."""
    return SessionLog(folder, clock=lambda: now_s - started_s, wall=lambda: now_s)


def test_a_session_goes_on_on_a_host_with_another_monotonic_clock(tmp_path: Path) -> None:
    spec = SessionSpec(session_id=SPEC.session_id, budgets=Budgets(wall_s=600.0))
    before = host(tmp_path, started_s=1_000.0, now_s=1_000_100.0)
    rig = Rig(Session(spec, opened_at=999_100.0))
    before.open(Opened(spec=spec, token="t" * 32, opened_at=999_100.0))
    rig.turn(asks(user("a")), "on")
    for event in rig.events:
        before.append(spec.session_id, event)
    # 60 s later, on a host that was started 10 s ago.
    after = host(tmp_path, started_s=1_000_150.0, now_s=1_000_160.0)
    [opened] = after.known()
    assert opened.opened_at == pytest.approx(-50.0)
    session = after.load(spec.session_id)
    assert session.wall_left_s(10.0) == pytest.approx(540.0)


def test_a_session_of_a_host_whose_clock_is_ahead_has_just_been_opened(tmp_path: Path) -> None:
    host(tmp_path, started_s=0.0, now_s=1_003.0).open(Opened(spec=SPEC, token="t" * 32, opened_at=1_003.0))
    [opened] = host(tmp_path, started_s=900.0, now_s=1_000.0).known()
    assert opened.opened_at == 100.0


def test_a_truncated_log_restores_the_session_as_of_an_earlier_event(tmp_path: Path) -> None:
    rig, again = played(), Session(SPEC, 12.5)
    kept(tmp_path, rig)
    [path] = tmp_path.iterdir()
    data = path.read_bytes()
    after = [codec.write_report(report_of(again))]
    for event in rig.events:
        again.apply(event)
        after.append(codec.write_report(report_of(again)))
    ends = [index + 1 for index, byte in enumerate(data) if byte == ord("\n")]
    near = {end + offset for end in (0, *ends) for offset in range(-2, 3) if 0 <= end + offset <= len(data)}
    for cut in sorted(near | set(range(0, len(data), 61))):
        path.write_bytes(data[:cut])
        log, whole = SessionLog(tmp_path), data[:cut].count(b"\n")
        if whole:
            assert codec.write_report(report_of(log.load(SPEC.session_id))) == after[whole - 1]
            continue
        assert list(log.known()) == [], "nobody was told of a session whose first line is torn"
        with pytest.raises(LogBroken):
            log.load(SPEC.session_id)
        assert path.read_bytes() == data[:cut]


def test_every_prefix_of_a_log_restores_a_session(tmp_path: Path) -> None:
    rig = played()
    kept(tmp_path, rig)
    [path] = tmp_path.iterdir()
    data = path.read_bytes()
    lines = data.count(b"\n")
    for cut in range(data.index(b"\n") + 1, len(data) + 1, 97):
        path.write_bytes(data[:cut])
        log = SessionLog(tmp_path)
        core = log.load(SPEC.session_id)
        whole = data[:cut].count(b"\n")
        assert len(core.trie.sampled) <= 5
        log.append(SPEC.session_id, Failed(failure="after the restart"))
        assert path.read_bytes().count(b"\n") == whole + 1 <= lines + 1, "a torn line is not continued"
        assert log.load(SPEC.session_id).failures[-1] == "after the restart"


def test_a_finished_session_is_closed_but_its_report_can_be_fetched_again(tmp_path: Path) -> None:
    rig = played()
    log = kept(tmp_path, rig)
    log.finish(SPEC.session_id)
    assert list(log.known()) == []
    again = log.load_finished(SPEC.session_id)
    assert again is not None
    same(report_of(again), report_of(rig.core))
    log.remove_finished(older_than_s=-1)
    assert log.load_finished(SPEC.session_id) is None


@pytest.mark.parametrize("content", [b"", b"{}\n", b"\xff\n", b'{"format": 99}\n', b'{"schema": 2}\n', b"[1]\n"])
def test_files_that_are_not_session_logs_are_skipped_with_one_line(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    log = kept(tmp_path, played())
    (tmp_path / "stranger.jsonl").write_bytes(content)
    assert len(list(log.known())) == 1
    [line] = caplog.messages
    assert line.startswith("skipping invalid session log stranger.jsonl: ")
    assert "\n" not in line


def test_a_log_that_cannot_be_written_raises_log_broken(tmp_path: Path) -> None:
    log = SessionLog(tmp_path)
    with pytest.raises(LogBroken, match="cannot be written"):
        log.append(SPEC.session_id, Failed(failure="x"))
    with pytest.raises(LogBroken, match="cannot be read"):
        log.load(SPEC.session_id)
