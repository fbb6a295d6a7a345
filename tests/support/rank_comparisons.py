"""Steps of the Megatron trainer with one rank and with several: `python -m support.rank_comparisons FOLDER`.

The ranks are processes forked from this one, which has imported torch and Megatron but started no thread, so that a
group opens in less than a second. Everything else is the learner's own. Prints one JSON object.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from safetensors.torch import load_file

from headrace.buffer.trajectories.token_kinds import TokenKind
from headrace.buffer.trajectories.types import Batch, BatchId, BatchLease, CheckpointRef, Row, StepReport
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.learners.megatron_trainer import MegatronTrainer, open_trainer
from headrace.policies.learners.megatron_world import World
from headrace.policies.learners.ranks.contract import RankStep
from headrace.policies.learners.ranks.rank import MegatronRank
from headrace.policies.push.process_group import host_store, join_store
from support.objective_cases import make_batch, make_row
from support.tiny_model import write_tiny_model

if TYPE_CHECKING:
    from torch import Tensor

TIMEOUT_S: Final = 60.0
COMPARED: Final[dict[str, tuple[int, int, dict[str, Any]]]] = {
    "grpo": (2, 20, {"dual_clip": 1.6}),
    "gspo": (2, 4, {"objective": "gspo", "kl_coef": 0.1, "loss_weight": "token"}),
    "cispo": (3, 4, {"objective": "cispo", "correction": "icepop", "entropy_coef": 0.1}),
    "observations": (
        2,
        4,
        {"observation_coef": 0.2, "observation_schedule": "step_decay", "observation_decay_steps": 2},
    ),
}
"""Number of ranks to compare with one, number of steps, and settings."""
VOCABULARY: Final = 258


class ForkedRanks:
    """Ranks in forked processes, driven over pipes; see `Ranks`."""

    def __init__(self, config: LearnerConfig, resume: CheckpointRef | None) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(config.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, config, resume, rank), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        port = self._answer(0)
        for pipe in self._pipes:
            pipe.send(port)

    def step(self, batch: Batch, learning_rate: float) -> list[RankStep]:
        return self.call("step", batch, learning_rate)

    def export(self, path: Path, version: PolicyVersion) -> None:
        self._pipes[0].send(("export", (path, version)))
        self._answer(0)

    def check_agreement(self) -> None:
        assert len(set(self.call("digest"))) == 1

    def save_state(self, directory: Path) -> None:
        self.call("save_state", directory)

    def interrupt(self) -> None:
        """Do nothing: the scenarios do not close in a call."""

    def close(self) -> None:
        self.call("close")
        for process in self._processes:
            process.join(TIMEOUT_S)
            assert process.exitcode == 0

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of every rank, and return the results by rank."""
        for pipe in self._pipes:
            pipe.send((method, arguments))
        return [self._answer(rank) for rank in range(len(self._pipes))]

    def fail_to_step(self, batch: Batch) -> tuple[str, float]:
        """Let rank 0 step alone; return its error and how long that took."""
        began_s = time.monotonic()
        self._pipes[0].send(("step", (batch, 1e-3)))
        try:
            self._answer(0)
        except RuntimeError as error:
            return str(error), time.monotonic() - began_s
        raise AssertionError("rank 0 stepped without rank 1")

    def stop(self, rank: int) -> None:
        """Make a rank hang."""
        process_id = self._processes[rank].pid
        assert process_id is not None
        os.kill(process_id, signal.SIGSTOP)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(TIMEOUT_S)

    def _answer(self, rank: int) -> Any:
        assert self._pipes[rank].poll(TIMEOUT_S), f"rank {rank} does not answer"
        answer = self._pipes[rank].recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(pipe: Connection, config: LearnerConfig, resume: CheckpointRef | None, number: int) -> None:
    """Body of a rank's process. After an error it ends, and the other side of its pipe raises EOFError."""
    if number == 0:
        store = host_store("127.0.0.1", config.ranks, TIMEOUT_S)
        pipe.send(store.port)
        pipe.recv()
    else:
        store = join_store("127.0.0.1", pipe.recv(), config.ranks, TIMEOUT_S)
    rank = MegatronRank(
        config, resume, World(rank=number, size=config.ranks, store=store, timeout_s=config.rank_timeout_s)
    )
    method = ""
    while method != "close":
        method, arguments = pipe.recv()
        try:
            pipe.send(getattr(rank, method)(*arguments))
        except RuntimeError as error:
            pipe.send(error)


