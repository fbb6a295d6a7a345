"""Verification of a snapshot's directory before engines read it, and the checksums that they must report afterwards.

Invariants:
- Every file is read completely and compared with its SHA-256; no file is held in memory. Several files are read at
  once, because hashing one of them is slower than reading it.
- Checksums are those of `weights.py`: they depend on a tensor's bytes only, not on the files or their order.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import xxhash

from headrace.policies.errors import ModelInvalid
from headrace.policies.models.model_files import INDEX, weight_files
from headrace.policies.tensors import TensorSpec, read_specs, require_pushable


class Hash(Protocol):
    """Hash that takes bytes piece by piece."""

    def update(self, data: bytes, /) -> None: ...


READ_BYTES = 4 * 1024 * 1024
WEIGHTS_SUFFIX = ".safetensors"

Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Parameters of a verified directory, their checksums (empty if none were requested), and the stamp of each file,
    from which later changes are noticed."""

    specs: Mapping[str, TensorSpec]
    checksums: Mapping[str, str]
    stamps: Mapping[str, Stamp]


def stamp_of(status: os.stat_result) -> Stamp:
    """Return inode, size in bytes and modification time in nanoseconds of a file."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def inspect_directory(directory: Path, digests: Mapping[str, str], *, checksums: bool) -> Inspection:
    """Read and verify all files of a snapshot's directory. Raises ModelInvalid when a file is missing, damaged or not
    the snapshot's, or when a parameter is in two files."""
    try:
        present = {file.name for file in directory.iterdir()}
    except OSError as error:
        raise ModelInvalid(f"{directory}: {error}") from error
    # An engine that loads every safetensors file would load these too.
    unknown = sorted(name for name in present - digests.keys() if name.endswith(WEIGHTS_SUFFIX))
    if missing := sorted(digests.keys() - present):
        raise ModelInvalid(f"{directory}: {missing[0]} is missing ({len(missing)} of {len(digests)} files in all)")
    if unknown:
        raise ModelInvalid(f"{directory}: {unknown[0]} is not part of the snapshot; remove it")
    specs: dict[str, TensorSpec] = {}
    sums: dict[str, str] = {}
    stamps: dict[str, Stamp] = {}
    with ThreadPoolExecutor(max_workers=min(len(digests) or 1, os.cpu_count() or 1)) as readers:
        found = readers.map(lambda name: inspect_file(directory / name, digests[name], checksums=checksums), digests)
        for name, file in zip(digests, found, strict=True):
            if twice := sorted(specs.keys() & file.specs.keys()):
                raise ModelInvalid(f"{directory}: {twice[0]} is in two files, one of them {name}")
            specs |= file.specs
            sums |= file.checksums
            stamps |= file.stamps
    if not specs:
        raise ModelInvalid(f"{directory} contains no tensors")
    for path in weight_files(directory):
        if path.name not in digests:
            raise ModelInvalid(f"{directory / INDEX} names {path.name}, which is not part of the snapshot")
    return Inspection(specs=specs, checksums=sums, stamps=stamps)


def inspect_file(path: Path, sha256: str, *, checksums: bool) -> Inspection:
    """Read one file. Raises ModelInvalid when it is unreadable or has another SHA-256."""
    specs = read_specs(path) if path.name.endswith(WEIGHTS_SUFFIX) else {}
    require_pushable(path, specs)
    digest = hashlib.sha256()
    sums: dict[str, str] = {}
    try:
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            # The tensors fill the rest of a safetensors file without gaps; other files have no tensors.
            rest_bytes = status.st_size - sum(spec.size_bytes for spec in specs.values())
            read_exactly(file, rest_bytes, digest)
            for name, spec in specs.items():
                tensor = xxhash.xxh3_128()
                read_exactly(file, spec.size_bytes, digest, *([tensor] if checksums else []))
                if checksums:
                    sums[name] = tensor.hexdigest()
    except OSError as error:
        raise ModelInvalid(f"{path}: {error}") from error
    if digest.hexdigest() != sha256:
        raise ModelInvalid(f"{path}: its sha256 is not the snapshot's: it was overwritten or truncated")
    return Inspection(specs=specs, checksums=sums, stamps={path.name: stamp_of(status)})


def read_exactly(file: BinaryIO, size_bytes: int, *hashes: Hash) -> None:
    """Read this number of bytes into the hashes. Raises OSError if the file ends before."""
    left = size_bytes
    while left > 0:
        piece = file.read(min(left, READ_BYTES))
        if not piece:
            raise OSError("it was truncated while being read")
        for each in hashes:
            each.update(piece)
        left -= len(piece)
