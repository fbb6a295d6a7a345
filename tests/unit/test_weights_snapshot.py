"""Weights of a snapshot: shards or one directory."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from headrace.buffer.versions import PolicyVersion
from headrace.policies.learner import WeightsDirectory, WeightsShard, WeightsSnapshot

if TYPE_CHECKING:
    from pathlib import Path


def test_a_directory_lists_the_digest_of_every_file_by_name(tmp_path: Path) -> None:
    contents = {"model-00002.safetensors": b"second", "config.json": b"{}", "model-00001.safetensors": b""}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    directory = WeightsDirectory.of(tmp_path)
    assert list(directory.digests) == sorted(contents)
    assert directory.digests == {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def test_a_snapshot_has_shards_or_a_directory_but_not_both(tmp_path: Path) -> None:
    directory = WeightsDirectory.of(tmp_path)
    version = PolicyVersion(1, 2)
    assert WeightsSnapshot(version=version, directory=directory).shards == ()
    shard = WeightsShard(path=tmp_path / "model.safetensors", sha256="0")
    with pytest.raises(ValueError, match=r"snapshot 1\.2 has shards and a directory"):
        WeightsSnapshot(version=version, shards=(shard,), directory=directory)
