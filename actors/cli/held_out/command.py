"""The command `headrace eval`, which evaluates the model of a recipe or a checkpoint of a run.

Invariants:
- The request is validated before anything is written; a refused evaluation leaves no files behind.
- The output folder belongs to one evaluation, which `evaluation.json` identifies. Repeating the request resumes an
  interrupted evaluation; a different request is refused.
- The ledger, checkpoints and metrics of a run are not changed, and the run cannot be driven during the evaluation.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from headrace.actors.cli.held_out.service import EvaluationService
from headrace.actors.engines.devices import needed_gpus, refuse_missing_gpus
from headrace.actors.errors import ConfigError, RunExists, RunMissing, first_cause
from headrace.actors.record.files.logs import LogTerms
from headrace.actors.record.files.metrics import EvaluationSummary
from headrace.actors.record.files.run_directory import RunDirectory, free_folder
from headrace.actors.rollouts.evaluation_folders import EvaluationFolders
from headrace.actors.rollouts.summary import About
from headrace.actors.run.checks import check_parts
from headrace.actors.run.config import RunConfig, apply_override, explain, load_recipe
from headrace.actors.run.launch import interrupts_of_ray, reopen, sole_driver, telling_warnings, watch
from headrace.actors.run.parts import evaluation_sampling, recipe_digest
from headrace.actors.run.progress import starting
from headrace.actors.run.sections import ModelSection
from headrace.actors.run.sources import problem_digest, refuse_overlap
from headrace.actors.run.task_sets import TaskChecks, load_task_sets
from headrace.actors.runtime.actors.interrupts import Interrupts
from headrace.actors.runtime.actors.operations import ABSENCE
from headrace.actors.runtime.actors.runtime import RayRuntime, offered_gpus, start_local_ray, stop_local_ray
from headrace.actors.services.started import SERVICES_FOLDER, resolved, running_services, stop_services
from headrace.buffer.primitives.durable_files import replace_file
from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.buffer.tasks.task import Task, load_tasks, tasks_digest
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.errors import CheckpointUnreadable
from headrace.policies.learner import WeightsShard, WeightsSnapshot
from headrace.policies.learners.checkpoint_retention import best_checkpoint, kept_checkpoints, version_of
from headrace.policies.learners.checkpoints import check_checkpoint, list_checkpoints
from headrace.policies.models.model_files import weight_files

START_VERSION = PolicyVersion(1, 0)
"""Version given to a recipe's model, as in a run."""
BEST = "best"
"""Value of `--checkpoint` that selects the best checkpoint by held-out success."""
MAX_NAMED = 10
UNFINISHED = "evaluation.json.partial"
"""File that a process leaves behind if it is killed while creating the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """Options of the command line. `source` is a recipe or a run directory. None for any other option means the
    recipe's value."""

    source: Path
    out: Path | None = None
    checkpoint: str | None = None
    samples: int | None = None
    tasks: Path | None = None
    limit: int | None = None
    overrides: Sequence[str] = ()
    runs_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Validated request. `run` is the run that the checkpoint belongs to, `version` the version of the weights."""

    config: RunConfig
    run: RunDirectory | None
    version: PolicyVersion
    tasks: tuple[Task, ...]
    samples: int
    recipe_sha256: str
    out: Path

    @property
    def tag(self) -> str:
        return f"eval-{self.version}"

    @property
    def about(self) -> About:
        sampling = evaluation_sampling(self.config)
        return About(model=str(self.config.model.path), recipe_sha256=self.recipe_sha256, sampling=sampling)

    @property
    def directory(self) -> RunDirectory:
        """Working directory of engines, gateway and pool."""
        return RunDirectory(path=self.out / "service")

    @property
    def identity(self) -> dict[str, Any]:
        """Contents of evaluation.json; two evaluations are the same if and only if these are equal."""
        return {
            "model": str(self.config.model.path),
            "version": str(self.version),
            "recipe_sha256": self.recipe_sha256,
            "dataset_sha256": tasks_digest(self.tasks),
            "samples": self.samples,
        }


def prepare_evaluation(request: EvalRequest) -> Evaluation:
    """Validate a request without writing anything. Raises ConfigError, RunMissing and errors of tasks, model and
    sandboxes."""
    if request.source.is_dir():
        evaluation = _of_run(request)
    else:
        if request.checkpoint is not None:
            raise ConfigError(f"--checkpoint {request.checkpoint}: {request.source} is a recipe; name a run directory")
        out = (request.out or free_folder(request.runs_dir, f"{request.source.stem}-eval")).resolve()
        config = load_recipe(request.source, request.overrides, out / "service")
        tasks = _chosen(request, config, *load_task_sets(config))
        evaluation = of_start_policy(config, tasks, samples=request.samples or config.evaluation.samples, out=out)
    if evaluation.config.engines.is_simulated:
        raise ConfigError("engines.backend simulated has no policy to evaluate; set engines.backend to cpu")
    check_parts(evaluation.config)
    refuse_taken(evaluation)
    if evaluation.run is not None:
        # The last check, because it reads all files of the checkpoint.
        checkpoint = evaluation.config.model.path
        try:
            check_checkpoint(checkpoint)
        except CheckpointUnreadable as error:
            raise ConfigError(f"--checkpoint {checkpoint.name}: {error}; choose another checkpoint") from error
    return evaluation


def of_start_policy(config: RunConfig, tasks: tuple[Task, ...], *, samples: int, out: Path) -> Evaluation:
    """Return an evaluation of a recipe's model."""
    return Evaluation(
        config=config,
        run=None,
        version=START_VERSION,
        tasks=tasks,
        samples=samples,
        recipe_sha256=recipe_digest(config),
        out=out,
    )


