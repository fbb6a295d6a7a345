"""`headrace eval`: from a recipe or a run to a finished evaluation.

Invariants:
- Everything that can be wrong is looked at before anything is made; a refused evaluation leaves nothing behind.
- The output folder belongs to one evaluation: `evaluation.json` says which. The same request goes on with what an
  interrupted one left; any other one is refused.
- The ledger, the checkpoints and the metrics of a run are not touched, and nobody drives the run meanwhile.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import ValidationError

from headrace.actors.errors import ConfigError, RunExists, RunMissing, first_cause
from headrace.actors.held_out.service import EvaluationService
from headrace.actors.record.run_directory import RunDirectory, free_folder
from headrace.actors.rollouts.evaluation_folders import EvaluationFolders
from headrace.actors.rollouts.summary import About
from headrace.actors.run.config import RunConfig, apply_override, explain, load_recipe
from headrace.actors.run.interrupts import Interrupts
from headrace.actors.run.launch import check_parts, interrupts_of_ray, load_task_sets, reopen, sole_driver, watch
from headrace.actors.run.overlap import refuse_overlap
from headrace.actors.run.parts import evaluation_terms, recipe_digest
from headrace.actors.run.sections import ModelSection
from headrace.actors.runtime.retry import ABSENCE
from headrace.actors.runtime.runtime import RayRuntime, start_local_ray, stop_local_ray
from headrace.buffer.primitives.durable_files import replace_file
from headrace.buffer.tasks import load_tasks, tasks_digest
from headrace.buffer.versions import PolicyVersion
from headrace.policies.learner import WeightsShard, WeightsSnapshot
from headrace.policies.learners.checkpoints import list_checkpoints
from headrace.serve.observing.progress import starting

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence
    from pathlib import Path

    from headrace.actors.rollouts.summary import EvaluationSummary
from headrace.buffer.tasks import Task

START_VERSION = PolicyVersion(1, 0)
"""What the model of a recipe is called, as in a run of it."""
MAX_NAMED = 10
UNFINISHED = "evaluation.json.partial"
"""What a process leaves that was killed while it made the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line asked for. `source` is a recipe or the directory of a run; None takes the recipe's."""

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
    """A checked request. `run` is the run whose checkpoint is evaluated, `version` that of its weights."""

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
        sampling = evaluation_terms(self.config).to_json()
        return About(model=str(self.config.model.path), recipe_sha256=self.recipe_sha256, sampling=sampling)

    @property
    def directory(self) -> RunDirectory:
        """Where engines, gateway and pool of the evaluation work."""
        return RunDirectory(path=self.out / "service")

    @property
    def identity(self) -> dict[str, Any]:
        """The contents of evaluation.json: what makes two evaluations the same one."""
        return {
            "model": str(self.config.model.path),
            "version": str(self.version),
            "recipe_sha256": self.recipe_sha256,
            "dataset_sha256": tasks_digest(self.tasks),
            "samples": self.samples,
        }


def prepare_evaluation(asked: Asked) -> Evaluation:
    """Check everything; makes nothing. Raises ConfigError, RunMissing and the errors of tasks, model and sandboxes."""
    is_run = asked.source.is_dir()
    evaluation = _of_run(asked) if is_run else _of_recipe(asked)
    if evaluation.config.engines.is_simulated:
        raise ConfigError("engines.backend simulated has no policy to evaluate; set it to cpu")
    check_parts(evaluation.config)
    refuse_taken(evaluation)
    return evaluation


def _of_recipe(asked: Asked) -> Evaluation:
    if asked.checkpoint is not None:
        raise ConfigError(f"--checkpoint {asked.checkpoint}: {asked.source} is a recipe; name the directory of a run")
    out = (asked.out or free_folder(asked.runs_dir, f"{asked.source.stem}-eval")).resolve()
    config = load_recipe(asked.source, asked.overrides, out / "service")
    tasks = _chosen(asked, config, *load_task_sets(config))
    return of_start_policy(config, tasks, samples=asked.samples or config.evaluation.samples, out=out)


def of_start_policy(config: RunConfig, tasks: tuple[Task, ...], *, samples: int, out: Path) -> Evaluation:
    """An evaluation of the model that a recipe names."""
    return Evaluation(
        config=config,
        run=None,
        version=START_VERSION,
        tasks=tasks,
        samples=samples,
        recipe_sha256=recipe_digest(config),
        out=out,
    )


def _of_run(asked: Asked) -> Evaluation:
    try:
        config, run = reopen(asked.source)
    except RunMissing as error:
        raise ConfigError(str(error)) from error
    if run.is_driven():
        raise ConfigError(f"{run.path} is being driven by another process; stop that one first")
    config = _sampled_otherwise(config, asked)
    checkpoint = _checkpoint(run, asked.checkpoint)
    train, held_out = load_tasks(run.train_tasks), load_tasks(run.heldout_tasks)
    tasks = _chosen(asked, config, train, held_out)
    samples = asked.samples or config.evaluation.samples
    name = f"{checkpoint.name}-{tasks_digest(tasks)[:8]}-{samples}"
    if asked.overrides:
        name += f"-{recipe_digest(config)[:8]}"
    return Evaluation(
        config=config.model_copy(update={"model": ModelSection(path=checkpoint)}),
        run=run,
        version=PolicyVersion.parse(checkpoint.name),
        tasks=tasks,
        samples=samples,
        recipe_sha256=recipe_digest(config),
        out=asked.out.resolve() if asked.out else run.path / "evaluations" / name,
    )


