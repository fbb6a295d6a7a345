"""Driver of a run: checks the recipe, creates the run directory, starts Ray and the service, writes the summary.

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
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import orjson
from pydantic import ValidationError
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from headrace.actors.agents.loop.config import refuse_unfilled_templates
from headrace.actors.agents.registry.config import AgentKind
from headrace.actors.agents.registry.registry import make_agent, refuse_unrecorded_episodes
from headrace.actors.engines.config import EnginesConfig
from headrace.actors.engines.devices import needed_gpus, refuse_missing_gpus, refuse_shared_gpus
from headrace.actors.environments.registry import check_environment, make_environment
from headrace.actors.errors import (
    ActorLost,
    ConfigError,
    RunExists,
    RunInterrupted,
    RunMissing,
    StartFailed,
    first_cause,
)
from headrace.actors.evaluation.by_service.scoring import check_service_evaluators
from headrace.actors.evaluation.graders.plugins import refuse_absent_evaluators
from headrace.actors.evaluation.graders.repository import REPOSITORY_RUNS
from headrace.actors.evaluation.graders.verifier import VERIFIER_RUNS
from headrace.actors.record.files.absences import Absences
from headrace.actors.record.files.disk_space import needing_space
from headrace.actors.record.files.log_warnings import TerminalWarnings
from headrace.actors.record.files.logs import LogTerms
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.changes import changed_document, journal_changes
from headrace.actors.run.config import RunConfig, explain, of_record, recorded, resolve
from headrace.actors.run.overlays import layered, load_layered
from headrace.actors.run.progress import Progress, ProgressDisplay, starting
from headrace.actors.run.service import Service
from headrace.actors.run.sources import KEY, refuse_overlap
from headrace.actors.run.summary import RunSummary, summarize
from headrace.actors.runtime.actors.call_guard import guard, keep_running
from headrace.actors.runtime.actors.interrupts import Interrupts
from headrace.actors.runtime.actors.operations import ABSENCE
from headrace.actors.runtime.actors.runtime import (
    RayRuntime,
    Runtime,
    check_ray_folder,
    offered_gpus,
    start_local_ray,
    stop_local_ray,
)
from headrace.actors.runtime.pools.config import SandboxKind
from headrace.actors.runtime.pools.providers import check_provider, refuse_absent_images
from headrace.actors.runtime.simulated.tasks import simulated_tasks
from headrace.actors.services.clients import check_services, refuse_missing_services
from headrace.actors.services.config import ServiceKind
from headrace.actors.services.started import SERVICES_FOLDER, resolved, running_services, stop_services
from headrace.buffer.core.source_names import id_in_run
from headrace.buffer.primitives.durable_files import publish_folder, replace_file
from headrace.buffer.primitives.file_lock import FileLock
from headrace.buffer.primitives.registry import PartRefused
from headrace.buffer.tasks.datasets.terminal import Split, generate
from headrace.buffer.tasks.task import Task, load_tasks, write_tasks
from headrace.policies.errors import EngineSettingsInvalid, EngineStartFailed, LearnerSettingsInvalid
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.learners.objectives import registry
from headrace.policies.learners.slime.checkout import find_checkouts
from headrace.policies.miniatures.names import name_of
from headrace.policies.models.model_files import check_model_files
from headrace.policies.models.qwen_config import check_computable
from headrace.policies.processes.engine_keys import read_engine_key
from headrace.policies.sglang.server import find_python
from headrace.sandboxes.doctor import require_namespaces
from headrace.sandboxes.errors import FolderRefused, NamespacesUnavailable
from headrace.sandboxes.host.child_environment import child_environment
from headrace.serve.gateway.http.placement import most_processes
from headrace.serve.gateway.rendering.template_renderer import load_renderer

logger = logging.getLogger(__name__)

Allow = Callable[[Iterable[Task]], None]

PROGRESS_S = 1.0
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


def prepare(request: RunRequest) -> tuple[RunConfig, RunDirectory]:
    """Check everything, then create the run directory. Raises ConfigError and the errors of tasks, model and
    sandboxes."""
    if not NAME.fullmatch(request.name):
        raise ConfigError(f"--name {request.name}: use letters, digits, '.', '_' and '-', not starting with '.'")
    directory = RunDirectory(path=(request.runs_dir / request.name).resolve())
    if directory.path.exists():
        raise RunExists(f"{directory.path} exists: choose another --name, or `headrace resume {directory.path}`")
    config = load_layered(request.recipe, request.on, request.overrides, directory.path)
    lay_out(config, directory)
    return config, directory


def lay_out(config: RunConfig, directory: RunDirectory, *, allow: Allow = lambda _: None) -> None:
    """Check everything that the configuration names, then create the run directory, completely or not at all. `allow`
    gets the tasks that were read before anything that they name is looked up. Raises ConfigError, the errors of tasks,
    model and sandboxes, and those of `allow`."""
    check_parts(config)
    train, heldout = load_task_sets(config, allow)
    staged = directory.path.with_name(f".{directory.path.name}.{os.getpid()}")
    partial = RunDirectory(path=staged)
    try:
        partial.write_beginning(train, uuid.uuid4().hex)
        write_tasks(partial.heldout_tasks, heldout)
        partial.config.write_bytes(document_of(config))
        publish_folder(staged, directory.path)
    except OSError as error:
        shutil.rmtree(staged, ignore_errors=True)
        raise ConfigError(
            f"--runs-dir: {directory.path} cannot be written: {error.strerror}; choose another folder"
        ) from error


def document_of(config: RunConfig) -> bytes:
    """Return the content of a run's config.json."""
    return orjson.dumps(recorded(config.model_dump(mode="json")), option=orjson.OPT_INDENT_2)


