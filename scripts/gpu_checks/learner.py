"""Checks of the Megatron learner on the device."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Final, Literal

import torch
from benches.learner.figures import make_batch, make_items
from pydantic import BaseModel

from gpu_checks.outcome import Bounds, Figure, Outcome
from gpu_checks.place import Device, Place
from headrace.actors.derivation.host import Host
from headrace.actors.derivation.terms import Terms
from headrace.actors.engines.config import EnginesConfig
from headrace.buffer.trajectories.types import Batch, CheckpointRef
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.learners.megatron_trainer import MegatronTrainer, open_trainer
from headrace.policies.learners.ranks.rank import SoleRank
from headrace.policies.models.facts import ModelFacts

Dtype = Literal["float32", "bfloat16"]

AGREEMENT: Final[dict[Dtype, float]] = {"float32": 2e-3, "bfloat16": 5e-2}
"""Largest difference from the CPU in fp32: of a loss in nats, and of a gradient's norm as a share. Kernels sum in other
orders, and AdamW's first steps turn a difference in a small gradient into one as large as the step."""
STATES_BYTES: Final = 18
"""Bytes that the learner holds for a parameter in bf16, as docs/scaling.md has it."""
SLOWEST_LONG_ROW: Final = 0.2
"""Least speed of a row of 32k tokens, as a share of that of one of 8k, in tokens per second. By the count of operations
it is 0.43; attention that stores its scores, or memory that is swapped, would make it far less."""


class DigestedRank(SoleRank):
    """The sole rank, with the digest by which several ranks are compared."""

    def digest(self) -> str:
        """Return the SHA-256 of main weights and moments."""
        return self._rank.digest()


def settings(
    place: Place, name: str, dtype: Dtype, *, device: Device, big: bool = False, token_budget: int = 4096
) -> LearnerConfig:
    """Return the settings of a learner with files of its own. It recomputes layers in bf16, as a recipe's would."""
    model, _ = place.model(big=big)
    return LearnerConfig(
        model_dir=model,
        checkpoint_dir=place.folder / name / "checkpoints",
        snapshot_dir=place.folder / name / "weights",
        learning_rate=1e-4,
        token_budget=token_budget,
        dtype=dtype,
        recompute=dtype == "bfloat16",
        device=device,
    )


@contextmanager
def opened(
    config: LearnerConfig, resume: CheckpointRef | None = None
) -> Iterator[tuple[MegatronTrainer, DigestedRank]]:
    """Open a learner, and close it at the end."""
    ranks: list[DigestedRank] = []

    def start(config: LearnerConfig, resume: CheckpointRef | None) -> DigestedRank:
        ranks.append(DigestedRank(config, resume))
        return ranks[0]

    trainer = open_trainer(config, resume, 2 if resume else 1, start=start)
    try:
        yield trainer, ranks[0]
    finally:
        trainer.close()


def compared_batches(place: Place, names: Sequence[str]) -> list[Batch]:
    """Return batches with the same rows."""
    _, vocabulary = place.model()
    items = make_items(place.compared_lengths, None, vocabulary)
    return [make_batch(items, name) for name in names]


