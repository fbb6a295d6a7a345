"""Whole runs whose actors, or whose driver, are killed with -9."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.actors.record.files.metrics import read_metrics
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.launch import drain_on_interrupt, run_guarded
from headrace.actors.runtime.actors.interrupts import Interrupts
from headrace.actors.runtime.actors.operations import until_back
from headrace.actors.runtime.actors.runtime import RayRuntime
from headrace.actors.telemetry.spans.store import SpanFolder
from headrace.buffer.audit.evidence import Evidence, read_evidence
from headrace.buffer.audit.verify import verify
from headrace.buffer.core.records import CommitRecord
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.sandboxes.host.leftovers import sandboxes_left
from support import run_rig as rig

pytestmark = [pytest.mark.namespaces, pytest.mark.timeout(900)]

DEADLINE_S = 600.0
"""A guard against hanging: about 50 s on an idle machine, many times that on one that is busy."""
LEASE_S = 60.0


@pytest.mark.usefixtures("ray_cluster")
async def test_a_run_continues_after_worker_buffer_and_learner_are_killed(tmp_path: Path) -> None:
    """F9."""
    victims = ["worker-0", "replay", "learner"]
    random.Random(7).shuffle(victims)
    directory = await run_and_kill(tmp_path, dict(zip((1, 3, 5), victims, strict=True)))
    epochs = {record["version"].split(".")[0] for record in read_metrics(directory.metrics) if record["kind"] == "push"}
    assert epochs == {"1", "2"}, "the killed learner came back in a new epoch"


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
async def test_a_run_continues_after_three_other_processes_are_killed(tmp_path: Path) -> None:
    victims = random.Random(4).sample(["engines", "gateway", "service", "dispatcher", "evaluator", "sandbox-pool"], 3)
    # Last: a run goes on without its service, so what is to be killed after it might find the run finished.
    victims.sort(key=lambda victim: victim == "service")
    await run_and_kill(tmp_path, dict(zip((1, 3, 5), victims, strict=True)))


@pytest.mark.usefixtures("ray_cluster")
async def test_a_service_restarted_after_the_last_step_knows_that_all_steps_are_done(tmp_path: Path) -> None:
    async with rig.open_service(tmp_path, "late", "training.steps=1") as (service, _), asyncio.timeout(DEADLINE_S):
        assert await run_guarded(RayRuntime(), service, rig.HANG_S)
        (await find_process(service, "service")).kill()
        assert await run_guarded(RayRuntime(), service, rig.HANG_S)
        assert await service.reached(1)
        assert not await service.reached(2)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    "victim",
    [
        *("worker-0", "replay", "learner", "dispatcher", "evaluator", "sandbox-pool", "gateway", "engines", "service"),
        *("policies.cpu_engine", "push.sender", "headrace-launcher"),
    ],
)
async def test_a_run_survives_a_kill_of_any_process(tmp_path: Path, victim: str) -> None:
    step = random.Random(victim).randrange(7)
    await run_and_kill(tmp_path, {step: victim})


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
async def test_a_run_continues_after_its_learner_is_killed_during_a_push(tmp_path: Path) -> None:
    """An engine is held still, so that the push cannot end before the learner is killed."""
    async with (
        rig.open_service(tmp_path, "midst") as (service, directory),
        rig.explained(service),
        asyncio.timeout(DEADLINE_S),
        asyncio.TaskGroup() as tasks,
    ):
        running = tasks.create_task(run_guarded(RayRuntime(), service, rig.HANG_S))
        learner, engine = await find_process(service, "learner"), await find_process(service, "policies.cpu_engine")
        await until_reached(service, 2, running)
        engine.suspend()
        while not is_pushing(directory):
            await service.reached(0)
        learner.kill()
        engine.resume()
        assert await running
    assert_whole(directory)
    epochs = {record["version"].split(".")[0] for record in read_metrics(directory.metrics) if record["kind"] == "push"}
    assert epochs == {"1", "2"}


def is_pushing(directory: RunDirectory) -> bool:
    """Whether the journal ends within a push."""
    lines = (directory.path / "engines" / "pushes.jsonl").read_bytes().split(b"\n")
    return json.loads(lines[-2])["phase"] != "ended"


@pytest.mark.usefixtures("ray_cluster")
async def test_an_interrupt_while_the_service_is_down_drains_the_run(tmp_path: Path) -> None:
    options = ("training.steps=200",)
    async with (
        rig.open_service(tmp_path, "dead", *options) as (service, directory),
        rig.explained(service),
        asyncio.timeout(DEADLINE_S),
        asyncio.TaskGroup() as tasks,
    ):
        draining = asyncio.Event()
        running = tasks.create_task(run_guarded(RayRuntime(), service, rig.HANG_S, draining))
        with Interrupts() as interrupts, drain_on_interrupt(service, running, tasks, draining, interrupts):
            await until_reached(service, 1, running)
            (await find_process(service, "service")).kill()
            signal.raise_signal(signal.SIGINT)
            assert not await running
    report = verify(directory.path)
    assert report.clean, report.problems
    assert 1 <= report.steps < 200
    assert report.checkpoints >= 1, "draining saves"


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
async def test_a_run_survives_a_kill_of_one_of_its_two_workers(tmp_path: Path) -> None:
    directory = await run_and_kill(tmp_path, {3: "worker-1"}, "service.workers=2")
    processes = {span["resource"]["service.instance.id"] for span in SpanFolder.of_run(directory.path).spans()}
    assert len({process for process in processes if process.startswith("worker-")}) >= 3


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("victim", ["service", "worker-0", "learner", "gateway", "policies.cpu_engine"])
async def test_a_run_survives_a_hang_of_any_process(tmp_path: Path, victim: str) -> None:
    await run_and_kill(tmp_path, {3: victim}, "engines.health_timeout_s=5", with_signal=signal.SIGSTOP)


async def run_and_kill(
    folder: Path, victims: dict[int, str], *overrides: str, with_signal: int = signal.SIGKILL
) -> RunDirectory:
    """A small run whose processes are killed after the given steps. It ends by itself, has lost, repeated and poisoned
    nothing, and leaves no process."""
    family: set[psutil.Process] = set()
    name = f"k{time.monotonic_ns() % 10**6}"
    async with (
        rig.open_service(folder, name, *overrides) as (service, directory),
        rig.explained(service),
        asyncio.timeout(DEADLINE_S),
        asyncio.TaskGroup() as tasks,
    ):
        running = tasks.create_task(run_guarded(RayRuntime(), service, rig.HANG_S))
        for step, victim in victims.items():
            process = await find_process(service, victim)
            await until_reached(service, step, running)
            if not process.is_running():
                process = await find_process(service, victim)
            print(f"{time.time():.1f} s: killing {victim}, process {process.pid}, after step {step}")
            family |= {process, *process.children(recursive=True)}
            process.send_signal(with_signal)
        assert await running
        family |= {psutil.Process(process_id) for process_id in (await until_back(service.process_ids)).values()}
        family |= {child for process in set(family) if process.is_running() for child in process.children(True)}
    _, alive = psutil.wait_procs(family, timeout=LEASE_S)
    assert not alive, [process.cmdline() for process in alive]
    assert_whole(directory)
    return directory


async def until_reached(service: Any, step: int, running: asyncio.Task[bool]) -> None:
    """Wait for a step of a run that must not end before it."""
    async with asyncio.TaskGroup() as tasks:
        reached = tasks.create_task(until_back(lambda: service.reached(step)))
        await asyncio.wait([reached, running], return_when=asyncio.FIRST_COMPLETED)
        assert reached.done(), "the run ended"
        assert reached.result(), "the run ended"


async def find_process(service: Any, victim: str) -> psutil.Process:
    """An actor's process by its name, or a helper process by a word of its command line."""
    if victim == "service":
        return psutil.Process((await RayRuntime().stats(service))[0])
    actors = await until_back(service.process_ids)
    if victim in actors:
        return psutil.Process(actors[victim])
    owners = [psutil.Process(actors[name]) for name in ("engines", "sandbox-pool")]
    helpers = [child for owner in owners for child in owner.children() if victim in " ".join(child.cmdline())]
    return random.Random(victim).choice(helpers)