def check_parts(config: RunConfig) -> None:
    """Check that the model, the agent, the services, the sandboxes and the folder for temporary files are usable.
    Raises ConfigError, ModelInvalid, NamespacesUnavailable and FolderRefused."""
    for check in MACHINE_CHECKS:
        check(config)
    check_recipe_parts(config)


def check_recipe_parts(config: RunConfig) -> None:
    """Check what does not depend on this machine: the model's files, the agent, the services, the objective. Raises
    ConfigError, ModelInvalid."""
    build_miniature(config)
    if not config.engines.is_simulated:
        check_model_files(config.model.path)
        # SGLang and other learners check the architecture themselves.
        if config.learner.kind == "megatron" or (config.engines.backend == "cpu" and config.engines.count):
            check_computable(config.model.path)
        if config.learner.needs_kinds:
            load_renderer(config.model.path, token_kinds=True)
    try:
        read_engine_key(config.engines.key_file, "engines.key_file")
    except EngineSettingsInvalid as error:
        raise ConfigError(str(error)) from error
    refuse_shared_gpus(config.engines, reserved_gpus(config))
    check_services(config.services)
    for name, own in config.by_source().items():
        with of_source(name):
            check_agent(own)
    if config.learner.kind != "slime":
        check_objective(config.learner)


def check_gateways(config: RunConfig) -> None:
    """Raise ConfigError if this machine has fewer cores than the run has gateways."""
    if (processes := config.gateway.processes) > (cores := most_processes()):
        raise ConfigError(
            f"gateway.processes = {processes}: this machine has {cores} cores for them; use at most {cores}"
        )


def check_agent(config: RunConfig) -> None:
    """Check the agent with its environment, and that the services exist which they use. Raises ConfigError."""
    make_agent(config.agent, config.environment)
    if config.agent.kind is AgentKind.LOOP:
        refuse_missing_services(make_environment(config.environment).services, config.services)
        if config.agent.loop.judge.service:
            judges = (config.agent.loop.judge.service,)
            refuse_missing_services(judges, config.services, kind=ServiceKind.MODEL, user="agent.loop.judge")


