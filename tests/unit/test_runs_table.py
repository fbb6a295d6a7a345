"""The table of runs: submissions, transitions, events, and what a restart finds."""

from __future__ import annotations

import itertools
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.actors.cluster.runs.records import (
    ENDED,
    RAY_USER,
    RESUMABLE,
    TRANSITIONS,
    ActualState,
    ApiRole,
    Build,
    Caller,
    Demands,
    DesiredState,
    RunId,
    Submission,
)
from headrace.actors.cluster.runs.table import EVENTS_KEPT, FILE_NAME, RunsTable
from headrace.actors.errors import ConfigError, RunRefused, RunUnknown, SubmissionConflict
from headrace.buffer.errors import LedgerInUse, LedgerRefused

BUILD = Build(config_digest="d", headrace_version="0.1", demands=Demands(rollouts=8, engines=2), restarts=1)
IDS = [RunId(f"{number:032x}") for number in range(10)]

NOTING = f"""
import itertools, pathlib, sys
from headrace.actors.cluster.runs.records import RAY_USER, Build, Demands, Submission
from headrace.actors.cluster.runs.table import RunsTable
table = RunsTable.open(pathlib.Path(sys.argv[1]))
submission = Submission(name="a", owner="alice", recipe={{}}, idempotency_key="k")
build = Build(config_digest="d", headrace_version="0", demands=Demands())
table.submit(submission, build, run_id={IDS[0]!r}, now_s=0, caller=RAY_USER)
for number in itertools.count():
    print(table.note({IDS[0]!r}, f"note {{number}}", now_s=number).number, flush=True)
"""


def submission(name: str = "a", *, owner: str = "alice", key: str = "k", steps: int = 1) -> Submission:
    return Submission(name=name, owner=owner, recipe={"training": {"steps": steps}}, idempotency_key=key)


@pytest.fixture
def table() -> Iterator[RunsTable]:
    table = RunsTable.in_memory()
    yield table
    table.close()


def lead(table: RunsTable, run_id: RunId, *states: ActualState) -> None:
    for state in states:
        table.move(run_id, state, now_s=1.0)


PATHS: dict[ActualState, tuple[ActualState, ...]] = {
    ActualState.WAITING: (),
    ActualState.STARTING: (ActualState.STARTING,),
    ActualState.RUNNING: (ActualState.STARTING, ActualState.RUNNING),
    ActualState.DRAINING: (ActualState.STARTING, ActualState.DRAINING),
    ActualState.FINISHED: (ActualState.STARTING, ActualState.FINISHED),
    ActualState.DRAINED: (ActualState.STARTING, ActualState.DRAINED),
    ActualState.STOPPED: (ActualState.STARTING, ActualState.STOPPED),
    ActualState.FAILED: (ActualState.FAILED,),
}


def test_a_submitted_run_waits_with_what_it_was_given(table: RunsTable) -> None:
    record = table.submit(submission(), BUILD, run_id=IDS[0], now_s=5.0, caller=RAY_USER)
    assert (record.actual, record.desired) == (ActualState.WAITING, DesiredState.RUNNING)
    assert (record.submitted_s, record.demands, record.restarts_left) == (5.0, BUILD.demands, 1)
    assert table.get(IDS[0]) == record
    assert table.recipe(IDS[0]) == {"training": {"steps": 1}}
    assert [event.text for event in table.events(IDS[0])] == ["submitted by Ray's token"]


def test_a_repeated_submission_returns_the_same_run(table: RunsTable) -> None:
    first = table.submit(submission(), BUILD, run_id=IDS[0], now_s=5.0, caller=RAY_USER)
    assert table.submit(submission(), BUILD, run_id=IDS[1], now_s=6.0, caller=RAY_USER) == first
    lead(table, IDS[0], ActualState.STARTING, ActualState.FINISHED)
    assert table.submit(submission(), BUILD, run_id=IDS[1], now_s=7.0, caller=RAY_USER).run_id == IDS[0]
    assert len(table.runs()) == 1


