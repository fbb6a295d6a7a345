"""From a recipe to a finished run: checks, run directory, local Ray, the service, the summary.

Invariants:
- Everything that can be wrong is looked at before the run directory is made; a refused start leaves nothing behind.
- One process drives a run directory at a time. It also guards the service: that one's death or hanging costs time only.
- Interrupting a run (Ctrl-C, SIGTERM) drains it: what is saved can be resumed. A second interrupt ends it at once.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import time
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import orjson
from pydantic import ValidationError

from headrace.actors.agents.config import AgentKind
from headrace.actors.agents.registry import make_agent
from headrace.actors.errors import (
    ActorLost,
    ConfigError,
    RunExists,
    RunInterrupted,
    RunMissing,
    StartFailed,
    first_cause,
)
from headrace.actors.evaluation.plugins import refuse_absent_evaluators
from headrace.actors.evaluation.repository import REPOSITORY_RUNS
from headrace.actors.places.config import SandboxKind
from headrace.actors.places.providers import check_provider, refuse_absent_images
from headrace.actors.record.metrics import read_metrics
from headrace.actors.record.run_directory import RunDirectory
from headrace.actors.run.config import RunConfig, explain, load_recipe
from headrace.actors.run.interrupts import Interrupts
from headrace.actors.run.older_configs import upgraded
from headrace.actors.run.overlap import refuse_overlap
from headrace.actors.run.service import Service
from headrace.actors.run.summary import RunSummary, summarize
from headrace.actors.runtime.call_guard import guard, keep_running
from headrace.actors.runtime.operations import ABSENCE
from headrace.actors.runtime.runtime import RayRuntime, check_ray_folder, start_local_ray, stop_local_ray
from headrace.actors.simulated.tasks import simulated_tasks
from headrace.buffer.datasets.terminal import Split, generate
from headrace.buffer.primitives.durable_files import publish_folder, replace_file
from headrace.buffer.primitives.file_lock import FileLock
from headrace.buffer.primitives.registry import PartRefused
from headrace.buffer.tasks import load_tasks, write_tasks
from headrace.policies.errors import EngineStartFailed
from headrace.policies.learners.objective_registry import OBJECTIVES
from headrace.policies.models.qwen3_config import check_model_files
from headrace.policies.sglang.server import find_python
from headrace.sandboxes.doctor import require_namespaces
from headrace.serve.observing.progress import ProgressDisplay, starting

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
    from pathlib import Path

    from headrace.actors.engine_group.config import EnginesConfig
    from headrace.actors.runtime.runtime import Runtime
    from headrace.buffer.tasks import Task
    from headrace.policies.learners.config import LearnerConfig
    from headrace.serve.observing.progress import Progress

PROGRESS_S = 1.0
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What the command line asked for."""

    recipe: Path
    runs_dir: Path
    name: str
    overrides: Sequence[str] = ()


def prepare(request: RunRequest) -> tuple[RunConfig, RunDirectory]:
    """Check everything, then make the run directory. Raises ConfigError and the errors of tasks, model and
    sandboxes."""
    if not NAME.fullmatch(request.name):
        raise ConfigError(f"--name {request.name}: use letters, digits, '.', '_' and '-', not starting with '.'")
    directory = RunDirectory(path=(request.runs_dir / request.name).resolve())
    if directory.path.exists():
        raise RunExists(f"{directory.path} exists: choose another --name, or `headrace resume {directory.path}`")
    config = load_recipe(request.recipe, request.overrides, directory.path)
    lay_out(config, directory)
    return config, directory


def lay_out(config: RunConfig, directory: RunDirectory) -> None:
    """Check what the configuration names, then make the run directory. Raises ConfigError and the errors of tasks,
    model and sandboxes."""
    check_parts(config)
    train, heldout = load_task_sets(config)
    _make(directory, config, train, heldout)


def check_parts(config: RunConfig) -> None:
    """Model, agent, sandboxes and a folder for temporary files are there. Raises ConfigError, ModelInvalid,
    NamespacesUnavailable and FolderRefused."""
    check_ray_folder()
    if not config.engines.is_simulated:
        check_model_files(config.model.path)
    refuse_absent_sglang(config.engines)
    make_agent(config.agent)
    check_provider(config.sandbox)
    check_objective(config.learner)
    if config.sandbox.provider is SandboxKind.LOCAL:
        require_namespaces()


def check_objective(learner: LearnerConfig) -> None:
    """Raises ConfigError when the learner's objective does not exist."""
    try:
        OBJECTIVES.find(learner.objective)
    except PartRefused as error:
        raise ConfigError(f"learner.objective: {error}") from error


