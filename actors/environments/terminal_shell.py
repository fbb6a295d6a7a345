"""A bash in a terminal of a sandbox, which runs one command after another.

Invariants:
- The working directory, variables and background jobs persist until the shell ends or is replaced.
- When a command exceeds its deadline, all processes that it started are killed, with those that left its session; older
  background jobs stay. If that fails or the shell does not answer, the shell is replaced and its whole process tree
  killed.
- Nothing is read ahead: a background job that prints more than the terminal holds waits for the next command.
- A call must end before the next one begins.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple, cast

from headrace.actors.environments.command_actions import TIMEOUT_EXIT_CODE, PolicyCommand
from headrace.actors.environments.terminal_text import CommandOutput, start_of, typed_lines
from headrace.sandboxes.base import Output, Process, Sandbox, TerminalSize
from headrace.sandboxes.errors import ExecTimeout, SandboxFileError

SHELL: Final = ("/bin/bash", "--norc", "--noprofile", "--noediting", "-i")
SIZE: Final = TerminalSize(rows=50, columns=160)
ANSWER_S: Final = 5.0
"""Time for a shell to answer at its start, and after its command was interrupted."""
_SET_UP: Final = """
command -p stty sane -echo
set +o history +H
unset -v HISTFILE PROMPT_COMMAND
jobs
"""
_TIMEOUT_S: Final = 10.0
# Children of the shell that are older than the command, and their descendants, are background jobs and stay. A process
# that left its session is found all the same: orphans become children of the shell or of the first process. The script
# runs as root with builtins only, so it works when no more processes can be started (then without pauses), and a
# process's name is never interpreted.
_SCRIPT: Final = r"""
shell=$1 ticks=$2 last=$3
{ exec {never}<> <(:); } 2> /dev/null || never=

pause() {
  [[ $never ]] && read -r -t 0.02 -u "$never"
}

