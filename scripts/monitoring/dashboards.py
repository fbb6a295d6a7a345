"""Panels of the three Grafana dashboards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from headrace.actors.telemetry.prometheus import table
from headrace.actors.telemetry.prometheus.records import name_of
from monitoring import rules


@dataclass(frozen=True, slots=True)
class Query:
    """A query with the text of its legend. `{run}` stands for the selection of the run."""

    text: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel: `kind` and `unit` as Grafana names them."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: str = "timeseries"
    stacked: bool = False
    exemplars: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A dashboard; `name` is that of its file."""

    name: str
    title: str
    panels: tuple[Panel, ...]


RUN: Final = 'instance=~"$instance"'


def each(metric: table.Exported[Any], *labels: str, where: str = "") -> str:
    """Return the query for a gauge by labels."""
    names = ", ".join(("instance", *labels))
    return f"sum by ({names}) ({metric.sample}{{{_matchers(where)}}})"


def newest(kind: str, field: str, *labels: str, where: str = "") -> str:
    """Return the query for a field of the newest record of a kind by labels."""
    names = ", ".join(("instance", *labels))
    return f"sum by ({names}) ({name_of(kind, field)}{{{_matchers(where)}}})"


def station(field: str) -> str:
    """Return the query for a number of each station."""
    return newest("stations", "stations", "name", where=f'field="{field}"')


def service(field: str) -> str:
    """Return the query for a number of each service."""
    return newest("services", "services", "name", where=f'field="{field}"')


def rate(metric: table.Exported[Any], *labels: str, where: str = "") -> str:
    """Return the query for the growth of a counter per second by labels."""
    names = ", ".join(("instance", *labels))
    return f"sum by ({names}) (rate({metric.sample}{{{_matchers(where)}}}[5m]))"


def mean(metric: table.Exported[Any], *labels: str, where: str = "") -> str:
    """Return the query for the mean of a histogram by labels."""
    names, chosen = ", ".join(("instance", *labels)), _matchers(where)
    total, number = f"{metric.name}_sum{{{chosen}}}", f"{metric.name}_count{{{chosen}}}"
    return f"sum by ({names}) (rate({total}[5m])) / sum by ({names}) (rate({number}[5m]))"


def quantile(share: float, metric: table.Exported[Any], *labels: str, where: str = "") -> str:
    """Return the query for a quantile of a histogram by labels."""
    names = ", ".join(("instance", *labels, "le"))
    return f"histogram_quantile({share}, sum by ({names}) (rate({metric.name}_bucket{{{_matchers(where)}}}[5m])))"


def recorded(rule: rules.Recording, where: str = "") -> str:
    """Return the query for a recorded series."""
    return f"{rule.name}{{{_matchers(where)}}}"


def _matchers(where: str) -> str:
    return ",".join((RUN, where)) if where else RUN


INVENTORY: Final = 'state=~"pending|in_flight|waiting|sealed|leased"'

EVICTED: Final = 'event=~"rollouts_reissued|rollouts_evicted"'
CACHED: Final = 'kind="cached"'
PROMPT: Final = 'kind="prompt"'
SERVICES_S: Final = newest("services", "seconds")

