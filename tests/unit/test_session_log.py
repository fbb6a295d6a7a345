"""Session log: sessions are restored from its complete lines."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from headrace.serve.capture.events import Exhausted, Failed, Spent
from headrace.serve.capture.rows import SessionReport, report_of, tree_of
from headrace.serve.capture.session import Sampling, Session, SessionId, SessionSpec
from headrace.serve.capture.session_log import Opened, SessionLog
from headrace.serve.conversation import ToolSpec
from headrace.serve.errors import LogBroken
from headrace.serve.gateway import codec
from support.session_rig import Rig, asks, call, echo, results, user

if TYPE_CHECKING:
    from pathlib import Path

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
    assert opened == Opened(spec=SPEC, token="t" * 32, opened_at=12.5)
    again = log.load(SPEC.session_id)
    same(report_of(again), report_of(rig.core))
    assert tree_of(again) == tree_of(rig.core)
    assert again.next_turn_id() == rig.core.next_turn_id()
    assert again.spec == SPEC
    request = asks(user("other"), tools=TOOLS)
    found = again.replay(again.match(request), request, now=1e9)
    assert found is not None, "what was not delivered is replayed"
    assert found.answer == rig.core.trie.sampled[-1].answer
    assert (tmp_path / next(os.walk(tmp_path))[2][0]).stat().st_mode & 0o077 == 0


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


@pytest.mark.parametrize("content", [b"", b"{}\n", b"\xff\n", b'{"schema": 99}\n', b"[1]\n"])
def test_files_that_are_not_session_logs_are_skipped(tmp_path: Path, content: bytes) -> None:
    log = kept(tmp_path, played())
    (tmp_path / "stranger.jsonl").write_bytes(content)
    assert len(list(log.known())) == 1


def test_a_log_that_cannot_be_written_raises_log_broken(tmp_path: Path) -> None:
    log = SessionLog(tmp_path)
    with pytest.raises(LogBroken, match="cannot be written"):
        log.append(SPEC.session_id, Failed(failure="x"))
    with pytest.raises(LogBroken, match="cannot be read"):
        log.load(SPEC.session_id)