def test_a_key_with_another_request_is_refused(table: RunsTable) -> None:
    table.submit(submission(), BUILD, run_id=IDS[0], now_s=5.0, caller=RAY_USER)
    for other in (submission("b"), submission(steps=2)):
        with pytest.raises(SubmissionConflict, match="use a new key"):
            table.submit(other, BUILD, run_id=IDS[1], now_s=6.0, caller=RAY_USER)
    # Keys of other owners are theirs.
    assert table.submit(submission("b", owner="bob"), BUILD, run_id=IDS[1], now_s=6.0, caller=RAY_USER).owner == "bob"


def test_names_are_unique_among_live_runs_of_an_owner(table: RunsTable) -> None:
    table.submit(submission(), BUILD, run_id=IDS[0], now_s=5.0, caller=RAY_USER)
    with pytest.raises(RunRefused, match="choose another name"):
        table.submit(submission(key="k2"), BUILD, run_id=IDS[1], now_s=5.0, caller=RAY_USER)
    table.submit(submission(owner="bob"), BUILD, run_id=IDS[2], now_s=5.0, caller=RAY_USER)
    lead(table, IDS[0], ActualState.STARTING, ActualState.DRAINED)
    table.submit(submission(key="k2"), BUILD, run_id=IDS[1], now_s=6.0, caller=RAY_USER)
    with pytest.raises(RunRefused, match="choose another name"):
        table.requeue(IDS[0], BUILD, now_s=7.0, caller=RAY_USER)


@pytest.mark.parametrize(
    "bad",
    [
        submission(""),
        submission(".a"),
        submission("a/b"),
        submission(owner="a b"),
        submission(key=""),
        submission(key="é"),
    ],
)
def test_invalid_names_and_keys_are_refused(table: RunsTable, bad: Submission) -> None:
    with pytest.raises(ConfigError):
        table.submit(bad, BUILD, run_id=IDS[0], now_s=1.0, caller=RAY_USER)
    assert table.runs() == ()


@pytest.mark.parametrize(("before", "after"), list(itertools.product(ActualState, ActualState)))
def test_only_listed_transitions_are_made(table: RunsTable, before: ActualState, after: ActualState) -> None:
    table.submit(submission(), BUILD, run_id=IDS[0], now_s=0.0, caller=RAY_USER)
    lead(table, IDS[0], *PATHS[before])
    events = table.events(IDS[0])
    if after in TRANSITIONS[before]:
        assert table.move(IDS[0], after, now_s=2.0, reason="why").actual is after
        assert table.events(IDS[0])[-1].text == "why"
    else:
        with pytest.raises(RunRefused, match=f"is {before}"):
            table.move(IDS[0], after, now_s=2.0)
        assert (table.get(IDS[0]).actual, table.events(IDS[0])) == (before, events)


def test_every_live_state_can_end_and_no_ended_run_starts_by_itself() -> None:
    for state in ActualState:
        if state in ENDED:
            assert not TRANSITIONS[state]
        else:
            assert {ActualState.STOPPED, ActualState.FAILED, ActualState.DRAINED} <= TRANSITIONS[state]


def test_a_waiting_run_ends_at_once_when_its_user_wants_it(table: RunsTable) -> None:
    for number, desired in enumerate((DesiredState.DRAINED, DesiredState.STOPPED)):
        table.submit(submission(f"r{number}", key=f"k{number}"), BUILD, run_id=IDS[number], now_s=1.0, caller=RAY_USER)
        assert table.want(IDS[number], desired, now_s=2.0, caller=RAY_USER).actual == desired.value


