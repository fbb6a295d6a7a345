"""Driver of a run: creates the run directory, starts Ray and the service, writes the summary.

Invariants:
- Every check comes before the run directory is created; a refused start leaves nothing behind.
- One process drives a run directory at a time. It also guards the service, so that a dead or hung service costs only
  time.
- Interrupting a run (Ctrl-C, SIGTERM) drains it, so that it can be resumed. A second interrupt ends it immediately.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import orjson
from pydantic import ValidationError
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from headrace.actors.derivation.rules import Derived
from headrace.actors.engines.devices import refuse_missing_gpus
from headrace.actors.errors import (
    ActorLost,
    ConfigError,
    RunExists,
    RunInterrupted,
    RunMissing,
    StartFailed,
    first_cause,
)
from headrace.actors.record.files.absences import Absences
from headrace.actors.record.files.disk_space import needing_space
from headrace.actors.record.files.log_warnings import TerminalWarnings
from headrace.actors.record.files.logs import LogTerms
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.changes import changed_document, journal_changes
from headrace.actors.run.checks import absent_parts, check_parts, check_recipe_parts, reserved_gpus
from headrace.actors.run.config import RunConfig, Tell, explain, of_record, recorded, resolve
from headrace.actors.run.overlays import layered, load_layered
from headrace.actors.run.progress import Progress, ProgressDisplay, starting
from headrace.actors.run.service import Service
from headrace.actors.run.summary import RunSummary, summarize
from headrace.actors.run.task_sets import Allow, TaskSets
from headrace.actors.runtime.actors.call_guard import guard, keep_running
from headrace.actors.runtime.actors.interrupts import Interrupts
from headrace.actors.runtime.actors.operations import ABSENCE
from headrace.actors.runtime.actors.runtime import RayRuntime, Runtime, offered_gpus, start_local_ray, stop_local_ray
from headrace.actors.services.started import SERVICES_FOLDER, resolved, running_services, stop_services
from headrace.buffer.primitives.durable_files import publish_folder, replace_file
from headrace.buffer.primitives.file_lock import FileLock
from headrace.buffer.tasks.task import write_tasks
from headrace.sandboxes.host.child_environment import child_environment

logger = logging.getLogger(__name__)

PROGRESS_S = 1.0
ASKED_S: Final = 1.0
"""Time for which a driver waits for the lock of its run."""
ANSWER_S = 10.0
"""Time limit for the service to report its progress."""
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Arguments of `headrace run`."""

    recipe: Path
    runs_dir: Path
    name: str
    overrides: Sequence[str] = ()
    on: Sequence[Path] = ()
    """Machine files, which are merged over the recipe."""


def prepare(request: RunRequest, tell: Tell = lambda _: None) -> tuple[RunConfig, RunDirectory]:
    """Check everything, then create the run directory. Raises ConfigError and the errors of tasks, model and
    sandboxes."""
    if not NAME.fullmatch(request.name):
        raise ConfigError(f"--name {request.name}: use letters, digits, '.', '_' and '-', not starting with '.'")
    directory = RunDirectory(path=(request.runs_dir / request.name).resolve())
    if directory.path.exists():
        raise RunExists(f"{directory.path} exists: choose another --name, or `headrace resume {directory.path}`")
    config = load_layered(request.recipe, request.on, request.overrides, directory.path, tell)
    lay_out(config, directory)
    return config, directory


