"""Recipes with machine files and `--set` overrides: which file sets each key, and what a run resolves to.

Invariants:
- Later files win over earlier ones, and `--set` over all files. A table is merged key by key; a list is replaced.
- Two machine files that set one key to different values contradict each other, and are refused.
- Paths are relative to the file that sets them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.actors.derivation import clocks
from headrace.actors.errors import ConfigError
from headrace.actors.run.config import RunConfig, Tell, absolute_paths, apply_override, read_recipe, resolve
from headrace.buffer.primitives.sections import overlaid

SET = "--set"
DEFAULT = "default"


@dataclass(slots=True, kw_only=True)
class LayeredRecipe:
    """A recipe's document after all files and overrides. `origins` maps dotted keys to the name of the file that set
    them, or to `--set`."""

    document: dict[str, Any]
    origins: dict[str, str] = field(default_factory=dict)


def layered(recipe: Path, on: Sequence[Path], overrides: Sequence[str]) -> LayeredRecipe:
    """Read a recipe, the machine files `on`, and the overrides. Raises ConfigError."""
    merged = LayeredRecipe(document={})
    _merge(merged, read_recipe(recipe, ()), recipe.name)
    by_machine: dict[str, tuple[Path, object]] = {}
    for path in on:
        document = absolute_paths(read_recipe(path, ()), path)
        for key, value in leaves(document):
            earlier, other = by_machine.setdefault(key, (path, value))
            if other != value:
                raise ConfigError(
                    f"--on {path}: {key} is {value!r}, but {earlier} sets it to {other!r}; leave one of the files out, "
                    f"or decide with --set {key}=VALUE in place of both"
                )
        _merge(merged, document, path.name)
    for override in overrides:
        apply_override(merged.document, override)
        merged.origins[override.partition("=")[0].strip()] = SET
    return merged


def load_layered(
    recipe: Path, on: Sequence[Path], overrides: Sequence[str], run_dir: Path, tell: Tell = lambda _: None
) -> RunConfig:
    """Read and validate a recipe with machine files and overrides for a run in `run_dir`. Raises ConfigError."""
    return resolve(layered(recipe, on, overrides).document, recipe, run_dir, tell)


def described(config: RunConfig, origins: Mapping[str, str]) -> Iterator[tuple[str, object, str]]:
    """Yield the keys of a resolved run with their values and origins, in the order of the configuration."""
    for key, value in leaves(config.model_dump(mode="json")):
        above = (".".join(key.split(".")[:depth]) for depth in range(len(key.split(".")), 0, -1))
        rule = f"derived: {clocks.DERIVED[key][1]}" if key in clocks.DERIVED else DEFAULT
        yield key, value, next((origins[name] for name in above if name in origins), rule)


def leaves(document: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and values of a document, without its tables."""
    for name, value in document.items():
        key = f"{above}.{name}" if above else name
        if isinstance(value, dict):
            yield from leaves(value, key)
        else:
            yield key, value


def _merge(merged: LayeredRecipe, document: Mapping[str, Any], origin: str) -> None:
    merged.document = overlaid(merged.document, document)
    merged.origins |= {key: origin for key, _ in leaves(document)}
