"""Recipes with machine files and `--set` overrides: which file sets each key, and what a run resolves to.

Invariants:
- Later files win over earlier ones, and `--set` over all files. A table is merged key by key; a list is replaced.
- A recipe's own keys are those of its miniature. With a machine file, the tables below `[published]` are merged over
  them, and the keys in its list `without` are left out, unless a machine file has `published = false`.
- Two machine files that set one key to different values contradict each other, and are refused.
- What a machine file cannot know is in its table `[needs]`, with an example of each value. All missing keys are named
  at once.
- Paths are relative to the file that sets them.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.actors.derivation import clocks
from headrace.actors.derivation.rules import unused
from headrace.actors.errors import ConfigError
from headrace.actors.run.config import PUBLISHED, RunConfig, Tell, absolute_paths, apply_override, read_file, resolve
from headrace.buffer.primitives.sections import overlaid

SET = "--set"
DEFAULT = "default"
NEEDS = "needs"


@dataclass(slots=True, kw_only=True)
class LayeredRecipe:
    """A recipe's document after all files and overrides. `origins` maps dotted keys to the name of the file that set
    them, or to `--set`."""

    document: dict[str, Any]
    origins: dict[str, str] = field(default_factory=dict)


def layered(
    recipe: Path, on: Sequence[Path], overrides: Sequence[str], *, decided: tuple[str, ...] = ()
) -> LayeredRecipe:
    """Read a recipe, the machine files `on`, and the overrides. Machine files need no keys that begin with one of
    `decided`, which are set elsewhere. Raises ConfigError."""
    merged, document = LayeredRecipe(document={}), read_file(recipe)
    machines = {path: absolute_paths(read_file(path), path) for path in on}
    published, needs = _popped(document, PUBLISHED, recipe, {}), dict[str, Any]()
    _merge(merged, document, recipe.name)
    wanted = [_popped(machine, PUBLISHED, path, True) for path, machine in machines.items()]
    if wanted and all(wanted):
        for key in published.get("without", ()):
            *tables_above, name = key.split(".")
            table: Any = merged.document
            for above in tables_above:
                table = table.get(above) if isinstance(table, dict) else None
            if isinstance(table, dict):
                table.pop(name, None)
        # Beside the tables it says where they come from.
        tables = {name: keys for name, keys in published.items() if isinstance(keys, dict)}
        _merge(merged, tables, f"{recipe.name} [{PUBLISHED}]")
    by_machine: dict[str, tuple[Path, object]] = {}
    for path, document in machines.items():
        needs |= _popped(document, NEEDS, path, {})
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
    _read_urls(merged.document)
    _refuse_missing(needs, merged.document, on, decided)
    return merged


def _refuse_missing(
    needs: Mapping[str, Any], document: Mapping[str, Any], on: Sequence[Path], decided: tuple[str, ...]
) -> None:
    """Raise ConfigError with all keys that machine files need, nothing sets, and a rollout has a use for."""
    known = {key for key, _ in leaves(document)}
    elsewhere = (*decided, *unused(document))
    missing = {key: value for key, value in needs.items() if key not in known and not key.startswith(elsewhere)}
    if missing:
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in missing.items()}
        example = " ".join(f"--set {shlex.quote(f'{key}={text}')}" for key, text in texts.items())
        raise ConfigError(
            f"--on {' '.join(path.name for path in on)}: {', '.join(missing)} must be set, by --set or in another "
            f"machine file, for example {example}"
        )


def _popped(document: dict[str, Any], name: str, path: Path, default: Any) -> Any:
    """Remove what a file says for us alone, and return it. Raises ConfigError if it has another type than `default`."""
    if not isinstance(found := document.pop(name, default), type(default)):
        kind = "a table" if isinstance(default, dict) else "true or false"
        raise ConfigError(f"{path}: {name} is {found!r}; write {kind}")
    return found


def _read_urls(document: Mapping[str, Any]) -> None:
    """Replace `file:PATH` and `env:NAME` in `sandbox.remote.urls` by the URLs there. Raises ConfigError."""
    sandbox = document.get("sandbox")
    remote = sandbox.get("remote") if isinstance(sandbox, dict) else None
    if not isinstance(remote, dict) or not isinstance(named := remote.get("urls"), str):
        return
    kind, _, name = named.partition(":")
    try:
        text = {"file": lambda: Path(name).read_text(encoding="utf-8"), "env": lambda: os.environ[name]}[kind]()
    except (KeyError, OSError, ValueError) as error:
        raise ConfigError(
            f"sandbox.remote.urls {named!r} cannot be read ({error!r}): write a list of URLs, file:/PATH of a file "
            "with one on each line, or env:NAME of a variable that has them"
        ) from error
    remote["urls"] = text.split()


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
