"""What the harness of every program does in a real local sandbox, shown with a program of the test's own."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from headrace.actors.agents.programs.agent import AgentNotStarted, AgentReport, AgentSession, StopReason
from headrace.actors.agents.programs.cli_agent import (
    CliAgent,
    Launch,
    LaunchContext,
    OutputTail,
    ProgramConfig,
    ProgramEnd,
)
from headrace.actors.services.chat import NoChat
from headrace.buffer.tasks.evaluators import NoEvaluator, RepositoryEvaluator
from headrace.buffer.tasks.repositories import EvalCommand, RepositorySpec
from headrace.buffer.tasks.task import Task, TaskId
from headrace.sandboxes import doctor
from headrace.sandboxes.base import Sandbox, SandboxSpec
from headrace.sandboxes.errors import NamespacesUnavailable, SandboxError
from headrace.sandboxes.local.provider import LocalProvider

pytestmark = [pytest.mark.whole, pytest.mark.namespaces]
TASK = Task(id=TaskId("t"), family="f", instruction="do it", evaluator=NoEvaluator())
LOOK = """
cat > /tmp/look.py <<'EOF'
import json, os, sys, urllib.request, urllib.error
def get(url):
    try:
        return urllib.request.urlopen(url, timeout=5).read().decode()
    except urllib.error.HTTPError as error:
        return error.code
    except OSError as error:
        return type(error).__name__
