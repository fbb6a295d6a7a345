"""Runs of which one disk is full, for a while or until somebody frees space: what ends and what goes on (the table in
docs/reliability.md has a test for each row)."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace.actors.cluster.runs.driver import RunDriver, Wishes
from headrace.actors.cluster.runs.records import ActualState
from headrace.actors.errors import DiskFull
from headrace.actors.record.files.disk_space import WAITING, needing_space
from headrace.actors.record.files.metrics import last_metric
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.record.storage.restore import link_checkpoints
from headrace.actors.run.exit_codes import EXIT_TRANSIENT, exit_code_of_run
from headrace.actors.run.launch import change, lay_out, reopen
from headrace.actors.run.overlays import load_layered
from headrace.actors.run.service import Service
from headrace.actors.runtime.actors.runtime import RayRuntime
from headrace.buffer.audit.verify import verify
from support import run_rig as rig

pytestmark = [pytest.mark.timeout(300), pytest.mark.namespaces]
OVER_RAY = pytest.mark.usefixtures("ray_cluster")

STEPS = 16
DISK_MEBIBYTES = 48
MIN_FREE_BYTES = 16 << 20
OUTAGE_S = 600
LONG = 200
"""Steps of a run that is not over before its disk is full."""
FILLER = "of somebody else"


@dataclass
class SpreadRun:
    """A run each of whose folders is a disk of its own."""

    root: Path
    stack: ExitStack
    disks: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("state", "storage"):
            self._mount(name, self.root / name)
        self.directory = RunDirectory(path=self.disks["state"] / "run", shared=self.disks["storage"] / "run")
        overrides = (*rig.QUICK, f"training.steps={STEPS}", f"service.min_free_bytes={MIN_FREE_BYTES}")
        config = load_layered(rig.RECIPE.with_name("simulated.toml"), (), overrides, self.directory.storage)
        lay_out(config, RunDirectory(path=self.directory.storage))
        self.directory.write_state()
        link_checkpoints(self.directory.path, self.directory.storage)
        self._mount("trajectories", self.directory.path / "trajectories")
        self._mount("sandboxes", self.directory.sandboxes)
        self._mount("logs", self.directory.logs)

    def _mount(self, name: str, folder: Path) -> None:
        self.disks[name] = self.stack.enter_context(rig.small_disk(folder, DISK_MEBIBYTES))

    def fill(self, *names: str) -> None:
        for name in names:
            rig.fill(self.disks[name] / FILLER)

    def free(self, *names: str) -> None:
        for name in names:
            (self.disks[name] / FILLER).unlink()

    @asynccontextmanager
    async def service(self) -> AsyncIterator[Service]:
        config, directory = reopen(self.directory.path)
        runtime = RayRuntime(f"{self.root.name}-")
        service = await runtime.spawn(Service, config, directory, runtime, name="service")
        try:
            yield service
        finally:
            await runtime.stop(service)

    async def end_of(self, service: Service) -> DiskFull:
        """Return the error with which the driver of this service ends."""
        with pytest.raises(DiskFull) as full, needing_space(self.directory, MIN_FREE_BYTES):
            await service.run()
        return full.value

    async def complete(self) -> None:
        """Resume the run and check its end."""
        async with self.service() as service:
            assert await service.run()
        self.check_end()

    def check_end(self, steps: int = STEPS) -> None:
        report = verify(self.directory.path)
        assert report.clean, report.problems
        assert (report.steps, report.trained_twice, report.lost) == (steps, 0, 0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SpreadRun]:
    with ExitStack() as stack:
        yield SpreadRun(tmp_path, stack)


async def absent(service: Service, what: str, *, wanted: bool = True) -> None:
    """Wait until the progress of a run says that something is absent, or no longer."""
    async with asyncio.timeout(60):
        while any(what in line for line in (await service.progress()).absent) != wanted:  # noqa: ASYNC110 - as a user
            await asyncio.sleep(0.1)


@pytest.mark.slow(but_first=True)
@OVER_RAY
@pytest.mark.parametrize("name", ["state", "storage", "sandboxes"])
async def test_a_full_disk_ends_the_run_and_is_named_and_a_resume_completes_it(run: SpreadRun, name: str) -> None:
    """Not one page is left, from one moment to the next."""
    async with run.service() as service, asyncio.TaskGroup() as tasks:
        ending = tasks.create_task(run.end_of(service))
        assert await service.reached(2)
        run.fill(name)
        error = await ending
    assert str(error).startswith(f"the disk of {run.disks[name]}"), error
    assert f"({name}) has less than" in str(error)
    assert f"{WAITING[name]}: free some space, then resume the run" in str(error)
    assert exit_code_of_run(error) == EXIT_TRANSIENT
    assert verify(run.directory.path).clean
    with pytest.raises(DiskFull, match=rf"\({name}\)"), needing_space(run.directory, MIN_FREE_BYTES):
        pytest.fail("a resume before there is space starts nothing")
    run.free(name)
    await run.complete()


@OVER_RAY
async def test_results_wait_for_the_disk_of_the_trajectories(run: SpreadRun) -> None:
    async with run.service() as service, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(service.run())
        assert await service.reached(2)
        run.fill("trajectories")
        await absent(service, f"space on the disk of {run.disks['trajectories']} (trajectories: results of rollouts")
        run.free("trajectories")
        await absent(service, "trajectories", wanted=False)
        assert await running
    run.check_end()


@OVER_RAY
async def test_a_full_disk_of_the_logs_ends_nothing(run: SpreadRun) -> None:
    run.fill("logs")
    async with run.service() as service, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(service.run())
        await absent(service, f"space on the disk of {run.disks['logs']} (logs: log lines are lost)")
        assert await running
    run.check_end()


@OVER_RAY
async def test_the_driver_of_a_cluster_says_once_what_waits_and_uses_one_restart(run: SpreadRun) -> None:
    """It is the storage: not even the number of an incarnation can be written."""
    moves: list[tuple[ActualState, str]] = []
    waiting = asyncio.Event()

    def moved(state: ActualState, reason: str) -> None:
        moves.append((state, reason))
        waiting.set()

    async def collected() -> None: ...

    config, directory = reopen(run.directory.path)
    driver = RunDriver(directory.run_id(), config, directory, wishes=Wishes(), moved=moved, collect=collected)
    run.fill("storage")
    async with asyncio.TaskGroup() as tasks:
        driving = tasks.create_task(driver.drive())
        async with asyncio.timeout(60):
            await waiting.wait()
        assert not driving.done()
        run.free("storage")
        async with asyncio.timeout(60):
            ending = await driving
    [(state, reason)] = moves
    assert state is ActualState.STARTING
    assert reason.startswith(f"waits for space: the disk of {run.disks['storage']}/run (storage) has less than")
    assert (ending.exit_code, ending.is_transient) == (EXIT_TRANSIENT, True)
    assert list((directory.storage / "incarnations").iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(OUTAGE_S + 600)
@pytest.mark.parametrize("name", ["state", "storage", "sandboxes", "trajectories"])
def test_ten_minutes_without_space_use_up_one_restart(run: SpreadRun, name: str) -> None:
    # Ray and the service start again while other tests run.
    change(run.directory.path, [f"training.steps={LONG}", "cluster.absent_s=60", "service.stall_s=120"])
    with rig.start_driver("resume", str(run.directory.path), "--restarts", "1") as driver:
        assert driver.stderr is not None
        until_step(run.directory, 2)
        run.fill(name)
        with suppress(subprocess.TimeoutExpired):
            driver.wait(OUTAGE_S)
        assert driver.returncode is None, driver.stderr.read().decode()
        run.free(name)
        said = driver.stderr.read().decode()
        assert driver.wait(60) == 0, said
    assert said.count("service.min_free_bytes") == 1, said
    run.check_end(LONG)


def until_step(directory: RunDirectory, step: int) -> None:
    deadline_s = time.monotonic() + 300
    while (last := last_metric(directory.metrics, "step")) is None or last["step"] < step:
        assert time.monotonic() < deadline_s, "no step in time"
        time.sleep(0.2)
