"""The learner on real megatron-core: parity with transformers, steps, skips, checkpoints, kills."""

from __future__ import annotations

import asyncio
import json
import math
import os
import pickle
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace.buffer.trajectories.token_kinds import TokenKind
from headrace.buffer.trajectories.types import (
    Batch,
    BatchId,
    BatchItem,
    BatchLease,
    CheckpointRef,
    GroupId,
    RolloutId,
    Row,
    Trajectory,
    VersionSpan,
)
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.errors import (
    CheckpointUnreadable,
    LearnerAlreadyOpen,
    LearnerNotOpen,
    ModelInvalid,
    NonFiniteRun,
    RowUnusable,
)
from headrace.policies.learners import checkpoints
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.learners.one_thread import MegatronLearner
from headrace.policies.models.model_files import weight_files
from support.full_disks import files_of_at_most
from support.tiny_model import QWEN2

# Megatron's own call sites rely on the default group it warns about.
pytestmark = pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning")

VOCABULARY = 258
PROMPT, LENGTH = 6, 24


def learner_config(tmp_path: Path, model_dir: Path, **changes: object) -> LearnerConfig:
    return LearnerConfig.model_validate(
        {"model_dir": model_dir, "checkpoint_dir": tmp_path / "checkpoints", "snapshot_dir": tmp_path / "weights"}
        | changes
    )


@asynccontextmanager
async def opened(
    config: LearnerConfig, resume: CheckpointRef | None = None, epoch: int = 1
) -> AsyncIterator[MegatronLearner]:
    learner = MegatronLearner(config)
    try:
        await learner.open(resume, epoch=epoch)
        yield learner
    finally:
        await learner.close()


