"""The table of runs under any order of calls, with restarts in between."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.actors.cluster.runs.records import (
    RAY_USER,
    TRANSITIONS,
    ActualState,
    Build,
    Demands,
    DesiredState,
    RunId,
    RunRecord,
    Submission,
)
from headrace.actors.cluster.runs.table import RunsTable
from headrace.actors.errors import RunRefused, SubmissionConflict

OWNERS = st.sampled_from(["alice", "bob"])
NAMES = st.sampled_from(["a", "b", "c"])
KEYS = st.sampled_from([str(number) for number in range(5)])
PLACES = st.integers(0, 9)
BUILD = Build(config_digest="d", headrace_version="0", demands=Demands(), restarts=2)


class UsingTheTable(RuleBasedStateMachine):
    """Accepted calls have the effect that they promise; refused ones have none."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.table = RunsTable.open(Path(self.folder.name))
        self.now_s = 0.0
        self.expected: dict[RunId, RunRecord] = {}
        self.by_key: dict[tuple[str, str], tuple[str, RunId]] = {}

    @rule(owner=OWNERS, name=NAMES, key=KEYS)
    def submit(self, owner: str, name: str, key: str) -> None:
        self.now_s += 1
        run_id = RunId(f"{len(self.expected):032x}")
        earlier = self.by_key.get((owner, key))
        taken = any(run.is_live and (run.owner, run.name) == (owner, name) for run in self.expected.values())
        submission = Submission(name=name, owner=owner, recipe={}, idempotency_key=key)
        try:
            record = self.table.submit(submission, BUILD, run_id=run_id, now_s=self.now_s, caller=RAY_USER)
        except SubmissionConflict:
            assert earlier is not None
            assert earlier[0] != name
        except RunRefused:
            assert earlier is None
            assert taken
        else:
            if earlier is None:
                assert not taken
                self.by_key[owner, key] = (name, run_id)
                self.expected[run_id] = record
            else:
                assert earlier == (name, record.run_id)

    @rule(place=PLACES, state=st.sampled_from(ActualState), uses_restart=st.booleans())
    def move(self, place: int, state: ActualState, uses_restart: bool) -> None:
        if (record := self.chosen(place)) is None:
            return
        self.now_s += 1
        try:
            moved = self.table.move(record.run_id, state, now_s=self.now_s, uses_restart=uses_restart)
        except RunRefused:
            assert state not in TRANSITIONS[record.actual] or (uses_restart and not record.restarts_left)
        else:
            assert state in TRANSITIONS[record.actual]
            if state is ActualState.WAITING and record.desired is not DesiredState.RUNNING:
                state, uses_restart = ActualState(record.desired), False
            assert moved.restarts_left == record.restarts_left - uses_restart
            assert (moved.actual, moved.desired) == (state, record.desired)
            self.expected[record.run_id] = moved

    @rule(place=PLACES, desired=st.sampled_from([DesiredState.DRAINED, DesiredState.STOPPED]))
    def want(self, place: int, desired: DesiredState) -> None:
        if (record := self.chosen(place)) is None:
            return
        self.now_s += 1
        try:
            wanted = self.table.want(record.run_id, desired, now_s=self.now_s, caller=RAY_USER)
        except RunRefused:
            assert (record.is_live, record.desired) == (True, DesiredState.STOPPED)
        else:
            assert wanted.desired is desired if record.is_live else wanted == record
            assert wanted.actual == (desired if record.actual is ActualState.WAITING else record.actual)
            self.expected[record.run_id] = wanted

    @rule(place=PLACES)
    def requeue(self, place: int) -> None:
        if (record := self.chosen(place)) is None:
            return
        self.now_s += 1
        taken = any(
            run.is_live and (run.owner, run.name) == (record.owner, record.name) for run in self.expected.values()
        )
        try:
            queued = self.table.requeue(record.run_id, BUILD, now_s=self.now_s, caller=RAY_USER)
        except RunRefused:
            assert taken or record.is_live or record.actual is ActualState.FINISHED
        else:
            assert not taken
            assert (queued.actual, queued.desired) == (ActualState.WAITING, DesiredState.RUNNING)
            assert queued.position > max(run.position for run in self.expected.values())
            self.expected[record.run_id] = queued

    @rule()
    def restart(self) -> None:
        self.table.close()
        self.table = RunsTable.open(Path(self.folder.name))

    def chosen(self, place: int) -> RunRecord | None:
        runs = list(self.expected.values())
        return runs[place % len(runs)] if runs else None

    @invariant()
    def the_table_is_as_expected(self) -> None:
        by_position = sorted(self.expected.values(), key=lambda run: run.position)
        assert list(self.table.runs()) == by_position
        for owner in ("alice", "bob"):
            live = [run.name for run in self.table.runs(owner) if run.is_live]
            assert len(live) == len(set(live))
        for run in by_position:
            events = self.table.events(run.run_id)
            assert run.desired is DesiredState.RUNNING or run.actual is not ActualState.WAITING
            assert [event.number for event in events] == list(range(1, len(events) + 1))
            assert events[-1].state is run.actual
            assert [event.time_s for event in events] == sorted(event.time_s for event in events)

    def teardown(self) -> None:
        self.table.close()
        self.folder.cleanup()


TestTable = UsingTheTable.TestCase
TestTable.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
