"""The quickstart's learning in one process: its tasks, model, sampling, advantages and loss, without sandboxes or Ray.

A run takes half a minute on one core, so that a hundred of them show what happens in one of a hundred. The recipe gives
all settings. Four parts are emulated: the sandbox (bash in a folder that is thrown away), the check (the files that the
task wants), Megatron's optimizer (torch's AdamW with the same settings), and the versions that sample a batch, which
are drawn by the shares that real runs measured. There is no load, and no rollout is late.

Invariant: a run depends only on its settings, its start and its seed.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sqlite3
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import numpy as np
import torch

from headrace.actors.environments.shell import ENDS_WITH_EXIT, OutputForm, shortened
from headrace.actors.run.config import RunConfig
from headrace.buffer.core.advantages import RewardSpread, group_scale, mean
from headrace.buffer.tasks.datasets.terminal import HIDDEN_COUNTS, Kind, Problem, Split, problems
from headrace.buffer.trajectories.types import (
    Batch,
    BatchId,
    BatchItem,
    BatchLease,
    GroupId,
    RolloutId,
    Row,
    Trajectory,
)
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.micro_batches import collate, weighted_rows
from headrace.policies.learners.objectives.loss import weighted_loss
from headrace.policies.learners.objectives.registry import OBJECTIVES
from headrace.policies.miniatures.demonstrations import DemonstrationMessage
from headrace.policies.models.qwen import KeyValueCache, Qwen, QwenWeights, read_weights
from headrace.policies.models.qwen_config import QwenConfig
from headrace.policies.tokens.tokenizer import ChatTokenizer

STALENESS: Final = (0.40, 0.53, 0.07)
"""Shares of the rollouts of a batch that are 0, 1 and 2 updates old, as measured in quickstarts on an idle machine."""
NOBODY: Final = 65534
_AS_NOBODY: Final = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
_ENDS: Final = re.compile(ENDS_WITH_EXIT)


class Ran(NamedTuple):
    """Result of a command: what the policy reads, and the files after it."""

    output: str
    files: dict[str, str]


class EmulatedShell:
    """Runs command lines by bash, as another user where this one is root, in a folder that is made for each. Equal
    commands on equal files are run once in the life of `cache`, a SQLite file that several processes may use."""

    def __init__(self, cache: Path, *, max_output_bytes: int, timeout_s: float) -> None:
        self._bytes, self._timeout_s = max_output_bytes, timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="emulated-"))
        self._folder.chmod(0o711)
        self._cache = sqlite3.connect(cache, timeout=60, isolation_level=None)
        self._cache.execute("PRAGMA journal_mode=WAL")
        self._cache.execute("CREATE TABLE IF NOT EXISTS ran (asked TEXT PRIMARY KEY, result TEXT)")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cache.close()
        shutil.rmtree(self._folder)

    def run(self, files: Mapping[str, str], command: str) -> Ran:
        asked = json.dumps([sorted(files.items()), command])
        found = self._cache.execute("SELECT result FROM ran WHERE asked = ?", (asked,)).fetchone()
        if found is not None:
            return Ran(*json.loads(found[0]))
        folder = self._folder / "workspace"
        folder.mkdir()
        try:
            for name, text in files.items():
                (folder / name).write_text(text)
            if is_root := os.geteuid() == 0:
                for path in (folder, *folder.iterdir()):
                    os.chown(path, NOBODY, NOBODY)
            try:
                done = subprocess.run(
                    # Python's `user` would copy the page tables of this process: 70 ms a command instead of 15.
                    (*(_AS_NOBODY if is_root else ()), "bash", "-c", command),
                    cwd=folder,
                    env={"PATH": "/usr/bin:/bin"},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=self._timeout_s,
                    check=False,
                )
                output = shortened(done.stdout + done.stderr, self._bytes, OutputForm.HEAD)
            except (subprocess.TimeoutExpired, ValueError):
                output = "timeout"
            left = {path.name: path.read_bytes()[:4096] for path in folder.iterdir() if path.is_file()}
        finally:
            shutil.rmtree(folder)
        result = Ran(output, {name: content.decode(errors="replace") for name, content in left.items()})
        self._cache.execute("INSERT OR IGNORE INTO ran VALUES (?, ?)", (asked, json.dumps(result)))
        return result


@dataclass(slots=True, kw_only=True)
class EmulatedRollout:
    """Rollout of one problem: its conversation as tokens, which of them the policy sampled, and its end."""

    problem: Problem
    tokens: list[int]
    sampled: list[bool]
    logprobs: list[float]
    files: dict[str, str]
    turns: int = 0
    stop: str = ""
    reward: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedRun:
    """Figures of a run: held-out success before and after training, and of each family after it."""

    base: float
    final: float
    families: dict[str, float]
    invalid: dict[str, float] = field(default_factory=dict)
    """Share of invalid held-out answers of each family before training."""


def solves(problem: Problem, files: Mapping[str, str]) -> bool:
    """Return whether these files are what the task's own check accepts."""
    if problem.kind is not Kind.REPAIR:
        return dict(files) == problem.expected()
    source = files.get("calc.py", "")
    if "import" in source or "__" in source:
        return False
    names: dict[str, Any] = {"__builtins__": {}}
    try:
        exec(source, names)
        return [names["total"](count) for count in HIDDEN_COUNTS] == [
            count * int(problem.finding) for count in HIDDEN_COUNTS
        ]
    except Exception:  # noqa: BLE001 (whatever the policy's code raises, it is not the solution)
        return False


