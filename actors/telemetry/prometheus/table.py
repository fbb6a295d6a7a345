"""The table of exported metrics: name, type, unit, help, labels and source of each.

Invariants:
- Every metric of `/metrics` is in `TABLE`, and so are those that rules, alerts, dashboards and docs/metrics.md name.
- Counters and histograms come from files that keep their totals (the ledger, and the counts of lost spans), so that no
  restart and no rotation changes a count. What is only in `metrics.jsonl` is a gauge with the newest value.
- A label has at most `MAX_VALUES` values; the rest is summed into `OTHER_VALUE`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MAX_VALUES: Final = 50
"""Largest number of values of a label, `OTHER_VALUE` included."""
OTHER_VALUE: Final = "other"
"""Value into which the values beyond the first `MAX_VALUES - 1` are summed. The part `other` of a breakdown is not
one of these: it is called `unmeasured`."""
MAX_CHARACTERS: Final = 80
"""Length to which a value of a label is cut."""


class MetricType(StrEnum):
    """Type of an exported metric, as OpenMetrics names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


class Source(StrEnum):
    """File or files that a metric is computed from."""

    LEDGER = "ledger"
    METRICS = "metrics.jsonl"
    RUNNING = "running/"
    SPANS = "spans/"
    ENGINES = "engines/members.json"
    DISK = "file systems"
    EXPORTER = "the exporter itself"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An exported metric. `name` is that of the OpenMetrics family: samples of a counter end with `_total`, of an info
    with `_info`, of a histogram with `_bucket`, `_sum` and `_count`. `buckets` are upper bounds without infinity."""

    name: str
    type: MetricType
    unit: str = ""
    help: str
    labels: tuple[str, ...] = ()
    source: Source
    buckets: tuple[float, ...] = ()

    @property
    def sample(self) -> str:
        """Name under which queries find the metric; of a histogram, that of its number of observations."""
        suffixes = {MetricType.COUNTER: "_total", MetricType.INFO: "_info", MetricType.HISTOGRAM: "_count"}
        return self.name + suffixes.get(self.type, "")

    @property
    def samples(self) -> tuple[str, ...]:
        """Names of all samples of the metric."""
        if self.type is MetricType.HISTOGRAM:
            return tuple(self.name + suffix for suffix in ("_bucket", "_count", "_sum"))
        return (self.sample,)


SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0)
"""Bounds of the histograms of seconds: from a rendering to a rollout of hours."""
TOKENS: Final = tuple(float(4**power) for power in range(14))
"""Bounds that the GenAI conventions give for `gen_ai.client.token.usage`."""
AGENT_SECONDS: Final = tuple(round(0.1 * 2**power, 1) for power in range(17))
"""Bounds that the GenAI conventions give for `gen_ai.invoke_agent.duration`, continued to two hours."""
CALLS: Final = tuple(float(2**power) for power in range(11))
"""Bounds that the GenAI conventions give for `gen_ai.invoke_agent.inference_calls`, continued to 1024."""
STALENESS: Final = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)
"""Bounds of the histogram of staleness, in optimizer steps."""


def _counter(name: str, help: str, *labels: str, unit: str = "") -> Exported:
    return Exported(name=name, type=MetricType.COUNTER, unit=unit, help=help, labels=labels, source=Source.LEDGER)


def _histogram(name: str, help: str, *labels: str, buckets: tuple[float, ...], unit: str = "") -> Exported:
    return Exported(
        name=name,
        type=MetricType.HISTOGRAM,
        unit=unit,
        help=help,
        labels=labels,
        source=Source.LEDGER,
        buckets=buckets,
    )


def _gauge(source: Source, name: str, help: str, *labels: str, unit: str = "") -> Exported:
    return Exported(name=name, type=MetricType.GAUGE, unit=unit, help=help, labels=labels, source=source)


RUN: Final = Exported(
    name="headrace_run",
    type=MetricType.INFO,
    help="Identity of the run (`run`), its folder and the version of headrace that reads it.",
    labels=("run", "folder", "version"),
    source=Source.EXPORTER,
)
DRIVEN: Final = _gauge(
    Source.EXPORTER, "headrace_run_driven", "1 while a process drives the run, 0 when it is over, stopped or killed."
)
LEDGER_READABLE: Final = _gauge(
    Source.EXPORTER, "headrace_ledger_readable", "1 if the ledger could be read; without it, no count is exported."
)
READ_S: Final = _gauge(
    Source.EXPORTER, "headrace_read_seconds", "Time that reading the run's files took for this answer.", unit="seconds"
)
BAD_LINES: Final = _gauge(
    Source.EXPORTER, "headrace_metrics_bad_lines", "Lines of `metrics.jsonl` that are not records and were skipped."
)

ATTEMPTS: Final = _counter(
    "headrace_attempts", "Attempts of rollouts that ended, by cause (`attempts.cause`) and purpose.", "cause", "purpose"
)
ATTEMPT_S: Final = _histogram(
    "headrace_attempt_seconds",
    "Seconds from the issue of an attempt to its end; of an evaluation, on its worker.",
    "purpose",
    unit="seconds",
    buckets=SECONDS,
)
PART_S: Final = _histogram(
    "headrace_part_seconds",
    "Seconds of attempts by part of the breakdown, each part once per attempt; what no part covers is `unmeasured`.",
    "part",
    "purpose",
    unit="seconds",
    buckets=SECONDS,
)
HOST_ATTEMPTS: Final = _counter(
    "headrace_host_attempts", "Attempts that ended, by host of their sandbox and cause.", "host", "cause"
)
ENGINE_ATTEMPTS: Final = _counter(
    "headrace_engine_attempts", "Attempts that ended and had a turn on the engine, by engine.", "engine"
)
TOKENS_USED: Final = _counter(
    "headrace_tokens",
    "Tokens of attempts that ended: `prompt` (of all turns together), `cached` (those of them that the engine had "
    "in its cache) and `sampled`.",
    "kind",
    "purpose",
)
RETRACTIONS: Final = _counter("headrace_retractions", "Interruptions of turns by their engines, for lack of memory.")
SANDBOX_S: Final = _counter(
    "headrace_sandbox_seconds",
    "Seconds in which attempts that ended held sandboxes, from the boot to the release.",
    "purpose",
    unit="seconds",
)
SANDBOX_CPU_S: Final = _counter(
    "headrace_sandbox_cpu_seconds", "CPU seconds of the agents' sandboxes.", "purpose", unit="seconds"
)
BOOTS: Final = _counter("headrace_sandbox_boots", "Sandboxes of agents, by whether they were booted ahead.", "warm")
BOOT_TRIES: Final = _counter("headrace_sandbox_boot_tries", "Tries of these boots, the successful ones included.")
WASTED_ATTEMPTS: Final = _counter(
    "headrace_wasted_attempts",
    "Attempts that were not trained, counted when their group has ended: `evicted` and `cancelled`, `filtered`, "
    "`infra` (repeated), `poison` (given up).",
    "reason",
)
WASTED_TOKENS: Final = _counter("headrace_wasted_tokens", "Sampled tokens of these attempts.", "reason")
WASTED_SANDBOX_S: Final = _counter(
    "headrace_wasted_sandbox_seconds", "Sandbox seconds of these attempts.", "reason", unit="seconds"
)
TOKEN_USAGE: Final = _histogram(
    "gen_ai_client_token_usage",
    "`gen_ai.client.token.usage`: tokens of one invocation of an agent, which is one attempt.",
    "gen_ai_operation_name",
    "gen_ai_provider_name",
    "gen_ai_token_type",
    buckets=TOKENS,
)
INVOKE_AGENT_S: Final = _histogram(
    "gen_ai_invoke_agent_duration_seconds",
    "`gen_ai.invoke_agent.duration`: seconds of an agent in one attempt, from its start to its end.",
    "gen_ai_agent_name",
    "error_type",
    unit="seconds",
    buckets=AGENT_SECONDS,
)
INFERENCE_CALLS: Final = _histogram(
    "gen_ai_invoke_agent_inference_calls",
    "`gen_ai.invoke_agent.inference_calls`: turns of an agent in one attempt.",
    "gen_ai_agent_name",
    buckets=CALLS,
)
ROLLOUTS: Final = _gauge(
    Source.LEDGER,
    "headrace_rollouts",
    "Training rollouts by state (`rollouts.state`): the inventory, and those that ended. They add up to all that "
    "were ever opened; a return to an older checkpoint moves some back.",
    "state",
)
EVENTS: Final = _counter(
    "headrace_ledger_events",
    "Counters of the ledger: refused offers, filtered members, sealed and dropped groups, failed steps, parked tasks "
    "and others.",
    "event",
)
EVICTIONS: Final = _counter(
    "headrace_evictions",
    "Finished rollouts that exceeded the staleness bound: `reissued`, or `ended` without reissues left.",
    "outcome",
)
STEPS: Final = _counter(
    "headrace_steps", "Optimizer steps: `updated`, or `skipped` because the gradient was not finite.", "outcome"
)
STEPS_ROLLED_BACK: Final = _counter(
    "headrace_steps_rolled_back", "Steps that a return to an older checkpoint undid; they stay in `headrace_steps`."
)
TRAINED_STALENESS: Final = _histogram(
    "headrace_trained_staleness",
    "Staleness of trained rollouts in optimizer steps, of undone steps too.",
    buckets=STALENESS,
)
LEARNER_S: Final = _counter(
    "headrace_learner_seconds",
    "Seconds of the learner by activity: `waiting` for a batch, or `stepping` from the lease of a batch to its "
    "commit. Time between an end of the run and its resume does not count.",
    "activity",
    unit="seconds",
)
MAX_STALENESS: Final = _gauge(Source.LEDGER, "headrace_max_staleness", "Bound in force at the newest step, in steps.")
OUTAGES: Final = _counter(
    "headrace_outages", "Times in which orders were held, by the component that failed.", "component"
)
OUTAGE_OPEN: Final = _gauge(
    Source.LEDGER, "headrace_outage_open", "1 while orders are held because of the component.", "component"
)
NEWEST_END: Final = _gauge(
    Source.LEDGER, "headrace_newest_attempt_timestamp_seconds", "Time of the newest end of an attempt.", unit="seconds"
)
NEWEST_COMMIT: Final = _gauge(
    Source.LEDGER, "headrace_newest_step_timestamp_seconds", "Time of the newest step's commit.", unit="seconds"
)
NEWEST_CHECKPOINT: Final = _gauge(
    Source.LEDGER, "headrace_newest_checkpoint_timestamp_seconds", "Time of the newest checkpoint.", unit="seconds"
)

RUNNING: Final = _gauge(
    Source.RUNNING,
    "headrace_running_rollouts",
    "Rollouts that living workers run, by part and purpose.",
    "part",
    "purpose",
)
STUCK: Final = _gauge(
    Source.RUNNING,
    "headrace_stuck_rollouts",
    "Training rollouts in flight for more than three times the 95th percentile of their cohort (newest 64 attempts at "
    "the same task, or newest 4096 of all).",
)
OLDEST_S: Final = _gauge(
    Source.RUNNING, "headrace_oldest_rollout_seconds", "Age of the oldest training rollout in flight.", unit="seconds"
)

STATION_IN_USE: Final = _gauge(
    Source.METRICS, "headrace_station_in_use", "Mean number of rollouts, turns or sandboxes in a station.", "station"
)
STATION_CAPACITY: Final = _gauge(
    Source.METRICS,
    "headrace_station_capacity",
    "Largest number in a station; absent where nothing limits it.",
    "station",
)
STATION_S: Final = _gauge(
    Source.METRICS,
    "headrace_station_seconds",
    "Mean seconds that a rollout spends in a station; absent while none has ended.",
    "station",
    unit="seconds",
)
STATION_LIMITS: Final = _gauge(
    Source.METRICS, "headrace_station_limits", "1 for the station that limits the throughput.", "station"
)
IN_FLIGHT: Final = _gauge(
    Source.METRICS, "headrace_rollouts_in_flight", "Mean number of rollouts in flight, evaluations included."
)
ROLLOUT_LIMIT: Final = _gauge(
    Source.METRICS, "headrace_rollout_limit", "Limit of adaptive concurrency on training rollouts in flight."
)
PUSH_S: Final = _gauge(
    Source.METRICS,
    "headrace_push_seconds",
    "Seconds of the newest push by phase; `total` is its wall time.",
    "phase",
    unit="seconds",
)
PUSH_AT: Final = _gauge(Source.METRICS, "headrace_push_timestamp_seconds", "Time of the newest push.", unit="seconds")
PUSH_BYTES: Final = _gauge(Source.METRICS, "headrace_push_bytes", "Bytes sent by the newest push.", unit="bytes")
PUSH_RECOMPUTED: Final = _gauge(
    Source.METRICS, "headrace_push_recomputed_tokens", "Tokens computed again because of the newest push."
)
PUSH_STALL: Final = _gauge(
    Source.METRICS,
    "headrace_push_stall_ratio",
    "Share of the engines' time between the newest two pushes during which their gates were closed.",
    unit="ratio",
)
PUSH_QUARANTINED: Final = _gauge(
    Source.METRICS, "headrace_push_quarantined_engines", "Engines that failed in the newest push."
)
STEP: Final = _gauge(Source.METRICS, "headrace_step", "Number of optimizer steps of the newest policy version.")
STEP_REWARD: Final = _gauge(Source.METRICS, "headrace_step_reward", "Mean reward of the newest step's batch.")
STEP_S: Final = _gauge(
    Source.METRICS,
    "headrace_step_seconds",
    "Seconds of the newest step by activity: `training`, `waiting` for its batch, `pushing`.",
    "activity",
    unit="seconds",
)
STEP_VALUE: Final = _gauge(
    Source.METRICS, "headrace_step_value", "Numbers that the learner reported of the newest step, by name.", "name"
)
MISMATCH: Final = _gauge(
    Source.METRICS,
    "headrace_logprob_mismatch_nats",
    "Mean absolute difference between learner and engines over tokens of the trained version, at the newest step.",
    unit="nats",
)
MISMATCH_AT: Final = _gauge(
    Source.METRICS,
    "headrace_logprob_mismatch_alarm_timestamp_seconds",
    "Time of the newest alarm `mismatch_alarm`.",
    unit="seconds",
)
EVALUATED_STEP: Final = _gauge(Source.METRICS, "headrace_evaluation_step", "Step of the newest evaluation.")
EVALUATION_SUCCESS: Final = _gauge(
    Source.METRICS,
    "headrace_evaluation_success_ratio",
    "Share of the scored answers of the newest evaluation that were solved.",
    unit="ratio",
)
STALL_AT: Final = _gauge(
    Source.METRICS,
    "headrace_stall_timestamp_seconds",
    "Time of the newest stall: `warned`, or `ended` the run.",
    "outcome",
    unit="seconds",
)
SERVICE_CALLS: Final = _gauge(
    Source.METRICS,
    "headrace_service_calls_per_second",
    "Calls to a service of the recipe that ended, by outcome: `ok` or `failed`.",
    "service",
    "outcome",
)
SERVICE_S: Final = _gauge(
    Source.METRICS,
    "headrace_service_call_seconds",
    "Mean seconds of a call to a service, by what it did: `waiting` for a slot, or `calling`.",
    "service",
    "activity",
    unit="seconds",
)
SPANS_LOST: Final = Exported(
    name="headrace_spans_lost",
    type=MetricType.COUNTER,
    help="Spans that were lost, by reason (docs/run_directory.md). Those whose reason begins with `removed_` were "
    "removed to keep `telemetry.keep_bytes`.",
    labels=("reason",),
    source=Source.SPANS,
)

ENGINE_STATE: Final = _gauge(
    Source.ENGINES, "headrace_engine_state", "1 for the state that an engine is in.", "engine", "state"
)
ENGINE_REQUESTS: Final = _gauge(
    Source.ENGINES,
    "headrace_engine_requests",
    "Requests of an engine at its last health check: `running` or `waiting`.",
    "engine",
    "state",
)

DISK_FREE: Final = _gauge(
    Source.DISK,
    "headrace_disk_free_bytes",
    "Free bytes of the file system of a folder of the run: `state` or `storage`.",
    "folder",
    unit="bytes",
)
DISK_SIZE: Final = _gauge(Source.DISK, "headrace_disk_size_bytes", "Size of this file system.", "folder", unit="bytes")

TABLE: Final[tuple[Exported, ...]] = tuple(value for value in dict(globals()).values() if isinstance(value, Exported))
"""All exported metrics, in the order in which `/metrics` and docs/metrics.md list them."""
