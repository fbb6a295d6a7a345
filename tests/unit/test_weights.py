"""Buckets carry every tensor once and unchanged, whatever their size."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from headrace.policies.errors import ModelInvalid
from headrace.policies.push.weights import checksums, flatten, plan_buckets, read_snapshot, unflatten

if TYPE_CHECKING:
    from pathlib import Path

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=12), st.integers(1, 400))
def test_round_trip(kinds: list[tuple[tuple[int, ...], torch.dtype]], bucket_bytes: int) -> None:
    tensors = {f"t{index}": torch.randn(shape).to(dtype) for index, (shape, dtype) in enumerate(kinds)}
    received: dict[str, torch.Tensor] = {}
    buckets = plan_buckets(tensors, bucket_bytes)
    for bucket in buckets:
        assert bucket.size_bytes <= bucket_bytes or len(bucket.names) == 1
        flat = flatten(bucket, tensors)
        assert flat.numel() == bucket.size_bytes
        received |= unflatten(bucket, flat)
    assert list(received) == list(tensors)
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)
    assert checksums(received) == checksums(tensors)


def test_checksum_sees_one_bit() -> None:
    tensor = torch.zeros(3)
    other = tensor.clone()
    other[1] = 1e-45
    assert checksums({"a": tensor}) != checksums({"a": other})


def test_integer_weights_are_refused() -> None:
    with pytest.raises(ModelInvalid, match="int64"):
        plan_buckets({"a": torch.zeros(2, dtype=torch.int64)}, 10)


def test_snapshot_must_be_the_file_that_was_meant(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4)}, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert torch.equal(read_snapshot(path, digest)["a"], torch.ones(4))
    with pytest.raises(ModelInvalid, match="sha256"):
        read_snapshot(path, "0" * 64)
    path.write_bytes(b"short")
    with pytest.raises(ModelInvalid, match=r"model\.safetensors"):
        read_snapshot(path, None)
