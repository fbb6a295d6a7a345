"""Files of a Hugging Face model directory: config.json, tokenizer.json, and weights in one or several files.

Invariants:
- Several files have an index, `model.safetensors.index.json`, which alone decides what is read; without it, the weights
  are in `model.safetensors`. No parameter is in two files.
- Here only headers are read, and nothing depends on the architecture: whoever computes the model checks it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from headrace.policies.errors import ModelInvalid
from headrace.policies.tokens.model_keys import read_vocabulary_size
from headrace.policies.tokens.tokenizer import ChatTokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Shapes = Mapping[str, tuple[int, ...]]
_MISSING: Final = {
    "config.json": "set it to a Hugging Face model directory",
    "tokenizer.json": "let transformers write it: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
    "tokenizer_config.json": "copy it from the model's page; it names the tokens that end a turn",
}
_LFS: Final = b"version https://git-lfs"


def weight_files(model_dir: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a model, in order of their names. Raises ModelInvalid if there are none, or if
    the index is invalid or names a file that is missing."""
    index = model_dir / INDEX
    if not index.is_file():
        if not (model_dir / WEIGHTS).is_file():
            raise ModelInvalid(f"{model_dir} has no {WEIGHTS} and no {INDEX}; download the model again")
        return (model_dir / WEIGHTS,)
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelInvalid(f"{index}: not an index of weights (an object with weight_map): {error!r}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (model_dir / name).is_file():
            raise ModelInvalid(f"{index} names {name!r}, which is not a file of {model_dir}; download the model again")
    if not names:
        raise ModelInvalid(f"{index}: weight_map is empty; download the model again")
    return tuple(model_dir / name for name in names)


def read_shapes(model_dir: Path) -> Shapes:
    """Return the shape of every parameter. Raises ModelInvalid naming the file."""
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(model_dir):
        try:
            with safe_open(str(path), framework="numpy") as file:
                found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            reason = f"not a readable safetensors file: {error}"
            if isinstance(error, SafetensorError) and _is_pointer(path):
                reason = "a pointer of Git LFS, not the weights; run `git lfs pull` in its folder"
            raise ModelInvalid(f"{path}: {reason}") from error
        if twice := sorted(found.keys() & shapes.keys()):
            raise ModelInvalid(f"{path}: {twice[0]} is in another weight file of the model too")
        shapes |= found
    return shapes


def _is_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_LFS)) == _LFS


def check_model_files(model_dir: Path, *, weights: bool = True) -> None:
    """Raise ModelInvalid (TokenizerMismatch if the tokenizer does not match) if a file of the directory, those of the
    weights only if `weights`, is missing or unreadable. The message gives file, reason and fix on one line."""
    for name in _MISSING:
        if not (model_dir / name).is_file():
            raise ModelInvalid(f"model.path: {model_dir} has no {name}; {_MISSING[name]}")
    try:
        files = weight_files(model_dir) if weights else ()
    except ModelInvalid as error:
        raise ModelInvalid(f"model.path: {error}") from error
    for path in (model_dir / "config.json", model_dir / "tokenizer.json", *files):
        if not os.access(path, os.R_OK):
            raise ModelInvalid(f"model.path: {path} cannot be read; check its permissions")
    read_vocabulary_size(model_dir)
    ChatTokenizer(model_dir)
    if weights:
        read_shapes(model_dir)
