"""Checks that a snapshot belongs to the model that an engine is serving, before anything is sent.

Invariants:
- Only headers are read. If the engine's model directory is not readable from here, the engine checks the push itself.
- Names and shapes must be equal; floating-point dtypes may differ, because engines convert them.
- Only engines with the same parameter names, that is, of the same kind and size, are compared.
- Checksums are compared with the snapshot's if the engine computes them in the same way, as the embedded engine does.
- SGLang's cannot be: it fuses parameters (query, key and value; gate and up), splits them over its ranks, converts them
  to its own dtype, and its hash depends on its version and device (64 bits of SHA-256 on a CPU, a kernel of its own on
  CUDA). They are comparable only between two reads of one snapshot by engines of one kind. So these engines vote: the
  majority is taken as correct, and a verdict stands on a later tie.
- One engine against one, before any majority, is no verdict: neither is taken as correct.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.policies.engine import EngineId
from headrace.policies.errors import ModelInvalid
from headrace.policies.models.model_files import weight_files
from headrace.policies.models.qwen_config import TIED_HEAD
from headrace.policies.tensors import TensorSpec, read_specs
from headrace.policies.tokens.model_keys import read_language_keys

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


def differing(expected: Mapping[str, str], reported: Mapping[str, str]) -> list[str]:
    """Return the parameters whose reported checksum is not the expected one. The head may be missing, because a tied
    head is not a parameter of the engine."""
    wrong = sorted(name for name, checksum in expected.items() if reported.get(name) != checksum)
    return [name for name in wrong if name != TIED_HEAD or name in reported]


@dataclass(slots=True)
class Agreement:
    """Majority vote on the checksums that engines report in one push. A vote is one read of the snapshot."""

    _votes: dict[frozenset[str], dict[Sums, list[EngineId]]] = field(default_factory=dict)
    _accepted: dict[frozenset[str], Sums | None] = field(default_factory=dict)

    def add(self, engine_id: EngineId, checksums: Mapping[str, str]) -> None:
        """Add an engine's checksums, by parameter. A second read by the same engine is a further vote if it gave the
        same weights, and else replaces the first one, whose weights are gone."""
        names, sums = frozenset(checksums), tuple(sorted(checksums.items()))
        kind = self._votes.setdefault(names, {})
        for other, engines in kind.items():
            if other != sums and engine_id in engines:
                engines.remove(engine_id)
        kind.setdefault(sums, []).append(engine_id)
        self._decide(names)

    def withdraw(self, engine_id: EngineId) -> None:
        """Remove the votes of an engine that failed."""
        for names, kind in list(self._votes.items()):
            left = {sums: [each for each in engines if each != engine_id] for sums, engines in kind.items()}
            if left != kind:
                self._votes[names] = left
                self._decide(names)

    def is_disputed(self, engine_id: EngineId) -> bool:
        """Return True if engines of this one's kind differ and none of their checksums has a majority."""
        return any(
            self._accepted[names] is None and any(engine_id in engines for engines in kind.values())
            for names, kind in self._votes.items()
        )

    def wrong(self) -> dict[EngineId, list[str]]:
        """Return the engines that are not in the majority, with the parameters that differ from it, or, without a
        majority, from those of another engine."""
        found: dict[EngineId, list[str]] = {}
        for parameters, kind in self._votes.items():
            right = self._accepted[parameters]
            for sums, engines in kind.items():
                other = right if right is not None else next(each for each in kind if each != sums)
                names = [name for (name, mine), (_, theirs) in zip(sums, other, strict=True) if mine != theirs]
                found |= dict.fromkeys(engines, names) if names else {}
        return found

    def _decide(self, names: frozenset[str]) -> None:
        kind = {sums: len(engines) for sums, engines in self._votes[names].items() if engines}
        self._votes[names] = {sums: self._votes[names][sums] for sums in kind}
        most = max(kind.values(), default=0)
        leading = [sums for sums, count in kind.items() if count == most]
        if len(leading) == 1:
            self._accepted[names] = leading[0]
        elif most == 1 or self._accepted.get(names) not in leading:
            self._accepted[names] = None
