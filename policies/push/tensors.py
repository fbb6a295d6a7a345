"""Specifications of tensors (dtype and shape) as in the header of a safetensors file. Needs no torch.

Invariants:
- Rank 0 is the sender; the engines follow in order, each with as many consecutive ranks as it has processes.
- Every engine gets the same world size, computed from the numbers of processes that the engines report.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.policies.errors import ModelInvalid

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from headrace.policies.engine import EngineId

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per element of the dtypes that can be pushed."""
FILE_DTYPES: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Dtype and shape of a tensor. `dtype` is torch's name without the prefix; a dtype that cannot be pushed has the
    file's name (`I8`)."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def pushable(self) -> bool:
        return self.dtype in ITEM_BYTES

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Description of a bucket, which precedes its bytes. `dtypes` are torch's names without the prefix."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(dtype=dtype, shape=shape) for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        )

    @property
    def size_bytes(self) -> int:
        return sum(spec.size_bytes for spec in self.specs)


def read_specs(path: Path) -> dict[str, TensorSpec]:
    """Return the tensors of a safetensors file, in the order of their bytes. Raises ModelInvalid naming the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            return {
                name: TensorSpec(
                    dtype=FILE_DTYPES.get(tensor.get_dtype(), tensor.get_dtype()), shape=tuple(tensor.get_shape())
                )
                for name, tensor in slices.items()
            }
    except (OSError, SafetensorError) as error:
        raise ModelInvalid(f"{path}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayout:
    """Ranks of a group; `offsets` is the first rank of each engine."""

    world_size: int
    offsets: Mapping[EngineId, int]


def group_name(push_id: str, wave: int, attempt: int, shard: int) -> str:
    """Return the name of the group for one shard and one attempt of one wave."""
    return f"headrace-{push_id}-{wave}-{attempt}-{shard}"


def lay_out(ranks: Iterable[tuple[EngineId, int]]) -> GroupLayout:
    """Return the layout of a sender and these engines, given with their numbers of processes."""
    offsets: dict[EngineId, int] = {}
    following = 1
    for engine_id, count in ranks:
        offsets[engine_id] = following
        following += count
    return GroupLayout(world_size=following, offsets=offsets)
