"""Flattened buckets of a safetensors snapshot, and checksums of tensors.

Invariants:
- The plan of buckets depends on the file's header and `bucket_bytes` alone, so every receiver can be told it before
  a byte is sent.
- A bucket is the bytes of its tensors one after another, in the order of `names` (SGLang's `flattened_bucket`).
- A checksum is SHA-256 over a tensor's bytes in the dtype it was sent in; it does not depend on how buckets are cut.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.policies.errors import ModelInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What the receiver is told before the transfer. `dtypes` are torch names without the prefix."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def size_bytes(self) -> int:
        return sum(tensor_bytes(dtype, shape) for dtype, shape in zip(self.dtypes, self.shapes, strict=True))


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32. Raises ModelInvalid for a dtype that is not pushed."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelInvalid(f"weights of dtype {name} cannot be pushed; convert them to one of {sorted(DTYPES)}")
    return name


def plan_buckets(tensors: Mapping[str, Tensor], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cut named tensors, in their order, into buckets of at most `bucket_bytes` (a larger tensor has a bucket of its
    own)."""
    buckets: list[Bucket] = []
    names: list[str] = []
    filled = 0
    for name, tensor in tensors.items():
        size = tensor_bytes(dtype_name(tensor.dtype), tensor.shape)
        if names and filled + size > bucket_bytes:
            buckets.append(describe(names, tensors))
            names, filled = [], 0
        names.append(name)
        filled += size
    return (*buckets, describe(names, tensors)) if names else tuple(buckets)


def describe(names: Sequence[str], tensors: Mapping[str, Tensor]) -> Bucket:
    return Bucket(
        names=tuple(names),
        dtypes=tuple(dtype_name(tensors[name].dtype) for name in names),
        shapes=tuple(tuple(tensors[name].shape) for name in names),
    )


def flatten(bucket: Bucket, tensors: Mapping[str, Tensor]) -> Tensor:
    """The bucket's bytes as one uint8 tensor."""
    return torch.cat([tensors[name].contiguous().flatten().view(torch.uint8) for name in bucket.names])


def unflatten(bucket: Bucket, flat: Tensor) -> dict[str, Tensor]:
    """The tensors of a received bucket; they share its memory where alignment allows."""
    tensors: dict[str, Tensor] = {}
    start = 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        end = start + tensor_bytes(dtype, shape)
        piece = flat[start:end]
        aligned = piece if start % DTYPES[dtype].itemsize == 0 else piece.clone()
        tensors[name] = aligned.view(DTYPES[dtype]).view(shape)
        start = end
    return tensors


def checksum(tensor: Tensor) -> str:
    """SHA-256 of the tensor's bytes, hexadecimal."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: checksum(tensor) for name, tensor in tensors.items()}


def read_snapshot(path: Path, sha256: str | None) -> dict[str, Tensor]:
    """The tensors of a snapshot file, in file order. Raises ModelInvalid when it is unreadable or not the file that
    was meant."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        data = path.read_bytes()
        if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
            raise ModelInvalid(f"{path}: its sha256 is not the snapshot's: it was overwritten or cut")
        tensors: dict[str, Tensor] = load(data)
    except (OSError, SafetensorError) as error:
        raise ModelInvalid(f"{path}: {error}") from error
    return tensors
