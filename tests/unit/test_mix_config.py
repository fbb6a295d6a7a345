"""`[[tasks.sources]]` of a recipe: what each source comes to, and what is refused before anything boots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.actors.cli.held_out.command import EvalRequest, prepare_evaluation
from headrace.actors.errors import ConfigError
from headrace.actors.run.config import RunConfig, load_recipe
from headrace.actors.run.launch import RunRequest, prepare, reopen
from headrace.actors.run.parts import evaluation_sampling, source_parts
from headrace.actors.run.task_sets import load_task_sets
from headrace.actors.simulation.virtual.plan import plan_keys
from headrace.buffer.errors import TaskFileError
from headrace.buffer.tasks.task import load_tasks, write_tasks
from support import replay_cases as cases

RECIPES = Path(__file__).parents[2] / "scripts" / "recipes"
TWO = """
[[tasks.sources]]
name = "quick"
share = 0.75
[tasks.sources.agent.simulated]
turns = 2

[[tasks.sources]]
name = "long"
share = 0.25
train_count = 20
[tasks.sources.agent.simulated]
turns = 30
[tasks.sources.sampling]
max_context_tokens = 500
[tasks.sources.rollout]
agent_timeout_s = 900
[tasks.sources.buffer]
group_size = 4
advantage = "leave_one_out"
[tasks.sources.evaluation]
tasks = 3
[tasks.sources.evaluation.sampling]
temperature = 0.0
"""


def recipe_of(tmp_path: Path, text: str = TWO, learner: str = "token_budget = 600") -> Path:
    recipe = tmp_path / "recipe.toml"
    simulated = (
        (RECIPES / "simulated.toml")
        .read_text()
        .replace('kind = "simulated"\n\n[learner.', f'kind = "simulated"\n{learner}\n\n[learner.')
    )
    recipe.write_text(simulated + text)
    return recipe


def load(tmp_path: Path, text: str = TWO) -> RunConfig:
    return load_recipe(recipe_of(tmp_path, text), (), tmp_path / "run")


def test_each_source_has_the_recipe_with_its_own_tables(tmp_path: Path) -> None:
    config = load(tmp_path)
    own = config.by_source()
    quick, long = own["quick"], own["long"]
    assert (quick.buffer.group_size, long.buffer.group_size) == (8, 4)
    assert (quick.buffer.advantage, long.buffer.advantage) == ("grpo", "leave_one_out")
    assert quick.buffer.batch_size == long.buffer.batch_size == 64
    assert (quick.rollout.agent_timeout_s, long.rollout.agent_timeout_s) == (120, 900)
    assert long.rollout.guard_s - quick.rollout.guard_s == 780, "derived from its own phases"
    assert config.service.stall_s == 2 * 900, "long enough for the slowest source"
    assert [(source.name, source.share, source.config.group_size) for source in config.mix()] == [
        ("quick", 0.75, 8),
        ("long", 0.25, 4),
    ]
    parts = {name: source_parts(each) for name, each in own.items()}
    assert (parts["quick"].budgets.max_turns, parts["long"].budgets.max_turns) == (2, 30)
    assert parts["long"].budgets.max_context_tokens == 500
    assert evaluation_sampling(config)["long.temperature"] == 0.0
    assert evaluation_sampling(config)["quick.temperature"] == 1.0


def test_the_tasks_of_all_sources_are_in_the_run_directory(tmp_path: Path) -> None:
    config, directory = prepare(RunRequest(recipe=recipe_of(tmp_path), runs_dir=tmp_path, name="run"))
    train, held_out = load_tasks(directory.train_tasks), load_tasks(directory.heldout_tasks)
    assert [sum(task.id.startswith(f"{name}/") for task in train) for name in ("quick", "long")] == [512, 20]
    evaluated = config.held_out(held_out)
    assert [sum(task.id.startswith(f"{name}/") for task in evaluated) for name in ("quick", "long")] == [16, 3]
    again, _ = reopen(directory.path)
    assert again == config
    assert again.by_source() == config.by_source()


def test_sources_read_their_files_relative_to_the_recipe(tmp_path: Path) -> None:
    tasks = cases.tasks(6)
    for name, each in {"train": tasks[:4], "heldout": tasks[4:]}.items():
        write_tasks(tmp_path / f"{name}.jsonl", each)
    text = TWO.replace("train_count = 20", 'train = "train.jsonl"\nheldout = "heldout.jsonl"')
    # These tasks are equal apart from their ids.
    with pytest.raises(ConfigError, match=r"tasks\.sources\.long\.heldout: 2 tasks are also in the training tasks"):
        load_task_sets(load(tmp_path, text))
    (tmp_path / "heldout.jsonl").write_bytes((tmp_path / "heldout.jsonl").read_bytes().replace(b"do it", b"do that"))
    train, _ = load_task_sets(load(tmp_path, text))
    assert [task.id for task in train if task.id.startswith("long/")] == [f"long/task-{n}" for n in range(4)]


def test_a_held_out_task_may_not_be_a_training_task_of_another_source(tmp_path: Path) -> None:
    one, other = cases.tasks(2)
    files = {"a": [one], "b": [other]}
    for name, tasks in files.items():
        write_tasks(tmp_path / f"{name}.jsonl", tasks)
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(path.read_bytes().replace(b"do it", f"do {name}".encode()))
    text = TWO.replace("share = 0.75", 'share = 0.75\ntrain = "a.jsonl"\nheldout = "b.jsonl"').replace(
        "train_count = 20", 'train = "b.jsonl"\nheldout = "a.jsonl"'
    )
    with pytest.raises(ConfigError, match=r"tasks\.sources\.quick\.heldout: 1 tasks are also in the training tasks"):
        load_task_sets(load(tmp_path, text))


def test_a_source_without_tasks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("\n")
    text = TWO.replace("train_count = 20", 'train = "none.jsonl"\nheldout = "none.jsonl"')
    with pytest.raises(TaskFileError, match=r"none\.jsonl: has no tasks"):
        load_task_sets(load(tmp_path, text))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("share = 0.75", "share = 0.5", r"the shares add up to 0\.75 \(quick 0\.5, long 0\.25\); change them"),
        ('name = "long"', 'name = "quick"', r"tasks\.sources: quick is a duplicate name; give each source its own"),
        ('name = "long"', 'name = "Long/1"', r"tasks\.sources\.1\.name: String should match pattern"),
        ("share = 0.25", "shar = 0.25", r"tasks\.sources\.1\.(share is missing|shar)"),
        ("group_size = 4", "batch_size = 4", r"sources\.long: buffer\.batch_size holds for the whole run; set it in"),
        ("agent_timeout_s = 900", "lease_s = 900", r"sources\.long: rollout\.lease_s holds for the whole run"),
        ("tasks = 3", "samples = 3", r"sources\.long: evaluation\.samples holds for the whole run"),
        ("group_size = 4", "group_siz = 4", r"sources\.long: buffer\.group_siz holds for the whole run"),
        ("turns = 30", "turn = 30", r"sources\.long: unknown key agent\.simulated\.turn; did you mean"),
        ("group_size = 4", "group_size = 70", r"sources\.long: groups of 70 may never fit beside an unfinished batch"),
        ("max_context_tokens = 500", "max_context_tokens = 700", r"sources\.long: learner\.token_budget 600 is below"),
        (
            '[[tasks.sources]]\nname = "quick"',
            '[tasks]\ntrain_count = 3\n[[tasks.sources]]\nname = "quick"',
            r"tasks\.train_count has no effect beside tasks\.sources; move it to a source",
        ),
    ],
)
def test_sources_that_cannot_work_are_refused_in_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TWO
    with pytest.raises(ConfigError, match=message) as raised:
        load(tmp_path, TWO.replace(old, new, 1) if old != "share = 0.25" else TWO.replace(old, new))
    assert "\n" not in str(raised.value)


def test_a_share_of_less_than_one_rollout_of_a_batch_is_refused(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, TWO.replace("0.75", "0.99").replace("0.25", "0.01"))
    with pytest.raises(
        ConfigError, match=r"sources\.long: share 0\.01 of buffer\.batch_size 64 is less than one rollout"
    ):
        load_recipe(recipe, (), tmp_path / "run")


def test_sync_mode_without_staleness_needs_whole_groups(tmp_path: Path) -> None:
    overrides = ["buffer.mode=sync", "buffer.max_staleness=0"]
    load_recipe(recipe_of(tmp_path), overrides, tmp_path / "run")
    recipe = recipe_of(tmp_path, TWO.replace("0.75", "0.7").replace("0.25", "0.3"))
    with pytest.raises(ConfigError, match=r"sources\.quick: share 0\.7 .* is not a whole number of groups of 8"):
        load_recipe(recipe, overrides, tmp_path / "run")


def test_commands_that_do_not_know_sources_refuse_them(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    with pytest.raises(ConfigError, match=r"a plan has no sources; leave tasks\.sources out"):
        plan_keys(recipe, ())
    write_tasks(tmp_path / "tasks.jsonl", cases.tasks(1))
    request = EvalRequest(source=recipe, tasks=tmp_path / "tasks.jsonl", out=tmp_path / "out", runs_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"the recipe has sources, and a task of a file is of none"):
        prepare_evaluation(request)


def test_a_recipe_without_sources_is_its_own_source() -> None:
    config = load_recipe(RECIPES / "simulated.toml", (), Path("run"))
    assert config.by_source() == {"": config}
    assert config.mix() == ()
    document: dict[str, Any] = orjson.loads(config.model_dump_json())
    assert document["tasks"].pop("sources") == []
