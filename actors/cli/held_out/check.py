"""The rollout of `headrace check`, shown in full so that custom parts can be tried before a run.

Invariants:
- The rollout runs as an evaluation rollout does, with the same parts. It uses the sampling settings of training unless
  `[evaluation.sampling]` is set.
- Control characters in text from the policy or the agent are escaped, so that the text cannot control the terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from headrace.actors.cli.held_out.command import Evaluation, of_start_policy, refuse_taken
from headrace.actors.errors import ConfigError, RunError
from headrace.actors.run.checks import check_parts
from headrace.actors.run.config import load_recipe
from headrace.actors.run.task_sets import load_task_sets
from headrace.buffer.tasks.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRollout:
    """Contents of `metadata.json`, `conversation.jsonl` and `evaluator.log` of one evaluation rollout."""

    task: Task
    metadata: dict[str, Any]
    turns: tuple[dict[str, Any], ...]
    log: str

    @property
    def is_rated(self) -> bool:
        """Whether the rollout says anything about the policy; otherwise a part of the system failed."""
        return self.metadata["reward"] is not None

    def to_json(self) -> dict[str, Any]:
        return {"task": self.task.id, "rollout": self.metadata, "turns": self.turns, "log": self.log}

    def lines(self) -> Iterator[str]:
        """Yield the rollout as lines of text: the task, the turns with their trained parts, the verdict and the phase
        times."""
        yield f"task {self.task.id} ({self.task.family}): {_shown(self.task.instruction)}"
        for number, turn in enumerate(self.turns, start=1):
            if "answer" not in turn:
                yield f"-- {turn}"
                continue
            masked = f"not trained ({turn['masked']})" if turn["masked"] else "trained"
            versions = ", ".join(turn["versions"])
            yield f"-- turn {number}: {turn['sampled_tokens']} tokens of version {versions}, {masked}, {turn['status']}"
            yield _shown(turn["prompt"])
            yield f">> {_shown(turn['answer'])}"
        said = self.log or f"{self.metadata['cause']}: {self.metadata.get('detail', '')}"
        yield f"-- verdict: reward {self.metadata['reward']}, {_shown(said).rstrip(': ')}"
        phases = self.metadata["phases_s"].items()
        yield "-- " + ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in phases)


def prepare_check(recipe: Path, wanted: str, overrides: Sequence[str], out: Path) -> Evaluation:
    """Validate the request without writing anything. `wanted` is the id of a training or held-out task, or the 1-based
    number of a training task. Raises the errors of `prepare_evaluation`."""
    config = load_recipe(recipe, overrides, out / "service")
    if config.engines.is_simulated:
        raise ConfigError("engines.backend simulated has no policy to run; set engines.backend to cpu")
    train, held_out = load_task_sets(config)
    task = next((task for task in (*train, *held_out) if task.id == wanted), None)
    if task is None and wanted.isdecimal() and 1 <= int(wanted) <= len(train):
        task = train[int(wanted) - 1]
    if task is None:
        raise ConfigError(f"--task {wanted}: no task has that id; training tasks are numbered 1 to {len(train)}")
    check_parts(config)
    evaluation = of_start_policy(config, (task,), samples=1, out=out)
    refuse_taken(evaluation)
    return evaluation


def read_check(evaluation: Evaluation) -> CheckedRollout:
    """Read the records of the rollout. Raises RunError if there are none."""
    [task] = evaluation.tasks
    folders = sorted((evaluation.out / "rollouts").glob("[!.]*"))
    if not folders:
        raise RunError(f"the rollout of {task.id} has no records in {evaluation.out / 'rollouts'}")
    folder = folders[0]
    conversation = folder / "conversation.jsonl"
    lines = conversation.read_bytes().splitlines() if conversation.exists() else []
    log = folder / "evaluator.log"
    return CheckedRollout(
        task=task,
        metadata=orjson.loads((folder / "metadata.json").read_bytes()),
        turns=tuple(orjson.loads(line) for line in lines),
        log=log.read_text(errors="replace").strip() if log.exists() else "",
    )


def _shown(text: str) -> str:
    """Escape control characters other than newlines."""
    return "".join(sign if sign.isprintable() or sign == "\n" else repr(sign)[1:-1] for sign in text).rstrip("\n")
