"""A run whose learner is slime on two logical GPUs of a local Ray: real ledger, LearnerLoop, training processes.

Rollouts are sampled with the embedded engine's model and offered to the ledger; no agent or sandbox takes part.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.actors.engines.config import EnginesConfig
from headrace.actors.engines.group import EngineGroup
from headrace.actors.errors import ActorError
from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.runtime.actors.runtime import RayRuntime
from headrace.actors.runtime.pools.gateway import GatewayActor
from headrace.actors.runtime.simulated.engines import SimulatedEngineGroup
from headrace.actors.training.learner import LearnerLoopConfig
from headrace.actors.training.replay import Replay
from headrace.actors.training.slime_learner import SlimeLearner
from headrace.actors.training.slime_loop import SlimeLoop
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.trajectories.types import (
    Batch,
    BatchId,
    BatchItem,
    BatchLease,
    Cause,
    GroupId,
    Outcome,
    RolloutId,
    RolloutOrder,
    RolloutResult,
    Row,
    Trajectory,
    VersionSpan,
)
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learner import WeightsDirectory, WeightsSnapshot
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.learners.simulated import SimulatedEnginesConfig
from headrace.policies.learners.slime.arguments import SlimeTerms
from headrace.policies.processes.engine_keys import EngineKeyFiles
from headrace.policies.push.contract import PushConfig
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.tracing.telemetry import TelemetryConfig
from support.rank_rig import rank_processes
from support.replay_cases import tasks
from support.tiny_model import write_tiny_model

if TYPE_CHECKING:
    import psutil
    from torch import Tensor

    from headrace.policies.models.qwen import Qwen

    StartEngines = Callable[[RayRuntime, RunDirectory, Path], Awaitable["KeepingEngines | EngineGroup"]]

TINY = Path(__file__).resolve().parents[2] / "scripts" / "models" / "tiny"
RANKS = 2
LABEL = "trainers"
"""Value of cluster.roles.learner."""
PROMPT = 6
LONGEST = 40
TEMPERATURE = 1.0
CPU_ARGUMENTS = (
    # Transformer Engine's layers and fused kernels need a GPU.
    *(
        "--transformer-impl",
        "local",
        "--spec",
        "support.slime_cpu_layers",
        "get_spec",
        "--attention-backend",
        "unfused",
    ),
    *("--no-persist-layer-norm", "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"),
    *("--no-bias-swiglu-fusion", "--no-rope-fusion", "--no-bias-dropout-fusion", "--use-cpu-initialization"),
    # The default tracker of random states needs CUDA; the default tokenizer is not used by a learner.
    *("--inference-rng-tracker", "--tokenizer-type", "NullTokenizer"),
)


def ranks() -> list[psutil.Process]:
    """Training processes of this test run's Ray."""
    return rank_processes("SlimeRank")


def checkouts() -> tuple[Path, Path] | None:
    """Return the checkouts of slime and Megatron-LM that the environment names, or None."""
    places = [os.environ.get(name, "") for name in ("SLIME_DIR", "MEGATRON_DIR")]
    return (Path(places[0]), Path(places[1])) if all(places) else None


def model_arguments(model: Path) -> tuple[str, ...]:
    """Return the flags of a dense Qwen3, as slime's scripts/models have them."""
    keys = json.loads((model / "config.json").read_text(encoding="utf-8"))
    sizes = {
        "--num-layers": keys["num_hidden_layers"],
        "--hidden-size": keys["hidden_size"],
        "--ffn-hidden-size": keys["intermediate_size"],
        "--num-attention-heads": keys["num_attention_heads"],
        "--num-query-groups": keys["num_key_value_heads"],
        "--kv-channels": keys["head_dim"],
        "--vocab-size": keys["vocab_size"],
        "--rotary-base": int(keys["rope_theta"]),
        "--norm-epsilon": keys["rms_norm_eps"],
        "--make-vocab-size-divisible-by": 1,
    }
    return (
        *(word for name, value in sizes.items() for word in (name, str(value))),
        *("--group-query-attention", "--normalization", "RMSNorm", "--qk-layernorm", "--swiglu"),
        *("--disable-bias-linear", "--position-embedding-type", "rope"),
        *(() if keys["tie_word_embeddings"] else ("--untie-embeddings-and-output-weights",)),
    )


