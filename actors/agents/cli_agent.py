"""What all agents that are programs have in common: a place in the sandbox, a way to the gateway, a run, a report.

Invariants:
- The sandbox's network stays off: on its own loopback listens the session's part of the gateway, while the agent runs,
  and nothing else. No credential but the session's token is in there.
- The program is the host's, shown read-only, or the task image's own. It runs as an unprivileged user with a home of
  its own unless the recipe says otherwise.
- The prompt is never an argument: on standard input it may be of any length and begin with a dash.
- Whoever stops waiting for `run` leaves no process of the program's tree. What a program that ended by itself left
  running has no way to the gateway any more. What was printed is kept up to a limit.
- What can be seen to be wrong beforehand is AgentNotStarted. How a program ends is told, not judged, 126 and 127 too,
  which the policy's own commands can bring about: the session's record and the evaluator decide.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from headrace.actors.agents.agent import AgentNotStarted, AgentReport, StopReason
from headrace.actors.agents.installation import installed_folder
from headrace.sandboxes.base import HostFolder, HostPort, Stream
from headrace.sandboxes.errors import SandboxError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from headrace.actors.agents.agent import AgentSession
    from headrace.buffer.tasks import Task
    from headrace.sandboxes.base import Process, Sandbox

FOLDERS: Final = "/opt/headrace/agents"
"""Where sandboxes show installed agents, by name."""
INSTRUCTION: Final = "{instruction}"
_PREPARE_TIMEOUT_S: Final = 120.0
"""A hang guard; the agent's own clock is the deadline."""
_STDERR_BYTES: Final = 8192
_SIGKILL: Final = 9
_START: Final = """
for place in "$HOME" .; do
  [ -w "$place" ] || { echo "$place ($(pwd)) is not writable for the agent: check user" >&2; exit 126; }
done
eval "$1"
exec < "$2"
shift 2
exec "$@"
"""
_DEFAULT_FOLDER: Final = "/workspace"


