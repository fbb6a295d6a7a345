"""Trains the tiny policy's starting point by supervised learning on noisy demonstrations from the training split.

Invariants:
- On one machine and torch version, the result depends only on the config (including the seed): one thread, no clock.
- There are two phases. The practice phase uses mostly good demonstrations, until the model can copy what it has read.
  The second phase uses deliberately poor ones: most look in the wrong place, guess, or show another task's command.
  Looking in the right place first is left to reinforcement learning.
- Most wrong demonstrations are as long as the right ones. A trajectory's gradient is the mean over its tokens, so that
  short failures and long successes would together suppress their common tokens until the model could no longer solve
  one kind of task.
- Held-out combinations are never shown.

This is a development tool that needs transformers. Its result is stored in scripts/models/tiny.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import random
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from headrace.buffer.tasks.datasets.terminal import NAMES, WORDS, Kind, Problem, Split, combinations, guesses
from headrace.policies.miniatures.demonstrations import Demonstration, DemonstrationMessage, taken_in_turns
from headrace.policies.miniatures.fitting import FitConfig, cross_entropy, learning_rate_at
from headrace.policies.models.tiny import PAD, model_config, write_description
from headrace.policies.tokens.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
DIGEST_FILE = "DIGEST"


class WarmStartConfig(FitConfig):
    """Settings of the training; `seed` is also that of the demonstrations."""

    steps: int = Field(default=700, ge=1)
    """Number of updates, with those of the practice; the others are on poor demonstrations."""
    practice_steps: int = Field(default=500, ge=0)
    """Number of updates on good demonstrations. Copying is learned within 300; without it, the success rate on one kind
    of task may stay at 0."""
    practice_look_share: float = Field(default=0.9, ge=0, le=1)
    """Share of practice demonstrations that look first and act on the result; the others guess."""
    look_share: float = Field(default=0.28, ge=0, le=1)
    """Share of poor demonstrations that look in the right place; this is roughly the success rate of the starting
    policy."""
    lost_share: float = Field(default=0.10, ge=0, le=1)
    """Share of poor demonstrations that look for what does not exist, and guess after the error. Without them the
    starting policy says nothing after an error, and training may spread that silence over a kind of task."""
    stray_share: float = Field(default=0.42, ge=0, le=1)
    """Share of poor demonstrations that look in the wrong place and act on the result."""
    other_share: float = Field(default=0.10, ge=0, le=1)
    """Share of poor demonstrations that show another task's command. The remaining ones guess at once."""
    wrong_share: float = Field(default=0.04, ge=0, le=1)
    """Share of the demonstrations looking in the right place that then act on something else."""
    max_observation_bytes: int = Field(default=48, ge=1)
    """Maximum size of a command's output, as in ShellAgentConfig."""


