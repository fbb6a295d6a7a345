"""The base class of agents that are programs: it prepares the sandbox, connects it to the gateway and runs the program.

Invariants:
- The network of the sandbox stays off. While the agent is running, only the session's part of the gateway is reachable,
  on the sandbox's loopback interface. The sandbox holds no credential other than the session's token.
- The program is either mounted read-only from the host or part of the task image. It runs as an unprivileged user with
  its own home directory unless the recipe sets another user.
- The prompt is passed on standard input, never as an argument, so that it may have any length and may begin with a
  dash.
- Cancelling `run` kills the program's process tree. If the program exits by itself, processes that outlive it can no
  longer reach the gateway. Output is kept up to a limit.
- Problems found before the start raise AgentNotStarted. A program's exit code is reported but not judged, even if it is
  126 or 127, since the policy's commands can cause these: the session record and the evaluator decide.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from headrace.actors.agents.programs.agent import AgentNotStarted, AgentReport, AgentSession, StopReason
from headrace.actors.agents.programs.installation import installed_folder
from headrace.buffer.primitives.sections import Section
from headrace.buffer.tasks.task import Task
from headrace.sandboxes.base import HostFolder, HostPort, Process, Sandbox, Stream
from headrace.sandboxes.errors import SandboxError

FOLDERS: Final = "/opt/headrace/agents"
"""Parent folder of the mount points of installed agents in sandboxes."""
INSTRUCTION: Final = "{instruction}"
_PREPARE_TIMEOUT_S: Final = 120.0
"""Guard against hangs; the agent's deadline is tracked separately."""
HOME: Final = "/home/agent"
"""Home directory of the agent; it is created and given to the user."""
MAX_LOG_BYTES: Final = 65536
"""Number of bytes kept from the end of standard output."""
_STDERR_BYTES: Final = 8192
_SIGKILL: Final = 9
_START: Final = """
for place in "$HOME" .; do
  [ -w "$place" ] || { echo "$place ($(pwd)) is not writable by the agent: check user" >&2; exit 126; }
done
eval "$1"
exec < "$2"
shift 2
exec "$@"
"""
_DEFAULT_FOLDER: Final = "/workspace"


