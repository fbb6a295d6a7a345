"""Whatever text or number reaches the ledger, from agents, evaluators, workers or learners of others: it is kept, or
only the result that holds it becomes a failure; what is written is what is read."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headrace.buffer.core.classification import trained_tokens
from headrace.buffer.errors import ReplayError
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.trajectories.sanitizer import MAX_TEXT
from headrace.buffer.trajectories.types import (
    Cause,
    CheckpointRef,
    Outcome,
    ReceiptStatus,
    RolloutResult,
    StepReport,
    Trajectory,
)
from headrace.buffer.trajectories.versions import PolicyVersion
from support import replay_cases as cases

CONFIG = cases.SMALL.model_copy(update={"max_attempts": 50, "park_after": 50})
FIRST = PolicyVersion(1, 0)

text = st.one_of(
    st.text(st.characters(exclude_categories=()), max_size=8),
    st.sampled_from(["\ud800", "\x00", "a\udcffb"]),
)
whole = st.one_of(
    st.integers(-3, 3), st.integers(), st.sampled_from([2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**400, True])
)
real = st.one_of(st.floats(), st.sampled_from([1e6, -1e6, 1e200, 1e308, 5e-324, -0.0]))
of_numpy = st.one_of(
    real.map(np.float64),
    st.floats(width=32).map(np.float32),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.booleans().map(np.bool_),
    st.just(np.zeros(3)),
)
number = st.one_of(whole, real, of_numpy)
anything = st.one_of(number, text, st.none())


@st.composite
def trajectories(draw):
    """Mostly a good one, with one field that is anything."""
    good = cases.trajectory(FIRST, tokens=4)
    row = good.rows[0]
    if draw(st.booleans()):
        span = replace(row.versions[0], **{draw(st.sampled_from(["start", "end"])): draw(whole)})
        version = PolicyVersion(draw(st.one_of(st.just(1), whole)), draw(st.one_of(st.just(0), whole)))
        row = replace(row, versions=(draw(st.sampled_from([span, replace(row.versions[0], version=version)])),))
    kinds = st.sampled_from(["i8", "u8", "i2", "f2", "f4", "f8", "?", "O"])
    if draw(st.booleans()):
        name = draw(st.sampled_from(["tokens_T", "logprobs_T", "loss_mask_T"]))
        values = [draw(number) for _ in range(6)]
        try:
            with np.errstate(all="ignore"):
                row = replace(row, **{name: np.array(values, dtype=draw(kinds))})
        except (TypeError, ValueError, OverflowError):
            return None
    return Trajectory(rows=(row,), temperature=draw(st.one_of(st.just(1.0), anything)))


outcomes = st.builds(
    Outcome,
    reward=st.one_of(anything, st.sampled_from([0.0, 1.0])),
    solved=st.one_of(st.booleans(), anything.filter(lambda value: not isinstance(value, np.ndarray))),
    trainable=st.one_of(st.booleans(), anything),
    cause=st.one_of(st.sampled_from(list(Cause)), text),
    detail=st.one_of(text, anything),
)


@st.composite
def spoiled(draw, order):
    """A good result of an attempt, with any of its parts spoiled."""
    good = cases.result(order, FIRST, reward=float(draw(st.integers(0, 1))))
    parts = {
        "outcome": outcomes,
        "trajectory": trajectories(),
        "turns": anything,
        "phases_s": st.lists(st.tuples(text, anything), max_size=3).map(tuple),
        "trace_id": anything,
    }
    chosen = draw(st.sets(st.sampled_from(sorted(parts)), max_size=3))
    return replace(good, **{name: draw(parts[name]) for name in sorted(chosen)})


def told(core):
    """The tables of a core, in which a metric that is NaN equals itself."""
    tables = cases.tables(core)
    commits = {
        number: replace(
            record, metrics={name: "NaN" if value != value else value for name, value in record.metrics.items()}
        )
        for number, record in tables["commits"].items()
    }
    return tables | {"commits": commits}


def reread(store: ReplayStore) -> None:
    """What is in the tables gives the same core, and the stored trajectories are those that were counted."""
    assert told(cases.core(CONFIG, store._writer.ledger.load())) == told(store._writer.core)
    for attempt in store._writer.core.state.attempts.values():
        if attempt.trained:
            (trajectory,) = store._writer.ledger.trajectories([attempt.key])
            assert trained_tokens(trajectory, store._writer.core.state.path.tree) == attempt.trained
        for value in (attempt.detail, attempt.trace_id):
            assert len(value.encode()) <= 4 * MAX_TEXT


fuzzed = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@fuzzed
@given(data=st.data())
def test_each_result_is_accepted_or_refused_on_its_own(data):
    async def life():
        async with await ReplayStore.open(
            None, CONFIG, cases.tasks(), run_id="run", seed=3, clock=lambda: 1.0
        ) as store:
            await store.open_epoch(None)
            orders = await store.issue(4, FIRST)
            results = [data.draw(spoiled(order)) for order in orders]
            receipts = await store.offer_many(results)
            assert {receipt.status for receipt in receipts} == {ReceiptStatus.ACCEPTED}
            tag = data.draw(text)
            evaluated = [(replace(result, attempt=data.draw(whole)), data.draw(text)) for result in results]
            await store.evaluations.record(evaluated, tag=tag, version=FIRST)
            reread(store)

    asyncio.run(life())


@fuzzed
@given(rollout_id=st.one_of(text, st.sampled_from(["g000000-0", "g" + "9" * 5000 + "-0"])), attempt=anything)
def test_offers_with_any_rollout_id_and_attempt_are_answered(rollout_id, attempt):
    result = RolloutResult(
        rollout_id=rollout_id, attempt=attempt, outcome=Outcome.infra("it broke"), trajectory=cases.trajectory(FIRST)
    )

    async def life():
        async with await ReplayStore.open(
            None, CONFIG, cases.tasks(), run_id="run", seed=3, clock=lambda: 1.0
        ) as store:
            await store.open_epoch(None)
            await store.issue(1, FIRST)
            await store.offer_many([result])
            await store.abandon([(rollout_id, attempt)])
            reread(store)

    if not isinstance(attempt, np.ndarray):
        asyncio.run(life())


@fuzzed
@example(metrics={"": float("nan")}, skipped=False, path="", batch_id="", step=None)
@given(
    metrics=st.one_of(anything, st.dictionaries(text, anything)),
    skipped=st.booleans(),
    path=text,
    batch_id=text,
    step=st.one_of(st.none(), number.filter(lambda value: not isinstance(value, np.ndarray))),
)
def test_steps_and_checkpoints_from_any_learner_are_kept_or_refused(metrics, skipped, path, batch_id, step):
    """`step` None: the checkpoint says the version that it is of."""

    async def life():
        async with await ReplayStore.open(
            None, CONFIG, cases.tasks(), run_id="run", seed=3, clock=lambda: 1.0
        ) as store:
            await store.open_epoch(None)
            orders = await store.issue(8, FIRST)
            await store.offer_many([cases.result(order, FIRST) for order in orders])
            batch = await store.take(PolicyVersion(np.int64(1), np.int32(0)), np.int64(1), timeout_s=0.0)
            after = PolicyVersion(np.int64(1), np.int64(not skipped))
            report = StepReport(
                batch_id=batch.lease.batch_id, version=after, skipped=np.bool_(skipped), metrics=metrics
            )
            await store.commit(batch.lease, report)
            version = after if step is None else PolicyVersion(1, step)
            ref = CheckpointRef(
                path=f"/nowhere/{path}", version=version, batch_ids=(batch_id,), chain=store.status().chain
            )
            try:
                await store.checkpointed(ref)
                await store.open_epoch(ref)
            except ReplayError:
                assert not isinstance(version.step, int | np.integer) or version.step != after.step
            store.status()
            reread(store)

    asyncio.run(life())
