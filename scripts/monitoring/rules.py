"""Recording rules and alerts over the exported metrics, with the series for which each alert fires and does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headrace.actors.telemetry.prometheus import table
from headrace.actors.telemetry.prometheus.records import name_of

RUN: Final = "job, instance"
"""Labels that tell runs apart: each run has an exporter of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recording rule."""

    name: str
    query: str


@dataclass(frozen=True, slots=True)
class Series:
    """A made series of promtool: its sample with labels, and its values in promtool's notation, one a minute."""

    sample: str
    values: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alert. After `after_minutes` of `firing` it fires with `labels` and the summary `told`; of `quiet` it does
    not."""

    name: str
    query: str
    lasting: str
    severity: str
    summary: str
    advice: str
    labels: dict[str, str]
    after_minutes: int
    told: str
    firing: tuple[Series, ...]
    quiet: tuple[Series, ...]


def share(part: str, whole: str) -> str:
    """Return the query for a part of a whole, by run."""
    return f"sum by ({RUN}) ({part}) / sum by ({RUN}) ({whole})"


ATTEMPTS: Final = table.ATTEMPTS.sample
INFRA: Final = f'{ATTEMPTS}{{cause=~"infra|evaluator|poison"}}'
LEARNER: Final = f'{name_of("stations", "stations")}{{name="learner",field="in_use"}}'
DRIVEN: Final = f"on ({RUN}) ({table.DRIVEN.sample} == 1)"

ATTEMPT_RATE: Final = Recording(
    name="run:headrace_attempts:rate15m", query=f"sum by ({RUN}, cause, purpose) (rate({ATTEMPTS}[15m]))"
)
INFRA_SHARE: Final = Recording(
    name="run:headrace_infra:ratio_rate15m", query=share(f"rate({INFRA}[15m])", f"rate({ATTEMPTS}[15m])")
)
LEARNER_BUSY: Final = Recording(
    name="run:headrace_learner_busy:avg15m",
    query=f"max by ({RUN}) (avg_over_time({LEARNER}[15m]))",
)
PART_P95: Final = Recording(
    name="run:headrace_part_seconds:p95_rate15m",
    query=f"histogram_quantile(0.95, sum by ({RUN}, part, purpose, le) (rate({table.PART_S.name}_bucket[15m])))",
)
ATTEMPT_P95: Final = Recording(
    name="run:headrace_attempt_seconds:p95_rate15m",
    query=f"histogram_quantile(0.95, sum by ({RUN}, purpose, le) (rate({table.ATTEMPT_S.name}_bucket[15m])))",
)
WASTE: Final = Recording(
    name="run:headrace_waste:ratio_rate1h",
    query=share(f"rate({table.WASTED_SANDBOX_S.sample}[1h])", f'rate({table.SANDBOX_S.sample}{{purpose="train"}}[1h])'),
)
DISK: Final = Recording(
    name="run:headrace_disk_free:ratio", query=f"{table.DISK_FREE.sample} / {table.DISK_SIZE.sample}"
)
RECORDINGS: Final = (ATTEMPT_RATE, INFRA_SHARE, LEARNER_BUSY, PART_P95, ATTEMPT_P95, WASTE, DISK)

DRIVING: Final = Series(table.DRIVEN.sample, "1x90")

STUCK: Final = Alert(
    name="HeadraceStuckRollouts",
    query=f"{table.STUCK.sample} > 0",
    lasting="10m",
    severity="warning",
    summary="{{ $value }} rollouts have run for more than three times the 95th percentile of their cohort",
    advice="headrace status RUN --running lists them, the oldest first, with the part that each is in",
    labels={},
    after_minutes=20,
    told="2 rollouts have run for more than three times the 95th percentile of their cohort",
    firing=(Series(table.STUCK.sample, "0 0 2x30"),),
    # Each is over before ten minutes have passed.
    quiet=(Series(table.STUCK.sample, "0 3x7 0 3x7 0x20"),),
)
STARVING: Final = Alert(
    name="HeadraceLearnerStarving",
    query=f"{LEARNER_BUSY.name} < 0.2 and {DRIVEN}",
    lasting="15m",
    severity="warning",
    summary="the learner was busy for {{ $value | humanizePercentage }} of the last 15 minutes",
    advice="headrace report RUN names the station that limits the run, headrace trace slow RUN why rollouts are slow",
    labels={},
    after_minutes=40,
    told="the learner was busy for 5% of the last 15 minutes",
    firing=(Series(LEARNER, "0.05x60"), DRIVING),
    # The run is over.
    quiet=(
        Series(LEARNER, "0.05x60"),
        Series(table.DRIVEN.sample, "1 1 0x60"),
    ),
)
SILENT: Final = Alert(
    name="HeadraceEngineSilent",
    query=(
        f'sum by ({RUN}, engine) ({table.ENGINE_STATE.sample}{{state="serving"}}) == 1'
        f" unless on ({RUN}, engine) (sum by ({RUN}, engine) (increase({table.ENGINE_ATTEMPTS.sample}[30m])) > 0)"
        f" and on ({RUN}) (sum by ({RUN}) (increase({ATTEMPTS}[30m])) > 0) and {DRIVEN}"
    ),
    lasting="30m",
    severity="critical",
    summary="engine {{ $labels.engine }} is in service, but none of its turns is in an attempt of the last 30 minutes",
    advice="headrace status RUN --engines shows its state; its log is in engines/ of the run's folder",
    labels={"engine": "engine-1"},
    after_minutes=80,
    told="engine engine-1 is in service, but none of its turns is in an attempt of the last 30 minutes",
    firing=(
        Series(f'{table.ENGINE_STATE.sample}{{engine="engine-0",state="serving"}}', "1x90"),
        Series(f'{table.ENGINE_STATE.sample}{{engine="engine-1",state="serving"}}', "1x90"),
        Series(f'{table.ENGINE_ATTEMPTS.sample}{{engine="engine-0"}}', "0+5x90"),
        Series(f'{table.ENGINE_ATTEMPTS.sample}{{engine="engine-1"}}', "0+5x5 25x85"),
        Series(f'{ATTEMPTS}{{cause="solved",purpose="train"}}', "0+5x90"),
        DRIVING,
    ),
    # One works, one is quarantined, and one works little.
    quiet=(
        Series(f'{table.ENGINE_STATE.sample}{{engine="engine-0",state="serving"}}', "1x90"),
        Series(f'{table.ENGINE_STATE.sample}{{engine="engine-1",state="quarantined"}}', "1x90"),
        Series(f'{table.ENGINE_STATE.sample}{{engine="engine-2",state="serving"}}', "1x90"),
        Series(f'{table.ENGINE_ATTEMPTS.sample}{{engine="engine-0"}}', "0+5x90"),
        Series(f'{table.ENGINE_ATTEMPTS.sample}{{engine="engine-2"}}', "0x20 1x20 2x20 3x30"),
        Series(f'{ATTEMPTS}{{cause="solved",purpose="train"}}', "0+5x90"),
        DRIVING,
    ),
)
INFRA_HIGH: Final = Alert(
    name="HeadraceInfraShare",
    query=f"{INFRA_SHARE.name} > 0.1",
    lasting="15m",
    severity="warning",
    summary="{{ $value | humanizePercentage }} of the attempts fail because of infrastructure",
    advice=f"{table.HOST_ATTEMPTS.sample} by host and cause shows whether one host fails; headrace report RUN has the "
    "reasons",
    labels={},
    after_minutes=45,
    told="20% of the attempts fail because of infrastructure",
    firing=(
        Series(f'{ATTEMPTS}{{cause="infra",purpose="train"}}', "0+2x90"),
        Series(f'{ATTEMPTS}{{cause="failed",purpose="train"}}', "0+8x90"),
    ),
    quiet=(
        Series(f'{ATTEMPTS}{{cause="infra",purpose="train"}}', "0+2x90"),
        Series(f'{ATTEMPTS}{{cause="failed",purpose="train"}}', "0+98x90"),
    ),
)
GIB: Final = 2**30
FULL: Final = Alert(
    name="HeadraceDisk",
    query=f"{DISK.name} < 0.05 or (predict_linear({table.DISK_FREE.sample}[1h], 4 * 3600) < 0 and {DRIVEN})",
    lasting="5m",
    severity="critical",
    summary="the disk of the run's folder `{{ $labels.folder }}` is nearly full, or will be within four hours",
    advice="lower telemetry.keep_bytes, which the limits of all records follow, or free space: docs/reliability.md",
    labels={"folder": "state"},
    after_minutes=80,
    told="the disk of the run's folder `state` is nearly full, or will be within four hours",
    firing=(
        # 100 GiB at first, and one less each minute.
        Series(f'{table.DISK_FREE.sample}{{folder="state"}}', f"{100 * GIB}-{GIB}x90"),
        Series(f'{table.DISK_SIZE.sample}{{folder="state"}}', f"{200 * GIB}x90"),
        DRIVING,
    ),
    quiet=(
        Series(f'{table.DISK_FREE.sample}{{folder="state"}}', f"{100 * GIB}-1048576x90"),
        Series(f'{table.DISK_SIZE.sample}{{folder="state"}}', f"{200 * GIB}x90"),
        DRIVING,
    ),
)
DROPPED: Final = Alert(
    name="HeadraceSpansDropped",
    query=f'sum by ({RUN}, reason) (increase({table.SPANS_LOST.sample}{{reason!~"removed_.*"}}[15m])) > 0',
    lasting="0m",
    severity="warning",
    summary="{{ $value }} spans were lost in 15 minutes ({{ $labels.reason }})",
    advice="docs/run_directory.md has the reasons; queue_full: the disk of the run directory is too slow",
    labels={"reason": "queue_full"},
    after_minutes=20,
    told="30 spans were lost in 15 minutes (queue_full)",
    firing=(Series(f'{table.SPANS_LOST.sample}{{reason="queue_full"}}', "0x14 30x60"),),
    # Old spans are removed to keep the limit.
    quiet=(Series(f'{table.SPANS_LOST.sample}{{reason="removed_ordinary"}}', "0+1000x60"),),
)
ALERTS: Final = (STUCK, STARVING, SILENT, INFRA_HIGH, FULL, DROPPED)
