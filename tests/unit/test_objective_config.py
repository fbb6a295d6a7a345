"""Settings of the objective that contradict each other are refused with both keys and the fix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from headrace.actors.errors import ConfigError
from headrace.actors.run.checks import check_objective
from headrace.actors.run.config import load_recipe
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.learners.objectives.config import OWN, ObjectiveConfig
from headrace.policies.learners.objectives.loss import Objective
from headrace.policies.learners.objectives.registry import OBJECTIVES
from headrace.policies.learners.objectives.tokens import TokenLoss

QUICKSTART = Path(__file__).resolve().parents[2] / "scripts" / "recipes" / "quickstart.toml"


def without_ratio(tokens: Any, config: Any) -> TokenLoss:
    return TokenLoss(loss_N=torch.zeros(0), metrics={})


PLAIN = Objective(loss=without_ratio, uses_ratio=False)


@pytest.mark.parametrize("objective", OWN)
def test_weights_beside_a_clip_of_the_same_ratio_are_refused(objective: str) -> None:
    overrides = ["learner.correction=weights", f"learner.objective={objective}"]
    with pytest.raises(ConfigError) as refusal:
        load_recipe(QUICKSTART, overrides, Path("run"))
    for part in ("correction weights", f"objective {objective}", "corrected twice", "set learner.correction to cap"):
        assert part in str(refusal.value)


def test_weights_are_allowed_only_for_objectives_that_do_not_use_the_ratio(tmp_path: Path) -> None:
    paths = {"model_dir": tmp_path, "checkpoint_dir": tmp_path, "snapshot_dir": tmp_path, "correction": "weights"}
    check_objective(LearnerConfig(**paths, objective=f"{__name__}:PLAIN"))
    with pytest.raises(ConfigError, match=r"corrected twice; set learner\.correction to cap"):
        check_objective(LearnerConfig(**paths, objective=f"{__name__}:without_ratio"))


def test_decoupled_ppo_is_refused_because_its_clip_would_never_act() -> None:
    with pytest.raises(ConfigError, match=r"current / proximal, which is always 1 .* set learner.objective to grpo"):
        load_recipe(QUICKSTART, ["learner.objective=decoupled_ppo"], Path("run"))
    with pytest.raises(ConfigError, match=r"current / proximal, which is always 1 .* only its weights would be left"):
        load_recipe(QUICKSTART, ["learner.correction=decoupled"], Path("run"))


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"objective": "cispo", "eps_high": 5.0}, ("weight_cap 2", "1 + eps_high = 6", "learner.correction to none")),
        ({"objective": "cispo", "dual_clip": 3.0}, ("dual_clip", "cispo", "remove learner.dual_clip")),
        (
            {"correction": "icepop", "weight_floor": 2.0},
            ("weight_floor 2", "weight_cap 2", "learner.weight_floor or"),
        ),
        ({"correction": "icepop", "eps_high": 0.3}, ("eps_high has no effect", "icepop", "remove learner.eps_high")),
        ({"correction": "tis", "eps_low": 0.1}, ("eps_low has no effect", "tis", "remove learner.eps_low")),
        ({"correction": "tis", "objective": "gspo"}, ("tis", "objective gspo", "set learner.objective to grpo")),
        ({"loss_weight": "constant"}, ("loss_weight constant", "learner.loss_constant", "set it")),
        ({"loss_constant": 100.0}, ("loss_constant", "loss_weight trajectory", "remove it")),
    ],
)
def test_contradictions_are_refused_with_both_keys_and_the_fix(keys: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError) as refusal:
        ObjectiveConfig(**keys)
    for part in parts:
        assert part in str(refusal.value)


def test_objectives_import_neither_megatron_nor_ray() -> None:
    modules = ("config", "loss", "policy", "registry", "tokens")
    imports = "; ".join(f"import headrace.policies.learners.objectives.{name}" for name in modules)
    program = f"import sys; {imports}; print(*sorted(name.partition('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert "torch" in done.stdout.split()
    assert {"megatron", "ray"}.isdisjoint(done.stdout.split())


def test_own_objectives_need_no_rows_without_advantage_unless_a_critic_gives_it() -> None:
    needed = {name: OBJECTIVES.find(name)().uses_zero_advantage for name in OWN}
    assert needed == {"grpo": False, "gspo": False, "cispo": False, "ppo": True}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"objective": "gspo"}, "gspo clips at eps_low 0.2 and eps_high 0.28, its paper at 0.0003"),
        ({"objective": "gspo", "eps_low": 3e-4, "eps_high": 4e-4}, ""),
        ({"objective": "cispo"}, 'cispo has loss_weight "trajectory", its paper the mean over all tokens'),
        ({"objective": "cispo", "loss_weight": "token"}, ""),
        ({}, ""),
    ],
)
def test_what_differs_from_a_paper_is_told(settings: dict[str, Any], said: str) -> None:
    told = " ".join(ObjectiveConfig(**settings).deviations)
    assert said in told
    assert bool(said) == bool(told)
