"""The picture of a search, which plots step time against staleness, waste and length bias.

Invariants:
- The picture depends only on the trials.
- The page is self-contained: style and picture are embedded.
- Text from recordings, paths and rules is escaped.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

from headrace.actors.run.plots import AMBER, DEEP, INK, MIST, STONE, WATER
from headrace.actors.simulation.tuning.result import COLUMNS, TuningResult, cells

if TYPE_CHECKING:
    from headrace.actors.simulation.tuning.search import SearchResult
    from headrace.actors.simulation.tuning.trial import Trial

    Figure = Callable[[Trial], float]

PANELS: Final[tuple[tuple[str, str, Figure], ...]] = (
    ("Staleness", "mean staleness (updates)", lambda trial: trial.mean_staleness),
    ("Waste", "share of agents' time that trains nothing", lambda trial: trial.waste),
    ("Length bias", "slowest decile missing from training", lambda trial: 1.0 - trial.slow_share),
)
MARKERS: Final = {"carry": "o", "abort": "X"}
BOUNDS: Final = ("#9ccfe7", WATER, DEEP)
"""Colors of the staleness bounds, in ascending order of the bounds."""
SPARE: Final = 1.6
"""Settings slower than the chosen one by more than this factor are left out, except for the recorded one."""


def pareto_png(searched: SearchResult) -> bytes:
    """Draw three panels (PNG, 1,650 x 640 pixels). Needs matplotlib (extra `cpu`)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.2, h_pad=0.15, wspace=0.05, rect=(0, 0.12, 1, 0.88))
    figure = Canvas(figsize=(16.5, 6.4), dpi=100, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    for axes, (title, label, of) in zip(figure.subplots(1, 3), PANELS, strict=True):
        _panel(axes, searched, of)
        axes.set_ylabel(label, color=INK, fontsize=11)
        axes.set_title(title, loc="left", fontsize=14, fontweight="bold", color=INK, pad=12)
        axes.grid(color=MIST, linewidth=0.9)
        axes.set_axisbelow(True)
        axes.margins(0.08, 0.12)
        axes.tick_params(colors=INK, length=0, labelsize=10)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color(STONE)
        if title != "Staleness":
            axes.yaxis.set_major_formatter(lambda value, _position: f"{value:.0%}")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=5, frameon=False, fontsize=11, labelcolor=INK)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _panel(axes: Any, searched: SearchResult, of: Figure) -> None:
    chosen = searched.chosen
    limit_s = max(SPARE * chosen.step_s, 1.05 * searched.recorded.step_s)
    screened = [trial for trial in searched.screened if trial.step_s <= limit_s]
    finals = [trial for trial in searched.finals if trial.step_s <= limit_s]
    axes.scatter(*_points(screened, of), s=22, color=STONE, alpha=0.45, linewidths=0, label="screened only")
    xs, ys = _points(panel_front(finals, of), of)
    axes.step(xs, ys, where="post", color=DEEP, linewidth=1.2, alpha=0.6, label="nothing better in both")
    bounds = sorted({trial.candidate.max_staleness for trial in finals})
    for place, bound in enumerate(bounds):
        color = BOUNDS[min(place, len(BOUNDS) - 1)]
        for unfinished, marker in MARKERS.items():
            trials = [trial for trial in finals if trial.candidate.unfinished == unfinished]
            trials = [trial for trial in trials if trial.candidate.max_staleness == bound]
            label = f"bound {bound}, {unfinished}"
            style: dict[str, Any] = {
                "s": 70,
                "marker": marker,
                "color": color,
                "edgecolors": "white",
                "linewidths": 0.8,
            }
            axes.scatter(*_points(trials, of), **style, label=label if trials else None)
    for trial, name, color, marker, size in (
        (searched.recorded, "recorded setting", INK, "s", 95),
        (chosen, f"chosen: {chosen.candidate.label()}", AMBER, "*", 320),
    ):
        axes.scatter([trial.step_s], [of(trial)], s=size, marker=marker, color=color, zorder=5, label=name)
    axes.set_xlabel("predicted time of a step (s), left is faster", color=INK, fontsize=11)


def panel_front(trials: Sequence[Trial], of: Figure) -> list[Trial]:
    """Return the trials that no other trial dominates in both of a panel's values, fastest first."""
    front: list[Trial] = []
    for trial in sorted(trials, key=lambda trial: (trial.step_s, of(trial))):
        if not front or of(trial) < of(front[-1]):
            front.append(trial)
    return front


def _points(trials: Sequence[Trial], of: Figure) -> tuple[list[float], list[float]]:
    return [trial.step_s for trial in trials], [of(trial) for trial in trials]


STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22303a; max-width: 1280px; margin: 2rem auto; padding: 0 1rem }
img { width: 100% } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #e8edf0 }
th:nth-child(2), td:nth-child(2) { text-align: left } tr.chosen { background: #fdf1e0; font-weight: 600 }
tr.recorded { background: #e8edf0 } pre { background: #f4f7f9; padding: 1rem; overflow-x: auto }
"""

LEGEND: Final = (
    "<p>&gt; chosen, = recorded, * on the Pareto front. slow decile: the slowest tenth's share of the trained "
    "rollouts, divided by 0.1. reward: mean reward of trained rollouts minus that of issued ones.</p>"
)


def page(tuned: TuningResult, png: bytes) -> str:
    """Return the page as HTML."""
    picture = base64.b64encode(png).decode()
    lines = "".join(f"<li>{escape(line)}</li>" for line in tuned.lines())
    failed = "".join(
        f"<li>{escape(failed.candidate.label())}: {escape(failed.reason)}</li>" for failed in tuned.searched.failed
    )
    sections = [
        f"<h1>headrace tune</h1><p>{escape(tuned.recording.source)}</p><ul>{lines}</ul>",
        f'<img alt="step time against staleness, waste and length bias" src="data:image/png;base64,{picture}">',
        f"<h2>To paste</h2><pre>{escape(tuned.toml())}</pre>",
        f"<h2>Settings</h2>{_table(tuned, tuned.finals())}",
        LEGEND,
        f"<h2>Screened with fewer steps</h2>{_table(tuned, tuned.searched.screened)}",
        f"<h2>Failed</h2><ul>{failed}</ul>" if failed else "",
    ]
    head = f'<meta charset="utf-8"><title>headrace tune</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(sections)}</body></html>\n'


def _table(tuned: TuningResult, trials: Sequence[Trial]) -> str:
    header = "".join(f"<th>{escape(name)}</th>" for name in ("", "setting", *COLUMNS))
    rows = []
    for trial in trials:
        mark = tuned.mark(trial)
        kind = {">": "chosen", "=": "recorded"}.get(mark, "")
        texts = "".join(f"<td>{escape(text)}</td>" for text in (mark, trial.candidate.label(), *cells(trial)))
        rows.append(f'<tr class="{kind}">{texts}</tr>')
    return f"<table><tr>{header}</tr>{''.join(rows)}</table>"
