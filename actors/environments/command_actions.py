"""Actions of environments that run commands, and the text of their observations.

Invariants:
- Everything here is pure: no clock, and nothing is done in a sandbox.
- An action that cannot be performed raises ActionRefused, whose message is for the policy. It is never an error of the
  rollout.
- Templates are checked when a configuration is read, so that rendering cannot fail.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from pydantic import Field, ValidationInfo, field_validator

from headrace.actors.environments.environment import BASH, DONE, RUN, Action, Observation, ObservationPart, PartKind
from headrace.actors.services.chat import ChatMessage, ChatTool
from headrace.buffer.primitives.sections import Section
from headrace.buffer.tasks.parts import least
from headrace.buffer.tasks.task import Task
from headrace.sandboxes.base import Sandbox

ACTIONS: Final = frozenset({RUN, BASH, DONE})
TIMEOUT_EXIT_CODE: Final = 124
"""Exit code that is reported for a command that exceeded its time, as timeout(1) does."""

PLAIN: Final = "{output}"
"""The output alone."""
RETURN_CODE: Final = "<returncode>{exit_code}</returncode>\n<output>\n{output}\n</output>"
"""The form of OpenClaw and mini-swe-agent."""
SUCCEEDED: Final = "Command {status}. Output:\n{output}\n\n(exit_code={exit_code})"
"""The form of Endless Terminals."""
ECHOED: Final = "$ {command}\nCommand {status}. Output:\n{output}\n\n(exit_code={exit_code})"
"""The form of Echo, which repeats the command."""

ECHO_WARNINGS: Final = "WARNINGS:\n{warnings}\n\n"
"""The form of Echo's warnings, which stand before the output."""

_FIELDS: Final = ("command", "exit_code", "output", "status", "timeout_s")


class ActionRefused(ValueError):
    """An action that cannot be performed; the message tells the policy why."""


class CommandConfig(Section):
    """Settings shared by environments that run commands."""

    working_directory: str = "/workspace"
    """Working directory of commands; in a terminal, where its shell starts."""
    user: str = "root"
    """User that runs the commands. A task that is verified in the agent's own sandbox needs a user other than root."""
    command_timeout_s: float = Field(default=10.0, gt=0)
    """Deadline for one command; exceeding it is an observation."""
    max_timeout_s: float = Field(default=300.0, gt=0)
    """Longest deadline that the policy can ask for (`timeout` of the tool `bash`), in seconds."""
    observation: str = PLAIN
    """Template of an observation, with the fields {output}, {exit_code}, {status} (succeeded or failed) and
    {command}."""
    timeout_observation: str = "timeout"
    """Template of the observation for a command that exceeded its deadline, with the fields of `observation` and
    {timeout_s}."""
    warnings: str = ""
    """Template of the remarks about the form of an answer whose command is run all the same (several calls in one
    answer, a `timeout` above max_timeout_s), which stand before the observation and are marked as a warning. It has the
    field {warnings}, a line `- remark` each. Empty: the policy reads no remarks."""
    ends: str = ""
    """Regular expression; a command in which it is found is run and then ends the episode. Empty: none does."""

    @field_validator("observation", "timeout_observation", "warnings")
    @classmethod
    def _check_template(cls, template: str, info: ValidationInfo) -> str:
        fields = ("warnings",) if info.field_name == "warnings" else _FIELDS
        try:
            names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
            if unknown := sorted(names - set(fields)):
                raise ValueError(f"unknown field {{{unknown[0]}}}; the fields are {', '.join(fields)}")
            template.format(**dict.fromkeys(fields, ""))
        except (ValueError, LookupError) as error:
            raise ValueError(f"{error}; write {{{{ for a brace") from error
        return template

    @field_validator("ends")
    @classmethod
    def _check_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return pattern

    def ends_episode(self, command: str) -> bool:
        """Return True if a command ends the episode."""
        return bool(self.ends) and re.search(self.ends, command) is not None

    def warn(self, remarks: Sequence[str], observation: Observation) -> Observation:
        """Return the observation with the remarks before it."""
        if not self.warnings or not remarks:
            return observation
        text = self.warnings.format(warnings="\n".join(f"- {remark}" for remark in remarks))
        return replace(observation, parts=(ObservationPart(text=text, kind=PartKind.WARNING), *observation.parts))

    def observe(self, command: str, output: str, exit_code: int) -> str:
        """Return the text of the observation for a command that ended."""
        status = "succeeded" if exit_code == 0 else "failed"
        return self.observation.format(
            command=command, output=output, exit_code=exit_code, status=status, timeout_s=f"{self.command_timeout_s:g}"
        )

    def observe_timeout(self, command: PolicyCommand, output: str) -> str:
        """Return the text of the observation for a command that exceeded its deadline."""
        return self.timeout_observation.format(
            command=command.text,
            output=output,
            exit_code=TIMEOUT_EXIT_CODE,
            status="timed out",
            timeout_s=f"{command.timeout_s:g}",
        )


