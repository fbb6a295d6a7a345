"""Messages between dispatcher, worker, buffer and learner: small, frozen, picklable.

Shapes: T is the number of tokens of a row. A row's arrays are aligned position by position; tokens that were not
sampled have `loss_mask_T == False` and `logprobs_T == 0`.
"""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

import numpy as np
import numpy.typing as npt

from headrace.buffer.tasks.parts import MAX_REWARD as MAX_REWARD
from headrace.buffer.tasks.task import TaskId
from headrace.buffer.trajectories.breakdown import Breakdown
from headrace.buffer.trajectories.step_scores import StepScores, TurnAdvantages
from headrace.buffer.trajectories.token_kinds import KindRuns, from_runs, to_runs
from headrace.buffer.trajectories.versions import PolicyVersion

GroupId = NewType("GroupId", str)
RolloutId = NewType("RolloutId", str)
BatchId = NewType("BatchId", str)

SOLVED_REWARD = 1.0
"""Reward from which a task counts as solved when only a reward is known."""


def check_reward(value: object) -> float:
    """Return the reward as a float. Raises ValueError unless it is a finite number of at most MAX_REWARD in absolute
    value."""
    if not isinstance(value, numbers.Real):
        raise ValueError(f"the reward is not a number ({type(value).__name__})")
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    # Written this way round because a NaN compares as false.
    if not abs(reward) <= MAX_REWARD:
        raise ValueError(f"the reward {reward:g} is not a finite number from {-MAX_REWARD:g} to {MAX_REWARD:g}")
    return reward


class Cause(StrEnum):
    """Cause of the end of a rollout."""

    SOLVED = "solved"
    """The evaluator decided that the task is solved."""
    FAILED = "failed"
    """The evaluator decided that the task is not solved. The reward may be any number."""
    BUDGET = "budget"
    """The agent used up its turns, tokens or time; the evaluator still ran."""
    INVALID = "invalid"
    """The model's output was unusable (wrong format, or a patch that does not apply): reward 0."""
    INFRA = "infra"
    """The sandbox, engine, gateway or network failed: no reward, and a new attempt."""
    EVALUATOR = "evaluator"
    """The evaluator itself failed: no reward; the evaluation is repeated, then the attempt."""
    POISON = "poison"
    """`max_attempts` attempts failed because of infrastructure: the rollout is left out and reported."""
    CANCELLED = "cancelled"
    """Cancelled by policy (staleness, shutdown)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """End of a rollout. `reward` is None exactly when the outcome has no information about the policy. `solved` is the
    evaluator's verdict, independent of the reward's size: true with the cause `solved`, false with `failed` and
    `invalid`, either with `budget`."""

    reward: float | None
    trainable: bool
    cause: Cause
    detail: str = ""
    solved: bool = False

    @classmethod
    def infra(cls, detail: str) -> Outcome:
        return cls(reward=None, trainable=False, cause=Cause.INFRA, detail=detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """The version that sampled the tokens `[start, end)`; positions count in an engine's output or in a row. `stale_kv`
    marks tokens sampled on keys and values that older weights had left in the engine's cache (a push that does not
    recompute them): no forward pass of `version` gives their log-probabilities."""

    start: int
    end: int
    version: PolicyVersion
    stale_kv: bool = False

    def shifted(self, offset: int) -> VersionSpan:
        """Return the same span in a sequence whose positions are greater by `offset`."""
        return VersionSpan(
            start=self.start + offset, end=self.end + offset, version=self.version, stale_kv=self.stale_kv
        )

    def to_json(self) -> tuple[int, int, str, bool]:
        """Return the JSON form, `[start, end, "epoch.step", stale_kv]`."""
        return self.start, self.end, str(self.version), self.stale_kv

    @classmethod
    def from_json(cls, start: int, end: int, version: str, stale_kv: bool) -> VersionSpan:
        """Return the span from its JSON form."""
        return cls(start=start, end=end, version=PolicyVersion.parse(version), stale_kv=stale_kv)

    def to_plain(self) -> tuple[int, int, int, int, bool]:
        """Return the start, end, epoch, step and `stale_kv`, the form used in pickles and stored trajectories."""
        return self.start, self.end, self.version.epoch, self.version.step, self.stale_kv

    @classmethod
    def from_plain(cls, start: int, end: int, epoch: int, step: int, stale_kv: bool) -> VersionSpan:
        """Return the span from the values that `to_plain` returns."""
        return cls(start=start, end=end, version=PolicyVersion(epoch, step), stale_kv=stale_kv)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A token sequence. `tokens_T` int32, `loss_mask_T` bool (True where sampled and trained), `logprobs_T` float32
    under the temperature-scaled behaviour distribution. `versions` covers exactly the sampled positions. `kinds_T`
    uint8 (`TokenKind`); None if they were not asked for, or the chat template hides them."""

    tokens_T: npt.NDArray[np.int32]
    loss_mask_T: npt.NDArray[np.bool_]
    logprobs_T: npt.NDArray[np.float32]
    versions: tuple[VersionSpan, ...]
    kinds_T: npt.NDArray[np.uint8] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        # Few plain objects instead of many: messages carry hundreds of rows, and each object costs time.
        arrays = ((self.tokens_T, np.int32), (self.loss_mask_T, np.bool_), (self.logprobs_T, np.float32))
        spans = [span.to_plain() for span in self.versions]
        kinds = () if self.kinds_T is None else (to_runs(np.asarray(self.kinds_T, np.uint8)),)
        return _row, (*(np.asarray(array, dtype).tobytes() for array, dtype in arrays), spans, *kinds)


