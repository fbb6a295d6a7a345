"""Machine files are merged over recipes, and every key knows the file that set it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.actors.errors import ConfigError
from headrace.actors.run.launch import dry_run
from headrace.actors.run.overlays import layered, load_layered

RECIPES = Path(__file__).resolve().parents[2] / "scripts" / "recipes"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_later_files_win_and_tables_are_merged(tmp_path: Path) -> None:
    recipe = write(tmp_path / "recipe.toml", '[buffer]\nbatch_size = 8\ngroup_size = 4\n[model]\npath = "m"\n')
    machine = write(tmp_path / "big" / "machine.toml", '[buffer]\nbatch_size = 64\n[engines]\nkey_file = "key"\n')
    found = layered(recipe, [machine], ["buffer.group_size=2"])
    assert found.document["buffer"] == {"batch_size": 64, "group_size": 2}
    assert found.origins["buffer.batch_size"] == "machine.toml"
    assert (found.origins["buffer.group_size"], found.origins["model.path"]) == ("--set", "recipe.toml")
    config = load_layered(recipe, [machine], [], tmp_path / "run")
    assert (config.model.path, config.engines.key_file) == (tmp_path / "m", tmp_path / "big" / "key")


def test_machine_files_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    recipe = write(tmp_path / "recipe.toml", '[model]\npath = "m"\n')
    files = [write(tmp_path / f"{count}.toml", f"[engines]\ncount = {count}\n") for count in (2, 3)]
    with pytest.raises(ConfigError, match=r"3\.toml: engines\.count is 3, but .*2\.toml sets it to 2"):
        layered(recipe, files, [])
    assert layered(recipe, [files[0], files[0]], []).document["engines"] == {"count": 2}


def test_a_dry_run_names_origins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F25."""
    monkeypatch.chdir(tmp_path)
    checked = dry_run(RECIPES / "quickstart.toml", (), ["training.steps=3"])
    assert checked.tasks == (512, 64)
    assert checked.origins["training.steps"] == "--set"
    assert checked.origins["agent.kind"] == "quickstart.toml"
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_refuses_what_a_run_would_refuse() -> None:
    with pytest.raises(ConfigError, match=r"learner\.token_budget 64 is below"):
        dry_run(RECIPES / "quickstart.toml", (), ["learner.token_budget=64"])
