"""Weights of a snapshot: shards or one directory."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learner import WeightsDirectory, WeightsShard, WeightsSnapshot


def test_a_directory_lists_the_digest_of_every_file_by_name(tmp_path: Path) -> None:
    contents = {"model-00002.safetensors": b"second", "config.json": b"{}", "model-00001.safetensors": b""}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    directory = WeightsDirectory.of(tmp_path)
    assert list(directory.digests) == sorted(contents)
    assert directory.digests == {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def test_the_files_of_a_snapshot_are_its_shards_or_the_safetensors_of_its_directory(tmp_path: Path) -> None:
    for name in ("config.json", "model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_text(name)
    snapshot = WeightsSnapshot(version=PolicyVersion(1, 2), directory=WeightsDirectory.of(tmp_path))
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert snapshot.files == tuple(WeightsShard.of(tmp_path / name) for name in names)
    shards = WeightsSnapshot(version=PolicyVersion(1, 2), shards=snapshot.files)
    assert shards.files == shards.shards == snapshot.files


def test_a_snapshot_has_shards_or_a_directory_but_not_both(tmp_path: Path) -> None:
    directory = WeightsDirectory.of(tmp_path)
    version = PolicyVersion(1, 2)
    assert WeightsSnapshot(version=version, directory=directory).shards == ()
    assert WeightsSnapshot(version=version, directory=directory).files == ()
    shard = WeightsShard(path=tmp_path / "model.safetensors", sha256="0")
    with pytest.raises(ValueError, match=r"snapshot 1\.2 has its weights in two forms"):
        WeightsSnapshot(version=version, shards=(shard,), directory=directory)
