"""Command line of slime, from a recipe.

Invariants:
- slime trains one update per batch: its global batch is `buffer.batch_size` rollouts. With behaviour log-probabilities
  as the old ones (`--use-rollout-logprobs`) its clip acts on current / behaviour, as ours does. With a correction, its
  old policy is the one in training: nothing is clipped, and the weight is current / behaviour.
- slime generates nothing: engines, rewards and advantages are ours.
- Every flag that headrace sets belongs to a key of the recipe. A user's flag that would change one of them, or the
  meaning of a batch, is refused by name. After parsing, the values that slime ended up with are compared with ours.
"""

from __future__ import annotations

import difflib
import json
import linecache
import logging
import os
import re
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from headrace.policies.errors import LearnerSettingsInvalid
from headrace.policies.learners.objectives.config import PPO
from headrace.policies.learners.slime import architectures
from headrace.policies.processes.nccl import nccl_environment

if TYPE_CHECKING:
    from headrace.policies.learners.config import LearnerConfig
    from headrace.policies.learners.slime.checkout import Checkout
    from headrace.policies.learners.slime_config import SlimeSection

OBJECTIVES: Final = ("grpo", "gspo", "cispo")
"""Objectives of ours that slime's `--advantage-estimator` computes in the same way."""
APPLICABLE: Final = {
    "dtype": ("float32", "slime trains in bf16 with fp32 main weights, whatever this key says"),
    "device": ("cpu", "slime trains on the GPUs of learner.slime, whatever this key says"),
    "recompute": (False, "slime has --recompute-granularity, for learner.slime.arguments"),
    "threads": (1, "slime has learner.slime.environment.OMP_NUM_THREADS"),
}
"""Keys of [learner] that slime cannot follow: the only value that it allows, and the reason."""

CORRECTIONS: Final = ("none", "tis", "icepop")
KL_KINDS: Final = {"k1": "k1", "k2": "k2", "k3": "low_var_kl"}
"""slime's estimators; its k3 is not limited to 10, as ours is."""
SLIMES_LOSS: Final = "slime.backends.megatron_utils.loss"
TERMS: Final = "headrace.policies.learners.slime.token_terms"

_ENGINES = "headrace's own engines generate"
_ONE_UPDATE = "headrace trains one update per batch: lower buffer.batch_size for more"
_NOT_CALLED = "slime's rollout manager, which calls it, does not run; rewards and advantages are headrace's"
_SAVES = "headrace saves and resumes checkpoints itself, with the optimizer's moments and Hugging Face files in each"
_OUTSIDE = "it would change arguments outside this list"