def lay_out(config: RunConfig, directory: RunDirectory, *, allow: Allow = lambda _: None) -> None:
    """Check everything that the configuration names, then create the run directory, completely or not at all. `allow`
    gets each task before anything that it names is looked up. Raises ConfigError, the errors of tasks, model and
    sandboxes, and those of `allow`."""
    check_parts(config)
    sets = TaskSets(config, allow)
    # Tasks are written while they are checked, so a refused start must not leave the folder of all runs behind either.
    existing = next(folder for folder in directory.path.parents if folder.is_dir())
    staged = existing / f".{directory.path.name}.{os.getpid()}"
    partial = RunDirectory(path=staged)
    try:
        partial.write_beginning(sets.train(), uuid.uuid4().hex)
        write_tasks(partial.heldout_tasks, sets.heldout())
        partial.config.write_bytes(document_of(config))
        directory.path.parent.mkdir(parents=True, exist_ok=True)
        publish_folder(staged, directory.path)
    except OSError as error:
        raise ConfigError(
            f"--runs-dir: {directory.path} cannot be written: {error.strerror}; choose another folder"
        ) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def document_of(config: RunConfig) -> bytes:
    """Return the content of a run's config.json."""
    return orjson.dumps(recorded(config.model_dump(mode="json")), option=orjson.OPT_INDENT_2)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """A checked recipe. `absent` are the reasons why it could not start on this machine, which need not be the one that
    it is for."""

    config: RunConfig
    origins: dict[str, str]
    derived: tuple[Derived, ...]
    tasks: tuple[int, int]
    """Numbers of training and held-out tasks."""
    absent: tuple[str, ...]


def dry_run(recipe: Path, on: Sequence[Path], overrides: Sequence[str]) -> DryRun:
    """Check a recipe with machine files without creating anything but miniatures. Raises ConfigError and the errors of
    tasks and model."""
    found, derived = layered(recipe, on, overrides), list[Derived]()
    config = resolve(found.document, recipe, Path("run"), derived.extend)
    check_recipe_parts(config)
    sets = TaskSets(config)
    tasks = (sum(1 for _ in sets.train()), sum(1 for _ in sets.heldout()))
    origins = found.origins | {one.key: f"derived: {one.reason}" for one in derived}
    return DryRun(config=config, origins=origins, derived=tuple(derived), tasks=tasks, absent=absent_parts(config))


def reopen(path: Path) -> tuple[RunConfig, RunDirectory]:
    """Read the configuration of an existing run. Raises RunMissing."""
    directory = RunDirectory.at(path)
    if not directory.config.is_file():
        raise RunMissing(f"{path}: not a run directory (config.json is missing); list runs with `headrace status`")
    try:
        document = orjson.loads(directory.config.read_bytes())
        if not isinstance(document, dict) or not all(isinstance(table, dict) for table in document.values()):
            raise ValueError("tables are missing")
        document = of_record(document)
        # The run directory may have been moved since these paths were written.
        document["learner"] |= {
            "checkpoint_dir": str(directory.checkpoints),
            "snapshot_dir": str(directory.weights),
        }
        return RunConfig.model_validate(document), directory
    except (KeyError, ValueError) as error:
        reason = explain(error, RunConfig) if isinstance(error, ValidationError) else error
        raise RunMissing(f"{directory.config}: not a run configuration that this version can read: {reason}") from error


def change(path: Path, changes: Sequence[str]) -> None:
    """Change keys of a run that is not being driven, and journal that. Raises RunMissing, RunExists, and ConfigError
    for a key that defines the run."""
    config, directory = reopen(path)
    document = changed_document(config.model_dump(mode="json"), changes)
    try:
        changed = RunConfig.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"--set: {explain(error, RunConfig)}") from error
    with sole_driver(directory):
        replace_file(directory.config, document_of(changed))
        journal_changes(directory.path, changes)


@contextmanager
def sole_driver(directory: RunDirectory) -> Iterator[None]:
    """Hold the run's lock, which the kernel releases when this process dies. Raises RunExists if another process is
    driving the run, and ConfigError if the directory cannot be written."""
    # Whoever asks whether the run is driven has the lock for a moment.
    asked = retry(
        retry=retry_if_exception_type(BlockingIOError),
        wait=wait_fixed(ASKED_S / 20),
        stop=stop_after_delay(ASKED_S),
        reraise=True,
    )
    try:
        lock = asked(FileLock)(directory.lock, blocking=False)
    except BlockingIOError as error:
        raise RunExists(f"{directory.path} is being driven by another process; stop that process first") from error
    except OSError as error:
        raise ConfigError(
            f"{directory.path} cannot be written: {error.strerror}; copy it to a writable disk"
        ) from error
    with lock:
        directory.lock.write_text(str(os.getpid()))
        yield


