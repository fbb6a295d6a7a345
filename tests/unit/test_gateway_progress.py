"""Progress display and plot of a run."""

from __future__ import annotations

import io
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from headrace.actors.run.plots import draw_success, draw_time, reward_png
from headrace.actors.run.progress import Progress, ProgressDisplay, panel, plain_line, sparkline, starting


def progress(elapsed_s: float = 83.0) -> Progress:
    return Progress(
        phase="train",
        step=12,
        total_steps=40,
        version="1.12",
        elapsed_s=elapsed_s,
        reward=0.625,
        held_out_success=0.5,
        mean_staleness=1.25,
        rollouts_in_flight=96,
        sandboxes=12,
        tokens_per_s=1234.5,
        learner_idle_share=0.07,
        rewards=(0.1, 0.5, 1.0),
    )


def test_the_plain_progress_line_has_all_values_in_order() -> None:
    assert plain_line(progress()) == (
        "01:23 train  step 12/40  version 1.12  reward 0.62  held-out 50%  staleness 1.25  rollouts 96  sandboxes 12  "
        "tokens/s 1234  learner idle 7%"
    )


def test_failures_are_shown_at_the_end_of_the_line() -> None:
    untrained = "20% of the sampled tokens are trained (abandoned)"
    collapsed = ("write collapsed at step 3: 52% of the answers in its last 3 steps are invalid",)
    failing = replace(progress(), infra_failures=3, parser_fails=True, untrained=untrained, collapsed=collapsed)
    shown = f"infra 3  parser reads no calls  coverage: {untrained}  collapsed: {collapsed[0]}"
    assert plain_line(failing) == f"{plain_line(progress())}  {shown}"
    out = io.StringIO()
    Console(file=out, width=300).print(panel(failing))
    assert "infra 3" in out.getvalue()
    assert "parser reads no calls" in out.getvalue()
    assert "(abandoned)" in out.getvalue()
    assert "52% of the answers" in out.getvalue()


def test_unknown_values_are_shown_as_a_dash() -> None:
    line = plain_line(Progress(phase="start", step=0, total_steps=40, version="1.0", elapsed_s=3700.0))
    assert line.startswith("1:01:40 start")
    assert "reward -" in line


def test_without_a_terminal_lines_are_written_at_intervals() -> None:
    out = io.StringIO()
    with ProgressDisplay(Console(file=out, force_terminal=False), plain_interval_s=10.0) as display:
        for elapsed_s in (0.0, 3.0, 9.9, 10.0, 12.0, 25.0):
            display.show(progress(elapsed_s))
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["00:00", "00:10", "00:25"]


def test_the_panel_shows_reward_and_run_state() -> None:
    out = io.StringIO()
    Console(file=out, force_terminal=True, width=160).print(panel(progress()))
    text = out.getvalue()
    assert "12/40" in text
    assert "learner idle" in text


def test_the_panel_is_redrawn_in_place_on_a_terminal() -> None:
    out = io.StringIO()
    with ProgressDisplay(Console(file=out, force_terminal=True, width=160)) as display:
        display.show(progress())
        display.show(progress())
    assert "\x1b[1A" in out.getvalue()


def test_sparklines_show_the_last_values_as_bars() -> None:
    assert sparkline((0.0, 0.5, 1.0)) == "▁▅█"
    assert sparkline((-1.0, 0.0, 0.5, 1.0, 2.0)) == "▁▃▅▆█"
    assert sparkline(()) == ""
    assert len(sparkline((0.5,) * 100)) == 16


def test_rewards_outside_0_to_1_get_their_own_scale() -> None:
    metrics = [{"kind": "step", "step": step, "reward": reward} for step, reward in ((1, -3.0), (2, 0.5), (3, 250.0))]
    metrics += [{"kind": "evaluation", "step": 0, "success": 0.25, "answers": 256}]
    figure = Figure()
    draw_success(figure.subplots(), metrics)
    success, rewards = figure.axes
    assert success.get_ylim() == (0, 1.04)
    low, high = rewards.get_ylim()
    assert low <= -3.0 < 250.0 <= high


def test_the_time_of_a_rollout_includes_its_queue_and_services() -> None:
    metrics = [
        {"kind": "rollout_phases", "time_s": 9.0, "rollouts": 2.0, "queue": 3.0, "agent": 2.0, "service.wiki": 3.0},
        {"kind": "rollout_phases", "time_s": 9.5, "rollouts": 2.0, "queue": 5.0, "boot": 1.0, "agent": 2.0},
    ]
    axes = Figure().subplots()
    draw_time(axes, metrics)
    shown = [text.get_text() for text in axes.texts]
    assert shown == ["queue\n50%", "agent\n25%", "also: boot 6%, prepare 0%, evaluate 0%, service.wiki 19%"]
    assert axes.get_yticklabels()[0].get_text() == "rollout\n8.00 s"


def test_a_plot_is_drawn_from_any_subset_of_the_metrics(tmp_path: Path) -> None:
    metrics: list[dict[str, object]] = [
        {"kind": "evaluation", "step": 0, "success": 0.25, "answers": 256},
        {"kind": "step", "step": 1, "reward": 0.3, "staleness": {"0": 5, "2": 3}, "step_s": 2.0, "idle_s": 1.0},
        {"kind": "rollout_phases", "agent": 1.0, "queue": 0.5},
        {"kind": "something else"},
        {"kind": "evaluation", "step": 1, "success": 1.0, "answers": 0},
    ]
    for number in range(len(metrics) + 1):
        out = tmp_path / "pictures" / f"{number}.png"
        reward_png(metrics[:number], out)
        data = out.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert struct.unpack(">II", data[16:24]) == (1650, 525)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_start_is_reported_before_it_is_complete(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    with starting("Ray", console=Console(file=out, force_terminal=terminal)):
        assert "starting Ray" in out.getvalue()
    with starting("Ray", quiet=True, console=Console(file=(silent := io.StringIO()), force_terminal=terminal)):
        assert not silent.getvalue()
