"""The learner loop of a trainer of the user: orders, leases, weights, checkpoints. The buffer, its ledger and the loop
are those of the product; the engines are simulated."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from pydantic import ValidationError

from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.runtime.simulated.engines import SimulatedEngineGroup
from headrace.actors.training import external_loop as external_module
from headrace.actors.training.external_loop import ExternalTrainerLoop
from headrace.actors.training.learner import LearnerLoopConfig, Stage
from headrace.actors.training.replay import Replay
from headrace.actors.training.trainer_calls import Commit, Release, Take, TrainerCall, Weights
from headrace.buffer.audit.verify import verify
from headrace.buffer.trajectories.types import RolloutId
from headrace.policies.errors import LeaseLost, ModelInvalid, TrainerRefused
from headrace.policies.learners.checkpoints import check_checkpoint, read_manifest
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.learners.simulated import SimulatedEnginesConfig
from headrace.serve.tracing.telemetry import TelemetryConfig
from support import replay_cases as cases
from support.simulated_lives import CONFIG, feed

GUARD_S = 60
STEPS = 4
CONFIGURATION = {"training": {"steps": STEPS}}
"""In place of a whole configuration."""


class EndedProcess(Exception):
    """In place of the end of the actor's process."""


@dataclass
class Life:
    """One life of a learner for an external trainer, with rollouts that end as soon as they are issued."""

    directory: RunDirectory
    model: Path
    steps: int = STEPS

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        enter = self._stack.enter_async_context
        await enter(asyncio.timeout(GUARD_S))
        self.replay = await enter(Replay(CONFIG, directory=self.directory, seed=3))
        self.engines = await enter(SimulatedEngineGroup(SimulatedEnginesConfig(push_s=0.0), directory=self.directory))
        config = LearnerConfig(
            kind="external",
            model_dir=self.model,
            checkpoint_dir=self.directory.checkpoints,
            snapshot_dir=self.directory.weights,
            keep_checkpoints=2,
        )
        self.learner = await enter(
            ExternalTrainerLoop(
                LearnerLoopConfig(steps=self.steps, save_every=2),
                config,
                replay=self.replay,
                engines=self.engines,
                observing=ActorTelemetry(config=TelemetryConfig(), run_dir=self.directory.path),
                configuration=CONFIGURATION,
            )
        )
        tasks = await enter(asyncio.TaskGroup())
        feeding = tasks.create_task(feed(self.replay, self.engines))
        self.running = tasks.create_task(self.learner.run())
        self._stack.callback(feeding.cancel)
        self._stack.callback(self.running.cancel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def call(self, call: TrainerCall) -> Any:
        return json.loads(await self.learner.call(call))

    async def order(self, version: str | None, **more: Any) -> Any:
        """Return the next order that is not to wait."""
        while True:
            order = await self.call(Take(version=version, **more))
            if order["order"] != "wait":
                return order

    async def begun(self) -> str:
        """Return the version of the trainer's first order, which is to load."""
        order = await self.order(None)
        assert order["order"] == "load"
        return str(order["version"])

    async def trained(self, version: str) -> str:
        """Train a batch, name the weights, and return the version after it; save where that is asked for."""
        order = await self.order(version)
        if order["order"] == "save":
            await self.save(order)
            order = await self.order(version)
        assert order["order"] == "train"
        after = str((await self.call(Commit(lease=order["lease"], metrics={"loss": 0.5})))["version"])
        self.write(order["directory"])
        await self.call(Weights(version=after, directory=order["directory"]))
        return after

    async def save(self, order: Any) -> None:
        folder = self.write(order["directory"])
        (folder / "optimizer.pt").write_text(f"state of {order['version']}")
        await self.call(Weights(version=order["version"], directory=order["directory"]))

    def write(self, directory: str) -> Path:
        """Write weights as a trainer does: only what it changed."""
        from pathlib import Path

        folder = Path(directory)
        folder.mkdir(exist_ok=True)
        shutil.copy(self.model / "model.safetensors", folder)
        return folder


@pytest.fixture
def life(tmp_path: Path, tiny_model_dir: Path) -> Life:
    directory = RunDirectory(path=tmp_path / "run")
    directory.write_beginning(cases.tasks(), "run")
    return Life(directory, tiny_model_dir)


async def test_a_trainer_runs_to_the_end(life: Life) -> None:
    async with life:
        version = await life.begun()
        for _ in range(STEPS):
            version = await life.trained(version)
        last = await life.order(version)
        assert last["order"] == "save"
        await life.save(last)
        assert (await life.order(version))["order"] == "end"
        assert (await life.running).version.step == STEPS
        assert str(await life.engines.served_version()) == version == f"1.{STEPS}"
    report = verify(life.directory.path)
    assert report.clean
    assert (report.steps, report.trained_twice, report.lost) == (STEPS, 0, 0)


async def test_a_batch_has_aligned_rows_of_the_sampled_tokens(life: Life) -> None:
    async with life:
        order = await life.order(await life.begun())
        items = order["batch"]["items"]
        assert len(items) == CONFIG.batch_size
        for item in items:
            for row in item["rows"]:
                assert len(row["tokens"]) == len(row["loss_mask"]) == len(row["logprobs"])
                sampled = sum(end - start for start, end, _, _ in row["versions"])
                assert sum(row["loss_mask"]) == sampled > 0
                assert all(kept or not value for kept, value in zip(row["loss_mask"], row["logprobs"], strict=True))


async def test_the_newest_question_has_the_lease(life: Life) -> None:
    async with life:
        version = await life.begun()
        first, second = await life.order(version), await life.order(version)
        assert first["batch"] == second["batch"]
        with pytest.raises(LeaseLost, match="another trainer asked"):
            await life.call(Commit(lease=first["lease"]))
        assert await life.call(Commit(lease=second["lease"])) == {"version": "1.1"}
        # A repeated commit, after a lost answer, is the same one.
        assert await life.call(Commit(lease=second["lease"])) == {"version": "1.1"}
        assert (await life.learner.status()).version.step == 1  # type: ignore[union-attr]


async def test_a_skipped_step_keeps_the_version(life: Life) -> None:
    async with life:
        version = await life.begun()
        order = await life.order(version)
        assert await life.call(Commit(lease=order["lease"], skipped=True)) == {"version": version}
        assert await life.trained(version) == "1.1"


async def test_weights_that_are_not_named_are_not_pushed(life: Life) -> None:
    async with life:
        version = await life.begun()
        order = await life.order(version)
        after = (await life.call(Commit(lease=order["lease"])))["version"]
        assert (await life.order(after))["order"] == "train"
        assert str(await life.engines.served_version()) == version
        with pytest.raises(TrainerRefused, match="too late"):
            await life.call(Weights(version=after, directory=str(life.write(order["directory"]))))


@pytest.mark.parametrize("kind", ["later", "failed", "refused"])
async def test_a_batch_can_be_given_back(life: Life, kind: str) -> None:
    async with life:
        version = await life.begun()
        order = await life.order(version)
        left_out = order["batch"]["items"][0]["rollout_id"]
        match kind:
            case "later":
                given = Release(lease=order["lease"])
            case "failed":
                given = Release(lease=order["lease"], reason="out of memory")
            case _:
                given = Release(lease=order["lease"], refused={left_out: "too long"})
        await life.call(given)
        await life.call(given)
        with pytest.raises(LeaseLost):
            await life.call(Commit(lease=order["lease"]))
        again = await life.order(version)
        same = order["batch"]["batch_id"] == again["batch"]["batch_id"]
        assert same is (kind != "refused")
        assert (left_out in {item["rollout_id"] for item in again["batch"]["items"]}) is same
        assert await life.call(Commit(lease=again["lease"])) == {"version": "1.1"}
    assert verify(life.directory.path).clean


async def test_only_rollouts_of_the_batch_can_be_refused(life: Life) -> None:
    async with life:
        order = await life.order(await life.begun())
        with pytest.raises(TrainerRefused, match="no rollout r-none"):
            await life.call(Release(lease=order["lease"], refused={RolloutId("r-none"): "too long"}))
        assert await life.call(Commit(lease=order["lease"])) == {"version": "1.1"}


async def test_a_checkpoint_has_all_that_the_trainer_saved(life: Life) -> None:
    async with life:
        version = await life.begun()
        for _ in range(3):
            version = await life.trained(version)
    saved = life.directory.checkpoints / "1.2"
    check_checkpoint(saved)
    assert (saved / "optimizer.pt").read_text() == "state of 1.2"
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {file.name for file in saved.iterdir()}
    manifest = read_manifest(saved)
    assert (len(manifest.batches), manifest.configuration) == (2, CONFIGURATION), "F25"
    async with Life(life.directory, life.model) as successor:
        order = await successor.order(version)
        assert (order["order"], order["version"], order["directory"]) == ("load", "2.2", str(saved))
        assert await successor.trained("2.2") == "2.3"
    report = verify(life.directory.path)
    assert report.clean
    assert (report.steps_rolled_back, report.trained_twice) == (1, 0)


async def test_a_trainer_without_its_state_undoes_what_was_not_saved(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended() -> None:
        raise EndedProcess

    monkeypatch.setattr(external_module, "end_actor", ended)
    async with life:
        version = await life.begun()
        # Nothing is lost yet: another one may begin in its place.
        assert await life.begun() == version
        await life.trained(version)
        with pytest.raises(EndedProcess):
            await life.order(None)


async def test_without_a_trainer_no_batch_is_taken_and_the_stage_says_so(life: Life) -> None:
    async with life:
        # There are enough rollouts for a batch.
        while (await life.replay.status()).inventory.sealed < CONFIG.batch_size:  # noqa: ASYNC110 - as operators ask
            await asyncio.sleep(0.01)
        # The loop waits until it has opened and looked for its trainer.
        while (await life.learner.status()).stage is not Stage.ABSENT:  # noqa: ASYNC110 - as operators ask
            await asyncio.sleep(0.01)
        assert (await life.replay.status()).inventory.leased == 0
        order = await life.order(await life.begun())
        assert order["order"] == "train"
        assert (await life.learner.status()).stage is Stage.STEPPING


async def test_weights_must_be_of_this_model_and_in_the_folder_of_the_order(life: Life, tmp_path: Path) -> None:
    async with life:
        order = await life.order(await life.begun())
        folder = life.write(order["directory"])
        await life.call(Commit(lease=order["lease"]))
        with pytest.raises(LeaseLost, match=r"1\.7 is not the current version, 1\.1"):
            await life.call(Weights(version="1.7", directory=str(folder)))
        outside = tmp_path / "outside"
        shutil.copytree(life.model, outside)
        for named in (outside, life.directory.weights, folder / ".." / "1.1", folder.with_name("1.0")):
            with pytest.raises(ModelInvalid, match="is not the folder of the order"):
                await life.call(Weights(version="1.1", directory=str(named)))
        (folder / "link").symlink_to(outside / "config.json")
        with pytest.raises(ModelInvalid, match="is a link"):
            await life.call(Weights(version="1.1", directory=str(folder)))
        (folder / "link").unlink()
        weights = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
        with pytest.raises(ModelInvalid, match=r"model\.safetensors"):
            await life.call(Weights(version="1.1", directory=str(folder)))
        (folder / "model.safetensors").write_bytes(weights)
        await life.call(Weights(version="1.1", directory=str(folder)))
        # Repeated, after a lost answer.
        await life.call(Weights(version="1.1", directory=str(folder)))


async def test_a_repeated_call_for_weights_is_not_taken_for_a_saved_state(life: Life) -> None:
    async with life:
        version = await life.begun()
        for _ in range(2):
            version = await life.trained(version)
        weights = Weights(version=version, directory=str(life.directory.weights / version))
        order = await life.order(version)
        await life.call(weights)
        assert (await life.order(version))["order"] == order["order"] == "save"
        assert not (life.directory.checkpoints / version).exists()
        await life.save(order)
        await life.call(Weights(version=version, directory=order["directory"]))
        assert (await life.order(version))["order"] == "train"
    assert (life.directory.checkpoints / version / "optimizer.pt").exists()


async def test_a_state_that_cannot_be_copied_is_refused_and_can_be_saved_again(life: Life) -> None:
    async with life:
        version = await life.begun()
        for _ in range(2):
            version = await life.trained(version)
        order = await life.order(version)
        folder = life.write(order["directory"])
        os.mkfifo(folder / "optimizer.pt")
        with pytest.raises(TrainerRefused, match=r"cannot be copied.*named pipe"):
            await life.call(Weights(version=version, directory=order["directory"]))
        (folder / "optimizer.pt").unlink()
        await life.save(order)
        assert (await life.order(version))["order"] == "train"


async def test_of_two_trainers_that_wait_only_the_newest_gets_the_batch(life: Life) -> None:
    async with life:
        learner = life.learner
        version = await life.begun()
        order = await life.order(version)
        # Given back, so that both wait for the same batch.
        await life.call(Release(lease=order["lease"]))
        answers = await asyncio.gather(*(learner.call(Take(version=version, timeout_s=5.0)) for _ in range(3)))
        assert [json.loads(answer)["order"] for answer in answers] == ["wait", "wait", "train"]
        newest = json.loads(answers[-1])
        assert await life.call(Commit(lease=newest["lease"])) == {"version": "1.1"}


async def test_a_run_that_is_drained_before_any_trainer_came_ends(life: Life) -> None:
    async with life:
        while (await life.learner.status()).stage is not Stage.ABSENT:  # noqa: ASYNC110 - as its service asks
            await asyncio.sleep(0.01)
        await life.learner.drain()
        end = await life.running
        assert (end.version.step, end.used_up) == (0, False)
    assert not life.directory.checkpoints.exists() or not list(life.directory.checkpoints.glob("1.*"))


async def test_a_drain_without_the_trainer_undoes_what_it_did_not_save(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_module, "UNSAVED_S", 0.1)
    async with life:
        await life.trained(await life.begun())
        await life.learner.drain()
        assert (await life.running).version.step == 1
    async with Life(life.directory, life.model) as successor:
        assert await successor.trained(await successor.begun()) == "2.1"
    report = verify(life.directory.path)
    assert report.clean
    assert (report.steps, report.steps_rolled_back, report.trained_twice) == (1, 1, 0)


async def test_a_drain_lets_the_trainer_save(life: Life) -> None:
    async with life:
        version = await life.trained(await life.begun())
        await life.learner.drain()
        order = await life.order(version)
        if order["order"] == "train":
            # It was on its way already.
            version = str((await life.call(Commit(lease=order["lease"])))["version"])
            order = await life.order(version)
        await life.save(order)
        assert (await life.order(version))["order"] == "end"
        await life.running
    check_checkpoint(life.directory.checkpoints / version)


async def test_a_trainer_that_lost_only_its_batch_loses_no_step(life: Life) -> None:
    async with life:
        version = await life.begun()
        lost = await life.order(version)
        # Its successor has no state, but nothing was trained yet.
        assert await life.begun() == version
        with pytest.raises(LeaseLost):
            await life.call(Commit(lease=lost["lease"]))
        assert await life.trained(version) == "1.1"


async def test_old_weights_are_removed(life: Life) -> None:
    life.steps = 20
    async with life:
        version = await life.begun()
        for _ in range(7):
            version = await life.trained(version)
    # Those before the last one go behind a push, which the end of the run may overtake.
    assert {"1.6", "1.7"} <= {path.name for path in life.directory.weights.iterdir()} <= {"1.5", "1.6", "1.7"}
    assert {path.name for path in life.directory.checkpoints.glob("1.*")} == {"1.4", "1.6"}


@pytest.mark.parametrize(
    "body",
    [
        {"version": "1.1"},
        {"version": "1.1", "directory": "/w", "pushed": True},
        {"version": "1.1", "directory": "w"},
        {"version": "0.1", "pushed": True},
        {"version": "1.01", "pushed": True},
        {"version": "1.1\n", "pushed": True},
    ],
)
def test_weights_need_one_version_and_one_place(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Weights.model_validate(body)
