"""The generator of a run directory that looks like one after days of training: ledger, trajectories, checkpoints,
metrics and evaluations.

Invariants:
- The directory is like one that the service writes: rows are the buffer's own records, written through its own tables,
  and `ledger verify` is clean. It is not meant to be trained from.
- Steps take four minutes and train 64 rollouts from 8 groups; each incarnation of the learner lasts a week. The run
  looks as if it had been killed: it has steps after the newest checkpoint, a leased batch, sealed, waiting and running
  rollouts.
- Nothing is random: the same number of days gives the same directory, except for the times, which end now.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from headrace.actors.record.files.metrics import (
    EvaluationSummary,
    MetricsLog,
    RolloutPhasesMetric,
    SimulatedPushMetric,
    StepMetric,
)
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.config import RunConfig
from headrace.actors.run.launch import RunRequest, prepare
from headrace.buffer.core.advantages import (
    RewardSpread,
    advantage,
    deviation_square_sum,
    deviation_sum,
    group_scale,
    mean,
)
from headrace.buffer.core.curriculum import TaskStream
from headrace.buffer.core.records import (
    AttemptRecord,
    BatchMember,
    BatchRecord,
    BatchState,
    Charge,
    CheckpointRecord,
    CommitRecord,
    EpochRecord,
    EvaluationRecord,
    GroupRecord,
    GroupState,
    Record,
    RolloutRecord,
    RolloutState,
    TaskRecord,
    VersionTokens,
)
from headrace.buffer.ledger.ledger import Ledger, StoredTrajectory
from headrace.buffer.tasks.task import TaskId, load_tasks
from headrace.buffer.trajectories.types import (
    BatchId,
    Cause,
    GroupId,
    RolloutId,
    Row,
    Trajectory,
    VersionSpan,
    batch_digest,
    extend_chain,
)
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.checkpoints import Manifest, SteppedBatch, publish, stage, write_manifest

ROOT: Final = Path(__file__).resolve().parents[3]
RECIPE: Final = ROOT / "scripts" / "recipes" / "simulated.toml"
STEP_S: Final = 240.0
STEPS_PER_DAY: Final = int(86400 / STEP_S)
STEPS_PER_EPOCH: Final = 7 * STEPS_PER_DAY
GROUPS, SIZE, BOUND, SAVE_EVERY, EVALUATE_EVERY = 8, 8, 4, 10, 10
AFTER_CHECKPOINT: Final = 3
"""Number of steps after the newest checkpoint."""
CHECKPOINTS_KEPT: Final = 3
TOKENS: Final = 4
REWARDS: Final = (1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0)
AGAIN_EVERY: Final = 16
"""One in this many rollouts had a first attempt that failed because of infrastructure."""
METRIC_LINES_PER_STEP: Final = 16
STEPS_LEFT: Final = 60
"""Number of steps that a resumed run still has to make."""
STEPS_AT_ONCE: Final = 100
"""Number of steps written in one transaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Position of a group in the run: its ordinal, the step that trains it (1 is the first), and its task."""

    ordinal: int
    step: int
    task: TaskId

    @property
    def group_id(self) -> GroupId:
        return GroupId(f"g{self.ordinal:06d}")


class Months:
    """Records of a run that has been training for `days` until now."""

    def __init__(self, days: float, tasks: Sequence[TaskId], *, now: float) -> None:
        # A few steps follow the newest checkpoint.
        self.saved = _saved_steps(days)
        self.steps = self.saved + AFTER_CHECKPOINT
        self._tasks, self._began = tasks, now - (self.steps + 1) * STEP_S
        self._now = now
        self.chains = [""]
        self.counts: dict[TaskId, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def version(self, step: int) -> PolicyVersion:
        """Return the version that step `step` produced."""
        return PolicyVersion(1 + max(0, step - 1) // STEPS_PER_EPOCH, step)

    def trained_at(self, step: int) -> PolicyVersion:
        """Return the version before the step: after a fork, the first of the new epoch."""
        return PolicyVersion(self.version(step).epoch, step - 1)

    def committed_at(self, step: int) -> float:
        return self._began + step * STEP_S

    def retained(self) -> list[int]:
        """Return the steps whose checkpoint directories still exist, oldest first."""
        return list(range(self.saved, 0, -SAVE_EVERY))[:CHECKPOINTS_KEPT][::-1]

    def places(self, step: int) -> list[Place]:
        first = (step - 1) * GROUPS
        return [
            Place(ordinal=ordinal, step=step, task=self._tasks[ordinal % len(self._tasks)])
            for ordinal in range(first, first + GROUPS)
        ]

    def step_records(self, step: int) -> tuple[list[Record], list[StoredTrajectory]]:
        """Return the records of one batch, from its groups to its commit, and extend the chain. Must be called in step
        order."""
        closed, batch_id = step <= self.saved, BatchId(f"b{step:06d}")
        records: list[Record] = []
        if (step - 1) % STEPS_PER_EPOCH == 0:
            parent = self.version(step - 1) if step > 1 else None
            opened_at_s = self.committed_at(step - 1) + 1
            records.append(
                EpochRecord(
                    epoch=self.version(step).epoch, parent=parent, chain=self.chains[-1], opened_at_s=opened_at_s
                )
            )
        members: list[BatchMember] = []
        stored: list[StoredTrajectory] = []
        for place in self.places(step):
            rollouts, attempts, tokens = self._members(place, RolloutState.TRAINED, batch_id)
            records += [self._sealed(place, attempts, closed=closed), *rollouts, *attempts]
            members += [
                BatchMember(
                    rollout_id=rollout.rollout_id,
                    attempt=rollout.attempt,
                    staleness=step - 1 - tokens[rollout.rollout_id].step,
                )
                for rollout in rollouts
            ]
            if step > self.retained()[0]:
                stored += _trajectories(rollouts, tokens)
        chain = extend_chain(
            self.chains[-1], batch_digest(batch_id, tuple((one.rollout_id, one.attempt) for one in members))
        )
        self.chains.append(chain)
        batch = BatchRecord(
            batch_id=batch_id,
            ordinal=step,
            state=BatchState.COMMITTED,
            epoch=self.version(step).epoch,
            version=self.trained_at(step),
            members=tuple(members),
            leased_at_s=self.committed_at(step) - STEP_S,
            closed=closed,
        )
        commit = CommitRecord(
            sequence=step,
            batch_id=batch_id,
            epoch=self.version(step).epoch,
            trained_at=self.trained_at(step),
            version=self.version(step),
            skipped=False,
            chain=chain,
            max_staleness=BOUND,
            committed_at_s=self.committed_at(step),
            metrics={"learner_s": STEP_S - 5, "mean_reward": 0.5, "mean_staleness": 2.0, "tokens": 64.0 * TOKENS},
        )
        return [*records, batch, commit], stored

    def end_records(self) -> tuple[list[Record], list[StoredTrajectory]]:
        """Return the open records of a killed run: a leased batch, a batch of sealed rollouts, unfinished groups."""
        records: list[Record] = []
        stored: list[StoredTrajectory] = []
        leased = self.steps + 1
        batch_id = BatchId(f"b{leased:06d}")
        members = []
        for place in (*self.places(leased), *self.places(leased + 1)):
            is_leased = place.step == leased
            state = RolloutState.LEASED if is_leased else RolloutState.SEALED
            rollouts, attempts, tokens = self._members(place, state, batch_id if is_leased else None)
            records += [self._sealed(place, attempts, closed=False), *rollouts, *attempts]
            stored += _trajectories(rollouts, tokens)
            if is_leased:
                members += [
                    BatchMember(
                        rollout_id=rollout.rollout_id,
                        attempt=rollout.attempt,
                        staleness=self.steps - tokens[rollout.rollout_id].step,
                    )
                    for rollout in rollouts
                ]
        records.append(
            BatchRecord(
                batch_id=batch_id,
                ordinal=leased,
                state=BatchState.LEASED,
                epoch=self.version(self.steps).epoch,
                version=self.version(self.steps),
                members=tuple(members),
                leased_at_s=self._now - 10,
            )
        )
        for place in self.places(leased + 2):
            opened, blobs = self._open(place)
            records += opened
            stored += blobs
        return records, stored

    def _open(self, place: Place) -> tuple[list[Record], list[StoredTrajectory]]:
        """Return the records of an open group: four members wait, three run, one has not been issued yet."""
        rollouts, attempts, tokens = self._members(place, RolloutState.WAITING, None, infra=False)
        version, counts = self.version(self.steps), self.counts[place.task]
        opened_at_s = self._now - 500
        records: list[Record] = [
            GroupRecord(
                group_id=place.group_id,
                ordinal=place.ordinal,
                task_id=place.task,
                state=GroupState.OPEN,
                opened_at_s=opened_at_s,
                max_evictions=2,
            )
        ]
        for rollout, attempt in zip(rollouts, attempts, strict=True):
            if rollout.member < 4:
                waiting = replace(rollout, advantage=None, baseline=None, scale=None)
                records += [waiting, replace(attempt, issued_at_s=opened_at_s, ended_at_s=self._now - 50)]
                continue
            counts["finished"] -= 1
            counts["solved"] -= rollout.reward or 0.0
            counts["duration_s"] -= (attempt.ended_at_s or 0.0) - attempt.issued_at_s
            pending = rollout.member == SIZE - 1
            records.append(
                RolloutRecord(
                    rollout_id=rollout.rollout_id,
                    group_id=place.group_id,
                    member=rollout.member,
                    state=RolloutState.PENDING if pending else RolloutState.IN_FLIGHT,
                    attempt=0 if pending else 1,
                )
            )
            if not pending:
                records.append(
                    AttemptRecord(
                        rollout_id=rollout.rollout_id, attempt=1, version=version, issued_at_s=self._now - 300
                    )
                )
        return records, _trajectories(rollouts[:4], tokens)

    def _members(
        self, place: Place, state: RolloutState, batch_id: BatchId | None, *, infra: bool = True
    ) -> tuple[list[RolloutRecord], list[AttemptRecord], dict[RolloutId, PolicyVersion]]:
        """Return all members of a group with their results, and count them for their task."""
        rollouts: list[RolloutRecord] = []
        attempts: list[AttemptRecord] = []
        sampled: dict[RolloutId, PolicyVersion] = {}
        counts, total, none = self.counts[place.task], math.fsum(REWARDS), RewardSpread()
        scale = group_scale("grpo", REWARDS, members=SIZE, own=none, pooled=none)
        counts["groups"] += 1
        counts["last_pass"] = place.ordinal // len(self._tasks)
        ended_s = self.committed_at(place.step) - STEP_S - 30
        for member, reward in enumerate(REWARDS):
            number = place.ordinal * SIZE + member
            rollout_id = RolloutId(f"{place.group_id}-{member}")
            duration_s = 180.0 + 30.0 * (number * 7919 % 25)
            lag = min(BOUND - 1, int(duration_s / STEP_S))
            version = self.version(max(0, min(place.step, self.steps) - 1 - lag))
            again = infra and number % AGAIN_EVERY == 0
            attempts += _attempts(rollout_id, number, version, reward, ended_s, duration_s, again=again)
            baseline = mean([total - reward]) / (SIZE - 1)
            rollouts.append(
                RolloutRecord(
                    rollout_id=rollout_id,
                    group_id=place.group_id,
                    member=member,
                    state=state,
                    attempt=1 + again,
                    failures=int(again),
                    reward=reward,
                    advantage=advantage("grpo", reward, baseline, scale, members=SIZE),
                    batch_id=batch_id,
                    first_reward=reward,
                    baseline=baseline,
                    scale=scale,
                )
            )
            sampled[rollout_id] = version
            counts["finished"] += 1
            counts["solved"] += reward
            counts["infra"] += again
            counts["duration_s"] += duration_s
        return rollouts, attempts, sampled

    def _sealed(self, place: Place, attempts: Sequence[AttemptRecord], *, closed: bool) -> GroupRecord:
        counts = self.counts[place.task]
        counts["complete_members"] += SIZE
        counts["reward_sum"] += math.fsum(REWARDS)
        counts["reward_square_sum"] += math.fsum(reward**2 for reward in REWARDS)
        counts["grpo_square_sum"] += deviation_square_sum(REWARDS)
        counts["grpo_deviation_sum"] += deviation_sum(REWARDS)
        return GroupRecord(
            group_id=place.group_id,
            ordinal=place.ordinal,
            task_id=place.task,
            state=GroupState.SEALED,
            opened_at_s=min(attempt.issued_at_s for attempt in attempts),
            max_evictions=2,
            seal_order=place.ordinal + 1,
            ended_at_s=max(attempt.ended_at_s or 0.0 for attempt in attempts),
            rule="all",
            min_members=2,
            advantage="grpo",
            complete_before=place.ordinal + 2,
            closed=closed,
        )

    def task_records(self) -> list[Record]:
        """Return each task's totals over all groups so far."""
        return [
            TaskRecord(
                task_id=task,
                last_pass=int(counts["last_pass"]),
                groups=int(counts["groups"]),
                finished=int(counts["finished"]),
                solved=int(counts["solved"]),
                duration_s=counts["duration_s"],
                infra=int(counts["infra"]),
                complete_members=int(counts["complete_members"]),
                reward_sum=counts["reward_sum"],
                reward_square_sum=counts["reward_square_sum"],
                grpo_square_sum=counts["grpo_square_sum"],
                grpo_deviation_sum=counts["grpo_deviation_sum"],
            )
            for task, counts in self.counts.items()
        ]

    def checkpoint(self, step: int) -> CheckpointRecord:
        first = max(0, step - SAVE_EVERY)
        return CheckpointRecord(
            version=self.version(step),
            path=f"checkpoints/{self.version(step)}",
            batch_ids=tuple(BatchId(f"b{number:06d}") for number in range(first + 1, step + 1)),
            chain=self.chains[step],
            recorded_at_s=self.committed_at(step) + 5,
        )

    def evaluation(self, step: int, tasks: Sequence[TaskId], tag: str) -> list[Record]:
        return [
            EvaluationRecord(
                rollout_id=RolloutId(f"{tag}/{task}/0"),
                attempt=1,
                task_id=task,
                tag=tag,
                version=self.version(step),
                cause=Cause.SOLVED if number % 2 else Cause.FAILED,
                reward=float(number % 2),
                solved=bool(number % 2),
                detail="",
                sampled=(VersionTokens(version=self.version(step), tokens=TOKENS),),
                recorded_at_s=self.committed_at(step) + 100,
            )
            for number, task in enumerate(tasks)
        ]


