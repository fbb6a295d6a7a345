"""Small real runs for tests: the quickstart's recipe with few steps, over a shared Ray or as the command line's own
process."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.config import RunConfig
from headrace.actors.run.launch import RunRequest, prepare, write_summary
from headrace.actors.run.service import Service
from headrace.actors.run.summary import RunSummary
from headrace.actors.runtime.actors.runtime import RayRuntime
from headrace.actors.services.started import SERVICES_FOLDER, resolved, running_services, stop_services
from headrace.buffer.audit.verify import verify
from headrace.sandboxes.linux import syscalls

RECIPE = Path(__file__).resolve().parents[2] / "scripts" / "recipes" / "quickstart.toml"
HANG_S = 15
SECRETS = {"E2B_API_KEY": "secret-of-e2b", "HF_TOKEN": "secret-of-a-hub"}
"""Variables of the driver of `finished_run`."""
SMALL = (
    "training.steps=8",
    "training.save_every=2",
    "buffer.batch_size=16",
    "buffer.group_size=4",
    "dispatcher.slots_per_worker=16",
    "evaluation.tasks=4",
    "evaluation.samples=1",
    "evaluation.every_steps=0",
    "rollout.queue_timeout_s=15",
    "rollout.boot_timeout_s=10",
    "rollout.prepare_timeout_s=5",
    "rollout.agent_timeout_s=25",
    "rollout.evaluate_timeout_s=20",
    f"service.hang_s={HANG_S}",
)

QUICK = (
    "agent.simulated.durations.mean_s=0.4",
    "agent.simulated.durations.median_s=0.3",
    "agent.simulated.durations.cap_s=2",
    "learner.simulated.step_s=0.1",
    "engines.simulated.push_s=0.05",
    "buffer.batch_size=8",
    "buffer.group_size=4",
    "buffer.max_staleness=2",
    "dispatcher.slots_per_worker=16",
    "evaluation.tasks=1",
    "rollout.agent_timeout_s=20",
    "rollout.evaluate_timeout_s=20",
    "rollout.queue_timeout_s=10",
    "rollout.boot_timeout_s=5",
    "rollout.prepare_timeout_s=5",
    "sandbox.pool.create_timeout_s=5",
    "service.hang_s=15",
    "cluster.absent_s=20",
    "training.save_every=2",
)
"""Settings with which a run of the recipe `simulated` takes seconds."""


def prepare_small(folder: Path, name: str, *overrides: str) -> tuple[object, RunDirectory]:
    return prepare(RunRequest(recipe=RECIPE, runs_dir=folder, name=name, overrides=(*SMALL, *overrides)))


@asynccontextmanager
async def open_service(folder: Path, name: str, *overrides: str) -> AsyncIterator[tuple[Service, RunDirectory]]:
    """A service over the shared Ray, stopped at the end."""
    config, directory = prepare_small(folder, name, *overrides)
    runtime = RayRuntime(f"{name}-")
    service = await runtime.spawn(Service, config, directory, runtime, name="service")
    # From here on the runtime knows the process, and can end one that hangs.
    await runtime.stats(service)
    try:
        yield service, directory
    finally:
        await runtime.stop(service)


async def run_simulated(folder: Path, name: str, *overrides: str) -> RunDirectory:
    """A run of simulated parts over the shared Ray, to its end, with a clean ledger."""
    recipe = RECIPE.with_name("simulated.toml")
    config, directory = prepare(RunRequest(recipe=recipe, runs_dir=folder, name=name, overrides=overrides))
    runtime = RayRuntime(f"{name}-")
    service = await runtime.spawn(Service, config, directory, runtime, name="service")
    try:
        assert await service.run()
    finally:
        await runtime.stop(service)
    report = verify(directory.path)
    assert report.clean, report.problems
    return directory


async def run_prepared(
    config: RunConfig,
    directory: RunDirectory,
    meanwhile: Callable[[Service], Coroutine[None, None, None]] | None = None,
) -> RunSummary:
    """A run with its services over the shared Ray, to its end; `meanwhile` is done beside it."""
    services = directory.path / SERVICES_FOLDER
    try:
        async with running_services(config.services, services) as urls:
            placed = config.model_copy(update={"services": resolved(config.services, urls)})
            runtime = RayRuntime(f"{directory.path.name}-")
            service = await runtime.spawn(Service, placed, directory, runtime, name="service")
            try:
                async with explained(service), asyncio.TaskGroup() as tasks:
                    if meanwhile is not None:
                        tasks.create_task(meanwhile(service))
                    completed = await service.run()
            finally:
                await runtime.stop(service)
    finally:
        await stop_services(services)
    return write_summary(directory, completed=completed)


@asynccontextmanager
async def explained(service: Service) -> AsyncIterator[None]:
    """What the run's actors say, and the ends of their logs, on standard output when the block fails."""
    try:
        yield
    except BaseException:
        for name, question in (("progress", service.progress), ("processes", service.process_ids)):
            try:
                async with asyncio.timeout(10):
                    print(f"{name}: {await question()}")
            except Exception as error:  # noqa: BLE001 - whatever it is, it is part of the explanation
                print(f"{name}: {error!r}")
        print_ray_logs()
        raise


def print_ray_logs() -> None:
    """The last lines that this Ray's actors wrote, and what its control service says of deaths and restarts."""
    import ray

    logs = Path(tempfile.gettempdir()) / "ray" / ray.get_runtime_context().get_session_name() / "logs"
    for path in sorted(logs.glob("worker-*.err"), key=lambda path: path.stat().st_mtime):
        print(path.name, *path.read_text(errors="replace").splitlines()[-6:], sep="\n  ")
    control = (logs / "gcs_server.out").read_text(errors="replace").splitlines()
    deaths = [line[:240] for line in control if re.search("restart|died|dead|fail", line, re.IGNORECASE)]
    print("gcs_server.out", *deaths[-40:], sep="\n  ")


def start_driver(*arguments: str, **variables: str) -> subprocess.Popen[bytes]:
    """`headrace ARGUMENTS` in a session of its own, so that nothing of it is ours."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
        **variables,
    }
    return subprocess.Popen(
        [str(Path(sys.executable).with_name("headrace")), *arguments],
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def small_arguments() -> list[str]:
    return [part for override in SMALL for part in ("--set", override)]


__all__ = [
    "HANG_S",
    "QUICK",
    "RECIPE",
    "SECRETS",
    "RunDirectory",
    "explained",
    "open_service",
    "prepare_small",
    "run_prepared",
    "run_simulated",
    "small_arguments",
    "start_driver",
]


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    """`folder`, on a file system of its own with so much room. Needs root."""
    folder.mkdir()
    options = f"size={mebibytes}m,mode=700"
    syscalls.mount("tmpfs", str(folder), "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)
    try:
        yield folder
    finally:
        syscalls.detach(str(folder))


def fill(path: Path) -> None:
    """Write until the disk has not one page left."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass
