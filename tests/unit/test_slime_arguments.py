"""slime's command line from a recipe, and what is refused."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.errors import ConfigError
from headrace.actors.run.config import load_recipe
from headrace.policies.errors import LearnerSettingsInvalid
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.learners.slime import arguments

MODEL = Path("/model")
KEPT = "headrace.policies.learners.slime.token_terms.keep_advantages"
ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"
RECIPE = Path(__file__).resolve().parents[2] / "scripts" / "recipes" / "claude_code.toml"


def terms(*, batch_size: int = 8, temperature: float = 0.7, steps: int = 40, **learner: Any) -> arguments.SlimeTerms:
    folders = {"model_dir": MODEL, "checkpoint_dir": "/run/checkpoints", "snapshot_dir": "/run/weights"}
    config = LearnerConfig.model_validate({"kind": "slime", **folders, **learner})
    return arguments.SlimeTerms(learner=config, batch_size=batch_size, temperature=temperature, steps=steps)


def values(given: arguments.SlimeTerms) -> dict[str, str]:
    """The value of each flag that headrace sets, "" for a switch."""
    return {flag.name: " ".join(flag.values) for flag in arguments.flags(given, load=MODEL)}


def test_the_recipe_decides_batch_temperature_clip_and_rate() -> None:
    given = terms(eps_low=0.1, eps_high=0.3, learning_rate=1e-6, weight_decay=0.01, objective="gspo")
    line = values(given)
    assert {line[flag] for flag in ("--global-batch-size", "--rollout-batch-size")} == {"8"}
    assert line["--n-samples-per-prompt"] == "1"
    assert line["--rollout-temperature"] == "0.7"
    assert (line["--eps-clip"], line["--eps-clip-high"]) == ("0.1", "0.3")
    assert (line["--lr"], line["--weight-decay"]) == ("1e-06", "0.01")
    assert line["--advantage-estimator"] == "gspo"
    assert "--eps-clip-c" not in line
    assert values(terms(dual_clip=3.0))["--eps-clip-c"] == "3.0"
    switches = {"--use-rollout-logprobs", "--debug-train-only", "--disable-rewards-normalization"}
    assert {flag for flag in switches if line[flag] == ""} == switches


@pytest.mark.parametrize(("warmup", "rates"), [(0, [1.0, 1.0]), (1, [1.0, 1.0]), (4, [0.25, 0.5, 0.75, 1.0, 1.0])])
def test_the_warm_up_gives_the_same_rates_as_the_megatron_learner(warmup: int, rates: list[float]) -> None:
    line = values(terms(learning_rate=1.0, warmup_steps=warmup))
    start, updates = float(line["--lr-warmup-init"]), int(line["--lr-warmup-iters"])

    def rate(update: int) -> float:
        """Megatron's OptimizerParamScheduler.get_lr for a constant rate."""
        if updates and update <= updates:
            return start + (1.0 - start) * update / updates
        return 1.0

    assert [rate(update) for update in range(len(rates))] == pytest.approx(rates)
    assert int(line["--lr-decay-iters"]) > updates


def test_a_micro_batch_is_divided_among_the_gpus_that_share_a_row() -> None:
    given = terms(token_budget=1000, slime={"context_parallel": 8, "gpus_per_node": 8})
    assert values(given)["--max-tokens-per-gpu"] == "125"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--global-batch-size", "16"), r"--global-batch-size is decided by buffer.batch_size \(8\); remove it"),
        (("--rollout-temperature=0.5",), r"--rollout-temperature is decided by sampling.temperature \(0.7\)"),
        (("--lr", "1"), r"--lr is decided by learner.learning_rate"),
        (("--load", "/x"), "--load is decided by model.path"),
        (("--colocate",), "--colocate contradicts the recipe: trainer and engines have GPUs of their own"),
        (("--use-tis",), '--use-tis contradicts the recipe: learner.correction decides it .*"tis"'),
        (("--use-kl-loss",), "--use-kl-loss contradicts the recipe: learner.kl_coef decides it"),
        (("--calculate-per-token-loss",), 'learner.loss_weight = "token" is the same'),
        (
            ("--keep-old-actor",),
            "in no checkpoint; with one update per batch the policy before the update is the one in",
        ),
        (("--ref-update-interval", "10"), "no checkpoint has the moved reference"),
        (("--num-steps-per-rollout", "2"), "one update per batch: lower buffer.batch_size"),
        (("--custom-config-path", "x.yaml"), "would change arguments outside this list"),
        (("--no-save-optim",), "headrace saves and resumes checkpoints itself, with the optimizer's moments"),
        # Flags that would do nothing.
        (("--tis-clip-low", "0.5"), '--tis-clip-low needs learner.correction = "tis"'),
        (("--custom-tis-function-path", "x.y"), 'needs learner.correction = "tis", or only to measure'),
        (("--get-mismatch-metrics", "--custom-tis-function-path", ICEPOP), "or only to measure a mismatch"),
        (("--custom-loss-function-path", "x.y"), "needs --loss-type custom_loss"),
        (("--use-unbiased-kl",), "--use-unbiased-kl needs learner.kl_coef above 0"),
        (("--use-opd", "--opd-type", "sglang"), "--use-opd needs --opd-teacher-load"),
    ],
)
def test_flags_that_contradict_the_recipe_are_refused_by_name(words: tuple[str, ...], problem: str) -> None:
    given = terms(slime={"arguments": ("--swiglu", *words)})
    assert re.search(problem, arguments.problem(given) or "")


@pytest.mark.parametrize(
    ("learner", "flags"),
    [
        ({}, {"--use-rollout-logprobs": "", "--custom-advantage-function-path": KEPT}),
        ({"correction": "tis", "weight_cap": 3.0}, {"--use-tis": "", "--tis-clip": "3.0"}),
        (
            {"correction": "icepop"},
            {"--use-tis": "", "--tis-clip": "2.0", "--tis-clip-low": "0.5", "--custom-tis-function-path": ICEPOP},
        ),
        ({"sequence_mask": 0.1}, {"--use-opsm": "", "--opsm-delta": "0.1"}),
        (
            {"kl_coef": 0.1},
            {"--use-kl-loss": "", "--kl-loss-coef": "0.1", "--kl-loss-type": "low_var_kl", "--ref-load": "/model"},
        ),
        ({"kl_coef": 0.1, "kl_kind": "k2"}, {"--kl-loss-type": "k2"}),
        ({"observation_coef": 0.1}, {"--loss-type": "custom_loss"}),
    ],
)
def test_terms_of_the_loss_are_flags(learner: dict[str, Any], flags: dict[str, str]) -> None:
    given = terms(**learner)
    assert arguments.problem(given) is None
    line = values(given)
    assert flags.items() <= line.items()
    assert ("--use-rollout-logprobs" in line) == (given.learner.correction == "none")


@pytest.mark.parametrize(
    ("words", "learner"),
    [
        (("--tis-clip-low", "0.5", "--custom-tis-function-path", "mine.weights"), {"correction": "tis"}),
        (("--get-mismatch-metrics", "--custom-tis-function-path", "mine.weights"), {}),
        (("--use-unbiased-kl",), {"kl_coef": 0.1}),
        (("--use-opd", "--opd-type", "megatron", "--opd-teacher-load", "/teacher"), {}),
        (("--loss-type", "custom_loss", "--custom-loss-function-path", "mine.loss"), {}),
        (("--custom-advantage-function-path", "mine.advantages"), {}),
        (("--custom-pg-loss-reducer-function-path", "mine.reducer"), {}),
        (("--normalize-advantages",), {}),
        (("--rollout-data-postprocess-path", "mine.change"), {}),
        (("--custom-megatron-init-path", "mine.init"), {}),
        (("--custom-megatron-before-train-step-hook-path", "mine.before"), {}),
    ],
)
def test_what_slime_offers_beside_the_keys_is_passed_on(words: tuple[str, ...], learner: dict[str, Any]) -> None:
    given = terms(slime={"arguments": ("--swiglu", *words)}, **learner)
    assert arguments.problem(given) is None
    assert not set(values(given)) & set(words)


def test_every_flag_of_ours_is_refused_from_a_user() -> None:
    ours = arguments.flags(terms(), load=MODEL)
    assert not {flag.name for flag in ours} & set(arguments.REFUSED)
    for flag in ours:
        with pytest.raises(LearnerSettingsInvalid, match=f"{flag.name} is decided by"):
            arguments.refuse_contradictions(flag.words, ours)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"batch_size": 7, "slime": {"gpus_per_node": 8}}, "buffer.batch_size 7 is below the 8 data-parallel ranks"),
        (
            {"objective": "mine"},
            r'learner.objective "mine" is not one of those that slime trains here \(grpo, gspo, cispo\)',
        ),
        ({"objective": "ppo"}, 'whose critic would take turns .* or learner.kind = "megatron"'),
        ({"correction": "cap"}, "learner.correction is cap, but .* learner.dual_clip; set it to none or tis or icepop"),
        (
            {"correction": "icepop", "objective": "gspo"},
            "learner.correction is icepop, .* set learner.objective to grpo",
        ),
        ({"correction": "tis", "sequence_mask": 0.1}, "learner.correction is tis, .* remove learner.sequence_mask"),
        ({"recompute": True}, "learner.recompute is True, but .* --recompute-granularity"),
    ],
)
def test_recipes_that_slime_cannot_train_are_refused(change: dict[str, Any], problem: str) -> None:
    assert re.search(problem, arguments.problem(terms(**change)) or "")
    assert arguments.problem(terms()) is None


def test_a_recipe_with_a_batch_below_the_ranks_is_refused_before_a_run_exists(tmp_path: Path) -> None:
    overrides = [
        "learner.kind=slime",
        "buffer.batch_size=16",
        "learner.slime.gpus_per_node=32",
    ]
    with pytest.raises(ConfigError, match=r"buffer\.batch_size 16 is below the 32 data-parallel ranks"):
        load_recipe(RECIPE, overrides, tmp_path / "run")


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"tensor_parallel": 3}, r"8 GPUs .* are not a multiple of 3"),
        ({"slime_dir": "/slime"}, "slime_dir and megatron_dir go together"),
        ({"environment": {"PYTHONPATH": "/x"}}, r"environment\.PYTHONPATH is set by headrace"),
    ],
)
def test_impossible_sections_are_refused(section: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        terms(slime=section)


def test_unknown_flags_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(LearnerSettingsInvalid, match=r"slime 1 has no flag --swigul: did you mean --swiglu\?"):
        arguments.refuse_unknown(("--swigul",), ("--swiglu", "--lr"), checkout="slime 1")
    arguments.refuse_unknown(("--swiglu", "--debug-train-only"), ("--swiglu",), checkout="slime 1")


def test_values_that_slime_changes_while_parsing_are_refused() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    ours = (arguments.Flag(name="--lr", values=("0.5",), decided_by="learner.learning_rate"),)
    arguments.check_parsed(argparse.Namespace(lr=0.5), parser, ours)
    with pytest.raises(LearnerSettingsInvalid, match=r"slime uses lr = 0.1, but learner.learning_rate decides 0.5"):
        arguments.check_parsed(argparse.Namespace(lr=0.1), parser, ours)


def test_training_processes_have_what_megatron_and_sglang_need(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    for name in own:
        monkeypatch.delenv(name, raising=False)
    assert own.items() <= arguments.environment(terms().learner.slime).items()
    # The learner's node wins over the default, and the recipe over both.
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    section = terms(slime={"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}}).learner.slime
    found = arguments.environment(section)
    assert (found["NCCL_NVLS_ENABLE"], found["CUDA_DEVICE_MAX_CONNECTIONS"]) == ("1", "32")
    assert json.loads(values(terms())["--train-env-vars"])["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


def test_the_processes_of_slime_find_each_source_once(monkeypatch: pytest.MonkeyPatch) -> None:
    section = terms(slime={"slime_dir": "/slime", "megatron_dir": "/megatron"}).learner.slime
    monkeypatch.setenv("PYTHONPATH", "/mine")
    path = arguments.environment(section)["PYTHONPATH"]
    assert path == "/slime:/megatron:/mine"
    # The parser has that path, and gives the ranks theirs.
    monkeypatch.setenv("PYTHONPATH", path)
    assert arguments.environment(section)["PYTHONPATH"] == path


@pytest.mark.parametrize("name", ["../../models/x", "/x", ".hidden", "a b", "$(x)"])
def test_a_model_names_no_other_file(name: str) -> None:
    """Bash reads it, as Ray's user."""
    with pytest.raises(ValueError, match="should match pattern"):
        terms(slime={"model": name})


def test_an_error_of_the_parser_names_its_line_and_the_keys_it_speaks_of() -> None:
    def refusal(check: str) -> tuple[str, str]:
        words = ("--num-experts", "7", "--expert-model-parallel-size", "2", "--lr", "1")
        ours = (arguments.Flag(name="--expert-model-parallel-size", decided_by="learner.slime.expert_parallel"),)
        with pytest.raises((AssertionError, RuntimeError)) as raised:
            exec(compile(check, "/megatron/arguments.py", "exec"))
        return arguments.explained(raised.value, words, ours)

    text, named = refusal("assert 7 % 2 == 0, 'num_experts is no multiple of expert_model_parallel_size'")
    assert text == "AssertionError: num_experts is no multiple of expert_model_parallel_size (arguments.py:1)"
    assert named == (
        "; it speaks of --num-experts (of the model or learner.slime.arguments), "
        "--expert-model-parallel-size (learner.slime.expert_parallel)"
    )
    assert refusal("raise RuntimeError('No CUDA GPUs are available')")[1] == ""
