"""Whether a snapshot is of the model an engine serves, before a byte is sent.

Invariants:
- Only headers are read. An engine whose model directory is not readable from here cannot be checked: it checks itself.
- Names and shapes must be the same on both sides; dtypes may differ among floating-point ones, which engines convert.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from headrace.policies.errors import ModelInvalid
from headrace.policies.push.tensors import TensorSpec, read_specs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TIED_HEAD = "lm_head.weight"
NAMED = 3
"""Parameters that a message names."""


def check_fits(snapshot: Mapping[str, TensorSpec], model_dir: Path) -> None:
    """Raises ModelInvalid, naming both sides, when the engine's model directory holds another model; also when its
    files are damaged. Nothing is checked where the directory cannot be read."""
    try:
        if not (model_dir / "config.json").is_file():
            return
    except OSError:
        # Somebody else's engine, and a directory of theirs.
        return
    served = read_model_specs(model_dir)
    if _read_object(model_dir / "config.json").get("tie_word_embeddings"):
        # A tied head is the embedding once more: some files hold it, some do not.
        snapshot = without_head(snapshot)
        served = without_head(served)
    _check_names(snapshot, served, model_dir)
    for name, spec in snapshot.items():
        if spec.shape != served[name].shape:
            raise ModelInvalid(
                f"{name}: the snapshot has shape {spec.shape}, the engine's model {model_dir} {served[name].shape}"
            )
        if not served[name].pushable:
            raise ModelInvalid(
                f"{name}: the snapshot is {spec.dtype}, the engine's model {model_dir} {served[name].dtype}: only "
                "floating-point weights are converted; serve the model unquantised"
            )


def _check_names(snapshot: Mapping[str, TensorSpec], served: Mapping[str, TensorSpec], model_dir: Path) -> None:
    if missing := sorted(served.keys() - snapshot.keys()):
        raise ModelInvalid(f"the snapshot lacks {_listed(missing)}, which the engine's model {model_dir} has")
    if unknown := sorted(snapshot.keys() - served.keys()):
        raise ModelInvalid(f"the snapshot has {_listed(unknown)}, which the engine's model {model_dir} lacks")


def _listed(names: list[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def without_head(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {name: spec for name, spec in specs.items() if name != TIED_HEAD}


def read_model_specs(model_dir: Path) -> dict[str, TensorSpec]:
    """Every parameter in the safetensors files of a directory. Raises ModelInvalid naming the file."""
    return {name: spec for path in _files(model_dir) for name, spec in read_specs(path).items()}


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
