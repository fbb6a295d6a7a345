"""The scheduler keeps every generation in one place, every row compact, and every span gapless."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.policies.cpu_engine.requests import Prompt, Sampling
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
    given = Sampling.model_validate({"max_new_tokens": 5, **sampling})
    return Generation(prompt=Prompt(request_id=name, input_ids=(1,) * prompt, sampling=given, return_logprob=True))


def step(core: Scheduler, token: int, version: str = "1.0") -> list[Generation]:
    admitted = core.admit()
    rows = range(len(core.running) - len(admitted), len(core.running)) if admitted else range(len(core.running))
    return core.record(rows, [token] * len(rows), [-1.0] * len(rows), version)


def test_length_beats_stop_as_in_sglang() -> None:
    core = scheduler()
    core.add(generation("a", max_new_tokens=1))
    assert [item.finish for item in step(core, EOS)] == [LengthReached(length=1)]


def test_stop_id_is_kept_in_the_ids() -> None:
    core = scheduler()
    core.add(generation("a"))
    (finished,) = step(core, EOS)
    assert finished.finish == Stopped(matched=EOS)
    assert finished.output_ids == [EOS]


def test_ignore_eos_leaves_stop_strings() -> None:
    core = scheduler()
    core.add(generation("a", ignore_eos=True, stop=["jb"]))
    assert step(core, EOS) == []
    (finished,) = step(core, 1)
    assert finished.finish == Stopped(matched="jb")
    assert finished.output_ids == [EOS, 1]


def test_nothing_to_sample_finishes_at_once() -> None:
    core = scheduler()
    assert [item.finish for item in core.add(generation("a", max_new_tokens=0))] == [LengthReached(length=0)]
    assert not core.runnable


def test_prefill_is_bounded_by_padded_tokens_but_never_empty() -> None:
    core = scheduler(max_prefill_tokens=20)
    for name, length in (("a", 50), ("b", 5), ("c", 8), ("d", 5)):
        core.add(generation(name, prompt=length))
    assert [item.prompt.request_id for item in core.admit()] == ["a"]
    assert [item.prompt.request_id for item in core.admit()] == ["b", "c"]


def test_retracted_requests_come_first_and_keep_their_tokens() -> None:
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
    assert [(span.version, span.start, span.end) for span in first.spans] == [("1.0", 0, 1), ("1.1", 1, 2)]


def test_abort_shapes() -> None:
    core = scheduler(max_running=1)
    for name in "ab":
        core.add(generation(name))
    step(core, 1)
    assert [item.finish for item in core.abort("a")] == [Aborted(queued=False)]
    assert [item.finish for item in core.abort("b")] == [Aborted(queued=True)]
    assert core.abort("unknown") == []


def test_abort_of_a_paused_arrival_is_lost_until_the_pause_ends() -> None:
    core = scheduler()
    core.add(generation("old"))
    step(core, 1)
    core.pause(PauseMode.RETRACT)
    core.add(generation("new"))
    assert core.abort("new") == []
    assert [item.prompt.request_id for item in core.abort("old")] == ["old"]
    core.resume()
    assert [item.prompt.request_id for item in core.abort("new")] == ["new"]


def test_pause_abort_ends_everything() -> None:
    core = scheduler(max_running=1)
    for name in "ab":
        core.add(generation(name))
    step(core, 1)
    assert [item.finish for item in core.pause(PauseMode.ABORT)] == [Aborted(queued=False), Aborted(queued=True)]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 6)),
        st.tuples(st.just("step"), st.sampled_from([1, 2, EOS])),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("retract"), st.just(0)),
        st.tuples(st.just("resume"), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(ACTIONS)
def test_rows_follow_the_moves(actions: list[tuple[str, int]]) -> None:
    """A mirror of the cache, updated by prefills and `moves` only, always holds the right generation in each row."""
    core = scheduler(max_running=3)
    mirror: dict[int, str] = {}
    finished: list[Generation] = []
    added: list[Generation] = []

    def sync() -> None:
        for move in core.moves:
            mirror[move.target] = mirror[move.source]
        core.moves.clear()

    for kind, value in actions:
        if kind == "add":
            added.append(generation(str(len(added)), max_new_tokens=value))
            finished += core.add(added[-1])
        elif kind == "step" and core.runnable:
            sync()
            before = len(core.running)
            for row, item in enumerate(core.admit(), start=before):
                mirror[row] = item.prompt.request_id
            assert [mirror[row] for row in range(len(core.running))] == [
                item.prompt.request_id for item in core.running
            ]
            rows = range(before, len(core.running)) if len(core.running) > before else range(before)
            finished += core.record(rows, [value] * len(rows), [-1.0] * len(rows), "1.0")
        elif kind == "abort":
            finished += core.abort(str(value))
        elif kind == "retract":
            core.pause(PauseMode.RETRACT)
        elif kind == "resume":
            core.resume()
    places = [*core.running, *core.waiting, *finished]
    assert sorted(map(id, places)) == sorted(map(id, added))
    for item in added:
        assert len(item.logprobs) == len(item.output_ids)
        assert (item.spans[-1].end if item.spans else 0) == len(item.output_ids)