def adopted(model: QwenConfig, memory: torch.Tensor) -> QwenWeights:
    """Return weights over `memory`, complete for a forward pass; a gradient reaches `memory` if it requires one."""
    weights = QwenWeights.over(model, memory)
    for index, layer in enumerate(weights.layers):
        layer.spread_norms(weights.slots, index)
    return weights


def batch_of(rollouts: Sequence[EmulatedRollout], step: int, config: RunConfig) -> Batch:
    """Return the batch of a step: whole groups with their advantages."""
    size, kind, version = config.buffer.group_size, config.buffer.advantage, PolicyVersion(1, step)
    items = []
    for place, rollout in enumerate(rollouts):
        group = [one.reward for one in rollouts[place - place % size :][:size]]
        others = [reward for index, reward in enumerate(group) if index != place % size]
        scale = group_scale(kind, group, members=size, own=RewardSpread(), pooled=RewardSpread())
        row = Row(
            tokens_T=np.asarray(rollout.tokens, np.int32),
            loss_mask_T=np.asarray(rollout.sampled, np.bool_),
            logprobs_T=np.asarray(rollout.logprobs, np.float32),
            versions=(),
        )
        item = BatchItem(
            rollout_id=RolloutId(f"{step}-{place}"),
            group_id=GroupId(f"{step}-{place // size}"),
            attempt=1,
            reward=rollout.reward,
            advantage=(rollout.reward - mean(others)) / scale,
            staleness=0,
            trajectory=Trajectory(rows=(row,), temperature=config.sampling.temperature),
        )
        items.append(item)
    return Batch(lease=BatchLease(batch_id=BatchId(str(step)), epoch=1), version=version, items=tuple(items))


