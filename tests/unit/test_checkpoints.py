"""Checkpoint directories without a model: completeness, order, chain, retention."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from headrace.buffer.types import BatchId, RolloutId
from headrace.buffer.versions import PolicyVersion
from headrace.policies import checkpoints
from headrace.policies.learner_errors import CheckpointUnreadable

if TYPE_CHECKING:
    from pathlib import Path

BATCHES = tuple(
    checkpoints.SteppedBatch(
        batch_id=BatchId(f"b{index}"),
        members=((RolloutId(f"r{index}"), 1), (RolloutId(f"s{index}"), 2)),
        skipped=index == 1,
    )
    for index in range(3)
)


def manifest(version: PolicyVersion) -> checkpoints.Manifest:
    chain = checkpoints.fold_chain("", BATCHES)
    return checkpoints.Manifest(version=version, previous_chain="", chain=chain, batches=BATCHES)


def publish(root: Path, version: PolicyVersion) -> Path:
    staged = checkpoints.stage(root, version)
    checkpoints.write_manifest(staged, manifest(version))
    return checkpoints.publish(staged, version)


def test_manifest_round_trip(tmp_path: Path) -> None:
    path = publish(tmp_path, PolicyVersion(1, 40))
    assert checkpoints.read_manifest(path) == manifest(PolicyVersion(1, 40))
    reference = checkpoints.read_checkpoint(path)
    assert reference.batch_ids == ("b0", "b1", "b2")
    assert (reference.path, reference.version) == (str(path), PolicyVersion(1, 40))


def test_latest_is_by_version_and_ignores_what_was_not_renamed(tmp_path: Path) -> None:
    assert checkpoints.latest_checkpoint(tmp_path / "absent") is None
    for version in (PolicyVersion(1, 9), PolicyVersion(1, 10), PolicyVersion(2, 8)):
        publish(tmp_path, version)
    torn = checkpoints.stage(tmp_path, PolicyVersion(2, 12))
    checkpoints.write_manifest(torn, manifest(PolicyVersion(2, 12)))
    latest = checkpoints.latest_checkpoint(tmp_path)
    assert latest is not None
    assert latest.version == PolicyVersion(2, 8)


def test_stage_removes_what_an_interrupted_save_left(tmp_path: Path) -> None:
    left = checkpoints.stage(tmp_path, PolicyVersion(1, 3))
    (left / "half").write_text("x")
    staged = checkpoints.stage(tmp_path, PolicyVersion(1, 4))
    assert [path.name for path in tmp_path.iterdir()] == [staged.name]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (2, 4, 10, 12):
        publish(tmp_path, PolicyVersion(1, step))
    checkpoints.keep_newest(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.10", "1.12"]


@pytest.mark.parametrize("damage", ["absent", "no json", "format", "field", "chain", "member"])
def test_damage_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = publish(tmp_path, PolicyVersion(1, 1)) / checkpoints.MANIFEST
    document = json.loads(path.read_text())
    match damage:
        case "absent":
            path.unlink()
        case "no json":
            path.write_text(path.read_text()[:-9])
        case "format":
            path.write_text(json.dumps(document | {"format": 2}))
        case "field":
            del document["version"]
            path.write_text(json.dumps(document))
        case "chain":
            path.write_text(json.dumps(document | {"chain": "00" * 32}))
        case "member":
            document["batches"][0]["members"][0][1] = 7
            path.write_text(json.dumps(document))
    with pytest.raises(CheckpointUnreadable, match=str(path.parent)):
        checkpoints.read_checkpoint(path.parent)
