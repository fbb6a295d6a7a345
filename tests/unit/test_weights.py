"""Buckets carry every tensor once and unchanged, whatever their size."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from headrace.policies.errors import ModelInvalid
from headrace.policies.push.weights import checksum, plan_buckets, read_snapshot, unflatten

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


KINDS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(KINDS, st.integers(1, 400))
def test_weights_survive_a_round_trip(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[tuple[int, ...], torch.dtype]], bucket_bytes: int
) -> None:
    """Through a file, cut into buckets: every tensor comes out once, unchanged, with the sender's checksum."""
    tensors = {f"t{index}": torch.randn(shape).to(dtype) for index, (shape, dtype) in enumerate(kinds)}
    path = tmp_path_factory.mktemp("snapshot") / "model.safetensors"
    save_file(tensors, path)
    snapshot = read_snapshot(path, None)
    received: dict[str, torch.Tensor] = {}
    for bucket in plan_buckets(snapshot.specs, bucket_bytes):
        assert bucket.size_bytes <= bucket_bytes or len(bucket.names) == 1
        flat = snapshot.flat(bucket).clone()
        assert flat.numel() == bucket.size_bytes
        assert not received.keys() & set(bucket.names)
        received |= dict(unflatten(bucket, flat))
    assert received.keys() == tensors.keys()
    sums = snapshot.checksums()
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)
        # An engine keeps fp32, whatever came.
        assert checksum(tensor.float(), tensor.dtype) == sums[name]


def test_a_checksum_depends_on_every_bit_but_not_on_chunking() -> None:
    tensor = torch.zeros(600_000)
    other = tensor.clone()
    other[599_999] = 1e-45
    whole = xxhash.xxh3_128_hexdigest(tensor.numpy().tobytes())
    assert checksum(tensor, torch.float32) == whole
    assert checksum(other, torch.float32) != whole


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, dtype=torch.int64)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelInvalid, match="a has dtype I64"):
        read_snapshot(tmp_path / "model.safetensors", None)


def test_snapshot_memory_is_reused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4)}, path)
    first = read_snapshot(path, None)
    save_file({"a": torch.full((4,), 2.0)}, path)
    second = read_snapshot(path, None, first.data)
    assert second.data is first.data
    assert torch.equal(second.tensors()["a"], torch.full((4,), 2.0))


def test_a_snapshot_file_must_match_its_expected_digest(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4)}, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert torch.equal(read_snapshot(path, digest).tensors()["a"], torch.ones(4))
    with pytest.raises(ModelInvalid, match="sha256"):
        read_snapshot(path, "0" * 64)
    path.write_bytes(b"short")
    with pytest.raises(ModelInvalid, match=r"model\.safetensors"):
        read_snapshot(path, None)