ASKED_S: Final = 1.0
"""Time for which a driver waits for the lock of its run."""
MACHINE_CHECKS: Final[tuple[Callable[[RunConfig], object], ...]] = (
    lambda _: check_ray_folder(),
    lambda config: refuse_absent_sglang(config.engines),
    lambda config: check_provider(config.sandbox),
    lambda config: check_gateways(config) if config.cluster.is_local else None,
    lambda config: check_slime(config.learner) if config.learner.kind == "slime" else None,
    lambda config: require_namespaces() if config.sandbox.provider is SandboxKind.LOCAL else None,
)
"""Checks of what this machine offers. Each raises ConfigError, NamespacesUnavailable or FolderRefused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """A checked recipe. `absent` are the reasons why it could not start on this machine, which need not be the one that
    it is for."""

    config: RunConfig
    origins: dict[str, str]
    tasks: tuple[int, int]
    """Numbers of training and held-out tasks."""
    absent: tuple[str, ...]


def dry_run(recipe: Path, on: Sequence[Path], overrides: Sequence[str]) -> DryRun:
    """Check a recipe with machine files without creating anything but miniatures. Raises ConfigError and the errors of
    tasks and model."""
    found = layered(recipe, on, overrides)
    config = resolve(found.document, recipe, Path("run"))
    check_recipe_parts(config)
    train, heldout = load_task_sets(config)
    absent = []
    for check in MACHINE_CHECKS:
        try:
            check(config)
        except (ConfigError, NamespacesUnavailable, FolderRefused) as error:
            absent.append(str(error))
    return DryRun(config=config, origins=found.origins, tasks=(len(train), len(heldout)), absent=tuple(absent))


def build_miniature(config: RunConfig) -> None:
    """Build the miniature whose model the run trains, if it is one and does not exist yet. Raises ConfigError."""
    name = name_of(config.model.path)
    if name is None or config.model.path.is_dir():
        return
    # Imported late, because it needs torch.
    from headrace.policies.miniatures.building import build

    try:
        with starting(f"the miniature {name} (its policy is trained for about a minute)", quiet=False):
            build(name)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"model.path: the miniature {name} cannot be built: {error}; install headrace[cpu], or name a model"
        ) from error


def reserved_gpus(config: RunConfig) -> dict[str, int]:
    """Return the number of GPUs that each part of a run reserves."""
    return needed_gpus(config.engines, config.push, learner=config.learner.reserved_gpus)


def check_objective(learner: LearnerConfig) -> None:
    """Raise ConfigError if the learner's objective does not exist or does not go with its correction."""
    try:
        registry.check_objective(learner)
    except PartRefused as error:
        raise ConfigError(f"learner.objective: {error}") from error


def check_slime(learner: LearnerConfig) -> None:
    """Raise ConfigError if slime or Megatron-LM is missing, or differs from what headrace uses of it."""
    try:
        find_checkouts(learner.slime)
    except LearnerSettingsInvalid as error:
        raise ConfigError(str(error)) from error


def refuse_absent_sglang(engines: EnginesConfig) -> None:
    """Raise ConfigError if the run would start SGLang servers and there is no environment for them."""
    if engines.backend != "sglang" or not engines.count:
        return
    try:
        find_python(engines.sglang.python)
    except EngineStartFailed as error:
        raise ConfigError(
            f"engines.backend sglang: {error}, or set engines.sglang.python to another environment's Python, or "
            "engines.backend to cpu"
        ) from error


def load_task_sets(config: RunConfig, allow: Allow = lambda _: None) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
    """Read or generate the training and held-out tasks of all sources. Raises TaskFileError, ConfigError (including
    when they overlap) and the errors raised for the hosts in `sandbox.remote.urls`."""
    build_miniature(config)
    train: list[Task] = []
    heldout: dict[str, list[Task]] = {}
    for name, own in config.by_source().items():
        with of_source(name):
            sets = load_source(own, allow)
        own_train, own_heldout = ([replace(task, id=id_in_run(name, task.id)) for task in each] for each in sets)
        train += own_train
        heldout[name] = own_heldout
    for name, tasks in heldout.items():
        if name:
            refuse_overlap(train, tasks, f"{KEY}.{name}.heldout", trained_by=f"the training tasks of {KEY}")
        else:
            refuse_overlap(train, tasks, "tasks.heldout")
    return tuple(train), tuple(task for tasks in heldout.values() for task in tasks)


@contextmanager
def of_source(name: str) -> Iterator[None]:
    """Name the source in the configuration errors of the block, if the run has sources."""
    try:
        yield
    except ConfigError as error:
        if not name:
            raise
        raise ConfigError(f"{KEY}.{name}: {error}") from error


