"""The recipes for GPUs, by the parsers of slime and Megatron-LM, in processes to which Ray gives a GPU or none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.policies.errors import LearnerSettingsInvalid
from headrace.policies.learners.slime import architectures, arguments
from headrace.policies.learners.slime.arguments import SlimeTerms
from support import slime_rig as rig
from support.machine_files import SLIME, SLIME_MODELS, slime_terms_on
from support.published_configs import write_published_config
from support.slime_samples import options_of_slime, parsed_here

pytestmark = [pytest.mark.slime, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "golden" / "slime_options.json"
FILES = {
    "Qwen3-4B": "qwen3-4B",
    "Qwen3-8B": "qwen3-8B",
    "Qwen3-32B": "qwen3-32B",
    "Qwen3-30B-A3B": "qwen3-30B-A3B",
    "Qwen3.6-35B-A3B": "qwen3.5-35B-A3B",
    "Qwen3.5-9B": "qwen3.5-9B",
    "Qwen3-Next-80B-A3B": "qwen3-next-80B-A3B",
    "GLM-4.7-Flash": "glm4.7-30B-A3B",
    "GLM-4.5-Air": "glm4.5-106B-A12B",
    "GLM-4.7": "glm4.5-355B-A32B",
    "GLM-5": "glm5-744B-A40B",
    "DeepSeek-V3": "deepseek-v3",
    "MiniMax-M2": "minimax-m2",
}
"""Published models, and slime's file for each."""


def slime_dir() -> Path:
    places = rig.checkouts()
    assert places is not None
    return places[0]


def terms_of(machine: str, model: Path, run_dir: Path, *more: str) -> SlimeTerms:
    places = rig.checkouts()
    assert places is not None
    checkouts = (f"learner.slime.slime_dir={places[0]}", f"learner.slime.megatron_dir={places[1]}")
    return slime_terms_on(machine, model, run_dir, *checkouts, *more)


def parsed(terms: SlimeTerms, *names: str, gpus: int = 1, environment: dict[str, str] | None = None) -> list[Any]:
    """Parse in a process of its own, as the learner does, and return the arguments of these names. Raises
    LearnerSettingsInvalid."""
    import ray

    given = arguments.environment(terms.learner.slime) if environment is None else environment
    task = ray.remote(max_calls=1, num_gpus=gpus, runtime_env={"env_vars": given})(parsed_here)
    try:
        found: list[Any] = ray.get(task.remote(terms, names))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    return found


@pytest.mark.usefixtures("slime_ray")
@pytest.mark.parametrize("machine", SLIME)
def test_slime_and_megatron_parse_a_machine_file_for_gpus(tmp_path: Path, machine: str) -> None:
    model = write_published_config(tmp_path / "model", SLIME_MODELS[machine])
    terms = terms_of(machine, model, tmp_path / "run")
    section = terms.learner.slime
    names = ("world_size", "tensor_model_parallel_size", "sequence_parallel")
    assert parsed(terms, *names) == [section.gpus, section.tensor_parallel, True]
    environment = arguments.environment(section)
    del environment["CUDA_DEVICE_MAX_CONNECTIONS"]
    with pytest.raises(LearnerSettingsInvalid, match="variable CUDA_DEVICE_MAX_CONNECTIONS to 1"):
        parsed(terms, environment=environment)


@pytest.mark.usefixtures("slime_ray")
@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (
            {"correction": "icepop", "kl_coef": 0.1, "observation_coef": 0.1},
            {
                "use_tis": True,
                "use_rollout_logprobs": False,
                "tis_clip_low": 0.5,
                "custom_tis_function_path": "slime.backends.megatron_utils.loss.icepop_function",
                "kl_loss_type": "low_var_kl",
                "loss_type": "custom_loss",
            },
        ),
        (
            {"sequence_mask": 0.1, "dual_clip": 3.0},
            {"opsm_delta": 0.1, "eps_clip_c": 3.0, "use_rollout_logprobs": True},
        ),
    ],
)
def test_slime_parses_the_terms_of_a_loss(
    tmp_path: Path, bf16_model: Path, keys: dict[str, Any], values: dict[str, Any]
) -> None:
    terms = rig.terms(tmp_path, bf16_model, **keys)
    assert arguments.problem(terms) is None
    assert parsed(terms, *values) == list(values.values())


@pytest.mark.usefixtures("slime_ray")
def test_every_error_of_the_parser_names_its_flag(tmp_path: Path) -> None:
    model = write_published_config(tmp_path / "model", "Qwen3.6-35B-A3B")

    def refusal(*more: str, gpus: int = 1) -> str:
        with pytest.raises(LearnerSettingsInvalid) as refused:
            parsed(terms_of("64gpu", model, tmp_path / "run", *more), gpus=gpus)
        return str(refused.value)

    # What a learner on a node without GPUs would meet.
    said = refusal(gpus=0)
    assert "No CUDA GPUs are available" in said
    said = refusal("learner.slime.expert_parallel=7")
    assert "Number of experts should be a multiple of" in said
    assert "--expert-model-parallel-size (learner.slime.expert_parallel)" in said


@pytest.mark.parametrize(("model", "file"), FILES.items())
def test_the_file_of_a_published_model_is_found(tmp_path: Path, model: str, file: str) -> None:
    config = write_published_config(tmp_path, model) / "config.json"
    assert file in architectures.fitting(config, slime_dir())


def test_a_model_of_another_size_is_refused_with_the_one_that_fits(tmp_path: Path) -> None:
    model = write_published_config(tmp_path / "model", "Qwen3-4B")
    terms = terms_of("8gpu", model, tmp_path / "run", "learner.slime.model=qwen3-8B")
    with pytest.raises(LearnerSettingsInvalid) as refused:
        arguments.user_words(terms.learner, slime_dir())
    said = str(refused.value)
    assert "--hidden-size 4096, but hidden_size is 2560" in said
    assert "set learner.slime.model to qwen3-4B, whose flags agree with" in said
    with pytest.raises(LearnerSettingsInvalid, match=r"qwen9-4B.sh does not exist; the models of .* qwen3-4B, "):
        architectures.architecture("qwen9-4B", slime_dir())


@pytest.mark.usefixtures("slime_ray")
def test_the_recorded_options_are_slimes(tmp_path: Path, bf16_model: Path) -> None:
    """`tests/unit/test_slime_options.py` compares recipes with them where there is no checkout."""
    import ray

    found = ray.get(ray.remote(options_of_slime).options(num_gpus=1).remote(rig.terms(tmp_path, bf16_model)))
    # As json writes them.
    assert json.loads(json.dumps(found)) == json.loads(RECORDED.read_text(encoding="utf-8"))