def test_a_stop_wins_over_a_drain(table: RunsTable) -> None:
    table.submit(submission(), BUILD, run_id=IDS[0], now_s=1.0, caller=RAY_USER)
    lead(table, IDS[0], ActualState.STARTING, ActualState.RUNNING)
    assert table.want(IDS[0], DesiredState.DRAINED, now_s=2.0, caller=RAY_USER).actual is ActualState.RUNNING
    assert table.want(IDS[0], DesiredState.STOPPED, now_s=3.0, caller=RAY_USER).desired is DesiredState.STOPPED
    with pytest.raises(RunRefused, match="to be stopped and cannot be drained"):
        table.want(IDS[0], DesiredState.DRAINED, now_s=4.0, caller=RAY_USER)
    events = table.events(IDS[0])
    assert table.want(IDS[0], DesiredState.STOPPED, now_s=5.0, caller=RAY_USER).desired is DesiredState.STOPPED
    assert table.events(IDS[0]) == events


def test_a_retry_uses_up_a_restart(table: RunsTable) -> None:
    table.submit(submission(), BUILD, run_id=IDS[0], now_s=1.0, caller=RAY_USER)
    lead(table, IDS[0], ActualState.STARTING)
    waiting = table.move(IDS[0], ActualState.WAITING, now_s=2.0, reason="lost\nnode", next_try_s=9.0, uses_restart=True)
    assert (waiting.restarts_left, waiting.next_try_s, waiting.reason) == (0, 9.0, "lost node")
    assert table.move(IDS[0], ActualState.STARTING, now_s=9.0).next_try_s is None
    with pytest.raises(RunRefused, match="no restarts left"):
        table.move(IDS[0], ActualState.WAITING, now_s=2.0, next_try_s=9.0, uses_restart=True)
    failed = table.move(IDS[0], ActualState.FAILED, now_s=2.0, reason="again", exit_code=75)
    assert (failed.exit_code, failed.reason) == (75, "again")


@pytest.mark.parametrize("desired", [DesiredState.DRAINED, DesiredState.STOPPED])
def test_a_run_that_shall_end_does_not_wait_for_a_next_try(table: RunsTable, desired: DesiredState) -> None:
    table.submit(submission(), BUILD, run_id=IDS[0], now_s=1.0, caller=RAY_USER)
    lead(table, IDS[0], ActualState.STARTING, ActualState.RUNNING)
    table.want(IDS[0], desired, now_s=2.0, caller=RAY_USER)
    ended = table.move(IDS[0], ActualState.WAITING, now_s=3.0, reason="lost", next_try_s=9.0, uses_restart=True)
    assert (ended.actual, ended.restarts_left, ended.next_try_s) == (desired.value, 1, None)


def test_a_resumed_run_is_the_last_in_the_queue(table: RunsTable) -> None:
    for number in range(2):
        table.submit(submission(f"r{number}", key=f"k{number}"), BUILD, run_id=IDS[number], now_s=1.0, caller=RAY_USER)
    lead(table, IDS[0], ActualState.STARTING)
    table.move(IDS[0], ActualState.FAILED, now_s=2.0, exit_code=1)
    other = Build(config_digest="e", headrace_version="0.2", demands=Demands(rollouts=1), restarts=5)
    record = table.requeue(IDS[0], other, now_s=3.0, caller=RAY_USER, recipe={"training": {"steps": 9}})
    assert (record.config_digest, record.headrace_version, record.restarts_left) == ("e", "0.2", 5)
    assert (record.exit_code, record.desired) == (None, DesiredState.RUNNING)
    assert [one.run_id for one in table.runs()] == [IDS[1], IDS[0]]
    assert table.recipe(IDS[0]) == {"training": {"steps": 9}}
    # The first submission's key still means this run.
    assert table.submit(submission("r0", key="k0"), BUILD, run_id=IDS[2], now_s=4.0, caller=RAY_USER).run_id == IDS[0]


def test_only_who_sets_the_recipe_gives_a_run_rights(table: RunsTable) -> None:
    operate, code = (Caller(owner="alice", role=role, key="k") for role in (ApiRole.OPERATE, ApiRole.CODE))
    assert not table.submit(submission(), BUILD, run_id=IDS[0], now_s=1.0, caller=operate).names_code
    for caller, recipe, expected in (
        (code, None, False),
        (code, {"training": {"steps": 2}}, True),
        (operate, None, True),
        (operate, {"training": {"steps": 3}}, False),
    ):
        lead(table, IDS[0], ActualState.STARTING, ActualState.FAILED)
        resumed = table.requeue(IDS[0], BUILD, now_s=2.0, caller=caller, recipe=recipe)
        assert resumed.names_code is expected
        assert table.get(IDS[0]) == resumed