OVERVIEW: Final = Dashboard(
    name="overview",
    title="headrace: overview",
    panels=(
        Panel(
            title="Run",
            kind="table",
            queries=(Query(f"{table.RUN.sample}{{{RUN}}} * on (job, instance) group_left () {table.DRIVEN.sample}"),),
        ),
        Panel(
            title="Reward and held-out success",
            queries=(
                Query(newest("step", "reward"), "reward of the newest step"),
                Query(newest("evaluation", "success"), "held-out success"),
            ),
        ),
        Panel(
            title="Steps and evaluations",
            queries=(
                Query(newest("step", "step"), "step"),
                Query(newest("evaluation", "step"), "step of the evaluation"),
            ),
        ),
        Panel(
            title="Inventory: rollouts by state",
            stacked=True,
            queries=(Query(each(table.ROLLOUTS, "state", where=INVENTORY), "{{state}}"),),
        ),
        Panel(
            title="Attempts that end, by cause",
            unit="ops",
            stacked=True,
            queries=(Query(f"sum by (instance, cause) ({recorded(rules.ATTEMPT_RATE)})", "{{cause}}"),),
        ),
        Panel(
            title="Failed because of infrastructure", unit="percentunit", queries=(Query(recorded(rules.INFRA_SHARE)),)
        ),
        Panel(
            title="Staleness of trained rollouts, in steps",
            queries=(
                Query(mean(table.TRAINED_STALENESS), "mean"),
                Query(quantile(0.95, table.TRAINED_STALENESS), "p95"),
                Query(each(table.MAX_STALENESS), "bound"),
            ),
        ),
        Panel(title="Evictions", unit="ops", queries=(Query(rate(table.EVENTS, "event", where=EVICTED), "{{event}}"),)),
        Panel(
            title="Learner",
            unit="percentunit",
            stacked=True,
            queries=(Query(rate(table.LEARNER_S, "activity"), "{{activity}}"),),
        ),
        Panel(title="Learner busy", unit="percentunit", queries=(Query(recorded(rules.LEARNER_BUSY)),)),
        Panel(
            title="Newest step, seconds",
            unit="s",
            queries=(
                Query(newest("step", "step_s"), "training"),
                Query(newest("step", "idle_s"), "waiting"),
                Query(newest("step", "push_s"), "pushing"),
            ),
        ),
        Panel(
            title="Numbers of the newest step",
            queries=(Query(f'{{__name__=~"headrace_step_.+",name="",{RUN}}}', "{{__name__}}"),),
        ),
        Panel(
            title="Steps by outcome",
            unit="ops",
            queries=(
                Query(rate(table.STEPS, "outcome"), "{{outcome}}"),
                Query(rate(table.STEPS_ROLLED_BACK), "undone"),
            ),
        ),
        Panel(
            title="Use of stations",
            unit="percentunit",
            queries=(Query(f"{station('in_use')} / {station('capacity')}", "{{name}}"),),
        ),
        Panel(
            title="Wasted sandbox time",
            unit="percentunit",
            queries=(Query(recorded(rules.WASTE), "share of training"),),
        ),
        Panel(
            title="Wasted attempts and tokens",
            unit="ops",
            queries=(
                Query(rate(table.WASTED_ATTEMPTS, "reason"), "attempts, {{reason}}"),
                Query(rate(table.WASTED_TOKENS, "reason"), "tokens, {{reason}}"),
            ),
        ),
        Panel(title="Events of the ledger", unit="ops", queries=(Query(rate(table.EVENTS, "event"), "{{event}}"),)),
        Panel(
            title="Outages",
            queries=(
                Query(each(table.OUTAGES, "component"), "{{component}}, so far"),
                Query(each(table.OUTAGE_OPEN, "component"), "{{component}}, now"),
            ),
        ),
        Panel(
            title="Time since",
            unit="s",
            queries=(
                Query(f"time() - {each(table.NEWEST_END)}", "the end of an attempt"),
                Query(f"time() - {each(table.NEWEST_COMMIT)}", "a step"),
                Query(f"time() - {each(table.NEWEST_CHECKPOINT)}", "a checkpoint"),
                Query(f"time() - {newest('stall', 'time_s')}", "a stall"),
            ),
        ),
        Panel(title="Free disk", unit="percentunit", queries=(Query(recorded(rules.DISK), "{{folder}}"),)),
        Panel(title="Lost spans", queries=(Query(each(table.SPANS_LOST, "reason"), "{{reason}}"),)),
        Panel(
            title="Exporter",
            unit="s",
            queries=(
                Query(each(table.READ_S), "time of reading"),
                Query(each(table.BAD_LINES), "bad lines"),
                Query(each(table.LEFT_OUT), "numbers without a gauge"),
                Query(each(table.LEDGER_READABLE), "ledger readable"),
            ),
        ),
    ),
)

