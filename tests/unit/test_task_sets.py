"""The tasks of a run are read, checked and written in one walk, whose memory does not depend on their texts."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from headrace.actors.errors import ConfigError
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.launch import RunRequest, lay_out, prepare
from headrace.actors.run.overlays import load_layered
from headrace.actors.run.task_sets import load_task_sets

RECIPE = Path(__file__).parents[2] / "scripts" / "recipes" / "simulated.toml"
TEXT_BYTES, COUNT = 200_000, 150


def write(path: Path, *texts: str) -> None:
    with path.open("w") as file:
        for number, text in enumerate(texts):
            evaluator = {"kind": "simulated", "expected": json.dumps({"success": 0.5})}
            task = {"id": f"{path.stem}-{number}", "family": "f", "instruction": text, "evaluator": evaluator}
            file.write(json.dumps(task) + "\n")


def overrides(folder: Path) -> tuple[str, ...]:
    return (f"tasks.train={folder / 'train.jsonl'}", f"tasks.heldout={folder / 'heldout.jsonl'}")


def test_tasks_are_laid_out_in_the_memory_of_a_few(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", *(f"{n}".ljust(TEXT_BYTES, "x") for n in range(COUNT)))
    write(tmp_path / "heldout.jsonl", "another")
    config = load_layered(RECIPE, (), overrides(tmp_path), tmp_path / "run")
    directory = RunDirectory(path=tmp_path / "run")
    tracemalloc.start()
    try:
        lay_out(config, directory)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < COUNT * TEXT_BYTES / 3
    train, heldout = load_task_sets(config)
    assert (len(train), [task.instruction for task in heldout]) == (COUNT, ["another"])
    assert directory.train_tasks.stat().st_size > COUNT * TEXT_BYTES


def test_a_task_that_is_refused_last_leaves_nothing_behind(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", "one", "two")
    write(tmp_path / "heldout.jsonl", "three", "two")
    before = set(tmp_path.iterdir())
    request = RunRequest(recipe=RECIPE, runs_dir=tmp_path / "all" / "runs", name="run", overrides=overrides(tmp_path))
    with pytest.raises(ConfigError, match=r"tasks\.heldout: 1 tasks are also in tasks\.train \('heldout-1'\)"):
        prepare(request)
    assert set(tmp_path.iterdir()) == before


def test_each_task_is_allowed_before_the_next_is_read(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", "one", "two", "three")
    write(tmp_path / "heldout.jsonl", "four")
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write("not a task\n")
    config = load_layered(RECIPE, (), overrides(tmp_path), tmp_path / "run")
    allowed: list[str] = []

    def allow(tasks: object) -> None:
        allowed.extend(task.instruction for task in tasks)  # type: ignore[attr-defined]
        if len(allowed) == 2:
            raise ConfigError("the second one is refused")

    with pytest.raises(ConfigError, match="the second one is refused"):
        lay_out(config, RunDirectory(path=tmp_path / "run"), allow=allow)
    assert allowed == ["one", "two"]
