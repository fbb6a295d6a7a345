"""The records of the ledger, as the core holds them.

Invariants:
- A record is frozen; the core replaces it and hands the replacement to the shell, so that ledger and core hold equal
  records.
- A rollout is in exactly one `RolloutState`; the states add up to all rollouts of all opened groups (conservation).
- `*_at_s` are seconds since the Unix epoch, supplied by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.buffer.core.advantages import AdvantageKind
from headrace.buffer.tasks.task import TaskId
from headrace.buffer.trajectories.breakdown import Breakdown
from headrace.buffer.trajectories.step_scores import StepScores, TurnAdvantages
from headrace.buffer.trajectories.types import BatchId, Cause, GroupId, RolloutId
from headrace.buffer.trajectories.versions import PolicyVersion


class RolloutState(StrEnum):
    """State of a rollout. The last five states are final, except that a rollback returns TRAINED rollouts to SEALED."""

    PENDING = "pending"
    """It waits for its first or next attempt."""
    IN_FLIGHT = "in_flight"
    """Its current attempt has been issued."""
    WAITING = "waiting"
    """It has finished, and its group is still open."""
    SEALED = "sealed"
    """It has an advantage; if it has a `batch_id`, it is reserved for that queued batch."""
    LEASED = "leased"
    """It is in a batch that the learner holds."""
    TRAINED = "trained"
    """It is in a committed batch (even if the step on that batch was skipped)."""
    EVICTED = "evicted"
    """It exceeded the staleness bound and had no reissues left."""
    FILTERED = "filtered"
    """It has nothing to train on; `reason` is a `FilterReason`."""
    POISON = "poison"
    """`max_attempts` of its attempts failed because of infrastructure."""
    CANCELLED = "cancelled"
    """It was unfinished when its group was sealed, and `unfinished = "abort"`."""


OUTAGES_KEPT = 64
"""Number of the latest outages that a core keeps; the ledger has all of them."""

FINAL = frozenset(
    {RolloutState.TRAINED, RolloutState.EVICTED, RolloutState.FILTERED, RolloutState.POISON, RolloutState.CANCELLED}
)
"""States that end a rollout."""


class FilterReason(StrEnum):
    """Reason why a finished rollout is not trained; also the counter `filtered_<reason>`."""

    NO_TOKENS = "no_tokens"
    """It has no trained token in any row; its reward counts in the baseline."""
    NOT_TRAINABLE = "not_trainable"
    """Its outcome is not trainable; its reward counts in the baseline."""
    ZERO_VARIANCE = "zero_variance"
    """All rewards of the group are equal and `zero_variance = "filter"`."""
    GROUP_DROPPED = "group_dropped"
    """Fewer than `min_members` of its group finished."""
    ROW_REFUSED = "row_refused"
    """The learner refused one of its rows in a step; its reward counts in the baseline."""
    BATCH_DROPPED = "batch_dropped"
    """An operator dropped its batch (`headrace ledger repair RUN --drop-batch BATCH`); its reward counts in the
    baseline."""


class GroupState(StrEnum):
    """State of a group."""

    OPEN = "open"
    """It waits for results of members."""
    SEALED = "sealed"
    """Its members have fixed baselines and scales, including running ones."""
    DROPPED = "dropped"
    """Fewer than `min_members` of its members finished."""


class BatchState(StrEnum):
    """State of a batch."""

    LEASED = "leased"
    """A learner incarnation holds it."""
    QUEUED = "queued"
    """It was released or rolled back, and is issued again as the same batch."""
    COMMITTED = "committed"
    """It was trained on the surviving path, or its step was skipped."""
    DISSOLVED = "dissolved"
    """A member exceeded the bound, was lost, or was refused by the learner; the others are free sealed rollouts."""
    DROPPED = "dropped"
    """An operator dropped it because the learner cannot train it; none of its members will be trained."""


class OperatorAction(StrEnum):
    """Action of an operator on the ledger of a stopped run."""

    DROP_BATCH = "drop-batch"
    """A batch was dropped; `subject` is its id."""
    RETRY_LOST = "retry-lost"
    """The result of an attempt was lost; `subject` is its rollout, which was issued again unless it is trained."""
    UNPARK = "unpark"
    """A parked task was released; `subject` is its id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """A group of rollouts of one task. `ordinal` is the group's position in order of opening, `seal_order` in order of
    sealing. The timers of its rule run from `opened_at_s`, which is reset when the store is reopened while the group is
    open. `closed`: only a return to an older checkpoint can still change the group, and the core has forgotten it.

    `rule`, `min_members` and `advantage` are those by which the group was sealed. A group is complete once each member
    has finished or is poison: groups with a `seal_order` of at least `complete_before` were sealed after that.
    """

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
    """A rollout. `attempt` is the current one (0: none yet), `failures` counts attempts that failed because of
    infrastructure, `evictions` those that exceeded the staleness bound because they were slow, not because of a fork.

    `reward`, `advantage` and `turn_advantages` are of the current attempt. `first_reward` is that of the first attempt
    that finished, and counts in the group's statistics, as `first_values` of its turns do (see `advantages`).
    `baseline` and `scale` are fixed when the group is sealed. `late` means that the rollout was unfinished at that
    time."""

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
    first_values: Mapping[int, float] | None = None
    turn_advantages: TurnAdvantages | None = None

    @property
    def key(self) -> RolloutId:
        return self.rollout_id

    @property
    def finished(self) -> bool:
        """True if some attempt had a result that counts."""
        return self.first_reward is not None

    @property
    def running(self) -> bool:
        """True if it has no result that counts yet but may still get one."""
        return self.first_reward is None and self.state not in FINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionTokens:
    """Number of trained tokens of a trajectory that `version` sampled."""

    version: PolicyVersion
    tokens: int