def _attempts(
    rollout_id: RolloutId,
    number: int,
    version: PolicyVersion,
    reward: float,
    ended_s: float,
    duration_s: float,
    *,
    again: bool,
) -> list[AttemptRecord]:
    """Return the attempt with this result; with `again`, it follows a failed attempt."""
    result = AttemptRecord(
        rollout_id=rollout_id,
        attempt=1 + again,
        version=version,
        issued_at_s=ended_s - duration_s,
        ended_at_s=ended_s,
        offered=True,
        cause=Cause.SOLVED if reward else Cause.FAILED,
        reward=reward,
        solved=bool(reward),
        trainable=True,
        trained=(VersionTokens(version=version, tokens=TOKENS),),
        turns=12,
        phases_s=(("boot", 2.5), ("prepare", 1.25), ("agent", duration_s - 10), ("evaluate", 6.25)),
        trace_id=f"{number:032x}",
    )
    if not again:
        return [result]
    died = AttemptRecord(
        rollout_id=rollout_id,
        attempt=1,
        version=version,
        issued_at_s=ended_s - duration_s - 20,
        ended_at_s=ended_s - duration_s - 10,
        offered=True,
        cause=Cause.INFRA,
        detail="the sandbox did not boot",
        host="host-1",
        charged_to=Charge.HOST,
    )
    return [died, result]