class ProgramConfig(Section):
    """Settings shared by all agents that are programs."""

    folder: Path | None = None
    """Folder of the agent on this host; None for the installed one (guide 'Agents')."""
    in_image: str = ""
    """Program in the task image to run instead of an installed one, for sandboxes that cannot mount this host's
    folders."""
    user: str = "1000"
    """User that runs the program: a user name that exists in the image, or a number. This user is made the owner of the
    working directory, which copies every image file in it; with `root`, nothing is copied."""
    working_directory: str = ""
    """Working directory; if empty, the task's repository, or `/workspace` if there is none."""
    prompt: str = INSTRUCTION
    """Prompt of the agent; `{instruction}` is replaced with the task's instruction. Begin with a word: some agents
    interpret a leading slash and name as one of their own commands, and exit."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the program."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables; they override those that headrace sets."""
    model: str = "policy"
    """Model name that the agent sends in its requests."""
    max_turns: int = Field(default=100, ge=1)
    """Maximum number of policy answers in one session, including subagents; once it is reached, the gateway ends the
    agent normally."""
    port: int = Field(default=47123, ge=1, le=65535)
    """Port of the gateway on the sandbox's loopback interface; choose a port that no task uses."""

    @field_validator("environment")
    @classmethod
    def _can_be_set(cls, value: dict[str, str]) -> dict[str, str]:
        if any(not name or "=" in name or "\0" in name + text for name, text in value.items()):
            raise ValueError("names must not be empty or contain '='; names and values must not contain NUL characters")
        return value

    @field_validator("arguments")
    @classmethod
    def _can_be_given(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any("\0" in argument for argument in value):
            raise ValueError("arguments must not contain NUL characters")
        return value

    @field_validator("prompt")
    @classmethod
    def _has_instruction(cls, value: str) -> str:
        if INSTRUCTION not in value:
            raise ValueError(f"write {INSTRUCTION} where the task's instruction belongs")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchContext:
    """Paths and URLs of one run inside the sandbox. `folder` has the agent's files; `url` is the session's base URL,
    and `token` is the last part of that URL, for APIs that need a key."""

    folder: str
    home: str
    url: str
    token: str
    working_directory: str
    prompt: str
    context_tokens: int | None

    @property
    def prompt_file(self) -> str:
        """Path of the prompt file, for programs that read the prompt from standard input."""
        return f"{self.home}/.prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Command line and environment of the program. The paths in `files` are absolute and below the home directory, and
    may include `stdin`; `setup` is a shell command that the program's user runs first."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    setup: str = ""
    stdin: str = "/dev/null"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnd:
    """The program's own report of how it ended. `error` is set if it reports a failure, or nothing at all."""

    result: str = ""
    turns: int = 0
    error: bool = False


class OutputTail:
    """The end of a program's output, by stream."""

    def __init__(self, max_bytes: int) -> None:
        self._limits = {Stream.STDOUT: max_bytes, Stream.STDERR: _STDERR_BYTES}
        self._kept = {stream: bytearray() for stream in self._limits}
        self.cut = False
        """True once the beginning of standard output has been dropped."""

    def add(self, stream: Stream, data: bytes) -> None:
        kept = self._kept[stream]
        kept += data
        surplus = len(kept) - self._limits[stream]
        if surplus > 0:
            del kept[:surplus]
            self.cut = self.cut or stream is Stream.STDOUT

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of standard output that are JSON objects, starting with the last one."""
        lines = bytes(self._kept[Stream.STDOUT]).split(b"\n")
        for line in reversed(lines[1:] if self.cut else lines):
            with suppress(ValueError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict):
                    yield event

    def text(self) -> str:
        """Return standard output, then standard error."""
        both = (bytes(self._kept[stream]).decode(errors="replace") for stream in (Stream.STDOUT, Stream.STDERR))
        return "\n--- standard error ---\n".join(part for part in both if part)


def result_event(printed: OutputTail, *, failure: str) -> ProgramEnd:
    """Return how a program ended, from the `result` event of its JSON stream; `failure` names the field with the
    error."""
    for event in printed.events():
        match event:
            case {"type": "result", **rest}:
                turns = rest.get("num_turns")
                return ProgramEnd(
                    result=str(rest.get("result") or rest.get(failure) or rest.get("subtype") or ""),
                    turns=turns if isinstance(turns, int) else 0,
                    error=bool(rest.get("is_error")),
                )
    # A last line that is too long is dropped, which leaves only the exit code.
    return ProgramEnd(error=not printed.cut)


class CliAgent(ABC):
    """Base class of agents that are programs. Stateless between runs."""

    name: ClassVar[str]
    """Name of the installation."""

    def __init__(self, config: ProgramConfig) -> None:
        """Raises AgentMissing if the program is not installed on this host."""
        self._config = config
        self._source = None if config.in_image else (config.folder or installed_folder(self.name))

    @abstractmethod
    def launch(self, context: LaunchContext) -> Launch:
        """Return the command line, environment and files with which to start the program."""

    @abstractmethod
    def ending(self, printed: OutputTail) -> ProgramEnd:
        """Parse how the program ended from its output."""

    @property
    def folders(self) -> tuple[HostFolder, ...]:
        if self._source is None:
            return ()
        return (HostFolder(source=str(self._source.resolve()), target=f"{FOLDERS}/{self.name}"),)

    def program(self, context: LaunchContext, path: str) -> str:
        """Return the program to run: `path` below the agent's folder, or the program that the recipe sets."""
        return self._config.in_image or f"{context.folder}/{path}"

    async def run(self, *, session: AgentSession, sandbox: Sandbox, task: Task) -> AgentReport:
        """Run the program on the task. Raises SandboxError, AgentNotStarted."""
        target, prefix = target_of(session.base_url)
        repository = task.repository
        folder = repository.workdir if repository is not None else _DEFAULT_FOLDER
        context = LaunchContext(
            folder=f"{FOLDERS}/{self.name}",
            home=HOME,
            url=f"http://127.0.0.1:{self._config.port}{prefix}",
            token=prefix.rsplit("/", 1)[-1],
            working_directory=self._config.working_directory or folder,
            prompt=self._config.prompt.replace(INSTRUCTION, task.instruction),
            context_tokens=session.context_tokens,
        )
        launch = self.launch(context)
        await self._prepare(sandbox, context, launch)
        environment = {"HOME": context.home, **SAFE_DIRECTORIES, **launch.environment, **self._config.environment}
        async with sandbox.expose(self._config.port, target, prefix):
            process = await sandbox.spawn(
                ["/bin/sh", "-c", _START, "sh", launch.setup, launch.stdin, *launch.command],
                user=self._config.user,
                env=environment,
                cwd=context.working_directory,
            )
            try:
                printed = OutputTail(MAX_LOG_BYTES)
                async for piece in process.output():
                    printed.add(piece.stream, piece.data)
                exit_code = await process.wait()
            finally:
                await asyncio.shield(_kill(process))
        ending = self.ending(printed)
        return AgentReport(
            stop=StopReason.ERROR if exit_code != 0 or ending.error else StopReason.FINISHED,
            turns=ending.turns,
            exit_code=exit_code,
            result=ending.result,
            log_tail=printed.text(),
        )

    async def _prepare(self, sandbox: Sandbox, context: LaunchContext, launch: Launch) -> None:
        """Write the files, and give the user ownership of the home and working directories. `_START` checks the
        permissions."""
        if launch.files:
            await sandbox.write_many(dict(launch.files))
        home, folder = shlex.quote(context.home), shlex.quote(context.working_directory)
        program = shlex.quote(launch.command[0])
        user = self._config.user
        if ":" not in user:
            # A user's own group; for a number without a passwd entry chown(1) needs the number.
            user = f"{user}:{user}" if user.isdigit() else f"{user}:"
        owner = shlex.quote(user)
        commands = [
            f"command -v -- {program} > /dev/null || {{ echo there is no {program}; exit 1; }}",
            f"mkdir -p -- {home} || exit 1",
            f"[ -d {folder} ] || {{ echo there is no folder {folder}: check working_directory; exit 1; }}",
            *([] if self._config.user == "root" else [f"chown -R -h -- {owner} {home} {folder} 2> /dev/null"]),
            "exit 0",
        ]
        result = await sandbox.exec("\n".join(commands), cwd="/", timeout_s=_PREPARE_TIMEOUT_S)
        if result.exit_code != 0:
            said = (result.stdout + result.stderr)[-300:].decode(errors="replace").strip()
            raise AgentNotStarted(f"{self.name}: {said} (in the sandbox)")


SAFE_DIRECTORIES: Final = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
"""Makes git accept repositories that belong to another user."""


async def _kill(process: Process) -> None:
    """Kill the process tree; the process or its sandbox may already be gone."""
    with suppress(SandboxError):
        await process.signal(_SIGKILL)


def target_of(base_url: str) -> tuple[HostPort, str]:
    """Split a session's base URL into host, port and path prefix. Raises ValueError."""
    parts = urlsplit(base_url)
    if parts.scheme != "http" or not parts.hostname or not parts.path.strip("/"):
        raise ValueError(f"{base_url!r} is not a base URL of a session (http://host:port/s/...)")
    return HostPort(host=parts.hostname, port=parts.port or 80), parts.path.rstrip("/")
