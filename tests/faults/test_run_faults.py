"""Whole runs whose actors, or whose driver, are killed with -9."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from headrace.actors.metrics import read_metrics
from headrace.actors.retry import until_back
from headrace.actors.run_directory import RunDirectory
from headrace.actors.service import keep_running
from headrace.buffer.verify import verify
from headrace.sandboxes.leftovers import sandboxes_left

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.namespaces, pytest.mark.timeout(300)]

DEADLINE_S = 180.0
LEASE_S = 60.0


@pytest.fixture(scope="module")
def rig(load_support: Callable[[str], Any]) -> Any:
    return load_support("run_rig")


@pytest.mark.usefixtures("ray_cluster")
async def test_a_run_goes_on_when_worker_buffer_and_learner_are_killed(rig: Any, tmp_path: Path) -> None:
    victims = ["worker-0", "replay", "learner"]
    random.Random(7).shuffle(victims)
    async with (
        rig.open_service(tmp_path, "killed") as (service, directory),
        asyncio.timeout(DEADLINE_S),
        asyncio.TaskGroup() as tasks,
    ):
        running = tasks.create_task(keep_running(service.run, service.progress))
        for step, victim in zip((1, 3, 5), victims, strict=True):
            await service.reached(step)
            os.kill((await until_back(service.process_ids))[victim], signal.SIGKILL)
        assert await running
    report = verify(directory.path)
    assert report.clean, report.problems
    assert report.steps == 8
    assert (report.trained_twice, report.lost) == (0, 0)
    assert report.max_staleness_seen <= 2
    epochs = {record["version"].split(".")[0] for record in read_metrics(directory.metrics) if record["kind"] == "push"}
    assert epochs == {"1", "2"}, "the killed learner came back in a new epoch"
    assert sandboxes_left(directory.path) == 0


def test_a_killed_driver_leaves_nothing_and_the_run_resumes(rig: Any, tmp_path: Path) -> None:
    directory = RunDirectory(path=tmp_path / "driver")
    driver = rig.start_driver(
        "run", str(rig.RECIPE), "--runs-dir", str(tmp_path), "--name", "driver", "--quiet", *rig.small_arguments()
    )
    try:
        wait_for(lambda: steps_of(directory) >= 3, driver)
        family = psutil.Process(driver.pid).children(recursive=True)
        assert len(family) > 10
    finally:
        driver.kill()
        driver.communicate()
    ours = [process for process in family if not is_ray_agent(process)]
    _, alive = psutil.wait_procs(ours, timeout=LEASE_S)
    assert not alive, [process.cmdline() for process in alive]
    assert sandboxes_left(directory.path) == 0
    assert not directory.is_driven()
    assert verify(directory.path).clean

    resumed = rig.start_driver("resume", str(directory.path), "--quiet")
    _, errors = resumed.communicate(timeout=DEADLINE_S)
    assert resumed.returncode == 0, errors.decode()
    report = verify(directory.path)
    assert report.clean, report.problems
    assert (report.steps, report.trained_twice, report.lost) == (8, 0, 0)
    assert sandboxes_left(directory.path) == 0
    # Ray's own agents try for 60 s to tell a dead head that the raylet died; then they end too.
    _, alive = psutil.wait_procs(family, timeout=90)
    assert not alive, [process.cmdline() for process in alive]


def test_an_interrupted_run_drains_and_can_be_resumed(rig: Any, tmp_path: Path) -> None:
    directory = RunDirectory(path=tmp_path / "drained")
    driver = rig.start_driver(
        "run", str(rig.RECIPE), "--runs-dir", str(tmp_path), "--name", "drained", "--quiet", *rig.small_arguments()
    )
    wait_for(lambda: steps_of(directory) >= 1, driver)
    driver.send_signal(signal.SIGINT)
    _, errors = driver.communicate(timeout=DEADLINE_S)
    assert driver.returncode == 4, errors.decode()
    report = verify(directory.path)
    assert report.clean, report.problems
    assert 1 <= report.steps < 8
    assert report.checkpoints >= 1, "draining saves"
    assert sandboxes_left(directory.path) == 0


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