def _trajectories(rollouts: Sequence[RolloutRecord], sampled: dict[RolloutId, PolicyVersion]) -> list[StoredTrajectory]:
    mask = np.arange(2 + TOKENS) >= 2
    tokens, logprobs = np.arange(2 + TOKENS, dtype=np.int32), np.where(mask, -1.0, 0.0).astype(np.float32)
    return [
        StoredTrajectory(
            rollout_id=rollout.rollout_id,
            attempt=rollout.attempt,
            trajectory=Trajectory(
                rows=(
                    Row(
                        tokens_T=tokens,
                        loss_mask_T=mask,
                        logprobs_T=logprobs,
                        versions=(VersionSpan(start=2, end=2 + TOKENS, version=sampled[rollout.rollout_id]),),
                    ),
                ),
                temperature=1.0,
            ),
        )
        for rollout in rollouts
    ]


def _saved_steps(days: float) -> int:
    return max(1, int(days * STEPS_PER_DAY / SAVE_EVERY)) * SAVE_EVERY


class _Ledger:
    """Ledger that the generator writes to, in which batches that a checkpoint closed are archived."""

    def __init__(self, run_dir: Path, identity: dict[str, str]) -> None:
        self._ledger = Ledger.open(run_dir, identity)

    def write(self, records: Sequence[Record], stored: Sequence[StoredTrajectory]) -> None:
        self._ledger.write(records, stored)
        while self._ledger.archive_groups():
            pass
        self._ledger.archive_steps()
        self._ledger.archive_evaluations()

    def ended(self, tag: str, step: int, summary: dict[str, Any]) -> None:
        self._ledger.end_evaluation(tag, step, summary, time.time())

    def close(self) -> None:
        self._ledger.close()


