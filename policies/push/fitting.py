"""Comparison of a snapshot's parameters with those of the model that an engine serves, before anything is sent.

Invariants:
- Only headers are read, those of a served model once. If the engine's model directory is not readable from here, the
  engine checks the push itself.
- SGLang's loaders skip names that they do not know, without an error: the old weights would stay. Certainly read are
  only the names that the engine's own files have. So names and shapes must be equal, but for what this module lists:
  a tied head, parts that the learner does not train and the snapshot says it lacks, and the two forms of experts.
- Floating-point dtypes may differ, because engines convert them. FP8 weights have scales, so both sides have them or
  neither.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from headrace.policies.errors import ModelInvalid
from headrace.policies.models.model_files import weight_files
from headrace.policies.models.qwen_config import TIED_HEAD
from headrace.policies.push.inspection import Stamp, stamp_of
from headrace.policies.tensors import Bucket, TensorSpec, read_specs
from headrace.policies.tokens.model_keys import read_language_keys

NAMED = 3
"""Number of parameters listed in a message."""
READS_SINGLE_EXPERTS: Final = frozenset({"qwen3_5_moe", "qwen3_5_moe_text"})
"""Models (`model_type`) whose files have all experts of a layer in one tensor, and whose loader in SGLang reads one
tensor for each expert too (load_weights of models/qwen3_5.py, 0.5.23). The loaders of other models skip those."""

_ONE_EXPERT: Final = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_ALL_EXPERTS: Final = re.compile(r"(.+\.experts)\.(gate_up|down)_proj")
_UNTRAINED: Final = re.compile(r"(?:model\.)?(?:visual|vision_tower|multi_modal_projector|mtp)\.")
_LAYER: Final = re.compile(r"(?:.*\.)?layers\.(\d+)\.")


def check_fits(snapshot: Mapping[str, TensorSpec], model_dir: Path, *, untrained: Collection[str] = ()) -> bool:
    """Raise ModelInvalid, naming both sides, if the engine's model directory contains another model or damaged files.
    Checks nothing if the directory cannot be read. Parameters whose names begin with an `untrained` prefix are not in
    the snapshot. Return True if the engine reads the snapshot only as `single_experts` describes it."""
    try:
        if not (model_dir / "config.json").is_file():
            return False
    except OSError:
        # An attached engine, whose directory is not ours.
        return False
    keys = read_language_keys(model_dir / "config.json")
    return compare(snapshot, read_model_specs(model_dir), keys, untrained=untrained, place=str(model_dir))


def compare(
    snapshot: Mapping[str, TensorSpec],
    served: Mapping[str, TensorSpec],
    keys: Mapping[str, Any],
    *,
    untrained: Collection[str] = (),
    place: str,
) -> bool:
    """Do what `check_fits` does with the parameters of a served model, and the keys of its config.json."""
    prefixes = tuple(untrained)
    if surplus := sorted(name for name in snapshot if name.startswith(prefixes)):
        raise ModelInvalid(f"the snapshot has {_listed(surplus)}, but says that it lacks {', '.join(prefixes)}")
    served = {name: spec for name, spec in served.items() if not name.startswith(prefixes)}
    if keys.get("tie_word_embeddings"):
        # A tied head repeats the embedding; only some files contain it.
        snapshot, served = without_head(snapshot), without_head(served)
    is_fused, serves_fused = (any(map(_ALL_EXPERTS.fullmatch, specs)) for specs in (snapshot, served))
    if serves_fused and not is_fused and keys.get("model_type") not in READS_SINGLE_EXPERTS:
        raise ModelInvalid(
            f"the snapshot has one tensor for each expert, but the engine's model {place} has all experts of a layer "
            f"in one, and SGLang's loader of {keys.get('model_type')} is not known to read both: let the learner "
            "export the names of the model's files"
        )
    if is_fused != serves_fused:
        snapshot, served = joined_experts(snapshot), joined_experts(served)
    if missing := sorted(served.keys() - snapshot.keys()):
        raise ModelInvalid(f"the snapshot lacks {_listed(missing)}, which the engine's model {place} has")
    if unknown := sorted(snapshot.keys() - served.keys()):
        raise ModelInvalid(f"the snapshot has {_listed(unknown)}, which the engine's model {place} lacks")
    for name, spec in snapshot.items():
        if spec.shape != served[name].shape:
            raise ModelInvalid(
                f"{name}: the snapshot has shape {spec.shape}, but the engine's model {place} has {served[name].shape}"
            )
        if not served[name].pushable:
            raise ModelInvalid(
                f"{name}: the snapshot has dtype {spec.dtype}, but the engine's model {place} has "
                f"{served[name].dtype}: only floating-point weights are converted; serve the model unquantised"
            )
    return is_fused and not serves_fused


def untrained_prefixes(snapshot: Collection[str], model_dir: Path) -> tuple[str, ...]:
    """Return the prefixes of the model's vision and multi-token prediction of which a snapshot has no parameter: its
    learner does not train them. Raises ModelInvalid naming the file."""
    layers = read_language_keys(model_dir / "config.json").get("num_hidden_layers", math.inf)
    found: set[str] = set()
    for name in read_model_specs(model_dir):
        if match := _UNTRAINED.match(name):
            found.add(match[0])
        elif (match := _LAYER.match(name)) and int(match[1]) >= layers:
            # DeepSeek and GLM number these layers on.
            found.add(match[0])
    return tuple(sorted(prefix for prefix in found if not any(name.startswith(prefix) for name in snapshot)))


def joined_experts(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return the parameters with the experts of a layer joined: `experts.gate_up_proj` [experts, 2 x width, hidden],
    `experts.down_proj` [experts, hidden, width]. Experts that are incomplete or unlike one another stay."""
    matrices: dict[str, dict[tuple[int, str], str]] = {}
    for name in specs:
        if match := _ONE_EXPERT.fullmatch(name):
            whole = f"{match[1]}.{'down' if match[3] == 'down' else 'gate_up'}_proj"
            matrices.setdefault(whole, {})[int(match[2]), match[3]] = name
    joined = dict(specs)
    for whole, names in matrices.items():
        kinds = ("down",) if whole.endswith("down_proj") else ("gate", "up")
        experts = range(len(names) // len(kinds))
        unlike = {specs[name] for name in names.values()}
        if names.keys() == {(expert, kind) for expert in experts for kind in kinds} and len(unlike) == 1:
            [spec] = unlike
            rows, *columns = spec.shape
            joined[whole] = TensorSpec(dtype=spec.dtype, shape=(len(experts), rows * len(kinds), *columns))
            for name in names.values():
                del joined[name]
    return joined


def single_experts(bucket: Bucket) -> Bucket:
    """Return the description of the same bytes with one tensor for each expert's matrix: joined experts are these
    matrices one after another, gate before up."""
    named: dict[str, TensorSpec] = {}
    for name, spec in zip(bucket.names, bucket.specs, strict=True):
        match = _ALL_EXPERTS.fullmatch(name)
        if match is None:
            named[name] = spec
            continue
        experts, rows, columns = spec.shape
        kinds = ("down",) if match[2] == "down" else ("gate", "up")
        part = TensorSpec(dtype=spec.dtype, shape=(rows // len(kinds), columns))
        named |= {f"{match[1]}.{expert}.{kind}_proj.weight": part for expert in range(experts) for kind in kinds}
    return Bucket.of(named)


def _listed(names: list[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def without_head(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {name: spec for name, spec in specs.items() if name != TIED_HEAD}


def read_model_specs(model_dir: Path) -> Mapping[str, TensorSpec]:
    """Return every parameter in the safetensors files of a directory. Files that have not changed since they were read
    last are not read again. Raises ModelInvalid naming the file."""
    try:
        return _specs_of(tuple((path, stamp_of(path.stat())) for path in weight_files(model_dir)))
    except OSError as error:
        raise ModelInvalid(f"{model_dir}: {error}") from error


# A run has one model to serve; a trainer's own directories come and go.
@lru_cache(maxsize=4)
def _specs_of(files: tuple[tuple[Path, Stamp], ...]) -> Mapping[str, TensorSpec]:
    return {name: spec for path, _ in files for name, spec in read_specs(path).items()}