REFUSED: Final = {
    **dict.fromkeys(
        ("--colocate", "--offload", "--offload-train", "--offload-rollout", "--release-train"),
        "trainer and engines have GPUs of their own",
    ),
    **dict.fromkeys(
        (
            *("--rollout-num-gpus", "--rollout-num-gpus-per-engine", "--rollout-external-engine-addrs"),
            *("--rollout-function-path", "--custom-generate-function-path", "--data-source-path", "--prompt-data"),
            *("--rollout-top-p", "--rollout-top-k", "--use-fault-tolerance", "--debug-rollout-only"),
            *("--load-debug-rollout-data", "--load-forge-rollout-data", "--rollout-data-transport"),
            *("--partial-rollout", "--over-sampling-batch-size"),
            *("--dynamic-sampling-filter-path", "--buffer-filter-path", "--eval-interval", "--eval-config"),
            *("--use-rollout-routing-replay", "--use-routing-replay"),
        ),
        _ENGINES,
    ),
    **dict.fromkeys(("--num-steps-per-rollout", "--num-epoch", "--rampup-batch-size", "--train-iters"), _ONE_UPDATE),
    **dict.fromkeys(("--custom-reward-post-process-path", "--custom-convert-samples-to-train-data-path"), _NOT_CALLED),
    "--use-tis": 'learner.correction decides it ("tis" or "icepop")',
    "--tis-clip": "learner.weight_cap decides it",
    **dict.fromkeys(("--use-opsm", "--opsm-delta"), "learner.sequence_mask decides it"),
    **dict.fromkeys(("--use-kl-loss", "--kl-loss-coef"), "learner.kl_coef decides it"),
    "--kl-loss-type": "learner.kl_kind decides it",
    "--kl-coef": "no objective of learner.objective has a KL in its rewards; learner.kl_coef has one in the loss",
    "--calculate-per-token-loss": 'learner.loss_weight = "token" is the same',
    "--eps-clip-c": "learner.dual_clip decides it",
    "--disable-compute-advantages-and-returns": "the loss would have no advantages",
    "--keep-old-actor": "slime moves its old policy in a weight push of its own, and keeps it in no checkpoint; with "
    "one update per batch the policy before the update is the one in training (guide 'Objectives')",
    "--ref-update-interval": "no checkpoint has the moved reference: a resume would go back to the start model",
    **dict.fromkeys(
        (
            *("--save", "--save-interval", "--save-hf", "--async-save", "--no-save-optim", "--no-load-optim"),
            *("--finetune", "--ckpt-step", "--ref-ckpt-step", "--start-rollout-id", "--reset-optimizer-states"),
            *("--use-stateless-adam", "--exit-on-missing-checkpoint", "--use-checkpoint-opt_param-scheduler"),
        ),
        _SAVES,
    ),
    **dict.fromkeys(("--custom-config-path", "--megatron-config-path", "--yaml-cfg"), _OUTSIDE),
    "--fp16": "slime trains in bf16 here",
    "--balance-by-flops": "it ignores learner.token_budget",
}
"""Flags that contradict a recipe although headrace does not set them, with the reason."""

ORDERED_KERNELS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Variable that Megatron demands to be 1 for tensor and context parallel sizes above 1, on GPUs before Blackwell."""

PARSED_EARLY: Final = frozenset({"--train-backend", "--debug-train-only"})
"""Flags that slime's main parser does not know, because it reads them before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """Flag that headrace sets, its values, and the key of the recipe (or the reason) that decides them."""

    name: str
    values: tuple[str, ...] = ()
    decided_by: str

    @property
    def words(self) -> tuple[str, ...]:
        """The flag on a command line."""
        return self.name, *self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class SlimeTerms:
    """Recipe of one slime learner: the learner's section, and what other sections decide for it."""

    learner: LearnerConfig
    batch_size: int
    """buffer.batch_size, in rollouts."""
    temperature: float
    """sampling.temperature."""
    steps: int
    """training.steps."""
    transport: str = "disk"
    """Way of the weights to the engines: nccl, delta or disk."""
    node_label: str | None = None
    """Role of the nodes with the GPUs that train (cluster.roles.learner); None on a local Ray."""

    @property
    def deltas_dir(self) -> Path:
        """Folder of slime's stream of deltas."""
        return self.learner.snapshot_dir.with_name("deltas")

    @property
    def checkpoint_dir(self) -> Path:
        return self.learner.checkpoint_dir

    @property
    def mismatch_alarm(self) -> float:
        return self.learner.mismatch_alarm

    @property
    def seed(self) -> int:
        return self.learner.seed


def problem(terms: SlimeTerms) -> str | None:
    """Return why slime cannot train a recipe, with the keys to change, or None."""
    learner, ranks = terms.learner, terms.learner.slime.data_parallel
    if learner.objective not in OBJECTIVES:
        critic = ", whose critic would take turns with the policy on its GPUs, which headrace does not drive"
        return (
            f'learner.objective "{learner.objective}"{critic if learner.objective == PPO else ""} is not one of those '
            f'that slime trains here ({", ".join(OBJECTIVES)}): choose one of those, or learner.kind = "megatron"'
        )
    correction = f'learner.correction is {learner.correction}, but learner.kind is "slime", which'
    if learner.correction not in CORRECTIONS:
        bounds = "bounds large ratios of negative advantages by learner.dual_clip"
        return f"{correction} {bounds}; set it to {' or '.join(CORRECTIONS)}"
    if learner.correction != "none" and learner.objective != "grpo":
        return f"{correction} then weighs single tokens in every objective; set learner.objective to grpo"
    if learner.correction != "none" and learner.sequence_mask is not None:
        return f"{correction} then compares each row with the policy in training; remove learner.sequence_mask"
    for key, (only, reason) in APPLICABLE.items():
        if (found := getattr(learner, key)) != only:
            return f'learner.{key} is {found}, but learner.kind is "slime": {reason}; set it to {only}'
    if terms.batch_size < ranks:
        return (
            f"buffer.batch_size {terms.batch_size} is below the {ranks} data-parallel ranks of learner.slime: a rank "
            "could have nothing to train; raise the batch or the parallel sizes"
        )
    try:
        refuse_contradictions(learner.slime.arguments, flags(terms, load=learner.model_dir))
    except LearnerSettingsInvalid as error:
        return str(error)
    return _without_effect(learner)