def write_run(
    runs_dir: Path, name: str, *, days: float, overrides: Sequence[str] = ()
) -> tuple[RunConfig, RunDirectory]:
    """Write the run directory. Raises ConfigError, OSError."""
    steps = _saved_steps(days) + AFTER_CHECKPOINT
    sizes = (f"training.steps={steps + STEPS_LEFT}", f"evaluation.every_steps={EVALUATE_EVERY}", "evaluation.tasks=64")
    config, directory = prepare(RunRequest(recipe=RECIPE, runs_dir=runs_dir, name=name, overrides=(*sizes, *overrides)))
    stream = TaskStream(load_tasks(directory.train_tasks), seed=config.service.seed)
    months = Months(days, stream.order(0), now=time.time())
    identity = {"run_id": directory.identity.read_text(), "tasks_sha256": stream.digest()}
    heldout = [task.id for task in load_tasks(directory.heldout_tasks)][: config.evaluation.tasks]
    ledger = _Ledger(directory.path, identity)
    metrics = MetricsLog(directory.metrics, config.retention)
    with closing(ledger):
        _evaluate(months, 0, "base", heldout, ledger, metrics)
        for first in range(1, months.steps + 1, STEPS_AT_ONCE):
            _write_steps(months, range(first, min(first + STEPS_AT_ONCE, months.steps + 1)), directory, ledger)
            for step in range(first, min(first + STEPS_AT_ONCE, months.saved + 1)):
                at_s, version = months.committed_at(step), str(months.version(step))
                record = StepMetric(
                    batch_id=f"b{step:06}",
                    step=step,
                    version=version,
                    skipped=False,
                    reward=0.5,
                    metrics={"mean_staleness": 2.0},
                    staleness={"1": 16, "2": 32, "3": 16},
                    stale_kv_tokens=0,
                    step_s=STEP_S - 5,
                    idle_s=0.5,
                    push_s=0.0,
                )
                metrics.append(record, time_s=at_s)
                metrics.append(
                    SimulatedPushMetric(version=version, total_s=0.5, rollouts_in_flight=128), time_s=at_s + 1
                )
                phases_s = {"boot": 2.5, "prepare": 1.25, "agent": 400.0, "evaluate": 6.25}
                for number in range(METRIC_LINES_PER_STEP):
                    metrics.append(RolloutPhasesMetric(rollouts=4.0, phases_s=phases_s), time_s=at_s - 15 * number)
                if step % EVALUATE_EVERY == 0:
                    _evaluate(months, step, f"step-{step}", heldout, ledger, metrics)
        records, stored = months.end_records()
        ledger.write([*records, *months.task_records()], stored)
    directory.append_session(months.committed_at(0), months.committed_at(months.steps))
    return config, directory