@contextmanager
def opened(config: LearnerConfig, resume: CheckpointRef | None = None, epoch: int = 1) -> Iterator[MegatronTrainer]:
    """A trainer with `config.ranks` forked ranks."""
    trainer = open_trainer(config, resume, epoch, start=ForkedRanks)
    try:
        yield trainer
    finally:
        trainer.close()


def batch_of(number: int, *, trajectories: int = 6) -> Batch:
    """A batch of random rows of very different lengths; every third trajectory has two rows, one has no advantage."""
    chance = random.Random(number)
    advantages = [chance.uniform(-1, 1) if index != 1 else 0.0 for index in range(trajectories)]
    items = [
        (advantage, [_row(chance) for _ in range(2 if index % 3 == 2 else 1)])
        for index, advantage in enumerate(advantages)
    ]
    return renamed(make_batch(items), number)


def _row(chance: random.Random) -> Row:
    length = chance.choice((8, 12, 20, 60))
    mask = [index >= 4 and chance.random() < 0.8 for index in range(length - 1)]
    logprobs = [-chance.uniform(1, 6) for _ in range(length)]
    kinds = [
        TokenKind.SAMPLED if trained else TokenKind.OBSERVATION if index >= 4 else TokenKind.PROMPT
        for index, trained in enumerate([*mask, True])
    ]
    return make_row([chance.randrange(VOCABULARY) for _ in range(length)], [*mask, True], logprobs, kinds)


def renamed(batch: Batch, number: int) -> Batch:
    return replace(batch, lease=BatchLease(batch_id=BatchId(f"b{number}"), epoch=1))


def config_of(folder: Path, model_dir: Path, *, double: bool = False, **changes: Any) -> LearnerConfig:
    """Return settings under which a batch has several micro-batches. `double` trains in float64, which recipes cannot
    choose."""
    keys = {
        "model_dir": model_dir,
        "checkpoint_dir": folder / "checkpoints",
        "snapshot_dir": folder / "weights",
        "token_budget": 64,
        "weight_decay": 0.1,
        # Not a bound for some steps, and a bound for others.
        "clip_grad_norm": 3.0,
    }
    config = LearnerConfig.model_validate(keys | changes)
    return config.model_copy(update={"dtype": "float64"}) if double else config


def metrics_of(report: StepReport) -> dict[str, float]:
    """What a step computed, without its duration."""
    drift = report.drift
    found = {name: value for name, value in report.metrics.items() if name not in ("seconds", "padding_share")}
    return found if drift is None else found | {"drift": drift.by_staleness[0].mean_abs_log_ratio}


def compare_steps(folder: Path, model_dir: Path) -> dict[str, Any]:
    """The metrics of each step in float64 by one rank and by several, and the final weights' largest difference."""
    found: dict[str, Any] = {}
    start = load_file(model_dir / "model.safetensors")
    for name, (several, steps, keys) in COMPARED.items():
        metrics, weights = [], []
        for ranks in (1, several):
            config = config_of(folder / f"{name}-{ranks}", model_dir, double=True, ranks=ranks, **keys)
            with opened(config) as trainer:
                metrics.append([metrics_of(trainer.step(batch_of(number))) for number in range(steps)])
                weights.append(load_file(trainer.snapshot().files[0].path))
        found[name] = {
            "metrics": metrics,
            "apart": distance(*weights),
            "moved": distance(weights[0], start),
            "dtypes": sorted({str(tensor.dtype) for tensor in weights[1].values()}),
        }
    return found


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in left)


