"""Machine files over the recipes of published systems: they go together, and what a learner lacks is refused by key."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.actors.cli.app import app
from headrace.actors.errors import ConfigError
from headrace.actors.run.overlays import load_layered
from headrace.actors.simulation.virtual.plan import make_plan, plan_keys

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
RECIPES = ("search_r1", "tau", "swe_rl", "endless", "echo")
WITHOUT_SLIME = ("search_r1", "endless", "echo")
"""Recipes with a term of the loss that slime does not have, or that headrace does not pass on."""
MACHINES = ("cpu", "untested/8gpu", "untested/64gpu", "untested/8gpu_megatron")
SLIME = ("untested/8gpu", "untested/64gpu")


def files(recipe: str, machine: str) -> tuple[Path, list[Path]]:
    return SCRIPTS / "recipes" / f"{recipe}.toml", [SCRIPTS / "machines" / f"{machine}.toml"]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_runs_on_every_machine(tmp_path: Path, recipe: str, machine: str) -> None:
    path, on = files(recipe, machine)
    if recipe in WITHOUT_SLIME and machine in SLIME:
        with pytest.raises(ConfigError, match=r"learner\..* slime"):
            load_layered(path, on, (), tmp_path)
        return
    config = load_layered(path, on, (), tmp_path)
    assert config.learner.kind == ("slime" if machine in SLIME else "megatron")


@pytest.mark.parametrize("machine", SLIME)
@pytest.mark.parametrize("setting", ["objective=ppo", "observation_coef=0.05", "kl_coef=0.001", "correction=icepop"])
def test_what_slime_cannot_train_is_refused_by_its_key(tmp_path: Path, machine: str, setting: str) -> None:
    path, on = files("tau", machine)
    key = f"learner.{setting.partition('=')[0]}"
    with pytest.raises(ConfigError, match=rf"{key} .*slime") as refusal:
        load_layered(path, on, [f"learner.{setting}"], tmp_path)
    assert "\n" not in str(refusal.value)
    load_layered(*files("tau", "untested/8gpu_megatron"), [f"learner.{setting}"], tmp_path)


@pytest.mark.parametrize("machine", MACHINES)
def test_machine_files_name_no_model_and_no_tasks(machine: str) -> None:
    text = files("tau", machine)[1][0].read_text()
    assert not {"[model]", "[tasks]", "[agent]", "[sampling]", "[buffer]"} & set(text.splitlines())


def test_a_simulation_takes_the_sizes_of_a_recipe() -> None:
    keys = plan_keys(*files("tau", "untested/64gpu"))
    plan = make_plan("swe64", keys)
    assert (plan.batch_size, plan.group_size, plan.max_staleness, plan.slots, plan.workers) == (64, 8, 2, 128, 2)
    assert plan.learner_s == make_plan("swe64", {}).learner_s
    assert make_plan("swe64", keys | {"slots": 32}).slots == 32


def test_machine_files_of_a_simulation_need_a_recipe() -> None:
    told = CliRunner().invoke(app, ["simulate", "--on", str(files("tau", "untested/64gpu")[1][0])])
    assert str(told.exception) == "--on: machine files are merged over a recipe; name one with --recipe"