def drive(
    config: RunConfig,
    directory: RunDirectory,
    *,
    quiet: bool = False,
    before: Callable[[], object] = lambda: None,
    beside: Callable[[Service], Coroutine[Any, Any, None]] | None = None,
) -> RunSummary:
    """Run or resume a run to its end, and write its summary to summary.json. `before` is called as soon as this process
    holds the run's lock; `beside` runs concurrently, with the service as its argument, and is cancelled at the end.
    Raises RunError and the error that ended the run."""
    space = needing_space(directory, config.service.min_free_bytes)
    with space, sole_driver(directory), Interrupts() as interrupts:
        before()
        started = time.time()
        directory.append_session(started, None)
        # A summary of an earlier session would be out of date from here on.
        directory.summary.unlink(missing_ok=True)
        try:
            with interrupts_of_ray(interrupts), starting("Ray", quiet=quiet):
                start_local_ray(directory.run_id(), object_store_bytes=config.service.object_store_bytes)
            refuse_missing_gpus(reserved_gpus(config), offered_gpus())
            completed = asyncio.run(_drive(config, directory, interrupts, quiet=quiet, beside=beside))
        except BaseExceptionGroup as group:
            raise first_cause(group) from group
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            stop_local_ray()
            directory.append_session(started, time.time())
        return write_summary(directory, completed=completed)


@contextmanager
def interrupts_of_ray(interrupts: Interrupts) -> Iterator[None]:
    """Restore our signal handlers after Ray has started in this block: Ray's own handlers exit the process during
    startup, or dump native stacks."""
    try:
        yield
    except SystemExit:
        interrupts.note()
    except StartFailed:
        # A scheduler's signal also ends Ray's processes, which makes the start fail.
        if not interrupts.count:
            raise
    finally:
        interrupts.reclaim()


async def _drive(
    config: RunConfig,
    directory: RunDirectory,
    interrupts: Interrupts,
    *,
    quiet: bool,
    beside: Callable[[Service], Coroutine[Any, Any, None]] | None,
) -> bool:
    ABSENCE.seconds = config.cluster.absent_s
    logs = LogTerms(run_id=directory.run_id(), folder=directory.logs, retention=config.retention, json_stderr=False)
    runtime = RayRuntime(logs=logs)
    folder = directory.path / SERVICES_FOLDER
    async with running_services(config.services, folder) as urls:
        config = config.model_copy(update={"services": resolved(config.services, urls)})
        with telling_warnings(directory.logs, f"headrace logs {directory.path}", quiet=quiet) as warnings:
            service = await _started_service(config, directory, runtime, interrupts, quiet=quiet)
            try:
                async with asyncio.TaskGroup() as tasks:
                    draining = asyncio.Event()
                    running = tasks.create_task(run_guarded(runtime, service, config.service.hang_s, draining))
                    aside = [tasks.create_task(watch(service, warnings, quiet=quiet))]
                    if beside is not None:
                        aside.append(tasks.create_task(beside(service)))
                    with drain_on_interrupt(service, running, tasks, draining, interrupts):
                        completed = await running
                    for task in aside:
                        task.cancel()
            finally:
                # Actors that do not stop in time end with Ray. The timeout must not replace the error that ended it.
                with suppress(TimeoutError):
                    async with asyncio.timeout(config.service.drain_s):
                        await runtime.stop(service)
    # An interrupted or failed run finds its services again when it is resumed.
    if completed:
        await stop_services(folder)
    return completed


