"""The scheduler keeps every generation in one place, every row compact, and every span gapless."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.policies.cpu_engine.requests import Prompt, SamplingParams
from headrace.policies.cpu_engine.scheduler import Aborted, Generation, LengthReached, Scheduler, Stopped
from headrace.policies.engine import PauseMode

EOS = 9


def scheduler(max_running: int = 4, max_prefill_tokens: int = 100) -> Scheduler:
    return Scheduler(
        max_running=max_running,
        max_prefill_tokens=max_prefill_tokens,
        eos_ids=frozenset({EOS}),
        tail_text=lambda ids: "".join(chr(ord("a") + item) for item in ids),
    )


def generation(name: str, *, prompt: int = 3, **sampling: object) -> Generation:
    given = SamplingParams.model_validate({"max_new_tokens": 5, **sampling})
    return Generation(prompt=Prompt(request_id=name, input_ids=(1,) * prompt, sampling=given, return_logprob=True))


def step(core: Scheduler, token: int, version: str = "1.0") -> list[Generation]:
    admitted = core.admit()
    rows = range(len(core.running) - len(admitted), len(core.running)) if admitted else range(len(core.running))
    return core.record(rows, [token] * len(rows), [-1.0] * len(rows), version)


def test_length_takes_precedence_over_stop_as_in_sglang() -> None:
    core = scheduler()
    core.add(generation("a", max_new_tokens=1))
    assert [item.finish for item in step(core, EOS)] == [LengthReached(length=1)]


def test_a_stop_id_is_kept_in_the_ids() -> None:
    core = scheduler()
    core.add(generation("a"))
    (finished,) = step(core, EOS)
    assert finished.finish == Stopped(matched=EOS)
    assert finished.output_ids == [EOS]


def test_ignore_eos_does_not_disable_stop_strings() -> None:
    core = scheduler()
    core.add(generation("a", ignore_eos=True, stop=["jb"]))
    assert step(core, EOS) == []
    (finished,) = step(core, 1)
    assert finished.finish == Stopped(matched="jb")
    assert finished.output_ids == [EOS, 1]


def test_a_request_with_nothing_to_sample_finishes_at_once() -> None:
    core = scheduler()
    assert [item.finish for item in core.add(generation("a", max_new_tokens=0))] == [LengthReached(length=0)]
    assert not core.runnable


def test_prefill_is_bounded_by_padded_tokens_but_never_empty() -> None:
    core = scheduler(max_prefill_tokens=20)
    for name, length in (("a", 50), ("b", 5), ("c", 8), ("d", 5)):
        core.add(generation(name, prompt=length))
    assert [item.prompt.request_id for item in core.admit()] == ["a"]
    assert [item.prompt.request_id for item in core.admit()] == ["b", "c"]


def test_retracted_requests_are_admitted_first_and_keep_their_tokens() -> None:
    core = scheduler(max_running=2)
    for name in "abc":
        core.add(generation(name))
    step(core, 1)
    assert core.pause(PauseMode.RETRACT) == []
    core.add(generation("late"))
    assert [item.prompt.request_id for item in core.waiting] == ["a", "b", "c", "late"]
    assert not core.runnable
    core.resume()
    step(core, 2, "1.1")
    first = core.running[0]
    assert (first.output_ids, first.retractions) == ([1, 2], 1)
    assert first.versions == ["1.0", "1.1"]


def test_replies_to_aborted_requests_match_sglang() -> None:
    core = scheduler(max_running=1)
    for name in "ab":
        core.add(generation(name))
    step(core, 1)
    assert [item.finish for item in core.abort("a")] == [Aborted(queued=False)]
    assert [item.finish for item in core.abort("b")] == [Aborted(queued=True)]
    assert core.abort("unknown") == []


def test_aborting_a_request_that_arrived_during_a_pause_has_no_effect_until_the_pause_ends() -> None:
    core = scheduler()
    core.add(generation("old"))
    step(core, 1)
    core.pause(PauseMode.RETRACT)
    core.add(generation("new"))
    assert core.abort("new") == []
    assert [item.prompt.request_id for item in core.abort("old")] == ["old"]
    core.resume()
    assert [item.prompt.request_id for item in core.abort("new")] == ["new"]


def test_pausing_with_abort_ends_all_requests() -> None:
    core = scheduler(max_running=1)
    for name in "ab":
        core.add(generation(name))
    step(core, 1)
    assert [item.finish for item in core.pause(PauseMode.ABORT)] == [Aborted(queued=False), Aborted(queued=True)]


def test_an_in_place_pause_keeps_rows_and_splits_spans() -> None:
    core = scheduler(max_running=2)
    for name in "abc":
        core.add(generation(name))
    step(core, 1)
    assert core.pause(PauseMode.IN_PLACE) == []
    core.add(generation("late"))
    assert [item.prompt.request_id for item in core.running] == ["a", "b"]
    assert core.admit() == []
    assert not core.runnable
    assert core.drained
    assert core.resume() == []
    assert not core.drained
    step(core, 2, "1.1")
    first = core.running[0]
    assert (first.output_ids, first.retractions) == ([1, 2], 0)
    assert first.versions == ["1.0", "1.1"]
    assert core.moves == []


def test_aborting_a_request_paused_in_place_takes_effect_when_the_pause_ends() -> None:
    core = scheduler(max_running=1)
    for name in ("running", "queued"):
        core.add(generation(name))
    step(core, 1)
    core.pause(PauseMode.IN_PLACE)
    core.add(generation("late"))
    assert [item.finish for item in core.abort("queued")] == [Aborted(queued=True)]
    assert core.abort("running") == []
    assert core.abort("late") == []
    (finished,) = core.resume()
    assert (finished.prompt.request_id, finished.finish, finished.output_ids) == ("running", Aborted(queued=False), [1])
    assert [item.prompt.request_id for item in core.waiting] == ["late"]


def test_a_client_that_disconnects_during_an_in_place_pause_frees_its_row() -> None:
    core = scheduler()
    kept, gone = generation("kept"), generation("gone")
    for item in (gone, kept):
        core.add(item)
    step(core, 1)
    core.pause(PauseMode.IN_PLACE)
    core.abort("gone")
    assert core.drop([gone]) == [gone]
    assert core.running == [kept]
    assert [(move.source, move.target) for move in core.moves] == [(1, 0)]
    assert core.resume() == []


def test_an_in_place_pause_can_become_another_kind_of_pause() -> None:
    core = scheduler()
    for name in "ab":
        core.add(generation(name))
    step(core, 1)
    core.pause(PauseMode.IN_PLACE)
    assert core.abort("a") == []
    assert core.pause(PauseMode.RETRACT) == []
    assert [item.prompt.request_id for item in core.waiting] == ["a", "b"]
    assert [item.finish for item in core.resume()] == [Aborted(queued=True)]
    step(core, 2)
    core.pause(PauseMode.IN_PLACE)
    assert [item.finish for item in core.pause(PauseMode.ABORT)] == [Aborted(queued=False)]


def test_a_weight_session_holds_waiting_but_not_running_requests() -> None:
    core = scheduler()
    core.add(generation("a"))
    step(core, 1)
    core.holding = True
    core.add(generation("b"))
    assert core.runnable
    assert not core.drained
    core.pause(PauseMode.IN_PLACE)
    assert core.drained
    core.resume()
    step(core, 2)
    assert [item.prompt.request_id for item in core.waiting] == ["b"]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 6)),
        st.tuples(st.just("step"), st.sampled_from([1, 2, EOS])),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("pause"), st.sampled_from([PauseMode.RETRACT, PauseMode.IN_PLACE])),
        st.tuples(st.just("hold"), st.booleans()),
        st.tuples(st.just("version"), st.integers(1, 9)),
        st.tuples(st.just("resume"), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(ACTIONS)
def test_cache_rows_follow_the_scheduled_moves(actions: list[tuple[str, Any]]) -> None:
    """A mirror of the cache, updated by prefills and `moves` only, always holds the right generation in each row.
    Nothing is sampled in a pause, and every token is in the span of the version that sampled it."""
    core = scheduler(max_running=3)
    mirror: dict[int, str] = {}
    finished: list[Generation] = []
    added: list[Generation] = []
    version = "0"
    sampled: dict[int, list[str]] = {}

    def sync() -> None:
        for move in core.moves:
            mirror[move.target] = mirror[move.source]
        core.moves.clear()

    for kind, value in actions:
        if kind == "add":
            added.append(generation(str(len(added)), max_new_tokens=value))
            finished += core.add(added[-1])
        elif kind == "step" and core.runnable:
            assert not core.paused
            sync()
            before = len(core.running)
            for row, item in enumerate(core.admit(), start=before):
                mirror[row] = item.prompt.request_id
            assert [mirror[row] for row in range(len(core.running))] == [
                item.prompt.request_id for item in core.running
            ]
            rows = range(before, len(core.running)) if len(core.running) > before else range(before)
            for row in rows:
                sampled.setdefault(id(core.running[row]), []).append(version)
            finished += core.record(rows, [value] * len(rows), [-1.0] * len(rows), version)
        elif kind == "abort":
            finished += core.abort(str(value))
        elif kind == "pause":
            core.pause(value)
            assert core.drained
        elif kind == "hold":
            core.holding = value
        elif kind == "version":
            version = str(value)
        elif kind == "resume":
            finished += core.resume()
    places = [*core.running, *core.waiting, *finished]
    assert sorted(map(id, places)) == sorted(map(id, added))
    for item in added:
        assert len(item.logprobs) == len(item.output_ids)
        assert item.versions == sampled.get(id(item), [])
