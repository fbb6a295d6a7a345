"""Training and held-out tasks of a run: each is read, allowed, checked and passed on in one walk.

Invariants:
- Of a task that was passed on only its id, its digest and the names of its parts are kept: memory does not grow with
  the text of tasks.
- A task is allowed before anything that it names is looked up. Images and services are looked up once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from headrace.actors.agents.loop.config import refuse_unfilled_templates
from headrace.actors.agents.registry.config import AgentKind
from headrace.actors.agents.registry.registry import refuse_unrecorded_episodes
from headrace.actors.environments.registry import check_environment, make_environment
from headrace.actors.errors import ConfigError
from headrace.actors.evaluation.by_service.scoring import ServiceUsers, check_service_evaluators, refuse_unoffered
from headrace.actors.evaluation.graders.plugins import refuse_absent_evaluators
from headrace.actors.evaluation.graders.repository import REPOSITORY_RUNS
from headrace.actors.evaluation.graders.verifier import VERIFIER_RUNS
from headrace.actors.run.checks import build_miniature, of_source
from headrace.actors.run.config import RunConfig
from headrace.actors.run.sources import KEY, problem_digest, refuse_overlap
from headrace.actors.runtime.pools.providers import refuse_absent_images
from headrace.actors.runtime.simulated.tasks import FAMILY, simulated_tasks
from headrace.buffer.core.source_names import id_in_run
from headrace.buffer.tasks.datasets.terminal import Split, generate
from headrace.buffer.tasks.evaluators import PluginEvaluator, RepositoryEvaluator, SumEvaluator, VerifierEvaluator
from headrace.buffer.tasks.task import Task, TaskId, read_tasks

Allow = Callable[[Iterable[Task]], None]


class TaskChecks:
    """Checks that a run of the configuration can work on tasks: images, evaluators, environment, deadlines. `allow`
    gets each task first."""

    def __init__(self, config: RunConfig, allow: Allow = lambda _: None) -> None:
        """Raises ConfigError for an unusable environment."""
        self._config, self._allow = config, allow
        is_loop = config.agent.kind is AgentKind.LOOP
        self._environment = make_environment(config.environment) if is_loop else None
        self._plugins: set[str] = set()
        self._images: dict[str, TaskId] = {}
        self._users: ServiceUsers = {}

    def add(self, task: Task) -> None:
        """Check a task by itself. Raises ConfigError, and the errors of `allow`."""
        config = self._config
        self._allow((task,))
        plugins = {spec.plugin for spec in task.evaluators if isinstance(spec, PluginEvaluator)}
        if not plugins <= self._plugins:
            refuse_absent_evaluators((task,))
            self._plugins |= plugins
        refuse_unrecorded_episodes(config.agent, task)
        users = check_service_evaluators((task,), config.services, config.rollout.evaluate_timeout_s)
        self._users = users | self._users
        if self._environment is not None:
            check_environment(config.environment, self._environment, task)
            refuse_unfilled_templates(config.agent.loop, task)
        refuse_short_evaluation(task, config.rollout.evaluate_timeout_s)
        self._images.setdefault(task.image, task.id)

    def finish(self) -> None:
        """Check what the tasks need together. Raises ConfigError, and the errors raised for the hosts in
        `sandbox.remote.urls`."""
        refuse_absent_images(self._config.sandbox, self._images)
        refuse_unoffered(self._users, self._config.services)


class TaskSets:
    """The tasks of all sources of a run. First `train` is walked to its end, then `heldout`. Both raise TaskFileError,
    ConfigError (also when the sets overlap), the errors of `allow` and those raised for the hosts in
    `sandbox.remote.urls`."""

    def __init__(self, config: RunConfig, allow: Allow = lambda _: None) -> None:
        """Raises ConfigError."""
        build_miniature(config)
        self._sources: dict[str, tuple[RunConfig, TaskChecks]] = {}
        for name, own in config.by_source().items():
            with of_source(name):
                self._sources[name] = own, TaskChecks(own, allow)
        self._trained: set[str] = set()

    def train(self) -> Iterator[Task]:
        """Read or generate the training tasks."""
        for name in self._sources:
            for task in self._walk(name, Split.TRAIN):
                self._trained.add(problem_digest(task))
                yield task

    def heldout(self) -> Iterator[Task]:
        """Read or generate the held-out tasks."""
        for name, (_, checks) in self._sources.items():
            problems: dict[TaskId, str] = {}
            for task in self._walk(name, Split.HELD_OUT):
                problems[task.id] = problem_digest(task)
                yield task
            with of_source(name):
                checks.finish()
            if name:
                refuse_overlap(
                    self._trained, problems, f"{KEY}.{name}.heldout", trained_by=f"the training tasks of {KEY}"
                )
            else:
                refuse_overlap(self._trained, problems, "tasks.heldout")

    def _walk(self, name: str, split: Split) -> Iterator[Task]:
        own, checks = self._sources[name]
        with of_source(name):
            for task in _tasks_of(own, split):
                checks.add(task)
                yield replace(task, id=id_in_run(name, task.id))


def _tasks_of(config: RunConfig, split: Split) -> Iterable[Task]:
    section, seed, trains = config.tasks, config.service.seed, split is Split.TRAIN
    path, count = (section.train, section.train_count) if trains else (section.heldout, section.heldout_count)
    if path is not None:
        return read_tasks(path)
    if config.agent.kind is not AgentKind.SIMULATED:
        return generate(seed, count, split)
    family = FAMILY if trains else "heldout"
    return simulated_tasks(seed, count, evaluate_s=section.evaluate_s, family=family)


def load_task_sets(config: RunConfig) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
    """Return the training and the held-out tasks of all sources. Raises the errors of `TaskSets`."""
    sets = TaskSets(config)
    return tuple(sets.train()), tuple(sets.heldout())


def refuse_short_evaluation(task: Task, evaluate_timeout_s: float) -> None:
    """Raise ConfigError if an evaluation may time out before it has completed all the test runs that it may need."""
    needed_s, why = 0.0, ""
    for evaluator in task.evaluators:
        if isinstance(evaluator, RepositoryEvaluator):
            runs, why = REPOSITORY_RUNS, "the runs on the diff, the tests, the twins and the untouched repository"
        elif isinstance(evaluator, VerifierEvaluator):
            runs, why = VERIFIER_RUNS, "a verifier that breaks, its run on the untouched files and its repetition"
        else:
            # Other kinds are limited by the phase's deadline alone, unless they follow one of those in a sum.
            runs = 1
        needed_s += runs * getattr(evaluator, "timeout_s", 0.0)
    if why and needed_s > evaluate_timeout_s:
        of_parts = isinstance(task.evaluator, SumEvaluator)
        times = "what the parts need" if of_parts else f"{runs} x evaluator.timeout_s ({needed_s / runs:g})"
        raise ConfigError(
            f"rollout.evaluate_timeout_s {evaluate_timeout_s:g} is below {times} of task {task.id}: {why} may each "
            f"take that long; set rollout.evaluate_timeout_s to {needed_s:g}"
        )