def compare_first_steps(folder: Path, model_dir: Path) -> list[dict[str, float]]:
    """The metrics of one step in fp32, by one rank and by two."""
    found = []
    for ranks in (1, 2):
        with opened(config_of(folder / f"fp32-{ranks}", model_dir, ranks=ranks)) as trainer:
            found.append(metrics_of(trainer.step(batch_of(0))))
    return found


def train_odd_batches(folder: Path, model_dir: Path) -> dict[str, Any]:
    """Two ranks train one row, which leaves a rank without any, no row at all, and a gradient that is not finite on one
    rank only."""
    with opened(config_of(folder / "odd", model_dir, ranks=2)) as trainer:
        [first, *others] = batch_of(1).items
        row = first.trajectory.rows[0]
        # A ratio below the clip has a gradient with a positive advantage only.
        one = renamed(replace(batch_of(1), items=(replace(first, advantage=1.0),)), 1)
        none = renamed(replace(batch_of(1), items=tuple(replace(item, advantage=0.0) for item in others)), 2)
        spoiled = replace(row, logprobs_T=np.where(row.loss_mask_T, np.float32(np.nan), np.float32(0)))
        bad = replace(first, trajectory=replace(first.trajectory, rows=(spoiled,)))
        reports = [trainer.step(batch) for batch in (one, none, renamed(replace(batch_of(1), items=(bad, *others)), 3))]
        # Refused unless the ranks agree.
        trainer.save()
    return {
        "skipped": [report.skipped for report in reports],
        "norms": [report.metrics.get("grad_norm") for report in reports],
        "computed": [report.metrics["computed_tokens"] for report in reports],
        "version": str(reports[-1].version),
    }


def resume_with(folder: Path, model_dir: Path) -> dict[str, Any]:
    """Train two steps, save, and train two more: without a break, and resumed with each number of ranks."""
    found: dict[str, Any] = {}
    for before in (1, 2):
        config = config_of(folder / f"resume-{before}", model_dir, ranks=before)
        with opened(config) as trainer:
            step_on(trainer, (0, 1))
            checkpoint = trainer.save()
            step_on(trainer, (2, 3))
            straight = load_file(trainer.snapshot().files[0].path)
        for after in (1, 2):
            elsewhere = config.model_copy(
                update={
                    "ranks": after,
                    "snapshot_dir": folder / f"resumed-{before}-{after}",
                    "model_dir": folder / "gone",
                }
            )
            with opened(elsewhere, checkpoint, epoch=2) as trainer:
                step_on(trainer, (2, 3))
                found[f"{before} to {after}"] = distance(straight, load_file(trainer.snapshot().files[0].path))
    return found


def step_on(trainer: MegatronTrainer, numbers: Sequence[int]) -> None:
    for number in numbers:
        trainer.step(batch_of(number))


def wait_for_a_hung_rank(folder: Path, model_dir: Path) -> dict[str, Any]:
    """One of two ranks hangs, and the other waits for it for `rank_timeout_s`."""
    config = config_of(folder / "hung", model_dir, ranks=2, rank_timeout_s=1.5)
    ranks = ForkedRanks(config, None)
    ranks.step(batch_of(0), 1e-3)
    ranks.stop(1)
    error, waited_s = ranks.fail_to_step(batch_of(1))
    ranks.kill()
    return {"error": error, "waited_s": waited_s, "limit_s": config.rank_timeout_s}


def main(folder: Path) -> None:
    model_dir = write_tiny_model(folder / "model")
    scenarios = (compare_steps, compare_first_steps, train_odd_batches, resume_with, wait_for_a_hung_rank)
    sys.stdout.write(json.dumps({scenario.__name__: scenario(folder, model_dir) for scenario in scenarios}) + "\n")


if __name__ == "__main__":
    # Megatron's own call sites rely on the default group that it warns about.
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
