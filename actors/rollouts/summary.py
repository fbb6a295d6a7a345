"""`summary.json`: what an evaluation came to, from its answers alone. Pure but for `write_summary`.

Invariants:
- The denominator is fixed before it starts: tasks x samples. Answers without a reward are in `n` and in `n_infra`, and
  in no mean.
- `success`, pass@k and pass^k count solved answers, `mean_reward` is about rewards: a reward above 0 solves nothing.
- pass@k and pass^k are the unbiased estimators over the scored answers of a task (Chen et al. 2021, arXiv:2107.03374,
  and Yao et al. 2024, arXiv:2406.12045); a task with fewer than k of them is left out of that k and counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from math import comb
from typing import TYPE_CHECKING, Any, Final

import orjson

from headrace.actors.rollouts.answers import json_bytes
from headrace.buffer.primitives.durable_files import replace_file
from headrace.buffer.versions import PolicyVersion

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from headrace.actors.rollouts.answers import Answer

MAX_REASONS: Final = 3
MAX_REASON_CHARS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What was evaluated: the model directory or checkpoint, the digest of the resolved recipe, and how it was
    sampled."""

    model: str
    recipe_sha256: str
    sampling: Mapping[str, float | int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRate:
    """Over the `tasks` that have at least k scored answers: `any_solved` is pass@k, `all_solved` is pass^k."""

    k: int
    any_solved: float
    all_solved: float
    tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSummary:
    """`success` is the share of solved answers and `mean_reward` the mean, both over the answers that were scored and
    None when none was; `infra` answers are in neither. `versions` counts sampled tokens by policy version, `mixed` the
    answers that more than one version sampled. `infra_reasons` counts infra answers by what failed, commonest first,
    at most MAX_REASONS of them."""

    tag: str
    answers: int
    infra: int
    success: float | None
    mean_reward: float | None = None
    tasks: int = 0
    samples: int = 1
    dataset_sha256: str = ""
    causes: dict[str, int]
    versions: dict[str, int]
    mixed: int
    pass_rates: tuple[PassRate, ...] = ()
    infra_reasons: dict[str, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """For a person."""
        scored = self.answers - self.infra
        success = "-" if self.success is None else f"{self.success:.1%}"
        reward = "-" if self.mean_reward is None else f"{self.mean_reward:.3f}"
        rates = [
            f"pass@{rate.k} {rate.any_solved:.1%}, pass^{rate.k} {rate.all_solved:.1%}   ({rate.tasks} tasks)"
            for rate in self.pass_rates
        ]
        versions = ", ".join(self.versions) or "none"
        return [
            f"success {success}, mean reward {reward}   ({scored} of {self.answers} scored, {self.infra} infra)",
            *(f"infra: {reason} ({count} answers)" for reason, count in self.infra_reasons.items()),
            *rates,
            f"sampled by {versions}; {self.mixed} answers by more than one version",
        ]

    def to_json(self, about: About | None) -> dict[str, Any]:
        """The document of `summary.json`."""
        return {
            "tag": self.tag,
            "dataset_sha256": self.dataset_sha256,
            "tasks": self.tasks,
            "samples": self.samples,
            "n": self.answers,
            "n_infra": self.infra,
            "infra_reasons": self.infra_reasons,
            "success": self.success,
            "mean_reward": self.mean_reward,
            "pass_at_k": {str(rate.k): rate.any_solved for rate in self.pass_rates},
            "pass_hat_k": {str(rate.k): rate.all_solved for rate in self.pass_rates},
            "tasks_at_k": {str(rate.k): rate.tasks for rate in self.pass_rates},
            "causes": self.causes,
            "versions": self.versions,
            "n_mixed_versions": self.mixed,
            **(asdict(about) if about else {}),
        }


def summarize_answers(
    answers: Sequence[Answer], *, tag: str, tasks: int, samples: int, dataset_sha256: str
) -> EvaluationSummary:
    """`answers` holds one for each task and sample."""
    rewards = [answer.reward for answer in answers if answer.reward is not None]
    solved = sum(answer.solved for answer in answers if answer.reward is not None)
    return EvaluationSummary(
        tag=tag,
        answers=len(answers),
        infra=len(answers) - len(rewards),
        success=solved / len(rewards) if rewards else None,
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        tasks=tasks,
        samples=samples,
        dataset_sha256=dataset_sha256,
        causes=dict(sorted(Counter(answer.cause.value for answer in answers).items())),
        versions=_tokens_by_version(answers),
        mixed=sum(len(answer.versions) > 1 for answer in answers),
        pass_rates=pass_rates(answers, samples) if samples > 1 else (),
        infra_reasons=_infra_reasons(answers),
    )


def _infra_reasons(answers: Iterable[Answer]) -> dict[str, int]:
    details = (" ".join(answer.detail.split()) or answer.cause.value for answer in answers if answer.reward is None)
    return dict(Counter(detail[:MAX_REASON_CHARS] for detail in details).most_common(MAX_REASONS))


def pass_rates(answers: Iterable[Answer], samples: int) -> tuple[PassRate, ...]:
    """For k = 1, 2, 4, ... and all samples; none for a k that no task has enough scored answers for."""
    by_task: dict[str, list[bool]] = defaultdict(list)
    for answer in answers:
        if answer.reward is not None:
            by_task[answer.task_id].append(answer.solved)
    counts = [(len(solved), sum(solved)) for solved in by_task.values()]
    ks = sorted({1 << power for power in range(samples.bit_length()) if 1 << power <= samples} | {samples})
    return tuple(_pass_rate(k, enough) for k in ks if (enough := [count for count in counts if count[0] >= k]))


def _pass_rate(k: int, counts: Sequence[tuple[int, int]]) -> PassRate:
    """From (scored answers, solved ones) by task."""
    return PassRate(
        k=k,
        any_solved=sum(1 - comb(scored - solved, k) / comb(scored, k) for scored, solved in counts) / len(counts),
        all_solved=sum(comb(solved, k) / comb(scored, k) for scored, solved in counts) / len(counts),
        tasks=len(counts),
    )


def _tokens_by_version(answers: Iterable[Answer]) -> dict[str, int]:
    tokens: Counter[str] = Counter()
    for answer in answers:
        tokens.update(dict(answer.versions))
    return {version: tokens[version] for version in sorted(tokens, key=PolicyVersion.parse)}


def write_summary(path: Path, summary: EvaluationSummary, about: About | None) -> None:
    """Durable, and complete or not there. Raises OSError."""
    replace_file(path, json_bytes(summary.to_json(about), option=orjson.OPT_INDENT_2) + b"\n")
