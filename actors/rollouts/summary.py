"""The summary of an evaluation (`summary.json`), computed from its answers. Everything except `write_summary` is pure.

Invariants:
- The denominator is fixed before the start: tasks x samples. Answers without a reward count in `n` and `n_infra`, but
  not in any mean.
- `success`, pass@k and pass^k count solved answers, whereas `mean_reward` averages rewards: a reward above 0 does not
  imply a solution.
- pass@k and pass^k are the unbiased estimators over a task's scored answers (Chen et al. 2021, arXiv:2107.03374, and
  Yao et al. 2024, arXiv:2406.12045); a task with fewer than k scored answers is left out for that k, and the number of
  remaining tasks is reported with the rate.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import comb
from pathlib import Path
from typing import Any, Final

import orjson

from headrace.actors.rollouts.answers import Answer, json_bytes
from headrace.buffer.core.source_names import source_name
from headrace.buffer.primitives.durable_files import replace_file
from headrace.buffer.trajectories.versions import PolicyVersion

MAX_REASONS: Final = 3
MAX_REASON_CHARS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Subject of an evaluation: the model directory or checkpoint, the digest of the resolved recipe, and the
    sampling."""

    model: str
    recipe_sha256: str
    sampling: Mapping[str, float | int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRate:
    """Pass rates over the `tasks` with at least k scored answers: `any_solved` is pass@k, `all_solved` is pass^k."""

    k: int
    any_solved: float
    all_solved: float
    tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSuccess:
    """The part of an evaluation's result that one source of tasks has."""

    answers: int
    infra: int
    success: float | None
    mean_reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSummary:
    """Result of an evaluation. `success` is the share of solved answers and `mean_reward` the mean reward, both over
    scored answers (without `infra`) and None if there are none. `versions` counts sampled tokens by policy version, and
    `mixed` counts the answers sampled by more than one version. `infra_reasons` counts infra answers by failure, most
    common first, for at most MAX_REASONS failures."""

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
    sources: dict[str, SourceSuccess] = field(default_factory=dict)
    """Result of each source of tasks; empty in a run without sources."""

    def lines(self) -> list[str]:
        """Return the summary as text."""
        scored = self.answers - self.infra
        success = _shown(self.success)
        reward = "-" if self.mean_reward is None else f"{self.mean_reward:.3f}"
        rates = [
            f"pass@{rate.k} {rate.any_solved:.1%}, pass^{rate.k} {rate.all_solved:.1%}   ({rate.tasks} tasks)"
            for rate in self.pass_rates
        ]
        versions = ", ".join(self.versions) or "none"
        return [
            f"success {success}, mean reward {reward}   ({scored} of {self.answers} scored, {self.infra} infra)",
            *(f"infra: {reason} ({count} answers)" for reason, count in self.infra_reasons.items()),
            *(f"{name}: success {_shown(own.success)} ({own.answers} answers)" for name, own in self.sources.items()),
            *rates,
            f"sampled by {versions}; {self.mixed} answers by more than one version",
        ]

    def to_json(self, about: About | None) -> dict[str, Any]:
        """Return the document of `summary.json`."""
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
            **({"sources": {name: asdict(own) for name, own in self.sources.items()}} if self.sources else {}),
            **(asdict(about) if about else {}),
        }


def _shown(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _success_of(answers: Sequence[Answer]) -> SourceSuccess:
    rewards = [answer.reward for answer in answers if answer.reward is not None]
    solved = sum(answer.solved for answer in answers if answer.reward is not None)
    return SourceSuccess(
        answers=len(answers),
        infra=len(answers) - len(rewards),
        success=solved / len(rewards) if rewards else None,
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
    )


def summarize_answers(
    answers: Sequence[Answer], *, tag: str, tasks: int, samples: int, dataset_sha256: str, sources: Sequence[str] = ()
) -> EvaluationSummary:
    """Summarize an evaluation. `answers` has one answer for each task and sample; `sources` are the names of the run's
    sources of tasks."""
    whole = _success_of(answers)
    by_source = {name: [answer for answer in answers if source_name(answer.task_id) == name] for name in sources}
    details = (" ".join(answer.detail.split()) or answer.cause.value for answer in answers if answer.reward is None)
    tokens: Counter[str] = Counter()
    for answer in answers:
        tokens.update(dict(answer.versions))
    return EvaluationSummary(
        tag=tag,
        answers=len(answers),
        infra=whole.infra,
        success=whole.success,
        mean_reward=whole.mean_reward,
        tasks=tasks,
        samples=samples,
        dataset_sha256=dataset_sha256,
        causes=dict(sorted(Counter(answer.cause.value for answer in answers).items())),
        versions={version: tokens[version] for version in sorted(tokens, key=PolicyVersion.parse)},
        mixed=sum(len(answer.versions) > 1 for answer in answers),
        pass_rates=pass_rates(answers, samples) if samples > 1 else (),
        infra_reasons=dict(Counter(detail[:MAX_REASON_CHARS] for detail in details).most_common(MAX_REASONS)),
        sources={name: _success_of(own) for name, own in by_source.items()},
    )


def pass_rates(answers: Iterable[Answer], samples: int) -> tuple[PassRate, ...]:
    """Return pass rates for k = 1, 2, 4, ... and `samples`, omitting any k for which no task has enough answers."""
    by_task: dict[str, list[bool]] = defaultdict(list)
    for answer in answers:
        if answer.reward is not None:
            by_task[answer.task_id].append(answer.solved)
    counts = [(len(solved), sum(solved)) for solved in by_task.values()]
    ks = sorted({1 << power for power in range(samples.bit_length()) if 1 << power <= samples} | {samples})
    return tuple(
        PassRate(
            k=k,
            any_solved=sum(1 - comb(scored - solved, k) / comb(scored, k) for scored, solved in enough) / len(enough),
            all_solved=sum(comb(solved, k) / comb(scored, k) for scored, solved in enough) / len(enough),
            tasks=len(enough),
        )
        for k in ks
        if (enough := [count for count in counts if count[0] >= k])
    )


def write_summary(path: Path, summary: EvaluationSummary, about: About | None) -> None:
    """Write `summary.json` durably and atomically. Raises OSError."""
    replace_file(path, json_bytes(summary.to_json(about), option=orjson.OPT_INDENT_2) + b"\n")
