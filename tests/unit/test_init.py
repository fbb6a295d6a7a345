"""`headrace init`: the recipes that it writes for published models and machines, and what it refuses."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace.actors.cli.app import app
from headrace.actors.errors import ConfigError
from headrace.actors.run.launch import dry_run
from headrace.buffer.tasks.datasets.terminal import Split, generate
from headrace.buffer.tasks.task import load_tasks, write_tasks
from support.harbor_tasks import verdict_tasks
from support.machine_files import MACHINES, examples
from support.published_models import described_model

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TINY = SCRIPTS / "models" / "tiny"


def init(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["init", str(folder / "recipe.toml"), *options, "--json", str(folder / "out.json")])


def made(folder: Path, model: Path, agent: str, machine: str, tasks: str = "generated") -> dict[str, Any]:
    """Derived values by their keys, of a recipe that was written, is short, and passes the dry run."""
    known = examples(MACHINES[machine]) if machine in MACHINES else []
    options = ("--model", str(model), "--agent", agent, "--tasks", tasks, "--machine", machine)
    done = init(folder, *options, *(word for one in known for word in ("--set", one)))
    assert done.exception is None, done.exception
    document = json.loads((folder / "out.json").read_text())
    recipe = folder / "recipe.toml"
    text = recipe.read_text()
    assert len(text.splitlines()) <= 20
    assert document["command"] in text
    checked = dry_run(recipe, [MACHINES[machine]] if machine in MACHINES else [], known)
    assert list(checked.absent) == document["absent"]
    for one in checked.derived:
        assert one.line in done.stderr.splitlines()
        assert one.key in text
    return {one["key"]: one["value"] for one in document["derived"]}


def test_a_mixture_of_experts_on_64_gpus(tmp_path: Path) -> None:
    found = made(tmp_path, described_model(tmp_path, "Qwen3.6-35B-A3B"), "loop", "64gpu")
    assert (found["sampling.max_context_tokens"], found["agent.loop.max_turns"]) == (32_768, 16)
    assert found["learner.learning_rate"] == 1e-6


def test_a_dense_4b_on_eight_gpus(tmp_path: Path) -> None:
    found = made(tmp_path, described_model(tmp_path, "Qwen3-4B"), "shell", "8gpu")
    assert (found["sampling.max_context_tokens"], found["agent.shell.max_turns"]) == (32_768, 16)
    assert (found["learner.learning_rate"], found["learner.token_budget"]) == (1e-6, 32_768)


def test_a_small_model_on_one_cpu(tmp_path: Path) -> None:
    found = made(tmp_path, TINY, "loop", "cpu")
    assert (found["sampling.max_context_tokens"], found["agent.loop.max_turns"]) == (1024, 4)
    assert (found["learner.learning_rate"], found["engines.count"]) == (3e-4, 2)


def test_one_task_in_ten_is_held_out(tmp_path: Path) -> None:
    tasks = generate(1, 25, Split.TRAIN)
    write_tasks(tmp_path / "mine.jsonl", tasks)
    made(tmp_path, TINY, "shell", "this", str(tmp_path / "mine.jsonl"))
    recipe = tomllib.loads((tmp_path / "recipe.toml").read_text())
    train, heldout = (load_tasks(Path(recipe["tasks"][name])) for name in ("train", "heldout"))
    assert (len(train), len(heldout)) == (22, 3)
    assert {task.id for task in (*train, *heldout)} == {task.id for task in tasks}


def test_harbor_folders_are_converted_and_split(tmp_path: Path) -> None:
    """Also where they lie in groups, as in github.com/johnbuck/harbor-tasks."""
    for place, folder in enumerate(verdict_tasks()[:4]):
        folder.write(tmp_path / "harbor" / "tasks" / ("files", "logs")[place % 2])
    (tmp_path / "harbor" / ".githooks").mkdir()
    (tmp_path / "harbor" / "hooks").mkdir()
    made(tmp_path, TINY, "shell", "this", str(tmp_path / "harbor"))
    assert len(load_tasks(tmp_path / "recipe" / "train.jsonl")) == 3
    assert len(load_tasks(tmp_path / "recipe" / "heldout.jsonl")) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, r"--model is missing, and there is no terminal to ask for it: add --model VALUE"),
        ({"model": "nowhere"}, r"nowhere has no config\.json; set it to a Hugging Face model directory"),
        ({"machine": "cray"}, r"--machine cray: no such file; name one, or 4gpu, 64gpu, 8gpu, .*, or this"),
        ({"tasks": "nothing.jsonl"}, r"--tasks nothing\.jsonl: no such file or folder; name one, or generated"),
        (
            {"heldout": "a.jsonl"},
            "--heldout has no effect with generated tasks; name a file of training tasks by --tasks",
        ),
        ({"agent": "nobody"}, r"agent\.kind: there is no agent 'nobody'"),
        (
            {"model": "Qwen3-4B", "machine": "cpu"},
            r"4\.0B parameters need .* GB, this host has .* GB.*at most .*B; use",
        ),
        ({"model": "Qwen3.6-35B-A3B", "machine": "cpu"}, r"architectures is .*Qwen3_5Moe.*; serve other models with"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line_and_leaves_nothing(
    tmp_path: Path, options: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"model": str(TINY), "agent": "shell", "tasks": "generated", "machine": "this"} | options if options else {}
    if given and given["model"].startswith("Qwen"):
        described_model(tmp_path, given["model"])
    done = init(tmp_path, *(word for name, value in given.items() for word in (f"--{name}", value)))
    with pytest.raises(Exception, match=says) as refused:
        raise done.exception or AssertionError("nothing was refused")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "recipe.toml").exists()


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        # As a clone without git-lfs has it (github.com/MiMiGame-1/Reflection-Llama-3.1-70B).
        (
            "model.safetensors",
            "version https://git-lfs.github.com/spec/v1\noid sha256:44821dc7\nsize 1543504480\n",
            r"model\.safetensors: a pointer of Git LFS, not the weights; run `git lfs pull` in its folder",
        ),
        # As models with merges.txt only have it (github.com/DracoUnion/Qwen1.5-moe-8x0.5B-Chat).
        ("tokenizer.json", None, r"has no tokenizer\.json; let transformers write it: AutoTokenizer\.from_pretrained"),
        # As github.com/GribAI/Tensor-12m has it.
        ("tokenizer_config.json", None, r"has no tokenizer_config\.json; copy it from the model's page"),
    ],
)
def test_model_directories_of_others_are_refused_by_what_they_lack(
    tmp_path: Path, file: str, content: str | None, says: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    (model / file).unlink()
    if content is not None:
        (model / file).write_text(content)
    options = ("--model", str(model), "--agent", "shell", "--tasks", "generated", "--machine", "this")
    with pytest.raises(Exception, match=says):
        raise init(tmp_path, *options).exception or AssertionError("nothing was refused")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    options = ("--model", str(TINY), "--agent", "shell", "--tasks", "generated", "--machine", "this")
    with pytest.raises(ConfigError, match=r"absent/recipe\.toml: No such file or directory; name another file"):
        raise init(tmp_path / "absent", *options).exception or AssertionError


def test_what_no_option_gives_is_asked_for_on_a_terminal(tmp_path: Path) -> None:
    command = [Path(sys.executable).with_name("headrace"), "init", tmp_path / "recipe.toml", "--machine", "this"]
    ours, terminal = pty.openpty()
    with subprocess.Popen(command, stdin=terminal, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as asking:
        os.write(ours, f"{TINY}\nloop\n\n".encode())
        errors = asking.communicate(timeout=100)[1].decode()
    assert asking.returncode == 0, errors
    assert "Tasks (JSONL file, folder of Harbor tasks, or generated) [generated]:" in errors
    assert 'kind = "loop"' in (tmp_path / "recipe.toml").read_text()


@pytest.mark.parametrize("name", ["recipe.toml", "recipe"])
def test_what_exists_is_not_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    options = ("--model", str(TINY), "--agent", "shell", "--tasks", str(tmp_path / "mine.jsonl"), "--machine", "this")
    with pytest.raises(ConfigError, match=rf"{re.escape(name)} exists: name another file, or remove it"):
        raise init(tmp_path, *options).exception or AssertionError
    assert (tmp_path / name).read_text() == "mine"


def test_a_folder_beside_a_recipe_without_files_of_tasks_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    made(tmp_path, TINY, "shell", "this")
    (tmp_path / "recipe.toml").unlink()
    options = ("--model", str(TINY), "--agent", "nobody", "--tasks", "generated", "--machine", "this")
    with pytest.raises(ConfigError, match=r"agent\.kind: there is no agent 'nobody'"):
        raise init(tmp_path, *options).exception or AssertionError
    assert (tmp_path / "recipe").is_dir()


def test_a_refusal_leaves_no_files_of_split_tasks(tmp_path: Path) -> None:
    write_tasks(tmp_path / "mine.jsonl", generate(1, 25, Split.TRAIN))
    options = ("--model", str(TINY), "--agent", "nobody", "--tasks", str(tmp_path / "mine.jsonl"), "--machine", "this")
    with pytest.raises(ConfigError, match=r"agent\.kind: there is no agent 'nobody'"):
        raise init(tmp_path, *options).exception or AssertionError
    assert [path.name for path in tmp_path.iterdir()] == ["mine.jsonl"]
