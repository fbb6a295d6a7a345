"""Random lives of a buffer and its ledger against a plain model, with crashes and resumes at any point, and a clock
that jumps both ways.

The model knows versions as the tuples of updates that made their weights, each named by the batches trained up to it,
so its staleness needs no tree of versions; it says of a rule whether it accepts now, where the buffer knows from when
on.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.buffer.audit.verify import verify
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.records import BatchState, GroupState, RolloutState
from headrace.buffer.errors import DataExhausted
from headrace.buffer.ledger.ledger import Ledger, StoredTrajectory
from headrace.buffer.trajectories.types import (
    Cause,
    CheckpointRef,
    ReceiptStatus,
    StepReport,
    batch_digest,
    extend_chain,
)
from headrace.buffer.trajectories.versions import PolicyVersion
from support import replay_cases as cases

SIZES = {"batch_size": 3, "group_size": 3, "max_staleness": 2, "max_attempts": 2, "batch_tries": 1000}
RULES = {
    "all": lambda seen: False,
    "count(2)": lambda seen: len(seen.ends) >= 2,
    "fraction(0.6) & grace(3) | deadline(9)": lambda seen: (
        (len(seen.ends) >= 2 and seen.now - max(*seen.ends, seen.opened) >= 3) or seen.now - seen.opened >= 9
    ),
    "all | expiring(1)": lambda seen: seen.updates_left <= 1,
    "at_least(2) & deadline(5)": lambda seen: len(seen.ends) >= 2 and seen.now - seen.opened >= 5,
}
"""What each says of a group with at least two finished members and one that runs."""

CONFIGS = (
    {"group_size": 2},
    {"rule": "all", "max_evictions": 0, "zero_variance": "filter"},
    {"rule": "count(2)", "advantage": "leave_one_out"},
    {"rule": "count(2)", "unfinished": "abort", "passes": 1, "park_after": 1},
    {"rule": "fraction(0.6) & grace(3) | deadline(9)", "max_evictions": 1, "curriculum": "frontier", "passes": 2},
    {"rule": "fraction(0.6) & grace(3) | deadline(9)", "unfinished": "abort"},
    {"rule": "fraction(0.6) & grace(3) | deadline(9)", "advantage": "leave_one_out"},
    {"rule": "all | expiring(1)", "max_evictions": 3, "advantage": "grpo_no_std"},
    {"rule": "at_least(2) & deadline(5)", "curriculum": "frontier", "zero_variance": "filter"},
)
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


class BufferMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.run_dir = Path(tempfile.mkdtemp())
        self.open_ledger()
        self.now = 1000.0
        self.in_flight, self.sampled, self.accepted, self.aborted = {}, {}, {}, {}
        self.opened, self.seen, self.sealed = {}, set(), set()
        self.path, self.checkpoints, self.leases = [], [], []
        self.weights = {}
        self.served, self.evicted, self.dropped = PolicyVersion(1, 0), set(), set()
        self.outcomes = {}
        self.stored = []

    def open_ledger(self):
        self.ledger = Ledger.open(self.run_dir, IDENTITY)
        for database in (self.ledger._database, *self.ledger._blobs._open.values()):
            database.execute("PRAGMA synchronous = OFF")  # no power is cut here: the disk need not be waited for

    @property
    def head(self):
        return self.core.state.path.head

    @property
    def next_version(self):
        return PolicyVersion(self.head.epoch, self.head.step + len(self.leases))

    @property
    def chain(self):
        chain = ""
        for step in self.path:
            chain = extend_chain(chain, batch_digest(step.batch_id, step.members))
        return chain

    def weights_after(self, batches):
        """The weights that these batches lead to from the head, if each step goes as it went before."""
        weights, chain = self.weights[self.head], self.chain
        for batch in batches:
            members = tuple((member.rollout_id, member.attempt) for member in batch.members)
            chain = extend_chain(chain, batch_digest(batch.batch_id, members))
            if not self.outcomes.get((weights, chain), False):
                weights = (*weights, chain)
        return weights

    @property
    def planned(self):
        return self.weights_after([*self.leases, *self.core.state.path.queue()])

    @property
    def horizon(self):
        """Where what is in no batch is judged: at the head, or where a resumed learner is on its way to."""
        head, planned = self.weights[self.head], self.planned
        step = planned[: len(head) + 1]
        repeating = len(step) > len(head) and any(known[: len(step)] == step for known in self.weights.values())
        return planned if self.core.state.path.queue() or repeating else head

    def persist(self):
        self.ledger.write(self.core.drain(), self.stored)
        self.stored = []

    @initialize(changes=st.sampled_from(CONFIGS))
    def first_epoch(self, changes):
        self.config = BufferConfig(**(SIZES | changes))
        self.core = cases.core(self.config)
        assert self.core.open_epoch(None, self.now) == PolicyVersion(1, 0)
        self.weights[PolicyVersion(1, 0)] = ()
        self.persist()

    def settled(self):
        """After a call with a time: what the rule accepts by now is sealed, and nothing else."""
        for rollout_id in list(self.in_flight):
            if self.core.state.rollouts[rollout_id].state is RolloutState.CANCELLED:
                assert self.config.unfinished == "abort"
                self.aborted[rollout_id] = self.in_flight.pop(rollout_id)
        for group_id in list(self.opened):
            group = self.core.state.groups[group_id]
            due = self.due(group_id)
            if group.state is GroupState.OPEN:
                assert not due
            else:
                assert due or group_id in self.sealed, "it was due when it was sealed"
                del self.opened[group_id]
        self.persist()

    def due(self, group_id):
        """Whether the group is to be sealed or dropped, by what the model saw."""
        members = [member.rollout_id for member in self.core.state.rollouts_of(group_id)]
        ends = [self.accepted[member] for member in members if member in self.accepted]
        lost = {RolloutState.POISON, RolloutState.EVICTED}
        gone = [m for m in members if m not in self.accepted and self.core.state.rollouts[m].state in lost]
        if len(ends) + len(gone) == len(members):
            return True
        if len(ends) < 2:
            return False
        oldest = max(distance(self.planned, self.weights[version]) for _, version in ends)
        seen = SimpleNamespace(
            ends=[end for end, _ in ends],
            now=self.now,
            opened=self.opened[group_id],
            updates_left=self.config.max_staleness - oldest,
        )
        return RULES[self.config.rule](seen)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 10.0, -2.0, -1000.0, 1e6]))
    def wait(self, seconds):
        self.now += seconds
        due_at = self.core.due_at()
        before = len(self.opened)
        self.core.tick(self.now)
        self.settled()
        assert (len(self.opened) < before) == (due_at is not None and due_at <= self.now)

    @rule(limit=st.integers(1, 9), pushed=st.booleans())
    def issue(self, limit, pushed):
        """The engines serve what was pushed last, which a fork may leave behind."""
        if pushed:
            self.served = self.head
        self.core.tick(self.now)
        self.settled()
        behind = distance(self.horizon, self.weights[self.served])
        room = self.core.admit() if behind <= self.config.max_staleness else 0
        orders = self.core.issue(limit, self.served, self.now)
        assert len(orders) == min(limit, room)
        assert not {(order.rollout_id, order.attempt) for order in orders} & set(self.core.to_cancel(self.head))
        for order in orders:
            assert (order.rollout_id, order.attempt) not in self.sampled
            self.in_flight[order.rollout_id] = order
            self.sampled[order.rollout_id, order.attempt] = None
            if order.group_id not in self.seen:
                self.seen.add(order.group_id)
                self.opened[order.group_id] = self.now
        self.settled()
        if any(order.attempt == 1 and order.rollout_id.endswith("-0") for order in orders):
            assert self.core.inventory().total <= (self.config.max_staleness + 1) * self.config.batch_size

    @precondition(lambda self: self.in_flight)
    @rule(seed=st.integers(0, 1 << 16), share=st.sampled_from([0.3, 0.7, 1.0]))
    def work(self, seed, share):
        """Some of what is in flight ends, mostly well."""
        chance = random.Random(seed)
        for rollout_id in sorted(self.in_flight):
            if rollout_id in self.in_flight and chance.random() < share:
                self.now += chance.choice([0.0, 0.0, 0.5, 2.0])
                self.core.tick(self.now)
                self.settled()
                if (order := self.in_flight.pop(rollout_id, None)) is not None:
                    self.finish(order, chance) if chance.random() < 0.9 else self.fail(order, chance)
                self.settled()

    @precondition(lambda self: self.aborted)
    @rule()
    def hear_of_aborted(self):
        for order in self.aborted.values():
            key = (order.rollout_id, order.attempt)
            closed = order.group_id not in self.core.state.groups
            assert closed or key in self.core.to_cancel(self.head)
            assert self.core.offer(cases.result(order, self.head), self.now).status is ReceiptStatus.LATE
            assert key not in self.core.to_cancel(self.head)
        self.aborted = {}
        self.settled()

    def finish(self, order, chance):
        versions = chance.choices(sorted(self.weights)[-3:], k=chance.randint(1, 2))
        tokens, trainable = chance.random() < 0.9, chance.random() < 0.9
        done = cases.result(
            order, *(versions if tokens else ()), reward=float(chance.randint(0, 1)), trainable=trainable, tokens=2
        )
        issued_at = self.core.state.attempts[order.rollout_id].version
        assert self.core.offer(done, self.now).status is ReceiptStatus.ACCEPTED
        self.accepted.setdefault(order.rollout_id, (self.now, issued_at))
        if tokens:
            self.sampled[order.rollout_id, order.attempt] = versions
            self.stored.append(
                StoredTrajectory(rollout_id=order.rollout_id, attempt=order.attempt, trajectory=done.trajectory)
            )
        assert self.core.offer(done, self.now).status in {ReceiptStatus.DUPLICATE, ReceiptStatus.LATE}

    def fail(self, order, chance):
        cause = chance.choice([Cause.INFRA, Cause.EVALUATOR, Cause.CANCELLED, None])
        if cause is None:
            assert self.core.abandon([(order.rollout_id, order.attempt)], self.now) == 1
        else:
            assert self.core.offer(cases.ended(order, cause), self.now).status is ReceiptStatus.ACCEPTED

    @rule(seed=st.integers(0, 1 << 16), steps=st.integers(1, 3))
    def train(self, seed, steps):
        """The ordinary course of things."""
        for offset in range(steps):
            self.issue(9, pushed=True)
            self.work(seed + offset, 1.0)
            if len(self.leases) < 2:
                self.take()
            if self.leases:
                self.commit(skipped=False)

    @precondition(lambda self: len(self.leases) < 2)
    @rule()
    def take(self):
        version, again = self.next_version, self.issued_again_next()
        try:
            record = self.core.take(version, self.head.epoch, self.now)
        except DataExhausted:
            stock = self.core.inventory()
            assert self.config.passes is not None or self.core.status().parked
            assert stock.total - stock.leased < self.config.batch_size
            assert self.core.drain() == (), "an error leaves everything as it is"
            return
        self.settled_before_lease(record)
        if again is not None and not again[-1]:
            assert record is None
            assert self.leases
        elif again is not None:
            assert (record.batch_id, [member.rollout_id for member in record.members]) == again[:2]
        if record is not None:
            assert record == self.core.take(version, self.head.epoch, self.now)
            assert len(record.members) == self.config.batch_size
            self.leases.append(record)
            self.core.tick(self.now)
            self.settled()

    def issued_again_next(self):
        """The first batch in the queue without a member over the bound: it goes before anything fresh. And whether it
        is within the bound however the leases before it end."""
        queue = self.core.state.path.queue()
        for place, batch in enumerate(queue):
            keys = [(member.rollout_id, member.attempt) for member in batch.members]
            sampled = [self.weights[version] for key in keys for version in self.sampled[key]]
            planned = self.weights_after([*self.leases, *queue[place:]])
            now = (*planned, *["leased"] * len(self.leases))[: self.next_version.step]
            if max(distance(now, each) for each in sampled) <= self.config.max_staleness:
                alone = self.weights[self.head] + ("leased",) * len(self.leases)
                sure = max(distance(alone, each) for each in sampled) <= self.config.max_staleness
                return batch.batch_id, [rollout_id for rollout_id, _ in keys], sure
        return None

    def settled_before_lease(self, record):
        """The lease itself moves the version; what expires by that is sealed with the next call."""
        if record is None:
            self.settled()
        else:
            self.sealed |= {g for g in self.opened if self.core.state.groups[g].state is not GroupState.OPEN}
            assert all(self.due(group_id) for group_id in self.sealed & set(self.opened))
            self.persist()

    @precondition(lambda self: self.leases)
    @rule(skipped=st.booleans())
    def commit(self, skipped):
        record = self.leases.pop(0)
        before = self.head
        after = before if skipped else PolicyVersion(before.epoch, before.step + 1)
        report = StepReport(batch_id=record.batch_id, version=after, skipped=skipped)
        for _ in range(2):
            self.core.commit(cases.lease_of(record), report, self.now)
        members = tuple((member.rollout_id, member.attempt) for member in record.members)
        for key in members:
            oldest = max(distance(self.weights[before], self.weights[version]) for version in self.sampled[key])
            assert oldest <= self.config.max_staleness
        self.path.append(Step(record.batch_id, members, self.weights[before], after))
        self.outcomes[self.weights[before], self.chain] = skipped
        if not skipped:
            self.weights[after] = (*self.weights[before], self.chain)
        self.settled()

    @precondition(lambda self: self.leases)
    @rule()
    def release(self):
        self.core.batches.release(cases.lease_of(self.leases.pop()))
        self.persist()

    @rule(recorded=st.booleans())
    def checkpoint(self, recorded):
        ref = CheckpointRef(
            path="checkpoint",
            version=self.head,
            batch_ids=tuple(step.batch_id for step in self.path),
            chain=self.core.state.path.chain,
        )
        self.checkpoints.append((ref, len(self.path)))
        if recorded:
            self.core.epochs.checkpointed(ref, self.now)
            self.persist()
            while self.ledger.archive_groups():
                pass
            self.core.state.path.forget_steps(*self.ledger.archive_steps())
            self.core.state.forget_evaluations(self.ledger.archive_evaluations())

    @precondition(lambda self: self.path or self.leases)
    @rule(back=st.integers(0, 2), driver=st.booleans())
    def resume(self, back, driver):
        """A new learner, from the newest checkpoint or an older one; with `driver` everything in flight is dead too."""
        ref, length = self.checkpoints[-1 - back] if back < len(self.checkpoints) else (None, 0)
        undone = [step.batch_id for step in self.path[length:]]
        if self.core.epochs.needs_history(ref):
            self.ledger.recall(ref.chain if ref else "")
            self.core.fold(self.ledger.load())
        version = self.core.open_epoch(ref, self.now, from_start=ref is None)
        self.persist()
        self.core.fold(self.ledger.load())
        self.weights[version] = self.weights[ref.version if ref else PolicyVersion(1, 0)]
        self.path = self.path[:length]
        self.checkpoints = [pair for pair in self.checkpoints if pair[1] <= length and self.leads_here(pair[0])]
        self.leases = []
        queued = [batch.batch_id for batch in self.core.state.path.queue()]
        assert queued[: len(undone)] == undone
        if driver:
            self.core.tick(self.now)
            self.settled()
            assert self.core.keep_in_flight((), self.now) == len(self.in_flight)
            self.in_flight, self.aborted = {}, {}
            assert self.core.to_cancel(version) == ()
        self.core.tick(self.now)
        self.settled()

    @precondition(lambda self: self.leases or self.core.state.path.queue())
    @rule(place=st.integers(0, 3))
    def drop_a_batch(self, place):
        """An operator, after the run has ended; a new learner opens then."""
        batches = [*self.core.state.path.leases(), *self.core.state.path.queue()]
        dropped = self.core.operators.drop_batch(batches[place % len(batches)].batch_id, self.now)
        self.persist()
        self.dropped |= {member.rollout_id for member in dropped.members}
        self.resume(0, driver=True)

    @rule(seed=st.integers(0, 1 << 16), share=st.sampled_from([0.1, 0.5, 1.0]))
    def lose_results(self, seed, share):
        """An operator issues again what is lost of the results that are not trained; a new learner opens then."""
        chance = random.Random(seed)
        states = (RolloutState.WAITING, RolloutState.SEALED, RolloutState.LEASED)
        held = sorted(rollout_id for state in states for rollout_id in self.core.state.by_state[state])
        lost = {rollout_id: "lost" for rollout_id in held if chance.random() < share}
        self.ledger.recall_groups_of(lost)
        self.core.fold(self.ledger.load())
        assert set(self.core.operators.retry_lost(lost, self.now)) == set(lost)
        self.persist()
        for rollout_id in lost:
            if self.core.state.group_of(rollout_id).state is GroupState.OPEN:
                del self.accepted[rollout_id]
        self.resume(0, driver=True)

    def leads_here(self, ref):
        return self.weights[ref.version] == self.weights[self.head][: len(self.weights[ref.version])]

    @rule()
    def crash(self):
        """Only what was written is there again, and it is everything."""
        before = cases.tables(self.core)
        self.ledger.close()
        self.open_ledger()
        self.core = cases.core(self.config, self.ledger.load())
        assert cases.tables(self.core) == before
        self.core.restart_clocks(self.now)
        self.opened = dict.fromkeys(self.opened, self.now)
        self.persist()

    @invariant()
    def rollouts_are_conserved(self):
        status = self.core.status()
        assert sum(status.rollouts.values()) == status.groups_opened * self.config.group_size
        assert set(self.core.state.by_state[RolloutState.IN_FLIGHT]) == set(self.in_flight)
        for rollout in self.core.state.rollouts.values():
            assert rollout.finished == (rollout.rollout_id in self.accepted)
            assert rollout.evictions <= self.config.max_evictions

    @invariant()
    def a_fork_evicts_nothing_for_good(self):
        evicted = set(self.core.state.by_state[RolloutState.EVICTED])
        for rollout_id in evicted - self.evicted:
            issued_at = self.weights[self.core.state.attempts[rollout_id].version]
            assert self.planned[: len(issued_at)] == issued_at
        self.evicted |= evicted

    @invariant()
    def each_task_comes_once_in_a_pass(self):
        tasks = self.core.state.tasks.values()
        newest = max((task.last_pass for task in tasks), default=0)
        assert all(task.groups <= task.last_pass + 1 for task in tasks)
        assert all(task.parked or task.groups >= newest for task in tasks)
        assert self.config.passes is None or newest < self.config.passes

    @invariant()
    def nothing_is_trained_twice(self):
        trained = [key for step in self.path for key in step.members]
        assert not self.dropped & {rollout_id for rollout_id, _ in trained}
        assert len({rollout_id for rollout_id, _ in trained}) == len(trained)
        assert self.core.status().rollouts[RolloutState.TRAINED] == len(trained)

    @invariant()
    def the_chain_is_that_of_the_path(self):
        chain = ""
        for step in self.path:
            chain = extend_chain(chain, batch_digest(step.batch_id, step.members))
        assert self.core.state.path.chain == chain

    @invariant()
    def a_live_rollout_is_in_one_live_batch(self):
        live = [batch for batch in self.core.state.path.batches.values() if batch.state is not BatchState.DISSOLVED]
        held = [member.rollout_id for batch in live for member in batch.members]
        assert len(set(held)) == len(held)

    def teardown(self):
        self.ledger.close()
        try:
            report = verify(self.run_dir)
            assert report.problems == ()
            assert report.issued == self.core.status().groups_opened * self.config.group_size
            assert report.trained == sum(len(step.members) for step in self.path)
        finally:
            shutil.rmtree(self.run_dir)


TestBufferMachine = BufferMachine.TestCase
TestBufferMachine.settings = settings(
    max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
