"""The environment `terminal`, which runs all commands of an episode in one shell with a terminal.

Invariants:
- The working directory, variables and background jobs persist between commands. If the shell ends or must be replaced,
  the observation says so, and the next command runs in a new shell in the first working directory.
- A command is run once, unchanged or not at all.
- After a command that exceeded its deadline, none of its processes is left, and the next command works.
- A shell that the policy has made unusable is an observation, never an error of the rollout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import Field

from headrace.actors.environments.command_actions import (
    ACTIONS,
    ActionRefused,
    CommandConfig,
    CommandEpisode,
    PolicyCommand,
    command_of,
    limited,
    refused,
)
from headrace.actors.environments.environment import DONE, Action, Clock, EpisodeEnd, Observation, observed
from headrace.actors.environments.terminal_shell import Ran, ShellNotStarted, TerminalShell
from headrace.actors.environments.terminal_text import cut_text
from headrace.actors.services.service import Services
from headrace.buffer.tasks.task import Task
from headrace.sandboxes.base import Sandbox
from headrace.sandboxes.errors import ExecTimeout, SandboxError

TIMEOUT_CHARACTERS: Final = 500
"""Characters that the policy reads of the output of a command that exceeded its deadline."""
_BYTES_PER_CHARACTER: Final = 4
_ESCAPES_BYTES: Final = 1 << 16
"""Bytes captured beyond the longest observation, since escape sequences are removed from it."""
EXIT_CODE_NOT_STARTED: Final = 126


class TerminalConfig(CommandConfig):
    """Settings of the environment `terminal`."""

    max_output_characters: int = Field(default=50_000, ge=1)
    """Maximum number of characters of a command's output that the policy reads; a note says that it was cut."""
    timeout_observation: str = "timed out after {timeout_s} s\n{output}"
    exit_ends: bool = False
    """Whether the episode ends when the shell does. Otherwise the next command starts another one."""
    environment: Mapping[str, str] = Field(default={"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat"})
    """Environment variables of the shell. The default keeps programs from waiting in a pager."""


class TerminalEnvironment:
    """Environment with one terminal per episode."""

    needs_sandbox = True
    actions = ACTIONS
    services: tuple[str, ...] = ()

    def __init__(self, config: TerminalConfig) -> None:
        self._config = config

    async def open(self, task: Task, sandbox: Sandbox | None, services: Services, clock: Clock) -> TerminalEpisode:
        """Open an episode and start its shell. Raises SandboxError."""
        if sandbox is None:
            raise SandboxError("the environment terminal needs a sandbox, and none was leased")
        episode = TerminalEpisode(limited(self._config, task), sandbox)
        try:
            await episode.start()
        except ShellNotStarted as error:
            user, folder = self._config.user, self._config.working_directory
            raise SandboxError(f"the terminal's shell did not start as {user} in {folder}: {error}") from error
        return episode


class TerminalEpisode(CommandEpisode[TerminalConfig]):
    """Episode of the environment `terminal`."""

    def __init__(self, config: TerminalConfig, sandbox: Sandbox) -> None:
        super().__init__(config, sandbox)
        self._shell: TerminalShell | None = None

    async def start(self) -> TerminalShell:
        """Start a shell. Raises ShellNotStarted, SandboxError."""
        config = self._config
        self._shell = await TerminalShell.start(
            self._sandbox,
            user=config.user,
            cwd=config.working_directory,
            environment=config.environment,
            max_bytes=config.max_output_characters * _BYTES_PER_CHARACTER + _ESCAPES_BYTES,
        )
        return self._shell

    async def act(self, action: Action) -> Observation:
        """Run a command. Raises SandboxError."""
        if action.name == DONE:
            return Observation(ends=True)
        try:
            command = command_of(action, self._config)
        except ActionRefused as reason:
            return refused(reason)
        return self._config.warn(command.remarks, await self._run(command))

    async def _run(self, command: PolicyCommand) -> Observation:
        try:
            ran = await (self._shell or await self.start()).run(command)
            if not ran.began:
                # The shell ended between two commands, so nothing of this one has run.
                self._shell = None
                ran = await (await self.start()).run(command)
        except (ShellNotStarted, ExecTimeout) as error:
            # The first shell started, so the policy is the cause, for example with as many processes as it may have.
            text = f"the shell could not be started again: {error}"
            return observed(self._config.observe(command.text, text, EXIT_CODE_NOT_STARTED))
        if ran.shell_ended:
            self._shell = None
        exits = ran.shell_ended and not ran.timed_out and self._config.exit_ends
        return observed(self._text(command, ran), ends=exits or self._config.ends_episode(command.text))

    def _text(self, command: PolicyCommand, ran: Ran) -> str:
        config = self._config
        if ran.timed_out:
            output = cut_text(ran.output.rstrip("\n"), TIMEOUT_CHARACTERS)
            note = "\n[the shell did not answer and was killed with its background jobs; the next command starts one]"
            return config.observe_timeout(command, output) + (note if ran.shell_ended else "")
        output = cut_text(ran.output.rstrip("\n"), config.max_output_characters, more=ran.cut)
        if ran.shell_ended and not config.exit_ends:
            note = f"[the shell ended with exit code {ran.exit_code}; the next command starts another]"
            output = f"{output}\n{note}" if output else note
        return config.observe(command.text, output, ran.exit_code)

    async def close(self) -> EpisodeEnd:
        """End the shell. Raises SandboxError."""
        if self._shell is not None:
            shell, self._shell = self._shell, None
            await shell.close()
        return EpisodeEnd()
