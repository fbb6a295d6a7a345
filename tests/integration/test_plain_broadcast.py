"""Baseline of pushes: it transfers the weights of the file, and reports any that differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from benches.push.plain_broadcast import open_pair

from headrace.policies.push.weights import read_snapshot
from headrace.policies.tensors import read_specs

BUCKET_BYTES = 100_000


@pytest.fixture(scope="module")
def models(write_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [write_model(folder / str(seed), seed=seed) / "model.safetensors" for seed in range(2)]


async def test_every_parameter_is_received(models: list[Path], tmp_path: Path) -> None:
    held = read_specs(models[0])
    assert list(held) != list(read_snapshot({models[0]: None}).specs), "the order would not matter"
    assert sum(spec.size_bytes for spec in held.values()) > 2 * BUCKET_BYTES
    async with open_pair(models[0], tmp_path / "meeting", BUCKET_BYTES) as pair:
        assert await pair.round_s() > 0
        assert await pair.round_s() > 0


async def test_parameters_that_differ_from_the_file_are_reported(models: list[Path], tmp_path: Path) -> None:
    snapshot = tmp_path / "model.safetensors"
    snapshot.write_bytes(models[0].read_bytes())
    with pytest.raises(RuntimeError, match="sent incorrect weights"):
        async with open_pair(snapshot, tmp_path / "meeting", BUCKET_BYTES) as pair:
            await pair.round_s()
            snapshot.write_bytes(models[1].read_bytes())
