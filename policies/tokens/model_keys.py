"""Keys of a model's config.json that describe its language model. Needs no torch.

Invariant: a nested `text_config`, as multimodal models have it, counts before the top level; null values do not count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.policies.errors import ModelInvalid


def language_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config.json, with those of a nested `text_config` on top."""
    nested = raw.get("text_config")
    inner = nested.items() if isinstance(nested, dict) else ()
    return {**raw, **{key: value for key, value in inner if value is not None}}


def read_language_keys(path: Path) -> dict[str, Any]:
    """Read a config.json. Raises ModelInvalid naming the file."""
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelInvalid(f"{path}: unreadable or not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelInvalid(f"{path}: must contain one JSON object")
    return language_keys(raw)


def read_vocabulary_size(model_dir: Path) -> int:
    """Return the number of token ids of a model, `vocab_size` in its config.json. Raises ModelInvalid naming the
    file."""
    path = model_dir / "config.json"
    found = read_language_keys(path).get("vocab_size")
    if found is None:
        raise ModelInvalid(f"{path}: vocab_size is missing, at the top level as in text_config")
    if not isinstance(found, int) or found < 1:
        raise ModelInvalid(f"{path}: vocab_size must be a positive whole number, found {found!r}")
    return found
