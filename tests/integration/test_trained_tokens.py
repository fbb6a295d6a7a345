"""What a real run trained on is what its policy sampled: every token is scored again by the version its span names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.actors.record.files.metrics import read_metrics
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.buffer.audit.evidence import Evidence, read_evidence, read_trajectories
from headrace.buffer.trajectories.types import Row, Trajectory
from headrace.policies.learners.checkpoint_retention import kept_checkpoints, version_of
from headrace.policies.learners.checkpoints import list_checkpoints
from headrace.policies.tokens.tokenizer import ChatTokenizer

pytestmark = [pytest.mark.namespaces, pytest.mark.timeout(900)]

Key = tuple[str, int]
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def evidence(finished_run: RunDirectory) -> Evidence:
    return read_evidence(finished_run.path)


@pytest.fixture(scope="module")
def trajectories(evidence: Evidence) -> dict[Key, Trajectory]:
    """All that the run stored, trained or not."""
    found = dict(read_trajectories(evidence, set(evidence.files)))
    assert all(trajectory is not None for trajectory in found.values())
    return {(str(rollout), attempt): stored for (rollout, attempt), stored in found.items() if stored is not None}


def model_directories(run: RunDirectory) -> dict[str, Path]:
    """Version -> model directory: the base, and the checkpoint of every update."""
    config = json.loads((run.path / "config.json").read_text())
    paths = (*kept_checkpoints(run.checkpoints), *list_checkpoints(run.checkpoints))
    checkpoints = {str(version_of(path)): path for path in paths}
    return {"1.0": type(run.path)(config["model"]["path"]), **checkpoints}


def scored(model_dir: Path, rows: list[Row], temperature: float) -> list[np.ndarray]:
    """Log-probability of each token but the first of each row, (T,) with 0 in front: whole rows, without a cache.

    (That this forward pass is transformers' own is tested in tests/unit/test_qwen3.py.)
    """
    import torch

    from headrace.policies.models.qwen import Qwen, read_weights
    from headrace.policies.models.qwen_config import QwenConfig

    config = QwenConfig.read(model_dir / "config.json")
    model = Qwen(config, read_weights(config, model_dir), capacity=1024)
    logprobs_BTV = (model.logits([row.tokens_T.tolist() for row in rows]) / temperature).log_softmax(-1)
    scores = []
    for row, logprobs_TV in zip(rows, logprobs_BTV, strict=True):
        following = torch.tensor(row.tokens_T[1:], dtype=torch.long)
        taken = logprobs_TV[: len(following)].gather(1, following[:, None])[:, 0]
        scores.append(np.concatenate([[0.0], taken.numpy()]))
    return scores


def differences(
    run: RunDirectory, trajectories: dict[Key, Trajectory]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """|recorded - scored| of every sampled token: under the version of its span, and under the version before that."""
    rows = [row for trajectory in trajectories.values() for row in trajectory.rows]
    [temperature] = {trajectory.temperature for trajectory in trajectories.values()}
    own: list[float] = []
    before: list[float] = []
    for name, directory in model_directories(run).items():
        step = int(name.removeprefix("1."))
        wanted = [(row, span) for row in rows for span in row.versions if span.version.step in (step, step + 1)]
        scores = scored(directory, [row for row, _ in wanted], temperature) if wanted else []
        for (row, span), score in zip(wanted, scores, strict=True):
            place = slice(span.start, span.end)
            found = own if span.version.step == step else before
            found += np.abs(score[place] - row.logprobs_T[place]).tolist()
    return np.array(own), np.array(before)


def test_every_trained_token_was_sampled_by_the_version_its_span_names(
    finished_run: RunDirectory, trajectories: dict[Key, Trajectory]
) -> None:
    own, before = differences(finished_run, trajectories)
    sampled = sum(int(row.loss_mask_T.sum()) for stored in trajectories.values() for row in stored.rows)
    assert len(own) == sampled > 500
    assert own.max() <= TOLERANCE
    assert (before > TOLERANCE).mean() > 0.1, "versions too alike would not show which of them sampled"


def test_the_loss_mask_covers_exactly_the_sampled_tokens(trajectories: dict[Key, Trajectory]) -> None:
    for row in (row for trajectory in trajectories.values() for row in trajectory.rows):
        times = np.zeros(len(row.tokens_T), dtype=int)
        for span in row.versions:
            times[span.start : span.end] += 1
        assert (times == row.loss_mask_T).all()
        assert not row.logprobs_T[~row.loss_mask_T].any()
        assert (row.logprobs_T[row.loss_mask_T] < 0).all()


def test_a_row_is_the_conversation_as_rendered_by_the_tokenizer(
    finished_run: RunDirectory, trajectories: dict[Key, Trajectory]
) -> None:
    """Prompt, answer, observation, answer: what is masked is the template with contents, and each answer is followed by
    it again. A row never starts anew within itself."""
    tokenizer = ChatTokenizer(model_directories(finished_run)["1.0"])
    opening = tokenizer.encode("<|assistant|>")
    multi_turn = 0
    for row in (row for trajectory in trajectories.values() for row in trajectory.rows):
        tokens, mask = row.tokens_T.tolist(), row.loss_mask_T
        starts = [place for place in range(1, len(tokens)) if mask[place] and not mask[place - 1]]
        assert all(tuple(tokens[start - len(opening) : start]) == opening for start in starts)
        assert [place for place, token in enumerate(tokens) if (token,) == opening] == [start - 1 for start in starts]
        multi_turn += len(starts) > 1
    assert multi_turn > 10


def test_a_step_trains_exactly_the_tokens_of_its_batch(
    finished_run: RunDirectory, evidence: Evidence, trajectories: dict[Key, Trajectory]
) -> None:
    steps: dict[str, Any] = {
        record["batch_id"]: record for record in read_metrics(finished_run.metrics) if record["kind"] == "step"
    }
    assert len(steps) == len(evidence.commits) == 6
    members = {batch.batch_id: batch.members for batch in evidence.batches}
    for commit in evidence.commits:
        rows = [
            row
            for member in members[commit.batch_id]
            for row in trajectories[str(member.rollout_id), member.attempt].rows
        ]
        assert steps[commit.batch_id]["tokens"] == sum(int(row.loss_mask_T.sum()) for row in rows)
