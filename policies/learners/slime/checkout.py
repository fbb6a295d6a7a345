"""Checks of slime and Megatron-LM before anything of them is imported.

Invariants:
- headrace is written for one commit of each. Another commit is compared with what headrace uses of it: parameters of
  functions and module-level names, read from the source without importing it. Differences are refused by name.
- Flags are compared by slime's parser itself, see `arguments.refuse_unknown`.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.policies.errors import LearnerSettingsInvalid
from headrace.policies.learners.slime_config import SlimeSection
from headrace.sandboxes.host.child_environment import child_environment

logger = logging.getLogger(__name__)

SLIME_COMMIT: Final = "624b824a898ab0ec1fcb4d373004c7f3852bf515"
MEGATRON_COMMIT: Final = "1dcf0dafa884ad52ffb243625717a3471643e087"

SLIME_USED: Final[Mapping[str, Mapping[str, str | None]]] = {
    "slime/backends/megatron_utils/actor.py": {
        "MegatronTrainRayActor.init": "self args role with_ref with_opd_teacher",
        "MegatronTrainRayActor.train": "self rollout_id rollout_data_ref external_data",
        "MegatronTrainRayActor.save_model": "self rollout_id force_sync",
        "MegatronTrainRayActor._get_rollout_data": "self rollout_data_ref",
    },
    **{
        f"slime/backends/megatron_utils/update_weight/{file}.py": {
            f"{name}.connect_rollout_engines": (
                "self rollout_engines rollout_engine_lock engine_gpu_counts engine_gpu_offsets engine_parallel_configs"
            ),
            f"{name}.update_weights": "self",
        }
        for file, name in (
            ("update_weight_from_distributed", "UpdateWeightFromDistributed"),
            ("update_weight_from_disk_delta", "UpdateWeightFromDiskDelta"),
        )
    },
    "slime/ray/utils.py": {"Lock.acquire": "self", "Lock.release": "self"},
    "slime/utils/distributed_utils.py": {"get_gloo_group": ""},
    "slime/backends/megatron_utils/hf_checkpoint_saver.py": {
        "save_hf_model_to_path": "args output_dir model model_name quantization_config progress_desc",
    },
    "slime/backends/megatron_utils/cp_utils.py": {"slice_log_prob_with_cp": "log_prob total_length response_length"},
    "slime/backends/megatron_utils/loss.py": {
        "_maybe_capture_log_probs": "batch log_probs",
        "get_responses": "logits args unconcat_tokens total_lengths response_lengths apply_temperature",
        "icepop_function": "args pg_loss train_log_probs rollout_log_probs loss_masks",
        "policy_loss_function": "args batch logits sum_of_sample_mean",
    },
    "slime/observability/logging_utils.py": {"log": "args metrics step_key"},
    "slime/observability/rollout_data_utils.py": {"tensorize_rollout_data_for_training": "rollout_data"},
    "slime/ray/actor_group.py": {
        "RayTrainGroup._allocate_gpus_for_actor": "self pg num_gpus_per_actor",
        "RayTrainGroup.async_train": "self rollout_id rollout_data_ref external_data",
    },
    "slime/ray/placement_group.py": {
        "InfoActor.get_ip_and_gpu_id": "self",
        "sort_key": "x",
        "allocate_train_group": "args num_nodes num_gpus_per_node pg role with_ref with_opd_teacher actor_cls",
    },
    "slime/utils/arguments.py": {"parse_args": "add_custom_arguments"},
    "slime/utils/dp_schedule.py": {
        "build_dp_schedule": "args train_parallel_config total_lengths global_batch_size rollout_indices",
    },
    "slime/utils/ppo_utils.py": {"calculate_log_probs_and_entropy": None},
    "slime/utils/misc.py": {"Box.__init__": "self inner"},
}
"""Functions of slime that headrace calls or overrides, with their parameters."""
MEGATRON_USED: Final[Mapping[str, Mapping[str, str | None]]] = {
    "megatron/core/optimizer/__init__.py": {"Adam": None, "USING_PYTORCH_OPTIMIZER": None},
    "megatron/core/optimizer/distrib_optimizer.py": {
        "Adam": None,
        "HAVE_APEX_OR_TE": None,
        "USING_TE_OPTIMIZER": None,
    },
    "megatron/training/arguments.py": {"parse_args": "extra_args_provider ignore_unknown_args"},
}
"""Names of Megatron-LM that headrace uses, with the parameters of functions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """Sources of one project, and the commit they are at ("" if they are not a git checkout)."""

    name: str
    root: Path
    commit: str

    def __str__(self) -> str:
        return f"{self.name} {self.commit[:9] or 'of an unknown commit'} in {self.root}"


