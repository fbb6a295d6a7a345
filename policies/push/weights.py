"""Splits a snapshot's safetensors files into buckets, and computes checksums of tensors.

Invariants:
- The plan of buckets depends only on the files' headers and `bucket_bytes`, so receivers can get it in advance.
- A bucket never ends inside a module of a layer: some of SGLang's loaders fuse two of its parameters (`q_a_proj` and
  `kv_a_proj_with_mqa`), keep the first of them for one call only, and would leave the old weights without an error.
- A bucket consists of the bytes of its tensors, concatenated in the order of `names` (SGLang's `flattened_bucket`).
  Tensors are read into memory in the order in which the embedded engine stores them, so that a bucket is a slice of
  that memory, and of the engine's, and need not be copied. Other engines accept any order.
- A checksum is the 128-bit XXH3 of a tensor's bytes in the dtype in which it was sent; it does not depend on the
  buckets. It detects accidents; the SHA-256 of a snapshot's file detects that the file was replaced.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash

from headrace.policies.errors import ModelInvalid
from headrace.policies.models.qwen_config import storage_place
from headrace.policies.tensors import Bucket, TensorSpec, read_specs, require_pushable

if TYPE_CHECKING:
    from torch import Tensor


DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
READ_BYTES = 16 * 1024 * 1024
# Converted and summed in pieces that stay in the processor's cache.
CHECKSUM_ELEMENTS = 256 * 1024
_MODULE = re.compile(r"(?:.+\.)?(?:layers|blocks)\.\d+\.(?:.+\.experts\.\d+|[^.]+)(?=\.)")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightSnapshot:
    """Snapshot loaded into memory: its tensors in the order of `specs`, and their bytes (uint8) without gaps."""

    specs: Mapping[str, TensorSpec]
    data: Tensor

    def flat(self, bucket: Bucket) -> Tensor:
        """Return a view of the bucket's bytes."""
        start = self._starts()[bucket.names[0]]
        return self.data[start : start + bucket.size_bytes]

    def tensors(self) -> dict[str, Tensor]:
        (whole,) = plan_buckets(self.specs, self.data.numel())
        return dict(unflatten(whole, self.flat(whole)))

    def checksums(self) -> dict[str, str]:
        """Return the checksum of every tensor, by name."""
        starts = self._starts()
        return {
            name: xxhash.xxh3_128_hexdigest(self.data[starts[name] : starts[name] + spec.size_bytes].numpy().data)
            for name, spec in self.specs.items()
        }

    def _starts(self) -> dict[str, int]:
        ends = accumulate(spec.size_bytes for spec in self.specs.values())
        return {name: end - spec.size_bytes for (name, spec), end in zip(self.specs.items(), ends, strict=True)}


def plan_buckets(specs: Mapping[str, TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Split tensors, in an order of `arranged`, into buckets of at most `bucket_bytes` (a larger module has a bucket of
    its own)."""
    buckets: list[dict[str, TensorSpec]] = []
    filled = 0
    for _, names in groupby(specs, key=module_of):
        module = {name: specs[name] for name in names}
        size_bytes = sum(spec.size_bytes for spec in module.values())
        if not buckets or filled + size_bytes > bucket_bytes:
            buckets.append({})
            filled = 0
        buckets[-1] |= module
        filled += size_bytes
    return tuple(map(Bucket.of, buckets))


def module_of(name: str) -> str:
    """Return the module of a layer to which a parameter belongs, such as `model.layers.3.self_attn` or
    `model.layers.3.mlp.experts.7`; outside of layers, the parameter itself."""
    found = _MODULE.match(name)
    return name if found is None else found[0]


def arranged(names: Iterable[str]) -> list[str]:
    """Return the names in the storage order of the embedded engine, those of one module next to each other."""
    ordered = sorted(names, key=storage_place)
    places: dict[str, int] = {}
    for name in ordered:
        places.setdefault(module_of(name), len(places))
    return sorted(ordered, key=lambda name: places[module_of(name)])


def split(flat: Tensor, bucket: Bucket) -> list[Tensor]:
    """Return the bytes of each tensor of a bucket."""
    return list(torch.split(flat, [spec.size_bytes for spec in bucket.specs]))


def unflatten(bucket: Bucket, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a received bucket; they share its memory where alignment allows."""
    for name, spec, piece in zip(bucket.names, bucket.specs, split(flat, bucket), strict=True):
        dtype = DTYPES[spec.dtype]
        aligned = piece if piece.storage_offset() % dtype.itemsize == 0 else piece.clone()
        yield name, aligned.view(dtype).view(spec.shape)


def checksum(tensor: Tensor, dtype: torch.dtype) -> str:
    """Return the hexadecimal checksum of a contiguous tensor's bytes in `dtype`."""
    digest = xxhash.xxh3_128()
    for piece in torch.split(tensor.view(-1), CHECKSUM_ELEMENTS):
        digest.update(piece.to(dtype).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_snapshot(files: Mapping[Path, str | None], memory: Tensor | None = None) -> WeightSnapshot:
    """Read a snapshot's files, each with its expected SHA-256, into `memory` if that has the right size. Raises
    ModelInvalid when a file is unreadable or has another SHA-256, or a parameter is in two files."""
    headers = {path: read_specs(path) for path in files}
    held: dict[str, TensorSpec] = {}
    for path, specs in headers.items():
        require_pushable(path, specs)
        if twice := sorted(specs.keys() & held.keys()):
            raise ModelInvalid(f"{path}: {twice[0]} is in another file of the snapshot too")
        held |= specs
    total_bytes = sum(spec.size_bytes for spec in held.values())
    if memory is None or memory.numel() != total_bytes:
        memory = torch.empty(total_bytes, dtype=torch.uint8)
    snapshot = WeightSnapshot(specs={name: held[name] for name in arranged(held)}, data=memory)
    places = dict(zip(snapshot.specs, split(memory, Bucket.of(snapshot.specs)), strict=True))

    def read(path: Path) -> None:
        own_bytes = sum(spec.size_bytes for spec in headers[path].values())
        try:
            # The tensors fill the rest of the file without gaps: the format requires that, and the library checks it.
            header = torch.empty(path.stat().st_size - own_bytes, dtype=torch.uint8)
            digest = read_pieces(path, [header, *(places[name] for name in headers[path])])
        except OSError as error:
            raise ModelInvalid(f"{path}: {error}") from error
        if files[path] not in (None, digest):
            raise ModelInvalid(f"{path}: its sha256 is not the snapshot's: it was overwritten or truncated")

    # Several at once: hashing one is slower than reading it.
    with ThreadPoolExecutor(max_workers=min(len(files) or 1, os.cpu_count() or 1)) as readers:
        list(readers.map(read, files))
    return snapshot


def read_pieces(path: Path, pieces: Sequence[Tensor]) -> str:
    """Fill the pieces with a file's bytes, one after another, and return the file's SHA-256, which is computed in a
    thread while the next bytes are read."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(max_workers=1) as hashing:
        for piece in pieces:
            view, filled = piece.numpy().data, 0
            while filled < len(view):
                count = file.readinto(view[filled : filled + READ_BYTES])
                if not count:
                    raise ModelInvalid(f"{path}: it was truncated while being read")
                hashing.submit(digest.update, view[filled : filled + count])
                filled += count
    return digest.hexdigest()