def _without_effect(learner: LearnerConfig) -> str | None:
    """Return which flag of the user would do nothing beside the keys of the recipe."""
    given, tis, observes = (
        flag_names(words := learner.slime.arguments),
        learner.correction == "tis",
        learner.needs_kinds,
    )
    # slime applies its own functions to the loss for --get-mismatch-metrics alone, too: beside the clip.
    measures = "--get-mismatch-metrics" in given and not any(f"{SLIMES_LOSS}." in word for word in words)
    needs = {
        "--tis-clip-low": (tis, 'learner.correction = "tis"'),
        "--custom-tis-function-path": (tis or measures, 'learner.correction = "tis", or only to measure a mismatch'),
        "--custom-loss-function-path": ("--loss-type" in given, "--loss-type custom_loss"),
        "--use-unbiased-kl": (learner.kl_coef > 0, "learner.kl_coef above 0"),
        "--use-opd": ("--opd-teacher-load" in given, "--opd-teacher-load: engines record no teacher's probabilities"),
        "--custom-advantage-function-path": (not observes, "learner.observation_coef 0, whose weights it would drop"),
        "--allgather-cp": (not observes, "learner.observation_coef 0, whose term does not divide rows in this way"),
    }
    for name, (met, need) in needs.items():
        if name in given and not met:
            return f"learner.slime.arguments: {name} needs {need}"
    return None


def flags(terms: SlimeTerms, *, load: Path) -> tuple[Flag, ...]:
    """Return all flags that headrace sets. `load` is a Hugging Face directory or slime's folder of a checkpoint."""
    return (*_layout(terms), *_model(terms, load), *_objective(terms), *_optimizer(terms))


def environment(section: SlimeSection) -> dict[str, str]:
    """Return the environment variables of the parser and of the training processes."""
    # They import slime, Megatron and this package, wherever those are. The parser's own path begins with both already.
    paths = map(str, filter(None, (section.slime_dir, section.megatron_dir)))
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    imported = {"PYTHONPATH": os.pathsep.join(dict.fromkeys((*paths, *inherited)))}
    ordered = {ORDERED_KERNELS: os.environ.get(ORDERED_KERNELS, "1")}
    return nccl_environment() | ordered | section.environment | imported


def _layout(terms: SlimeTerms) -> tuple[Flag, ...]:
    section = terms.learner.slime
    timeout, variables = str(section.timeout_minutes), json.dumps(environment(section))
    return (
        Flag(name="--train-backend", values=("megatron",), decided_by='learner.kind = "slime"'),
        Flag(name="--debug-train-only", decided_by=_ENGINES),
        Flag(name="--actor-num-nodes", values=(str(section.nodes),), decided_by="learner.slime.nodes"),
        *(
            Flag(name=name, values=(str(section.gpus_per_node),), decided_by="learner.slime.gpus_per_node")
            for name in ("--actor-num-gpus-per-node", "--num-gpus-per-node")
        ),
        *(
            Flag(name=f"--{name}-model-parallel-size", values=(str(size),), decided_by=f"learner.slime.{name}_parallel")
            for name, size in (
                ("tensor", section.tensor_parallel),
                ("pipeline", section.pipeline_parallel),
                ("expert", section.expert_parallel),
            )
        ),
        Flag(
            name="--context-parallel-size",
            values=(str(section.context_parallel),),
            decided_by="learner.slime.context_parallel",
        ),
        Flag(name="--distributed-timeout-minutes", values=(timeout,), decided_by="learner.slime.timeout_minutes"),
        Flag(name="--train-env-vars", values=(variables,), decided_by="learner.slime.environment"),
    )