def assert_whole(directory: RunDirectory) -> None:
    report = verify(directory.path)
    assert report.clean, report.problems
    assert (report.steps, report.trained_twice, report.lost, report.poison) == (8, 0, 0, 0)
    assert report.max_staleness_seen <= 2
    for attempt in read_evidence(directory.path).attempts:
        assert attempt.reward is None or attempt.cause not in ("infra", "evaluator", "poison", "cancelled")
    evaluations = [record for record in read_metrics(directory.metrics) if record["kind"] == "evaluation"]
    assert [(record["tag"], record["answers"], record["infra"]) for record in evaluations] == [
        ("base", 4, 0),
        ("final", 4, 0),
    ]
    assert sandboxes_left(directory.path) == 0


@pytest.mark.core
def test_a_killed_driver_leaves_nothing_behind_and_the_run_resumes(tmp_path: Path) -> None:
    # Three more steps fit before the next checkpoint, for a learner that outlives its driver by a moment.
    """F10."""
    driver, directory = start_run(tmp_path, "driver", "--set", "training.save_every=4")
    family = killed_after(5, driver, directory)
    assert len(family) > 10
    ours = [process for process in family if not is_ray_agent(process)]
    _, alive = psutil.wait_procs(ours, timeout=LEASE_S)
    assert not alive, [process.cmdline() for process in alive]
    assert sandboxes_left(directory.path) == 0
    assert not directory.is_driven()
    assert verify(directory.path).clean

    before = read_evidence(directory.path)
    resumed = rig.start_driver("resume", str(directory.path), "--quiet", "--json", str(tmp_path / "out.json"))
    _, errors = resumed.communicate(timeout=DEADLINE_S)
    assert resumed.returncode == 0, errors.decode()
    report = verify(directory.path)
    assert report.clean, report.problems
    assert (report.steps, report.trained_twice, report.lost) == (8, 0, 0)
    assert sandboxes_left(directory.path) == 0
    told = json.loads((tmp_path / "out.json").read_bytes())["resume"]
    assert told == json.loads((directory.path / "resumes" / "2.json").read_bytes())
    assert f"resume from checkpoint {told['checkpoint']} as epoch 2".encode() in errors
    assert_resumed_as_told(told, before, read_evidence(directory.path))


