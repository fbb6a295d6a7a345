"""The bench of resuming a months-long run, compared with the same run after a day: `scripts/bench months`.

Invariants:
- Each figure comes from a real resume over Ray, of a directory that `months` wrote and that has not been opened before.
- `resume_s` is the time from the start of the process to the first order, including Ray's start; `verify` is not run.
- Every actor is killed once, and so is the service; a gap counts whether it occurs before or after a kill.
- `checkpoint_stall_s` is measured on the store itself, with consecutive offers while a checkpoint is being taken.
- After the resume, the checks cover records of the run itself: a step, a checkpoint and an evaluation newer than the
  generated ones, a report, and a ledger that is still clean.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import orjson
import typer

from benches.long_runs.months import SAVE_EVERY, STEPS_PER_DAY, write_run
from benches.long_runs.soak_driver import Driver, log_of
from headrace.actors.record.files.metrics import last_metric
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.config import RunConfig
from headrace.actors.run.report import report_of
from headrace.actors.runtime.actors.ticker import FOLDER_KEY
from headrace.buffer.audit.verify import verify
from headrace.buffer.errors import ReplayError
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.tasks.task import load_tasks
from headrace.buffer.trajectories.types import Cause, CheckpointRef, Outcome, RolloutResult, StepReport
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.checkpoints import (
    Manifest,
    SteppedBatch,
    list_checkpoints,
    publish,
    read_checkpoint,
    stage,
    usable_checkpoint,
    write_manifest,
)

FIRST_ORDER_S: Final = 300.0
BACK_S: Final = 180.0
"""Longest wait for the restart of a killed actor."""
POLL_S: Final = 0.2
STEPS: Final = 10
"""Number of steps between two checkpoints."""
LIMITS: Final = {"resume_s": 20.0, "restart_block_max_s": 2.0, "checkpoint_stall_s": 0.5, "resume_rss_mb": 800.0}
MOST_RATIO: Final = 2.0
_RAY_START = (
    "import sys, time; from pathlib import Path; "
    "from headrace.actors.runtime.actors.runtime import start_local_ray, stop_local_ray; "
    "began = time.monotonic(); start_local_ray(sys.argv[1], object_store_bytes=128 << 20); "
    "took = time.monotonic() - began; stop_local_ray(); print(took)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of one run directory. `blocked` is the actor with the longest gap."""

    resume_s: float
    restart_block_max_s: float
    checkpoint_stall_s: float
    resume_rss_mb: float
    ray_start_s: float
    blocked: str
    restarted: tuple[str, ...]


def measure(folder: Path, *, days: int, say: Callable[[str], object]) -> dict[str, Any]:
    """Return all figures; `problems` lists those that exceed their limits."""
    costs: dict[str, Costs] = {}
    for name, of_days in (("one_day", 1), ("months", days)):
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="run-", dir=folder) as place:
            config, directory = write_run(Path(place), name, days=of_days)
            say(f"{name}: {of_days} days written in {time.monotonic() - began_s:.0f} s")
            costs[name] = measure_run(config, directory)
        say(f"{name}: {costs[name]}")
    months = costs["months"]
    ratios = {key: getattr(months, key) / getattr(costs["one_day"], key) for key in LIMITS}
    return {
        "days": days,
        "rollouts": days * STEPS_PER_DAY * 64,
        **{key: getattr(months, key) for key in LIMITS},
        **{name: asdict(cost) for name, cost in costs.items()},
        "ratios": ratios,
        "problems": [
            *(
                f"{key} is {getattr(months, key):.3g}, but must be at most {most:g}"
                for key, most in LIMITS.items()
                if getattr(months, key) > most
            ),
            *(
                f"{key} is {ratio:.2f} times that of one day, but must be at most {MOST_RATIO:g}"
                for key, ratio in ratios.items()
                if ratio > MOST_RATIO
            ),
        ],
    }


def measure_run(config: RunConfig, directory: RunDirectory) -> Costs:
    """Resume the run, kill every actor once, and end the run; then take a checkpoint."""
    command = [sys.executable, "-c", _RAY_START, str(directory.path)]
    program = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    ray_start_s = float(program.stdout.split()[-1])
    with tempfile.TemporaryDirectory(prefix="headrace-ticker-") as ticks:
        os.environ[FOLDER_KEY] = ticks
        started_s = time.time()
        driver = Driver(directory)
        try:
            resume_s = first_order_s(directory, started_s) - started_s
            processes = all_processes(driver)
            rss_mb = _peak_mb(processes["replay"])
            restarted = restart_each(driver, processes)
            rss_mb = max(rss_mb, _peak_mb(all_processes(driver)["replay"]))
        finally:
            driver.kill()
            del os.environ[FOLDER_KEY]
        gaps = {path.name: float(path.read_text() or 0) for path in Path(ticks).iterdir()}
    blocked = max(gaps, key=lambda name: gaps[name])
    return Costs(
        resume_s=resume_s,
        restart_block_max_s=gaps[blocked],
        checkpoint_stall_s=asyncio.run(checkpoint_stall_s(config, directory)),
        resume_rss_mb=rss_mb,
        ray_start_s=ray_start_s,
        blocked=blocked,
        restarted=restarted,
    )


