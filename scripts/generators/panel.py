"""The picture docs/panel.svg: the live panel of `headrace run`, recorded in the middle of a quickstart."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from headrace.actors.run.progress import Progress, panel

PATH = Path(__file__).resolve().parents[2] / "docs" / "panel.svg"
TITLE = "headrace run scripts/recipes/quickstart.toml"
SNAPSHOT = Progress(
    phase="training",
    step=23,
    total_steps=40,
    version="1.23",
    elapsed_s=135.27,
    reward=0.87,
    held_out_success=0.94,
    mean_staleness=0.66,
    rollouts_in_flight=48,
    sandboxes=33,
    tokens_per_s=264.62,
    learner_idle_share=0.95,
    held_up_by="boot 100% of 8, 0.42 s a rollout",
    rewards=(0.83, 0.78, 0.66, 0.91, 0.7, 0.88, 0.97, 0.78, 0.89, 0.73, 0.95, 0.97, 0.97, 0.95, 0.92, 0.94),
)
"""Progress recorded on 2026-11-23 on 2 cores (seed 0), with the last 16 rewards."""


def render() -> dict[Path, str]:
    """Return the picture by its path: the same renderer as on a terminal, with fixed ids."""
    console = Console(record=True, width=122, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(panel(SNAPSHOT))
    return {PATH: console.export_svg(title=TITLE, theme=MONOKAI, unique_id="panel") + "\n"}
