"""One life of a run: `python -m support.ledger_life RUN_DIR SEED LIFE MOMENT NUMBER`.

It opens the newest checkpoint as a new learner, then issues, offers, trains and saves until the run's steps are done,
or until it is struck (see `striking`). Each line on standard output tells what has been acknowledged to it, after the
acknowledgement. The run is drawn from SEED, what its parts do from SEED and LIFE. It ends with 0 when all steps are
done, with 3 when its ledger broke.
"""

from __future__ import annotations

import asyncio
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

from headrace.buffer.core.config import BufferConfig
from headrace.buffer.errors import LedgerBroken, LedgerRefused
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.trajectories.types import (
    Batch,
    Cause,
    CheckpointRef,
    ReceiptStatus,
    RolloutOrder,
    RolloutResult,
    StepReport,
)
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.checkpoint_retention import remove_old
from headrace.policies.learners.checkpoints import (
    Manifest,
    SteppedBatch,
    publish,
    read_checkpoint,
    stage,
    usable_checkpoint,
    write_manifest,
)
from support import replay_cases as cases
from support import striking

BROKE = 3
RULES = (
    "all",
    "count(3)",
    "fraction(0.5) & grace(120)",
    "all | expiring(1)",
    "deadline(300)",
    "count(2) | deadline(600)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run. `slow` is the share of rollouts that take many ticks, which makes them stale, late or left out."""

    config: BufferConfig
    steps: int
    save_every: int
    file_bytes: int
    """1: every transaction begins a trajectory file of its own, and old ones are dropped all the time."""
    slow: float
    infra: float

    @classmethod
    def draw(cls, seed: int) -> Plan:
        chance = random.Random(f"plan {seed}")
        config = BufferConfig(
            batch_size=chance.choice((4, 8)),
            group_size=4,
            max_staleness=chance.choice((2, 3)),
            rule=RULES[seed % len(RULES)],
            unfinished=("carry", "abort")[seed // len(RULES) % 2],
            zero_variance=chance.choice(("keep", "filter")),
            mode=chance.choice(("async", "async", "one-step-off")),
            max_attempts=20,
            batch_tries=1000,
            park_after=1000,
        )
        return cls(
            config=config,
            steps=chance.randint(16, 22),
            save_every=chance.choice((1, 2, 3)),
            file_bytes=(1, 1 << 20)[seed % 2],
            slow=chance.choice((0.05, 0.3)),
            infra=chance.choice((0.0, 0.1)),
        )


class Clock:
    """Seconds since the Unix epoch, as somebody sets them who also sets them back."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._now = 1e9 + chance.uniform(-1e5, 1e5)

    def __call__(self) -> float:
        return self._now

    def advance(self) -> None:
        self._now += self._chance.uniform(0, 30)
        if self._chance.random() < 0.02:
            self._now += self._chance.uniform(-7200, 7200)


class Voice:
    """Standard output. After its line number `pause_at` the life waits for a line on standard input: whoever strikes
    from outside strikes then, and no life is over before it is struck."""

    def __init__(self) -> None:
        self.pause_at, self.lines = 0, 0

    def __call__(self, *words: object) -> None:
        sys.stdout.write(" ".join(map(str, words)) + "\n")
        sys.stdout.flush()
        self.lines += 1
        if self.lines == self.pause_at:
            sys.stdin.readline()


say = Voice()


@dataclass(slots=True)
class Life:
    run_dir: Path
    plan: Plan
    chance: random.Random
    store: ReplayStore
    version: PolicyVersion
    chain: str
    stepped: list[SteppedBatch] = field(default_factory=list)
    running: list[tuple[RolloutOrder, PolicyVersion]] = field(default_factory=list)
    """Attempts in flight, with the version that was served when they began."""

    async def tick(self) -> None:
        """Some end while the learner takes a step; some begin."""
        async with asyncio.TaskGroup() as group:
            for part in self.parts_of(self.ended()):
                group.create_task(self.offer(part))
            group.create_task(self.step())
        for order in await self.store.issue(self.chance.randint(1, 16), self.version):
            self.running.append((order, self.version))

    def ended(self) -> list[RolloutResult]:
        """Those that are done or cancelled now; some are told of twice."""
        cancelled = set(self.store.to_cancel(self.version))
        results, running = [], []
        for order, began in self.running:
            slow = random.Random(f"{order.rollout_id} {order.attempt}").random() < self.plan.slow
            # Half of those that are to be cancelled are told too late.
            if (order.rollout_id, order.attempt) in cancelled and self.chance.random() < 0.5:
                results.append(cases.ended(order, Cause.CANCELLED))
            elif self.chance.random() < (0.05 if slow else 0.5):
                results.append(self.result(order, began))
            else:
                running.append((order, began))
        self.running = running
        return results + [result for result in results if self.chance.random() < 0.1]

    def result(self, order: RolloutOrder, began: PolicyVersion) -> RolloutResult:
        if self.chance.random() < self.plan.infra:
            return cases.ended(order, Cause.INFRA)
        versions = dict.fromkeys((began, self.version))
        return cases.result(order, *versions, reward=float(self.chance.randint(0, 1)), tokens=50)

    def parts_of(self, results: list[RolloutResult]) -> list[list[RolloutResult]]:
        self.chance.shuffle(results)
        return [results[start : start + 3] for start in range(0, len(results), 3)]

    async def offer(self, results: list[RolloutResult]) -> None:
        receipts = await self.store.offer_many(results)
        for result, receipt in zip(results, receipts, strict=True):
            if receipt.status is ReceiptStatus.ACCEPTED and result.trajectory is not None:
                say("offered", result.rollout_id, result.attempt)

    async def step(self) -> None:
        batch = await self.store.take(self.version, self.version.epoch, timeout_s=0.0)
        if batch is None:
            return
        if self.chance.random() < 0.05:
            await self.store.release(batch.lease)
            return
        await self.train(batch)
        if len(self.stepped) >= self.plan.save_every:
            await self.save()

    async def train(self, batch: Batch) -> None:
        members = tuple((item.rollout_id, item.attempt) for item in batch.items)
        skipped = self.chance.random() < 0.05
        self.stepped.append(SteppedBatch(batch_id=batch.lease.batch_id, members=members, skipped=skipped))
        after = PolicyVersion(self.version.epoch, self.version.step + (not skipped))
        await self.store.commit(batch.lease, StepReport(batch_id=batch.lease.batch_id, version=after, skipped=skipped))
        self.version = after
        say("committed", after, batch.lease.batch_id, *(f"{name}#{attempt}" for name, attempt in members))

    async def save(self) -> None:
        """A checkpoint as a learner makes it; none for steps that were all skipped since the last one."""
        root = self.run_dir / "checkpoints"
        if (root / str(self.version)).exists():
            return
        staged = stage(root, self.version)
        manifest = Manifest(
            version=self.version,
            previous_chain=self.chain,
            chain=self.store.status().chain,
            batches=tuple(self.stepped),
        )
        write_manifest(staged, manifest)
        ref = read_checkpoint(publish(staged, self.version))
        say("saved", self.version)
        await self.store.checkpointed(ref)
        remove_old(root, newest=3)
        self.chain, self.stepped = ref.chain, []


async def live(run_dir: Path, plan: Plan, chance: random.Random) -> None:
    resume: CheckpointRef | None = usable_checkpoint(run_dir / "checkpoints").checkpoint
    clock = Clock(chance)
    store = await ReplayStore.open(
        run_dir, plan.config, cases.tasks(), run_id="run", seed=3, clock=clock, trajectory_file_bytes=plan.file_bytes
    )
    async with store:
        version = await store.open_epoch(resume)
        say("opened", version)
        await store.keep_in_flight(())
        life = Life(run_dir, plan, chance, store, version, resume.chain if resume else "")
        while life.version.step < plan.steps:
            await life.tick()
            clock.advance()
        if life.stepped:
            await life.save()
    say("done")


def main(run_dir: Path, seed: int, number: int, moment: striking.Moment, at: int) -> None:
    striking.arm(moment, at, str(run_dir))
    if moment is striking.Moment.COUNT:
        say.pause_at = at
    try:
        asyncio.run(live(run_dir, Plan.draw(seed), random.Random(f"life {seed} {number}")))
    except* (LedgerBroken, LedgerRefused, OSError) as group:
        say("broke", group.exceptions[0])
        sys.exit(BROKE)
    finally:
        say("seen", striking.SEEN.statements, striking.SEEN.writes, striking.SEEN.files)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), striking.Moment(sys.argv[4]), int(sys.argv[5]))
