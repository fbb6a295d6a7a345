"""F25: every checkpoint holds the run's resolved configuration, and the report compares it with the run's present one.
The buffer, the learner loop and the checkpoints are those of the product; nothing is computed."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.record.files.run_directory import RunDirectory, read_configuration
from headrace.actors.run.changes import ChangedKey
from headrace.actors.run.launch import RunRequest, change, prepare
from headrace.actors.run.report import RunReport, report_of
from headrace.actors.runtime.simulated.engines import SimulatedEngineGroup
from headrace.actors.training.learner import LearnerLoop, LearnerLoopConfig
from headrace.actors.training.replay import Replay
from headrace.policies.learners.checkpoints import MANIFEST, list_checkpoints, read_manifest
from headrace.policies.learners.simulated import SimulatedEnginesConfig, SimulatedLearnerConfig
from headrace.serve.tracing.telemetry import TelemetryConfig
from support import replay_cases as cases
from support.run_rig import RECIPE
from support.simulated_lives import CONFIG, feed

GOLDEN = Path(__file__).parents[1] / "golden"
GUARD_S = 60


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return prepare(RunRequest(recipe=RECIPE.with_name("simulated.toml"), runs_dir=tmp_path, name="run"))[1]


async def train(directory: RunDirectory, steps: int) -> None:
    """One session of the run up to `steps`, with a checkpoint after each step."""
    async with (
        asyncio.timeout(GUARD_S),
        Replay(CONFIG, directory=directory, seed=3, tasks=cases.tasks()) as replay,
        SimulatedEngineGroup(SimulatedEnginesConfig(push_s=0.0), directory=directory) as engines,
        LearnerLoop(
            LearnerLoopConfig(steps=steps, save_every=1),
            SimulatedLearnerConfig(step_s=0.0, checkpoint_dir=directory.checkpoints),
            replay=replay,
            engines=engines,
            observing=ActorTelemetry(config=TelemetryConfig(), run_dir=directory.path),
            configuration=read_configuration(directory),
        ) as learner,
        asyncio.TaskGroup() as tasks,
    ):
        feeding = tasks.create_task(feed(replay, engines))
        await learner.run()
        feeding.cancel()


def text_of(report: RunReport) -> str:
    output = io.StringIO()
    Console(file=output, width=200).print(report.tables())
    return output.getvalue()


async def test_f25_every_checkpoint_holds_the_resolved_configuration(directory: RunDirectory) -> None:
    await train(directory, 2)
    written = json.loads(directory.config.read_bytes())
    saved = list_checkpoints(directory.checkpoints)
    assert [path.name for path in saved] == ["1.1", "1.2"]
    assert [read_manifest(path).configuration for path in saved] == [written, written]
    assert written["training"]["stage_timeout_s"] > 0, "derived values are resolved"
    report = report_of(directory)
    assert report.checkpoint is not None
    assert (report.checkpoint.configuration, report.checkpoint.changed) == (written, ())
    assert "newest checkpoint 1.2 was trained with the run's present configuration" in text_of(report)


async def test_f25_the_report_shows_what_the_newest_checkpoint_was_trained_with(directory: RunDirectory) -> None:
    await train(directory, 1)
    change(directory.path, ["training.save_every=3", 'services.judge.url="http://127.0.0.1:1"'])
    report = report_of(directory)
    assert report.checkpoint is not None
    changed = {one.key: one for one in report.checkpoint.changed}
    assert changed["training.save_every"] == ChangedKey(key="training.save_every", trained=10, present=3)
    assert changed["services.judge.url"].trained is None, "the checkpoint's session had no such service"
    assert all(key == "training.save_every" or key.startswith("services.judge.") for key in changed)
    assert "newest checkpoint 1.1 was trained with training.save_every 10; the run now has 3" in text_of(report)
    assert json.loads(json.dumps(report.to_json()["checkpoint"]))["changed"]
    await train(directory, 2)
    report = report_of(directory)
    assert report.checkpoint is not None
    assert (report.checkpoint.version, report.checkpoint.changed) == ("2.2", ())
    assert read_manifest(directory.checkpoints / "1.1").configuration["training"]["save_every"] == 10


async def test_f25_a_run_that_was_moved_has_the_same_configuration(directory: RunDirectory, tmp_path: Path) -> None:
    await train(directory, 1)
    moved = RunDirectory(path=Path(shutil.move(directory.path, tmp_path / "moved")))
    config = json.loads(moved.config.read_bytes())
    config["learner"]["checkpoint_dir"] = str(moved.checkpoints)
    moved.config.write_text(json.dumps(config))
    report = report_of(moved)
    assert report.checkpoint is not None
    assert report.checkpoint.changed == ()


def test_f25_a_checkpoint_without_its_configuration_is_read_and_the_report_says_so(tmp_path: Path) -> None:
    directory = RunDirectory(path=shutil.copytree(GOLDEN / "ledger", tmp_path / "run"))
    directory.config.write_bytes((GOLDEN / "config.json").read_bytes())
    [saved] = list_checkpoints(directory.checkpoints)
    assert read_manifest(saved).configuration == {}
    assert "does not hold its configuration" in text_of(report_of(directory))


async def test_f25_a_checkpoint_that_cannot_be_compared_does_not_spoil_the_report(directory: RunDirectory) -> None:
    await train(directory, 1)
    manifest = directory.checkpoints / "1.1" / MANIFEST
    document = json.loads(manifest.read_bytes())
    document["configuration"]["recorded"]["format"] = 99
    manifest.write_text(json.dumps(document))
    assert "cannot be compared with the run's: it is of an unreleased version" in text_of(report_of(directory))
    manifest.write_text("{")
    assert "newest checkpoint 1.1: " in text_of(report_of(directory))
