"""Lists of the cheats of `scripts/bench cheats`: their number, and the open ones named in the docs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from benches.cheating.cheat_bench import all_pairs
from benches.cheating.cheats import KNOWN_OPEN
from benches.cheating.repositories import REPOSITORIES

from headrace.actors.errors import ConfigError
from headrace.actors.run.launch import refuse_short_evaluations
from headrace.buffer.tasks.task import EvaluatorKind, EvaluatorSpec
from headrace.buffer.tasks.verifiers import VerifierForm, VerifierSpec


def test_the_cheat_bench_has_at_least_100_distinct_pairs() -> None:
    pairs = all_pairs()
    assert len(pairs) >= 100
    assert len({repository.name for repository, _ in pairs}) >= 12
    assert len({(cheat.name, repository.name) for repository, cheat in pairs}) == len(pairs)


def test_docs_list_every_known_open_cheat() -> None:
    text = (Path(__file__).parents[2] / "docs/attacks.md").read_text()
    [section] = re.findall(r"^## Known to be open$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    _, *rows = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|", section, re.MULTILINE)
    assert rows == [(each.name, each.why) for each in KNOWN_OPEN]


def test_an_evaluation_deadline_too_short_for_twins_is_refused() -> None:
    task = REPOSITORIES[0].task()
    refuse_short_evaluations([task], 4 * task.evaluator.timeout_s)
    with pytest.raises(ConfigError, match=r"set rollout\.evaluate_timeout_s to 480"):
        refuse_short_evaluations([task], 90.0)
    refuse_short_evaluations([replace(task, evaluator=replace(task.evaluator, repository=None))], 90.0)
    verifier = VerifierSpec(form=VerifierForm.HARBOR)
    scored = EvaluatorSpec(kind=EvaluatorKind.VERIFIER, verifier=verifier, timeout_s=600.0)
    refuse_short_evaluations([replace(task, evaluator=scored)], 1800.0)
    with pytest.raises(ConfigError, match=r"set rollout\.evaluate_timeout_s to 1800"):
        refuse_short_evaluations([replace(task, evaluator=scored)], 600.0)
