"""Buckets carry every tensor once and unchanged, whatever their size."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from headrace.policies.errors import ModelInvalid
from headrace.policies.push.weights import arranged, checksum, module_of, plan_buckets, read_snapshot, unflatten
from headrace.policies.tensors import TensorSpec
from support.parameter_tables import TABLED_MODELS, recorded

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
    snapshot = read_snapshot({path: None})
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


PARTS = ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", "self_attn.o_proj.weight", "norm.weight")
PARTS += tuple(
    f"mlp.{name}.weight" for name in ("gate", "experts.0.up_proj", "experts.0.down_proj", "experts.1.up_proj")
)


@settings(max_examples=60, deadline=None)
@given(
    st.permutations([f"model.layers.{layer}.{part}" for layer in range(3) for part in PARTS] + ["model.norm.weight"]),
    st.integers(1, 20_000),
)
def test_a_bucket_never_ends_inside_a_module(names: list[str], bucket_bytes: int) -> None:
    specs = {name: TensorSpec(dtype="bfloat16", shape=(len(name), 8)) for name in names}
    check_borders({name: specs[name] for name in arranged(names)}, bucket_bytes)


@pytest.mark.parametrize("model", TABLED_MODELS)
@pytest.mark.parametrize("kind", ["exported", "published"])
def test_modules_of_published_models_are_sent_whole(model: str, kind: Any) -> None:
    specs = recorded(model, kind)
    check_borders({name: specs[name] for name in arranged(sorted(specs))}, 32 << 20)


def check_borders(specs: dict[str, TensorSpec], bucket_bytes: int) -> None:
    """Every parameter is in one bucket, every module too, and only a module alone exceeds the size."""
    buckets = plan_buckets(specs, bucket_bytes)
    assert [name for bucket in buckets for name in bucket.names] == list(specs)
    found: dict[str, set[int]] = {}
    for index, bucket in enumerate(buckets):
        for name in bucket.names:
            # Written here once more: everything below the module of a layer, of which an expert is one.
            module = re.match(r".*\blayers\.\d+\.(?:mlp\.experts\.\d+|[a-z_0-9]+)\.", name)
            found.setdefault(name if module is None else module[0], set()).add(index)
    assert all(len(places) == 1 for places in found.values())
    for bucket in buckets:
        assert bucket.size_bytes <= bucket_bytes or len({module_of(name) for name in bucket.names}) == 1


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
        read_snapshot({tmp_path / "model.safetensors": None})


def test_snapshot_memory_is_reused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4)}, path)
    first = read_snapshot({path: None})
    save_file({"a": torch.full((4,), 2.0)}, path)
    second = read_snapshot({path: None}, first.data)
    assert second.data is first.data
    assert torch.equal(second.tensors()["a"], torch.full((4,), 2.0))


def test_a_snapshot_file_must_match_its_expected_digest(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4)}, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert torch.equal(read_snapshot({path: digest}).tensors()["a"], torch.ones(4))
    with pytest.raises(ModelInvalid, match="sha256"):
        read_snapshot({path: "0" * 64})
    path.write_bytes(b"short")
    with pytest.raises(ModelInvalid, match=r"model\.safetensors"):
        read_snapshot({path: None})