class NoisyDemonstrator:
    """Generator of noisy demonstrations that cycles through the kinds of tasks."""

    def __init__(self, config: WarmStartConfig, tokenizer: ChatTokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._chance = random.Random(config.seed)
        self._pools = [[problem for problem in combinations(kind) if problem.split is Split.TRAIN] for kind in Kind]

    def batch(self, count: int, *, step: int) -> list[Demonstration]:
        draw = self._good if step < self._config.practice_steps else self._poor
        return [draw(self._pools[index % len(self._pools)]) for index in range(count)]

    def _good(self, pool: Sequence[Problem]) -> Demonstration:
        problem = self._chance.choice(pool)
        if self._chance.random() < self._config.practice_look_share:
            return self.spell(problem, problem.look, problem.shown, problem.act(problem.finding))
        return self.spell(problem, self._guess(problem))

    def _poor(self, pool: Sequence[Problem]) -> Demonstration:
        problem, luck = self._chance.choice(pool), self._chance.random()
        config = self._config
        lost, other, stray, look = accumulate(
            (config.lost_share, config.other_share, config.stray_share, config.look_share)
        )
        if luck < lost:
            return self.spell(problem, *self._lost(problem), self._guess(problem))
        if luck < other:
            return self.spell(problem, self._guess(self._chance.choice(pool)))
        if luck < stray:
            command, shown, finding = problem.stray
            return self.spell(problem, command, shown, problem.act(finding))
        if luck >= look:
            return self.spell(problem, self._guess(problem))
        wrong = self._chance.random() < self._config.wrong_share
        act = self._guess(problem) if wrong else problem.act(problem.finding)
        return self.spell(problem, problem.look, problem.shown, act)

    def _lost(self, problem: Problem) -> tuple[str, str]:
        """Return a command that looks for what does not exist, and what it prints."""
        files = problem.files()
        name = self._chance.choice([name for name in NAMES if name not in files])
        word = self._chance.choice([word for word in WORDS if f"{word}\n" not in files.values()])
        match problem.kind:
            case Kind.MOVE:
                return f"tail -n 1 {name}", f"tail: cannot open '{name}' for reading: No such file or directory"
            case Kind.RENAME:
                return f"grep -l {word} *", ""
            case _:
                return f"cat {name}", f"cat: {name}: No such file or directory"

    def _guess(self, problem: Problem) -> str:
        return problem.act(self._chance.choice(guesses(problem)))

    def spell(self, problem: Problem, *turns: str) -> Demonstration:
        """Return the conversation for one command, or for a command, its output and a second command."""
        bound = self._config.max_observation_bytes
        said = [
            text if position % 2 == 0 else text.encode()[:bound].decode(errors="replace").rstrip("\n")
            for position, text in enumerate(turns)
        ]
        return taken_in_turns(self._tokenizer, [DemonstrationMessage(role="user", content=problem.instruction)], *said)


def train(config: WarmStartConfig, tokenizer: ChatTokenizer) -> Any:
    """Train and return a Qwen3ForCausalLM in float32. Needs transformers."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(config.seed)
    keys = {
        name: value for name, value in model_config().items() if name not in {"architectures", "model_type", "dtype"}
    }
    model = Qwen3ForCausalLM(Qwen3Config(**keys)).float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    demonstrator = NoisyDemonstrator(config, tokenizer)
    pad_id = tokenizer.encode(PAD)[0]
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(config, step)
        batch = demonstrator.batch(config.batch_size, step=step)
        logits_BTV = model(_padded(batch, pad_id)[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits_BTV, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            logger.info("step %d of %d: loss %.3f", step + 1, config.steps, loss.item())
    return model


def _padded(batch: Sequence[Demonstration], pad_id: int) -> Tensor:
    """Return the tokens of a batch, padded to the longest."""
    import torch

    tokens_BT = torch.full((len(batch), max(len(shown.tokens) for shown in batch)), pad_id)
    for row, shown in enumerate(batch):
        tokens_BT[row, : len(shown.tokens)] = torch.tensor(shown.tokens)
    return tokens_BT


def save(model: Any, folder: Path) -> str:
    """Write model.safetensors in bfloat16 and the digest file, and return the hexadecimal SHA-256 of the weights."""
    import torch
    from safetensors.torch import save_file

    tied = model.config.tie_word_embeddings
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in sorted(model.state_dict().items())
        if not (tied and name == "lm_head.weight")
    }
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / DIGEST_FILE).write_text(f"{digest}  {path.name}\n", encoding="utf-8")
    return digest


def warm_start(config: WarmStartConfig, folder: Path) -> str:
    """Write a model directory, and return the digest of its weights."""
    write_description(folder)
    return save(train(config, ChatTokenizer(folder)), folder)


def main() -> None:
    """Train the starting point of the tiny policy."""
    parser = argparse.ArgumentParser(description="Train the tiny policy's starting point (about 90 s on one core).")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    digest = warm_start(WarmStartConfig(seed=arguments.seed), arguments.out)
    logger.info("wrote %s: model.safetensors has SHA-256 %s", arguments.out, digest)


if __name__ == "__main__":
    main()