def find_checkouts(section: SlimeSection) -> tuple[Checkout, Checkout]:
    """Return the checkouts of slime and Megatron-LM, after checking them. Raises LearnerSettingsInvalid."""
    slime = _found("slime", section.slime_dir, "slime/backends/megatron_utils/actor.py")
    megatron = _found("megatron", section.megatron_dir, "megatron/training/arguments.py")
    for checkout, commit, used in ((slime, SLIME_COMMIT, SLIME_USED), (megatron, MEGATRON_COMMIT, MEGATRON_USED)):
        if different := differences(checkout.root, used):
            raise LearnerSettingsInvalid(
                f"{checkout} differs from {commit[:9]}, which headrace is written for: {'; '.join(different)}; check "
                "out that commit"
            )
        if checkout.commit != commit:
            logger.warning(
                "%s is not %s, which headrace is written for; everything that headrace uses is the same",
                checkout,
                commit[:9],
            )
    return slime, megatron


def make_importable(slime: Checkout, megatron: Checkout) -> None:
    """Let this process import both. Raises LearnerSettingsInvalid if it has already imported others."""
    for checkout in (megatron, slime):
        root = str(checkout.root)
        if root not in sys.path:
            # First, before packages of the same name that are installed.
            sys.path.insert(0, root)
        loaded = sys.modules.get(checkout.name)
        places = [str(Path(place).parent) for place in getattr(loaded, "__path__", [])]
        if loaded is not None and root not in places:
            raise LearnerSettingsInvalid(
                f"this process has already imported {checkout.name} from {', '.join(places)}, not from {root}: start "
                "the learner in a process of its own"
            )


def differences(root: Path, used: Mapping[str, Mapping[str, str | None]]) -> list[str]:
    """Return how the sources differ from what headrace uses of them, one line per name."""
    found: list[str] = []
    for file, names in used.items():
        try:
            defined = _defined(ast.parse((root / file).read_text(encoding="utf-8")))
        except (OSError, SyntaxError) as error:
            found.append(f"{file} cannot be read ({error})")
            continue
        for name, parameters in names.items():
            if name not in defined:
                found.append(f"{file} has no {name}")
            elif parameters is not None and defined[name] != parameters:
                found.append(f"{name} in {file} takes ({defined[name]}), not ({parameters})")
    return found


def _found(name: str, directory: Path | None, file: str) -> Checkout:
    key = f"learner.slime.{name}_dir"
    if directory is not None:
        if not (directory / file).is_file():
            raise LearnerSettingsInvalid(
                f"{key} {directory} has no {file}: set it to a git checkout of {_PROJECT[name]}"
            )
        return Checkout(name=name, root=directory.resolve(), commit=_commit(directory))
    spec = importlib.util.find_spec(name)
    places = [Path(place).parent for place in (spec.submodule_search_locations or ())] if spec is not None else []
    for root in places:
        if (root / file).is_file():
            return Checkout(name=name, root=root, commit=_commit(root))
    if places or spec is not None:
        raise LearnerSettingsInvalid(
            f"the installed `{name}` is not {_PROJECT[name]} (it has no {file}); PyPI's `slime` is an unrelated "
            f"project, and `megatron-core` lacks megatron.training: run in slime's image, or set {key} to a checkout"
        )
    raise LearnerSettingsInvalid(f"{_PROJECT[name]} is not installed: run in slime's image, or set {key} to a checkout")


_PROJECT: Final = {"slime": "THUDM/slime", "megatron": "NVIDIA/Megatron-LM"}


def _commit(root: Path) -> str:
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), "rev-parse", "HEAD"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True, env=child_environment()
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()


def _defined(tree: ast.Module) -> dict[str, str]:
    """Return the functions and methods of a module with their parameters, and its module-level names with ""."""
    defined: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            defined |= {
                f"{node.name}.{part.name}": _parameters(part) for part in node.body if isinstance(part, ast.FunctionDef)
            }
    # Names that are defined in `try` or `if` count too.
    for statement in _statements(tree.body):
        if isinstance(statement, ast.FunctionDef):
            defined[statement.name] = _parameters(statement)
        elif isinstance(statement, ast.Assign):
            defined |= {target.id: "" for target in statement.targets if isinstance(target, ast.Name)}
        elif isinstance(statement, ast.ImportFrom | ast.Import):
            defined |= {alias.asname or alias.name: "" for alias in statement.names}
    return defined


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for statement in body:
        found.append(statement)
        if isinstance(statement, ast.If | ast.Try):
            found += _statements([*statement.body, *statement.orelse])
        if isinstance(statement, ast.Try):
            for handler in statement.handlers:
                found += _statements(handler.body)
    return found


def _parameters(function: ast.FunctionDef) -> str:
    given = function.args
    return " ".join(argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs))
