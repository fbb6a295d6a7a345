"""The soak test `scripts/soak --days N`, which generates a run of many days, verifies and resumes it.

Invariant: after the resume, the checks cover records of the run itself: a step, a checkpoint and an evaluation that are
newer than the generated ones, a report, and a ledger that is still clean.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson
import typer

from benches.months import SAVE_EVERY, write_run
from benches.months_bench import all_processes, first_order_s, restart_each
from benches.soak_driver import Driver
from headrace.actors.record.metrics import last_metric
from headrace.actors.run.report import report_of
from headrace.buffer.audit.verify import verify
from headrace.policies.learners.checkpoints import list_checkpoints

if TYPE_CHECKING:
    from collections.abc import Callable


QUICK: Final = (
    "learner.simulated.step_s=1",
    "agent.simulated.durations.mean_s=2",
    "agent.simulated.durations.median_s=1.5",
)
NEXT_S: Final = 300.0
"""Longest wait for the next evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonthsReport:
    """Seconds of each part; `problems` is empty when all checks passed."""

    days: int
    rollouts: int
    written_s: float
    verified_s: float
    resumed_s: float
    restarted: tuple[str, ...]
    evaluated: str
    checkpoint: str
    reported_s: float
    problems: tuple[str, ...]


def soak_months(folder: Path, days: int, say: Callable[[str], object]) -> MonthsReport:
    """Write, verify, resume, restart, and verify again."""
    began_s = time.monotonic()
    _, directory = write_run(folder, "months", days=days, overrides=QUICK)
    written_s = time.monotonic() - began_s
    say(f"{days} days written in {written_s:.0f} s")
    began_s = time.monotonic()
    before = verify(directory.path, lambda done, total: say(f"{done} of {total} groups checked"))
    verified_s = time.monotonic() - began_s
    say(f"verified in {verified_s:.0f} s: {before.issued} rollouts, {len(before.problems)} problems")
    started_s = time.time()
    driver = Driver(directory)
    try:
        resumed_s = first_order_s(directory, started_s) - started_s
        restarted = restart_each(driver, all_processes(driver))
        say(f"resumed in {resumed_s:.1f} s; restarted {', '.join(restarted)}")
        evaluated = ""
        while not evaluated:
            newest = last_metric(directory.metrics, "evaluation")
            if newest is not None and newest["time_s"] > started_s:
                evaluated = str(newest["tag"])
            elif time.time() > started_s + NEXT_S:
                raise TimeoutError(f"no evaluation ended within {NEXT_S:g} s of the resume")
            else:
                time.sleep(1.0)
    finally:
        driver.kill()
    checkpoint = list_checkpoints(directory.checkpoints)[-1].name
    began_s = time.monotonic()
    report = report_of(directory)
    reported_s = time.monotonic() - began_s
    after = verify(directory.path)
    problems = [*before.problems, *after.problems]
    if after.steps <= before.steps - before.steps % SAVE_EVERY or report.steps != after.steps:
        problems.append(f"{after.steps} steps after {before.steps}, the report says {report.steps}")
    if (after.lost, after.trained_twice) != (0, 0):
        problems.append(f"lost {after.lost}, trained twice {after.trained_twice}")
    return MonthsReport(
        days=days,
        rollouts=after.issued,
        written_s=written_s,
        verified_s=verified_s,
        resumed_s=resumed_s,
        restarted=restarted,
        evaluated=evaluated,
        checkpoint=checkpoint,
        reported_s=reported_s,
        problems=tuple(problems),
    )


def main(days: int, json: Path | None) -> None:
    """For `scripts/soak`."""
    with tempfile.TemporaryDirectory(prefix="headrace-soak-") as folder:
        report = soak_months(Path(folder), days, typer.echo)
    document = orjson.dumps(asdict(report), option=orjson.OPT_INDENT_2)
    if json is not None:
        json.write_bytes(document + b"\n")
    typer.echo(document)
    raise typer.Exit(1 if report.problems else 0)