def refuse_absent_sglang(engines: EnginesConfig) -> None:
    """Servers that the run would start have an environment. Raises ConfigError."""
    if engines.backend != "sglang" or not engines.count:
        return
    try:
        find_python(engines.sglang.python)
    except EngineStartFailed as error:
        raise ConfigError(
            f"engines.backend sglang: {error}, name another environment's in engines.sglang.python, or set "
            "engines.backend to cpu"
        ) from error


def load_task_sets(config: RunConfig) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
    """Training and held-out tasks, read or generated; an overlap is refused. Raises TaskFileError, ConfigError and
    what hosts of `sandbox.remote.urls` refuse."""
    section, seed = config.tasks, config.service.seed
    if section.train is not None and section.heldout is not None:
        train, heldout = load_tasks(section.train), load_tasks(section.heldout)
    elif config.agent.kind is AgentKind.SIMULATED:
        evaluate_s = section.evaluate_s
        train = simulated_tasks(seed, section.train_count, evaluate_s=evaluate_s)
        heldout = simulated_tasks(seed, section.heldout_count, evaluate_s=evaluate_s, family="heldout")
    else:
        train = generate(seed, section.train_count, Split.TRAIN)
        heldout = generate(seed, section.heldout_count, Split.HELD_OUT)
    refuse_overlap(train, heldout, "tasks.heldout")
    refuse_absent_images(config.sandbox, (*train, *heldout))
    refuse_absent_evaluators((*train, *heldout))
    refuse_short_evaluations((*train, *heldout), config.rollout.evaluate_timeout_s)
    return train, heldout


def refuse_short_evaluations(tasks: Iterable[Task], evaluate_timeout_s: float) -> None:
    """An evaluation has the time for every run that it may need. Raises ConfigError."""
    for task in tasks:
        needed_s = REPOSITORY_RUNS * task.evaluator.timeout_s
        if task.evaluator.repository is not None and needed_s > evaluate_timeout_s:
            raise ConfigError(
                f"rollout.evaluate_timeout_s {evaluate_timeout_s:g} is below {REPOSITORY_RUNS} x evaluator.timeout_s "
                f"({task.evaluator.timeout_s:g}) of task {task.id}: diff, tests, twins and untouched repository may "
                f"each take that long; set rollout.evaluate_timeout_s to {needed_s:g}"
            )


def _make(directory: RunDirectory, config: RunConfig, train: Sequence[Task], heldout: Sequence[Task]) -> None:
    """The run directory appears complete or not at all."""
    staged = directory.path.with_name(f".{directory.path.name}.{os.getpid()}")
    partial = RunDirectory(path=staged)
    try:
        partial.write_beginning(train, uuid.uuid4().hex)
        write_tasks(partial.heldout_tasks, heldout)
        partial.config.write_bytes(orjson.dumps(config.model_dump(mode="json"), option=orjson.OPT_INDENT_2))
        publish_folder(staged, directory.path)
    except OSError as error:
        shutil.rmtree(staged, ignore_errors=True)
        raise ConfigError(
            f"--runs-dir: {directory.path} cannot be written: {error.strerror}; choose another"
        ) from error


def reopen(path: Path) -> tuple[RunConfig, RunDirectory]:
    """The configuration of a run that was started before, by this version or an older one. Raises RunMissing."""
    directory = RunDirectory(path=path.resolve())
    if not directory.config.is_file():
        raise RunMissing(f"{path}: no run there (config.json is missing); list runs with `headrace status`")
    try:
        document = orjson.loads(directory.config.read_bytes())
        if not isinstance(document, dict) or not all(isinstance(table, dict) for table in document.values()):
            raise ValueError("tables are missing")
        return RunConfig.model_validate(placed(upgraded(document), directory)), directory
    except (KeyError, ValueError) as error:
        reason = explain(error, RunConfig) if isinstance(error, ValidationError) else error
        raise RunMissing(f"{directory.config}: not the configuration of a run of this version: {reason}") from error


def placed(document: dict[str, Any], directory: RunDirectory) -> dict[str, Any]:
    """The document with the paths of where the run directory lies now: it may have been moved."""
    learner = document["learner"] | {
        "checkpoint_dir": str(directory.checkpoints),
        "snapshot_dir": str(directory.path / "weights"),
    }
    return document | {"learner": learner}