SHAPES: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"tensor_parallel": 2, "arguments": ("--sequence-parallel",)},
    "pipeline": {"pipeline_parallel": 2},
}
"""Parallel sizes of two ranks."""


def shape_section(model: Path, name: str) -> dict[str, Any]:
    """Return the keys of [learner.slime] for a shape."""
    more = SHAPES[name].get("arguments", ())
    return {**SHAPES[name], "arguments": (*model_arguments(model), *CPU_ARGUMENTS, *more)}


def terms(
    folder: Path,
    model: Path,
    *,
    batch_size: int = 8,
    steps: int = 5,
    node_label: str = LABEL,
    transport: str = "disk",
    **changes: Any,
) -> SlimeTerms:
    """Return the terms of a learner on two logical GPUs; `changes` are keys of [learner]."""
    slime_dir, megatron_dir = checkouts() or (None, None)
    section = {
        "slime_dir": slime_dir,
        "megatron_dir": megatron_dir,
        "gpus_per_node": RANKS,
        "timeout_minutes": 2,
        "arguments": (*model_arguments(model), *CPU_ARGUMENTS),
        # One thread for each of the ranks, and gloo on loopback only.
        "environment": {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    }
    learner = {
        "kind": "slime",
        "correction": "none",
        "model_dir": model,
        "checkpoint_dir": folder / "checkpoints",
        "snapshot_dir": folder / "weights",
        "learning_rate": 1e-3,
        "token_budget": 256,
        "slime": section | changes.pop("slime", {}),
        **changes,
    }
    return SlimeTerms(
        learner=LearnerConfig.model_validate(learner),
        batch_size=batch_size,
        temperature=TEMPERATURE,
        steps=steps,
        transport=transport,
        node_label=node_label,
    )


def sample(model: Qwen, chance: random.Random, version: PolicyVersion) -> Row:
    """Sample one row from a model, with the log-probabilities that the embedded engine would report."""
    import torch

    tokens = [chance.randrange(97, 123) for _ in range(PROMPT)]
    logprobs = [0.0] * PROMPT
    for _ in range(chance.randint(4, LONGEST - PROMPT)):
        logits_V = torch.log_softmax(model.logits([tokens])[0, -1].float(), -1)
        [token] = chance.choices(range(len(logits_V)), weights=logits_V.exp().tolist())
        tokens.append(token)
        logprobs.append(float(logits_V[token]))
    mask = np.arange(len(tokens)) >= PROMPT
    # An observation in the middle, which was not sampled.
    if len(tokens) > PROMPT + 6:
        mask[PROMPT + 2 : PROMPT + 4] = False
    bounds = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]]))).reshape(-1, 2)
    return Row(
        tokens_T=np.array(tokens, np.int32),
        loss_mask_T=mask,
        logprobs_T=np.where(mask, logprobs, 0).astype(np.float32),
        versions=tuple(VersionSpan(start=int(start), end=int(end), version=version) for start, end in bounds),
    )


def read_model(folder: Path) -> Qwen:
    """Return the embedded engine's model with the weights of a directory."""
    from headrace.policies.models.qwen import Qwen, read_weights
    from headrace.policies.models.qwen_config import QwenConfig

    config = QwenConfig.read(folder / "config.json")
    return Qwen(config, read_weights(config, folder), capacity=2 * LONGEST)


