"""Specifications of tensors (dtype and shape) as in the header of a safetensors file. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.policies.errors import ModelInvalid

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per element of the dtypes that can be pushed."""
FILE_DTYPES: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Dtype and shape of a tensor. `dtype` is torch's name without the prefix; a dtype that cannot be pushed keeps the
    name that the file uses (`I8`)."""

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

    @classmethod
    def of(cls, specs: Mapping[str, TensorSpec]) -> Bucket:
        """Return the bucket of these tensors, in their order."""
        return cls(
            names=tuple(specs),
            dtypes=tuple(spec.dtype for spec in specs.values()),
            shapes=tuple(spec.shape for spec in specs.values()),
        )

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(dtype=dtype, shape=shape) for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        )

    @property
    def size_bytes(self) -> int:
        return sum(spec.size_bytes for spec in self.specs)


def require_pushable(path: Path, specs: Mapping[str, TensorSpec]) -> None:
    """Raise ModelInvalid naming the file if it has a tensor that cannot be pushed."""
    for name, spec in specs.items():
        if not spec.pushable:
            raise ModelInvalid(
                f"{path}: {name} has dtype {spec.dtype}, which cannot be pushed; convert it to one of "
                f"{sorted(FILE_DTYPES)}"
            )


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
