"""Checks that a run of a configuration can start: what the recipe names, and what this machine offers.

Invariant: nothing is created but miniatures, which are built where they are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from headrace.actors.agents.registry.config import AgentKind
from headrace.actors.agents.registry.registry import make_agent
from headrace.actors.derivation.host import this_host
from headrace.actors.derivation.rules import facts_of, memory_problem
from headrace.actors.derivation.terms import Terms
from headrace.actors.engines.config import EnginesConfig, Placement
from headrace.actors.engines.devices import needed_gpus, refuse_missing_gpus, refuse_shared_gpus
from headrace.actors.environments.registry import make_environment
from headrace.actors.errors import ConfigError
from headrace.actors.run.config import RunConfig
from headrace.actors.run.progress import starting
from headrace.actors.run.sources import KEY
from headrace.actors.runtime.actors.runtime import check_ray_folder
from headrace.actors.runtime.pools.config import SandboxKind
from headrace.actors.runtime.pools.providers import check_provider
from headrace.actors.services.clients import check_services, refuse_missing_services
from headrace.actors.services.config import ServiceKind
from headrace.buffer.primitives.registry import PartRefused
from headrace.policies.errors import EngineSettingsInvalid, EngineStartFailed, LearnerSettingsInvalid
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.learners.objectives import registry
from headrace.policies.learners.slime.arguments import user_words
from headrace.policies.learners.slime.checkout import find_checkouts
from headrace.policies.miniatures.names import name_of
from headrace.policies.models.facts import ModelFacts
from headrace.policies.models.model_files import check_model_files
from headrace.policies.models.qwen_config import QwenConfig, check_computable
from headrace.policies.processes.engine_keys import read_engine_key
from headrace.policies.sglang.server import find_python
from headrace.policies.tokens.model_keys import read_language_keys
from headrace.sandboxes.doctor import require_namespaces
from headrace.sandboxes.errors import FolderRefused, NamespacesUnavailable
from headrace.serve.gateway.http.placement import most_processes
from headrace.serve.gateway.rendering.template_renderer import load_renderer

LONGER_CONTEXTS: Final = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
"""Variable of SGLang that lets it serve more tokens than a model has positions for."""


@contextmanager
def of_source(name: str) -> Iterator[None]:
    """Name the source in the configuration errors of the block, if the run has sources."""
    try:
        yield
    except ConfigError as error:
        if not name:
            raise
        raise ConfigError(f"{KEY}.{name}: {error}") from error


def check_parts(config: RunConfig) -> None:
    """Check that the model, the agent, the services, the sandboxes and the folder for temporary files are usable.
    Raises ConfigError, ModelInvalid, NamespacesUnavailable and FolderRefused."""
    for check in MACHINE_CHECKS:
        check(config)
    check_recipe_parts(config)


def check_recipe_parts(config: RunConfig) -> None:
    """Check what does not depend on this machine: the model's files, the agent, the services, the objective. Raises
    ConfigError, ModelInvalid."""
    build_miniature(config)
    if not config.engines.is_simulated:
        # Without any weights the rest is checked here, and the start of a run refuses it (`check_weights`).
        has_weights = any(config.model.path.glob("*.safetensors"))
        check_model_files(config.model.path, weights=has_weights)
        refuse_quantised(config.model.path)
        refuse_long_contexts(config, ModelFacts.read(config.model.path).context)
        # SGLang and other learners check the architecture themselves.
        if config.learner.kind == "megatron" or (config.engines.backend == "cpu" and config.engines.count):
            QwenConfig.read(config.model.path / "config.json")
            if has_weights:
                check_computable(config.model.path)
        if config.learner.needs_kinds:
            load_renderer(config.model.path, token_kinds=True)
    try:
        read_engine_key(config.engines.key_file, "engines.key_file")
    except EngineSettingsInvalid as error:
        raise ConfigError(str(error)) from error
    refuse_shared_gpus(config.engines, reserved_gpus(config))
    check_services(config.services)
    for name, own in config.by_source().items():
        with of_source(name):
            check_agent(own)
    if config.learner.kind != "slime":
        check_objective(config.learner)


def refuse_quantised(model_dir: Path) -> None:
    """Raise ConfigError for a model with quantised weights, such as FP8."""
    if quantised := read_language_keys(model_dir / "config.json").get("quantization_config"):
        method = quantised.get("quant_method", "") if isinstance(quantised, dict) else quantised
        raise ConfigError(
            f"model.path: the weights of {model_dir} are quantised (quantization_config: {method}). Learners would "
            "export them with scales, which pushes do not carry, or without, which engines cannot read in their place; "
            "set it to the model in bfloat16"
        )


def refuse_long_contexts(config: RunConfig, positions: int) -> None:
    """Raise ConfigError for contexts beyond the model's positions, with which no SGLang server would start."""
    engines, context = config.engines, config.engine_context
    allowed = engines.sglang.environment.get(LONGER_CONTEXTS, "").lower() in ("1", "true")
    if context <= positions or allowed or engines.backend != "sglang" or not engines.count:
        return
    table = "engines" if engines.max_context_tokens else "sampling"
    raise ConfigError(
        f"{table}.max_context_tokens: {config.model.path} has positions for {positions:,} tokens, and engines would "
        f"serve {context:,}; use at most {positions:,}, or set {LONGER_CONTEXTS} to 1 in engines.sglang.environment"
    )