def _row(
    tokens: bytes,
    loss_mask: bytes,
    logprobs: bytes,
    spans: list[tuple[int, int, int, int, bool]],
    kinds: KindRuns | None = None,
) -> Row:
    """Unpickle a row; its arrays are read-only."""
    return Row(
        tokens_T=np.frombuffer(tokens, np.int32),
        loss_mask_T=np.frombuffer(loss_mask, np.bool_),
        logprobs_T=np.frombuffer(logprobs, np.float32),
        versions=tuple(VersionSpan.from_plain(*span) for span in spans),
        kinds_T=None if kinds is None else from_runs(kinds),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """All tokens of one rollout: one or more rows, sampled at one temperature."""

    rows: tuple[Row, ...]
    temperature: float


class Purpose(StrEnum):
    """Purpose of a rollout."""

    TRAIN = "train"
    """Training: it enters groups and batches."""
    EVALUATION = "evaluation"
    """Evaluation on a held-out task: never in a batch or the inventory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOrder:
    """One attempt to run. `attempt` (from 1) is the fence: results of an older attempt are refused. Workers look up the
    task by purpose and id, so that no message carries tasks with their hidden tests."""

    rollout_id: RolloutId
    group_id: GroupId
    attempt: int
    task_id: TaskId
    purpose: Purpose = Purpose.TRAIN
    avoid: tuple[str, ...] = ()
    """Hosts that the attempt's sandbox should avoid as long as there are others."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutResult:
    """Result of an attempt, as a worker offers it. `phases_s` holds (phase, seconds) pairs: queue, boot, prepare,
    agent, evaluate. `trajectory` is None when nothing was sampled. `host` is where the attempt's sandbox ran, if that
    is known; `engine_failed` means that a failure of an engine or the gateway ended the attempt. `scores` are those of
    a judge for the attempt's steps; the outcome's reward follows from them. `breakdown` says where the time went."""

    rollout_id: RolloutId
    attempt: int
    outcome: Outcome
    trajectory: Trajectory | None
    phases_s: tuple[tuple[str, float], ...] = ()
    turns: int = 0
    trace_id: str = ""
    host: str = ""
    engine_failed: bool = False
    scores: StepScores | None = None
    breakdown: Breakdown | None = None


class ReceiptStatus(StrEnum):
    """Fate of an offered result."""

    ACCEPTED = "accepted"
    """Accepted and durable."""
    DUPLICATE = "duplicate"
    """The result of this attempt is already known; refused and counted."""
    LATE = "late"
    """A newer attempt exists, or the rollout is closed; refused and counted."""
    UNKNOWN = "unknown"
    """The rollout does not exist; refused and counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Answer to one offered result."""

    rollout_id: RolloutId
    attempt: int
    status: ReceiptStatus


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchItem:
    """A sealed rollout in a batch. `staleness` is in optimizer updates, relative to the version at which the batch is
    trained. `turn_advantages` are those of turns with an advantage of their own, whose tokens `scores` names. `source`
    is the name of its source of tasks, empty in a run without sources."""

    rollout_id: RolloutId
    group_id: GroupId
    attempt: int
    reward: float
    advantage: float
    staleness: int
    trajectory: Trajectory
    scores: StepScores | None = None
    turn_advantages: TurnAdvantages = field(default_factory=dict)
    source: str = ""
    group_batch: str = ""
    """The first batch of its group, if the rollout was still running when its group was sealed and is trained after
    it; else empty."""
    family: str = ""
    """Family of its task; empty if its attempt has no breakdown."""
    invalid: bool = False
    """Whether the rollout ended with an invalid answer."""

    @property
    def has_advantage(self) -> bool:
        """Whether the advantage of any token may differ from 0."""
        return self.advantage != 0.0 or any(self.turn_advantages.values())

    def row_advantages(self, number: int) -> npt.NDArray[np.float32] | None:
        """Return the advantage of each token of the row with this index, of shape T, or None if all tokens have that of
        the rollout."""
        if self.scores is None or not self.turn_advantages:
            return None
        advantages_T = np.full(len(self.trajectory.rows[number].tokens_T), self.advantage, dtype=np.float32)
        for step in self.scores.steps:
            for row, start, end in step.spans:
                if row == number:
                    advantages_T[start:end] = self.turn_advantages.get(step.turn, self.advantage)
        return advantages_T


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLease:
    """The right to train a batch. It belongs to a learner incarnation (`epoch`) and does not expire with time."""

    batch_id: BatchId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Exactly `batch_size` sealed rollouts, oldest first. `version` is the version at which the batch is trained,
    before the update."""

    lease: BatchLease
    version: PolicyVersion
    items: tuple[BatchItem, ...]
    staleness: Mapping[PolicyVersion, int] = field(default_factory=dict)
    """Staleness, in optimizer updates, of the tokens that each version sampled."""

    def staleness_of(self, sampled: PolicyVersion) -> int:
        """Return the staleness of tokens sampled by this version. A version without an entry is taken to be on the
        path to `version`."""
        known = self.staleness.get(sampled)
        return abs(self.version.step - sampled.step) if known is None else known

    def digest(self) -> bytes:
        """Return the SHA-256 over the batch id and the ordered (rollout, attempt) pairs: one link of the hash chain."""
        return batch_digest(self.lease.batch_id, tuple((item.rollout_id, item.attempt) for item in self.items))


def batch_digest(batch_id: BatchId, members: tuple[tuple[RolloutId, int], ...]) -> bytes:
    """Return `Batch.digest` from plain ids, so that the ledger can recompute it."""
    lines = [batch_id, *(f"{rollout} {attempt}" for rollout, attempt in members)]
    return hashlib.sha256("\n".join(lines).encode()).digest()


def extend_chain(chain: str, digest: bytes) -> str:
    """Return the next value of the hash chain of trained batches, in hexadecimal. The empty chain is the empty
    string."""
    return hashlib.sha256(bytes.fromhex(chain) + digest).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRatios:
    """Probabilities of trained tokens under the trained version (before its update), relative to those recorded when
    the tokens were sampled."""

    tokens: int
    """Number of tokens."""
    mean_ratio: float
    """Mean of the ratio, current / behaviour."""
    mean_abs_log_ratio: float
    """Mean absolute difference of the log-probabilities, in nats."""
    max_abs_log_ratio: float
    """Maximum absolute difference of the log-probabilities, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobDrift:
    """Differences between the learner's log-probabilities in a step and those of the engines, over the tokens of
    computed rows. `by_staleness` is keyed by staleness in optimizer updates, without the tokens in `stale_kv`, which
    were sampled with cached keys and values of older weights."""

    by_staleness: Mapping[int, TokenRatios]
    stale_kv: TokenRatios | None = None

    @property
    def mismatch(self) -> TokenRatios | None:
        """Ratios of the tokens that the trained version sampled itself. They differ from 1 only because engine and
        learner compute the same weights differently. None if there are no such tokens."""
        return self.by_staleness.get(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Report of an optimizer step. `version` is the version after the step; it stays the same if the step was skipped,
    since the weights did not change.

    `metrics` are floats in the units that their names say (loss, grad_norm, entropy, clip_fraction, tokens,
    seconds...). `drift` is None if the learner does not measure it.
    """

    batch_id: BatchId
    version: PolicyVersion
    skipped: bool
    metrics: dict[str, float] = field(default_factory=dict)
    drift: LogprobDrift | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRef:
    """A durable checkpoint directory. `batch_ids` are the batches since the previous checkpoint, in the order of
    training; `chain` is the hash chain over all batches up to here."""

    path: str
    version: PolicyVersion
    batch_ids: tuple[BatchId, ...]
    chain: str
