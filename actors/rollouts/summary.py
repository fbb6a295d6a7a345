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

from headrace.actors.record.files.metrics import EvaluationSummary, PassRate, SourceSuccess
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


def summary_lines(summary: EvaluationSummary) -> list[str]:
    """Return a summary as text."""
    scored = summary.answers - summary.infra
    reward = "-" if summary.mean_reward is None else f"{summary.mean_reward:.3f}"
    rates = [
        f"pass@{rate.k} {rate.any_solved:.1%}, pass^{rate.k} {rate.all_solved:.1%}   ({rate.tasks} tasks)"
        for rate in summary.pass_rates
    ]
    versions = ", ".join(summary.versions) or "none"
    counts = f"{scored} of {summary.answers} scored, {summary.infra} infra"
    return [
        f"success {_shown(summary.success)}, mean reward {reward}   ({counts})",
        *(f"infra: {reason} ({count} answers)" for reason, count in summary.infra_reasons.items()),
        *(f"{name}: success {_shown(own.success)} ({own.answers} answers)" for name, own in summary.sources.items()),
        *rates,
        f"sampled by {versions}; {summary.mixed} answers by more than one version",
    ]


def summary_document(summary: EvaluationSummary, about: About | None) -> dict[str, Any]:
    """Return the document of `summary.json`."""
    return {
        "tag": summary.tag,
        "dataset_sha256": summary.dataset_sha256,
        "tasks": summary.tasks,
        "samples": summary.samples,
        "n": summary.answers,
        "n_infra": summary.infra,
        "infra_reasons": summary.infra_reasons,
        "success": summary.success,
        "mean_reward": summary.mean_reward,
        "pass_at_k": {str(rate.k): rate.any_solved for rate in summary.pass_rates},
        "pass_hat_k": {str(rate.k): rate.all_solved for rate in summary.pass_rates},
        "tasks_at_k": {str(rate.k): rate.tasks for rate in summary.pass_rates},
        "causes": summary.causes,
        "versions": summary.versions,
        "n_mixed_versions": summary.mixed,
        **({"sources": {name: asdict(own) for name, own in summary.sources.items()}} if summary.sources else {}),
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
    replace_file(path, json_bytes(summary_document(summary, about), option=orjson.OPT_INDENT_2) + b"\n")