def check_weights(config: RunConfig) -> None:
    """Raise ConfigError if a model has a description and no weights."""
    path = config.model.path
    if not config.engines.is_simulated and (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
        raise ConfigError(f"model.path: {path} has no weights; download the model again")


def check_memory(config: RunConfig) -> None:
    """Raise ConfigError if the model is too large for this host's memory, or for the GPUs of the run."""
    problem = memory_problem(Terms.of(config, facts_of(config.model.path)))
    if problem is not None and not config.engines.is_simulated:
        raise ConfigError(problem)


def check_gateways(config: RunConfig) -> None:
    """Raise ConfigError if this machine has fewer cores than the run has gateways."""
    if (processes := config.gateway.processes) > (cores := most_processes()):
        raise ConfigError(
            f"gateway.processes = {processes}: this machine has {cores} cores for them; use at most {cores}"
        )


def check_agent(config: RunConfig) -> None:
    """Check the agent with its environment, and that the services exist which they use. Raises ConfigError."""
    make_agent(config.agent, config.environment)
    if config.agent.kind is AgentKind.LOOP:
        refuse_missing_services(make_environment(config.environment).services, config.services)
        if config.agent.loop.judge.service:
            judges = (config.agent.loop.judge.service,)
            refuse_missing_services(judges, config.services, kind=ServiceKind.MODEL, user="agent.loop.judge")


def build_miniature(config: RunConfig) -> None:
    """Build the miniature whose model the run trains, if it is one and does not exist yet. Raises ConfigError."""
    name = name_of(config.model.path)
    if name is None or config.model.path.is_dir():
        return
    # Imported late, because it needs torch.
    from headrace.policies.miniatures.building import build

    try:
        with starting(f"the miniature {name} (its policy is trained for about a minute)", quiet=False):
            build(name)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"model.path: the miniature {name} cannot be built: {error}; install headrace[cpu], or name a model"
        ) from error


def reserved_gpus(config: RunConfig) -> dict[str, int]:
    """Return the number of GPUs that each part of a run reserves."""
    return needed_gpus(config.engines, config.push, learner=config.learner.reserved_gpus)


def check_objective(learner: LearnerConfig) -> None:
    """Raise ConfigError if the learner's objective does not exist or does not go with its correction."""
    try:
        registry.check_objective(learner)
    except PartRefused as error:
        raise ConfigError(f"learner.objective: {error}") from error


def check_slime(learner: LearnerConfig) -> None:
    """Raise ConfigError if slime or Megatron-LM is missing or differs from what headrace uses of it, or the flags of
    the architecture describe another model."""
    try:
        slime, _ = find_checkouts(learner.slime)
        user_words(learner, slime.root)
    except LearnerSettingsInvalid as error:
        raise ConfigError(str(error)) from error


def refuse_absent_sglang(engines: EnginesConfig) -> None:
    """Raise ConfigError if the run would start SGLang servers here and there is no environment for them."""
    if engines.backend != "sglang" or not engines.count or engines.placement is Placement.RAY:
        return
    try:
        find_python(engines.sglang.python, engines.device)
    except EngineStartFailed as error:
        other = "" if engines.device == "cuda" else ", or set engines.sglang.python to another environment's Python"
        raise ConfigError(f"engines.backend sglang: {error}{other}, or set engines.backend to cpu") from error


MACHINE_CHECKS: Final[tuple[Callable[[RunConfig], object], ...]] = (
    lambda _: check_ray_folder(),
    lambda config: refuse_absent_sglang(config.engines),
    lambda config: check_provider(config.sandbox),
    lambda config: check_gateways(config) if config.cluster.is_local else None,
    lambda config: check_memory(config) if config.cluster.is_local else None,
    check_weights,
    lambda config: check_slime(config.learner) if config.learner.kind == "slime" else None,
    lambda config: require_namespaces() if config.sandbox.provider is SandboxKind.LOCAL else None,
)
"""Checks of what this machine offers. Each raises ConfigError, NamespacesUnavailable or FolderRefused."""


def absent_parts(config: RunConfig) -> tuple[str, ...]:
    """Return the reasons why a run cannot start on this machine, which need not be the one that it is for."""

    def check_gpus(config: RunConfig) -> None:
        # A run asks Ray, once that has started.
        if config.cluster.is_local:
            refuse_missing_gpus(reserved_gpus(config), len(this_host().gpus))
            return
        gpus = sum(reserved_gpus(config).values())
        raise ConfigError(f"{config.cluster.address} is asked at the submission for {gpus} GPUs, labels and folders")

    absent = []
    for check in (*MACHINE_CHECKS, check_gpus):
        try:
            check(config)
        except (ConfigError, NamespacesUnavailable, FolderRefused) as error:
            absent.append(str(error))
    return tuple(absent)
