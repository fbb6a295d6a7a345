"""The rows of the ledger, as the core holds them.

Invariants:
- A record is frozen; the core replaces it and hands the replacement to the shell, so that ledger and core hold equal
  records.
- A rollout is in exactly one `RolloutState`; the states add up to all rollouts of all opened groups (conservation).
- `*_at_s` are seconds since the Unix epoch, given by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.buffer.core.advantages import AdvantageKind
    from headrace.buffer.tasks import TaskId
    from headrace.buffer.types import BatchId, Cause, GroupId, RolloutId
    from headrace.buffer.versions import PolicyVersion


class RolloutState(StrEnum):
    """Where a rollout is. The last five are final, except that a rollback takes TRAINED back to SEALED."""

    PENDING = "pending"
    """Waits for its first or next attempt."""
    IN_FLIGHT = "in_flight"
    """Its current attempt was handed out."""
    WAITING = "waiting"
    """Finished; its group is open."""
    SEALED = "sealed"
    """Has its advantage; with a `batch_id`, held for the same batch to be issued again."""
    LEASED = "leased"
    """In a batch that the learner holds."""
    TRAINED = "trained"
    """In a committed batch (also when that step was skipped)."""
    EVICTED = "evicted"
    """Over the staleness bound, and issued again as often as it may be."""
    FILTERED = "filtered"
    """Nothing to train on; `reason` is a `FilterReason`."""
    POISON = "poison"
    """`max_attempts` attempts died of infra."""
    CANCELLED = "cancelled"
    """Unfinished when its group was sealed, and `unfinished = "abort"`."""


OUTAGES_KEPT = 64
"""How many a core knows, the newest ones; the ledger has all."""

FINAL = frozenset(
    {
        RolloutState.TRAINED,
        RolloutState.EVICTED,
        RolloutState.FILTERED,
        RolloutState.POISON,
        RolloutState.CANCELLED,
    }
)
"""States that end a rollout."""


class FilterReason(StrEnum):
    """Why a finished rollout is not trained; also the counter `filtered_<reason>`."""

    NO_TOKENS = "no_tokens"
    """No trained token in any row; its reward counts in the baseline."""
    NOT_TRAINABLE = "not_trainable"
    """The outcome said so; its reward counts in the baseline."""
    ZERO_VARIANCE = "zero_variance"
    """All rewards of the group are equal and `zero_variance = "filter"`."""
    GROUP_DROPPED = "group_dropped"
    """Fewer than `min_members` of its group finished."""
    BATCH_DROPPED = "batch_dropped"
    """An operator dropped its batch (`headrace ledger drop-batch`); its reward counts in the baseline."""


class GroupState(StrEnum):
    """Where a group is."""

    OPEN = "open"
    """Members are missing."""
    SEALED = "sealed"
    """Its members have fixed baselines and scales, also those that still run."""
    DROPPED = "dropped"
    """Fewer than `min_members` finished."""


class BatchState(StrEnum):
    """Where a batch is."""

    LEASED = "leased"
    """A learner incarnation holds it."""
    QUEUED = "queued"
    """Released or rolled back: the same batch is issued again."""
    COMMITTED = "committed"
    """Trained on the surviving path (or its step was skipped)."""
    DISSOLVED = "dissolved"
    """A member went over the bound, or was lost, before it was issued again; the others went back to the front."""
    DROPPED = "dropped"
    """An operator dropped it, as the learner cannot train it; no member of it is trained any more."""


class Action(StrEnum):
    """What an operator did to the ledger of a run that nobody drove."""

    DROP_BATCH = "drop-batch"
    """A batch left the run; `subject` is its id."""
    RETRY_LOST = "retry-lost"
    """The result of an attempt was lost; `subject` is its rollout, which was issued again unless it is trained."""
    UNPARK = "unpark"
    """A parked task was released; `subject` is its id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """`ordinal` counts the groups opened, `seal_order` those sealed. Times of its rule run from `opened_at_s`, which is
    set anew when the store is opened again while the group is open. `closed`: nothing can change any more short of a
    return to an older checkpoint; the core has forgotten it.

    `rule`, `min_members` and `advantage` are those it was sealed by. The group is complete when each member finished or
    is poison: groups with a `seal_order` of at least `complete_before` were sealed after that."""

    group_id: GroupId
    ordinal: int
    task_id: TaskId
    state: GroupState
    opened_at_s: float
    max_evictions: int = 0
    seal_order: int | None = None
    ended_at_s: float | None = None
    rule: str | None = None
    min_members: int | None = None
    advantage: AdvantageKind | None = None
    complete_before: int | None = None
    closed: bool = False

    @property
    def key(self) -> GroupId:
        return self.group_id


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """`attempt` is the current one (0: none yet), `failures` counts attempts that died of infra, `evictions` those that
    went over the staleness bound by themselves, not by a fork.

    `reward` and `advantage` are of the current attempt. `first_reward` is that of the first attempt that finished, and
    counts in the group's statistics. `baseline` and `scale` are fixed when the group is sealed. `late`: unfinished
    then."""

    rollout_id: RolloutId
    group_id: GroupId
    member: int
    state: RolloutState
    attempt: int = 0
    failures: int = 0
    reward: float | None = None
    advantage: float | None = None
    batch_id: BatchId | None = None
    reason: FilterReason | None = None
    first_reward: float | None = None
    baseline: float | None = None
    scale: float | None = None
    late: bool = False
    evictions: int = 0

    @property
    def key(self) -> RolloutId:
        return self.rollout_id

    @property
    def finished(self) -> bool:
        """Some attempt had a result that counts."""
        return self.first_reward is not None

    @property
    def running(self) -> bool:
        """Its first result that counts is still to come."""
        return self.first_reward is None and self.state not in FINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTokens:
    """How many trained tokens of a trajectory `version` sampled."""

    version: PolicyVersion
    tokens: int