def _of_run(request: EvalRequest) -> Evaluation:
    try:
        config, run = reopen(request.source)
    except RunMissing as error:
        raise ConfigError(str(error)) from error
    if run.is_driven():
        raise ConfigError(f"{run.path} is being driven by another process; stop that process first")
    if request.overrides:
        config = _with_sampling(config, request)
    checkpoint = _checkpoint(run, request.checkpoint)
    train, held_out = load_tasks(run.train_tasks), load_tasks(run.heldout_tasks)
    tasks = _chosen(request, config, train, held_out)
    samples = request.samples or config.evaluation.samples
    name = f"{checkpoint.name}-{tasks_digest(tasks)[:8]}-{samples}"
    if request.overrides:
        name += f"-{recipe_digest(config)[:8]}"
    return Evaluation(
        config=config.model_copy(update={"model": ModelSection(path=checkpoint)}),
        run=run,
        version=version_of(checkpoint),
        tasks=tasks,
        samples=samples,
        recipe_sha256=recipe_digest(config),
        out=request.out.resolve() if request.out else run.path / "evaluations" / name,
    )


def _with_sampling(config: RunConfig, request: EvalRequest) -> RunConfig:
    """Return a run's configuration with this evaluation's sampling. Raises ConfigError for other keys."""
    wanted: dict[str, Any] = {}
    for override in request.overrides:
        if not override.startswith("evaluation.sampling."):
            raise ConfigError(
                f"--set {override}: {request.source} is a run, for which only keys of evaluation.sampling can be set; "
                "name a recipe to set others"
            )
        apply_override(wanted, override)
    document = config.model_dump()
    document["evaluation"]["sampling"] |= wanted["evaluation"]["sampling"]
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"--set: {explain(error, RunConfig)}") from error


def _checkpoint(run: RunDirectory, wanted: str | None) -> Path:
    """Return the checkpoint of a version or the best one, by default the newest. Raises ConfigError, whose message
    lists the existing checkpoints."""
    if wanted == BEST:
        if (best := best_checkpoint(run.checkpoints)) is None:
            raise ConfigError(
                f"--checkpoint {BEST}: no evaluation of {run.path} has rated a checkpoint; name a version"
            )
        return best[1]
    newest = list_checkpoints(run.checkpoints)
    if not newest:
        raise ConfigError(
            f"{run.path} has no checkpoint yet; continue it (`headrace resume {run.path}`), or name a recipe"
        )
    if wanted is None:
        return newest[-1]
    found = sorted((*kept_checkpoints(run.checkpoints), *newest), key=version_of)
    for path in found:
        if str(version_of(path)) == wanted:
            return path
    names = ", ".join(str(version_of(path)) for path in found[-MAX_NAMED:])
    raise ConfigError(f"--checkpoint {wanted}: {run.path} has no such checkpoint; it has {names}")


def _chosen(
    request: EvalRequest, config: RunConfig, train: Sequence[Task], held_out: Sequence[Task]
) -> tuple[Task, ...]:
    """Return the tasks to evaluate. Raises TaskFileError, ConfigError."""
    if request.tasks is None:
        return tuple(held_out[: request.limit]) if request.limit else config.held_out(held_out)
    if config.tasks.sources:
        raise ConfigError(
            f"--tasks {request.tasks}: the recipe has sources, and a task of a file is of none; leave --tasks out"
        )
    tasks = load_tasks(request.tasks)[: request.limit]
    problems = {task.id: problem_digest(task) for task in tasks}
    refuse_overlap({problem_digest(task) for task in train}, problems, f"--tasks {request.tasks}")
    checks = TaskChecks(config)
    for task in tasks:
        checks.add(task)
    checks.finish()
    return tasks