ConfigT = TypeVar("ConfigT", bound=CommandConfig)


def limited(config: ConfigT, task: Task) -> ConfigT:
    """Return the settings for a task. Its limits can lower the deadline of a command, and its environment can give the
    working directory (`workdir`) and the user."""
    given = {} if task.environment is None else task.environment.given
    own = {"working_directory": given.get("workdir"), "user": given.get("user")}
    changes: dict[str, object] = {name: value for name, value in own.items() if isinstance(value, str)}
    if task.limits.command_s is not None:
        names = ("command_timeout_s", "max_timeout_s")
        changes |= {name: least(getattr(config, name), task.limits.command_s) for name in names}
    return config.model_copy(update=changes) if changes else config


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCommand:
    """A command of the policy, with its deadline, and what is to be said about its form."""

    text: str
    timeout_s: float
    remarks: tuple[str, ...] = ()


def command_of(action: Action, config: CommandConfig) -> PolicyCommand:
    """Return the command of an action `run` or `bash`. Raises ActionRefused."""
    if action.name not in (RUN, BASH):
        raise ActionRefused(f"unknown action {action.name!r}; the actions are {', '.join(sorted(ACTIONS))}")
    known = {"command"} if action.name == RUN else {"command", "timeout"}
    if unknown := sorted(map(str, action.arguments.keys() - known)):
        raise ActionRefused(f"unknown argument {unknown[0]!r} of {action.name}; give {' and '.join(sorted(known))}")
    text, timeout_s = action.arguments.get("command"), action.arguments.get("timeout")
    if not isinstance(text, str) or not text.strip():
        raise ActionRefused(f"{action.name} needs a command as text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ActionRefused("the command is not valid Unicode text") from error
    if "\0" in text:
        raise ActionRefused("the command has a null character")
    if timeout_s is None:
        return PolicyCommand(text=text, timeout_s=config.command_timeout_s, remarks=action.remarks)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise ActionRefused("timeout must be a number of seconds above 0")
    remarks = action.remarks
    if timeout_s > (most_s := config.max_timeout_s):
        remarks = (*remarks, f"timeout {timeout_s:g} is above {most_s:g}; the command has {most_s:g} s")
    return PolicyCommand(text=text, timeout_s=min(float(timeout_s), most_s), remarks=remarks)


def refused(reason: ActionRefused) -> Observation:
    """Return the observation for an action that cannot be performed."""
    return Observation(parts=(ObservationPart(text=f"invalid action: {reason}", kind=PartKind.WARNING),))


class CommandEpisode(Generic[ConfigT]):
    """The part of an episode that all environments which run commands in a sandbox share."""

    messages: tuple[ChatMessage, ...] = ()

    def __init__(self, config: ConfigT, sandbox: Sandbox) -> None:
        self._config = config
        self._sandbox = sandbox

    @property
    def user(self) -> str:
        """The user that runs the policy's commands."""
        return self._config.user

    @property
    def tools(self) -> tuple[ChatTool, ...]:
        return command_tools(self._config)


def command_tools(config: CommandConfig) -> tuple[ChatTool, ...]:
    """Return the tools for agents that use tool calls."""
    seconds = f"Deadline in seconds; {config.command_timeout_s:g} if missing, at most {config.max_timeout_s:g}."
    properties = {
        "command": {"type": "string", "description": "The bash command to run."},
        "timeout": {"type": "number", "description": seconds},
    }
    parameters = {"type": "object", "properties": properties, "required": ["command"]}
    return (
        ChatTool(name=BASH, description="Run a bash command and return its output.", parameters=parameters),
        ChatTool(name=DONE, description="Say that the task is done.", parameters={"type": "object", "properties": {}}),
    )
