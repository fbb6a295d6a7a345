"""Whether a snapshot is of the model an engine serves, before a byte is sent.

Invariants:
- Only headers are read. An engine whose model directory is not readable from here cannot be checked: it checks itself.
- Names and shapes must be the same on both sides; dtypes may differ among floating-point ones, which engines convert.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.policies.errors import ModelInvalid

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

HEADER_LIMIT_BYTES = 100 * 1024 * 1024
"""safetensors' own limit."""
FLOATING = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
TIED_HEAD = "lm_head.weight"
NAMED = 3
"""Parameters that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorForm:
    """A parameter's torch dtype name and shape."""

    dtype: str
    shape: tuple[int, ...]


def check_fits(snapshot: Mapping[str, TensorForm], model_dir: Path) -> None:
    """Raises ModelInvalid, naming both sides, when the engine's model directory holds another model; also when its
    files are damaged. Nothing is checked where the directory cannot be read."""
    if not (model_dir / "config.json").is_file():
        return
    served = read_forms(model_dir)
    if _read_object(model_dir / "config.json").get("tie_word_embeddings"):
        # A tied head is the embedding once more: some files hold it, some do not.
        snapshot = without_head(snapshot)
        served = without_head(served)
    _check_names(snapshot, served, model_dir)
    for name, form in snapshot.items():
        if form.shape != served[name].shape:
            raise ModelInvalid(
                f"{name}: the snapshot has shape {form.shape}, the engine's model {model_dir} {served[name].shape}"
            )
        if served[name].dtype not in FLOATING.values():
            raise ModelInvalid(
                f"{name}: the snapshot is {form.dtype}, the engine's model {model_dir} {served[name].dtype}: only "
                "floating-point weights are converted; serve the model unquantised"
            )


def _check_names(snapshot: Mapping[str, TensorForm], served: Mapping[str, TensorForm], model_dir: Path) -> None:
    if missing := sorted(served.keys() - snapshot.keys()):
        raise ModelInvalid(f"the snapshot lacks {_listed(missing)}, which the engine's model {model_dir} has")
    if unknown := sorted(snapshot.keys() - served.keys()):
        raise ModelInvalid(f"the snapshot has {_listed(unknown)}, which the engine's model {model_dir} lacks")


def _listed(names: list[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def without_head(forms: Mapping[str, TensorForm]) -> dict[str, TensorForm]:
    return {name: form for name, form in forms.items() if name != TIED_HEAD}


def read_forms(model_dir: Path) -> dict[str, TensorForm]:
    """Every parameter in the safetensors files of a directory. Raises ModelInvalid naming the file."""
    return {name: form for path in _files(model_dir) for name, form in _read_header(path)}


def _files(model_dir: Path) -> list[Path]:
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        return sorted({model_dir / name for name in _read_object(index).get("weight_map", {}).values()})
    return [model_dir / "model.safetensors"]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelInvalid(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelInvalid(f"{path}: not one JSON object")
    return content


def _read_header(path: Path) -> Iterable[tuple[str, TensorForm]]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > HEADER_LIMIT_BYTES:
                raise ModelInvalid(f"{path}: its header would have {length} bytes")
            header = json.loads(file.read(length))
        return [
            (name, TensorForm(dtype=FLOATING.get(entry["dtype"], entry["dtype"]), shape=tuple(entry["shape"])))
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelInvalid(f"{path}: not a safetensors file: {error!r}") from error
