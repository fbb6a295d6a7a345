"""The live progress display of a run: a frozen snapshot, shown as a panel or as log lines.

Invariants:
- Rendering reads nothing but the snapshot.
- On a terminal a panel is redrawn in place; otherwise a plain line is written at most once every `plain_interval_s`
  seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

PARSER_FAILS = "reads no calls"
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Snapshot of a run. Shares are in [0, 1]; None means that a value is not known yet. `rewards` are the mean rewards
    of the steps so far; `parser_fails` means that no tool call in the last turns with call markup could be parsed;
    `untrained` says that little of what is sampled is trained, and why; `collapsed` are the families and sources whose
    answers are mostly invalid or all fail; `held_up_by` is the station that is full;
    `absent` are the actors that do not answer."""

    phase: str
    step: int
    total_steps: int
    version: str
    elapsed_s: float
    reward: float | None = None
    held_out_success: float | None = None
    mean_staleness: float | None = None
    rollouts_in_flight: int = 0
    sandboxes: int = 0
    tokens_per_s: float = 0.0
    learner_idle_share: float | None = None
    infra_failures: int = 0
    parser_fails: bool = False
    untrained: str = ""
    collapsed: tuple[str, ...] = ()
    held_up_by: str = ""
    rewards: tuple[float, ...] = ()
    absent: tuple[str, ...] = ()


def plain_line(progress: Progress) -> str:
    """Return one log line: `name value` pairs, always in the same order."""
    parts = [
        f"{_clock(progress.elapsed_s)} {progress.phase}",
        f"step {progress.step}/{progress.total_steps}",
        f"version {progress.version}",
        f"reward {_number(progress.reward)}",
        f"held-out {_percent(progress.held_out_success)}",
        f"staleness {_number(progress.mean_staleness)}",
        f"rollouts {progress.rollouts_in_flight}",
        f"sandboxes {progress.sandboxes}",
        f"tokens/s {progress.tokens_per_s:.0f}",
        f"learner idle {_percent(progress.learner_idle_share)}",
    ]
    if progress.infra_failures:
        parts.append(f"infra {progress.infra_failures}")
    if progress.parser_fails:
        parts.append(f"parser {PARSER_FAILS}")
    if progress.untrained:
        parts.append(f"coverage: {progress.untrained}")
    if progress.collapsed:
        parts.append(f"collapsed: {', '.join(progress.collapsed)}")
    if progress.held_up_by:
        parts.append(f"full: {progress.held_up_by}")
    if progress.absent:
        parts.append(f"absent: {', '.join(progress.absent)}")
    return "  ".join(parts)


def panel(progress: Progress) -> RenderableType:
    """Return two lines for a terminal: a progress bar with reward and version, then the state of the run."""
    top = Table.grid(padding=(0, 2))
    top.add_row(
        Text(progress.phase, style="bold cyan"),
        ProgressBar(total=max(1, progress.total_steps), completed=progress.step, width=24),
        Text(f"{progress.step}/{progress.total_steps}", style="bold"),
        _pair("version", progress.version),
        _pair("reward", _number(progress.reward), "bold green"),
        Text(sparkline(progress.rewards), style="green"),
        _pair("held-out", _percent(progress.held_out_success), "bold green"),
        Text(_clock(progress.elapsed_s), style="dim"),
    )
    state = Table.grid(padding=(0, 2))
    cells = [
        _pair("rollouts", str(progress.rollouts_in_flight)),
        _pair("sandboxes", str(progress.sandboxes)),
        _pair("staleness", _number(progress.mean_staleness)),
        _pair("tokens/s", f"{progress.tokens_per_s:.0f}"),
        _pair("learner idle", _percent(progress.learner_idle_share)),
    ]
    if progress.infra_failures:
        cells.append(_pair("infra", str(progress.infra_failures), "bold red"))
    if progress.parser_fails:
        cells.append(_pair("parser", PARSER_FAILS, "bold red"))
    if progress.untrained:
        cells.append(_pair("coverage", progress.untrained, "bold red"))
    if progress.collapsed:
        cells.append(_pair("collapsed", ", ".join(progress.collapsed), "bold red"))
    if progress.held_up_by:
        cells.append(_pair("full", progress.held_up_by, "bold yellow"))
    if progress.absent:
        cells.append(_pair("absent", ", ".join(progress.absent), "bold red"))
    state.add_row(*cells)
    return Group(top, state)


def sparkline(values: tuple[float, ...], width: int = 16) -> str:
    """Return the last `width` values as bars on a scale from 0 to 1, or a wider scale if the values require it."""
    shown = values[-width:]
    low, high = min((0.0, *shown)), max((1.0, *shown))
    return "".join(BARS[min(len(BARS) - 1, int((value - low) / (high - low) * len(BARS)))] for value in shown)


def _pair(name: str, value: str, style: str = "bold") -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, style))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _clock(elapsed_s: float) -> str:
    minutes, seconds = divmod(int(elapsed_s), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes:02d}:{seconds:02d}"


class ProgressDisplay:
    """Context manager that displays snapshots on standard error. `show` may be called at any rate."""

    def __init__(self, console: Console | None = None, *, plain_interval_s: float = 10.0) -> None:
        self._console = console or Console(stderr=True)
        self._plain_interval_s = plain_interval_s
        self._live: Live | None = None
        self._last_plain_s: float | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, progress: Progress) -> None:
        """Redraw the panel; without a terminal, write a line if `plain_interval_s` of `elapsed_s` have passed."""
        if self._live is not None:
            self._live.update(panel(progress), refresh=True)
        elif self._last_plain_s is None or progress.elapsed_s - self._last_plain_s >= self._plain_interval_s:
            self._last_plain_s = progress.elapsed_s
            self.say(plain_line(progress))

    def say(self, line: str) -> None:
        """Print a line as it is; a panel stays below it."""
        self._console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


@contextmanager
def starting(what: str, *, quiet: bool = False, console: Console | None = None) -> Iterator[None]:
    """Report that something is starting while the block runs: with a spinner on a terminal, otherwise with one line."""
    screen, line = console or Console(stderr=True), f"starting {what} ..."
    if quiet:
        yield
    elif screen.is_terminal and not screen.is_dumb_terminal:
        with Live(Spinner("dots", text=line), console=screen, transient=True) as live:
            # Now, since the thread that redraws may have to wait for an import.
            live.refresh()
            yield
    else:
        screen.print(line, markup=False, highlight=False, soft_wrap=True)
        yield
