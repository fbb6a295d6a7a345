"""Several ranks of the Megatron learner: they train as one does, and end together."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from safetensors.torch import load_file

from headrace.actors.training.megatron_ranks import MegatronRankActor, MegatronRanks
from headrace.buffer.trajectories.types import Batch, CheckpointRef, StepReport
from headrace.policies.errors import DeviceMissing, ModelInvalid, RankFailed, RowUnusable
from headrace.policies.learners.checkpoints import check_checkpoint
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.learners.one_thread import MegatronLearner
from support.rank_comparisons import batch_of, distance, metrics_of
from support.rank_rig import IdleGroup, rank_processes

if TYPE_CHECKING:
    from torch import Tensor

GUARD_S = 200

pytestmark = [
    pytest.mark.timeout(GUARD_S),
    # Megatron's own call sites rely on the default group it warns about.
    pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `support.rank_comparisons` prints."""
    command = [sys.executable, "-m", "support.rank_comparisons", str(tmp_path_factory.mktemp("ranks"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("objective", "steps"), [("grpo", 20), ("gspo", 4), ("cispo", 4), ("observations", 4)])
def test_ranks_equal_one_in_float64(compared: dict[str, Any], objective: str, steps: int) -> None:
    found = compared["compare_steps"][objective]
    one, several = found["metrics"]
    assert len(one) == steps
    for ours, theirs in zip(one, several, strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], abs=1e-8)
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], abs=1e-8)
        # Recorded log-probabilities are fp32, and the drift is measured in it.
        assert theirs == pytest.approx(ours, rel=1e-5)
    if objective == "grpo":
        norms = [step["grad_norm"] for step in one]
        assert min(norms) < 3 < max(norms), "both scaled and unscaled gradients are compared"
    assert found["dtypes"] == ["torch.float64"]
    assert found["apart"] < 1e-8 < 1e-3 < found["moved"]


def test_the_first_step_of_two_ranks_equals_that_of_one_in_fp32(compared: dict[str, Any]) -> None:
    one, two = compared["compare_first_steps"]
    assert two == pytest.approx(one, rel=1e-5)


def test_a_rank_may_have_no_rows_and_all_ranks_skip_alike(compared: dict[str, Any]) -> None:
    found = compared["train_odd_batches"]
    assert found["skipped"] == [False, False, True]
    one, none, bad = found["norms"]
    assert one > 0
    assert (none, bad) == (0.0, None)
    assert found["computed"][0] > 0
    assert found["computed"][1] == 0
    assert found["version"] == "1.2"


def test_a_rank_waits_for_a_hung_one_until_its_timeout(compared: dict[str, Any]) -> None:
    found = compared["wait_for_a_hung_rank"]
    assert "imed out" in found["error"]
    assert found["limit_s"] <= found["waited_s"] < 10 * found["limit_s"]


def test_a_checkpoint_does_not_depend_on_the_number_of_ranks(compared: dict[str, Any]) -> None:
    apart = compared["resume_with"]
    assert (apart["1 to 1"], apart["2 to 2"]) == (0.0, 0.0), "a resume is bit-exact"
    # One of AdamW's updates is up to the learning rate, 5e-4, and rounding shows where a gradient is almost 0.
    assert apart["1 to 2"] < 1e-4
    assert apart["2 to 1"] < 1e-4


def config_of(folder: Path, model_dir: Path, *, ranks: int) -> LearnerConfig:
    return LearnerConfig(
        model_dir=model_dir,
        checkpoint_dir=folder / "checkpoints",
        snapshot_dir=folder / "weights",
        token_budget=64,
        ranks=ranks,
    )


async def trained_alone(
    folder: Path, model_dir: Path, batches: list[Batch]
) -> tuple[list[StepReport], dict[str, Tensor]]:
    """The steps and final weights of one rank."""
    learner = MegatronLearner(config_of(folder, model_dir, ranks=1))
    await learner.open(None, epoch=1)
    try:
        reports = [await learner.step(batch) for batch in batches]
        return reports, load_file((await learner.snapshot()).files[0].path)
    finally:
        await learner.close()


def spoil(actor: MegatronRankActor) -> None:
    """Change one weight of a rank in the last bit."""
    weight = next(iter(actor._rank._optimizer.weights.values()))
    flat = weight.data.flatten()
    flat[0] = flat[0].nextafter(flat[0] + 1)