class KeepingEngines(SimulatedEngineGroup):
    """Simulated engines that copy each directory pushed to them, and check its digests."""

    def __init__(self, *args: Any, kept: Path, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept = kept

    async def push(self, snapshot: WeightsSnapshot, *, rollouts_in_flight: int) -> None:
        assert snapshot.directory is not None
        assert WeightsDirectory.of(snapshot.directory.path).digests == snapshot.directory.digests
        await asyncio.to_thread(shutil.copytree, snapshot.directory.path, self._kept / str(snapshot.version))
        await super().push(snapshot, rollouts_in_flight=rollouts_in_flight)


async def keeping_engines(runtime: RayRuntime, directory: RunDirectory, model: Path) -> KeepingEngines:
    """Start engines that keep what is pushed in the folder `pushed` beside the run directory."""
    return await runtime.spawn(
        KeepingEngines,
        SimulatedEnginesConfig(push_s=0.0),
        kept=directory.path.with_name("pushed"),
        directory=directory,
        name="engines",
    )


async def embedded_engine(runtime: RayRuntime, directory: RunDirectory, model: Path) -> EngineGroup:
    """Start a gateway and a group of one embedded engine, which reads each snapshot's directory itself."""
    return await engine_group(runtime, directory, model, EnginesConfig(count=1, max_context_tokens=256))


async def engine_group(
    runtime: RayRuntime, directory: RunDirectory, model: Path, engines: EnginesConfig, **push: Any
) -> EngineGroup:
    """Start a gateway and a group of engines, to which the learner's actor may send weights."""
    gateway = await runtime.spawn(
        GatewayActor,
        # No agent takes part, and a random model has no tokenizer.
        GatewayConfig(tokenizer_dir=TINY, engine_keys=EngineKeyFiles(own=directory.engine_key)),
        address_file=directory.path / "gateway.json",
        observing=observing(directory),
        name="gateway",
    )
    return await runtime.spawn(
        EngineGroup,
        engines.model_copy(update={"health_timeout_s": 30.0}),
        PushConfig.model_validate(
            {
                "transport": "disk",
                "phase_timeout_s": 60.0,
                "read_timeout_s": 60.0,
                "local_checkpoint_dir": directory.path / "copies",
                **push,
            }
        ),
        gateways=[gateway],
        metrics=observing(directory).metrics(),
        model_dir=model,
        seed=1,
        observing=observing(directory),
        runtime=runtime,
        learner=runtime.named("learner"),
        snapshots=(directory.weights, directory.checkpoints),
        name="engines",
    )


def write_bf16_model(folder: Path, **changes: Any) -> Path:
    """Write the random tiny Qwen3 (with `changes` of its keys) in bf16, in which slime trains, so that loading it
    rounds nothing."""
    import torch
    from safetensors.torch import load_file, save_file

    write_tiny_model(folder, dtype="bfloat16", **changes)
    path = folder / "model.safetensors"
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a model directory, by name, from all of its files."""
    from safetensors.torch import load_file

    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def make_batch(model: Qwen, number: int, *, temperature: float = TEMPERATURE) -> Batch:
    """Return a batch of sampled rollouts, every third with two rows."""
    version = PolicyVersion(1, 0)
    items = []
    for index in range(8):
        chance = random.Random(f"batch {number} {index}")
        rows = tuple(sample(model, chance, version) for _ in range(2 if index % 3 == 2 else 1))
        item = BatchItem(
            rollout_id=RolloutId(f"b{number}r{index}"),
            group_id=GroupId(f"b{number}g{index // 4}"),
            attempt=1,
            reward=float(index % 2),
            advantage=chance.uniform(-1, 1),
            staleness=0,
            trajectory=Trajectory(rows=rows, temperature=temperature),
        )
        items.append(item)
    return Batch(lease=BatchLease(batch_id=BatchId(f"b{number}"), epoch=1), version=version, items=tuple(items))


@asynccontextmanager
async def open_learner(terms: SlimeTerms) -> AsyncIterator[SlimeLearner]:
    """The learner alone, as an actor. It is not open yet; it is closed at the end."""
    runtime = RayRuntime(f"{uuid.uuid4().hex[:6]}-")
    learner = await runtime.spawn(SlimeLearner, terms, name="learner")
    try:
        yield learner
        await learner.close()
    finally:
        await runtime.stop(learner)


@dataclass
class SlimeRun:
    """A run directory with its actors."""

    directory: RunDirectory
    runtime: RayRuntime
    replay: Replay
    engines: KeepingEngines | EngineGroup
    terms: SlimeTerms
    config: LearnerLoopConfig
    model: Qwen
    reward: Callable[[Row], float]
    spoiled: int = 0
    """Number of rollouts, from the first, whose behaviour log-probabilities make the gradient infinite."""
    offered: int = 0

    async def learner(self) -> SlimeLoop:
        """Start the learner's actor."""
        return await self.runtime.spawn(
            SlimeLoop,
            self.config,
            self.terms,
            replay=self.replay,
            engines=self.engines,
            observing=observing(self.directory),
            name="learner",
        )

    @asynccontextmanager
    async def producing(self) -> AsyncIterator[None]:
        """Sample and offer rollouts during the block."""
        task = asyncio.ensure_future(self._produce())
        try:
            yield
            if task.done():
                task.result()
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _produce(self) -> None:
        while True:
            with suppress(ActorError):
                await self.replay.reconcile([], "tests")
                while True:
                    issued = await self.replay.issue(8, "tests", timeout_s=2.0)
                    results = await asyncio.to_thread(
                        lambda orders: [self._result(order) for order in orders], issued.orders
                    )
                    await self.replay.offer(results)

    def _results(self, orders: Sequence[RolloutOrder]) -> list[RolloutResult]:
        return [self._result(order) for order in orders]

    def _result(self, order: RolloutOrder) -> RolloutResult:
        chance = random.Random(f"{order.rollout_id} {order.attempt}")
        version = PolicyVersion(1, 0)
        rows = tuple(sample(self.model, chance, version) for _ in range(chance.choice((1, 1, 2))))
        self.offered += 1
        if self.offered <= self.spoiled:
            rows = tuple(replace(row, logprobs_T=np.where(row.loss_mask_T, -1e4, 0).astype(np.float32)) for row in rows)
        reward = self.reward(rows[0])
        outcome = Outcome(
            reward=reward, trainable=True, solved=reward >= 1, cause=Cause.SOLVED if reward >= 1 else Cause.FAILED
        )
        return RolloutResult(
            rollout_id=order.rollout_id,
            attempt=order.attempt,
            outcome=outcome,
            trajectory=Trajectory(rows=rows, temperature=TEMPERATURE),
        )


def observing(directory: RunDirectory) -> ActorTelemetry:
    return ActorTelemetry(config=TelemetryConfig(enabled=False), run_dir=directory.path)


def even_tokens(row: Row) -> float:
    """Reward that a policy can learn: the share of even tokens among the sampled ones."""
    return float(np.mean(row.tokens_T[row.loss_mask_T] % 2 == 0))


@asynccontextmanager
async def open_run(
    folder: Path,
    model: Path,
    *,
    steps: int = 5,
    save_every: int = 2,
    start_engines: StartEngines | None = None,
    **changes: Any,
) -> AsyncIterator[SlimeRun]:
    """Lay out a run directory, and start its buffer and its engines: `KeepingEngines` by default."""
    directory = RunDirectory(path=folder / "run")
    if not directory.path.exists():
        directory.write_beginning(tasks(16), uuid.uuid4().hex)
    runtime = RayRuntime(f"{folder.name}-{uuid.uuid4().hex[:6]}-")
    buffer = BufferConfig(batch_size=8, group_size=4, max_staleness=200, batch_tries=100)
    metrics = observing(directory).metrics()
    replay = await runtime.spawn(Replay, buffer, directory=directory, seed=3, metrics=metrics, name="replay")
    engines = await (start_engines or keeping_engines)(runtime, directory, model)
    run = SlimeRun(
        directory=directory,
        runtime=runtime,
        replay=replay,
        engines=engines,
        terms=terms(directory.path, model, steps=steps, **changes),
        config=LearnerLoopConfig(steps=steps, save_every=save_every),
        model=read_model(model),
        reward=even_tokens,
    )
    try:
        yield run
    finally:
        await runtime.stop(engines)
        await runtime.stop(replay)
