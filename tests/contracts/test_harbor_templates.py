"""Harbor, unmodified, on our sandboxes: its E2B environment builds its images on the E2B server, and its verdicts equal
the folders' and those of our own verifier. `scripts/install harbor` installs it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.actors.evaluation.graders.evaluation import EvaluationRequest, Verdict, evaluate
from headrace.actors.evaluation.graders.history import task_files
from headrace.buffer.tasks.datasets.harbor import HarborSettings, read_solution, task_of
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.errors import ExecTimeout
from headrace.sandboxes.images.builder import ImageBuilder
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
from headrace.serve.sandbox_servers.e2b.server import E2bServer, ServerSettings
from headrace.serve.sandbox_servers.e2b_state.images import ImageMap
from support.clean_sandboxes import CleanSandboxes
from support.harbor_tasks import BASE, TaskFolder, built_tasks, verdict_tasks
from support.installed_programs import installed

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(900)]
INSTALL_S, RUN_S = 400, 400
KEY = "e2b_" + "0" * 40
QUIET = {"HARBOR_TELEMETRY": "off", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
FOLDERS, AT_ONCE = 50, 16


@pytest.fixture(scope="module")
def harbor() -> Path:
    """Harbor's program, installed into the user's cache if necessary."""
    return installed("harbor", timeout_s=INSTALL_S)


@pytest_asyncio.fixture
async def provider(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    async with LocalProvider(LocalSandboxConfig(image_folder=tmp_path / "images")) as provider:
        yield provider


@asynccontextmanager
async def serving(provider: LocalProvider, folder: Path) -> AsyncIterator[E2bServer]:
    settings = ServerSettings(images=ImageMap({BASE: "host"}), state_folder=folder / "state")
    async with E2bServer(provider, settings, builder=ImageBuilder(provider)) as server:
        yield server


async def run_harbor(harbor: Path, server: E2bServer, folders: Path, jobs: Path) -> dict[str, Any]:
    """Run the oracle over all folders; return each trial's result by the task's name."""
    process = await asyncio.create_subprocess_exec(
        *(str(harbor), "run", "-p", str(folders), "-a", "oracle", "-e", "e2b", "-n", str(AT_ONCE)),
        *("-o", str(jobs), "--job-name", "job", "-y"),
        env=os.environ | QUIET | {"E2B_API_KEY": KEY, "E2B_API_URL": server.url, "E2B_SANDBOX_URL": server.url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(RUN_S):
        said, _ = await process.communicate()
    # The exit code is 0 even if all trials have failed.
    results = await asyncio.to_thread(results_below, jobs)
    assert results, said.decode()
    return {result["task_name"].removeprefix("own/"): result for result in results}


def results_below(jobs: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_bytes()) for path in sorted(jobs.glob("job/*/result.json"))]


def verdict_of(result: dict[str, Any]) -> dict[str, float] | str:
    """The rewards of a trial, or the name of its exception."""
    if result["verifier_result"] is not None:
        rewards: dict[str, float] = result["verifier_result"]["rewards"]
        return rewards
    return str(result["exception_info"]["exception_type"])


async def test_fifty_folders_get_their_verdicts(harbor: Path, provider: LocalProvider, tmp_path: Path) -> None:
    tasks = built_tasks(FOLDERS)
    for task in tasks:
        task.write(tmp_path / "tasks")
    async with serving(provider, tmp_path) as server:
        results = await run_harbor(harbor, server, tmp_path / "tasks", tmp_path / "jobs")
        assert await provider.list() == []
    failed = {name: result["exception_info"] for name, result in results.items() if result["exception_info"]}
    assert failed == {}
    assert {name: verdict_of(result) for name, result in results.items()} == {task.name: task.verdict for task in tasks}


async def test_templates_are_built_once(harbor: Path, provider: LocalProvider, tmp_path: Path) -> None:
    built_tasks(1)[0].write(tmp_path / "tasks")
    async with serving(provider, tmp_path) as server:
        await run_harbor(harbor, server, tmp_path / "tasks", tmp_path / "first")
        named = {path.name for path in (tmp_path / "images" / "named").iterdir()}
    async with serving(provider, tmp_path) as server:
        # The alias is in the server's table.
        results = await run_harbor(harbor, server, tmp_path / "tasks", tmp_path / "second")
    assert verdict_of(results["built-00"]) == {"reward": 1.0}
    assert {path.name for path in (tmp_path / "images" / "named").iterdir()} == named
    assert len(named) == 1


@pytest.mark.skipif("HARBOR_FOLDERS" not in os.environ, reason="HARBOR_FOLDERS names no folder of tasks")
async def test_folders_of_others_are_solved_or_refused(harbor: Path, provider: LocalProvider, tmp_path: Path) -> None:
    """Task folders that are not ours: their own solutions solve them, or the build says what it does not support."""
    async with serving(provider, tmp_path) as server:
        results = await run_harbor(harbor, server, Path(os.environ["HARBOR_FOLDERS"]), tmp_path / "jobs")
        assert await provider.list() == []
    verdicts = {name: verdict_of(result) for name, result in results.items()}
    assert {
        name: verdict for name, verdict in verdicts.items() if verdict not in ({"reward": 1.0}, "BuildException")
    } == {}


async def ours(provider: LocalProvider, folder: Path) -> Verdict:
    """The verdict of our verifier on a folder after its solution, in the same order as Harbor: agent, then tests."""
    task = replace(task_of(folder, HarborSettings(images={BASE: "host"}, allow_root=True)), image="host")
    solution = read_solution(folder)
    assert solution is not None
    ref = await provider.create(SandboxSpec(image=task.image))
    sandbox = await provider.attach(ref)
    try:
        await sandbox.write_many({**await task_files(task), "/solution/solve.sh": solution[0]["solve.sh"]})
        await sandbox.exec("mkdir -p /logs/agent /logs/verifier /logs/artifacts; chmod 777 /logs/*", timeout_s=20)
        # When the agent's time is over, what it has left is graded.
        with suppress(ExecTimeout):
            await sandbox.exec("bash /solution/solve.sh", timeout_s=task.limits.agent_s or 60.0)
        request = EvaluationRequest(key="1", task_id=task.id, sandbox=ref, agent_user="root")
        return await evaluate(task, request, CleanSandboxes(provider, sandbox))
    finally:
        await sandbox.kill()


async def test_our_verifier_gives_harbors_verdicts(harbor: Path, provider: LocalProvider, tmp_path: Path) -> None:
    tasks = verdict_tasks()
    for task in tasks:
        task.write(tmp_path / "tasks")
    async with serving(provider, tmp_path) as server:
        results = await run_harbor(harbor, server, tmp_path / "tasks", tmp_path / "jobs")
    assert {name: verdict_of(result) for name, result in results.items()} == {task.name: task.verdict for task in tasks}
    for task in tasks:
        exception = results[task.name]["exception_info"]
        if task.both:
            assert exception["exception_type"] == "AgentTimeoutError"
        verdict = await ours(provider, tmp_path / "tasks" / task.name)
        assert equal(task, verdict), (task.name, task.verdict, verdict)


def equal(task: TaskFolder, verdict: Verdict) -> bool:
    """Whether our verdict says what Harbor's does: no reward for an exception, else that of `reward` or of the first
    name."""
    if isinstance(task.verdict, str):
        return verdict.reward is None
    rewards = task.verdict
    return verdict.reward == rewards.get("reward", next(iter(rewards.values())))