@pytest.mark.usefixtures("ray_cluster")
async def test_two_ranks_are_one_learner_until_they_differ(tmp_path: Path, tiny_model_dir: Path) -> None:
    import ray

    batches = [batch_of(number) for number in range(2)]
    alone, weights = await trained_alone(tmp_path / "one", tiny_model_dir, batches)
    groups: list[MegatronRanks] = []

    def start(config: LearnerConfig, resume: CheckpointRef | None) -> MegatronRanks:
        groups.append(MegatronRanks(config, resume))
        return groups[-1]

    learner = MegatronLearner(config_of(tmp_path, tiny_model_dir, ranks=2), start)
    await learner.open(None, epoch=1)
    try:
        processes = rank_processes()
        assert len(processes) == 2
        with pytest.raises(RowUnusable) as refusal:
            await learner.step(with_unknown_token(batches[0]))
        assert list(refusal.value.refused) == ["r0"]
        reports = [await learner.step(batch) for batch in batches]
        for ours, theirs in zip(reports, alone, strict=True):
            assert metrics_of(ours) == pytest.approx(metrics_of(theirs), rel=1e-4)
        assert await learner.step(batches[1]) is reports[1], "a repeated step returns the same report"
        snapshot = await learner.snapshot()
        assert distance(load_file(snapshot.files[0].path), weights) < 1e-4
        checkpoint = await learner.save()
        assert check_checkpoint(Path(checkpoint.path)) == checkpoint

        await learner.step(batch_of(2))
        ray.get(groups[0]._ranks[1].__ray_call__.remote(spoil))
        with pytest.raises(RankFailed, match=r"different weights or moments, .* on rank 0; .* on rank 1"):
            await learner.save()
        assert psutil.wait_procs(processes, timeout=0)[1] == []
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1.2"]
        with pytest.raises(RankFailed, match="have ended"):
            await learner.step(batch_of(3))
    finally:
        await learner.close()


def with_unknown_token(batch: Batch) -> Batch:
    """The batch with a token outside the vocabulary in its first rollout."""
    [first, *others] = batch.items
    [row, *rows] = first.trajectory.rows
    wrong = replace(row, tokens_T=row.tokens_T + 10_000)
    return replace(batch, items=(replace(first, trajectory=replace(first.trajectory, rows=(wrong, *rows))), *others))


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("method", "error", "says"),
    [
        ("refuse", DeviceMissing, "^rank 1 has no device$"),
        ("hang", RankFailed, "rank 1 of 2 has not answered 0.5 s after another"),
    ],
)
def test_the_first_failure_ends_all_ranks_and_keeps_its_type(method: str, error: type[Exception], says: str) -> None:
    group = IdleGroup()
    group.lag_s = 0.5
    processes = rank_processes("IdleRank")
    assert len(processes) == 2
    with pytest.raises(error, match=says):
        group.call(method)
    assert psutil.wait_procs(processes, timeout=0)[1] == []
    with pytest.raises(RankFailed, match="have ended"):
        group.call(method)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
async def test_an_error_of_a_rank_keeps_its_type_and_ends_the_ranks(
    tmp_path: Path, write_model: Callable[..., Path]
) -> None:
    model_dir = write_model(tmp_path / "model")
    keys = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(keys | {"intermediate_size": 128}))
    learner = MegatronLearner(config_of(tmp_path, model_dir, ranks=2), MegatronRanks)
    with pytest.raises(ModelInvalid, match="mlp"):
        await learner.open(None, epoch=1)
    assert rank_processes() == []
    await learner.close()


def limit_files(_: MegatronRankActor) -> None:
    """Let every write of a rank beyond 2 MB fail, as on a full disk. Only the optimizer's file is longer."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, resource.RLIM_INFINITY))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
async def test_a_save_of_two_ranks_on_a_full_disk_raises_oserror_and_leaves_nothing(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    import ray

    groups: list[MegatronRanks] = []

    def start(config: LearnerConfig, resume: CheckpointRef | None) -> MegatronRanks:
        groups.append(MegatronRanks(config, resume))
        return groups[-1]

    config = config_of(tmp_path, tiny_model_dir, ranks=2)
    learner = MegatronLearner(config, start)
    await learner.open(None, epoch=1)
    try:
        await learner.step(batch_of(0))
        ray.get(groups[0]._ranks[0].__ray_call__.remote(limit_files))
        with pytest.raises(OSError, match="megatron cannot be written"):
            await learner.save()
    finally:
        await learner.close()
    assert list(config.checkpoint_dir.iterdir()) == []
    assert rank_processes() == []
