"""Directories that engines read snapshots from: their files, their verification and how long they are kept."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId
from headrace.policies.errors import EngineRefused, EngineTimeout, ModelInvalid
from headrace.policies.learner import WeightsDirectory, WeightsShard, WeightsSnapshot
from headrace.policies.push.directories import DirectoryReaders, SnapshotDirectories
from headrace.policies.push.disk import changed_file
from headrace.policies.push.fitting import read_model_specs
from headrace.policies.push.inspection import inspect_directory
from headrace.policies.push.weights import read_snapshot

ONE = EngineId("one")


@pytest.fixture
def model(tmp_path: Path, write_model: Callable[..., Path]) -> Path:
    return write_model(tmp_path / "model", seed=1)


def shards_of(model: Path, folder: Path, count: int, step: int) -> WeightsSnapshot:
    """The model's parameters, dealt to `count` files of a learner."""
    folder.mkdir()
    tensors = load_file(model / "model.safetensors")
    paths = [folder / f"rank{number}.safetensors" for number in range(count)]
    for number, path in enumerate(paths):
        save_file({name: tensors[name] for name in sorted(tensors)[number::count]}, path)
    shards = tuple(WeightsShard.of(path) for path in paths)
    return WeightsSnapshot(version=PolicyVersion(1, step), shards=shards)


@pytest.mark.parametrize("count", [1, 3])
async def test_shards_become_a_complete_model_directory(tmp_path: Path, model: Path, count: int) -> None:
    snapshot = shards_of(model, tmp_path / "weights", count, step=4)
    directories = SnapshotDirectories(tmp_path / "run", model, DirectoryReaders())
    made = await directories.of(snapshot)
    assert made.path == tmp_path / "run" / "1.4"
    assert made == WeightsDirectory.of(made.path)
    assert (made.path / "config.json").read_bytes() == (model / "config.json").read_bytes()
    assert (made.path / "tokenizer.json").exists()
    assert read_model_specs(made.path) == read_model_specs(model)
    found = inspect_directory(made.path, made.digests, checksums=True)
    assert found.specs == read_model_specs(model)
    assert found.checksums == read_snapshot({model / "model.safetensors": None}).checksums()


async def test_a_directory_survives_the_removal_of_the_learners_files(tmp_path: Path, model: Path) -> None:
    snapshot = WeightsSnapshot(version=PolicyVersion(1, 1), directory=WeightsDirectory.of(model))
    directories = SnapshotDirectories(tmp_path / "run", tmp_path / "nowhere", DirectoryReaders())
    made = await directories.of(snapshot)
    assert made.path != model
    shutil.rmtree(model)
    assert inspect_directory(made.path, made.digests, checksums=False).specs
    assert await directories.of(snapshot) == made


async def test_a_directory_that_cannot_be_linked_is_read_where_it_is(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    directories = SnapshotDirectories(tmp_path / "run", model, DirectoryReaders())
    whole = WeightsDirectory.of(model)
    assert await directories.of(WeightsSnapshot(version=PolicyVersion(1, 1), directory=whole)) == whole
    made = await directories.of(shards_of(model, tmp_path / "weights", 2, step=2))
    assert inspect_directory(made.path, made.digests, checksums=False).specs == read_model_specs(model)


async def test_other_weights_under_the_same_version_replace_the_directory(
    tmp_path: Path, model: Path, write_model: Callable[..., Path]
) -> None:
    for source in (model, write_model(tmp_path / "other", seed=2)):
        directories = SnapshotDirectories(tmp_path / "run", source, DirectoryReaders())
        made = await directories.of(shards_of(source, tmp_path / f"weights-{source.name}", 1, step=1))
        assert made == WeightsDirectory.of(made.path)


async def test_the_two_newest_directories_and_those_being_read_are_kept(tmp_path: Path, model: Path) -> None:
    members = {ONE}
    readers = DirectoryReaders(is_member=lambda engine_id: engine_id in members)
    directories = SnapshotDirectories(tmp_path / "run", model, readers)

    async def make(step: int) -> set[str]:
        await directories.of(shards_of(model, tmp_path / f"weights-{step}", 1, step))
        return {path.name for path in (tmp_path / "run").iterdir()}

    assert await make(1) == {"1.1"}
    with pytest.raises(EngineTimeout):
        async with readers.reading(ONE, directories.path_of(PolicyVersion(1, 1))):
            raise EngineTimeout("no answer: it may still be reading")
    await make(9)
    assert await make(10) == {"1.1", "1.9", "1.10"}
    with pytest.raises(EngineRefused):
        async with readers.reading(ONE, directories.path_of(PolicyVersion(1, 10))):
            raise EngineRefused(400, "it has answered")
    assert await make(11) == {"1.10", "1.11"}
    readers.mark(ONE, directories.path_of(PolicyVersion(1, 10)))
    await make(12)
    assert await make(13) == {"1.10", "1.12", "1.13"}
    members.clear()
    assert await make(14) == {"1.13", "1.14"}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: file.unlink(), r"model\.safetensors is missing \(1 of 4"),
        (lambda file: os.truncate(file, file.stat().st_size - 1), r"model\.safetensors"),
        (lambda file: os.truncate(file, 4), r"model\.safetensors"),
        (lambda file: file.with_name("config.json").write_text("{}"), r"config\.json: its sha256 is not"),
        (lambda file: file.with_name("more.safetensors").write_bytes(file.read_bytes()), "not part of the snapshot"),
    ],
)
def test_a_damaged_directory_is_refused(model: Path, damage: Callable[[Path], object], said: str) -> None:
    digests = WeightsDirectory.of(model).digests
    damage(model / "model.safetensors")
    with pytest.raises(ModelInvalid, match=said):
        inspect_directory(model, digests, checksums=True)


def test_a_parameter_in_two_files_is_refused(model: Path) -> None:
    (model / "again.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    with pytest.raises(ModelInvalid, match="is in two files"):
        inspect_directory(model, WeightsDirectory.of(model).digests, checksums=False)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (json.dumps({"weight_map": {"w": "model-00002-of-00002.safetensors"}}), "names .model-00002-of-00002"),
        ("[]", "not an index"),
    ],
)
def test_an_index_must_name_files_of_the_snapshot(model: Path, index: str, said: str) -> None:
    (model / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelInvalid, match=said):
        inspect_directory(model, WeightsDirectory.of(model).digests, checksums=False)


def test_a_file_that_was_changed_after_its_verification_is_noticed(model: Path) -> None:
    stamps = inspect_directory(model, WeightsDirectory.of(model).digests, checksums=False).stamps
    assert changed_file(model, stamps) is None
    content = (model / "config.json").read_bytes()
    (model / "config.json").unlink()
    assert changed_file(model, stamps) == model / "config.json"
    (model / "config.json").write_bytes(content + b" ")
    assert changed_file(model, stamps) == model / "config.json"
