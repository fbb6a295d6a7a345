"""Checks that a snapshot belongs to the model that an engine is serving, before anything is sent.

Invariants:
- Only headers are read. If the engine's model directory is not readable from here, the engine checks the push itself.
- Names and shapes must be equal; floating-point dtypes may differ, because engines convert them.
- Only engines with the same parameter names, that is, of the same kind and size, are compared.
- The checksums of the majority are taken as correct. On a tie the previous verdict stands; if there is none yet, the
  first engine is taken as correct.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.policies.errors import ModelInvalid
from headrace.policies.models.model_files import weight_files
from headrace.policies.models.qwen_config import TIED_HEAD
from headrace.policies.push.tensors import TensorSpec, read_specs
from headrace.policies.tokens.model_keys import read_language_keys

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from headrace.policies.engine import EngineId

NAMED = 3
"""Number of parameters listed in a message."""


def check_fits(snapshot: Mapping[str, TensorSpec], model_dir: Path) -> None:
    """Raise ModelInvalid, naming both sides, if the engine's model directory contains another model or damaged files.
    Checks nothing if the directory cannot be read."""
    try:
        if not (model_dir / "config.json").is_file():
            return
    except OSError:
        # An attached engine, whose directory is not ours.
        return
    served = read_model_specs(model_dir)
    if read_language_keys(model_dir / "config.json").get("tie_word_embeddings"):
        # A tied head repeats the embedding; only some files contain it.
        snapshot = without_head(snapshot)
        served = without_head(served)
    if missing := sorted(served.keys() - snapshot.keys()):
        raise ModelInvalid(f"the snapshot lacks {_listed(missing)}, which the engine's model {model_dir} has")
    if unknown := sorted(snapshot.keys() - served.keys()):
        raise ModelInvalid(f"the snapshot has {_listed(unknown)}, which the engine's model {model_dir} lacks")
    for name, spec in snapshot.items():
        if spec.shape != served[name].shape:
            raise ModelInvalid(
                f"{name}: the snapshot has shape {spec.shape}, but the engine's model {model_dir} has "
                f"{served[name].shape}"
            )
        if not served[name].pushable:
            raise ModelInvalid(
                f"{name}: the snapshot has dtype {spec.dtype}, but the engine's model {model_dir} has "
                f"{served[name].dtype}: only floating-point weights are converted; serve the model unquantised"
            )


def _listed(names: list[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def without_head(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {name: spec for name, spec in specs.items() if name != TIED_HEAD}


def read_model_specs(model_dir: Path) -> dict[str, TensorSpec]:
    """Return every parameter in the safetensors files of a directory. Raises ModelInvalid naming the file."""
    return {name: spec for path in weight_files(model_dir) for name, spec in read_specs(path).items()}


Sums = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Agreement:
    """Majority vote on the checksums that engines report in one push."""

    _votes: dict[frozenset[str], dict[Sums, list[EngineId]]] = field(default_factory=dict)
    _accepted: dict[frozenset[str], Sums] = field(default_factory=dict)

    def add(self, engine_id: EngineId, checksums: Mapping[str, str]) -> None:
        """Add an engine's checksums, by parameter."""
        names, sums = frozenset(checksums), tuple(sorted(checksums.items()))
        kind = self._votes.setdefault(names, {})
        kind.setdefault(sums, []).append(engine_id)
        accepted = self._accepted.setdefault(names, sums)
        if len(kind[sums]) > len(kind[accepted]):
            self._accepted[names] = sums

    def wrong(self) -> dict[EngineId, list[str]]:
        """Return the engines in the minority, with the parameters that differ."""
        found: dict[EngineId, list[str]] = {}
        for parameters, kind in self._votes.items():
            right = self._accepted[parameters]
            for sums, engines in kind.items():
                names = [name for (name, mine), (_, other) in zip(sums, right, strict=True) if mine != other]
                found |= dict.fromkeys(engines, names) if names else {}
        return found
