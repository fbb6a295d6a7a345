"""Harbor's task folders as tasks whose images are built from their Dockerfiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.actors.cli.held_out.harbor_images import build_images
from headrace.actors.evaluation.graders.evaluation import EvaluationRequest, evaluate
from headrace.buffer.tasks.datasets.harbor import HarborSettings, built_image, read_solution, task_folders, task_of
from headrace.buffer.tasks.datasets.rows import RowRefused
from headrace.buffer.tasks.task import Task
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.images.builder import ImageBuilder
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
from support.clean_sandboxes import CleanSandboxes
from support.harbor_tasks import BASE, built_tasks

pytestmark = pytest.mark.namespaces
SETTINGS = HarborSettings(images={BASE: "host"}, built=True, allow_root=True)


async def reward_of(provider: LocalProvider, task: Task, solution: str) -> float | None:
    """The reward after the solution has run in the task's image."""
    ref = await provider.create(SandboxSpec(image=task.image))
    sandbox = await provider.attach(ref)
    try:
        await sandbox.exec(solution, timeout_s=20)
        request = EvaluationRequest(key="1", task_id=task.id, sandbox=ref, agent_user="root")
        return (await evaluate(task, request, CleanSandboxes(provider, sandbox))).reward
    finally:
        await sandbox.kill()


async def test_built_folders_get_their_verdicts(tmp_path: Path) -> None:
    tasks = built_tasks(10)
    for task in tasks:
        task.write(tmp_path / "tasks")
    folders = task_folders(tmp_path / "tasks")
    async with LocalProvider(LocalSandboxConfig(image_folder=tmp_path / "images")) as provider:
        builder = ImageBuilder(provider)
        made = [one async for one in build_images(folders, {BASE: "host"}, builder)]
        assert {one.problem for one in made} == {""}
        again = [one async for one in build_images(folders, {BASE: "host"}, builder)]
        assert all(one.was_there for one in again if one.name)
        found = {}
        for folder in folders:
            task = task_of(folder, SETTINGS)
            assert task.image in ("host", f"image:{built_image(folder)}")
            script = read_solution(folder)
            assert script is not None
            found[folder.name] = {"reward": await reward_of(provider, task, script[0]["solve.sh"].decode())}
    assert found == {task.name: task.verdict for task in tasks}


async def test_folders_that_cannot_be_built_are_named(tmp_path: Path) -> None:
    texts = {
        "absent": "FROM nobody/has:this\n",
        "failing": f"FROM {BASE}\nRUN exit 3\n",
        "stages": f"FROM {BASE}\nFROM {BASE}\n",
        "out": f"FROM {BASE}\nCOPY ../secret /\n",
    }
    for name, text in texts.items():
        (tmp_path / name / "environment").mkdir(parents=True)
        (tmp_path / name / "environment" / "Dockerfile").write_text(text)
    async with LocalProvider(LocalSandboxConfig(image_folder=tmp_path / "images")) as provider:
        folders = [tmp_path / name for name in texts]
        made = [one async for one in build_images(folders, {BASE: "host"}, ImageBuilder(provider))]
    said = {one.folder.name: one.problem for one in made}
    assert "--base nobody/has:this=IMAGE" in said["absent"]
    assert "exit code 3" in said["failing"]
    assert "a second FROM" in said["stages"]
    assert "leads out" in said["out"]


def test_a_built_image_is_named_by_its_contents(tmp_path: Path) -> None:
    folder = built_tasks(1)[0].write(tmp_path)
    first = built_image(folder)
    dockerfile = folder / "environment" / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text() + "RUN true\n")
    second = built_image(folder)
    dockerfile.chmod(0o600)
    assert len({first, second, built_image(folder)}) == 3
    assert task_of(folder, SETTINGS).image == f"image:{built_image(folder)}"
    with pytest.raises(RowRefused, match="run headrace data images"):
        task_of(folder, HarborSettings(images={BASE: "host"}))