class ProgramConfig(BaseModel):
    """Settings that all programs share."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path | None = None
    """Where the agent is installed on this host; None: where `scripts/install_agents` puts it."""
    in_image: str = ""
    """A program of the tasks' images to run instead, for sandboxes that cannot show folders of this host."""
    user: str = "1000"
    """Who runs it: a name of the image or a number. The working directory becomes this user's, which copies every file
    of the image in there; `root` copies none."""
    home: str = Field(default="/home/agent", pattern=r"^/[^\x00]+$")
    """The agent's home; made, and given to the user."""
    working_directory: str = ""
    """Where it starts; empty: the repository of the task, `/workspace` where there is none."""
    prompt: str = INSTRUCTION
    """What the agent is told; `{instruction}` is the task's. Begin with a word: some agents take a slash and a name for
    a command of theirs, and end."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the program."""
    environment: dict[str, str] = {}
    """Further environment of the program; outranks what the harness sets."""
    model: str = "policy"
    """The name by which the agent calls its model."""
    max_turns: int = Field(default=100, ge=1)
    """Answers of the policy in one session, those of subagents included; the gateway then ends the agent normally."""
    port: int = Field(default=47123, ge=1, le=65535)
    """Of the gateway on the sandbox's loopback; choose one that no task uses."""
    max_log_bytes: int = Field(default=65536, ge=1024)
    """How much of the end of what it prints is kept."""

    @field_validator("environment")
    @classmethod
    def _can_be_set(cls, value: dict[str, str]) -> dict[str, str]:
        if any(not name or "=" in name or "\0" in name + text for name, text in value.items()):
            raise ValueError("a name is not empty and has no '='; neither names nor values have NUL characters")
        return value

    @field_validator("arguments")
    @classmethod
    def _can_be_given(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any("\0" in argument for argument in value):
            raise ValueError("an argument has no NUL characters")
        return value

    @field_validator("prompt")
    @classmethod
    def _has_instruction(cls, value: str) -> str:
        if INSTRUCTION not in value:
            raise ValueError(f"write {INSTRUCTION} where the task's instruction belongs")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One run, as seen from inside the sandbox. `folder` is where the agent's files are; `url` is the session's base
    URL there, `token` its last part, for wires that want a key."""

    folder: str
    home: str
    url: str
    token: str
    working_directory: str
    prompt: str
    context_tokens: int | None

    @property
    def prompt_file(self) -> str:
        """Where a program that reads its prompt from standard input has it."""
        return f"{self.home}/.prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to start: a program and its arguments. `files` are absolute paths below the home, of which `stdin` may be
    one; `setup` is a line of shell that its user runs first."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    setup: str = ""
    stdin: str = "/dev/null"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What the program says of its end. `error`: it calls it a failure, or says nothing."""

    result: str = ""
    turns: int = 0
    error: bool = False


class Printed:
    """The end of what a program prints, stream by stream."""

    def __init__(self, max_bytes: int) -> None:
        self._limits = {Stream.STDOUT: max_bytes, Stream.STDERR: _STDERR_BYTES}
        self._kept = {stream: bytearray() for stream in self._limits}
        self.cut = False
        """Whether standard output was longer than what is kept."""

    def add(self, stream: Stream, data: bytes) -> None:
        kept = self._kept[stream]
        kept += data
        surplus = len(kept) - self._limits[stream]
        if surplus > 0:
            del kept[:surplus]
            self.cut = self.cut or stream is Stream.STDOUT

    def events(self) -> Iterator[dict[str, Any]]:
        """Lines of standard output that are JSON objects, the last one first."""
        lines = bytes(self._kept[Stream.STDOUT]).split(b"\n")
        for line in reversed(lines[1:] if self.cut else lines):
            with suppress(ValueError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict):
                    yield event

    def text(self) -> str:
        """Standard output, then standard error."""
        both = (bytes(self._kept[stream]).decode(errors="replace") for stream in (Stream.STDOUT, Stream.STDERR))
        return "\n--- standard error ---\n".join(part for part in both if part)


def result_event(printed: Printed, *, failure: str) -> Ending:
    """The end as the event `result` of a stream of JSON tells it; `failure` is the field with what went wrong."""
    for event in printed.events():
        match event:
            case {"type": "result", **rest}:
                turns = rest.get("num_turns")
                return Ending(
                    result=str(rest.get("result") or rest.get(failure) or rest.get("subtype") or ""),
                    turns=turns if isinstance(turns, int) else 0,
                    error=bool(rest.get("is_error")),
                )
    # One long last line is not kept; then its exit code is all there is.
    return Ending(error=not printed.cut)


class CliAgent(ABC):
    """An agent that is a program; one subclass each. Holds no state between runs."""

    name: ClassVar[str]
    """As it is installed."""

    def __init__(self, config: ProgramConfig) -> None:
        """Raises AgentMissing when the program is not installed on this host."""
        self._config = config
        self._source = None if config.in_image else (config.folder or installed_folder(self.name))

    @abstractmethod
    def launch(self, place: Place) -> Launch: ...

    @abstractmethod
    def ending(self, printed: Printed) -> Ending:
        """What the program's last words are."""
        ...

    @property
    def folders(self) -> tuple[HostFolder, ...]:
        if self._source is None:
            return ()
        return (HostFolder(source=str(self._source.resolve()), target=f"{FOLDERS}/{self.name}"),)

    def program(self, place: Place, path: str) -> str:
        """The program to run: `path` below the agent's folder, or what the recipe names."""
        return self._config.in_image or f"{place.folder}/{path}"

    async def run(self, *, session: AgentSession, sandbox: Sandbox, task: Task) -> AgentReport:
        """See `Agent.run`. Raises SandboxError, AgentNotStarted."""
        target, prefix = target_of(session.base_url)
        place = self._place(session, task, prefix)
        launch = self.launch(place)
        await self._prepare(sandbox, place, launch)
        async with sandbox.expose(self._config.port, target, prefix):
            exit_code, printed = await self._run(sandbox, place, launch)
        ending = self.ending(printed)
        return AgentReport(
            stop=StopReason.ERROR if exit_code != 0 or ending.error else StopReason.FINISHED,
            turns=ending.turns,
            exit_code=exit_code,
            result=ending.result,
            log_tail=printed.text(),
        )

    def _place(self, session: AgentSession, task: Task, prefix: str) -> Place:
        repository = task.evaluator.repository
        folder = repository.workdir if repository is not None else _DEFAULT_FOLDER
        return Place(
            folder=f"{FOLDERS}/{self.name}",
            home=self._config.home,
            url=f"http://127.0.0.1:{self._config.port}{prefix}",
            token=prefix.rsplit("/", 1)[-1],
            working_directory=self._config.working_directory or folder,
            prompt=self._config.prompt.replace(INSTRUCTION, task.instruction),
            context_tokens=session.context_tokens,
        )

    async def _prepare(self, sandbox: Sandbox, place: Place, launch: Launch) -> None:
        """Home, files and ownership. Whether that was enough, the program's own user finds out."""
        if launch.files:
            await sandbox.write_many(dict(launch.files))
        home, folder = shlex.quote(place.home), shlex.quote(place.working_directory)
        program = shlex.quote(launch.command[0])
        owner = shlex.quote(_owner(self._config.user))
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

    async def _run(self, sandbox: Sandbox, place: Place, launch: Launch) -> tuple[int, Printed]:
        environment = {"HOME": place.home, **SAFE_DIRECTORIES, **launch.environment, **self._config.environment}
        process = await sandbox.spawn(
            ["/bin/sh", "-c", _START, "sh", launch.setup, launch.stdin, *launch.command],
            user=self._config.user,
            env=environment,
            cwd=place.working_directory,
        )
        try:
            printed = Printed(self._config.max_log_bytes)
            async for piece in process.output():
                printed.add(piece.stream, piece.data)
            return await process.wait(), printed
        finally:
            await asyncio.shield(_end(process))


SAFE_DIRECTORIES: Final = {
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
}
"""Git refuses a repository that belongs to another user than the one who runs it."""


async def _end(process: Process) -> None:
    """Nothing of its tree runs on; it may be dead already, and its sandbox too."""
    with suppress(SandboxError):
        await process.signal(_SIGKILL)


def _owner(user: str) -> str:
    """As chown(1) takes it: with the user's own group, which for a number without a passwd entry is the number."""
    if ":" in user:
        return user
    return f"{user}:{user}" if user.isdigit() else f"{user}:"


def target_of(base_url: str) -> tuple[HostPort, str]:
    """Where a session is and the prefix of its paths. Raises ValueError."""
    parts = urlsplit(base_url)
    if parts.scheme != "http" or not parts.hostname or not parts.path.strip("/"):
        raise ValueError(f"{base_url!r} is no base URL of a session (http://host:port/s/...)")
    return HostPort(host=parts.hostname, port=parts.port or 80), parts.path.rstrip("/")