ROLLOUTS: Final = Dashboard(
    name="rollouts",
    title="headrace: rollouts",
    panels=(
        Panel(
            title="Running, by part",
            stacked=True,
            queries=(Query(each(table.RUNNING, "part", "purpose"), "{{part}} ({{purpose}})"),),
        ),
        Panel(
            title="In flight",
            queries=(
                Query(newest("stations", "in_flight"), "in flight"),
                Query(newest("stations", "rollout_limit"), "limit of pacing"),
            ),
        ),
        Panel(title="Stuck", queries=(Query(each(table.STUCK), "beyond 3 x p95"),)),
        Panel(title="Oldest", unit="s", queries=(Query(each(table.OLDEST_S)),)),
        Panel(
            title="Seconds of an attempt",
            unit="s",
            exemplars=True,
            queries=(
                Query(quantile(0.5, table.ATTEMPT_S, "purpose"), "p50, {{purpose}}"),
                Query(recorded(rules.ATTEMPT_P95), "p95, {{purpose}}"),
            ),
        ),
        Panel(
            title="Seconds by part, p95",
            unit="s",
            exemplars=True,
            queries=(Query(recorded(rules.PART_P95, 'purpose="train"'), "{{part}}"),),
        ),
        Panel(
            title="Time of attempts by part",
            stacked=True,
            unit="s",
            queries=(
                Query(
                    f'sum by (instance, part) (rate({table.PART_S.name}_sum{{{RUN},purpose="train"}}[5m]))', "{{part}}"
                ),
            ),
        ),
        Panel(title="Stations: seconds of a rollout", unit="s", queries=(Query(station("mean_s"), "{{name}}"),)),
        Panel(
            title="Attempts by host and cause",
            kind="table",
            queries=(Query(each(table.HOST_ATTEMPTS, "host", "cause"), "{{host}} {{cause}}"),),
        ),
        Panel(
            title="Boots of sandboxes",
            unit="ops",
            queries=(Query(rate(table.BOOTS, "warm"), "warm: {{warm}}"), Query(rate(table.BOOT_TRIES), "tries")),
        ),
        Panel(
            title="Sandboxes: places and CPUs in use",
            queries=(
                Query(rate(table.SANDBOX_S, "purpose"), "sandboxes, {{purpose}}"),
                Query(rate(table.SANDBOX_CPU_S, "purpose"), "CPUs, {{purpose}}"),
            ),
        ),
        Panel(title="Tokens", unit="ops", queries=(Query(rate(table.TOKENS_USED, "kind"), "{{kind}}"),)),
        Panel(
            title="Agents: seconds, p95",
            unit="s",
            exemplars=True,
            queries=(Query(quantile(0.95, table.INVOKE_AGENT_S, "gen_ai_agent_name"), "{{gen_ai_agent_name}}"),),
        ),
        Panel(
            title="Agents: turns, mean",
            queries=(Query(mean(table.INFERENCE_CALLS, "gen_ai_agent_name"), "{{gen_ai_agent_name}}"),),
        ),
        Panel(
            title="Agents: tokens of an attempt, p95",
            queries=(Query(quantile(0.95, table.TOKEN_USAGE, "gen_ai_token_type"), "{{gen_ai_token_type}}"),),
        ),
        Panel(
            title="Calls to services",
            unit="ops",
            queries=(
                Query(f"{service('calls')} / on (instance) group_left () {SERVICES_S}", "{{name}}"),
                Query(f"{service('failures')} / on (instance) group_left () {SERVICES_S}", "{{name}}, failed"),
            ),
        ),
        Panel(
            title="Seconds of a call to a service",
            unit="s",
            queries=(
                Query(f"{service('waiting_s')} / {service('calls')}", "{{name}} waiting"),
                Query(f"{service('calling_s')} / {service('calls')}", "{{name}} calling"),
            ),
        ),
    ),
)

ENGINES: Final = Dashboard(
    name="engines",
    title="headrace: engines",
    panels=(
        Panel(
            title="Engines by state",
            kind="table",
            queries=(Query(f"{each(table.ENGINE_STATE, 'engine', 'state')} == 1", "{{engine}} {{state}}"),),
        ),
        Panel(
            title="Requests", queries=(Query(each(table.ENGINE_REQUESTS, "engine", "state"), "{{engine}} {{state}}"),)
        ),
        Panel(
            title="Attempts that used an engine",
            unit="ops",
            queries=(Query(rate(table.ENGINE_ATTEMPTS, "engine"), "{{engine}}"),),
        ),
        Panel(
            title="Engine and gate, p95 of an attempt",
            unit="s",
            exemplars=True,
            queries=(Query(quantile(0.95, table.PART_S, "part", where='part=~"engine.*|gate"'), "{{part}}"),),
        ),
        Panel(title="Retractions", unit="ops", queries=(Query(rate(table.RETRACTIONS)),)),
        Panel(
            title="Prompt tokens from the cache",
            unit="percentunit",
            queries=(Query(f"{rate(table.TOKENS_USED, where=CACHED)} / {rate(table.TOKENS_USED, where=PROMPT)}"),),
        ),
        Panel(
            title="Newest push, seconds by phase",
            unit="s",
            queries=(Query(newest("push", "seconds", "name"), "{{name}}"), Query(newest("push", "total_s"), "total")),
        ),
        Panel(title="Time since a push", unit="s", queries=(Query(f"time() - {newest('push', 'time_s')}"),)),
        Panel(title="Bytes of the newest push", unit="bytes", queries=(Query(newest("push", "sent_bytes")),)),
        Panel(
            title="Costs of the newest push",
            queries=(
                Query(newest("push", "tokens_recomputed"), "tokens computed again"),
                Query(newest("push", "quarantined"), "engines that failed"),
            ),
        ),
        Panel(
            title="Share of time with closed gates", unit="percentunit", queries=(Query(newest("push", "stall_share")),)
        ),
        Panel(
            title="Difference of log-probabilities, nats",
            queries=(
                Query(newest("step", "mismatch", where='name="mean_abs_log_ratio"'), "newest step"),
                Query(f"time() - {newest('mismatch_alarm', 'time_s')}", "seconds since an alarm"),
            ),
        ),
    ),
)
DASHBOARDS: Final = (OVERVIEW, ROLLOUTS, ENGINES)
