"""The registry of environments that recipes can name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from headrace.actors.environments.config import EnvironmentKind, EnvironmentSection
from headrace.actors.environments.environment import Environment
from headrace.actors.environments.retail.environment import RetailEnvironment
from headrace.actors.environments.search import SearchEnvironment
from headrace.actors.environments.shell import ShellEnvironment
from headrace.actors.environments.terminal import TerminalEnvironment
from headrace.actors.errors import ConfigError
from headrace.buffer.primitives.registry import PartRefused, Registry
from headrace.buffer.tasks.evaluators import OF_EPISODES, EnvironmentEvaluator, NoEvaluator, PluginEvaluator
from headrace.buffer.tasks.task import Task

MakeEnvironment: TypeAlias = Callable[[EnvironmentSection], Environment]


WITHOUT_FILES: Final = (*OF_EPISODES, PluginEvaluator, NoEvaluator)
"""Evaluators that can score a rollout without a sandbox."""
WITHOUT_VERDICT: Final = (EnvironmentKind.SHELL, EnvironmentKind.TERMINAL, EnvironmentKind.SEARCH)
"""Environments that return no verdict."""


def make_environment(section: EnvironmentSection) -> Environment:
    """Create the environment of a recipe. Raises ConfigError for an unknown one or invalid settings."""
    try:
        return ENVIRONMENTS.find(section.kind)(section)
    except PartRefused as error:
        raise ConfigError(f"environment.kind: {error}") from error


def check_environment(section: EnvironmentSection, environment: Environment, task: Task) -> None:
    """Check that a recipe's environment is the one of a task. An environment's own `check` gets the task, too. Raises
    ConfigError."""
    if task.environment is not None and task.environment.kind != section.kind:
        raise ConfigError(
            f"task {task.id}: environment.kind {task.environment.kind!r} is not the recipe's ({section.kind}); set "
            "environment.kind in the recipe, or leave the task out"
        )
    for spec in task.evaluators:
        if not environment.needs_sandbox and not isinstance(spec, WITHOUT_FILES):
            kinds = ", ".join(each.kind for each in WITHOUT_FILES)
            raise ConfigError(
                f"task {task.id}: evaluator.kind {spec.kind} scores the files of a sandbox, and the environment "
                f"{section.kind} has none; choose {kinds}, or another environment"
            )
        if isinstance(spec, EnvironmentEvaluator) and section.kind in WITHOUT_VERDICT:
            raise ConfigError(
                f"task {task.id}: evaluator.kind environment needs a verdict, and the environment {section.kind} "
                "returns none; choose another evaluator, or another environment"
            )
    check = getattr(environment, "check", None)
    if check is not None:
        check(task)


def _retail(section: EnvironmentSection) -> Environment:
    if section.retail is None:
        raise ConfigError("environment.retail.data is missing; set it to the folder of the shop's database")
    return RetailEnvironment(section.retail)


def _of_another_package(found: object) -> MakeEnvironment:
    """Return a factory that calls `found` with `environment.settings`, which must return an Environment."""
    if not callable(found):
        raise TypeError("it is not callable; give a function or class that takes environment.settings")
    make: Callable[..., Any] = found

    def made(section: EnvironmentSection) -> Environment:
        try:
            environment: Environment = make(**section.settings)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"environment.settings: {section.kind} does not accept them: {error}") from error
        for name in ("needs_sandbox", "actions", "services", "open"):
            if not hasattr(environment, name):
                raise ConfigError(
                    f"environment.kind: {section.kind!r} did not return an environment: {name!r} is missing "
                    "(guide 'Extending headrace')"
                )
        return environment

    return made


ENVIRONMENTS: Final[Registry[MakeEnvironment]] = Registry(
    kind="environment",
    group="headrace.environments",
    own={
        EnvironmentKind.SHELL: lambda section: ShellEnvironment(section.shell),
        EnvironmentKind.TERMINAL: lambda section: TerminalEnvironment(section.terminal),
        EnvironmentKind.SEARCH: lambda section: SearchEnvironment(section.search),
        EnvironmentKind.RETAIL: _retail,
    },
    accept=_of_another_package,
)
