"""Flags of a model's architecture: read from slime's own scripts, and compared with the model's config.json.

slime has one file for each model it has trained, `scripts/models/NAME.sh`, which fills the Bash array MODEL_ARGS.
Megatron builds the model from these flags alone: a wrong one trains another model, or ends the ranks while they load.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Final

from headrace.policies.errors import LearnerSettingsInvalid, ModelInvalid
from headrace.policies.tokens.model_keys import read_language_keys
from headrace.sandboxes.host.child_environment import child_environment

SCRIPTS: Final = Path("scripts", "models")
SAME: Final = {"qwen3.6-35B-A3B": "qwen3.5-35B-A3B", "glm4.7-flash": "glm4.7-30B-A3B"}
"""Models without a file of slime's at its pinned commit, and the file of the same architecture: `model_type` and all
sizes of their config.json are equal."""
_READ: Final = 'source "$1" && printf "%s\\0" "${MODEL_ARGS[@]}"'

_SIZES: Final = {
    "--num-layers": ("num_hidden_layers",),
    "--hidden-size": ("hidden_size",),
    "--num-attention-heads": ("num_attention_heads",),
    "--vocab-size": ("vocab_size",),
    "--norm-epsilon": ("rms_norm_eps",),
    "--rotary-base": ("rope_theta",),
    "--num-experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "--moe-router-topk": ("num_experts_per_tok",),
    "--moe-ffn-hidden-size": ("moe_intermediate_size",),
}
"""Flags, and the keys of a config.json that must have their values."""
_DENSE_SIZES: Final = {"--ffn-hidden-size": ("intermediate_size",)}
"""Further flags of models without experts, whose value is not used elsewhere."""
_HEAD_SIZES: Final = {"--num-query-groups": ("num_key_value_heads",), "--kv-channels": ("head_dim",)}
"""Further flags of models whose keys and values are not compressed."""


def architecture(name: str, root: Path) -> tuple[str, ...]:
    """Return the flags of a file `scripts/models/NAME.sh` of a checkout. Raises LearnerSettingsInvalid."""
    path = root / SCRIPTS / f"{SAME.get(name, name)}.sh"
    if not path.is_file():
        found = ", ".join(names(root)) or "none: slime is installed without its scripts, set learner.slime.slime_dir"
        raise LearnerSettingsInvalid(f"learner.slime.model: {path} does not exist; the models of {root} are {found}")
    command = ["bash", "-euc", _READ, "bash", str(path)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, env=child_environment())
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        raise LearnerSettingsInvalid(f"learner.slime.model: {path} cannot be read: {said}") from error
    return tuple(run.stdout.split("\0")[:-1])


def names(root: Path) -> list[str]:
    """Return the models that a checkout of slime has files for."""
    return sorted(path.stem for path in (root / SCRIPTS).glob("*.sh"))


def fitting(config: Path, root: Path) -> list[str]:
    """Return the models of a checkout whose flags agree with a config.json. Raises LearnerSettingsInvalid."""
    return [name for name in names(root) if not differences(architecture(name, root), config)]


def differences(words: Sequence[str], config: Path) -> list[str]:
    """Return how flags and a config.json differ, one line each. Keys and flags that are absent are not compared.
    Raises LearnerSettingsInvalid."""
    try:
        keys = read_language_keys(config)
    except ModelInvalid as error:
        raise LearnerSettingsInvalid(str(error)) from error
    # The last one counts, as in slime's parser; a switch has no value.
    given = {flag: "" if value.startswith("--") else value for flag, value in pairwise((*words, "--"))}
    sizes = dict(_SIZES)
    if "--num-experts" not in given:
        sizes |= _DENSE_SIZES
    if "--multi-latent-attention" not in given:
        sizes |= _HEAD_SIZES
    rope = keys.get("rope_parameters")
    places = (keys, rope if isinstance(rope, Mapping) else {})
    found = []
    for flag, candidates in sizes.items():
        wanted = next((place[key] for key in candidates for place in places if place.get(key) is not None), None)
        # slime's parser refuses what is no number.
        with suppress(ValueError):
            if wanted is not None and flag in given and float(given[flag]) != float(wanted):
                found.append(f"{flag} {given[flag]}, but {candidates[0]} is {json.dumps(wanted)}")
    untied = "--untie-embeddings-and-output-weights"
    if isinstance(tied := keys.get("tie_word_embeddings"), bool) and tied == (untied in given):
        found.append(f"{'' if tied else 'no '}{untied}, but tie_word_embeddings is {json.dumps(tied)}")
    return found
