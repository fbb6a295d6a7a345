"""Checks that engine and learner can load a model directory, without torch.

Invariant: only the header of the weights is read; a directory that passes has every tensor of its config, in the shape
that the config defines.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from headrace.policies.errors import ModelInvalid
from headrace.policies.models.qwen3_config import Qwen3Config
from headrace.policies.tokens.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from pathlib import Path

FILES = ("config.json", "model.safetensors", "tokenizer.json")


def check_model_files(directory: Path) -> None:
    """Raise ModelInvalid (TokenizerMismatch if the tokenizer does not fit), with file, reason and fix on one line, if
    the directory cannot be loaded."""
    for name in FILES:
        path = directory / name
        if not path.is_file():
            raise ModelInvalid(f"model.path: {directory} has no {name}; set it to a Hugging Face model directory")
        if not os.access(path, os.R_OK):
            raise ModelInvalid(f"model.path: {path} cannot be read; check its permissions")
    config = Qwen3Config.read(directory / "config.json")
    ChatTokenizer(directory)
    check_shapes(directory / "model.safetensors", config.shapes())


def check_shapes(path: Path, expected: dict[str, tuple[int, ...]]) -> None:
    """Compare a safetensors header with the expected names and shapes. Raises ModelInvalid."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelInvalid(f"{path}: not a readable safetensors file: {error}") from error
    for name, shape in expected.items():
        if found.get(name) != shape:
            raise ModelInvalid(f"{path}: {name} is {found.get(name, 'missing')}, config.json requires {shape}")
