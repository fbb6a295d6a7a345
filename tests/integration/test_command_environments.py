"""Environments that run commands, in real sandboxes: the shell, and the terminal."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from headrace.actors.agents.loop.agent import LoopAgent
from headrace.actors.agents.loop.config import LoopConfig
from headrace.actors.agents.programs.agent import AgentSession, StopReason
from headrace.actors.environments.command_actions import ECHO_WARNINGS, SUCCEEDED
from headrace.actors.environments.environment import Action, Environment, Episode, Observation, PartKind
from headrace.actors.environments.shell import OutputForm, ShellConfig, ShellEnvironment
from headrace.actors.environments.terminal import TerminalConfig, TerminalEnvironment
from headrace.actors.services.chat import ChatReply
from headrace.actors.services.service import NO_SERVICES
from headrace.buffer.tasks.evaluators import NoEvaluator
from headrace.buffer.tasks.task import Task, TaskId
from headrace.sandboxes.base import Sandbox, SandboxSpec
from headrace.sandboxes.errors import SandboxError
from headrace.sandboxes.local.provider import LocalProvider

TASK = Task(id=TaskId("t"), family="f", instruction="i", evaluator=NoEvaluator())
pytestmark = [pytest.mark.namespaces, pytest.mark.asyncio(loop_scope="module")]
CODED = "{exit_code}|{output}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox(provider: LocalProvider) -> AsyncIterator[Sandbox]:
    sandbox = await provider.attach(await provider.create(SandboxSpec()))
    yield sandbox
    await sandbox.kill()


@asynccontextmanager
async def episode(environment: ShellEnvironment | TerminalEnvironment, sandbox: Sandbox) -> AsyncIterator[Episode]:
    opened = await environment.open(TASK, sandbox, NO_SERVICES, time.monotonic)
    try:
        yield opened
    finally:
        await opened.close()


def terminal(**config: object) -> TerminalEnvironment:
    return TerminalEnvironment(TerminalConfig(**({"observation": CODED, "user": "agent"} | config)))  # type: ignore[arg-type]


async def act(episode: Episode, command: str, **arguments: object) -> Observation:
    name = "bash" if arguments else "run"
    return await episode.act(Action(name=name, arguments={"command": command, **arguments}))


async def text_of(episode: Episode, command: str) -> str:
    return (await act(episode, command)).text


async def running(sandbox: Sandbox, pattern: str) -> int:
    """Number of processes, zombies too, whose command line matches."""
    return int((await sandbox.exec(f"pgrep -fc '{pattern}'", timeout_s=20)).stdout)


async def zombies(sandbox: Sandbox) -> bytes:
    return (await sandbox.exec("ps axo stat,args | grep '^Z'", timeout_s=20)).stdout


async def test_every_command_of_the_shell_runs_in_a_new_subshell(sandbox: Sandbox) -> None:
    config = ShellConfig(observation=SUCCEEDED, max_output_bytes=1000)
    async with episode(ShellEnvironment(config), sandbox) as opened:
        assert await text_of(opened, "cd /; A=1; pwd") == "Command succeeded. Output:\n/\n\n(exit_code=0)"
        assert (await text_of(opened, "pwd; echo $A; exit 3")).startswith(
            "Command failed. Output:\n/workspace\n\n(exit"
        )
        seen = await opened.act(Action(name="search", arguments={}))
        assert (seen.parts[0].kind, seen.ends) == (PartKind.WARNING, False)
        assert (await act(opened, "echo bye; exit")).ends
        assert (await opened.act(Action(name="done"))).ends


@pytest.mark.parametrize(
    "environment",
    [
        ShellEnvironment(ShellConfig(warnings=ECHO_WARNINGS)),
        terminal(warnings=ECHO_WARNINGS, observation="{output}"),
    ],
    ids=["shell", "terminal"],
)
async def test_format_warnings_stand_before_the_output(sandbox: Sandbox, environment: Environment) -> None:
    remarks = ("only the first of 2 calls is run",)
    async with episode(environment, sandbox) as opened:
        arguments = {"command": "echo WARNINGS:", "timeout": 10_000}
        seen = await opened.act(Action(name="bash", arguments=arguments, remarks=remarks))
        assert [part.kind for part in seen.parts] == [PartKind.WARNING, PartKind.OBSERVATION]
        assert seen.parts[0].text.startswith("WARNINGS:\n- only the first of 2 calls is run\n- timeout 10000 is above")
        assert seen.parts[1].text == "WARNINGS:", "the output of a command is no warning, whatever it says"
        assert (await act(opened, "true")).warnings == ()


async def test_the_shell_reads_the_first_bytes_as_the_shell_agent_does(sandbox: Sandbox) -> None:
    async with episode(ShellEnvironment(ShellConfig(max_output_bytes=10)), sandbox) as opened:
        assert await text_of(opened, "echo 12345; echo 6789ABC >&2") == "12345\n6789"
        assert await text_of(opened, "head -c 10000000 /dev/zero | tr '\\0' x") == "x" * 10
        assert (await act(opened, "sleep 1000", timeout=0.2)).text == "timeout"
        assert await running(sandbox, "^sleep 1000") == 0
    both = ShellConfig(max_output_bytes=10, output_form=OutputForm.HEAD_TAIL)
    async with episode(ShellEnvironment(both), sandbox) as opened:
        assert await text_of(opened, "echo 12345; seq 1000; echo ABCD") == "12345\n[3894 bytes left out]\nABCD"


async def test_a_terminal_keeps_folder_variables_jobs_and_exit_codes(sandbox: Sandbox) -> None:
    async with episode(terminal(), sandbox) as opened:
        assert await text_of(opened, "cd /tmp; A=1; export B=2; f() { return 5; }") == "0|"
        assert await text_of(opened, "pwd; echo $A; sh -c 'echo $B'; f") == "5|/tmp\n1\n2"
        assert await text_of(opened, "echo $?; id -un") == "0|5\nagent"
        assert (await text_of(opened, "sleep 100 &")).startswith("0|[1] ")
        assert "Running" in await text_of(opened, "jobs")
        assert (await text_of(opened, "kill %1; wait")).startswith("0|")
        assert await text_of(opened, "cat <<E\n$A 'b'\nE") == "0|1 'b'"
        assert await text_of(opened, "echo 'ä!' \"$(printf '\\t')\" \\\n  x") == "0|ä! \t x"
        assert await text_of(opened, "echo " + "y" * 20_000 + " | wc -c") == "0|20001"


UNFINISHED = (
    'echo "a',
    "echo 'a",
    "echo $(",
    "if true",
    "{",
    "x=(1",
    "cat <<E\na",
    "echo `",
    "case a in",
    "((",
    ")",
    "}",
)


async def test_unfinished_commands_do_not_swallow_the_end_marker(sandbox: Sandbox) -> None:
    async with episode(terminal(), sandbox) as opened:
        for command in UNFINISHED:
            assert not (await text_of(opened, command)).startswith("timed out"), command
            assert await text_of(opened, "{ echo fine; }") == "0|fine", command
        assert await text_of(opened, "echo a\\") == "0|a\\"
        assert await text_of(opened, "# nothing") == "0|"


async def test_output_that_looks_like_a_marker_or_is_binary_is_only_output(sandbox: Sandbox) -> None:
    """Nor does a trace or an echo of the typed lines end a command."""
    async with episode(terminal(max_output_characters=3000), sandbox) as opened:
        assert "0123456789abcdef>0" in await text_of(opened, "printf '\\0360123456789abcdef>0\\036'; false")
        await text_of(opened, "head -c 100000 /dev/urandom")
        assert await text_of(opened, "printf '\\033[31mred\\033[0m\\r\\n'") == "0|red"
        long = await text_of(opened, "head -c 10000000 /dev/zero | tr '\\0' x")
        assert long == "0|" + "x" * 3000 + "\n[output cut: only the first 3000 characters are shown]"
        assert (await text_of(opened, "set -x; echo traced")).endswith("traced")
        assert (await text_of(opened, "set +x")).startswith("0|")
        await text_of(opened, "stty echo")
        assert await text_of(opened, "echo one") == "0|one"
        await text_of(opened, "exec > /tmp/hidden 2>&1")
        assert await text_of(opened, "echo hidden") == "0|"
        assert await text_of(opened, "exec > /dev/tty 2>&1; cat /tmp/hidden") == "0|hidden"


async def test_output_of_background_jobs_is_read_with_a_later_command(sandbox: Sandbox) -> None:
    async with episode(terminal(), sandbox) as opened:
        await text_of(opened, "mkfifo /tmp/go; { read < /tmp/go; echo late; } &")
        assert "late" in await text_of(opened, "echo > /tmp/go; wait; echo next")


async def test_a_command_over_its_time_is_interrupted_and_the_shell_stays(sandbox: Sandbox) -> None:
    async with episode(terminal(command_timeout_s=0.3), sandbox) as opened:
        await text_of(opened, "A=1; sleep 4000 &")
        assert await text_of(opened, "echo partly; cat") == "timed out after 0.3 s\npartly"
        assert await text_of(opened, "echo $?$A") == "0|1241"
        assert (await act(opened, "while :; do :; done", timeout=0.2)).text == "timed out after 0.2 s\n"
        assert (await text_of(opened, "seq 1000; cat")).endswith(
            "[output cut: only the first 500 characters are shown]"
        )
        assert await running(sandbox, "^sleep 4000") == 1
    assert await running(sandbox, "^sleep 4000") == 0


async def test_a_timeout_leaves_no_process_of_its_command_f2(sandbox: Sandbox) -> None:
    """F2: a child that left the session and ignores signals outlives Ctrl-C, but not the timeout."""
    stubborn = "trap '' INT TERM HUP; exec sleep 4001"
    async with episode(terminal(command_timeout_s=0.3), sandbox) as opened:
        await text_of(opened, "sleep 4002 &")
        text = await text_of(opened, f'( setsid bash -c "{stubborn}" & ); setsid bash -c "{stubborn}" & sleep 4003')
        assert text.startswith("timed out")
        assert await running(sandbox, "^sleep 400[13]") == 0
        assert await zombies(sandbox) == b""
        assert await running(sandbox, "^sleep 4002") == 1
        assert await text_of(opened, "echo works") == "0|works"


@pytest.mark.parametrize("environment", [ShellEnvironment(ShellConfig()), terminal()], ids=["shell", "terminal"])
async def test_an_agent_out_of_time_leaves_no_process(sandbox: Sandbox, environment: Environment) -> None:
    """F1: the agent's own time is up in the middle of a command that ignores signals."""

    async def chat(*_: object) -> ChatReply:
        return ChatReply(text="trap '' TERM INT HUP; echo > began; sleep 4006; sleep 4006", finish_reason="stop")

    session = AgentSession(base_url="", chat=chat, agent_s=1.0)  # type: ignore[arg-type]
    report = await LoopAgent(LoopConfig(), environment).run(session=session, sandbox=sandbox, task=TASK)
    assert (report.stop, report.turns) == (StopReason.TIME, 1)
    assert await sandbox.read("/workspace/began", max_bytes=9) == b"\n"
    await sandbox.exec("rm /workspace/began", timeout_s=20)
    assert await running(sandbox, "[s]leep 4006") == 0