def _sampled_otherwise(config: RunConfig, asked: Asked) -> RunConfig:
    """The run's configuration with the sampling of this evaluation. Raises ConfigError for any other key."""
    wanted: dict[str, Any] = {}
    for override in asked.overrides:
        if not override.startswith("evaluation.sampling."):
            raise ConfigError(
                f"--set {override}: {asked.source} is a run, which keeps its configuration but for "
                "evaluation.sampling; name a recipe"
            )
        apply_override(wanted, override)
    if not wanted:
        return config
    document = config.model_dump()
    document["evaluation"]["sampling"] |= wanted["evaluation"]["sampling"]
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"--set: {explain(error, RunConfig)}") from error


def _checkpoint(run: RunDirectory, wanted: str | None) -> Path:
    """The newest checkpoint, or the one of this version. Raises ConfigError that lists those that exist."""
    found = list_checkpoints(run.checkpoints)
    if not found:
        raise ConfigError(
            f"{run.path} has no checkpoint yet; train on (`headrace resume {run.path}`), or name a recipe"
        )
    if wanted is None:
        return found[-1]
    for path in found:
        if path.name == wanted:
            return path
    names = ", ".join(path.name for path in found[-MAX_NAMED:])
    raise ConfigError(f"--checkpoint {wanted}: {run.path} has no such checkpoint; it has {names}")


def _chosen(asked: Asked, config: RunConfig, train: Sequence[Task], held_out: Sequence[Task]) -> tuple[Task, ...]:
    """The tasks to evaluate. Raises TaskFileError, ConfigError."""
    if asked.tasks is None:
        return tuple(held_out[: asked.limit or config.evaluation.tasks])
    tasks = load_tasks(asked.tasks)[: asked.limit]
    refuse_overlap(train, tasks, f"--tasks {asked.tasks}")
    return tasks


def refuse_taken(evaluation: Evaluation) -> None:
    """Raises ConfigError unless the folder is free, or holds this very evaluation, unfinished."""
    out = evaluation.out
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: is a file; name a folder")
    if not out.exists() or {path.name for path in out.iterdir()} <= {UNFINISHED}:
        return
    if _read_identity(out) != evaluation.identity:
        raise ConfigError(f"--out {out}: is not empty, and holds something else; choose another folder")
    if (out / "summary.json").exists():
        raise ConfigError(f"--out {out}: this evaluation is finished, see summary.json there; choose another folder")


def _read_identity(out: Path) -> object:
    try:
        return orjson.loads((out / "evaluation.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None


def drive_evaluation(evaluation: Evaluation, *, quiet: bool = False) -> EvaluationSummary:
    """Run it to its end, in this process and a Ray of its own. Raises RunError and what ended it."""
    with ExitStack() as stack:
        if evaluation.run is not None:
            stack.enter_context(_alone(evaluation.run))
        _make(evaluation)
        stack.enter_context(_alone(evaluation.directory))
        interrupts = stack.enter_context(Interrupts())
        stack.callback(stop_local_ray)
        object_store_bytes = evaluation.config.service.object_store_bytes
        with interrupts_of_ray(interrupts), starting("Ray", quiet=quiet):
            start_local_ray(evaluation.directory.path, object_store_bytes=object_store_bytes)
        try:
            return asyncio.run(_interruptible(_drive(evaluation, quiet=quiet), interrupts))
        except BaseExceptionGroup as group:
            raise first_cause(group) from group
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


async def _interruptible(work: Coroutine[Any, Any, EvaluationSummary], interrupts: Interrupts) -> EvaluationSummary:
    """Interrupts cancel it: it closes what it has open, and what was answered is kept for the next."""
    task = asyncio.ensure_future(work)
    with interrupts.listening(task.cancel):
        return await task


async def _drive(evaluation: Evaluation, *, quiet: bool) -> EvaluationSummary:
    ABSENCE.seconds = evaluation.config.cluster.absent_s
    service = EvaluationService(
        evaluation.config,
        evaluation.directory,
        RayRuntime(),
        evaluations=EvaluationFolders(root=evaluation.out, about=evaluation.about, is_one=True),
        tasks=evaluation.tasks,
        weights=await asyncio.to_thread(_weights, evaluation),
    )
    async with AsyncExitStack() as stack:
        with starting("engines, sandboxes and gateway", quiet=quiet):
            await stack.enter_async_context(service)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        watching = tasks.create_task(watch(service, quiet=quiet))
        summary = await service.run(samples=evaluation.samples, tag=evaluation.tag)
        watching.cancel()
    return summary


def _weights(evaluation: Evaluation) -> WeightsSnapshot:
    path = evaluation.config.model.path / "model.safetensors"
    return WeightsSnapshot(version=evaluation.version, shards=(WeightsShard.of(path),))


def _make(evaluation: Evaluation) -> None:
    """The output folder with its identity. Raises ConfigError."""
    identity = orjson.dumps(evaluation.identity, option=orjson.OPT_INDENT_2)
    try:
        # The identity first: a folder that holds anything else and no identity is somebody else's.
        evaluation.out.mkdir(parents=True, exist_ok=True)
        replace_file(evaluation.out / "evaluation.json", identity)
        evaluation.directory.path.mkdir(exist_ok=True)
        if not evaluation.directory.identity.exists():
            replace_file(evaluation.directory.identity, uuid.uuid4().hex.encode())
    except OSError as error:
        raise ConfigError(f"--out: {evaluation.out} cannot be written: {error.strerror}; choose another") from error


@contextmanager
def _alone(directory: RunDirectory) -> Iterator[None]:
    """Nobody else drives this directory meanwhile. Raises ConfigError."""
    with ExitStack() as stack:
        try:
            stack.enter_context(sole_driver(directory))
        except RunExists as error:
            raise ConfigError(str(error)) from error
        yield