class Charge(StrEnum):
    """What a failed attempt is charged to."""

    TASK = "task"
    """Failures on different hosts at different times: counts towards parking."""
    HOST = "host"
    """The host it ran on: the task has failed nowhere else, or not at another time."""
    ENGINES = "engines"
    """A failure of engine or gateway, while others served."""
    WORKER = "worker"
    """Its worker died. It counts to nothing."""
    OUTAGE = "outage"
    """No engine served, or the system was failing. It counts to nothing."""


class Component(StrEnum):
    """What an outage is of."""

    ENGINES = "engines"
    """No engine serves."""
    SYSTEM = "system"
    """Most attempts fail, over several tasks."""


@dataclass(frozen=True, slots=True)
class HostFailures:
    """When a task's first and last failure on a host were, since it last finished."""

    host: str
    first_at_s: float
    last_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutageRecord:
    """A time in which orders are held and no task is charged."""

    number: int
    component: Component
    reason: str
    began_at_s: float
    ended_at_s: float | None = None

    @property
    def key(self) -> int:
        return self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One try. `version` was served when it was issued. `offered` tells a result from an abandoned attempt. `solved` is
    the evaluator's word, false without a reward. `host` is where its sandbox ran, empty when that is unknown."""

    rollout_id: RolloutId
    attempt: int
    version: PolicyVersion
    issued_at_s: float
    ended_at_s: float | None = None
    offered: bool = False
    cause: Cause | None = None
    reward: float | None = None
    trainable: bool = False
    detail: str = ""
    trained: tuple[TrainedTokens, ...] = ()
    turns: int = 0
    phases_s: tuple[tuple[str, float], ...] = ()
    trace_id: str = ""
    solved: bool = False
    host: str = ""
    charged_to: Charge | None = None

    @property
    def key(self) -> tuple[RolloutId, int]:
        return (self.rollout_id, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMember:
    """`staleness` in optimizer updates against the batch's version."""

    rollout_id: RolloutId
    attempt: int
    staleness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """`version` is the one the batch is trained at; `queue_order` is its place among batches to be issued again.
    `closed` as in `GroupRecord`. `tries` counts the steps that were begun on it since one was committed, the one under
    way too; `failure` is why the last one failed, empty when the learner's process died in it."""

    batch_id: BatchId
    ordinal: int
    state: BatchState
    epoch: int
    version: PolicyVersion
    members: tuple[BatchMember, ...]
    leased_at_s: float
    queue_order: int | None = None
    closed: bool = False
    tries: int = 0
    failure: str = ""

    @property
    def key(self) -> BatchId:
        return self.batch_id


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """One step. `trained_at` is the version before it, `version` the one after, `chain` the hash chain after it,
    `max_staleness` the bound in force. `rolled_back_by` is the epoch that undid it."""

    sequence: int
    batch_id: BatchId
    epoch: int
    trained_at: PolicyVersion
    version: PolicyVersion
    skipped: bool
    chain: str
    max_staleness: int
    committed_at_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    rolled_back_by: int | None = None

    @property
    def key(self) -> int:
        return self.sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """A learner incarnation: opened at `parent`, where the hash chain was `chain`. `follows` is the newest version of
    an earlier epoch that its line has come to: `parent`, and then each undone step that it repeated."""

    epoch: int
    parent: PolicyVersion | None
    chain: str
    opened_at_s: float
    follows: PolicyVersion | None = None

    @property
    def key(self) -> int:
        return self.epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """A durable checkpoint directory that the learner reported."""

    version: PolicyVersion
    path: str
    batch_ids: tuple[BatchId, ...]
    chain: str
    recorded_at_s: float

    @property
    def key(self) -> PolicyVersion:
        return self.version


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """One finished evaluation rollout. `version` is the one it was asked for, `sampled` what really sampled it."""

    rollout_id: RolloutId
    attempt: int
    task_id: TaskId
    tag: str
    version: PolicyVersion
    cause: Cause
    reward: float | None
    detail: str
    sampled: tuple[TrainedTokens, ...]
    recorded_at_s: float
    solved: bool = False

    @property
    def key(self) -> tuple[RolloutId, int]:
        return (self.rollout_id, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord:
    """What is known of a task: for scales, parking and curricula.

    `last_pass` is the pass over the data that opened its newest group. `finished` counts results with a reward,
    `solved` those of them that solved the task, `duration_s` is the sum of their durations. `complete_members`,
    `reward_sum`, `reward_square_sum` and `deviation_square_sum` (within groups) cover complete groups. `poison_streak`
    counts members that became poison since one finished, `failed_on` tells where it failed since then."""

    task_id: TaskId
    last_pass: int = -1
    groups: int = 0
    finished: int = 0
    solved: int = 0
    duration_s: float = 0.0
    infra: int = 0
    poison: int = 0
    evicted: int = 0
    cancelled: int = 0
    complete_members: int = 0
    reward_sum: float = 0.0
    reward_square_sum: float = 0.0
    deviation_square_sum: float = 0.0
    poison_streak: int = 0
    parked: bool = False
    last_failure: str = ""
    failed_on: tuple[HostFailures, ...] = ()
    parked_at_s: float | None = None

    @property
    def key(self) -> TaskId:
        return self.task_id


@dataclass(frozen=True, slots=True, kw_only=True)
class InterventionRecord:
    """One entry of the operators' journal, in order. `attempt` goes with a rollout. `detail` is for people."""

    sequence: int
    action: Action
    subject: str
    attempt: int | None
    detail: str
    at_s: float

    @property
    def key(self) -> int:
        return self.sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterRecord:
    """A count of something that changes no rollout: refused offers, filtered members, rolled-back batches."""

    name: str
    value: int

    @property
    def key(self) -> str:
        return self.name


Record = (
    EpochRecord
    | GroupRecord
    | RolloutRecord
    | AttemptRecord
    | BatchRecord
    | CommitRecord
    | CheckpointRecord
    | EvaluationRecord
    | TaskRecord
    | OutageRecord
    | CounterRecord
    | InterventionRecord
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a core is folded from. `closed` counts the rollouts of closed groups, whose records are not here, nor are
    those of `steps_closed` surviving steps and `evaluations_closed` evaluation rollouts. Batches before `first_batch`
    are known to the ledger alone."""

    records: tuple[Record, ...] = ()
    evaluations: frozenset[tuple[RolloutId, int]] = frozenset()
    next_ordinal: int = 0
    next_seal: int = 1
    next_batch: int = 1
    next_commit: int = 1
    closed: Mapping[RolloutState, int] = field(default_factory=dict)
    steps_closed: int = 0
    steps_closed_skipped: int = 0
    evaluations_closed: int = 0
