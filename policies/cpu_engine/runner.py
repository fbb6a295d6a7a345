"""Runs forward passes and sampling for the rows of a scheduler, in the torch thread.

Invariants:
- Reported log-probabilities are those of the temperature-scaled softmax over the whole vocabulary, regardless of top_k
  and top_p (at temperature 0, those of the raw softmax). Of a request with a grammar, it is the softmax over the tokens
  that the grammar allows.
- A long prompt is prefilled in portions, one per step, so that the thread can answer between them. Meanwhile nothing
  else is admitted or decoded, as during any prefill. A retracted prefill starts over.
- `version` is the label of `model.weights`; both change together between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.policies.cpu_engine.requests import SamplingParams
from headrace.policies.cpu_engine.scheduler import Generation, Scheduler
from headrace.policies.models.qwen import KeyValueCache, Qwen, QwenWeights
from headrace.policies.models.qwen_config import QwenConfig

if TYPE_CHECKING:
    from torch import Tensor

PREFILL_PORTION: Final = 512
"""Tokens of a long prompt that are prefilled in one step."""


@dataclass(slots=True, kw_only=True)
class LongPrefill:
    """Long prompt whose first `done` tokens are cached. A retraction frees its row."""

    generation: Generation
    retractions: int
    done: int = 0


class Runner:
    """Weights, cache and random generators of one engine."""

    def __init__(
        self,
        config: QwenConfig,
        weights: QwenWeights,
        *,
        version: str,
        max_running: int,
        context_tokens: int,
        seed: int,
    ) -> None:
        self.version = version
        self.model = Qwen(config, weights, capacity=context_tokens)
        self.cache = KeyValueCache(config, rows=max_running, capacity=context_tokens)
        self._random = torch.Generator().manual_seed(seed)
        # By generation and not by row, so that a request's random stream survives a retraction.
        self._own_random: dict[int, torch.Generator] = {}
        self._long: LongPrefill | None = None

    def swap(self, weights: QwenWeights, version: str | None) -> QwenWeights:
        """Use `weights` from now on, and return the previous ones. If `version` is None, the label is kept."""
        old, self.model.weights = self.model.weights, weights
        self.version = self.version if version is None else version
        return old

    def relabel(self, version: str) -> None:
        self.version = version

    def step(self, scheduler: Scheduler) -> list[Generation]:
        """Run a portion of a long prefill, prefill all admitted prompts, or decode one token for each running
        generation. Returns the finished generations."""
        for move in scheduler.moves:
            self.cache.move(move.source, move.target, move.length)
        scheduler.moves.clear()
        long = self._long
        # A long prefill that was finished or retracted has lost its row.
        if long and (long.generation not in scheduler.running or long.generation.retractions != long.retractions):
            self._long = None
        admitted = scheduler.admit() if self._long is None else []
        now_s = time.monotonic()
        for generation in admitted:
            # A retracted generation keeps its first times.
            generation.forward_s = now_s if generation.forward_s is None else generation.forward_s
        if len(admitted) == 1 and admitted[0].token_count > PREFILL_PORTION:
            self._long = LongPrefill(generation=admitted[0], retractions=admitted[0].retractions)
        if self._long is not None:
            return self._prefill_portion(scheduler, self._long)
        if admitted:
            first = len(scheduler.running) - len(admitted)
            logits = self.model.prefill([item.tokens() for item in admitted], first, self.cache)
            return self._record(scheduler, range(first, len(scheduler.running)), logits)
        running = scheduler.running
        tokens = torch.tensor([item.output_ids[-1] for item in running])
        logits = self.model.decode(tokens, [item.token_count - 1 for item in running], self.cache)
        return self._record(scheduler, range(len(running)), logits)

    def _prefill_portion(self, scheduler: Scheduler, long: LongPrefill) -> list[Generation]:
        # Its row may have changed: rows of finished generations are filled with others.
        row, tokens = scheduler.running.index(long.generation), long.generation.tokens()
        portion = tokens[long.done : long.done + PREFILL_PORTION]
        logits = self.model.extend(portion, long.done, row, self.cache)
        long.done += len(portion)
        if long.done < len(tokens):
            return []
        self._long = None
        return self._record(scheduler, range(row, row + 1), logits)

    def _record(self, scheduler: Scheduler, rows: range, logits_BV: Tensor) -> list[Generation]:
        generations = [scheduler.running[row] for row in rows]
        noise = self._noise(generations, logits_BV.shape[1])
        masks = {row: item.grammar.allowed_V for row, item in enumerate(generations) if item.grammar is not None}
        ids, logprobs = sample(logits_BV, [item.prompt.sampling for item in generations], noise, masks)
        finished = scheduler.record(rows, ids, logprobs, self.version)
        for generation, token in zip(generations, ids, strict=True):
            if generation.grammar is not None and generation.finish is None:
                generation.grammar.advance(token)
                generation.refusal = generation.grammar.error
        finished += scheduler.drop([item for item in generations if item.refusal])
        now_s = time.monotonic()
        for generation in generations:
            if generation.first_token_s is None:
                generation.first_token_s = now_s
        self.forget(finished)
        return finished

    def forget(self, finished: Sequence[Generation]) -> None:
        """Drop the random streams of these generations."""
        for generation in finished:
            self._own_random.pop(id(generation), None)

    def _noise(self, generations: Sequence[Generation], width: int) -> Tensor:
        """Return exponential noise `(B, V)`, with ones where the request is greedy."""
        noise = torch.empty(len(generations), width).exponential_(generator=self._random)
        for row, generation in enumerate(generations):
            sampling = generation.prompt.sampling
            if sampling.greedy:
                noise[row] = 1
            elif sampling.sampling_seed is not None:
                own = self._own_random.get(id(generation))
                if own is None:
                    own = self._own_random[id(generation)] = torch.Generator().manual_seed(sampling.sampling_seed)
                noise[row].exponential_(generator=own)
        return noise.clamp_min_(1e-30)


@torch.inference_mode()
def sample(
    logits_BV: Tensor,
    samplings: Sequence[SamplingParams],
    noise_BV: Tensor,
    masks: Mapping[int, NDArray[np.bool_]] = MappingProxyType({}),
) -> tuple[list[int], list[float]]:
    """Return sampled ids and their log-probabilities; `masks` has the allowed tokens of rows with a grammar.
    `argmax(p / exponential noise)` is a draw from p (the exponential race)."""
    if masks:
        allowed_BV = torch.ones_like(logits_BV, dtype=torch.bool)
        for row, allowed_V in masks.items():
            allowed_BV[row] = torch.from_numpy(allowed_V)
        logits_BV = logits_BV.masked_fill(~allowed_BV, -torch.inf)
    temperatures = [1.0 if item.temperature < 1e-6 else item.temperature for item in samplings]
    if any(value != 1.0 for value in temperatures):
        logits_BV = logits_BV / torch.tensor(temperatures)[:, None]
    logprobs_BV = logits_BV.log_softmax(-1)
    weights_BV = logprobs_BV.exp()
    if any(item.top_p < 1.0 or item.top_k > 1 for item in samplings):
        weights_BV = truncate(weights_BV, samplings)
    chosen = weights_BV.div_(noise_BV).argmax(-1)
    return chosen.tolist(), logprobs_BV.gather(1, chosen[:, None])[:, 0].tolist()


def truncate(weights_BV: Tensor, samplings: Sequence[SamplingParams]) -> Tensor:
    """Set the weights outside top_k and top_p to zero; the most likely id is always kept."""
    ordered, order = weights_BV.sort(dim=-1, descending=True)
    vocabulary = ordered.shape[1]
    top_p = torch.tensor([item.top_p for item in samplings])[:, None]
    top_k = torch.tensor([min(item.top_k, vocabulary) if item.top_k > 0 else vocabulary for item in samplings])[:, None]
    before = ordered.cumsum(-1) - ordered
    ordered[(before > top_p) | (torch.arange(vocabulary) >= top_k)] = 0
    return torch.zeros_like(weights_BV).scatter_(1, order, ordered)
