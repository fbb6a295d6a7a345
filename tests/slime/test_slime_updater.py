"""Weights that slime's ranks send to engines themselves, over gloo, through slime's own weight updater."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headrace.actors.engines.config import EnginesConfig
from headrace.actors.record.files.metrics import read_metrics
from headrace.actors.runtime.actors.operations import ABSENCE
from headrace.buffer.audit.verify import verify
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.sglang.client import SGLangConfig, SGLangEngine
from headrace.policies.sglang.installation import environment_python
from support import slime_rig as rig
from support.engine_kinds import changed_sglang
from support.slime_pulls import write_module

pytestmark = [pytest.mark.slime, pytest.mark.timeout(900), pytest.mark.usefixtures("slime_ray")]


@pytest.fixture(autouse=True)
def wait_for_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers start slowly on two cores."""
    monkeypatch.setattr(ABSENCE, "seconds", 600.0)


def engines_of(backend: str, transport: str = "nccl", python: Path | None = None, **push: Any) -> rig.StartEngines:
    """Two engines, to which slime's ranks send."""
    section: dict[str, Any] = {"count": 2, "backend": backend, "max_context_tokens": 256, "start_timeout_s": 400}
    if backend == "sglang":
        if (python or environment_python()) is None:
            pytest.skip("SGLang is not installed: scripts/install sglang")
        section |= {"dtype": "bfloat16", "sglang": {"python": python}}
    return partial(rig.engine_group, engines=EnginesConfig.model_validate(section), transport=transport, **push)


async def checksums(run: rig.SlimeRun) -> list[dict[str, str]]:
    """Return the checksums of the weights that each engine serves."""
    key = run.directory.engine_key.read_text().strip()
    async with aiohttp.ClientSession() as session:
        return [
            await SGLangEngine(status.engine_id, status.url, session, SGLangConfig(vocab_size=512), key=key).checksums()
            for status in await run.engines.status()
        ]


async def read_by_all(run: rig.SlimeRun, folder: Path) -> None:
    """Have each engine read a model directory instead."""
    key = run.directory.engine_key.read_text().strip()
    async with aiohttp.ClientSession() as session:
        for status in await run.engines.status():
            engine = SGLangEngine(status.engine_id, status.url, session, SGLangConfig(vocab_size=512), key=key)
            await engine.update_from_disk(folder, version=PolicyVersion(9, 9))


@pytest.mark.parametrize(
    ("backend", "shape"),
    [
        ("cpu", "data"),
        ("cpu", "pipeline"),
        pytest.param("sglang", "tensor", marks=pytest.mark.sglang),
    ],
)
async def test_slimes_ranks_send_every_step_to_all_engines(
    tmp_path: Path, even_model: Path, backend: str, shape: str
) -> None:
    changes = {"slime": rig.shape_section(even_model, shape), "transport": "nccl"}
    started = rig.open_run(tmp_path, even_model, steps=3, start_engines=engines_of(backend), **changes)
    async with started as run, run.producing():
        learner = await run.learner()
        await learner.run()
        served = await run.engines.served_version()
        pushed = await checksums(run)
        # The weights of the last step as slime exports them.
        await read_by_all(run, run.directory.checkpoints / "1.3")
        exported = await checksums(run)
        await run.runtime.stop(learner)
    assert str(served) == "1.3"
    assert pushed == exported
    assert pushed[0] == pushed[1]
    pushes = [record for record in read_metrics(run.directory.metrics) if record["kind"] == "push"]
    assert [record["version"] for record in pushes] == [f"1.{step}" for step in range(4)]
    assert all(len(record["updated"]) == 2 for record in pushes)
    # Only checkpoints have written the weights.
    assert sorted(path.name for path in run.directory.weights.iterdir()) == ["1.2", "1.3"]
    report = verify(run.directory.path)
    assert report.clean, report.problems


@pytest.mark.sglang
async def test_slimes_deltas_are_applied_to_one_copy_on_the_host(tmp_path: Path, even_model: Path) -> None:
    checkouts = rig.checkouts()
    assert checkouts is not None
    python = changed_sglang(tmp_path, HEADRACE_TEST_PULLS=str(write_module(checkouts[0], tmp_path)))
    engines = engines_of("sglang", "delta", python)
    async with rig.open_run(tmp_path, even_model, steps=3, start_engines=engines, transport="delta") as run:
        async with run.producing():
            learner = await run.learner()
            await learner.run()
            pushed = await checksums(run)
            await run.runtime.stop(learner)
        # A new engine begins with the whole model of the last checkpoint; the stream has no older delta.
        stream = sorted(path.name for path in (run.directory.path / "deltas").iterdir())
        await read_by_all(run, run.directory.checkpoints / "1.3")
        exported = await checksums(run)
    assert stream == ["weight_v1000003", "weight_v1000004"]
    assert pushed == exported
    assert pushed[0] == pushed[1]
    pushes = [record for record in read_metrics(run.directory.metrics) if record["kind"] == "push"]
    assert [record["version"] for record in pushes] == [f"1.{step}" for step in range(4)]
    assert all(len(record["updated"]) == 2 and record["seconds"]["pull"] > 0 for record in pushes)
    state = json.loads((run.directory.path / "copies" / ".weight_sync" / "state.json").read_bytes())
    assert state["version"] == "1000004"
