"""Directories that slime exports, pushed by disk into embedded engines; the quickstart's recipe through slime."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.actors.record.files.metrics import read_metrics
from headrace.actors.run.launch import RunRequest, prepare
from headrace.actors.run.service import Service
from headrace.actors.runtime.actors.runtime import RayRuntime
from headrace.buffer.audit.verify import verify
from support import slime_rig as rig

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "scripts" / "models" / "tiny"
pytestmark = [pytest.mark.slime, pytest.mark.usefixtures("slime_ray")]


@pytest.mark.timeout(900)
async def test_every_step_is_pushed_from_its_directory_into_an_engine(tmp_path: Path) -> None:
    async with rig.open_run(tmp_path, TINY, steps=5, start_engines=rig.embedded_engine) as run, run.producing():
        learner = await run.learner()
        await learner.run()
        served = await run.engines.served_version()
        await run.runtime.stop(learner)
    assert str(served) == "1.5"
    pushes = [record for record in read_metrics(run.directory.metrics) if record["kind"] == "push"]
    # The engine's checksums were compared with the snapshot's after each.
    assert [record["version"] for record in pushes] == [f"1.{step}" for step in range(6)]
    assert all(len(record["updated"]) == 1 for record in pushes)
    report = verify(run.directory.path)
    assert report.clean, report.problems


@pytest.mark.slow
@pytest.mark.namespaces
@pytest.mark.timeout(3600)
async def test_the_quickstarts_recipe_learns_through_slime(tmp_path: Path) -> None:
    terms = rig.terms(tmp_path, TINY)
    section = terms.learner.slime.model_dump(mode="json", exclude={"environment"}, exclude_defaults=True)
    overrides = ["learner.kind=slime", "learner.correction=none", "push.transport=disk"]
    overrides += [f"learner.slime.{key}={json.dumps(value)}" for key, value in section.items()]
    overrides += [
        f"learner.slime.environment.{name}={json.dumps(value)}"
        for name, value in terms.learner.slime.environment.items()
    ]
    overrides.append(f"model.path={TINY}")
    # slime weighs tokens in one way only.
    recipe, given = tmp_path / "quickstart.toml", (ROOT / "scripts" / "recipes" / "quickstart.toml").read_text()
    recipe.write_text("".join(line for line in given.splitlines(keepends=True) if not line.startswith("loss_")))
    config, directory = prepare(RunRequest(recipe=recipe, runs_dir=tmp_path, name="run", overrides=tuple(overrides)))
    runtime = RayRuntime("quickstart-")
    service = await runtime.spawn(Service, config, directory, runtime, name="service")
    try:
        assert await service.run()
    finally:
        await runtime.stop(service)
    success = {
        tag: json.loads((directory.path / "evaluations" / tag / "summary.json").read_bytes())["success"]
        for tag in ("base", "final")
    }
    assert success["final"] >= 2 * success["base"], success
    report = verify(directory.path)
    assert report.clean, report.problems