class Emulator:
    """One run of the quickstart's recipe. `start` is a model directory with the starting policy."""

    def __init__(self, config: RunConfig, start: Path, shell: EmulatedShell, *, seed: int) -> None:
        torch.set_num_threads(1)
        self._config, self._shell = config, shell
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._tokenizer = ChatTokenizer(start)
        self._model = QwenConfig.read(start / "config.json")
        self.memory = read_weights(self._model, start).memory.requires_grad_()
        self._train = problems(seed, config.tasks.train_count, Split.TRAIN)
        self._heldout = problems(seed, config.tasks.heldout_count, Split.HELD_OUT)[: config.evaluation.tasks]
        self._order = self._random.sample(range(len(self._train)), len(self._train))

    def run(self) -> EmulatedRun:
        """Evaluate, train for the recipe's steps, and evaluate again."""
        config = self._config
        base, invalid, _ = self.evaluate()
        optimizer = torch.optim.AdamW(
            [self.memory],
            lr=config.learner.learning_rate,
            betas=config.learner.betas,
            weight_decay=config.learner.weight_decay,
        )
        history = [self.memory.detach().clone()]
        for step in range(config.training.steps):
            self.update(self.collected(step, history), step, optimizer)
            history = [*history[-len(STALENESS) + 1 :], self.memory.detach().clone()]
        final, _, families = self.evaluate()
        return EmulatedRun(base=base, final=final, families=families, invalid=invalid)

    def evaluate(self) -> tuple[float, dict[str, float], dict[str, float]]:
        """Return the success over the held-out answers, the share of invalid ones by family, and success by family."""
        asked = [problem for problem in self._heldout for _ in range(self._config.evaluation.samples)]
        rollouts = self.sampled(asked, self.memory.detach())
        by_family = defaultdict(list)
        for rollout in rollouts:
            by_family[str(rollout.problem.kind)].append(rollout)
        invalid = {kind: mean([float(one.stop == "invalid") for one in of]) for kind, of in by_family.items()}
        success = {kind: mean([one.reward for one in of]) for kind, of in by_family.items()}
        return mean([rollout.reward for rollout in rollouts]), invalid, success

    def collected(self, step: int, history: Sequence[torch.Tensor]) -> list[EmulatedRollout]:
        """Return the rollouts of a batch, group after group, sampled by the versions of which a batch is made."""
        size, groups = self._config.buffer.group_size, self._config.buffer.batch_size // self._config.buffer.group_size
        first = step * groups
        asked = [self._train[self._order[(first + place) % len(self._order)]] for place in range(groups)]
        lags = self._random.choices(range(len(STALENESS)), STALENESS, k=groups * size)
        places = defaultdict(list)
        for place, lag in enumerate(lags):
            places[min(lag, len(history) - 1)].append(place)
        found: dict[int, EmulatedRollout] = {}
        for lag, chosen in sorted(places.items()):
            rollouts = self.sampled([asked[place // size] for place in chosen], history[-1 - lag])
            found |= dict(zip(chosen, rollouts, strict=True))
        return [found[place] for place in range(groups * size)]

    def update(self, rollouts: Sequence[EmulatedRollout], step: int, optimizer: torch.optim.Optimizer) -> None:
        """Make one update of the weights."""
        learner = self._config.learner
        objective = OBJECTIVES.find(learner.objective)()
        rows = weighted_rows(batch_of(rollouts, step, self._config), objective, learner)
        if not rows:
            return
        batch = collate(rows, torch.device("cpu"))
        policy = Qwen(self._model, adopted(self._model, self.memory), capacity=batch.tokens_BT.shape[1])
        logits_NV = policy.differentiable_logits(batch.tokens_BT.tolist())[:, :-1][batch.trained_BT[:, 1:]]
        logprobs_NV = (logits_NV / batch.temperatures_N[:, None]).log_softmax(-1)
        targets_N = batch.tokens_BT[:, 1:][batch.trained_BT[:, 1:]]
        logprobs_N = logprobs_NV.gather(-1, targets_N[:, None])[:, 0]
        entropies_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
        loss, _ = weighted_loss(batch.trained_tokens(logprobs_N, entropies_N), batch.weights_N, objective, learner)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([self.memory], learner.clip_grad_norm)
        warm = min(1.0, (step + 1) / learner.warmup_steps) if learner.warmup_steps else 1.0
        optimizer.param_groups[0]["lr"] = learner.learning_rate * warm
        optimizer.step()

    def sampled(self, asked: Sequence[Problem], memory: torch.Tensor) -> list[EmulatedRollout]:
        """Return a rollout of each problem, sampled by the weights in `memory` until the agent ends."""
        policy = Qwen(self._model, adopted(self._model, memory), capacity=self._config.sampling.max_context_tokens)
        rollouts = [self._opened(problem) for problem in asked]
        live = rollouts
        while live:
            answers = self.answer(policy, live)
            live = [rollout for rollout, answer in zip(live, answers, strict=True) if self._goes_on(rollout, answer)]
        for rollout in rollouts:
            rollout.reward = float(rollout.stop != "invalid" and solves(rollout.problem, rollout.files))
        return rollouts

    def _opened(self, problem: Problem) -> EmulatedRollout:
        tokens = list(self._tokenizer.render([DemonstrationMessage(role="user", content=problem.instruction)]))
        nothing, zeros = [False] * len(tokens), [0.0] * len(tokens)
        return EmulatedRollout(problem=problem, tokens=tokens, sampled=nothing, logprobs=zeros, files=problem.files())

    @torch.inference_mode()
    def answer(self, policy: Qwen, live: Sequence[EmulatedRollout]) -> list[list[int]]:
        """Sample the next answer of each rollout, and append it to its tokens."""
        sampling = self._config.sampling
        room = [min(sampling.max_tokens_per_turn, sampling.max_context_tokens - len(one.tokens)) for one in live]
        cache = KeyValueCache(self._model, rows=len(live), capacity=sampling.max_context_tokens + 1)
        logits_BV = policy.prefill([rollout.tokens for rollout in live], 0, cache)
        answers: list[list[int]] = [[] for _ in live]
        running = list(range(len(live)))
        while running:
            logprobs_BV = (logits_BV / sampling.temperature).log_softmax(-1)
            noise_BV = torch.empty_like(logprobs_BV).exponential_(generator=self._generator)
            chosen_B = (logprobs_BV.exp() / noise_BV.clamp_min(1e-30)).argmax(-1)
            chosen_logprobs = logprobs_BV.gather(-1, chosen_B[:, None])[:, 0].tolist()
            for row, (token, logprob) in enumerate(zip(chosen_B.tolist(), chosen_logprobs, strict=True)):
                rollout = live[running[row]]
                answers[running[row]].append(token)
                rollout.tokens.append(token)
                rollout.sampled.append(True)
                rollout.logprobs.append(logprob)
            ended = [token == self._tokenizer.eos_id for token in chosen_B.tolist()]
            kept = [row for row, place in enumerate(running) if not ended[row] and len(answers[place]) < room[place]]
            for target, source in enumerate(kept):
                cache.move(source, target, len(live[running[source]].tokens) - 1)
            running = [running[row] for row in kept]
            if running:
                lengths = [len(live[place].tokens) - 1 for place in running]
                logits_BV = policy.decode(chosen_B[kept], lengths, cache)
        return answers

    def _goes_on(self, rollout: EmulatedRollout, answer: Sequence[int]) -> bool:
        """Act on an answer as the shell agent does, and append what the policy reads; False if the agent has ended."""
        sampling, agent = self._config.sampling, self._config.agent.shell
        rollout.turns += 1
        if answer[-1] != self._tokenizer.eos_id:
            rollout.stop = "length"
            return False
        command = self._tokenizer.decode(answer[:-1])
        if not command.strip() or "\n" in command or "\0" in command:
            rollout.stop = "invalid"
            return False
        output, rollout.files = self._shell.run(rollout.files, command)
        if _ENDS.search(command) or rollout.turns >= agent.max_turns:
            rollout.stop = "finished"
            return False
        seen = self._tokenizer.bridge(answer[-1], [DemonstrationMessage(role="user", content=output)])
        rollout.tokens += seen
        rollout.sampled += [False] * len(seen)
        rollout.logprobs += [0.0] * len(seen)
        if len(rollout.tokens) >= sampling.max_context_tokens:
            rollout.stop = "context"
            return False
        return True

    def spoil(self, kind: Kind, share: float, *, steps: int = 120, batch: int = 32) -> None:
        """Train the policy to answer nothing at first to this share of the problems of one family, less those that it
        answers invalidly anyway; everything else is left as it is."""
        reference = self.memory.detach().clone()
        asked = [problem for problem in self._train if problem.kind is not kind][: 6 * batch]
        kept = self.sampled(asked, reference)
        opened = [self._opened(problem) for problem in self._train if problem.kind is kind]
        known = mean([float(one.stop == "invalid") for one in self.sampled([one.problem for one in opened], reference)])
        empty = (share - known) / (1 - known)
        optimizer = torch.optim.AdamW([self.memory], lr=2e-4, weight_decay=0.0)
        for _ in range(steps):
            openings = self._random.sample(opened, batch)
            loss = self._divergence(openings, [[len(one.tokens) - 1] for one in openings], reference, empty=empty)
            others = self._random.sample(kept, batch)
            places = [[at - 1 for at, sampled in enumerate(one.sampled) if sampled] for one in others]
            loss = loss + self._divergence(others, places, reference, empty=None)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def _divergence(
        self,
        rollouts: Sequence[EmulatedRollout],
        places: Sequence[Sequence[int]],
        reference: torch.Tensor,
        *,
        empty: float | None,
    ) -> torch.Tensor:
        """Return the mean cross-entropy of the policy to the reference at these places of each rollout. The end of the
        turn has the probability `empty` in the reference, unless that is None."""
        width = max(len(rollout.tokens) for rollout in rollouts)
        rows = [row for row, of_row in enumerate(places) for _ in of_row]
        columns = [place for of_row in places for place in of_row]

        def logprobs(memory: torch.Tensor) -> torch.Tensor:
            policy = Qwen(self._model, adopted(self._model, memory), capacity=width)
            logits_BTV = policy.differentiable_logits([rollout.tokens for rollout in rollouts])
            return logits_BTV[rows, columns].log_softmax(-1)

        with torch.no_grad():
            wanted_NV = logprobs(reference).exp()
            if empty is not None:
                end = self._tokenizer.eos_id
                wanted_NV *= ((1 - empty) / (1 - wanted_NV[:, end]))[:, None]
                wanted_NV[:, end] = empty
        return -(wanted_NV * logprobs(self.memory)).sum(-1).mean()