def assert_resumed_as_told(told: dict[str, Any], before: Evidence, after: Evidence) -> None:
    """Undone steps were done again on the same batches in the same order, and came to the same."""
    assert told["lost"] == 0
    in_flight = [rollout for rollout in before.rollouts if rollout.state == "in_flight"]
    assert told["restarted"] == len(in_flight)
    attempts = {rollout.rollout_id: rollout.attempt for rollout in after.rollouts}
    assert all(attempts[rollout.rollout_id] > rollout.attempt for rollout in in_flight)
    undone = [commit for commit in after.commits if commit.rolled_back_by == 2]
    assert len(undone) == told["steps_undone"] >= 1, "it was killed past a checkpoint"
    assert told["batches"][: len(undone)] == [commit.batch_id for commit in undone]
    again = [commit for commit in after.commits if commit.epoch == 2 and commit.batch_id in told["batches"]]
    dissolved = {batch.batch_id for batch in after.batches if batch.state == "dissolved"}
    assert [commit.batch_id for commit in again] == [name for name in told["batches"] if name not in dissolved]
    first, repeated = undone[0], again[0]
    assert repeated.chain == first.chain, "the chain holds the members and their order"
    assert repeated.version == PolicyVersion(2, first.version.step)
    assert outcome(repeated) == pytest.approx(outcome(first), rel=1e-4, abs=1e-7)


def outcome(commit: CommitRecord) -> dict[str, float]:
    """A batch without a token to learn from, all of whose groups agree, has no entropy."""
    names = {"loss", "grad_norm", "tokens", "mean_reward", "mean_staleness"}
    if commit.metrics["computed_tokens"]:
        names.add("entropy")
    return {name: commit.metrics[name] for name in names}


@pytest.mark.slow
def test_a_killed_driver_leaves_no_ray_process_behind(tmp_path: Path) -> None:
    driver, directory = start_run(tmp_path, "driver")
    family = killed_after(1, driver, directory)
    # Ray's own agents try for 60 s to tell a dead head that the raylet died; then they end too.
    _, alive = psutil.wait_procs(family, timeout=90)
    assert not alive, [process.cmdline() for process in alive]