def random_tokens(count: int, seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [
        generator.integers(0, VOCABULARY, size=int(generator.integers(PROMPT + 2, LENGTH))).astype(np.int32)
        for _ in range(count)
    ]


def make_batch(number: int, *, model_dir: Path, advantages: tuple[float, ...] = (1.0, -1.0, 0.5, -0.5)) -> Batch:
    """Random rows with the log-probabilities that transformers gives them."""
    rows = random_tokens(len(advantages), seed=number)
    logprobs = reference_logprobs(model_dir, rows)
    version = PolicyVersion(1, 0)
    items = []
    for index, (tokens, values, advantage) in enumerate(zip(rows, logprobs, advantages, strict=True)):
        trained = np.arange(len(tokens)) >= PROMPT
        row = Row(
            tokens_T=tokens,
            loss_mask_T=trained,
            logprobs_T=np.where(trained, values, 0.0).astype(np.float32),
            versions=(VersionSpan(start=PROMPT, end=len(tokens), version=version),),
        )
        items.append(
            BatchItem(
                rollout_id=RolloutId(f"b{number}r{index}"),
                group_id=GroupId(f"b{number}"),
                attempt=1 + index % 2,
                reward=float(index % 2),
                advantage=advantage,
                staleness=index,
                trajectory=Trajectory(rows=(row,), temperature=1.0),
            )
        )
    return Batch(lease=BatchLease(batch_id=BatchId(f"b{number}"), epoch=1), version=version, items=tuple(items))


def reference_logprobs(model_dir: Path, rows: list[np.ndarray]) -> list[np.ndarray]:
    """Per row, log-probabilities of each token given those before it (0 for the first), by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    result = []
    with torch.inference_mode():
        for tokens in rows:
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            values = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            result.append(np.concatenate([[0.0], values.numpy()]))
    return result


def mean_trained(values: np.ndarray) -> float:
    return float(values[PROMPT:].mean())


def reference_model(folder: Path, family: str, *, tied: bool, heads: int, groups: int) -> torch.nn.Module:
    """A random model of transformers, saved in `folder`."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3ForCausalLM
    from transformers import Qwen3Config as Qwen3Keys

    keys = {
        "vocab_size": 101,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "tie_word_embeddings": tied,
        "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
    }
    torch.manual_seed(0)
    if family == "qwen2.5":
        model = Qwen2ForCausalLM(Qwen2Config(**keys))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
    else:
        model = Qwen3ForCausalLM(Qwen3Keys(**keys, head_dim=32))
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.core
@pytest.mark.parametrize(
    ("family", "tied", "heads", "groups"),
    [("qwen3", True, 3, 1), ("qwen3", False, 4, 2), ("qwen2.5", True, 4, 2), ("qwen2.5", False, 3, 1)],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_megatron_agrees_with_transformers_and_round_trips(
    tmp_path: Path, family: str, tied: bool, heads: int, groups: int, recompute: bool
) -> None:
    """Log-probabilities, the gradient of every parameter, and the weights of the round trip."""
    from headrace.policies.learners import megatron_model, megatron_world
    from headrace.policies.models.qwen_config import QwenConfig

    reference = reference_model(tmp_path, family, tied=tied, heads=heads, groups=groups)
    tokens = torch.randint(0, 101, (3, 40), generator=torch.Generator().manual_seed(1))
    trained = torch.ones_like(tokens, dtype=torch.bool)
    trained[:, 0] = False
    weights_N = torch.linspace(-1, 1, int(trained.sum()))
    expected = reference(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).flatten()
    (expected * weights_N).sum().backward()

    shape, weights = QwenConfig.read(tmp_path / "config.json"), load_file(tmp_path / "model.safetensors")
    megatron_world.start(seed=0)
    try:
        settings = megatron_model.transformer_config(shape)
        model = megatron_model.build_model(shape, settings, recompute=recompute)
        model.load_state_dict(megatron_model.read_weights(tmp_path, shape), strict=False)
        got, _ = model(tokens, trained, torch.ones_like(weights_N))
        (got * weights_N).sum().backward()
        exported = megatron_model.export_weights(model, shape)
        for parameter in model.parameters():
            parameter.data = parameter.grad
        gradients = megatron_model.export_weights(model, shape)
    finally:
        megatron_world.stop()
    assert float((got - expected).detach().abs().max()) <= 1e-3
    assert float(expected.detach().std()) > 0.5
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    for name, parameter in reference.named_parameters():
        error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error <= 1e-4, name


@pytest.mark.core
async def test_steps_raise_logprobs_of_good_tokens_and_lower_those_of_bad_ones(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    batch = make_batch(0, model_dir=tiny_model_dir, advantages=(1.0, -1.0, 1.0, -1.0))
    rows = [item.trajectory.rows[0].tokens_T for item in batch.items]
    before = reference_logprobs(tiny_model_dir, rows)
    async with opened(learner_config(tmp_path, tiny_model_dir)) as learner:
        for number in range(3):
            report = await learner.step(renamed(batch, number))
        checkpoint = await learner.save({"learner": {"learning_rate": 1.0}})
    assert report.version == PolicyVersion(1, 3)
    assert checkpoints.read_manifest(Path(checkpoint.path)).configuration == {"learner": {"learning_rate": 1.0}}, "F25"
    after = reference_logprobs(Path(checkpoint.path), rows)
    for item, old, new in zip(batch.items, before, after, strict=True):
        assert (mean_trained(new) - mean_trained(old)) * item.advantage > 0.005


def renamed(batch: Batch, number: int) -> Batch:
    return replace(batch, lease=BatchLease(batch_id=BatchId(f"again{number}"), epoch=1))


async def test_an_on_policy_step_is_reported_correctly(tmp_path: Path, tiny_model_dir: Path) -> None:
    batch = make_batch(1, model_dir=tiny_model_dir, advantages=(1.0, -1.0, 0.0, 2.0))
    tokens = [int(item.trajectory.rows[0].loss_mask_T.sum()) for item in batch.items]
    async with opened(learner_config(tmp_path, tiny_model_dir, warmup_steps=4)) as learner:
        metrics = (await learner.step(batch)).metrics
    assert metrics["mean_abs_log_ratio"] < 1e-4
    assert metrics["mean_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["loss"] == pytest.approx(-(1.0 - 1.0 + 0.0 + 2.0) / 4, abs=1e-4)
    assert metrics["clip_fraction"] == 0.0
    assert metrics["learning_rate"] == pytest.approx(5e-4 / 4)
    assert (metrics["tokens"], metrics["computed_tokens"]) == (sum(tokens), sum(tokens) - tokens[2])
    assert (metrics["mean_staleness"], metrics["max_staleness"], metrics["mean_reward"]) == (1.5, 3.0, 0.5)
    assert 0.0 < metrics["entropy"] < math.log(VOCABULARY)
    assert metrics["grad_norm"] > 0.0


async def test_splitting_into_micro_batches_does_not_change_the_result(tmp_path: Path, tiny_model_dir: Path) -> None:
    batch = make_batch(2, model_dir=tiny_model_dir)
    results = []
    for budget in (LENGTH, 10_000):
        config = learner_config(tmp_path / str(budget), tiny_model_dir, token_budget=budget)
        async with opened(config) as learner:
            report = await learner.step(batch)
            results.append((report.metrics, load_file((await learner.snapshot()).shards[0].path)))
    (small, small_weights), (large, large_weights) = results
    start = load_file(tiny_model_dir / "model.safetensors")
    for name in ("loss", "grad_norm", "entropy"):
        assert small[name] == pytest.approx(large[name], rel=1e-4, abs=1e-6)
    for name, tensor in small_weights.items():
        moved = large_weights[name] - start[name]
        # AdamW's first update is the gradient's sign, so rounding shows where a gradient is almost 0.
        assert float((tensor - large_weights[name]).norm()) <= 0.01 * float(moved.norm()), name


async def test_non_finite_gradients_are_skipped_and_finally_end_the_run(tmp_path: Path, tiny_model_dir: Path) -> None:
    """F7."""
    good = make_batch(3, model_dir=tiny_model_dir)
    bad = [make_batch(number, model_dir=tiny_model_dir, advantages=(1.0, math.nan)) for number in (4, 5, 6)]
    async with opened(learner_config(tmp_path, tiny_model_dir, max_skipped_in_a_row=2)) as learner:
        start = await learner.snapshot()
        skipped = await learner.step(bad[0])
        assert (skipped.skipped, skipped.version) == (True, PolicyVersion(1, 0))
        assert "grad_norm" not in skipped.metrics
        assert (await learner.snapshot()).shards == start.shards
        report = await learner.step(good)
        assert (report.skipped, report.version) == (False, PolicyVersion(1, 1))
        trained = await learner.snapshot()
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(trained.shards[0].path).values())
        assert (await learner.step(bad[1])).skipped
        with pytest.raises(NonFiniteRun, match="max_skipped_in_a_row"):
            await learner.step(bad[2])
        checkpoint = await learner.save()
    manifest = checkpoints.read_manifest(Path(checkpoint.path))
    assert [(batch.batch_id, batch.skipped) for batch in manifest.batches] == [
        ("b4", True),
        ("b3", False),
        ("b5", True),
        ("b6", True),
    ]
    assert manifest.batches[1].members == (("b3r0", 1), ("b3r1", 2), ("b3r2", 1), ("b3r3", 2))


async def test_a_skipped_step_does_not_change_the_optimizer_moments(tmp_path: Path, tiny_model_dir: Path) -> None:
    """F7."""
    batches = [make_batch(number, model_dir=tiny_model_dir) for number in (7, 8)]
    bad = make_batch(9, model_dir=tiny_model_dir, advantages=(math.nan,))
    digests = []
    for index, order in enumerate(([batches[0], batches[1]], [batches[0], bad, batches[1]])):
        async with opened(learner_config(tmp_path / str(index), tiny_model_dir)) as learner:
            for batch in order:
                await learner.step(batch)
            digests.append(weights_of(await learner.save()))
    assert equal(digests[0], digests[1])


def weights_of(checkpoint: CheckpointRef) -> dict[str, torch.Tensor]:
    return load_file(Path(checkpoint.path) / "model.safetensors")


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


async def test_a_batch_without_advantages_is_a_regular_step(tmp_path: Path, tiny_model_dir: Path) -> None:
    async with opened(learner_config(tmp_path, tiny_model_dir)) as learner:
        report = await learner.step(make_batch(24, model_dir=tiny_model_dir, advantages=(0.0, 0.0)))
    assert (report.skipped, report.version) == (False, PolicyVersion(1, 1))
    assert (report.metrics["grad_norm"], report.metrics["computed_tokens"]) == (0.0, 0.0)
    assert "entropy" not in report.metrics


async def test_a_cancelled_step_is_applied_once(tmp_path: Path, tiny_model_dir: Path) -> None:
    batches = [make_batch(number, model_dir=tiny_model_dir) for number in (10, 11)]
    async with opened(learner_config(tmp_path, tiny_model_dir)) as learner:
        await learner.step(batches[0])
        step = asyncio.ensure_future(learner.step(batches[1]))
        await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        report = await learner.step(batches[1])
        assert report.version == PolicyVersion(1, 2)
        assert (await learner.save()).batch_ids == ("b10", "b11")


async def test_only_the_last_two_snapshots_are_kept(tmp_path: Path, tiny_model_dir: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "1.9.tmp").write_text("left by a learner that was killed")
    async with opened(learner_config(tmp_path, tiny_model_dir)) as learner:
        first = await learner.snapshot()
        assert equal(load_file(first.shards[0].path), load_file(tiny_model_dir / "model.safetensors"))
        for number in (12, 13):
            await learner.step(make_batch(number, model_dir=tiny_model_dir))
            last = await learner.snapshot()
        assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["1.1.safetensors", "1.2.safetensors"]
        assert last.shards[0].path.name == "1.2.safetensors"


async def test_weights_are_readable_by_whom_the_umask_allows(tmp_path: Path, tiny_model_dir: Path) -> None:
    (tmp_path / "plain").touch()
    async with opened(learner_config(tmp_path, tiny_model_dir)) as learner:
        [shard] = (await learner.snapshot()).shards
    assert shard.path.stat().st_mode == (tmp_path / "plain").stat().st_mode


async def test_a_snapshot_is_kept_when_the_clock_was_set_back(tmp_path: Path, tiny_model_dir: Path) -> None:
    """The files before it seem to be of tomorrow."""
    async with opened(learner_config(tmp_path, tiny_model_dir)) as learner:
        for number in (12, 13, 14):
            await learner.step(make_batch(number, model_dir=tiny_model_dir))
            last = await learner.snapshot()
            assert last.shards[0].path.exists()
            tomorrow_s = last.shards[0].path.stat().st_mtime + 86_400
            os.utime(last.shards[0].path, (tomorrow_s - number, tomorrow_s - number))
        assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["1.2.safetensors", "1.3.safetensors"]


def run_program(program: str, message: object) -> subprocess.CompletedProcess[bytes]:
    """Run Python source in a new process with `message` pickled on its standard input."""
    return subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(message),
        stdout=subprocess.PIPE,
        check=False,
        timeout=100,
    )


CONTINUE = """
import asyncio, pickle, sys
from headrace.policies.learners.one_thread import MegatronLearner
from support.tiny_model import QWEN2

async def main():
    config, resume, epoch, batches = pickle.load(sys.stdin.buffer)
    learner = MegatronLearner(config)
    state = await learner.open(resume, epoch=epoch)
    for batch in batches:
        await learner.step(batch)
    snapshot = await learner.snapshot()
    await learner.close()
    print(snapshot.shards[0].path, state.chain)

asyncio.run(main())
"""


@pytest.mark.core
async def test_a_new_process_continues_bit_for_bit(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = learner_config(tmp_path, tiny_model_dir, warmup_steps=10)
    batches = [make_batch(number, model_dir=tiny_model_dir) for number in range(14, 18)]
    async with opened(config) as learner:
        for batch in batches[:2]:
            await learner.step(batch)
        checkpoint = await learner.save()
        for batch in batches[2:]:
            await learner.step(batch)
        straight = load_file((await learner.snapshot()).shards[0].path)
    elsewhere = config.model_copy(update={"snapshot_dir": tmp_path / "other", "model_dir": tmp_path / "gone"})
    answer = await asyncio.to_thread(run_program, CONTINUE, (elsewhere, checkpoint, 2, batches[2:]))
    assert answer.returncode == 0
    path, chain = answer.stdout.decode().split()
    assert chain == checkpoint.chain
    assert path.endswith("2.4.safetensors")
    assert equal(load_file(path), straight)


async def test_a_resumed_learner_continues_when_its_checkpoint_is_deleted(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = learner_config(tmp_path, tiny_model_dir, keep_checkpoints=1)
    async with opened(config) as learner:
        await learner.step(make_batch(1, model_dir=tiny_model_dir))
        first = await learner.save()
    async with opened(config.model_copy(update={"model_dir": tmp_path / "gone"}), first, epoch=2) as learner:
        for number in (2, 3, 4):
            await learner.step(make_batch(number, model_dir=tiny_model_dir))
            newest = await learner.save()
    kept = {path.name for path in config.checkpoint_dir.iterdir()}
    assert kept == {str(newest.version)}, f"{first.version} is gone"
    assert (Path(newest.path) / "tokenizer.json").read_bytes() == (tiny_model_dir / "tokenizer.json").read_bytes()


SAVE_AND_DIE = """
import asyncio, os, pickle, signal, sys
from headrace.policies.learners.one_thread import MegatronLearner
from support.tiny_model import QWEN2

def die_at(event, arguments):
    if armed and event == DEADLY and FRAGMENT in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    config, batches = pickle.load(sys.stdin.buffer)
    learner = MegatronLearner(config)
    await learner.open(None, epoch=1)
    await learner.step(batches[0])
    await learner.save()
    await learner.step(batches[1])
    armed.append(True)
    await learner.save()

armed = []
sys.addaudithook(die_at)
asyncio.run(main())
"""


@pytest.mark.parametrize(("event", "fragment"), [("open", "tmp-1.2/headrace.json"), ("os.rename", "tmp-1.2")])
async def test_a_kill_during_a_save_leaves_the_previous_checkpoint_usable(
    tmp_path: Path, tiny_model_dir: Path, event: str, fragment: str
) -> None:
    config = learner_config(tmp_path, tiny_model_dir)
    batches = [make_batch(number, model_dir=tiny_model_dir) for number in (18, 19)]
    program = f"DEADLY, FRAGMENT = {event!r}, {fragment!r}\n{SAVE_AND_DIE}"
    died = await asyncio.to_thread(run_program, program, (config, batches))
    assert died.returncode == -signal.SIGKILL
    assert (config.checkpoint_dir / "tmp-1.2").is_dir()
    latest = checkpoints.usable_checkpoint(config.checkpoint_dir).checkpoint
    assert latest is not None
    assert (latest.version, latest.batch_ids) == (PolicyVersion(1, 1), ("b18",))
    async with opened(config, latest, epoch=2) as learner:
        await learner.step(batches[1])
        assert (await learner.save()).batch_ids == ("b19",)
    assert sorted(path.name for path in config.checkpoint_dir.iterdir()) == ["1.1", "2.2"]


def truncate_state(checkpoint: Path) -> None:
    [*_, file] = sorted((checkpoint / "megatron").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:1000])


@pytest.mark.parametrize("part", ["model.safetensors", "megatron"])
async def test_a_save_that_cannot_be_written_leaves_nothing_and_is_tried_again(
    tmp_path: Path, tiny_model_dir: Path, part: str
) -> None:
    config = learner_config(tmp_path, tiny_model_dir)
    async with opened(config) as learner:
        await learner.step(make_batch(1, model_dir=tiny_model_dir))
        weights_bytes = sum(path.stat().st_size for path in weight_files(tiny_model_dir))
        # The optimizer's file holds three times as many numbers as the weights'.
        limit_bytes = weights_bytes * 3 // 2 if part == "megatron" else weights_bytes // 2
        with files_of_at_most(limit_bytes), pytest.raises(OSError, match=f"{part} cannot be written"):
            await learner.save()
        assert list(config.checkpoint_dir.iterdir()) == []
        checkpoint = await learner.save()
    checkpoints.check_checkpoint(Path(checkpoint.path))
    truncate_state(Path(checkpoint.path))
    with pytest.raises(CheckpointUnreadable, match="megatron cannot be loaded"):
        await MegatronLearner(config).open(checkpoint, epoch=2)


async def test_the_commit_chain_continues_across_checkpoints_and_epochs(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = learner_config(tmp_path, tiny_model_dir, keep_checkpoints=2)
    batches = [make_batch(number, model_dir=tiny_model_dir) for number in (20, 21, 22)]
    async with opened(config) as learner:
        await learner.step(batches[0])
        await learner.save()
        await learner.step(batches[1])
        second = await learner.save()
        assert await learner.save() == second
    resumed = MegatronLearner(config)
    try:
        state = await resumed.open(second, epoch=2)
        assert (state.parent, state.step, state.chain) == (PolicyVersion(1, 2), 2, second.chain)
        await resumed.step(batches[2])
        third = await resumed.save()
    finally:
        await resumed.close()
    stepped = [
        checkpoints.SteppedBatch(
            batch_id=batch.lease.batch_id,
            members=tuple((item.rollout_id, item.attempt) for item in batch.items),
            skipped=False,
        )
        for batch in batches
    ]
    assert third.chain == checkpoints.fold_chain("", stepped)
    assert third.batch_ids == ("b22",)
    assert sorted(path.name for path in config.checkpoint_dir.iterdir()) == ["1.2", "2.3"]


async def test_every_random_generator_continues_from_the_checkpoint(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = learner_config(tmp_path, tiny_model_dir)
    async with opened(config) as learner:
        random.seed(5)
        np.random.seed(6)
        torch.manual_seed(7)
        np.random.standard_normal()
        saved = await learner.save()
        drawn = draw()
    async with opened(config, saved, epoch=2):
        assert draw() == drawn


def draw() -> tuple[float, float, float]:
    """The next value of each generator of this process."""
    return random.random(), float(np.random.standard_normal()), float(torch.rand(()))


async def test_a_process_can_have_only_one_learner(tmp_path: Path, tiny_model_dir: Path) -> None:
    second = MegatronLearner(learner_config(tmp_path, tiny_model_dir))
    async with opened(learner_config(tmp_path, tiny_model_dir)) as first:
        with pytest.raises(LearnerAlreadyOpen):
            await second.open(None, epoch=1)
        with pytest.raises(LearnerAlreadyOpen):
            await first.open(None, epoch=1)
        with pytest.raises(LearnerNotOpen):
            await second.snapshot()
        await second.close()
        assert (await first.snapshot()).version == PolicyVersion(1, 0)
    assert (await second.open(None, epoch=1)).step == 0
    await second.close()


async def test_a_failed_open_lets_the_process_open_another_learner(
    tmp_path: Path, write_model: Callable[..., Path]
) -> None:
    model_dir = write_model(tmp_path / "model")
    config = learner_config(tmp_path, model_dir)
    keys = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(keys | {"intermediate_size": 128}))
    learner = MegatronLearner(config)
    with pytest.raises(ModelInvalid, match="mlp"):
        await learner.open(None, epoch=1)
    (model_dir / "config.json").write_text(json.dumps(keys))
    await learner.open(None, epoch=1)
    checkpoint = await learner.save()
    await learner.close()
    with pytest.raises(CheckpointUnreadable, match="epoch"):
        await learner.open(checkpoint, epoch=1)
    with pytest.raises(CheckpointUnreadable, match="contains version"):
        await learner.open(replace(checkpoint, version=PolicyVersion(1, 5)), epoch=2)


async def test_an_unusable_row_changes_nothing(tmp_path: Path, tiny_model_dir: Path) -> None:
    batch = make_batch(23, model_dir=tiny_model_dir)
    row = batch.items[0].trajectory.rows[0]
    wrong = replace(row, tokens_T=row.tokens_T + VOCABULARY)
    item = replace(batch.items[0], trajectory=Trajectory(rows=(wrong,), temperature=1.0))
    async with opened(learner_config(tmp_path, tiny_model_dir)) as learner:
        with pytest.raises(RowUnusable, match="b23r0"):
            await learner.step(replace(batch, items=(item, *batch.items[1:])))
        report = await learner.step(batch)
        assert report.version == PolicyVersion(1, 1)
        assert report.metrics["mean_abs_log_ratio"] < 1e-4


async def test_bf16_keeps_fp32_main_weights_across_a_resume(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Engines and Hugging Face get the rounded weights, the next process the exact ones."""
    config = learner_config(tmp_path, tiny_model_dir, dtype="bfloat16", learning_rate=1e-5)
    batches = [make_batch(number, model_dir=tiny_model_dir) for number in range(30, 34)]
    async with opened(config) as learner:
        for batch in batches[:2]:
            report = await learner.step(batch)
        assert report.metrics["mean_abs_log_ratio"] < 0.1
        checkpoint = await learner.save()
        for batch in batches[2:]:
            await learner.step(batch)
        straight = load_file((await learner.snapshot()).shards[0].path)
    saved = weights_of(checkpoint)
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert json.loads((Path(checkpoint.path) / "config.json").read_text())["dtype"] == "bfloat16"
    async with opened(config, checkpoint, epoch=2) as learner:
        for batch in batches[2:]:
            await learner.step(batch)
        assert equal(load_file((await learner.snapshot()).shards[0].path), straight)
    wide = learner_config(tmp_path / "wide", tiny_model_dir)
    async with opened(wide, checkpoint, epoch=2) as learner:
        main = load_file((await learner.snapshot()).shards[0].path)
    assert all(torch.equal(main[name].bfloat16(), saved[name]) for name in saved)
    # Updates of this size are lost where the weights themselves are bf16.
    start = load_file(tiny_model_dir / "model.safetensors")
    name = "model.embed_tokens.weight"
    assert not torch.equal(main[name], main[name].bfloat16().float())
    assert 0 < float((main[name] - start[name]).abs().max()) < 1e-4


async def test_recompute_and_threads_change_a_step_only_by_rounding(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(35, model_dir=tiny_model_dir)
    norms, threads, set_threads = [], [], torch.set_num_threads
    # The number of threads is that of the calling thread.
    monkeypatch.setattr(torch, "set_num_threads", lambda count: (threads.append(count), set_threads(count)))
    for number, changes in enumerate(({}, {"recompute": True}, {"threads": 2})):
        async with opened(learner_config(tmp_path / str(number), tiny_model_dir, **changes)) as learner:
            norms.append((await learner.step(batch)).metrics["grad_norm"])
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=1e-5)
    assert threads == [1, 1, 2]


@pytest.mark.parametrize("family", [{}, QWEN2])
async def test_norms_and_biases_do_not_decay(
    tmp_path: Path, write_model: Callable[..., Path], family: dict[str, object]
) -> None:
    """Without a gradient, decay is all that changes."""
    model_dir = write_model(tmp_path / "model", **family)
    still = make_batch(36, model_dir=model_dir, advantages=(0.0, 0.0))
    async with opened(learner_config(tmp_path, model_dir, weight_decay=0.5)) as learner:
        await learner.step(still)
        after = load_file((await learner.snapshot()).shards[0].path)
    for name, start in load_file(model_dir / "model.safetensors").items():
        factor = 1 - 5e-4 * 0.5 if start.ndim > 1 else 1.0
        torch.testing.assert_close(after[name], start * factor, rtol=1e-7, atol=0)


async def test_a_row_with_a_prompt_of_37_000_tokens_ends_a_step(
    tmp_path: Path, write_model: Callable[..., Path]
) -> None:
    """The length of Codex's first prompt. A T x T matrix of it has 5.5 GB in fp32, for each layer and head."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}
    model_dir = write_model(
        tmp_path / "model", **sizes, hidden_size=16, intermediate_size=32, max_position_embeddings=65_536
    )
    prompt, sampled = 37_000, 200
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, size=prompt + sampled).astype(np.int32)
    trained = np.arange(len(tokens)) >= prompt
    row = Row(
        tokens_T=tokens,
        loss_mask_T=trained,
        logprobs_T=np.where(trained, -5.0, 0.0).astype(np.float32),
        versions=(VersionSpan(start=prompt, end=len(tokens), version=PolicyVersion(1, 0)),),
    )
    short = make_batch(37, model_dir=model_dir)
    item = replace(short.items[0], trajectory=Trajectory(rows=(row,), temperature=1.0))
    config = learner_config(tmp_path, model_dir, token_budget=40_000, recompute=True)
    async with opened(config) as learner:
        report = await learner.step(replace(short, items=(item, *short.items[1:])))
    assert (report.skipped, report.version) == (False, PolicyVersion(1, 1))
    assert report.metrics["tokens"] > sampled


async def test_a_model_in_several_files_is_trained_and_saved_in_one(
    tmp_path: Path, write_model: Callable[..., Path]
) -> None:
    model_dir = write_model(tmp_path / "model", files=3, **QWEN2)
    batch = make_batch(38, model_dir=model_dir)
    config = learner_config(tmp_path, model_dir)
    async with opened(config) as learner:
        report = await learner.step(batch)
        checkpoint = await learner.save()
        trained = load_file((await learner.snapshot()).shards[0].path)
    assert report.metrics["mean_abs_log_ratio"] < 1e-4
    assert [path.name for path in weight_files(Path(checkpoint.path))] == ["model.safetensors"]
    assert equal(weights_of(checkpoint), trained)
    # transformers reads it, and disagrees with the weights before the step.
    rows = [item.trajectory.rows[0].tokens_T for item in batch.items]
    for before, after in zip(
        reference_logprobs(model_dir, rows), reference_logprobs(Path(checkpoint.path), rows), strict=True
    ):
        assert 1e-4 < float(np.abs(before - after).max()) < 5
    async with opened(config, checkpoint, epoch=2) as learner:
        assert equal(load_file((await learner.snapshot()).shards[0].path), trained)


async def test_the_kl_is_to_the_start_model_after_a_resume_too(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = learner_config(tmp_path, tiny_model_dir, kl_coef=1.0, kl_kind="k2")
    batch = make_batch(1, model_dir=tiny_model_dir)
    async with opened(config) as learner:
        measured = [(await learner.step(renamed(batch, number))).metrics["kl"] for number in range(4)]
        checkpoint = await learner.save()
    assert measured[0] < 1e-9
    assert measured[3] > 1e-3
    flat = replace(batch, items=tuple(replace(item, advantage=0.0) for item in batch.items))
    async with opened(config, checkpoint, epoch=2) as learner:
        reports = [await learner.step(renamed(flat, number)) for number in range(4, 9)]
    pulled = [report.metrics["kl"] for report in reports]
    assert pulled[0] > 1e-3, "relative to the checkpoint it would be 0"
    assert pulled[-1] < 0.5 * pulled[0], "rows without advantage are trained on the KL"
    assert all(report.metrics["computed_tokens"] == report.metrics["tokens"] for report in reports)


async def test_the_entropy_term_raises_the_entropy(tmp_path: Path, tiny_model_dir: Path) -> None:
    batch = make_batch(1, model_dir=tiny_model_dir, advantages=(0.0, 0.0))
    async with opened(learner_config(tmp_path, tiny_model_dir, entropy_coef=1.0)) as learner:
        reports = [await learner.step(renamed(batch, number)) for number in range(4)]
    entropies = [report.metrics["entropy"] for report in reports]
    assert entropies == sorted(entropies)
    assert entropies[-1] > 1.05 * entropies[0]


def observed(batch: Batch, *, step: int = 0, marked: bool = True) -> Batch:
    """The batch with observations of three tokens within its rows, at a version."""
    items = []
    for item in batch.items:
        [row] = item.trajectory.rows
        kinds = np.where(row.loss_mask_T, TokenKind.SAMPLED, TokenKind.PROMPT).astype(np.uint8)
        kinds[PROMPT + 1 : PROMPT + 4] = TokenKind.OBSERVATION
        changed = replace(
            row, loss_mask_T=row.loss_mask_T & (kinds == TokenKind.SAMPLED), kinds_T=kinds if marked else None
        )
        items.append(replace(item, trajectory=replace(item.trajectory, rows=(changed,))))
    return replace(batch, items=tuple(items), version=PolicyVersion(1, step))


async def test_a_coefficient_of_0_trains_bit_for_bit_as_without_observations(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Without a coefficient and without kinds; with kinds; and with a coefficient that has decayed to 0."""
    decayed = {"observation_coef": 0.1, "observation_schedule": "linear_decay", "observation_decay_steps": 4}
    plain = make_batch(20, model_dir=tiny_model_dir, advantages=(1.0, -1.0, 0.0, 2.0))
    found = []
    for number, (keys, marked) in enumerate((({}, False), ({"observation_coef": 0.0}, True), (decayed, True))):
        batch = observed(plain, step=4, marked=marked)
        async with opened(learner_config(tmp_path / str(number), tiny_model_dir, **keys)) as learner:
            reports = [await learner.step(renamed(batch, step)) for step in range(2)]
            weights = load_file((await learner.snapshot()).shards[0].path)
        timed = ("seconds", "learning_rate")
        found.append(([{k: v for k, v in report.metrics.items() if k not in timed} for report in reports], weights))
    (metrics, weights), *others = found
    for their_metrics, their_weights in others:
        assert their_metrics == metrics
        assert all(torch.equal(their_weights[name], weights[name]) for name in weights)


async def test_observations_are_learned_beside_the_policy(tmp_path: Path, tiny_model_dir: Path) -> None:
    batch = observed(make_batch(21, model_dir=tiny_model_dir, advantages=(1.0, -1.0, 0.0, 0.0)))
    rows = [item.trajectory.rows[0].tokens_T for item in batch.items]
    expected = -np.mean([values[PROMPT + 1 : PROMPT + 4].mean() for values in reference_logprobs(tiny_model_dir, rows)])
    firsts, losses = [], []
    for budget in (LENGTH, 10_000):
        config = learner_config(tmp_path / str(budget), tiny_model_dir, token_budget=budget, observation_coef=0.5)
        async with opened(config) as learner:
            steps = [(await learner.step(renamed(batch, number))).metrics for number in range(4)]
        firsts.append(steps[0])
        losses.append([step["observation_loss"] for step in steps])
    assert firsts[0]["observation_cross_entropy"] == pytest.approx(expected, abs=1e-4)
    assert firsts[0]["observation_loss"] == pytest.approx(expected * 3 / 3.001, abs=1e-4)
    assert (firsts[0]["observation_tokens"], firsts[0]["unmarked_rows"]) == (12.0, 0.0)
    assert firsts[0]["loss"] == pytest.approx(0.5 * firsts[0]["observation_loss"], abs=1e-3)
    for name in ("loss", "grad_norm", "observation_loss"):
        assert firsts[0][name] == pytest.approx(firsts[1][name], rel=1e-4)
    assert all(series == sorted(series, reverse=True) for series in losses)


async def test_rows_without_observations_are_a_regular_step(tmp_path: Path, tiny_model_dir: Path) -> None:
    batch = make_batch(22, model_dir=tiny_model_dir)
    found = []
    for coefficient in (0.0, 0.5):
        config = learner_config(tmp_path / str(coefficient), tiny_model_dir, observation_coef=coefficient)
        async with opened(config) as learner:
            metrics = (await learner.step(batch)).metrics
            found.append((metrics, load_file((await learner.snapshot()).shards[0].path)))
    (plain, weights), (metrics, their_weights) = found
    assert (metrics["observation_loss"], metrics["unmarked_rows"]) == (0.0, 4.0)
    assert metrics["grad_norm"] == plain["grad_norm"]
    assert all(torch.equal(their_weights[name], weights[name]) for name in weights)