@pytest.mark.parametrize("state", [state for state in ActualState if state not in RESUMABLE])
def test_other_runs_cannot_be_resumed(table: RunsTable, state: ActualState) -> None:
    table.submit(submission(), BUILD, run_id=IDS[0], now_s=1.0, caller=RAY_USER)
    lead(table, IDS[0], *PATHS[state])
    with pytest.raises(RunRefused, match="cannot be resumed"):
        table.requeue(IDS[0], BUILD, now_s=2.0, caller=RAY_USER)


def test_the_newest_events_are_kept_with_their_numbers(table: RunsTable) -> None:
    for number in range(2):
        table.submit(submission(f"r{number}", key=f"k{number}"), BUILD, run_id=IDS[number], now_s=1.0, caller=RAY_USER)
    for number in range(EVENTS_KEPT + 5):
        table.note(IDS[0], f"note {number}", now_s=float(number))
    events = table.events(IDS[0])
    assert [event.number for event in events] == list(range(7, EVENTS_KEPT + 7))
    assert [event.number for event in table.events(IDS[0], after=EVENTS_KEPT + 4)] == [EVENTS_KEPT + 5, EVENTS_KEPT + 6]
    assert len(table.events(IDS[1])) == 1


def test_an_unchanged_reason_is_no_event(table: RunsTable) -> None:
    table.submit(submission(), BUILD, run_id=IDS[0], now_s=1.0, caller=RAY_USER)
    for reason in ("quota", "quota", "behind b", "behind b"):
        table.explain(IDS[0], reason, now_s=2.0)
    assert [event.text for event in table.events(IDS[0])] == ["submitted by Ray's token", "quota", "behind b"]


def test_text_that_cannot_be_stored_is_replaced(table: RunsTable) -> None:
    table.submit(submission(), BUILD, run_id=IDS[0], now_s=1.0, caller=RAY_USER)
    table.note(IDS[0], "a\0b\ud800\n" + "x" * 5000, now_s=1.0)
    text = table.events(IDS[0])[-1].text
    assert text.startswith("a b? xxx")
    assert len(text) == 2000


def test_unknown_runs_are_refused(table: RunsTable) -> None:
    for call in (
        lambda: table.get(IDS[0]),
        lambda: table.events(IDS[0]),
        lambda: table.want(IDS[0], DesiredState.STOPPED, now_s=1.0, caller=RAY_USER),
        lambda: table.move(IDS[0], ActualState.STARTING, now_s=1.0),
        lambda: table.requeue(IDS[0], BUILD, now_s=1.0, caller=RAY_USER),
        lambda: table.recipe(IDS[0]),
    ):
        with pytest.raises(RunUnknown, match="there is no run"):
            call()


def test_a_reopened_table_has_everything(tmp_path: Path) -> None:
    table = RunsTable.open(tmp_path / "state")
    table.submit(submission(), BUILD, run_id=IDS[0], now_s=1.5, caller=RAY_USER)
    table.move(IDS[0], ActualState.STARTING, now_s=2.5, reason="why")
    before = table.runs(), table.events(IDS[0]), table.recipe(IDS[0])
    with pytest.raises(LedgerInUse, match="one table"):
        RunsTable.open(tmp_path / "state")
    table.close()
    table.close()
    assert (tmp_path / "state" / FILE_NAME).stat().st_mode & 0o777 == 0o600
    table = RunsTable.open(tmp_path / "state")
    assert (table.runs(), table.events(IDS[0]), table.recipe(IDS[0])) == before
    table.close()


