"""Random lives of a buffer and its ledger against a plain model, with crashes and resumes at any point.

The model knows versions as the tuples of updates that made their weights, so its staleness needs no tree of versions.
"""

from __future__ import annotations

import random
import runpy
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.buffer.ledger import Ledger, StoredTrajectory
from headrace.buffer.records import FINISHED, BatchState, RolloutState
from headrace.buffer.replay import BufferConfig
from headrace.buffer.types import Cause, CheckpointRef, ReceiptStatus, StepReport, batch_digest, extend_chain
from headrace.buffer.verify import verify
from headrace.buffer.versions import PolicyVersion

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "replay_cases.py")))
CONFIG = BufferConfig(batch_size=3, group_size=2, max_staleness=2, max_attempts=2)
IDENTITY = {"run_id": "run"}


@dataclass(frozen=True)
class Step:
    """A committed step of the model: what was trained, from which weights, and the version after."""

    batch_id: str
    members: tuple
    weights: tuple
    after: PolicyVersion


def distance(one: tuple, other: tuple) -> int:
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    return len(one) + len(other) - 2 * common


def tables(buffer):
    state = buffer.state
    return {name: getattr(state, name) for name in vars(state) if name not in {"_changes", "by_state"}} | {
        "by_state": {name: set(ids) for name, ids in state.by_state.items()}
    }


class BufferMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.run_dir = Path(tempfile.mkdtemp())
        self.core = cases.core(CONFIG)
        self.open_ledger()
        self.in_flight, self.sampled, self.accepted = {}, {}, set()
        self.path, self.checkpoints, self.leases = [], [], []
        self.weights = {}
        self.updates = 0
        self.stored = []

    def open_ledger(self):
        self.ledger = Ledger.open(self.run_dir, IDENTITY)
        for database in (self.ledger._database, *self.ledger._blobs._open.values()):
            database.execute("PRAGMA synchronous = OFF")  # no power is cut here: the disk need not be waited for

    @property
    def head(self):
        return self.core.state.head

    @property
    def next_version(self):
        return PolicyVersion(self.head.epoch, self.head.step + len(self.leases))

    def persist(self):
        self.ledger.write(self.core.drain(), self.stored)
        self.stored = []

    @initialize()
    def first_epoch(self):
        assert self.core.open_epoch(None, 0.0) == PolicyVersion(1, 0)
        self.weights[PolicyVersion(1, 0)] = ()
        self.persist()

    @rule(limit=st.integers(1, 9))
    def issue(self, limit):
        room = self.core.admit()
        orders = self.core.issue(limit, self.head, 1.0)
        self.persist()
        assert len(orders) == min(limit, room)
        for order in orders:
            assert (order.rollout_id, order.attempt) not in self.sampled
            self.in_flight[order.rollout_id] = order
            self.sampled[order.rollout_id, order.attempt] = None
        if any(order.attempt == 1 and order.rollout_id.endswith("-0") for order in orders):
            assert self.core.inventory().total <= (CONFIG.max_staleness + 1) * CONFIG.batch_size

    @precondition(lambda self: self.in_flight)
    @rule(seed=st.integers(0, 1 << 16), share=st.sampled_from([0.3, 0.7, 1.0]))
    def work(self, seed, share):
        """Some of what is in flight ends, mostly well."""
        chance = random.Random(seed)
        for rollout_id in sorted(self.in_flight):
            if chance.random() < share:
                order = self.in_flight.pop(rollout_id)
                self.finish(order, chance) if chance.random() < 0.9 else self.fail(order, chance)
        self.persist()

    def finish(self, order, chance):
        versions = chance.choices(sorted(self.weights)[-3:], k=chance.randint(1, 2))
        tokens, trainable = chance.random() < 0.9, chance.random() < 0.9
        done = cases.result(
            order, *(versions if tokens else ()), reward=float(chance.randint(0, 1)), trainable=trainable, tokens=2
        )
        assert self.core.offer(done, 2.0).status is ReceiptStatus.ACCEPTED
        self.accepted.add(order.rollout_id)
        if tokens:
            self.sampled[order.rollout_id, order.attempt] = versions
            self.stored.append(
                StoredTrajectory(rollout_id=order.rollout_id, attempt=order.attempt, trajectory=done.trajectory)
            )
        assert self.core.offer(done, 2.0).status in {ReceiptStatus.DUPLICATE, ReceiptStatus.LATE}

    def fail(self, order, chance):
        cause = chance.choice([Cause.INFRA, Cause.EVALUATOR, Cause.CANCELLED, None])
        if cause is None:
            assert self.core.abandon([(order.rollout_id, order.attempt)], 2.0) == 1
        else:
            assert self.core.offer(cases.ended(order, cause), 2.0).status is ReceiptStatus.ACCEPTED

    @rule(seed=st.integers(0, 1 << 16), steps=st.integers(1, 3))
    def train(self, seed, steps):
        """The ordinary course of things."""
        for offset in range(steps):
            self.issue(9)
            self.work(seed + offset, 1.0)
            if len(self.leases) < 2:
                self.take()
            if self.leases:
                self.commit(skipped=False)

    @precondition(lambda self: len(self.leases) < 2)
    @rule()
    def take(self):
        version = self.next_version
        record = self.core.take(version, self.head.epoch, 3.0)
        self.persist()
        if record is not None:
            assert record == self.core.take(version, self.head.epoch, 3.0)
            assert len(record.members) == CONFIG.batch_size
            self.leases.append(record)

    @precondition(lambda self: self.leases)
    @rule(skipped=st.booleans())
    def commit(self, skipped):
        record = self.leases.pop(0)
        before = self.head
        after = before if skipped else PolicyVersion(before.epoch, before.step + 1)
        report = StepReport(batch_id=record.batch_id, version=after, skipped=skipped)
        for _ in range(2):
            self.core.commit(cases.lease_of(record), report, 4.0)
        self.persist()
        members = tuple((member.rollout_id, member.attempt) for member in record.members)
        for key in members:
            oldest = max(distance(self.weights[before], self.weights[version]) for version in self.sampled[key])
            assert oldest <= CONFIG.max_staleness
        self.path.append(Step(record.batch_id, members, self.weights[before], after))
        if not skipped:
            self.updates += 1
            self.weights[after] = (*self.weights[before], self.updates)

    @precondition(lambda self: self.leases)
    @rule()
    def release(self):
        self.core.release(cases.lease_of(self.leases.pop()))
        self.persist()

    @rule(recorded=st.booleans())
    def checkpoint(self, recorded):
        ref = CheckpointRef(
            path="checkpoint",
            version=self.head,
            batch_ids=tuple(step.batch_id for step in self.path),
            chain=self.core.state.chain,
        )
        self.checkpoints.append((ref, len(self.path)))
        if recorded:
            self.core.checkpointed(ref, 5.0)
            self.persist()

    @precondition(lambda self: self.path or self.leases)
    @rule(back=st.integers(0, 2), driver=st.booleans())
    def resume(self, back, driver):
        """A new learner, from the newest checkpoint or an older one; with `driver` everything in flight is dead too."""
        ref, length = self.checkpoints[-1 - back] if back < len(self.checkpoints) else (None, 0)
        undone = [step.batch_id for step in self.path[length:]]
        if self.core.needs_history(ref):
            self.core.fold(self.ledger.load(history=True))
        version = self.core.open_epoch(ref, 6.0)
        self.persist()
        self.core.fold(self.ledger.load())
        self.weights[version] = self.weights[ref.version if ref else PolicyVersion(1, 0)]
        self.path = self.path[:length]
        self.checkpoints = [pair for pair in self.checkpoints if pair[1] <= length and self.leads_here(pair[0])]
        self.leases = []
        queued = [batch.batch_id for batch in self.core.state.queue()]
        assert queued[: len(undone)] == undone
        if driver:
            assert self.core.restart_in_flight(6.0) == len(self.in_flight)
            self.in_flight = {}
            self.persist()

    def leads_here(self, ref):
        return self.weights[ref.version] == self.weights[self.head][: len(self.weights[ref.version])]

    @rule()
    def crash(self):
        """Only what was written is there again, and it is everything."""
        before = tables(self.core)
        self.ledger.close()
        self.open_ledger()
        self.core = cases.core(CONFIG, self.ledger.load())
        assert tables(self.core) == before

    @invariant()
    def rollouts_are_conserved(self):
        status = self.core.status()
        assert sum(status.rollouts.values()) == status.groups_opened * CONFIG.group_size
        assert set(self.core.state.by_state[RolloutState.IN_FLIGHT]) == set(self.in_flight)
        assert sum(status.rollouts[state] for state in FINISHED) == len(self.accepted)

    @invariant()
    def nothing_is_trained_twice(self):
        trained = [key for step in self.path for key in step.members]
        assert len({rollout_id for rollout_id, _ in trained}) == len(trained)
        assert self.core.status().rollouts[RolloutState.TRAINED] == len(trained)

    @invariant()
    def the_chain_is_that_of_the_path(self):
        chain = ""
        for step in self.path:
            chain = extend_chain(chain, batch_digest(step.batch_id, step.members))
        assert self.core.state.chain == chain

    @invariant()
    def a_live_rollout_is_in_one_live_batch(self):
        live = [batch for batch in self.core.state.batches.values() if batch.state is not BatchState.DISSOLVED]
        held = [member.rollout_id for batch in live for member in batch.members]
        assert len(set(held)) == len(held)

    def teardown(self):
        self.ledger.close()
        try:
            report = verify(self.run_dir)
            assert report.problems == ()
            assert report.issued == self.core.status().groups_opened * CONFIG.group_size
            assert report.trained == sum(len(step.members) for step in self.path)
        finally:
            shutil.rmtree(self.run_dir)


TestBufferMachine = BufferMachine.TestCase
TestBufferMachine.settings = settings(
    max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