def take_steps(config: LearnerConfig, batches: Sequence[Batch]) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step of a new learner."""
    with opened(config) as (trainer, _):
        reports = [trainer.step(batch) for batch in batches]
    return [(report.metrics["loss"], report.metrics["grad_norm"]) for report in reports]


def check_fp32(place: Place) -> Outcome:
    """Compare the learner on the device, in fp32, with one on the CPU."""
    return compare_with_cpu(place, "float32")


def check_bf16(place: Place) -> Outcome:
    """Compare the learner on the device, in bf16 with recompute, with one on the CPU in fp32."""
    return compare_with_cpu(place, "bfloat16")


def compare_with_cpu(place: Place, dtype: Dtype) -> Outcome:
    """Compare losses and gradient norms of steps from the same weights on the same batch."""
    reference = settings(place, "reference", "float32", device="cpu")
    batches = compared_batches(place, ("first", "second", "third"))
    # In a process of its own, because a learner on the CPU replaces a function of torch.cuda.
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        expected = pool.submit(take_steps, reference, batches).result()
    found = take_steps(settings(place, dtype, dtype, device=place.device), batches)
    pairs = list(zip(found, expected, strict=True))
    measured: dict[str, Figure] = {
        "loss_difference": max(abs(loss - other) for (loss, _), (other, _) in pairs),
        "grad_norm_difference": max(abs(norm / other - 1) for (_, norm), (_, other) in pairs),
        "last_loss": found[-1][0],
        "last_grad_norm": found[-1][1],
    }
    names = ("loss_difference", "grad_norm_difference")
    return Outcome(measured=measured, bounds=dict.fromkeys(names, (None, AGREEMENT[dtype])))


def check_resume(place: Place) -> Outcome:
    """Compare a learner that goes on with two that resume its checkpoint, bit for bit: the weights and moments that
    they load, and those after two more steps.

    The second one tells an incomplete checkpoint from kernels that do not repeat themselves: with such kernels, the two
    that resume also differ from each other."""
    config = settings(place, "resume", "bfloat16", device=place.device)
    # Two after the save, the second of which depends on the moments.
    before, *after = compared_batches(place, ("before", "first after", "second after"))

    def go_on(trainer: MegatronTrainer, rank: DigestedRank) -> str:
        for batch in after:
            trainer.step(batch)
        return rank.digest()

    with opened(config) as (trainer, rank):
        trainer.step(before)
        checkpoint, saved = trainer.save(), rank.digest()
        ends = [go_on(trainer, rank)]
    loaded = []
    for _ in range(2):
        with opened(config, checkpoint) as (trainer, rank):
            loaded.append(rank.digest())
            ends.append(go_on(trainer, rank))
    measured = {
        "loads_that_differ": sum(digest != saved for digest in loaded),
        "continuations_that_differ": sum(digest != ends[0] for digest in ends[1:]),
        "repetitions_that_differ": int(ends[1] != ends[2]),
    }
    return Outcome(measured=measured, bounds=dict.fromkeys(measured, (None, 0)))


def check_rows(place: Place) -> Outcome:
    """Train long rows of the big model in bf16, each a batch of its own, and write a snapshot."""
    measured: dict[str, Figure] = {}
    skipped, rates = 0, []
    with opened(_of_rows(place, "rows")) as (trainer, _):
        for length in place.row_lengths:
            batches = _row_batches(place, length)
            trainer.step(batches[0])
            started_s = time.perf_counter()
            reports = [trainer.step(batch) for batch in batches[1:]]
            if place.device == "cuda":
                torch.cuda.synchronize()  # the last update of the weights is only queued
            seconds = time.perf_counter() - started_s
            skipped += sum(report.skipped for report in reports)
            rates.append(len(reports) * length / seconds)
            measured |= {f"tokens_per_s_{length}": rates[-1], f"loss_{length}": reports[-1].metrics["loss"]}
        started_s = time.perf_counter()
        trainer.snapshot()
        measured["snapshot_s"] = time.perf_counter() - started_s
    measured |= {"skipped_steps": skipped, "long_row_rate_share": rates[-1] / rates[0]}
    bounds: dict[str, Bounds] = {"skipped_steps": (None, 0)}
    if place.device == "cpu":
        return Outcome(measured=measured, bounds=bounds, not_run="bounds of speed: a CPU's says nothing of a device's")
    return Outcome(measured=measured, bounds=bounds | {"long_row_rate_share": (SLOWEST_LONG_ROW, None)})


def check_memory(place: Place) -> Outcome:
    """Compare the memory of long rows with the estimate by which recipes are laid out and refused: a GPU that has just
    this memory may not be promised a longer row than the one that was trained."""
    config = _of_rows(place, "memory")
    parameters = ModelFacts.read(config.model_dir).parameters
    measured: dict[str, Figure] = {}
    bounds: dict[str, Bounds] = {}
    with opened(config) as (trainer, _):
        for length in place.row_lengths:
            batches = _row_batches(place, length)
            trainer.step(batches[0])
            torch.cuda.reset_peak_memory_stats()
            trainer.step(batches[1])
            peak_bytes = torch.cuda.max_memory_allocated()
            measured |= {
                f"peak_bytes_{length}": peak_bytes,
                f"reserved_bytes_{length}": torch.cuda.max_memory_reserved(),
                f"promised_tokens_{length}": promised_tokens(config, peak_bytes),
            }
            bounds[f"promised_tokens_{length}"] = (None, length)
        measured["bytes_per_parameter"] = torch.cuda.memory_allocated() / parameters
        bounds["bytes_per_parameter"] = (None, STATES_BYTES * 1.03)
    return Outcome(measured=measured, bounds=bounds)


class Recipe(BaseModel):
    """The sections of a recipe on which the learner's memory depends."""

    learner: LearnerConfig
    engines: EnginesConfig


def promised_tokens(config: LearnerConfig, gpu_bytes: int) -> int:
    """Return how many tokens a recipe's micro-batch gets on a GPU with this memory; negative where the model's states
    alone are too large."""
    keys = {"kind", "dtype", "recompute", "objective", "kl_coef"}
    document = {
        "learner": config.model_dump(include=keys) | {"device": "cuda"},
        "engines": {"gpu_memory_bytes": gpu_bytes},
    }
    # The host's own memory does not count for a learner on a GPU.
    terms = Terms(document, Recipe, ModelFacts.read(config.model_dir), Host(memory_bytes=0, cores=1))
    tokens, _ = terms.micro_batch()
    return math.floor(tokens)


def _of_rows(place: Place, name: str) -> LearnerConfig:
    return settings(place, name, "bfloat16", device=place.device, big=True, token_budget=place.row_lengths[-1])


def _row_batches(place: Place, length: int) -> list[Batch]:
    """Return a batch to warm up with and two to measure, of one row each."""
    _, vocabulary = place.model(big=True)
    items = make_items((length,), None, vocabulary)
    return [make_batch(items, f"row-{length}-{number}") for number in range(3)]
