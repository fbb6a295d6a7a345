"""The commands `headrace trace slow` and `show`, over a ledger that the store wrote."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from headrace.actors.cli.app import app
from headrace.actors.errors import ConfigError
from headrace.actors.telemetry.slow import advice
from headrace.actors.telemetry.slow.comparison import compare
from headrace.actors.telemetry.slow.reading import read_times
from headrace.actors.telemetry.slow.terminal_text import (
    chosen,
    place_of_rollout,
    slow_lines,
    timeline_lines,
    waterfall,
    waterfall_lines,
)
from headrace.actors.telemetry.slow.timeline_html import timeline_fragment
from headrace.actors.telemetry.slow.timelines import AttemptTimeline, lanes_of
from headrace.actors.telemetry.slow.verdicts import explain
from headrace.actors.telemetry.slow.waterfall_html import WIDTH, verdict_text, waterfall_fragment, waterfall_page
from headrace.buffer.errors import LedgerRefused
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.primitives.critical_path import Segment
from headrace.buffer.trajectories.breakdown import Breakdown
from headrace.buffer.trajectories.timeline import Merged, Timeline
from support import replay_cases as cases
from support.html_elements import Elements

ROOT = Path(__file__).parents[2]
CONFIG = cases.SMALL.model_copy(update={"group_size": 8, "batch_size": 64, "max_staleness": 4})


def spent(agent_s: float, boot_s: float, image: str) -> Breakdown:
    parts = {"boot": boot_s, "tool.bash": agent_s, "other": 0.1}
    return Breakdown(wall_s=sum(parts.values()), parts_s=parts, labels={"image": image, "agent": "shell"})


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    """Sixty-four rollouts, of which the five with another image took ten times as long to boot."""
    clock = [1_800_000_000.0]
    async with await ReplayStore.open(
        tmp_path, CONFIG, cases.tasks(8), run_id="r", seed=3, clock=lambda: clock[0]
    ) as store:
        version = await store.open_epoch(None)
        orders = await store.issue(64, version)
        for number, order in enumerate(orders):
            slow = number % 13 == 0
            breakdown = spent(4.0 + number % 5 / 10, 20.0 if slow else 2.0, "slow\x1b[2J" if slow else "quick")
            clock[0] = 1_800_000_000.0 + breakdown.wall_s
            await store.offer_many([replace(cases.result(order, version), breakdown=breakdown)])
    return tmp_path


async def test_slow_rollouts_are_named_with_part_factor_and_advice(run: Path) -> None:
    report = explain(read_times(run))
    verdicts = chosen(report, since=None, step=None)
    assert len(verdicts) == 5
    assert {verdict.causes for verdict in verdicts} == {("boot",)}
    assert {verdict.factor.text() if verdict.factor else "" for verdict in verdicts} == {"image slow\x1b[2J"}
    lines = slow_lines(report, verdicts, 1)
    assert lines[0] == "5 of 64 rollouts were slow"
    assert lines[1].startswith("5 of all 5 slow ones fall into one stretch: ")
    assert lines[2].startswith("cause: boot, image slow?[2J (lift 12.8, 5 of 5")
    assert sum("common factor" in line for line in lines[3:]) == 1, "one verdict was asked for"
    assert not any("\x1b" in line for line in lines)
    assert chosen(report, since=1, step=None) == []
    assert slow_lines(report, [], 1)[0] == "none of 64 rollouts was slow"
    unbounded = replace(verdicts[0], p95_s=math.inf)
    assert any("p95 unknown" in line for line in slow_lines(report, [unbounded], 1))
    assert "p95 unknown" in verdict_text(unbounded)
    document = report.to_json(verdicts[:1])
    assert (document["slow"], len(document["verdicts"]), document["verdicts"][0]["causes"]) == (5, 1, ("boot",))


async def test_a_waterfall_stands_beside_its_cohort(run: Path) -> None:
    times = read_times(run)
    slow = explain(times).verdicts[0].rollout_id
    row, typical, verdict = waterfall(times, place_of_rollout(times, slow))
    lines = waterfall_lines(row, typical, verdict)
    (boot,) = [line for line in lines if line.startswith("boot")]
    assert "20.000 s" in boot
    assert "p50    2.000" in boot
    assert boot.count("#") > 20
    assert any(line.startswith("tool.bash") for line in lines)
    assert lines[-3].startswith(f"{slow}.1  24.")
    assert "common factor: image slow?[2J" in lines[-2]


HOSTILE = '<script>alert(1)</script>\x00\u202e" onload=x'


async def test_a_waterfall_is_one_html_file_in_which_texts_of_an_agent_do_nothing(run: Path) -> None:
    times = read_times(run)
    row, typical, verdict = waterfall(times, place_of_rollout(times, explain(times).verdicts[0].rollout_id))
    hostile = replace(
        row,
        task=HOSTILE,
        parts_s={**row.parts_s, f"tool.{HOSTILE}": 3.0},
        labels={HOSTILE: HOSTILE, "tools": (HOSTILE, "x" * 10_000_000)},
    )
    calls = [Segment(f"tool.{HOSTILE}", 0.0, 3.0, 1, HOSTILE), Segment("tool.bash", 1.0, 2.0, 1, HOSTILE)]
    page = waterfall_page(hostile, typical, verdict, [attempt_of(*calls)], run="<b>")
    parsed = Elements(page)
    names = {name for name, _ in parsed.found}
    assert {"main", "table", "svg", "rect", "bdi"} <= names
    assert not names & {"script", "b", "img", "link", "a", "iframe", "object"}
    attributes = {name for _, attrs in parsed.found for name in attrs}
    assert not attributes & {"src", "href", "style", "onload"}
    assert len(page) < 20_000
    assert "\x00" not in page
    assert "\u202e" not in page
    assert "alert(1)" in parsed.text
    assert "Cause: boot; common factor image slow?[2J" in parsed.text
    assert [attrs["class"] for name, attrs in parsed.found if name == "tr" and attrs] == ["cause"]
    fragment = Elements(waterfall_fragment(hostile, typical))
    assert fragment.found[0] == ("div", {"class": "waterfall"})
    assert "Cause" not in fragment.text


def attempt_of(*segments: Segment, **more: Any) -> AttemptTimeline:
    end_s = max(each.end_s for each in segments)
    timeline = Timeline(segments=list(segments), **more)
    return AttemptTimeline(attempt=1, trace_id="", began_at_s=1e9, wall_s=end_s, timeline=timeline)


def test_a_timeline_shows_which_of_twenty_calls_took_a_minute() -> None:
    """The others ran beside it, two at a time, and some were merged."""
    beside = [Segment("tool.read", 3.0 * number, 3.0 * number + 3.0, 1, f"cat {number}") for number in range(19)]
    slow = Segment("tool.bash", 0.0, 60.0, 1, "pytest -x")
    hold = Segment("gate", 60.0, 70.0, 2)
    failed, booted = Segment("boot", 70.0, 71.0, 0, "host-1: BootFailed"), Segment("boot", 71.0, 80.0, 0, "host-2")
    segments = sorted([slow, *beside, hold, failed, booted], key=lambda each: each.start_s)
    attempt = attempt_of(*segments, merged={"own": Merged(7, 0.5)}, left_out=3)
    assert [(track, len(lane)) for track, lane in lanes_of(segments)] == [
        ("sandbox", 2),
        ("turns", 1),
        ("tools", 1),
        ("tools", 19),
    ]
    lines = timeline_lines(attempt)
    lanes = [line[13:-1] for line in lines if line[12:13] == "|"]
    assert [lane.strip() for lane in lanes[:3]] == ["b" * 12, "h" * 12, "t" * 72]
    assert re.fullmatch("(t{3,4}T{3,4}){9}t{3,4}", lanes[3].strip()), "calls that touch are told apart"
    assert lines[lines.index(next(line for line in lines if line.startswith("longest"))) + 1].split() == [
        *("0.00", "60.00", "s", "1", "tool.bash", "pytest", "-x")
    ]
    assert lines[-2:] == [
        "7 shorter segments of own are not shown one by one: 0.50 s",
        "3 intervals are in no part",
    ]
    page = Elements(timeline_fragment([attempt]))
    boxes = list(page.of("rect"))
    assert [box["class"] for box in boxes[:3]] == ["failed", "sandbox", "hold"]
    assert "turn 1, tool.bash, 0.00 to 60.00 s (60.00 s): pytest -x" in page.text
    assert max(float(box["x"] or "") + float(box["width"] or "") for box in boxes) <= 1000.1


async def test_the_bars_of_a_waterfall_stay_within_the_drawing(run: Path) -> None:
    times = read_times(run)
    for place in range(0, 64, 7):
        row, typical, _ = waterfall(times, place)
        boxes = [attrs for name, attrs in Elements(waterfall_fragment(row, typical)).found if name == "rect"]
        ends = [float(box["x"] or "") + float(box["width"] or "") for box in boxes]
        assert boxes
        assert max(ends) <= WIDTH + 2.1, "a part that took hardly any time is 2 wide"


async def test_two_rollouts_and_two_ranges_are_compared_by_part_and_label(run: Path) -> None:
    times = read_times(run)
    found = compare(times, "g000000-0", "g000000-1")
    parts = {each.part: each for each in found.parts}
    assert (parts["boot"].a_p50_s, parts["boot"].b_p50_s, parts["boot"].difference_s) == (20.0, 2.0, -18.0)
    assert found.labels["image"] == ("slow\x1b[2J", "quick")
    assert not any("\x1b" in line for line in found.lines())
    assert any(line.startswith("image") and line.endswith("differs") for line in found.lines())
    same = compare(times, "0-0", "0-7")
    assert (same.a_rollouts, same.b_rollouts, same.total.difference_s) == (64, 64, 0.0)
    assert same.labels["image"] == ("quick (92%)", "quick (92%)")
    assert same.to_json()["parts"][0]["difference_s"] == 0.0


@pytest.mark.parametrize(
    ("a", "b", "line"),
    [
        ("0-1", "g000000-1", "name two rollouts, or two ranges of steps"),
        ("5-1", "0-1", "5-1: the first step is above the last; write 1-5"),
        ("0-0", "100-150", "no rollout of these steps has ended; those that ended were issued at steps 0 to 0"),
        ("g999999-0", "g000000-1", "the run has none of this id"),
    ],
)
async def test_what_cannot_be_compared_is_refused_in_one_line(run: Path, a: str, b: str, line: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(line)) as refused:
        compare(read_times(run), a, b)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("words", [("trace", "slow"), ("status", "--running")])
def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path: Path, words: tuple[str, str]) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        found = CliRunner().invoke(app, [*words, str(folder)])
        assert isinstance(found.exception, LedgerRefused)
        assert "name the directory of a run" in str(found.exception)


async def test_an_html_file_that_cannot_be_written_is_refused_in_one_line(run: Path, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["trace", "show", str(run), "g000000-0", "--html", str(tmp_path / "no" / "w.html")])
    assert isinstance(found.exception, ConfigError)
    assert "cannot be written (No such file or directory); name a file" in str(found.exception)
    found = CliRunner().invoke(app, ["trace", "show", str(run), "g000000-0", "--html", str(tmp_path / "w.html")])
    assert found.exit_code == 0
    assert (tmp_path / "w.html").read_text().startswith("<!doctype html>")


async def test_two_rollouts_are_shown_side_by_side(run: Path, tmp_path: Path) -> None:
    pair = ["trace", "show", str(run), "g000000-0", "g000000-1"]
    assert "total" in CliRunner().invoke(app, pair, catch_exceptions=False).stdout
    written = CliRunner().invoke(app, [*pair, "--json", "-"], catch_exceptions=False).stdout
    found = compare(read_times(run), "g000000-0", "g000000-1").to_json()
    assert orjson.loads(written) == orjson.loads(orjson.dumps(found))
    refused = CliRunner().invoke(app, [*pair, "--html", str(tmp_path / "w.html")]).exception
    assert isinstance(refused, ConfigError)
    assert str(refused) == "--html draws one rollout: leave out --html or the second one"


async def test_unknown_and_ambiguous_rollouts_are_refused_in_one_line(run: Path) -> None:
    times = read_times(run)
    with pytest.raises(ConfigError, match="the run has none of this id"):
        place_of_rollout(times, "g000099-0")
    with pytest.raises(ConfigError, match=r"64 rollouts begin with this \(g000000-"):
        place_of_rollout(times, "g")
    assert times.rows[place_of_rollout(times, "g000003-5")].rollout_id == "g000003-5"


def test_the_golden_ledger_answers() -> None:
    times = read_times(ROOT / "tests/golden/ledger")
    assert times.rows
    assert all(seconds >= 0 for row in times.rows for seconds in row.parts_s.values())
    assert explain(times).rollouts == len(times.rows)


def test_every_key_and_command_in_the_advice_exists() -> None:
    keys = (ROOT / "docs/configuration.md").read_text()
    commands = (ROOT / "docs/cli.md").read_text()
    lines = [*advice.BY_FACTOR.values(), *advice.BY_KIND.values(), *advice.BY_STAGE.values()]
    named = {name for line in lines for name in re.findall(r"`([^`]+)`", line)}
    assert named
    for name in sorted(named):
        if name.startswith("headrace "):
            assert f"## `{name}" in commands or f"`{name}`" in commands or name in commands, name
        else:
            table, _, key = name.replace("services.NAME", "services").rpartition(".")
            assert f"`{key}`" in keys, name
            assert table in keys, name