@contextmanager
def sole_driver(directory: RunDirectory) -> Iterator[None]:
    """Hold the run's lock; the kernel drops it when this process dies. Raises RunExists when another process drives
    the run, ConfigError when nothing can be written there."""
    try:
        lock = FileLock(directory.lock, blocking=False)
    except BlockingIOError as error:
        raise RunExists(f"{directory.path} is being driven by another process; stop that one first") from error
    except OSError as error:
        raise ConfigError(
            f"{directory.path} cannot be written: {error.strerror}; copy it to a disk that can"
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
    """Run or resume to the end; the summary is also written to summary.json. `before` is called as soon as nobody else
    drives the run; `beside` goes on beside the run, with its service, and is cancelled at the end. Raises RunError and
    what ended the run."""
    with sole_driver(directory), Interrupts() as interrupts:
        before()
        started = time.time()
        directory.append_session(started, None)
        # It told how the run stood before it went on.
        directory.summary.unlink(missing_ok=True)
        try:
            with interrupts_of_ray(interrupts), starting("Ray", quiet=quiet):
                start_local_ray(directory.path, object_store_bytes=config.service.object_store_bytes)
            completed = asyncio.run(_drive(config, directory, interrupts, quiet=quiet, beside=beside))
        except BaseExceptionGroup as group:
            raise first_cause(group) from group
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            stop_local_ray()
            directory.append_session(started, time.time())
        summary = summarize(directory, completed=completed)
        replace_file(directory.summary, orjson.dumps(summary.to_json(), option=orjson.OPT_INDENT_2))
        draw(directory)
        return summary


@contextmanager
def interrupts_of_ray(interrupts: Interrupts) -> Iterator[None]:
    """Ray starts in this block. Its handlers exit the process in the middle of that, or dump native stacks."""
    try:
        yield
    except SystemExit:
        interrupts.note()
    except StartFailed:
        # A scheduler's signal ends Ray's processes too.
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
    runtime = RayRuntime()
    with starting("engines, sandboxes, gateway and learner", quiet=quiet):
        service = await _start(runtime, config, directory, interrupts)
    try:
        async with asyncio.TaskGroup() as tasks:
            draining = asyncio.Event()
            running = tasks.create_task(run_guarded(runtime, service, config.service.hang_s, draining))
            aside = [tasks.create_task(watch(service, quiet=quiet))]
            if beside is not None:
                aside.append(tasks.create_task(beside(service)))
            with drain_on_interrupt(service, running, tasks, draining, interrupts):
                completed = await running
            for task in aside:
                task.cancel()
    finally:
        # What does not close in time dies with Ray; it must not hide how the run ended.
        with suppress(TimeoutError):
            async with asyncio.timeout(config.service.drain_s):
                await runtime.stop(service)
    return completed


async def _start(runtime: Runtime, config: RunConfig, directory: RunDirectory, interrupts: Interrupts) -> Service:
    """The service with all that it starts. Raises RunInterrupted, after what had started was stopped in order (at the
    second interrupt, or after `service.drain_s`, at once)."""
    if interrupts.count == 0:
        async with asyncio.TaskGroup() as tasks:
            starting = tasks.create_task(runtime.spawn(Service, config, directory, runtime, name="service"))

            def interrupted() -> None:
                starting.cancel()
                asyncio.get_running_loop().call_later(config.service.drain_s, starting.cancel)

            with interrupts.listening(interrupted):
                await asyncio.wait([starting])
        if not starting.cancelled():
            return starting.result()
    raise RunInterrupted(f"interrupted while it started; continue with: headrace resume {directory.path}")


async def run_guarded(runtime: Runtime, service: Service, hang_s: float, draining: asyncio.Event | None = None) -> bool:
    """`Service.run` to its end, also when the service's process dies or hangs on the way; a new one is told when the
    run is `draining`."""

    async def ready() -> None:
        await service.progress()
        if draining is not None and draining.is_set():
            await service.drain()

    async with asyncio.TaskGroup() as tasks:
        guarding = tasks.create_task(guard(runtime, "service", service, hang_s))
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
    """First interrupt: drain, as soon as the service is there to be told. Second: cancel."""

    def interrupted() -> None:
        if draining.is_set():
            running.cancel()
            return
        draining.set()
        tasks.create_task(keep_running(service.drain, service.progress))

    with interrupts.listening(interrupted):
        yield


class Shown(Protocol):
    """What has progress to show."""

    async def progress(self) -> Progress: ...


async def watch(service: Shown, *, quiet: bool) -> None:
    """Show progress once a second until cancelled."""
    if quiet:
        return
    with ProgressDisplay() as display:
        while True:
            with suppress(ActorLost):
                display.show(await service.progress())
            await asyncio.sleep(PROGRESS_S)


def draw(directory: RunDirectory) -> None:
    """Draw reward.png from the metrics; left out, with a line in the summary's place, when matplotlib is not
    installed."""
    from headrace.serve.observing.plots import reward_png

    reward_png(read_metrics(directory.metrics), directory.picture)