def first_order_s(directory: RunDirectory, since_s: float) -> float:
    """Return the Unix time at which the first attempt since `since_s` was issued. Raises TimeoutError."""
    query = "SELECT min(issued_at_s) FROM attempts WHERE issued_at_s > ?"
    uri = f"{(directory.path / 'ledger.db').as_uri()}?mode=ro"
    while time.time() < since_s + FIRST_ORDER_S:
        with closing(sqlite3.connect(uri, uri=True)) as ledger:
            (issued_at_s,) = ledger.execute(query, (since_s,)).fetchone()
        if issued_at_s is not None:
            return float(issued_at_s)
        time.sleep(POLL_S)
    log = log_of(directory).read_text(errors="replace")[-2000:]
    raise TimeoutError(f"no order within {FIRST_ORDER_S:g} s of the resume: {log}")


def restart_each(driver: Driver, processes: dict[str, int]) -> tuple[str, ...]:
    """Kill the processes one after the other, and wait for the restart of each. Raises TimeoutError."""
    for name, process_id in processes.items():
        for process in driver.descendants():
            if process.pid == process_id:
                process.kill()
        deadline_s = time.monotonic() + BACK_S
        while all_processes(driver).get(name) in (None, process_id):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{name} was not restarted within {BACK_S:g} s of being killed")
            time.sleep(POLL_S)
    return tuple(processes)


def all_processes(driver: Driver) -> dict[str, int]:
    found = driver.ask("processes")
    if found is None:
        raise TimeoutError("the run ended during the measurement")
    return dict(found)


def _peak_mb(process_id: int) -> float:
    """Return the peak resident memory of a process (Linux)."""
    status = Path(f"/proc/{process_id}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e6


async def checkpoint_stall_s(config: RunConfig, directory: RunDirectory) -> float:
    """Return the longest wait of an offer for its receipt while a checkpoint of ten steps is recorded and copied."""
    opening = ReplayStore.open(
        directory.path,
        config.buffer,
        load_tasks(directory.train_tasks),
        run_id=directory.identity.read_text(),
        seed=config.service.seed,
    )
    async with await opening as store:
        await store.keep_in_flight(())
        version = await store.open_epoch(usable_checkpoint(directory.checkpoints).checkpoint)
        ref, version = await _steps(store, version, directory.checkpoints)
        orders = list(await store.issue(10_000, version))
        async with asyncio.TaskGroup() as tasks:
            saving = tasks.create_task(store.checkpointed(ref))
            longest_s = 0.0
            while not saving.done() and orders:
                order, began_s = orders.pop(), time.monotonic()
                outcome = Outcome(reward=0.0, trainable=False, cause=Cause.FAILED)
                failed = RolloutResult(
                    rollout_id=order.rollout_id, attempt=order.attempt, outcome=outcome, trajectory=None
                )
                await store.offer_many([failed])
                longest_s = max(longest_s, time.monotonic() - began_s)
        return longest_s


async def _steps(store: ReplayStore, version: PolicyVersion, checkpoints: Path) -> tuple[CheckpointRef, PolicyVersion]:
    """Commit a step for each of up to `STEPS` sealed batches, and publish a checkpoint of these steps."""
    previous = store.status().chain
    batches: list[SteppedBatch] = []
    while len(batches) < STEPS:
        try:
            batch = await store.take(version, version.epoch, timeout_s=0.0)
        except ReplayError:
            break
        if batch is None:
            break
        version = PolicyVersion(version.epoch, version.step + 1)
        await store.commit(batch.lease, StepReport(batch_id=batch.lease.batch_id, version=version, skipped=False))
        members = tuple((item.rollout_id, item.attempt) for item in batch.items)
        batches.append(SteppedBatch(batch_id=batch.lease.batch_id, members=members, skipped=False))
    staged = stage(checkpoints, version)
    manifest = Manifest(version=version, previous_chain=previous, chain=store.status().chain, batches=tuple(batches))
    write_manifest(staged, manifest)
    return read_checkpoint(publish(staged, version)), version


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
    """Write and verify a run directory, resume the run, restart its actors, and verify it again."""
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
        problems.append(f"{after.steps} steps after {before.steps}, but the report says {report.steps}")
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
    """Run the months-long soak for `scripts/soak`."""
    with tempfile.TemporaryDirectory(prefix="headrace-soak-") as folder:
        report = soak_months(Path(folder), days, typer.echo)
    document = orjson.dumps(asdict(report), option=orjson.OPT_INDENT_2)
    if json is not None:
        json.write_bytes(document + b"\n")
    typer.echo(document)
    raise typer.Exit(1 if report.problems else 0)