@pytest.mark.slow
def test_automatic_restarts_complete_a_run(tmp_path: Path) -> None:
    """F10: Though its driver is killed, and then its disk is full for a while."""
    with rig.small_disk(tmp_path / "disk", 512) as disk:
        loop, directory = start_run(disk, "again", "--restarts", "5")
        wait_for(lambda: steps_of(directory) >= 2, loop)
        the_try(loop).kill()
        wait_for(lambda: epoch_of(directory) == 2 and steps_of(directory) >= 4, loop)
        full = the_try(loop)
        rig.fill(disk / "of somebody else")
        full.wait(DEADLINE_S)
        (disk / "of somebody else").unlink()
        _, errors = loop.communicate(timeout=DEADLINE_S)
        assert loop.returncode == 0, errors.decode()
        assert_whole(directory)
        assert epoch_of(directory) == 3
    told = [line for line in errors.decode().splitlines() if line.startswith("ended with")]
    assert [line.split(":")[0] for line in told] == ["ended with SIGKILL", "ended with exit code 75"]


def the_try(loop: subprocess.Popen[bytes]) -> psutil.Process:
    """The one that the loop of `--restarts` waits for."""
    [tried] = psutil.Process(loop.pid).children()
    return tried


def epoch_of(directory: RunDirectory) -> int:
    return int(max(commit.version for commit in read_evidence(directory.path).commits).epoch)


def test_an_interrupted_run_drains_and_can_be_resumed(tmp_path: Path) -> None:
    # More steps than it can take: it must not be over before it is interrupted.
    driver, directory = start_run(tmp_path, "drained", "--set", "training.steps=200")
    wait_for(lambda: steps_of(directory) >= 1, driver)
    driver.send_signal(signal.SIGINT)
    _, errors = driver.communicate(timeout=DEADLINE_S)
    assert driver.returncode == 4, errors.decode()
    report = verify(directory.path)
    assert report.clean, report.problems
    assert 1 <= report.steps < 200
    assert report.checkpoints >= 1, "draining saves"
    assert sandboxes_left(directory.path) == 0


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("driver.lock", marks=pytest.mark.slow),
        "gateway.json",
        pytest.param("engines", marks=pytest.mark.slow),
    ],
)
def test_sigterm_during_startup_stops_a_run_cleanly(tmp_path: Path, moment: str) -> None:
    """Before Ray is up, while the first actors start, and while engines do."""
    driver, directory = start_run(tmp_path, "early")
    wait_for((directory.path / moment).exists, driver)
    family = psutil.Process(driver.pid).children(recursive=True)
    driver.send_signal(signal.SIGTERM)
    _, errors = driver.communicate(timeout=DEADLINE_S)
    assert driver.returncode == 4, errors.decode()
    [line] = errors.decode().splitlines()[1:] if b"run " in errors else errors.decode().splitlines()
    assert line.endswith(f"continue with: headrace resume {directory.path}")
    assert not psutil.wait_procs(family, timeout=90)[1]
    assert sandboxes_left(directory.path) == 0
    assert not directory.is_driven()


def start_run(folder: Path, name: str, *options: str) -> tuple[subprocess.Popen[bytes], RunDirectory]:
    """A small run as the command line's own process."""
    where = ("--runs-dir", str(folder), "--name", name)
    driver = rig.start_driver("run", str(rig.RECIPE), *where, "--quiet", *rig.small_arguments(), *options)
    return driver, RunDirectory(path=folder / name)


def killed_after(steps: int, driver: subprocess.Popen[bytes], directory: RunDirectory) -> list[psutil.Process]:
    """Kill the driver after so many steps; the processes that it had started."""
    try:
        wait_for(lambda: steps_of(directory) >= steps, driver)
        return psutil.Process(driver.pid).children(recursive=True)
    finally:
        driver.kill()
        driver.communicate()


def is_ray_agent(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[0] in ("ray::RuntimeEnvAgent", "ray::DashboardAgent")
    except (psutil.NoSuchProcess, IndexError):
        return False


def steps_of(directory: RunDirectory) -> int:
    return sum(record["kind"] == "step" for record in read_metrics(directory.metrics))


def wait_for(condition: Callable[[], bool], driver: subprocess.Popen[bytes]) -> None:
    """Look at the run's files until they say so; the driver's death or the deadline fails the test."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert driver.poll() is None, driver.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
async def test_a_synchronous_run_trains_no_stale_rollout(tmp_path: Path) -> None:
    options = ("buffer.mode=sync", "buffer.max_staleness=0", "training.steps=4")
    async with rig.open_service(tmp_path, "sync", *options) as (service, directory), asyncio.timeout(DEADLINE_S):
        assert await service.run()
    report = verify(directory.path)
    assert report.clean, report.problems
    assert (report.steps, report.max_staleness_seen, report.evicted) == (4, 0, 0)