# Sets `new` to the command's processes, and `alive` to those that are not zombies.
scan() {
  local path process line fields parent changed=1
  local -A parents=() states=() candidates=() found=()
  for path in /proc/[0-9]*/stat; do
    process=${path//[!0-9]/} line=
    { IFS= read -r -d '' line < "$path"; } 2> /dev/null
    [[ $line && $process != "$$" ]] || continue
    fields=(${line##*) })
    parents[$process]=${fields[1]} states[$process]=${fields[0]}
    if ((fields[19] > ticks || (fields[19] == ticks && process > last))); then
      candidates[$process]=1
    fi
  done
  while ((changed)); do
    changed=0
    for process in "${!parents[@]}"; do
      parent=${parents[$process]}
      if [[ ${found[$process]-} || $process == "$shell" || $process == 1 ]]; then
        continue
      fi
      if [[ ${found[$parent]-} || (${candidates[$process]-} && ($parent == "$shell" || $parent == 1)) ]]; then
        found[$process]=1 changed=1
      fi
    done
  done
  new=("${!found[@]}") alive=()
  for process in "${new[@]}"; do
    [[ ${states[$process]} == [ZX] ]] || alive+=("$process")
  done
}

for ((round = 0; round < 25; round++)); do
  scan
  ((${#alive[@]})) || break
  pause
done
for ((round = 0; round < 100; round++)); do
  scan
  ((${#new[@]})) || exit 0
  ((${#alive[@]} == 0)) || kill -KILL "${alive[@]}" 2> /dev/null
  pause
done
((${#alive[@]})) || exit 0
echo "${alive[@]}"
exit 1
"""
"""Waits half a second for processes that end by themselves, since Ctrl-C was pressed and they may clean up, and kills
the others. Prints the processes that are left and exits with 1 if there are any."""


class ShellNotStarted(Exception):
    """A shell ended before it answered; the message is what it printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A command that ended, or was ended. `output` is plain text, without a limit of its length but of its bytes."""

    output: str
    cut: bool
    exit_code: int
    timed_out: bool = False
    shell_ended: bool = False
    """Set if the shell ended or had to be killed; it must be started again."""
    began: bool = True
    """Whether the shell got to the command at all."""


class _State(Enum):
    """How an exchange ended."""

    DONE = auto()
    """The command ended."""
    ENDED = auto()
    """The shell ended."""
    UNFINISHED = auto()
    """The time was up."""


class _Exchange(NamedTuple):
    state: _State
    output: CommandOutput


class TerminalShell:
    """One shell in a terminal."""

    def __init__(self, sandbox: Sandbox, process: Process, max_bytes: int) -> None:
        self._sandbox = sandbox
        self._process = process
        self._max_bytes = max_bytes
        self._pieces = cast("AsyncGenerator[Output, None]", process.output())
        self._next: asyncio.Future[Output | None] | None = None
        self._rest = b""
        self._exit_code = 0

    @classmethod
    async def start(
        cls, sandbox: Sandbox, *, user: str, cwd: str, environment: Mapping[str, str], max_bytes: int
    ) -> TerminalShell:
        """Start a shell and wait until it answers. Raises ShellNotStarted, SandboxError."""
        process = await sandbox.spawn(SHELL, user=user, cwd=cwd, env=environment, terminal=SIZE)
        shell = cls(sandbox, process, max_bytes)
        try:
            exchange = await shell._exchange(_SET_UP, ANSWER_S)
        except BaseException:
            await asyncio.shield(shell.close())
            raise
        if exchange.state is not _State.DONE:
            await shell.close()
            shown = " ".join(exchange.output.text().split())[-300:]
            raise ShellNotStarted(shown or f"the shell did not answer within {ANSWER_S:g} s")
        shell._rest = b""
        return shell

    async def run(self, command: PolicyCommand) -> Ran:
        """Run a command. Raises SandboxError."""
        exchange = await self._exchange(command.text, command.timeout_s)
        text, cut = exchange.output.text(), exchange.output.cut
        match exchange.state:
            case _State.DONE:
                return Ran(output=text, cut=cut, exit_code=self._exit_code)
            case _State.ENDED:
                exit_code = 128 + signal.SIGKILL
                # A program that replaced the shell and closed the terminal may still be running.
                with suppress(TimeoutError):
                    async with asyncio.timeout(ANSWER_S):
                        exit_code = await self._process.wait()
                await self.close()
                began = exchange.output.started is not None
                return Ran(output=text, cut=cut, exit_code=exit_code, shell_ended=True, began=began)
        recovered = await self._interrupt(exchange.output)
        if not recovered:
            await self.close()
        return Ran(output=text, cut=cut, exit_code=TIMEOUT_EXIT_CODE, timed_out=True, shell_ended=not recovered)

    async def close(self) -> None:
        """Kill the shell and its process tree. Raises SandboxError."""
        try:
            await self._process.signal(signal.SIGKILL)
        finally:
            if self._next is not None:
                self._next.cancel()
                await asyncio.wait((self._next,))
                self._next = None
            await self._pieces.aclose()

    async def _exchange(self, command: str, timeout_s: float) -> _Exchange:
        """Type a command and read its output until it ends, the shell ends, or the time is up."""
        secret = secrets.token_hex(8)
        typed = typed_lines(command, secret, self._exit_code)
        output = CommandOutput(secret, typed, self._max_bytes)
        output.feed(self._rest)
        try:
            async with asyncio.timeout(timeout_s):
                # A shell that has ended closes its terminal, which shows when its output is read.
                with suppress(SandboxFileError):
                    await self._process.write_stdin(typed)
                while output.exit_code is None:
                    if self._next is None:
                        self._next = asyncio.ensure_future(anext(self._pieces, None))
                    # The deadline must not cancel the read itself, which would end the generator.
                    await asyncio.wait((self._next,))
                    piece, self._next = self._next.result(), None
                    if piece is None:
                        return _Exchange(_State.ENDED, output)
                    output.feed(piece.data)
        except TimeoutError:
            return _Exchange(_State.UNFINISHED, output)
        self._rest, self._exit_code = output.rest, output.exit_code
        return _Exchange(_State.DONE, output)

    async def _interrupt(self, output: CommandOutput) -> bool:
        """Press Ctrl-C, kill what is left of the command, and check that the shell answers. Returns False if it does
        not, or if a process could not be killed."""
        start = start_of(output.started or "")
        if start is None:
            return False
        ticks, last_process = start
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._process.write_stdin(b"\x03")
            if not await end_command(self._sandbox, self._process.pid, ticks=ticks, last_process=last_process):
                return False
        except (TimeoutError, ExecTimeout, SandboxFileError):
            return False
        self._rest = b""
        answered = (await self._exchange(_SET_UP, ANSWER_S)).state is _State.DONE
        self._rest, self._exit_code = b"", TIMEOUT_EXIT_CODE
        return answered


async def end_command(sandbox: Sandbox, shell: int, *, ticks: int, last_process: int) -> bool:
    """End all processes that a command of the shell with this process id has started since `ticks` (10 ms each, since
    boot) and process id `last_process`, and wait until they are gone. Returns False if some are left. Raises
    SandboxError."""
    arguments = f"set -- {shell} {ticks} {last_process}"
    return (await sandbox.exec(f"{arguments}\n{_SCRIPT}", cwd="/", timeout_s=_TIMEOUT_S)).exit_code == 0