async def test_a_timeout_lets_git_remove_its_lock_f2(sandbox: Sandbox) -> None:
    """F2: the next git command does not find the lock of the interrupted one."""
    hook = "printf '#!/bin/sh\\nsleep 4004\\n' > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit"
    async with episode(terminal(command_timeout_s=0.5), sandbox) as opened:
        await text_of(opened, f"mkdir /tmp/r; cd /tmp/r; git init -q; {hook}; echo 1 > a")
        author = "git -c user.name=a -c user.email=a@example.invalid"
        assert (await text_of(opened, f"git add a; {author} commit -qm a; true")).startswith("timed out")
        assert await text_of(opened, "ls .git/index.lock; git add a && echo added") == (
            "0|ls: cannot access '.git/index.lock': No such file or directory\nadded"
        )


LOST = {
    "exit 3": "3|exit\n[the shell ended with exit code 3; the next command starts another]",
    "kill -9 $$": "137|[the shell ended with exit code 137; the next command starts another]",
    "set -e; false": "1|[the shell ended with exit code 1; the next command starts another]",
    "exec true": "0|[the shell ended with exit code 0; the next command starts another]",
}


@pytest.mark.parametrize("command", LOST)
async def test_a_shell_that_ended_is_started_again(sandbox: Sandbox, command: str) -> None:
    async with episode(terminal(), sandbox) as opened:
        await text_of(opened, "cd /tmp")
        seen = await act(opened, command)
        assert (seen.text, seen.ends) == (LOST[command], False)
        assert await text_of(opened, "pwd") == "0|/workspace"


