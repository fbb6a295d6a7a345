"""Plot of a run: its success, the staleness of its data, and a breakdown of its time.

Invariant: the plot depends only on the metrics records, so that `reward.png` can be redrawn from metrics.jsonl.

A record is a mapping with "kind" and, by kind:
- "evaluation": `step`, `success` (share in [0, 1]), `answers` (the number of answers); the one with the lowest step is
  the base.
- "step": `step`, `reward`, `staleness` (mapping from staleness, as a string or number, to a number of trajectories) and
  the learner's times `step_s`, `idle_s` and `push_s`, in seconds.
- "rollout_phases": mean seconds a rollout spent in each phase, by its name: those of `ROLLOUT_PHASES`, services
  (`service.NAME`) and any other.
Other kinds and fields are ignored.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.actors.record.files.metrics import read_metrics

Record = Mapping[str, Any]

ROLLOUT_PHASES = ("queue", "boot", "prepare", "agent", "evaluate")
LEARNER_PHASES = ("step", "idle", "push")
WATER, DEEP, STONE, AMBER, INK, MIST = "#2a7fb8", "#0b3c5d", "#9aa5ad", "#e0912f", "#22303a", "#e8edf0"
OF_RECORD = frozenset({"kind", "time_s", "rollouts"})
"""Fields of a "rollout_phases" record that are no phases."""
PHASE_COLORS = {
    "queue": "#c9d3d8", "boot": "#7fb7be", "prepare": "#58a4b0", "agent": WATER, "evaluate": DEEP,
    "step": DEEP, "idle": MIST, "push": AMBER,
}  # fmt: skip


def reward_png(metrics: Sequence[Record], out: Path) -> None:
    """Draw three panels into `out` (PNG, 1,650 x 525 pixels). Needs matplotlib (extra `cpu`)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.2, h_pad=0.2, wspace=0.04)
    figure = Figure(figsize=(16.5, 5.25), dpi=100, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    learned, stale, time = figure.subplots(1, 3, width_ratios=(1.35, 0.9, 1.1))
    draw_success(learned, metrics)
    draw_staleness(stale, metrics)
    draw_time(time, metrics)
    for axes in (learned, stale, time):
        axes.set_title(axes.get_title(), loc="left", fontsize=13, fontweight="bold", color=INK, pad=12)
        axes.title.set_text("")
        if len(axes.get_xticks()):
            axes.grid(axis="y", color=MIST, linewidth=0.9)
        axes.set_axisbelow(True)
        axes.tick_params(colors=INK, length=0, labelsize=10)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(STONE)
    time.spines["bottom"].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def draw_success(axes: Any, metrics: Sequence[Record]) -> None:
    """Draw held-out success over steps with its 95 % interval (Wilson 1927), the base as a dashed line, and the
    training reward behind it."""
    steps = sorted(_of_kind(metrics, "step"), key=lambda record: record["step"])
    points = sorted(_of_kind(metrics, "evaluation"), key=lambda record: record["step"])
    if steps:
        xs, ys = [record["step"] for record in steps], [record["reward"] for record in steps]
        # Rewards may be any numbers: those outside [0, 1] get a scale of their own.
        fits = min(ys) >= 0 and max(ys) <= 1
        rewards = axes if fits else axes.twinx()
        rewards.plot(xs, ys, color=STONE, alpha=0.35, linewidth=1)
        means = [sum(ys[max(0, i - 4) : i + 1]) / min(5, i + 1) for i in range(len(ys))]
        rewards.plot(xs, means, color=STONE, linewidth=1.6)
        label = "training reward (mean of 5 steps)" if fits else "training reward (mean of 5 steps, right scale)"
        axes.plot([], [], color=STONE, linewidth=1.6, label=label)
    if points:
        xs = [record["step"] for record in points]
        bounds = [_wilson(record["success"], record["answers"]) for record in points]
        axes.fill_between(
            xs, [low for low, _ in bounds], [high for _, high in bounds], color=WATER, alpha=0.15, linewidth=0
        )
        axes.plot(
            xs,
            [p["success"] for p in points],
            color=WATER,
            linewidth=2.4,
            marker="o",
            markersize=6,
            label="held-out success",
        )
        base, last = points[0], points[-1]
        axes.axhline(
            base["success"], color=AMBER, linewidth=1.4, linestyle=(0, (5, 3)), label=f"base {base['success']:.0%}"
        )
        axes.annotate(
            f"{last['success']:.0%}", (last["step"], last["success"]), xytext=(-4, 10), textcoords="offset points",
            ha="right", color=DEEP, fontsize=14, fontweight="bold",
        )  # fmt: skip
    axes.set(ylim=(0, 1.04), xlabel="version (optimizer steps)", title="Success on held-out tasks")
    axes.yaxis.set_major_formatter(lambda value, _position: f"{value:.0%}")
    _legend(axes, steps or points, "lower right")


def draw_staleness(axes: Any, metrics: Sequence[Record]) -> None:
    """Draw the staleness distribution of the trained trajectories."""
    counts: Counter[int] = Counter()
    for record in _of_kind(metrics, "step"):
        for staleness, number in record.get("staleness", {}).items():
            counts[int(staleness)] += int(number)
    axes.set(xlabel="staleness (updates)", ylabel="share of trained trajectories", title="Staleness")
    total = sum(counts.values())
    if not total:
        return
    xs = list(range(max(counts) + 1))
    bars = axes.bar(xs, [counts[x] / total for x in xs], color=WATER, width=0.72)
    axes.bar_label(bars, [f"{counts[x] / total:.0%}" for x in xs], padding=3, color=INK, fontsize=9)
    mean = sum(x * n for x, n in counts.items()) / total
    axes.axvline(mean, color=AMBER, linewidth=1.6, linestyle=(0, (5, 3)), label=f"mean {mean:.2f}")
    axes.set_xticks(xs)
    axes.yaxis.set_major_formatter(lambda value, _position: f"{value:.0%}")
    axes.margins(y=0.14)
    _legend(axes, [mean], "upper right")


def draw_time(axes: Any, metrics: Sequence[Record]) -> None:
    """Draw the mean seconds per rollout and per learner step, each as a single stacked bar of shares."""
    records = _of_kind(metrics, "rollout_phases")
    others = {field for record in records for field in record} - OF_RECORD - set(ROLLOUT_PHASES)
    rollout = _means(records, {phase: phase for phase in (*ROLLOUT_PHASES, *sorted(others))})
    learner = _means(_of_kind(metrics, "step"), {phase: f"{phase}_s" for phase in LEARNER_PHASES})
    axes.set(xlim=(0, 1), ylim=(-0.6, 1.5), title="Where the time went")
    labels = []
    for y, name, parts in ((1, "rollout", rollout), (0, "learner step", learner)):
        total = sum(parts.values())
        labels.append(f"{name}\n{total:.2f} s" if total else f"{name}\nno data")
        if not total:
            continue
        left, small = 0.0, []
        for phase, seconds in parts.items():
            share, middle = seconds / total, left + seconds / total / 2
            fill = PHASE_COLORS.get(phase, STONE)
            axes.barh(y, share, left=left, height=0.46, color=fill, edgecolor="white", linewidth=1.5)
            # A longer name needs a wider part of the bar.
            if share >= max(0.12, 0.017 * len(phase)):
                color = INK if phase in ("idle", "queue", "boot", "push") else "white"
                axes.text(middle, y, f"{phase}\n{share:.0%}", ha="center", va="center", color=color, fontsize=9)
            else:
                small.append(f"{phase} {share:.0%}")
            left += share
        note = "also: " + ", ".join(small) if small else ""
        axes.text(0, y - 0.36, note, color=INK, alpha=0.7, fontsize=9, va="center")
    axes.set_yticks([1, 0], labels, color=INK)
    axes.set_xticks([])


def _of_kind(metrics: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in metrics if record.get("kind") == kind]


def _means(records: Sequence[Record], fields: Mapping[str, str]) -> dict[str, float]:
    sums = {name: sum(float(record.get(field, 0.0)) for record in records) for name, field in fields.items()}
    return {name: total / len(records) for name, total in sums.items()} if records else {}


def _wilson(share: float, answers: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % interval of a share (E. B. Wilson, J. Am. Stat. Assoc. 22, 1927, p. 209)."""
    if answers < 1:
        return share, share
    scale = 1 + z * z / answers
    center = (share + z * z / (2 * answers)) / scale
    half = z * math.sqrt(share * (1 - share) / answers + z * z / (4 * answers * answers)) / scale
    return center - half, center + half


def _legend(axes: Any, drawn: Sequence[object], place: str) -> None:
    if drawn:
        axes.legend(loc=place, frameon=False, fontsize=9, labelcolor=INK)


if __name__ == "__main__":
    reward_png(read_metrics(Path(sys.argv[1])), Path(sys.argv[2]))
