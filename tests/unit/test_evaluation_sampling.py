"""[evaluation.sampling]: what it decides, what it is refused for, and that it tells evaluations apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.actors.cli.held_out.command import EvalRequest, prepare_evaluation
from headrace.actors.errors import ConfigError
from headrace.actors.run.config import RunConfig, load_recipe
from headrace.actors.run.launch import RunRequest, prepare
from headrace.actors.run.parts import evaluation_terms, recipe_digest, training_terms
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.checkpoints import Manifest, write_manifest

RECIPE = Path(__file__).resolve().parents[2] / "scripts" / "recipes" / "quickstart.toml"


def config(*overrides: str) -> RunConfig:
    return load_recipe(RECIPE, [f"evaluation.sampling.{override}" for override in overrides], Path("/run"))


def test_evaluations_sample_like_training_by_default() -> None:
    assert evaluation_terms(config()) == training_terms(config())
    warm = load_recipe(RECIPE, ["sampling.temperature=0.6", "sampling.max_sampled_tokens=90"], Path("/run"))
    assert evaluation_terms(warm) == training_terms(warm)


def test_evaluation_sampling_keys_affect_only_evaluation_sessions() -> None:
    keys = ("temperature=0", "top_p=0.9", "top_k=20", "max_tokens_per_turn=7")
    other = config(*keys, "max_context_tokens=64", "max_sampled_tokens=99")
    terms = evaluation_terms(other).to_json()
    assert terms == {
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 20,
        "max_tokens_per_turn": 7,
        "max_context_tokens": 64,
        "max_sampled_tokens": 99,
    }
    assert training_terms(other) == training_terms(config())


def test_every_sampling_key_changes_the_recipe_digest() -> None:
    keys = ("temperature=0", "top_p=0.9", "top_k=20", "max_tokens_per_turn=7", "max_sampled_tokens=99")
    digests = {recipe_digest(config(*overrides)) for overrides in [(), *((key,) for key in keys)]}
    assert len(digests) == 1 + len(keys)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("top_k=0", "evaluation.sampling.top_k: 0 leaves no token to sample; set -1"),
        ("temperature=-1", "evaluation.sampling.temperature"),
        ("top_p=0", "evaluation.sampling.top_p"),
        ("temprature=1", "unknown key evaluation.sampling.temprature"),
    ],
)
def test_invalid_sampling_is_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(override)


def test_an_engine_context_limit_below_the_evaluations_is_refused() -> None:
    overrides = ["engines.max_context_tokens=300", "evaluation.sampling.max_context_tokens=301"]
    with pytest.raises(
        ConfigError, match=r"is below evaluation\.sampling\.max_context_tokens 301; raise engines\.max_context_tokens"
    ):
        load_recipe(RECIPE, overrides, Path("/run"))


def evaluation(run: Path, overrides: Sequence[str] = ()) -> Path:
    return prepare_evaluation(EvalRequest(source=run, runs_dir=run.parent, overrides=overrides)).out


def test_evaluating_a_run_at_another_temperature_uses_a_separate_folder(tmp_path: Path) -> None:
    directory = prepare(RunRequest(recipe=RECIPE, runs_dir=tmp_path, name="run"))[1]
    checkpoint = directory.checkpoints / "1.3"
    checkpoint.mkdir(parents=True)
    for path in config().model.path.iterdir():
        (checkpoint / path.name).symlink_to(path)
    write_manifest(checkpoint, Manifest(version=PolicyVersion(1, 3), previous_chain="", chain="", batches=()))
    usual = evaluation(directory.path)
    greedy = evaluation(directory.path, ["evaluation.sampling.temperature=0"])
    assert usual != greedy
    assert greedy.parent == usual.parent == directory.path / "evaluations"
    with pytest.raises(ConfigError, match=r"only keys of evaluation\.sampling can be set; name a recipe"):
        evaluation(directory.path, ["evaluation.samples=3"])
    with pytest.raises(ConfigError, match=r"--set: evaluation\.sampling\.top_p"):
        evaluation(directory.path, ["evaluation.sampling.top_p=2"])