async def test_a_command_runs_once_if_the_shell_ended_between_two_commands(sandbox: Sandbox) -> None:
    async with episode(terminal(), sandbox) as opened:
        assert await text_of(opened, "cd /tmp; exec < /dev/null") == "0|"
        assert await text_of(opened, "pwd; echo x >> once; wc -l < once; rm once") == "0|/workspace\n1"


async def test_the_end_of_the_shell_can_end_the_episode(sandbox: Sandbox) -> None:
    async with episode(terminal(exit_ends=True, observation="{output}"), sandbox) as opened:
        seen = await act(opened, "echo bye; exit 0")
        assert (seen.text, seen.ends) == ("bye\nexit", True)


@pytest.mark.parametrize("command", ["exec sleep 4005", "bash", "stty -isig; sleep 4005", "stty raw -echo; cat"])
async def test_the_next_command_works_whatever_took_the_terminal(sandbox: Sandbox, command: str) -> None:
    async with episode(terminal(command_timeout_s=0.3), sandbox) as opened:
        assert (await text_of(opened, command)).startswith("timed out")
        assert await text_of(opened, "echo works") == "0|works"
        assert await running(sandbox, "^sleep 4005") == 0


@pytest.mark.slow
async def test_a_shell_that_ignores_interrupts_is_replaced(sandbox: Sandbox) -> None:
    async with episode(terminal(command_timeout_s=0.3), sandbox) as opened:
        text = await text_of(opened, "trap '' INT; while :; do :; done")
        assert text.endswith("was killed with its background jobs; the next command starts one]")
        assert await text_of(opened, "echo works") == "0|works"