def _model(terms: SlimeTerms, load: Path) -> tuple[Flag, ...]:
    model, learner = str(terms.learner.model_dir), terms.learner
    # A micro-batch's tokens are divided among the GPUs that share each row.
    tokens = -(-learner.token_budget // terms.learner.slime.context_parallel)
    return (
        Flag(name="--hf-checkpoint", values=(model,), decided_by="model.path"),
        Flag(name="--ref-load", values=(model,), decided_by="model.path"),
        Flag(name="--load", values=(str(load),), decided_by="model.path, or the run's checkpoint"),
        Flag(name="--use-dynamic-batch-size", decided_by="learner.token_budget"),
        Flag(name="--max-tokens-per-gpu", values=(str(tokens),), decided_by="learner.token_budget"),
        Flag(name="--micro-batch-size", values=("1",), decided_by="learner.token_budget"),
        Flag(name="--seed", values=(str(learner.seed),), decided_by="service.seed"),
        # Steps must not depend on random states, which a checkpoint therefore does not need.
        Flag(name="--attention-dropout", values=("0.0",), decided_by="headrace, which trains without dropout"),
        Flag(name="--hidden-dropout", values=("0.0",), decided_by="headrace, which trains without dropout"),
        Flag(name="--no-save-rng", decided_by="headrace, which trains without dropout"),
        Flag(name="--no-load-rng", decided_by="headrace, which trains without dropout"),
        *_pushes(terms),
    )


def _pushes(terms: SlimeTerms) -> tuple[Flag, ...]:
    key, transport = "push.transport", terms.transport
    values = {
        "--update-weight-transport": "nccl" if transport == "nccl" else "disk",
        "--update-weight-mode": "delta" if transport == "delta" else "full",
        "--update-weight-disk-dir": str(terms.deltas_dir if transport == "delta" else terms.learner.snapshot_dir),
        # Each engine host has its own, which slime's ranks never see.
        "--update-weight-local-checkpoint-dir": "push.local_checkpoint_dir",
    }
    return tuple(Flag(name=name, values=(value,), decided_by=key) for name, value in values.items())


def _objective(terms: SlimeTerms) -> tuple[Flag, ...]:
    learner, batch = terms.learner, str(terms.batch_size)
    return (
        Flag(name="--global-batch-size", values=(batch,), decided_by="buffer.batch_size"),
        Flag(name="--rollout-batch-size", values=(batch,), decided_by="buffer.batch_size"),
        Flag(name="--n-samples-per-prompt", values=("1",), decided_by="buffer.batch_size"),
        Flag(name="--num-rollout", values=(str(terms.steps),), decided_by="training.steps"),
        Flag(name="--advantage-estimator", values=(learner.objective,), decided_by="learner.objective"),
        # Rewards are the buffer's advantages already.
        Flag(name="--disable-rewards-normalization", decided_by="buffer.advantage"),
        Flag(name="--eps-clip", values=(str(learner.eps_low),), decided_by="learner.eps_low"),
        Flag(name="--eps-clip-high", values=(str(learner.eps_high),), decided_by="learner.eps_high"),
        *_terms_of_the_loss(learner),
        Flag(name="--entropy-coef", values=(str(learner.entropy_coef),), decided_by="learner.entropy_coef"),
        Flag(name="--rollout-temperature", values=(str(terms.temperature),), decided_by="sampling.temperature"),
    )


def _terms_of_the_loss(learner: LearnerConfig) -> Iterator[Flag]:
    if (name := "--custom-advantage-function-path") not in flag_names(learner.slime.arguments):
        yield Flag(name=name, values=(f"{TERMS}.keep_advantages",), decided_by="buffer.advantage")
    if learner.correction == "none":
        yield Flag(name="--use-rollout-logprobs", decided_by="learner.correction")
    else:
        yield Flag(name="--use-tis", decided_by="learner.correction")
        yield Flag(name="--tis-clip", values=(str(learner.weight_cap),), decided_by="learner.weight_cap")
    if learner.correction == "icepop":
        yield Flag(name="--tis-clip-low", values=(str(learner.weight_floor),), decided_by="learner.weight_floor")
        path = f"{SLIMES_LOSS}.icepop_function"
        yield Flag(name="--custom-tis-function-path", values=(path,), decided_by="learner.correction")
    if learner.dual_clip is not None:
        yield Flag(name="--eps-clip-c", values=(str(learner.dual_clip),), decided_by="learner.dual_clip")
    if learner.sequence_mask is not None:
        yield Flag(name="--use-opsm", decided_by="learner.sequence_mask")
        yield Flag(name="--opsm-delta", values=(str(learner.sequence_mask),), decided_by="learner.sequence_mask")
    if learner.kl_coef > 0:
        yield Flag(name="--use-kl-loss", decided_by="learner.kl_coef")
        yield Flag(name="--kl-loss-coef", values=(str(learner.kl_coef),), decided_by="learner.kl_coef")
        yield Flag(name="--kl-loss-type", values=(KL_KINDS[learner.kl_kind],), decided_by="learner.kl_kind")
    if learner.observation_coef > 0:
        yield Flag(name="--loss-type", values=("custom_loss",), decided_by="learner.observation_coef")
        path = f"{TERMS}.observed_loss"
        yield Flag(name="--custom-loss-function-path", values=(path,), decided_by="learner.observation_coef")


def _optimizer(terms: SlimeTerms) -> tuple[Flag, ...]:
    learner = terms.learner
    # Ours is constant after a linear warm-up whose first update already has 1 / warmup_steps of the rate; Megatron's
    # begins at lr-warmup-init.
    warmup = max(learner.warmup_steps, 1)
    decay = max(terms.steps, warmup)
    return (
        Flag(name="--optimizer", values=("adam",), decided_by="headrace, which trains with AdamW"),
        Flag(name="--lr", values=(str(learner.learning_rate),), decided_by="learner.learning_rate"),
        Flag(name="--min-lr", values=("0.0",), decided_by="learner.learning_rate"),
        Flag(name="--lr-decay-style", values=("constant",), decided_by="learner.learning_rate"),
        Flag(name="--lr-decay-iters", values=(str(decay),), decided_by="training.steps"),
        Flag(name="--lr-warmup-iters", values=(str(warmup - 1),), decided_by="learner.warmup_steps"),
        Flag(
            name="--lr-warmup-init",
            values=(str(learner.learning_rate / warmup),),
            decided_by="learner.warmup_steps",
        ),
        # A resumed run may have other steps or another rate than its checkpoint.
        Flag(name="--override-opt_param-scheduler", decided_by=_SAVES),
        Flag(name="--weight-decay", values=(str(learner.weight_decay),), decided_by="learner.weight_decay"),
        Flag(name="--adam-beta1", values=(str(learner.betas[0]),), decided_by="learner.betas"),
        Flag(name="--adam-beta2", values=(str(learner.betas[1]),), decided_by="learner.betas"),
        Flag(name="--adam-eps", values=("1e-08",), decided_by="headrace, which trains with AdamW"),
        Flag(name="--clip-grad", values=(str(learner.clip_grad_norm),), decided_by="learner.clip_grad_norm"),
        Flag(name="--accumulate-allreduce-grads-in-fp32", decided_by="headrace, which sums gradients in fp32"),
        # Without it, a non-finite gradient ends all ranks; with it, slime skips the step.
        Flag(name="--no-check-for-nan-in-loss-and-grad", decided_by="learner.max_skipped_in_a_row"),
    )


def command_line(terms: SlimeTerms, *, load: Path, slime_root: Path) -> tuple[str, ...]:
    """Return slime's arguments: the model's, the user's, then ours. Raises LearnerSettingsInvalid."""
    ours = flags(terms, load=load)
    users = user_words(terms.learner, slime_root)
    refuse_contradictions(users, ours)
    return (*users, *(word for flag in ours for word in flag.words))


def user_words(learner: LearnerConfig, slime_root: Path) -> tuple[str, ...]:
    """Return the flags of learner.slime.model, by default the one whose flags agree with the model's config.json, and
    those of learner.slime.arguments. Raises LearnerSettingsInvalid if they describe another model than that file."""
    section, config = learner.slime, learner.model_dir / "config.json"
    name, has_sizes = section.model, "--num-layers" in flag_names(section.arguments)
    if name is None and not has_sizes:
        fitting = architectures.fitting(config, slime_root)
        if len(fitting) != 1:
            raise LearnerSettingsInvalid(
                "learner.slime.model is not set, and slime needs the flags of the model's architecture: "
                + _advice(fitting, config, slime_root)
            )
        [name] = fitting
    words = (*(architectures.architecture(name, slime_root) if name is not None else ()), *section.arguments)
    if different := architectures.differences(words, config):
        raise LearnerSettingsInvalid(
            f"learner.slime.{'arguments' if has_sizes else 'model'}: {config} differs: {'; '.join(different)}; "
            + _advice(architectures.fitting(config, slime_root), config, slime_root)
        )
    return words


def _advice(fitting: Sequence[str], config: Path, slime_root: Path) -> str:
    if fitting:
        return f"set learner.slime.model to {' or '.join(fitting)}, whose flags agree with {config}"
    return f"no file of {slime_root / architectures.SCRIPTS} agrees with {config}; give them in learner.slime.arguments"


def refuse_contradictions(arguments: Sequence[str], ours: Sequence[Flag]) -> None:
    """Raise LearnerSettingsInvalid if the user's arguments contain a flag that headrace sets or that contradicts the
    recipe."""
    decided = {flag.name.replace("_", "-"): flag for flag in ours}
    for name in flag_names(arguments):
        if (flag := decided.get(name.replace("_", "-"))) is not None:
            value = " ".join(flag.values)
            raise LearnerSettingsInvalid(
                f"learner.slime.arguments: {name} is decided by {flag.decided_by}"
                f"{f' ({value})' if value else ''}; remove it, and change that instead"
            )
        if reason := REFUSED.get(name):
            raise LearnerSettingsInvalid(f"learner.slime.arguments: {name} contradicts the recipe: {reason}; remove it")


def flag_names(arguments: Sequence[str]) -> list[str]:
    """Return the names of the flags, without values."""
    return [word.partition("=")[0] for word in arguments if word.startswith("--")]


def refuse_unknown(words: Sequence[str], known: Sequence[str], *, checkout: str) -> None:
    """Raise LearnerSettingsInvalid for a flag that slime's parser, which ignores what it does not know, would drop."""
    for name in flag_names(words):
        if name not in known and name not in PARSED_EARLY:
            near = difflib.get_close_matches(name, known, 1)
            hint = (
                f"did you mean {near[0]}?"
                if near
                else "remove it, or use the checkout that headrace is written for, with slime's patch (docker/patch)"
            )
            raise LearnerSettingsInvalid(f"{checkout} has no flag {name}: {hint}")


def check_parsed(parsed: Namespace, parser: ArgumentParser, ours: Sequence[Flag]) -> None:
    """Raise LearnerSettingsInvalid if slime ended up with another value for one of our flags."""
    actions: dict[str, Any] = {name: action for action in parser._actions for name in action.option_strings}  # noqa: SLF001
    words = [word for flag in ours if flag.name in actions for word in flag.words]
    expected = parser.parse_known_args(words)[0]
    for flag in ours:
        if flag.name not in actions:
            continue
        name = actions[flag.name].dest
        wanted, found = getattr(expected, name), getattr(parsed, name)
        if wanted != found:
            raise LearnerSettingsInvalid(
                f"slime uses {name} = {found!r}, but {flag.decided_by} decides {wanted!r}: remove what changes it from "
                "learner.slime.arguments"
            )


def parse(terms: SlimeTerms, *, load: Path, slime: Checkout) -> Namespace:
    """Return slime's arguments for the recipe, with `load` as for `flags`. Imports slime and Megatron, which must be
    importable, reads the model's config, and needs a GPU, whose generation Megatron asks for. Raises
    LearnerSettingsInvalid."""
    words = command_line(terms, load=load, slime_root=slime.root)
    ours = flags(terms, load=load)
    parsed, parser = run_parser(words, ours, checkout=str(slime))
    refuse_unknown(words, known_flags(parser), checkout=str(slime))
    check_parsed(parsed, parser, ours)
    refuse_unlike_torch(parsed, checkout=str(slime))
    return parsed


def refuse_unlike_torch(parsed: Namespace, *, checkout: str) -> None:
    """Raise LearnerSettingsInvalid if ranks share layers, and torch calls process groups by names that slime's own do
    not pass on (torch 2.13 does, for the functions that Megatron takes before slime replaces them)."""
    import torch
    from slime.utils.reloadable_process_group import ReloadableProcessGroup

    names = ("all_gather_single", "reduce_scatter_single")
    called = [name for name in names if hasattr(torch.distributed.ProcessGroup, name)]
    unknown = [name for name in called if name not in vars(ReloadableProcessGroup)]
    if unknown and parsed.tensor_model_parallel_size > 1:
        raise LearnerSettingsInvalid(
            f"learner.slime.tensor_parallel {parsed.tensor_model_parallel_size}: torch {torch.__version__} calls "
            f"{', '.join(unknown)} of process groups, which those of {checkout} lack, so that no step would succeed: "
            "use the older torch of slime's image, or 1"
        )


def run_parser(words: Sequence[str], ours: Sequence[Flag], *, checkout: str) -> tuple[Namespace, ArgumentParser]:
    """Return slime's arguments for a command line, and its main parser. Raises LearnerSettingsInvalid for every error
    of slime or Megatron, with the flags of the line that it speaks of."""
    from slime.utils.arguments import parse_args

    parsers: list[ArgumentParser] = []

    def keep(parser: ArgumentParser) -> ArgumentParser:
        parsers.append(parser)
        parser.error = _refuse  # type: ignore[method-assign]
        return parser

    try:
        with _command_line(words), _log_handlers():
            parsed: Namespace = parse_args(keep)
    except LearnerSettingsInvalid:
        raise
    except Exception as error:
        text, named = explained(error, words, ours)
        raise LearnerSettingsInvalid(f"{checkout} refuses learner.slime: {text}{named}") from error
    return parsed, parsers[0]


def explained(error: Exception, words: Sequence[str], ours: Sequence[Flag]) -> tuple[str, str]:
    """Return an error of the parser on one line, and the flags of the command line that it speaks of, with what decides
    them; "" for none.

    Most of Megatron's checks are bare assertions: the line of source is all they say."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    source = linecache.getline(frame.filename, frame.lineno or 0).strip()
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    text = " ".join(str(error).split()) or source
    decided = {flag.name: flag.decided_by for flag in ours}
    spoken = set(re.findall(r"[a-z0-9_]{3,}", f"{text} {source}".replace("-", "_")))
    about = dict.fromkeys(name for name in flag_names(words) if name[2:].replace("-", "_") in spoken)
    named = ", ".join(f"{name} ({decided.get(name, 'of the model or learner.slime.arguments')})" for name in about)
    return f"{type(error).__name__}: {text} ({place})", f"; it speaks of {named}" if named else ""


def known_flags(parser: ArgumentParser) -> list[str]:
    """Return the names of all flags of a parser."""
    return [name for action in parser._actions for name in action.option_strings]  # noqa: SLF001 - no public way


def _refuse(message: str) -> NoReturn:
    raise LearnerSettingsInvalid(f"learner.slime.arguments: {message}")


@contextmanager
def _command_line(words: Sequence[str]) -> Iterator[None]:
    """Set the process's arguments, which slime reads in several places."""
    before = sys.argv
    sys.argv = ["headrace", *words]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _log_handlers() -> Iterator[None]:
    """Keep this process's log handlers and level, which slime's parser replaces."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