async def _started_service(
    config: RunConfig, directory: RunDirectory, runtime: RayRuntime, interrupts: Interrupts, *, quiet: bool
) -> Service:
    with starting("engines, sandboxes, gateway and learner", quiet=quiet):
        async with asyncio.TaskGroup() as tasks:
            spawning = tasks.create_task(runtime.spawn(Service, config, directory, runtime, name="service"))

            def interrupted() -> None:
                # The first cancellation stops in order what has started; the second one ends it immediately.
                spawning.cancel()
                asyncio.get_running_loop().call_later(config.service.drain_s, spawning.cancel)

            with interrupts.listening(interrupted):
                await asyncio.wait([spawning])
        if spawning.cancelled():
            raise RunInterrupted(f"interrupted during startup; continue with: headrace resume {directory.path}")
        return spawning.result()


async def run_guarded(
    runtime: Runtime,
    service: Service,
    hang_s: float,
    draining: asyncio.Event | None = None,
    absences: Absences | None = None,
) -> bool:
    """Call `Service.run` until it returns, even if the service's process dies or hangs. If `draining` is set, the new
    process drains as well. While the service is lost it is listed in `absences`."""

    async def ready() -> None:
        await service.progress()
        if draining is not None and draining.is_set():
            await service.drain()

    async with asyncio.TaskGroup() as tasks:
        guarding = tasks.create_task(guard(runtime, "service", service, hang_s, absences=absences))
        completed = await keep_running(service.run, ready)
        guarding.cancel()
    return completed


@contextmanager
def drain_on_interrupt(
    service: Service,
    running: asyncio.Task[bool],
    tasks: asyncio.TaskGroup,
    draining: asyncio.Event,
    interrupts: Interrupts,
) -> Iterator[None]:
    """Drain on the first interrupt, as soon as the service answers; cancel on the second."""

    def interrupted() -> None:
        if draining.is_set():
            running.cancel()
            return
        draining.set()
        tasks.create_task(keep_running(service.drain, service.progress))

    with interrupts.listening(interrupted):
        yield


class ProgressSource(Protocol):
    """Service that reports its progress."""

    async def progress(self) -> Progress: ...


async def watch(
    service: ProgressSource,
    warnings: TerminalWarnings,
    *,
    quiet: bool = False,
    display: ProgressDisplay | None = None,
) -> None:
    """Show progress and the warnings of actors once a second until cancelled."""
    if quiet:
        return
    with display or ProgressDisplay() as shown:
        while True:
            for line in warnings.new():
                shown.say(line)
            with suppress(ActorLost, TimeoutError):
                # A service that hangs says so in warnings of others.
                async with asyncio.timeout(ANSWER_S):
                    shown.show(await service.progress())
            await asyncio.sleep(PROGRESS_S)


@contextmanager
def telling_warnings(logs: Path, command: str, *, quiet: bool) -> Iterator[TerminalWarnings]:
    """Yield what actors warn of during the block, and print at its end what `watch` has not shown. `logs` is the folder
    of their logs."""
    warnings = TerminalWarnings(logs, command)
    try:
        yield warnings
    finally:
        if not quiet:
            for line in warnings.last():
                ProgressDisplay().say(line)


def write_summary(directory: RunDirectory, *, completed: bool) -> RunSummary:
    """Write summary.json of a run whose processes have ended, and draw reward.png. Raises LedgerRefused, OSError."""
    summary = summarize(directory, completed=completed)
    replace_file(directory.summary, orjson.dumps(summary.to_json(), option=orjson.OPT_INDENT_2))
    _draw(directory)
    return summary


def _draw(directory: RunDirectory) -> None:
    """Draw reward.png from the metrics, in a program of its own: matplotlib asks `fc-list` for fonts, which would get
    this process's secrets."""
    command = (sys.executable, "-m", "headrace.actors.run.plots", directory.metrics, directory.picture)
    done = subprocess.run(command, env=child_environment(), capture_output=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        logger.warning("%s was not drawn: %s", directory.picture.name, reason)
