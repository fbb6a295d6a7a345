"""The order of a push under failures in every place."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.policies.engine import EngineId
from headrace.policies.push.compatibility import Agreement
from headrace.policies.push.machine import GROUP_PHASES, Blame, Failure, Phase, PushMachine, PushOutcome, PushStep

A, B, C = EngineId("a"), EngineId("b"), EngineId("c")
GONE = Failure(blame=Blame.ENGINE, message="gone")
VICTIM = Failure(blame=Blame.VICTIM, message="its group broke")


@dataclass(frozen=True, kw_only=True)
class End:
    """The push is abandoned at its n-th step: in it, as by a dying sender, or before it, as by a failing journal."""

    step: int
    is_taken: bool


def run(machine: PushMachine, failing: dict[tuple[Phase, EngineId], Failure], end: End | None = None) -> list[PushStep]:
    """Drive the machine; each failure happens once."""
    steps: list[PushStep] = []
    while step := machine.next():
        if end is not None and len(steps) == end.step:
            abandoned, end = end, None
            machine.abandon("it ends here")
            if not abandoned.is_taken:
                continue
        steps.append(step)
        if step.phase is Phase.BROADCAST:
            for engine_id in step.engines:
                machine.touched(engine_id)
        found = {
            engine_id: failing.pop((step.phase, engine_id))
            for engine_id in step.engines
            if (step.phase, engine_id) in failing
        }
        machine.done(step, found)
    return steps


def phases(steps: list[PushStep], engine_id: EngineId) -> list[Phase]:
    return [step.phase for step in steps if engine_id in step.engines]


def test_a_successful_push_runs_every_phase_in_order() -> None:
    machine = PushMachine([[A], [B]])
    steps = run(machine, {})
    assert phases(steps, A) == phases(steps, B) == list(Phase)
    assert [step.wave for step in steps] == [0] * len(Phase) + [1] * len(Phase)
    assert machine.outcome(A) is machine.outcome(B) is PushOutcome.UPDATED


def test_a_refused_begin_ends_the_session_and_resumes_and_reopens_the_engine() -> None:
    """F4."""
    machine = PushMachine([[A], [B]])
    steps = run(machine, {(Phase.BEGIN, A): GONE})
    assert phases(steps, A)[-4:] == [Phase.BEGIN, Phase.END, Phase.RESUME, Phase.OPEN]
    assert machine.outcome(A) is PushOutcome.QUARANTINED
    assert machine.outcome(B) is PushOutcome.UPDATED


def test_a_tainted_engine_is_neither_resumed_nor_reopened() -> None:
    machine = PushMachine([[A], [B]])
    steps = run(machine, {(Phase.BROADCAST, A): GONE})
    assert phases(steps, A)[-1] is Phase.BROADCAST
    assert machine.outcome(A) is PushOutcome.QUARANTINED
    assert machine.outcome(B) is PushOutcome.UPDATED


def test_the_weights_are_sent_again_to_survivors_of_a_wave_in_a_new_group() -> None:
    machine = PushMachine([[A, B, C]])
    steps = run(machine, {(Phase.BROADCAST, A): GONE, (Phase.BROADCAST, B): VICTIM, (Phase.BROADCAST, C): VICTIM})
    broadcasts = [step for step in steps if step.phase is Phase.BROADCAST]
    assert [(step.engines, step.attempt) for step in broadcasts] == [((A, B, C), 0), ((B, C), 1)]
    assert [machine.outcome(item) for item in (A, B, C)] == [
        PushOutcome.QUARANTINED,
        PushOutcome.UPDATED,
        PushOutcome.UPDATED,
    ]


def test_losing_an_engine_during_the_pause_forms_a_new_group_before_the_broadcast() -> None:
    machine = PushMachine([[A, B]])
    steps = run(machine, {(Phase.PAUSE, A): GONE})
    assert phases(steps, B).count(Phase.FORM) == 2
    assert phases(steps, B).count(Phase.PAUSE) == 1
    assert phases(steps, A)[-2:] == [Phase.RESUME, Phase.OPEN]


def test_a_reader_that_fails_by_disk_affects_no_other_engine_of_its_wave() -> None:
    machine = PushMachine([[A, B]], skipped=GROUP_PHASES)
    steps = run(machine, {(Phase.BROADCAST, A): GONE})
    assert phases(steps, A)[-1] is Phase.BROADCAST, "it may hold mixed weights"
    assert phases(steps, B) == [phase for phase in Phase if phase not in GROUP_PHASES], "it reads once"
    assert machine.outcome(A) is PushOutcome.QUARANTINED
    assert machine.outcome(B) is PushOutcome.UPDATED


def test_an_uncertain_engine_serves_with_all_new_weights_or_not_at_all() -> None:
    """F5."""
    machine = PushMachine([[A], [B]], in_doubt=(A,))
    steps = run(machine, {(Phase.BEGIN, A): GONE})
    assert phases(steps, A)[-1] is Phase.BEGIN, "neither resumed nor opened"
    assert machine.outcome(A) is PushOutcome.QUARANTINED
    well = PushMachine([[A]], in_doubt=(A,))
    assert phases(run(well, {}), A) == list(Phase)
    assert well.outcome(A) is PushOutcome.UPDATED
    abandoned = PushMachine([[A]], in_doubt=(A,))
    while step := abandoned.next():
        if step.phase is Phase.BEGIN:
            abandoned.abandon("the sender died")
        abandoned.done(step, {})
    assert abandoned.progress[A].paused
    assert abandoned.outcome(A) is PushOutcome.QUARANTINED


def test_an_abandoned_push_leaves_later_waves_behind() -> None:
    machine = PushMachine([[A], [B]])
    steps = []
    while step := machine.next():
        steps.append(step)
        if step.phase is Phase.BEGIN:
            machine.abandon("the sender died")
        machine.done(step, {})
    assert phases(steps, A)[-3:] == [Phase.END, Phase.RESUME, Phase.OPEN]
    assert phases(steps, B) == []
    assert machine.outcome(A) is machine.outcome(B) is PushOutcome.BEHIND


FAILURES = st.dictionaries(
    st.tuples(st.sampled_from(list(Phase)), st.sampled_from([A, B, C])), st.sampled_from([GONE, VICTIM]), max_size=6
)


ENDS = st.none() | st.builds(End, step=st.integers(0, 40), is_taken=st.booleans())


@settings(max_examples=500, deadline=None)
@given(
    FAILURES,
    st.sampled_from([[[A], [B], [C]], [[A, B], [C]], [[A, B, C]]]),
    st.frozensets(st.sampled_from([A, B, C])),
    ENDS,
    st.sampled_from([frozenset(), GROUP_PHASES]),
)
def test_invariants_hold_for_any_failures(
    failing: dict[tuple[Phase, EngineId], Failure],
    waves: list[list[EngineId]],
    in_doubt: frozenset[EngineId],
    end: End | None,
    skipped: frozenset[Phase],
) -> None:
    machine = PushMachine(waves, in_doubt, skipped=skipped)
    steps = run(machine, dict(failing), end)
    assert len(steps) < 200
    assert not skipped & {step.phase for step in steps}
    for engine_id in (A, B, C):
        taken, progress = phases(steps, engine_id), machine.progress[engine_id]
        if Phase.BROADCAST in taken and not skipped:
            assert Phase.BEGIN in taken[: taken.index(Phase.BROADCAST)]
        if not progress.tainted:
            assert not progress.gated or (Phase.OPEN, engine_id) in failing
            assert not progress.paused or (Phase.RESUME, engine_id) in failing
            assert not progress.session or (Phase.END, engine_id) in failing
        elif progress.failure is not None and progress.failure.blame is Blame.PUSH:
            assert engine_id not in {item for step in steps[at_of(end) :] for item in step.engines}
        else:
            assert (taken[-1], engine_id) in failing
        if not has_all_or_nothing(steps, engine_id, failing, in_doubt, end):
            assert not {Phase.RESUME, Phase.OPEN} & set(taken)
            assert machine.outcome(engine_id) is PushOutcome.QUARANTINED
        if machine.outcome(engine_id) is PushOutcome.UPDATED:
            assert progress.complete
            assert {Phase.VERIFY, Phase.RESUME, Phase.OPEN} <= set(taken)


def at_of(end: End | None) -> int:
    """The first step of the way out."""
    assert end is not None
    return end.step + end.is_taken


def has_all_or_nothing(
    steps: list[PushStep],
    engine_id: EngineId,
    failing: dict[tuple[Phase, EngineId], Failure],
    in_doubt: frozenset[EngineId],
    end: End | None,
) -> bool:
    """Whether the engine surely holds one version: it was sent nothing, or was sent all of it the last time."""
    sent = [(at, step) for at, step in enumerate(steps) if step.phase is Phase.BROADCAST and engine_id in step.engines]
    if not sent:
        return engine_id not in in_doubt
    was_cut = end is not None and end.is_taken and sent[-1][0] == end.step
    has_failed = (Phase.BROADCAST, engine_id) in failing and len(sent) == 1
    return not was_cut and not has_failed


def test_the_checksums_of_most_engines_of_a_kind_are_trusted() -> None:
    agreement = Agreement()
    agreement.add(A, {"w": "wrong", "b": "same"})
    assert agreement.wrong() == {}
    agreement.add(B, {"w": "right", "b": "same"})
    agreement.add(EngineId("other"), {"shard": "another kind"})
    assert agreement.wrong() == {A: ["w"], B: ["w"]}, "one against one: neither is believed"
    assert [agreement.is_disputed(engine) for engine in (A, B, EngineId("other"))] == [True, True, False]
    agreement.add(C, {"w": "right", "b": "same"})
    assert agreement.wrong() == {A: ["w"]}
    agreement.add(EngineId("d"), {"w": "wrong", "b": "same"})
    assert agreement.wrong() == {A: ["w"], EngineId("d"): ["w"]}, "as many against as many: who was believed before"


def test_a_second_read_of_the_snapshot_decides_between_two_engines() -> None:
    first_wrong, second_wrong, neither = Agreement(), Agreement(), Agreement()
    for agreement in (first_wrong, second_wrong, neither):
        agreement.add(A, {"w": "1"})
        agreement.add(B, {"w": "2"})
    first_wrong.add(B, {"w": "2"})
    assert first_wrong.wrong() == {A: ["w"]}, "the second engine read the same again"
    second_wrong.add(B, {"w": "1"})
    assert second_wrong.wrong() == {}, "it holds now what the first one holds"
    neither.add(B, {"w": "3"})
    assert neither.is_disputed(A)
    assert neither.wrong() == {A: ["w"], B: ["w"]}
    neither.withdraw(B)
    assert neither.wrong() == {}


def test_an_engine_whose_checksum_is_found_wrong_after_its_wave_fails() -> None:
    machine = PushMachine([[A], [B]])
    run(machine, {})
    machine.condemn(A, "the others have other checksums")
    assert machine.outcome(A) is PushOutcome.QUARANTINED
    assert machine.outcome(B) is PushOutcome.UPDATED