def load_source(config: RunConfig, allow: Allow = lambda _: None) -> tuple[Sequence[Task], Sequence[Task]]:
    """Read or generate the training and held-out tasks of one source, given its configuration. Raises the errors of
    `load_task_sets`, apart from overlaps."""
    section, seed = config.tasks, config.service.seed
    train: Sequence[Task]
    heldout: Sequence[Task]
    if section.train is not None and section.heldout is not None:
        train, heldout = load_tasks(section.train), load_tasks(section.heldout)
    elif config.agent.kind is AgentKind.SIMULATED:
        evaluate_s = section.evaluate_s
        train = simulated_tasks(seed, section.train_count, evaluate_s=evaluate_s)
        heldout = simulated_tasks(seed, section.heldout_count, evaluate_s=evaluate_s, family="heldout")
    else:
        train = generate(seed, section.train_count, Split.TRAIN)
        heldout = generate(seed, section.heldout_count, Split.HELD_OUT)
    allow((*train, *heldout))
    check_tasks(config, (*train, *heldout))
    return train, heldout


def check_tasks(config: RunConfig, tasks: tuple[Task, ...]) -> None:
    """Check that a run of the configuration can work on these tasks: images, evaluators, environment, deadlines. Raises
    ConfigError and the errors raised for the hosts in `sandbox.remote.urls`."""
    refuse_absent_images(config.sandbox, tasks)
    refuse_absent_evaluators(tasks)
    refuse_unrecorded_episodes(config.agent, tasks)
    check_service_evaluators(tasks, config.services, config.rollout.evaluate_timeout_s)
    if config.agent.kind is AgentKind.LOOP:
        check_environment(config.environment, tasks)
        refuse_unfilled_templates(config.agent.loop, tasks)
    refuse_short_evaluations(tasks, config.rollout.evaluate_timeout_s)


def refuse_short_evaluations(tasks: Iterable[Task], evaluate_timeout_s: float) -> None:
    """Raise ConfigError if an evaluation may time out before it has completed all the test runs that it may need."""
    for task in tasks:
        needed_s, why = 0.0, ""
        for evaluator in task.evaluator.deciding:
            if evaluator.repository is not None:
                runs, why = REPOSITORY_RUNS, "the runs on the diff, the tests, the twins and the untouched repository"
            elif evaluator.verifier is not None:
                runs, why = VERIFIER_RUNS, "a verifier that breaks, its run on the untouched files and its repetition"
            else:
                # Other kinds are limited by the phase's deadline alone, unless they follow one of those in a sum.
                runs = 1
            needed_s += runs * evaluator.timeout_s
        if why and needed_s > evaluate_timeout_s:
            spec = task.evaluator
            times = f"{runs} x evaluator.timeout_s ({spec.timeout_s:g})" if not spec.parts else "what the parts need"
            raise ConfigError(
                f"rollout.evaluate_timeout_s {evaluate_timeout_s:g} is below {times} of task {task.id}: {why} may each "
                f"take that long; set rollout.evaluate_timeout_s to {needed_s:g}"
            )


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
    async with running_services(config.services, directory.path / SERVICES_FOLDER) as urls:
        placed = config.model_copy(update={"services": resolved(config.services, urls)})
        completed = await _drive_service(placed, directory, interrupts, quiet=quiet, beside=beside)
    # An interrupted or failed run finds its services again when it is resumed.
    if completed:
        await stop_services(directory.path / SERVICES_FOLDER)
    return completed


async def _drive_service(
    config: RunConfig,
    directory: RunDirectory,
    interrupts: Interrupts,
    *,
    quiet: bool,
    beside: Callable[[Service], Coroutine[Any, Any, None]] | None,
) -> bool:
    logs = LogTerms(run_id=directory.run_id(), folder=directory.logs, retention=config.retention, json_stderr=False)
    runtime = RayRuntime(logs=logs)
    with telling_warnings(directory.logs, quiet=quiet) as warnings:
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
            # Actors that do not stop in time end with Ray. The timeout must not replace the error that ended the run.
            with suppress(TimeoutError):
                async with asyncio.timeout(config.service.drain_s):
                    await runtime.stop(service)
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
def telling_warnings(logs: Path, *, quiet: bool) -> Iterator[TerminalWarnings]:
    """Yield what actors warn of during the block, and print at its end what `watch` has not shown. `logs` is the folder
    of their logs."""
    warnings = TerminalWarnings(logs)
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
