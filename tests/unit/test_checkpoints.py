"""Checkpoint directories without a model: completeness, order, chain, retention."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.buffer.trajectories.types import BatchId, RolloutId
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.errors import CheckpointMismatch, CheckpointUnreadable
from headrace.policies.learners import checkpoints
from headrace.policies.learners.checkpoint_retention import remove_old
from headrace.policies.learners.config import LearnerConfig, trained_as

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


def test_a_manifest_round_trips(tmp_path: Path) -> None:
    path = publish(tmp_path, PolicyVersion(1, 40))
    assert checkpoints.read_manifest(path) == manifest(PolicyVersion(1, 40))
    reference = checkpoints.read_checkpoint(path)
    assert reference.batch_ids == ("b0", "b1", "b2")
    assert (reference.path, reference.version) == (str(path), PolicyVersion(1, 40))


def test_the_latest_checkpoint_is_the_complete_one_with_the_highest_version(tmp_path: Path) -> None:
    assert checkpoints.usable_checkpoint(tmp_path / "absent").checkpoint is None
    for version in (PolicyVersion(1, 9), PolicyVersion(1, 10), PolicyVersion(2, 8)):
        publish(tmp_path, version)
    torn = checkpoints.stage(tmp_path, PolicyVersion(2, 12))
    checkpoints.write_manifest(torn, manifest(PolicyVersion(2, 12)))
    latest = checkpoints.usable_checkpoint(tmp_path).checkpoint
    assert latest is not None
    assert latest.version == PolicyVersion(2, 8)


def test_staging_removes_directories_left_by_interrupted_saves(tmp_path: Path) -> None:
    left = checkpoints.stage(tmp_path, PolicyVersion(1, 3))
    (left / "half").write_text("x")
    staged = checkpoints.stage(tmp_path, PolicyVersion(1, 4))
    assert [path.name for path in tmp_path.iterdir()] == [staged.name]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_the_newest_checkpoints_are_retained(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for step in (2, 4, 10, 12):
        publish(root, PolicyVersion(1, step))
    remove_old(root, newest=2)
    assert names(root) == ["1.10", "1.12"]


@pytest.mark.parametrize("damage", ["absent", "no json", "format", "field", "type", "digits", "chain", "member"])
def test_damaged_checkpoints_are_refused_naming_the_file(tmp_path: Path, damage: str) -> None:
    path = publish(tmp_path, PolicyVersion(1, 1)) / checkpoints.MANIFEST
    document = json.loads(path.read_text())
    match damage:
        case "absent":
            path.unlink()
        case "no json":
            path.write_text(path.read_text()[:-9])
        case "format":
            path.write_text(json.dumps(document | {"format": 3}))
        case "field":
            del document["version"]
            path.write_text(json.dumps(document))
        case "type":
            path.write_text(json.dumps(document | {"version": 1.1}))
        case "digits":
            path.write_text(json.dumps(document | {"previous_chain": "!0"}))
        case "chain":
            path.write_text(json.dumps(document | {"chain": "00" * 32}))
        case "member":
            document["batches"][0]["members"][0][1] = 7
            path.write_text(json.dumps(document))
    with pytest.raises(CheckpointUnreadable, match=str(path.parent)):
        checkpoints.read_checkpoint(path.parent)


def with_files(root: Path, version: PolicyVersion) -> Path:
    staged = checkpoints.stage(root, version)
    (staged / "megatron").mkdir()
    (staged / "megatron" / "shard").write_bytes(b"moments" * 50)
    (staged / "model.safetensors").write_bytes(b"weights" * 50)
    checkpoints.write_manifest(staged, manifest(version))
    return checkpoints.publish(staged, version)


def list_files(path: Path, files: object) -> None:
    document = json.loads((path / "headrace.json").read_text())
    (path / "headrace.json").write_text(json.dumps(document | {"files": files}))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda path: (path / "megatron" / "shard").write_bytes(b"moments"), "has 7 bytes, but 350 were written"),
        (lambda path: (path / "megatron" / "shard").write_bytes(b"mOments" * 50), "its digest is"),
        (lambda path: flip_a_bit(path / "model.safetensors"), "was recorded"),
        (lambda path: list_files(path, None), "has no valid list of files"),
        (lambda path: list_files(path, {"model.safetensors": 350}), "has no valid list of files"),
        (lambda path: (path / "headrace.json").write_bytes(b""), "is not a complete checkpoint"),
        (lambda path: [file.unlink() for file in path.rglob("*") if file.is_file()], "is not a complete checkpoint"),
    ],
)
def test_a_damaged_checkpoint_is_set_aside_and_the_previous_one_used(
    tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    root = tmp_path / "checkpoints"
    with_files(root, PolicyVersion(1, 10))
    newest = with_files(root, PolicyVersion(2, 20))
    (newest / "ledger.db").write_bytes(b"added after the manifest")
    whole = checkpoints.usable_checkpoint(root)
    assert whole.checkpoint is not None
    assert (whole.checkpoint.version, whole.set_aside) == (PolicyVersion(2, 20), ())
    damage(newest)
    usable = checkpoints.usable_checkpoint(root)
    assert usable.checkpoint is not None
    assert usable.checkpoint.version == PolicyVersion(1, 10)
    [aside] = usable.set_aside
    assert (aside.name, aside.kept_as) == ("2.20", root / "aside-2.20")
    assert reason in aside.reason
    assert aside.kept_as.is_dir()
    remove_old(root, newest=1)
    checkpoints.stage(root, PolicyVersion(3, 11))
    assert aside.kept_as.is_dir(), "it is kept until a person removes it"


def test_a_second_damaged_checkpoint_of_a_version_gets_another_name(tmp_path: Path) -> None:
    for _ in range(2):
        (tmp_path / "1.10").mkdir()
        assert checkpoints.usable_checkpoint(tmp_path).checkpoint is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aside-1.10", "aside-1.10-2"]


@pytest.mark.parametrize("number", [2, 3])
def test_a_checkpoint_of_another_format_is_refused_in_one_line_and_not_renamed(tmp_path: Path, number: int) -> None:
    path = with_files(tmp_path, PolicyVersion(1, 10))
    document = json.loads((path / "headrace.json").read_text())
    (path / "headrace.json").write_text(json.dumps(document | {"format": number}))
    with pytest.raises(
        CheckpointUnreadable, match=rf"has format {number}, .* unreleased version of headrace: start"
    ) as refused:
        checkpoints.usable_checkpoint(tmp_path)
    assert "\n" not in str(refused.value)
    assert path.is_dir()


KEYS = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 258,
    "num_hidden_layers": 3,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}


def learner_of(folder: Path, *, objective: str = "grpo", **changes: object) -> LearnerConfig:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(KEYS | changes))
    return LearnerConfig(
        model_dir=folder, checkpoint_dir=folder / "checkpoints", snapshot_dir=folder / "weights", objective=objective
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "architecture Qwen3ForCausalLM, but .* Qwen2ForCausalLM: set model"),
        ({"vocab_size": 300}, "vocabulary 258, but this learner has vocabulary 300: set model.path"),
        ({"num_hidden_layers": 4}, "layers 3, but this learner has layers 4"),
        ({"objective": "gspo"}, "objective grpo, but .* objective gspo: set learner.objective to grpo"),
    ],
)
def test_a_checkpoint_that_was_trained_as_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """F25."""
    version = PolicyVersion(1, 10)
    staged = checkpoints.stage(tmp_path / "checkpoints", version)
    trained = trained_as(learner_of(tmp_path / "before"))
    checkpoints.write_manifest(staged, replace(manifest(version), trained=trained))
    path = checkpoints.publish(staged, version)
    checkpoints.refuse_mismatch(path, trained_as(learner_of(tmp_path / "same")))
    with pytest.raises(CheckpointMismatch, match=message) as refused:
        checkpoints.refuse_mismatch(path, trained_as(learner_of(tmp_path / "other", **changes)))
    assert f"model.path = {path}" in str(refused.value)


def test_a_nested_config_is_read_like_a_flat_one(tmp_path: Path) -> None:
    flat = checkpoints.trained_model(learner_of(tmp_path / "flat").model_dir)
    sizes = {key: value for key, value in KEYS.items() if key != "architectures"}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": KEYS["architectures"], "text_config": sizes}))
    assert checkpoints.trained_model(tmp_path) == flat
    assert (flat["vocabulary"], flat["key-value heads"]) == (258, 1)
    assert checkpoints.trained_model(tmp_path / "absent") == {}