base = sys.argv[1]
root = base.split("/s/")[0]
print(json.dumps({
    "user": os.getuid(), "home": os.environ["HOME"], "folder": os.getcwd(), "extra": os.environ["EXTRA"],
    "prompt": sys.stdin.read(), "setting": open(os.environ["HOME"] + "/setting").read(),
    "session": get(base + "/v1/x"), "other": get(root + "/s/other/v1/x"), "admin": get(root + "/sessions"),
    "away": get("http://192.0.2.1/"),
}))
EOF
exec python3 /tmp/look.py "$1"
"""


class Probe(CliAgent):
    """Runs a script that is its whole installation."""

    name = "probe"

    def launch(self, place: LaunchContext) -> Launch:
        return Launch(
            command=(self.program(place, "probe"), place.url),
            files={f"{place.home}/setting": b"set", place.prompt_file: place.prompt.encode()},
            environment={"EXTRA": "harness"},
            stdin=place.prompt_file,
        )

    def ending(self, printed: OutputTail) -> ProgramEnd:
        for event in printed.events():
            return ProgramEnd(result=json.dumps(event))
        return ProgramEnd()


@dataclass
class Service:
    """Any HTTP service of the host; counts who came, and can keep them waiting."""

    paths: list[str] = field(default_factory=list)
    hold: bool = False
    came: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.Response:
        self.paths.append(request.path)
        self.came.set()
        try:
            if self.hold:
                await asyncio.get_running_loop().create_future()
        finally:
            self.left.set()
        return web.Response(text="served")


@dataclass
class World:
    sandbox: Sandbox
    service: Service
    session: AgentSession
    folder: Path

    def agent(self, script: str, **settings: Any) -> Probe:
        (self.folder / "probe").write_text(f"#!/bin/bash\n{script}\n")
        (self.folder / "probe").chmod(0o755)
        return Probe(ProgramConfig(folder=self.folder, **settings))

    async def run(self, script: str, task: Task = TASK, **settings: Any) -> AgentReport:
        return await self.agent(script, **settings).run(session=self.session, sandbox=self.sandbox, task=task)

    async def until_running(self, names: str, count: int) -> None:
        look = f"while [ $(pgrep -c '{names}') != {count} ]; do :; done"
        assert await self.out(f"timeout 20 sh -c {shlex.quote(look)}; pgrep -c '{names}'") == str(count)

    async def out(self, command: str) -> str:
        result = await self.sandbox.exec(command, timeout_s=30)
        return (result.stdout + result.stderr).decode().strip()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    try:
        doctor.require_namespaces()
    except NamespacesUnavailable as error:
        pytest.skip(str(error))
    (tmp_path / "agent").mkdir()
    service = Service()
    async with LocalProvider() as provider, serving(service) as url:
        session = AgentSession(base_url=f"{url}/s/token", chat=NoChat())
        agent = Probe(ProgramConfig(folder=tmp_path / "agent"))
        sandbox = await provider.attach(await provider.create(SandboxSpec(folders=agent.folders)))
        yield World(sandbox, service, session, tmp_path / "agent")


@asynccontextmanager
async def serving(service: Service) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", service.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_programs_find_their_environment_in_the_sandbox(world: World) -> None:
    report = await world.run(LOOK, prompt="Please: {instruction}!", environment={"EXTRA": "recipe"})
    assert (report.stop, report.exit_code) == (StopReason.FINISHED, 0), report.log_tail
    assert json.loads(report.result) == {
        "user": 1000,
        "home": "/home/agent",
        "folder": "/workspace",
        "prompt": "Please: do it!",
        "session": "served",
        "other": 403,
        "admin": 403,
        "away": "URLError",
        "setting": "set",
        "extra": "recipe",
    }
    assert world.service.paths == ["/s/token/v1/x"]


async def test_a_prompt_of_any_length_arrives_on_standard_input(world: World) -> None:
    """An argument ends at 128 kB, and at a NUL character."""
    prompt = "--help 'a\0b' $HOME\n" + "x" * 300_000 + "the end"
    report = await world.run(
        'sha256sum | cut -c 1-64; tr "\\0" " " < /proc/$$/cmdline', replace(TASK, instruction=prompt)
    )
    [digest, arguments] = report.log_tail.split("\n")
    assert digest == hashlib.sha256(prompt.encode()).hexdigest()
    assert "--help" not in arguments


async def test_the_gateway_is_unreachable_after_the_context_exits(world: World) -> None:
    """Also to what it left running."""
    left = "import sys, time, urllib.request\nwhile time.sleep(.01) is None: urllib.request.urlopen(sys.argv[1])"
    await world.run(f'setsid python3 -c "{left}" "$1" > /dev/null 2> /tmp/left & until pgrep python3; do :; done')
    await world.until_running("python3", 0)
    said = await world.out("tail -1 /tmp/left")
    assert said
    assert "HTTP Error" not in said
    assert "refused" in await world.out("exec 3<> /dev/tcp/127.0.0.1/47123")


@pytest.mark.parametrize("user", ["1000", "agent", "root", "1234:4321"])
async def test_the_user_owns_the_working_folder(world: World, user: str) -> None:
    await world.sandbox.write_many({"/workspace/deep/file": b"before"})
    await world.out("ln -s /etc/passwd /workspace/link")
    report = await world.run("id -u; echo after > deep/file; git init -q .; git status --short | wc -l", user=user)
    assert report.exit_code == 0, report.log_tail
    assert await world.out("cat deep/file; stat -c %U /etc/passwd") == "after\nroot", "a link is not followed"


async def test_a_program_runs_in_an_image_without_its_user_and_home_folder(world: World) -> None:
    await world.out("rm -r /home; echo root:x:0:0::/root:/bin/bash > /etc/passwd")
    report = await world.run('id -u; cd ~ && touch made && echo "$HOME"')
    assert (report.exit_code, report.log_tail.split()) == (0, ["1000", "/home/agent"])


async def test_a_repository_task_starts_in_its_repository(world: World) -> None:
    await world.out("mkdir /repo")
    repository = RepositorySpec(workdir="/repo", grader=EvalCommand(command="true"))
    task = replace(TASK, evaluator=RepositoryEvaluator(repository=repository))
    assert (await world.run("pwd", task)).log_tail.strip() == "/repo"
    assert (await world.run("pwd", task, working_directory="/tmp")).log_tail.strip() == "/tmp"


async def test_a_failing_program_is_reported_and_not_graded(world: World) -> None:
    report = await world.run("echo out; echo trouble >&2; exit 3")
    assert (report.stop, report.exit_code) == (StopReason.ERROR, 3)
    assert report.log_tail == "out\n\n--- standard error ---\ntrouble\n"


async def test_a_flood_of_output_is_captured_completely(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.actors.agents.programs.cli_agent.MAX_LOG_BYTES", 4096)
    report = await world.run("head -c 20000000 /dev/zero | tr '\\0' x; echo; echo '{\"last\": 1}'")
    assert report.result == '{"last": 1}'
    assert len(report.log_tail) <= 4096


@pytest.mark.parametrize(
    ("script", "settings", "said"),
    [
        ("exec /does/not/exist", {}, "No such file"),
        ("exit 0", {"user": "nobody-known"}, "is not in the sandbox"),
        ("exit 0", {"working_directory": "/opt/headrace/agents/probe"}, "not writable"),
    ],
)
async def test_a_program_that_failed_to_start_is_reported(
    world: World, script: str, settings: dict[str, Any], said: str
) -> None:
    """By the exit codes that shells have for it; a program that was at work may end with them too."""
    report = await world.run(script, **settings)
    assert (report.stop, report.exit_code in (126, 127)) == (StopReason.ERROR, True)
    assert said in report.log_tail


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"in_image": "/does/not/exist"}, "there is no /does/not/exist"),
        ({"working_directory": "/missing"}, "there is no folder /missing"),
    ],
)
async def test_a_program_that_cannot_start_gives_no_result(world: World, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(AgentNotStarted, match=said):
        await world.run("exit 0", **settings)


async def test_a_dead_sandbox_gives_no_result(world: World) -> None:
    await world.sandbox.kill()
    with pytest.raises(SandboxError):
        await world.run("exit 0")


async def test_cancelling_the_wait_kills_the_whole_process_tree(world: World) -> None:
    world.service.hold = True
    script = """
(setsid sleep 1000 &)
sleep 1000 &
python3 -c "import sys, urllib.request; urllib.request.urlopen(sys.argv[1])" "$1"
"""
    running = asyncio.ensure_future(world.run(script))
    await world.service.came.wait()
    await world.until_running("sleep|python3", 3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    # Who is killed takes a moment to be gone.
    await world.until_running("sleep|pyth|prob", 0)
    async with asyncio.timeout(60):
        await world.service.left.wait()


async def test_an_error_about_a_port_in_use_names_the_port(world: World) -> None:
    server = await world.sandbox.spawn(["python3", "-u", "-m", "http.server", "47123"])
    async for piece in server.output():
        if b"Serving" in piece.data:
            break
    with pytest.raises(SandboxError, match="47123"):
        await world.run("exit 0")
    assert (await world.run("exit 0", port=47124)).exit_code == 0
