"""The shell agent with a real bash in a folder and a real HTTP service that speaks scripted answers."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from headrace.actors.agents.programs.agent import AgentReport, AgentSession, StopReason
from headrace.actors.agents.registry.config import ShellAgentConfig
from headrace.actors.agents.registry.registry import shell_agent
from headrace.actors.environments.shell import ShellConfig
from headrace.actors.services.chat import ChatClient, ChatContextExceeded, ChatFailed, parse_answer
from headrace.buffer.tasks.datasets.terminal import Kind, Split, problems
from headrace.sandboxes.base import ExecResult
from headrace.sandboxes.errors import ExecTimeout

PROBLEM = next(problem for problem in problems(0, 4, Split.TRAIN) if problem.kind is Kind.WRITE)


class Folder:
    """Runs commands in a folder: as much of a sandbox as the agent uses."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def exec(self, command: str, *, user: str, cwd: str, timeout_s: float, max_output_bytes: int) -> ExecResult:
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", command, cwd=self.path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(timeout_s):
                out, err = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.communicate()
            raise ExecTimeout(f"{command} took more than {timeout_s} s") from None
        code = process.returncode or 0
        return ExecResult(exit_code=code, stdout=out, stderr=err, truncated=False, duration_s=0.0)


class Service:
    """Answers requests in the order of a script and keeps what was asked."""

    def __init__(self, script: Iterable[tuple[int, object]]) -> None:
        self._script = iter(script)
        self.asked: list[dict[str, object]] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        status, body = next(self._script)
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text, content_type="application/json")


@asynccontextmanager
async def serving(service: Service) -> AsyncIterator[ChatClient]:
    application = web.Application()
    application.router.add_post("/s/1/v1/chat/completions", service.handle)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as session:
            yield ChatClient(session, f"http://127.0.0.1:{runner.addresses[0][1]}/s/1/", max_tokens=24)
    finally:
        await runner.cleanup()


def says(text: str | None, reason: str = "stop") -> tuple[int, object]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]}


def place(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in PROBLEM.files().items():
        (folder / name).write_text(text)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


async def play(
    folder: Path, *script: tuple[int, object], **limits: float
) -> tuple[AgentReport, list[dict[str, object]]]:
    place(folder)
    service = Service(script)
    async with serving(service) as chat:
        agent = shell_agent(ShellAgentConfig.model_validate(limits))
        session = AgentSession(base_url="", chat=chat)
        report = await agent.run(session=session, sandbox=Folder(folder), task=PROBLEM.task())
    return report, service.asked


async def test_a_policy_that_looks_and_acts_solves_the_task(tmp_path: Path) -> None:
    act = PROBLEM.act(PROBLEM.finding)
    report, asked = await play(tmp_path, says(PROBLEM.look), says(act))
    assert (report.stop, report.turns, report.commands) == (StopReason.FINISHED, 2, (PROBLEM.look, act))
    assert contents(tmp_path) == PROBLEM.expected()
    assert asked[0] == {
        "model": "policy",
        "messages": [{"role": "user", "content": PROBLEM.instruction}],
        "max_tokens": 24,
    }
    assert asked[1]["messages"] == [
        *asked[0]["messages"],
        {"role": "assistant", "content": PROBLEM.look},
        {"role": "user", "content": PROBLEM.shown},
    ]


async def test_the_agent_stops_after_its_last_turn(tmp_path: Path) -> None:
    report, asked = await play(tmp_path, says("ls"), says("ls"), max_turns=2)
    assert (report.stop, report.turns, len(asked)) == (StopReason.TURNS, 2, 2)


async def test_output_is_capped_and_errors_are_shown(tmp_path: Path) -> None:
    report, asked = await play(tmp_path, says("seq 100"), says("cat nothing"), says("exit"), max_observation_bytes=8)
    assert report.stop is StopReason.FINISHED
    shown = [message["content"] for message in asked[-1]["messages"] if message["role"] == "user"][1:]
    assert shown == ["1\n2\n3\n4", "cat: not"]


async def test_a_command_timeout_is_an_observation(tmp_path: Path) -> None:
    report, asked = await play(tmp_path, says("sleep 60"), says("exit"), command_timeout_s=0.2)
    assert report.stop is StopReason.FINISHED
    assert asked[1]["messages"][-1] == {"role": "user", "content": "timeout"}


@pytest.mark.parametrize(
    ("answer", "stop"),
    [
        (says("touch made", "length"), StopReason.LENGTH),
        (says(None, "length"), StopReason.LENGTH),
        (says(""), StopReason.INVALID),
        (says("touch made\ntouch made"), StopReason.INVALID),
        (says("touch made\0"), StopReason.INVALID),
        ((400, {"error": {"message": "full", "code": "context_length_exceeded"}}), StopReason.CONTEXT),
    ],
)
async def test_unusable_answers_are_not_executed(tmp_path: Path, answer: tuple[int, object], stop: StopReason) -> None:
    report, _ = await play(tmp_path / "w", answer)
    assert report.stop is stop
    assert report.commands == ()
    assert contents(tmp_path / "w") == PROBLEM.files()


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        ((502, {"error": {"message": "engine", "code": "engine_failed"}}), 502, "engine_failed"),
        ((400, {"error": {"message": "closed", "code": "unknown_session"}}), 400, "unknown_session"),
        ((500, "oops"), None, ""),
        ((200, {"choices": []}), 200, ""),
    ],
)
async def test_a_failing_service_raises_an_error(
    tmp_path: Path, answer: tuple[int, object], status: int | None, code: str
) -> None:
    with pytest.raises(ChatFailed) as caught:
        await play(tmp_path, answer)
    assert not isinstance(caught.value, ChatContextExceeded)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.status, copy.code, str(copy)) == (status, code, str(caught.value))


async def test_a_missing_service_raises_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with aiohttp.ClientSession() as session:
            gone = ChatClient(session, f"http://127.0.0.1:{taken.getsockname()[1]}", timeout_s=0.5)
            with pytest.raises(ChatFailed, match="no answer"):
                await gone([])


@pytest.mark.parametrize("command", ["exit", "echo a > b; exit", "true && exit ", "cat a;exit"])
def test_a_command_ending_in_exit_ends_the_session(command: str) -> None:
    assert ShellConfig().ends_episode(command)


@pytest.mark.parametrize("command", ["echo exits", "exit 1", "cat noexit", "exit; ls", ""])
def test_other_commands_do_not_end_the_session(command: str) -> None:
    assert not ShellConfig().ends_episode(command)


def test_an_answer_without_choices_is_refused() -> None:
    with pytest.raises(ChatFailed, match="not a chat completion"):
        parse_answer(200, [])