def _write_steps(months: Months, steps: range, directory: RunDirectory, ledger: _Ledger) -> None:
    records: list[Record] = []
    stored: list[StoredTrajectory] = []
    stepped: dict[int, SteppedBatch] = {}
    for step in steps:
        made, blobs = months.step_records(step)
        records += made
        stored += blobs
        batch = made[-2]
        assert isinstance(batch, BatchRecord)
        members = tuple((member.rollout_id, member.attempt) for member in batch.members)
        stepped[step] = SteppedBatch(batch_id=batch.batch_id, members=members, skipped=False)
        if step % SAVE_EVERY == 0 and step <= months.saved:
            records.append(months.checkpoint(step))
            if step in months.retained():
                staged = stage(directory.checkpoints, months.version(step))
                manifest = Manifest(
                    version=months.version(step),
                    previous_chain=months.chains[step - SAVE_EVERY],
                    chain=months.chains[step],
                    batches=tuple(stepped[number] for number in range(step - SAVE_EVERY + 1, step + 1)),
                )
                write_manifest(staged, manifest)
                publish(staged, months.version(step))
    ledger.write(records, stored)


def _evaluate(
    months: Months, step: int, tag: str, tasks: Sequence[TaskId], ledger: _Ledger, metrics: MetricsLog
) -> None:
    ledger.write(months.evaluation(step, tasks, tag), ())
    record = EvaluationSummary(
        step=step,
        tag=tag,
        answers=len(tasks),
        infra=0,
        success=0.5,
        mean_reward=0.5,
        tasks=len(tasks),
        samples=1,
        dataset_sha256="",
        causes={},
        versions={},
        mixed=0,
        pass_rates=(),
        infra_reasons={},
    )
    metrics.append(record, time_s=months.committed_at(step) + 100)
    ledger.ended(tag, step, {"tag": tag, "success": 0.5, "answers": len(tasks), "infra": 0})
