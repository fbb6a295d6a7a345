"""Records of a run's `metrics.jsonl`: one JSON object per line. Actors send the records that they measure to the one
that writes them, the store of the run's rollouts.

Each kind of record is a dataclass below, from which docs/metrics.md is generated. A line holds `kind` and `time_s`
(Unix time), followed by the record's fields.

Invariants:
- The file has one writer, so that it needs no disk that several nodes share.
- Older lines are in `metrics-000001.jsonl`, `metrics-000002.jsonl`, ..., oldest first: a file that reaches its maximum
  size is renamed by its writer. Files that exceed the size and age limits of `telemetry.keep_bytes` are removed, oldest
  first.
- No component restores its state from these files: everything that a resumed run needs is in the ledger. Readers use
  whatever files remain.
- A line that is not a record (truncated by a power cut, or binary) is skipped without affecting its neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol

import orjson

from headrace.actors.record.files.service_totals import ServiceTotals
from headrace.buffer.trajectories.types import TokenRatios
from headrace.serve.tracing.retention import RetentionConfig, RotatingFile, kept_files

TAIL_BYTES = 1 << 16
"""Number of bytes first read from the end of a file when only the last record is needed."""

INLINE = {"inline": True}
"""Metadata of a field whose entries become keys of the record itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One line of the metrics file."""

    kind: ClassVar[str]

    def document(self) -> dict[str, Any]:
        """Return the record as a dict, with keys in the order of its fields."""
        document: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            document |= value if "inline" in item.metadata else {item.name: value}
        return document


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPart:
    """The part of a step's batch that one source or one family of tasks gave."""

    rollouts: int
    """Number of rollouts in the batch."""
    rows: int
    """Number of rows of these rollouts; a rollout has more than one if it has several conversations."""
    tokens: int
    """Number of trained tokens."""
    share: float
    """Share in the rollouts of the batch."""
    reward: float | None
    """Mean reward; null without rollouts."""
    staleness: float | None
    """Mean staleness in optimizer steps; null without rollouts."""
    invalid: int
    """Number of rollouts that ended with an invalid answer."""
    groups: int
    """Number of groups, whole or in part."""
    flat_groups: int
    """Number of groups whose rollouts in the batch have equal rewards of at most 0: they teach nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetric(Metric):
    """One optimizer step, written by the learner after the batch has been committed to the ledger."""

    kind = "step"

    batch_id: str
    """ID of the trained batch, as in the ledger's `batches` table."""
    step: int
    """Number of optimizer steps in the new policy version."""
    version: str
    """Policy version after the step, `epoch.step`."""
    skipped: bool
    """True when the gradient was not finite and the weights were left unchanged."""
    reward: float
    """Mean reward over the batch's rollouts."""
    metrics: Mapping[str, float] = field(metadata=INLINE)
    """Keys reported by the learner. The Megatron learner writes `tokens` (trained tokens), `computed_tokens` (those
    in rows with a nonzero advantage, or in all rows if a term of the loss uses them), `mean_staleness`,
    `max_staleness`, `mean_reward`, `loss`, `grad_norm`, `learning_rate` and `seconds` (forward, backward and
    update), the shares `padding_share` (padding in the computed positions) and `capped_share` (computed tokens
    whose ratio exceeds `learner.weight_cap`), and the means of the objective over computed tokens: `entropy`,
    `mean_ratio`, `mean_abs_log_ratio`, `clip_fraction`, with `learner.kl_coef` also `kl`, with masks
    `masked_fraction`. While `learner.observation_coef` is above 0, also the cross-entropy of observations in nats:
    `observation_loss` (with its weights), `observation_loss_scaled` (times `observation_coef`, the current one),
    `observation_to_policy` (its absolute value divided by that of the rest of the loss, which is large where a
    policy loss cancels out within groups), `observation_tokens` (selected tokens), the means per token
    `observation_cross_entropy` and `warning_cross_entropy`, and `unmarked_rows` (rows of the batch without kinds of
    tokens). With a critic, over all trained tokens: `explained_variance` (1 - var(return - value) / var(return)),
    `mean_value`, `mean_return`, and `critic_loss` and `critic_grad_norm` of its first update. A value that is not
    finite is left out; if no token is computed, the shares and the means of the objective are left out."""
    staleness: Mapping[str, int]
    """Number of trained trajectories by staleness in optimizer steps."""
    stale_kv_tokens: int
    """Number of trained tokens sampled with cached keys and values from older weights."""
    mismatch: TokenRatios | None = None
    """Difference between learner and engines over the tokens that the trained version sampled itself, which is not due
    to lag (see the table below); null if the step computed no such token."""
    ratio_by_staleness: Mapping[str, TokenRatios] = field(default_factory=dict)
    """The same by staleness of the tokens in optimizer steps (`mismatch` is the entry `0`), without the tokens in
    `stale_kv`."""
    stale_kv: TokenRatios | None = None
    """The same over computed tokens sampled with cached keys and values from older weights; null if there are none."""
    step_s: float
    """Seconds spent training and committing since the previous step."""
    idle_s: float
    """Seconds spent waiting for a batch since the previous step."""
    push_s: float
    """Seconds spent waiting for the previous weight push since the previous step."""
    sources: Mapping[str, BatchPart] = field(default_factory=dict)
    """Part of each source of tasks in the batch by name (see the table below); empty in a run without sources."""
    families: Mapping[str, BatchPart] = field(default_factory=dict)
    """Part of each family of tasks in the batch by name."""
    collapsed: tuple[str, ...] = ()
    """Families and sources of tasks that have collapsed by this step, one line each: over the last three steps that had
    them, more than half of their answers are invalid, or all groups have equal rewards of at most 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchMetric(Metric):
    """Alarm: learner and engines gave different log-probabilities to tokens that the trained version sampled itself.
    Written by the learner after the step's record."""

    kind = "mismatch_alarm"

    step: int
    """Number of optimizer steps in the new policy version."""
    version: str
    """Policy version after the step, `epoch.step`."""
    tokens: int
    """Number of tokens compared."""
    mean: float
    """Mean absolute difference of the log-probabilities, in nats."""
    max: float
    """Maximum absolute difference of the log-probabilities, in nats."""
    alarm: float
    """Value of `learner.mismatch_alarm`, which `mean` exceeds."""

    def line(self) -> str:
        """Return the alarm as a line of the log."""
        return (
            f"step {self.step}: over {self.tokens} tokens that the trained version sampled itself, the log-probs of "
            f"learner and engines differ by {self.mean:.3g} nats on average and {self.max:.3g} at most, more than "
            f"learner.mismatch_alarm ({self.alarm:g}): they do not compute the same policy; check that both load the "
            "same weights, data type and temperature, or raise learner.mismatch_alarm"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PushDemotion(Metric):
    """The run goes on with another `push.transport`, because slime's own failed. Written by the learner."""

    kind = "push_demotion"

    transport: str
    """Transport from now on: `delta` or `disk`."""
    version: str
    """Policy version of the learner at that time, `epoch.step`."""
    reason: str
    """Reason for it."""

    def line(self) -> str:
        """Return the record as a line of the log."""
        return f"weights are pushed by {self.transport} from version {self.version} on: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PushMetric(Metric):
    """One weight push to the engines."""

    kind = "push"

    push_id: str
    """Random id of the push, as in `engines/pushes.jsonl`."""
    version: str
    """Policy version that was pushed."""
    total_s: float
    """Wall time of the whole push in seconds."""
    seconds: Mapping[str, float]
    """Seconds by phase, summed over the waves: probe, form, gate, pause, begin, broadcast, end, flush, verify, resume,
    open, disband. By disk, `broadcast` is the reading, and form, begin, end and disband are 0."""
    sent_bytes: int
    """Number of bytes sent; each bucket counts once for every group of engines that it was sent to. By disk, the number
    of bytes that the engines read in total."""
    rollouts_in_flight: int | None
    """Rollouts in flight when the push began; null when unknown (for an engine that rejoins)."""
    requests_in_flight: int
    """Requests that were running on the engines when they were paused."""
    requests_retracted: int
    """Requests whose cache was dropped, so that their tokens had to be recomputed."""
    tokens_recomputed: int
    """Number of tokens recomputed after the pauses."""
    gate_s: Sequence[float]
    """Seconds during which new requests were held back, by engine."""
    paused_s: Sequence[float]
    """Seconds during which generation was paused, by engine."""
    gb_per_s: Sequence[float | None]
    """Transfer rate by engine in GB/s; null for an engine that received nothing."""
    stall_share: float | None
    """Share of the engines' time since the previous push during which gates were closed; null for the first push."""
    since_s: float | None
    """Seconds since the end of the previous push; null for the first."""
    updated: Sequence[str]
    """Engines that are now serving the version."""
    quarantined: Sequence[str]
    """Engines that failed and receive no requests until they are checked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPushMetric(Metric):
    """One weight push to simulated engines; the same kind as a real push, with fewer keys."""

    kind = "push"

    version: str
    """Policy version that was pushed."""
    total_s: float
    """Duration of the push in seconds."""
    rollouts_in_flight: int
    """Rollouts in flight when the push began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRate:
    """Pass rates over the `tasks` with at least k scored answers: `any_solved` is pass@k, `all_solved` is pass^k."""

    k: int
    any_solved: float
    all_solved: float
    tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSuccess:
    """The part of an evaluation's result that one source of tasks has."""

    answers: int
    infra: int
    success: float | None
    mean_reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSummary(Metric):
    """One evaluation on the held-out tasks, written by the service when the evaluation has ended."""

    kind = "evaluation"

    step: int = 0
    """Optimizer step at which the evaluation began; 0 for the base evaluation."""
    tag: str
    """`base`, `step-N` or `final`; also the name of the evaluation's folder in `evaluations/`."""
    answers: int
    """Number of answers (tasks x samples)."""
    infra: int
    """Number of answers without a score because of an infrastructure failure; they are not included in `success` or
    `mean_reward`."""
    success: float | None
    """Fraction of scored answers that were solved; null when none was scored."""
    mean_reward: float | None = None
    """Mean reward of the scored answers; null when none was scored."""
    tasks: int = 0
    """Number of held-out tasks."""
    samples: int = 1
    """Answers per task."""
    dataset_sha256: str = ""
    """SHA-256 of the evaluated tasks."""
    causes: Mapping[str, int]
    """Number of answers by the reason they ended (`solved`, `failed`, `budget`, ...)."""
    versions: Mapping[str, int]
    """Number of sampled tokens by policy version."""
    mixed: int
    """Number of answers sampled by more than one policy version."""
    pass_rates: Sequence[PassRate] = ()
    """For each k: `any_solved` (pass@k), `all_solved` (pass^k), and the number of `tasks` with at least k scored
    answers."""
    infra_reasons: Mapping[str, int] = field(default_factory=dict)
    """Infrastructure failures by reason, most frequent first (at most 3)."""
    sources: Mapping[str, SourceSuccess] = field(default_factory=dict)
    """`answers`, `infra`, `success` and `mean_reward` of each source of tasks by name; empty in a run without
    sources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPhasesMetric(Metric):
    """Mean phase durations of rollouts that ended together, written by a worker."""

    kind = "rollout_phases"

    rollouts: float
    """Number of rollouts averaged."""
    phases_s: Mapping[str, float] = field(metadata=INLINE)
    """Seconds spent in each phase: `queue` (waiting for a sandbox slot), `boot`, `prepare` (writing the task's files),
    `agent`, `evaluate`. A phase that no rollout reached is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StationMeans:
    """Load of one station over a record's time span."""

    in_use: float
    """Mean number of rollouts (turns, sandboxes) in the station."""
    capacity: float | None
    """Maximum number in the station; null where nothing limits it."""
    mean_s: float | None
    """Mean number of seconds that a rollout spends in the station; null while none has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StationsMetric(Metric):
    """Utilisation of a run's stations over about ten seconds, written by the service (guide 'Stations: what limits a
    run')."""

    kind = "stations"

    seconds: float
    """Length of the measured period in seconds."""
    in_flight: float
    """Mean number of rollouts in flight, evaluations included."""
    held_up_by: str | None
    """Station that limits the throughput of the run; null when none does."""
    stations: Mapping[str, StationMeans]
    """Load of each station by name: `queue`, `boot`, `sandbox`, `engine`, `simulator`, `evaluator`, `learner`, and
    `service.NAME` for each of `[services.NAME]`."""
    pacing: Mapping[str, int | str] = field(default_factory=dict, metadata=INLINE)
    """Keys present only with `dispatcher.pacing`: `rollout_limit` (current limit on rollouts in flight) and
    `slowed_by` (reason for the last decrease; empty if there was none)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicesMetric(Metric):
    """Calls to the run's services over about ten seconds, all workers together, written by the service."""

    kind = "services"

    seconds: float
    """Length of the measured period in seconds."""
    services: Mapping[str, ServiceTotals]
    """Calls to each service by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallMetric(Metric):
    """A lack of progress: a warning before the stall detector ends the run, or the end of the run."""

    kind = "stall"

    ended: bool
    """True if the run was ended, False for a warning."""
    reason: str
    """Parts that made no progress, and for how long."""


METRICS: tuple[type[Metric], ...] = (
    StepMetric,
    MismatchMetric,
    PushMetric,
    SimulatedPushMetric,
    EvaluationSummary,
    RolloutPhasesMetric,
    StationsMetric,
    ServicesMetric,
    StallMetric,
)
"""All metric records, in the order in which the guide 'Metrics' lists them."""


class MetricsWriter(Protocol):
    """Writer of a run's metrics, which may be an actor."""

    async def record(self, lines: Sequence[bytes]) -> None:
        """Append lines, each from `line_of`."""


class MetricsLog:
    """The metrics file, for its only writer. Without a path nothing is written."""

    def __init__(self, path: Path | None, retention: RetentionConfig | None = None) -> None:
        self._file = None if path is None else RotatingFile(path, retention)

    def append(self, record: Metric, *, time_s: float | None = None) -> None:
        """Write one record; `time_s` defaults to the current time."""
        self.write([line_of(record, time_s=time_s)])

    def write(self, lines: Sequence[bytes]) -> None:
        """Append lines, each from `line_of`."""
        if self._file is not None:
            for line in lines:
                self._file.append(line)

    async def record(self, lines: Sequence[bytes]) -> None:
        """See `MetricsWriter.record`."""
        self.write(lines)


class RecordsMetrics:
    """Base of the actors that write a run's metrics."""

    def __init__(self, metrics: MetricsLog) -> None:
        self._metrics = metrics

    async def record(self, lines: Sequence[bytes]) -> None:
        """Append lines to the run's metrics, of which this actor is the only writer."""
        self._metrics.write(lines)


UNRECORDED = MetricsLog(None)
"""Writer of metrics that nobody keeps."""


def line_of(record: Metric, *, time_s: float | None = None) -> bytes:
    """Return a record as a line of the file; `time_s` defaults to the current time."""
    document = {"kind": record.kind, "time_s": time.time() if time_s is None else time_s, **record.document()}
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"


def read_metrics(path: Path, kinds: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return all complete records of these kinds (of all kinds if none are given), oldest first."""
    return list(each_metric(path, kinds))


def each_metric(path: Path, kinds: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield, one at a time, the records that `read_metrics` returns, so that a long run's files need not fit in
    memory."""
    # Most lines are of other kinds; searching for the name is cheaper than parsing them.
    names = [f'"{kind}"'.encode() for kind in kinds]
    for file_path in kept_files(path):
        with file_path.open("rb") as file:
            for line in file:
                if names and not any(name in line for name in names):
                    continue
                record = _record(line)
                if record is not None and (not kinds or record["kind"] in kinds):
                    yield record


def last_metric(path: Path, kind: str) -> dict[str, Any] | None:
    """Return the newest record of a kind, reading backwards from the end; None if there is none."""
    for file_path in reversed(kept_files(path)):
        size, length = file_path.stat().st_size, TAIL_BYTES
        while True:
            with file_path.open("rb") as file:
                file.seek(max(0, size - length))
                lines = file.read(length).splitlines()
            # The first line may be cut, unless the whole file was read.
            whole = lines if length >= size else lines[1:]
            found = (record for line in reversed(whole) if (record := _record(line)) and record["kind"] == kind)
            if (newest := next(found, None)) is not None:
                return newest
            if length >= size:
                break
            length *= 8
    return None


def _record(line: bytes) -> dict[str, Any] | None:
    """Parse one line; None when it is not a record."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and "kind" in record else None