class Charge(StrEnum):
    """Party that a failed attempt is charged to."""

    TASK = "task"
    """The task, which failed on different hosts at different times. The failure counts towards parking."""
    HOST = "host"
    """The host on which it ran: the task has failed on no other host, or not at another time."""
    ENGINES = "engines"
    """A failure of an engine or the gateway while other engines were serving."""
    WORKER = "worker"
    """Its worker died. The failure does not count."""
    OUTAGE = "outage"
    """No engine was serving, or the system was failing. The failure does not count."""
    LEARNER = "learner"
    """The result exceeds the limits of the learner. It counts for the rollout, but never for its task or host."""


class Component(StrEnum):
    """Component that an outage affects."""

    ENGINES = "engines"
    """No engine is serving."""
    SYSTEM = "system"
    """Most attempts fail, over several tasks."""


@dataclass(frozen=True, slots=True)
class HostFailures:
    """Times of a task's first and last failure on a host since the task last finished."""

    host: str
    first_at_s: float
    last_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutageRecord:
    """A period in which no orders are issued and no task is charged."""

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
    """An attempt of a rollout. `version` was the version being served when the attempt was issued. `offered` is true if
    a result was offered, and false for an abandoned attempt. `solved` is the evaluator's verdict, false if there is no
    reward. `host` is where the attempt's sandbox ran, empty when that is unknown. `scores` are those of a judge.
    `breakdown` says where the time went, and `timeline` when: `Timeline.to_json`, since few are ever read and thousands
    are kept."""

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
    trained: tuple[VersionTokens, ...] = ()
    turns: int = 0
    phases_s: tuple[tuple[str, float], ...] = ()
    trace_id: str = ""
    solved: bool = False
    host: str = ""
    charged_to: Charge | None = None
    scores: StepScores | None = None
    breakdown: Breakdown | None = None
    timeline: str | None = None

    @property
    def key(self) -> tuple[RolloutId, int]:
        return (self.rollout_id, self.attempt)

    @property
    def family(self) -> str:
        """Family of the task; empty without a breakdown."""
        return "" if self.breakdown is None else str(self.breakdown.labels.get("family", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMember:
    """Member of a batch. `staleness` is in optimizer updates at the batch's version."""

    rollout_id: RolloutId
    attempt: int
    staleness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """A batch. `version` is the policy version at which it is trained; `queue_order` is its position among batches to
    be issued again. `closed` is as in `GroupRecord`. `tries` counts the steps begun on the batch since one was last
    committed, including the one under way; `failure` is why the last one failed, empty when the learner's process died
    in it."""

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
    """A committed step. `trained_at` is the version before it, `version` the one after, `chain` the hash chain after
    it, `max_staleness` the bound in force. `rolled_back_by` is the epoch that undid it."""

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
    an earlier epoch that its line has reached: `parent`, and then each undone step that it repeated."""

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
    """A finished evaluation rollout. `version` is the requested policy version, `sampled` lists those that actually
    sampled it."""

    rollout_id: RolloutId
    attempt: int
    task_id: TaskId
    tag: str
    version: PolicyVersion
    cause: Cause
    reward: float | None
    detail: str
    sampled: tuple[VersionTokens, ...]
    recorded_at_s: float
    solved: bool = False
    host: str = ""
    trace_id: str = ""
    breakdown: Breakdown | None = None
    timeline: str | None = None

    @property
    def key(self) -> tuple[RolloutId, int]:
        return (self.rollout_id, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord:
    """History of a task, for scales, parking and curricula.

    `last_pass` is the pass over the data that opened its newest group. `finished` counts results with a reward,
    `solved` those among them that solved the task; `duration_s` is the sum of their durations. `complete_members`,
    `reward_sum` and `reward_square_sum` cover complete groups; of those sealed with `grpo`, `grpo_square_sum` is the
    sum of squared distances from a group's mean, and `grpo_deviation_sum` that of (n - 1) times the sample deviation of
    a group of n. `poison_streak` counts the members that have become poison since one last
    finished; `failed_on` lists where the task has failed since then."""

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
    grpo_square_sum: float = 0.0
    grpo_deviation_sum: float = 0.0
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
    """An entry in the operators' journal. `sequence` is its position. `attempt` is set when the subject is a rollout.
    `detail` is for human readers."""

    sequence: int
    action: OperatorAction
    subject: str
    attempt: int | None
    detail: str
    at_s: float

    @property
    def key(self) -> int:
        return self.sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterRecord:
    """Counter of events: refused offers, filtered members, rolled-back batches."""

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
    """State that a core is folded from. `closed` counts the rollouts of closed groups. Their records are not included,
    nor are those of `steps_closed` surviving steps and `evaluations_closed` evaluation rollouts."""

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