def test_every_acknowledged_change_survives_a_kill(tmp_path: Path) -> None:
    """A process prints the number of each event once its call has returned, and is killed."""
    process = subprocess.Popen([sys.executable, "-c", NOTING, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        acknowledged = [int(process.stdout.readline()) for _ in range(40)]
        process.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in process.stdout.read().splitlines()]
    table = RunsTable.open(tmp_path)
    stored = [event.number for event in table.events(IDS[0])]
    assert stored[-1] in (acknowledged[-1], acknowledged[-1] + 1)
    assert set(acknowledged) <= set(stored)
    table.close()


@pytest.mark.parametrize("damage", ["text", "unreleased", "other"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / FILE_NAME
    if damage == "text":
        path.write_bytes(b"no database" * 1000)
    else:
        database = sqlite3.connect(path)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE x (y)")
        database.execute("PRAGMA user_version = 7")
        if damage == "unreleased":
            database.execute("PRAGMA application_id = 1213354545")
        database.close()
    before = path.read_bytes()
    for _ in range(2):
        with pytest.raises(LedgerRefused, match="move") as refused:
            RunsTable.open(tmp_path)
        assert "\n" not in str(refused.value)
    assert path.read_bytes() == before


def test_an_upgrade_is_durable_and_ends_with_a_start_under_another_build(tmp_path: Path) -> None:
    table = RunsTable.open(tmp_path)
    table.submit(submission(), BUILD, run_id=IDS[0], now_s=1.0, caller=RAY_USER)
    lead(table, IDS[0], ActualState.STARTING, ActualState.RUNNING)
    assert table.want(IDS[0], DesiredState.UPGRADED, now_s=2.0, caller=RAY_USER).actual is ActualState.RUNNING
    table.close()
    table = RunsTable.open(tmp_path)
    assert table.get(IDS[0]).desired is DesiredState.UPGRADED
    lead(table, IDS[0], ActualState.DRAINING)
    newer = Build(config_digest="e", headrace_version="0.2", demands=Demands(rollouts=4), restarts=3)
    record = table.renew(IDS[0], newer, now_s=3.0)
    assert (record.desired, record.actual, record.next_try_s) == (DesiredState.RUNNING, ActualState.WAITING, 3.0)
    assert (record.config_digest, record.headrace_version, record.restarts_left) == ("e", "0.2", 3)
    assert record.position == 1, "it keeps its place"
    texts = [event.text for event in table.events(IDS[0])][-3:]
    assert texts == ["upgrade requested by Ray's token", "draining", "starts under headrace 0.2"]
    table.close()


def test_an_upgrade_gives_way_to_a_drain_and_not_the_other_way_round(table: RunsTable) -> None:
    table.submit(submission(), BUILD, run_id=IDS[0], now_s=1.0, caller=RAY_USER)
    lead(table, IDS[0], ActualState.STARTING, ActualState.RUNNING)
    table.want(IDS[0], DesiredState.UPGRADED, now_s=2.0, caller=RAY_USER)
    assert table.want(IDS[0], DesiredState.DRAINED, now_s=3.0, caller=RAY_USER).desired is DesiredState.DRAINED
    with pytest.raises(RunRefused, match="to be drained and cannot be upgraded"):
        table.want(IDS[0], DesiredState.UPGRADED, now_s=4.0, caller=RAY_USER)
    lead(table, IDS[0], ActualState.DRAINED)
    with pytest.raises(RunRefused, match="resume it"):
        table.renew(IDS[0], BUILD, now_s=5.0)


def test_a_run_whose_service_is_lost_in_an_upgrade_is_tried_again(table: RunsTable) -> None:
    table.submit(submission(), BUILD, run_id=IDS[0], now_s=1.0, caller=RAY_USER)
    lead(table, IDS[0], ActualState.STARTING, ActualState.RUNNING)
    table.want(IDS[0], DesiredState.UPGRADED, now_s=2.0, caller=RAY_USER)
    assert table.move(IDS[0], ActualState.WAITING, now_s=3.0, next_try_s=4.0).actual is ActualState.WAITING