async def test_a_shell_that_cannot_start_is_an_error_of_the_rollout_only_at_first(provider: LocalProvider) -> None:
    sandbox = await provider.attach(await provider.create(SandboxSpec()))
    with pytest.raises(SandboxError, match="did not start as agent in /nowhere"):
        await terminal(working_directory="/nowhere").open(TASK, sandbox, NO_SERVICES, time.monotonic)
    await sandbox.exec("install -d -o agent /tmp/home", timeout_s=20)
    async with episode(terminal(working_directory="/tmp/home"), sandbox) as opened:
        await text_of(opened, "rmdir /tmp/home; exit")
        assert (await text_of(opened, "pwd")).startswith("126|the shell could not be started again: ")
        await sandbox.exec("install -d -o agent /tmp/home", timeout_s=20)
        assert await text_of(opened, "pwd") == "0|/tmp/home"
    await sandbox.kill()


async def test_a_command_in_a_terminal_is_cheaper_than_a_new_process(sandbox: Sandbox) -> None:
    """Measured 15 times cheaper; the bound allows for a busy machine."""

    async def median_s(opened: Episode) -> float:
        seconds = []
        for _ in range(40):
            began = time.perf_counter()
            await text_of(opened, "true")
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    async with episode(terminal(), sandbox) as cheap, episode(ShellEnvironment(ShellConfig()), sandbox) as costly:
        assert await median_s(cheap) * 2 < await median_s(costly)
