"""The environment `shell`, which runs each command in a new subshell of the sandbox.

Invariants:
- A command is run once, unchanged or not at all; only files persist between commands.
- A command that exceeds its deadline is killed with its process tree, and is an observation.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from pydantic import Field

from headrace.actors.environments.command_actions import (
    ACTIONS,
    ActionRefused,
    CommandConfig,
    CommandEpisode,
    command_of,
    limited,
    refused,
)
from headrace.actors.environments.environment import DONE, Action, Clock, EpisodeEnd, Observation, observed
from headrace.actors.services.service import Services
from headrace.buffer.tasks.task import Task
from headrace.sandboxes.base import Sandbox
from headrace.sandboxes.errors import ExecTimeout, SandboxError

ENDS_WITH_EXIT: Final = r"(?:^|[;&|\s])exit\s*$"
"""Matches command lines whose last word is `exit`."""
SUBMITS: Final = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""Matches the commands with which OpenClaw's and mini-swe-agent's policies submit."""
MAX_CAPTURED_BYTES: Final = 16 << 20
"""Bytes of each output stream that are captured for the form `head_tail`."""


class OutputForm(StrEnum):
    """The part of a long output that the policy reads."""

    HEAD = "head"
    """The first bytes."""
    HEAD_TAIL = "head_tail"
    """The first and the last bytes, half each, around a line with the number of bytes left out."""


class ShellConfig(CommandConfig):
    """Settings of the environment `shell`."""

    max_output_bytes: int = Field(default=48, ge=1)
    """Maximum number of bytes of a command's output that the policy reads, standard output before standard error."""
    output_form: OutputForm = OutputForm.HEAD
    """Which bytes of a longer output are read: `head` or `head_tail`."""
    ends: str = ENDS_WITH_EXIT


class ShellEnvironment:
    """Environment that runs each command in a new subshell."""

    needs_sandbox = True
    actions = ACTIONS
    services: tuple[str, ...] = ()

    def __init__(self, config: ShellConfig) -> None:
        self._config = config

    async def open(self, task: Task, sandbox: Sandbox | None, services: Services, clock: Clock) -> ShellEpisode:
        """Open an episode. Raises SandboxError without a sandbox."""
        if sandbox is None:
            raise SandboxError("the environment shell needs a sandbox, and none was leased")
        return ShellEpisode(limited(self._config, task), sandbox)


class ShellEpisode(CommandEpisode[ShellConfig]):
    """Episode of the environment `shell`."""

    async def act(self, action: Action) -> Observation:
        """Run a command. Raises SandboxError."""
        if action.name == DONE:
            return Observation(ends=True)
        config = self._config
        try:
            command = command_of(action, config)
        except ActionRefused as reason:
            return refused(reason)
        is_head = config.output_form is OutputForm.HEAD
        try:
            result = await self._sandbox.exec(
                command.text,
                user=config.user,
                cwd=config.working_directory,
                timeout_s=command.timeout_s,
                max_output_bytes=config.max_output_bytes if is_head else MAX_CAPTURED_BYTES,
            )
        except ExecTimeout:
            text = config.observe_timeout(command, "")
        else:
            output = shortened(result.stdout + result.stderr, config.max_output_bytes, config.output_form)
            text = config.observe(command.text, output, result.exit_code)
        return config.warn(command.remarks, observed(text, ends=config.ends_episode(command.text)))

    async def close(self) -> EpisodeEnd:
        return EpisodeEnd()


def shortened(output: bytes, max_bytes: int, form: OutputForm) -> str:
    """Return at most `max_bytes` of an output as text, without trailing newlines."""
    if form is OutputForm.HEAD or len(output) <= max_bytes:
        return output[:max_bytes].decode(errors="replace").rstrip("\n")
    first, last = max_bytes - max_bytes // 2, max_bytes // 2
    head = output[:first].decode(errors="replace")
    tail = output[len(output) - last :].decode(errors="replace").rstrip("\n")
    return f"{head}\n[{len(output) - max_bytes} bytes left out]\n{tail}"