def refuse_taken(evaluation: Evaluation) -> None:
    """Check that the output folder is free or contains this evaluation in an unfinished state. Raises ConfigError."""
    out = evaluation.out
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; name a folder")
    if not out.exists() or {path.name for path in out.iterdir()} <= {UNFINISHED}:
        return
    try:
        identity = orjson.loads((out / "evaluation.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        identity = None
    if identity != evaluation.identity:
        raise ConfigError(f"--out {out} contains files other than those of this evaluation; choose another folder")
    if (out / "summary.json").exists():
        raise ConfigError(f"--out {out}: this evaluation is finished (see summary.json there); choose another folder")


def drive_evaluation(evaluation: Evaluation, *, quiet: bool = False) -> EvaluationSummary:
    """Run an evaluation in this process, with its own Ray. Raises RunError, or whatever other error ended the
    evaluation."""
    with ExitStack() as stack:
        if evaluation.run is not None:
            stack.enter_context(_locked(evaluation.run))
        try:
            # The identity is written first, since a nonempty folder without one is refused.
            evaluation.out.mkdir(parents=True, exist_ok=True)
            identity = orjson.dumps(evaluation.identity, option=orjson.OPT_INDENT_2)
            replace_file(evaluation.out / "evaluation.json", identity)
            evaluation.directory.path.mkdir(exist_ok=True)
            if not evaluation.directory.identity.exists():
                replace_file(evaluation.directory.identity, uuid.uuid4().hex.encode())
        except OSError as error:
            raise ConfigError(
                f"--out: {evaluation.out} cannot be written: {error.strerror}; choose another folder"
            ) from error
        stack.enter_context(_locked(evaluation.directory))
        interrupts = stack.enter_context(Interrupts())
        stack.callback(stop_local_ray)
        object_store_bytes = evaluation.config.service.object_store_bytes
        with interrupts_of_ray(interrupts), starting("Ray", quiet=quiet):
            start_local_ray(evaluation.directory.run_id(), object_store_bytes=object_store_bytes)
        parts = needed_gpus(evaluation.config.engines, evaluation.config.push, learner={})
        refuse_missing_gpus(parts, offered_gpus())
        try:
            return asyncio.run(_interruptible(_drive(evaluation, quiet=quiet), interrupts))
        except BaseExceptionGroup as group:
            raise first_cause(group) from group
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


async def _interruptible(work: Coroutine[Any, Any, EvaluationSummary], interrupts: Interrupts) -> EvaluationSummary:
    """Run the work and cancel it on an interrupt. The work then closes its resources, and finished answers are kept for
    the next call."""
    task = asyncio.ensure_future(work)
    with interrupts.listening(task.cancel):
        return await task


async def _drive(evaluation: Evaluation, *, quiet: bool) -> EvaluationSummary:
    ABSENCE.seconds = evaluation.config.cluster.absent_s
    services = evaluation.config.services
    async with running_services(services, evaluation.directory.path / SERVICES_FOLDER) as urls:
        config = evaluation.config.model_copy(update={"services": resolved(services, urls)})
        summary = await _drive_service(evaluation, config, quiet=quiet)
    await stop_services(evaluation.directory.path / SERVICES_FOLDER)
    return summary


async def _drive_service(evaluation: Evaluation, config: RunConfig, *, quiet: bool) -> EvaluationSummary:
    directory = evaluation.directory
    logs = LogTerms(run_id=directory.run_id(), folder=directory.logs, retention=config.retention, json_stderr=False)
    service = EvaluationService(
        config,
        directory,
        RayRuntime(logs=logs),
        evaluations=EvaluationFolders(root=evaluation.out, about=evaluation.about, is_one=True),
        tasks=evaluation.tasks,
        weights=await asyncio.to_thread(_weights, evaluation),
    )
    async with AsyncExitStack() as stack:
        warnings = stack.enter_context(telling_warnings(directory.logs, f"see {directory.logs}", quiet=quiet))
        with starting("engines, sandboxes and gateway", quiet=quiet):
            await stack.enter_async_context(service)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        watching = tasks.create_task(watch(service, warnings, quiet=quiet))
        summary = await service.run(samples=evaluation.samples, tag=evaluation.tag)
        watching.cancel()
    return summary


def _weights(evaluation: Evaluation) -> WeightsSnapshot:
    shards = tuple(WeightsShard.of(path) for path in weight_files(evaluation.config.model.path))
    return WeightsSnapshot(version=evaluation.version, shards=shards)


@contextmanager
def _locked(directory: RunDirectory) -> Iterator[None]:
    """Hold the lock of a directory. Raises ConfigError if another process holds it."""
    with ExitStack() as stack:
        try:
            stack.enter_context(sole_driver(directory))
        except RunExists as error:
            raise ConfigError(str(error)) from error
        yield
