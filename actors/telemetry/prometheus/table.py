"""The table of exported metrics: name, labels, type, source and help of each. The gauges of `metrics.jsonl` are not in
it: their names follow from the records (`records`).

Invariants:
- Every other metric of `/metrics` is in `TABLE`, and so are those that rules, alerts, dashboards and docs/metrics.md
  name.
- Counters and histograms come from files that keep their totals (the ledger, and the counts of lost spans), so that no
  restart and no rotation changes a count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from prometheus_client import Counter, Gauge, Histogram

M = TypeVar("M", Counter, Gauge, Histogram)


@dataclass(frozen=True, slots=True)
class Exported(Generic[M]):
    """An exported metric of a class of prometheus_client. `series` is the name of the OpenMetrics family with its
    labels, such as `headrace_attempts{cause,purpose}`; `source` names the files that it is computed from; `buckets` are
    upper bounds without infinity."""

    type: type[M]
    series: str
    help: str
    source: str = "ledger"
    buckets: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return self.series.partition("{")[0]

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(filter(None, self.series.partition("{")[2].removesuffix("}").split(",")))

    @property
    def sample(self) -> str:
        """Name under which queries find the metric; of a histogram, that of its number of observations."""
        return self.samples[0]

    @property
    def samples(self) -> tuple[str, ...]:
        """Names of all samples of the metric."""
        suffixes = {Counter: ("_total",), Histogram: ("_count", "_bucket", "_sum")}.get(self.type, ("",))
        return tuple(self.name + suffix for suffix in suffixes)


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


def _counter(series: str, help: str, source: str = "ledger") -> Exported[Counter]:
    return Exported(Counter, series, help, source)


def _histogram(series: str, help: str, buckets: tuple[float, ...]) -> Exported[Histogram]:
    return Exported(Histogram, series, help, buckets=buckets)


def _gauge(series: str, help: str, source: str = "ledger") -> Exported[Gauge]:
    return Exported(Gauge, series, help, source)


EXPORTER: Final = "the exporter itself"
RUN: Final = _gauge(
    "headrace_run_info{run,folder,version}",
    "1, with the identity of the run (`run`), its folder and the version of headrace that reads it.",
    EXPORTER,
)
DRIVEN: Final = _gauge(
    "headrace_run_driven", "1 while a process drives the run, 0 when it is over or killed.", EXPORTER
)
LEDGER_READABLE: Final = _gauge("headrace_ledger_readable", "1 if the ledger could be read: counts need it.", EXPORTER)
READ_S: Final = _gauge("headrace_read_seconds", "Time of reading the run's files for this answer.", EXPORTER)
BAD_LINES: Final = _gauge("headrace_metrics_bad_lines", "Lines of `metrics.jsonl` that are not records.", EXPORTER)
LEFT_OUT: Final = _gauge(
    "headrace_metrics_left_out",
    "Numbers of the newest records without a gauge: there are too many, or two would have one series.",
    EXPORTER,
)

ATTEMPTS: Final = _counter("headrace_attempts{cause,purpose}", "Attempts of rollouts that ended, by `attempts.cause`.")
ATTEMPT_S: Final = _histogram(
    "headrace_attempt_seconds{purpose}",
    "Seconds from the issue of an attempt to its end; of an evaluation, on its worker.",
    SECONDS,
)
PART_S: Final = _histogram(
    "headrace_part_seconds{part,purpose}",
    "Seconds of attempts by part of the breakdown, once per attempt; what no part covers is `unmeasured`.",
    SECONDS,
)
HOST_ATTEMPTS: Final = _counter("headrace_host_attempts{host,cause}", "Attempts that ended, by host of their sandbox.")
ENGINE_ATTEMPTS: Final = _counter("headrace_engine_attempts{engine}", "Attempts that ended with a turn on the engine.")
TOKENS_USED: Final = _counter(
    "headrace_tokens{kind,purpose}",
    "Tokens of attempts that ended: `prompt` (of all turns), `cached` (those in the engine's cache) and `sampled`.",
)
RETRACTIONS: Final = _counter("headrace_retractions", "Interruptions of turns by their engines, for lack of memory.")
SANDBOX_S: Final = _counter(
    "headrace_sandbox_seconds{purpose}", "Seconds that attempts which ended held sandboxes, from boot to release."
)
SANDBOX_CPU_S: Final = _counter("headrace_sandbox_cpu_seconds{purpose}", "CPU seconds of the agents' sandboxes.")
BOOTS: Final = _counter("headrace_sandbox_boots{warm}", "Sandboxes of agents, by whether they were booted ahead.")
BOOT_TRIES: Final = _counter("headrace_sandbox_boot_tries", "Tries of these boots, the successful ones included.")
WASTED_ATTEMPTS: Final = _counter(
    "headrace_wasted_attempts{reason}",
    "Attempts that were not trained, counted when their group has ended: `evicted` and `cancelled`, `filtered`, "
    "`infra` (repeated), `poison` (given up).",
)
WASTED_TOKENS: Final = _counter("headrace_wasted_tokens{reason}", "Sampled tokens of these attempts.")
WASTED_SANDBOX_S: Final = _counter("headrace_wasted_sandbox_seconds{reason}", "Sandbox seconds of these attempts.")
TOKEN_USAGE: Final = _histogram(
    "gen_ai_client_token_usage{gen_ai_operation_name,gen_ai_provider_name,gen_ai_token_type}",
    "`gen_ai.client.token.usage`: tokens of one invocation of an agent, which is one attempt.",
    TOKENS,
)
INVOKE_AGENT_S: Final = _histogram(
    "gen_ai_invoke_agent_duration_seconds{gen_ai_agent_name,error_type}",
    "`gen_ai.invoke_agent.duration`: seconds of an agent in one attempt, from its start to its end.",
    AGENT_SECONDS,
)
INFERENCE_CALLS: Final = _histogram(
    "gen_ai_invoke_agent_inference_calls{gen_ai_agent_name}",
    "`gen_ai.invoke_agent.inference_calls`: turns of an agent in one attempt.",
    CALLS,
)
ROLLOUTS: Final = _gauge(
    "headrace_rollouts{state}",
    "Training rollouts by `rollouts.state`, open or ended: all that were ever opened. A return to an older checkpoint "
    "moves some back.",
)
EVENTS: Final = _counter(
    "headrace_ledger_events{event}",
    "Counters of the ledger: refused offers, evictions (`rollouts_reissued`, or `rollouts_evicted` without reissues "
    "left), filtered members, sealed and dropped groups, failed steps, parked tasks and others.",
)
STEPS: Final = _counter(
    "headrace_steps{outcome}", "Optimizer steps: `updated`, or `skipped` for a gradient not finite."
)
STEPS_ROLLED_BACK: Final = _counter(
    "headrace_steps_rolled_back", "Steps that a return to an older checkpoint undid; they stay in `headrace_steps`."
)
TRAINED_STALENESS: Final = _histogram(
    "headrace_trained_staleness", "Staleness of trained rollouts in optimizer steps, of undone steps too.", STALENESS
)
LEARNER_S: Final = _counter(
    "headrace_learner_seconds{activity}",
    "Seconds of the learner: `waiting` for a batch, or `stepping` from its lease to its commit. Time between an end of "
    "the run and its resume does not count.",
)
MAX_STALENESS: Final = _gauge("headrace_max_staleness", "Bound in force at the newest step, in steps.")
OUTAGES: Final = _counter("headrace_outages{component}", "Times that orders were held, by the component that failed.")
OUTAGE_OPEN: Final = _gauge("headrace_outage_open{component}", "1 while orders are held because of the component.")
NEWEST_END: Final = _gauge("headrace_newest_attempt_timestamp_seconds", "Time of the newest end of an attempt.")
NEWEST_COMMIT: Final = _gauge("headrace_newest_step_timestamp_seconds", "Time of the newest step's commit.")
NEWEST_CHECKPOINT: Final = _gauge("headrace_newest_checkpoint_timestamp_seconds", "Time of the newest checkpoint.")

RUNS: Final = "ledger, running/"
RUNNING: Final = _gauge(
    "headrace_running_rollouts{part,purpose}",
    "Rollouts in flight by part; `dispatch` is one that no worker has written about. Those of silent workers are left "
    "out.",
    RUNS,
)
STUCK: Final = _gauge(
    "headrace_stuck_rollouts",
    "Training rollouts in flight for more than three times the 95th percentile of their cohort: ended attempts at the "
    "same task, or all if those are few.",
    RUNS,
)
OLDEST_S: Final = _gauge("headrace_oldest_rollout_seconds", "Age of the oldest training rollout in flight.", RUNS)
SPANS_LOST: Final = _counter(
    "headrace_spans_lost{reason}",
    "Spans that were lost, by reason (guide 'Run directory'). Those whose reason begins with `removed_` were removed "
    "to keep `telemetry.keep_bytes`.",
    "spans/",
)
ENGINES: Final = "engines/members.json"
ENGINE_STATE: Final = _gauge("headrace_engine_state{engine,state}", "1 for the state that an engine is in.", ENGINES)
ENGINE_REQUESTS: Final = _gauge(
    "headrace_engine_requests{engine,state}", "Requests at the last health check: `running` or `waiting`.", ENGINES
)
DISKS: Final = "file systems"
DISK_FREE: Final = _gauge("headrace_disk_free_bytes{folder}", "Free bytes of the disk of `state` or `storage`.", DISKS)
DISK_SIZE: Final = _gauge("headrace_disk_size_bytes{folder}", "Size of this disk.", DISKS)

TABLE: Final[tuple[Exported[Any], ...]] = tuple(each for each in dict(globals()).values() if isinstance(each, Exported))
"""All exported metrics but the gauges of records, in the order in which the guide 'Metrics' lists them."""
