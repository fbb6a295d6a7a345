"""Configuration of a run: one TOML file, composed of the parts' config models.

Invariants:
- Everything is checked before anything is created: unknown keys, wrong types, impossible combinations and unreadable
  files are refused with a one-line error that names the key or file, the reason and the fix.
- The resolved configuration is written to the run directory; `resume` reads that copy, never the recipe.
- What the recipe leaves unset is derived from model, machine, agent and other keys before validation (`derivation`):
  no recipe reaches the defaults that classes have for those keys.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Self, TypeAlias, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError, model_validator

from headrace.actors.agents.registry.config import AgentKind, AgentSection
from headrace.actors.derivation import clocks
from headrace.actors.derivation.rules import Derived, derive
from headrace.actors.derivation.terms import Terms
from headrace.actors.engines.config import EnginesConfig, Placement
from headrace.actors.engines.registry import address
from headrace.actors.environments.config import EnvironmentSection
from headrace.actors.errors import ConfigError
from headrace.actors.rollouts.dispatcher import DispatcherConfig
from headrace.actors.rollouts.rollout import RolloutConfig
from headrace.actors.run import sources as sources
from headrace.actors.run.placement import ClusterSection
from headrace.actors.run.sections import EvaluationSection, ModelSection, SamplingSection, ServiceSection
from headrace.actors.run.sources import TaskSetConfig, TasksSection
from headrace.actors.runtime.pools.config import SandboxKind, SandboxSection
from headrace.actors.services.config import ServiceConfig, ServiceName
from headrace.actors.training.learner import LearnerLoopConfig
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.source_names import source_name
from headrace.buffer.core.task_sources.shares import Source
from headrace.buffer.primitives.sections import Section
from headrace.buffer.tasks.task import Task
from headrace.buffer.trajectories.step_scores import Credit
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.learners.objectives.config import PPO
from headrace.policies.learners.slime import arguments as slime
from headrace.policies.miniatures import names as miniatures
from headrace.policies.processes.engine_keys import is_loopback
from headrace.policies.push.contract import PushSection
from headrace.serve.gateway.http.config import GatewaySection
from headrace.serve.tracing.retention import RetentionConfig
from headrace.serve.tracing.telemetry import TelemetrySection

FORMAT: Final = 1
"""Number of the format of recorded configurations."""
_RECORDED: Final = "recorded"
PUBLISHED: Final = "published"
"""Table of a recipe with the published values, which machine files take (`overlays`)."""


class RunConfig(Section):
    """Configuration of a run; each field is a table of the TOML file."""

    model: ModelSection = ModelSection()
    tasks: TasksSection = TasksSection()
    agent: AgentSection = AgentSection()
    environment: EnvironmentSection = EnvironmentSection()
    sampling: SamplingSection = SamplingSection()
    gateway: GatewaySection = GatewaySection()
    rollout: RolloutConfig = RolloutConfig()
    dispatcher: DispatcherConfig = DispatcherConfig()
    sandbox: SandboxSection = SandboxSection()
    buffer: BufferConfig = BufferConfig()
    training: LearnerLoopConfig = LearnerLoopConfig()
    learner: LearnerConfig
    engines: EnginesConfig = EnginesConfig()
    push: PushSection = PushSection()
    evaluation: EvaluationSection = EvaluationSection()
    telemetry: TelemetrySection = TelemetrySection()
    service: ServiceSection = ServiceSection()
    services: dict[ServiceName, ServiceConfig] = Field(default_factory=dict)
    """Services that environments and evaluators call, by name."""
    cluster: ClusterSection = ClusterSection()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.tasks.sources:
            self._fit_sources()
            return self
        for check in CHECKS:
            if (problem := check(self)) is not None:
                raise ValueError(problem)
        return self

    def _fit_sources(self) -> None:
        """Check the configuration of each source. Raises ValueError."""
        if (problem := sources.problem(self.tasks.sources)) is not None:
            raise ValueError(problem)
        known = TaskSetConfig()
        if changed := [key for key in TaskSetConfig.model_fields if getattr(self.tasks, key) != getattr(known, key)]:
            raise ValueError(f"tasks.{changed[0]} has no effect beside {sources.KEY}; move it to a source")
        document = self.model_dump()
        for source in self.tasks.sources:
            try:
                own = RunConfig.model_validate(sources.source_document(document, source))
            except ValidationError as error:
                raise ValueError(f"{sources.KEY}.{source.name}: {explain(error, RunConfig)}") from None
            if (problem := sources.source_problem(source, own.buffer)) is not None:
                raise ValueError(f"{sources.KEY}.{source.name}: {problem}")
            if own.sampling.temperature != self.sampling.temperature and self.learner.kind == "slime":
                raise ValueError(
                    f"{sources.KEY}.{source.name}: sampling.temperature differs from that of the run, which "
                    'learner.kind "slime" does not support; set it in [sampling]'
                )

    @property
    def retention(self) -> RetentionConfig:
        """Limits on the run's metrics, logs and evaluations."""
        return RetentionConfig.beside(self.telemetry.keep_bytes)

    @property
    def engine_context(self) -> int:
        """Most tokens of a context that an engine serves: by default as many as any session may have."""
        return self.engines.max_context_tokens or max(
            max(own.sampling.max_context_tokens, own.evaluation.sampling.max_context_tokens or 0)
            for own in self.by_source().values()
        )

    def by_source(self) -> dict[str, RunConfig]:
        """Return the configuration of each source's rollouts, by its name. Without sources it is this one, and the name
        is empty."""
        if not self.tasks.sources:
            return {"": self}
        document = self.model_dump()
        return {
            source.name: RunConfig.model_validate(sources.source_document(document, source))
            for source in self.tasks.sources
        }

    def mix(self) -> tuple[Source, ...]:
        """Return the sources for the replay buffer; none for a run without sources."""
        own = self.by_source()
        return tuple(
            Source(name=source.name, share=source.share, config=own[source.name].buffer)
            for source in self.tasks.sources
        )

    def source_of(self, task: Task) -> str:
        """Return the name of a task's source; empty in a run without sources."""
        return source_name(task.id) if self.tasks.sources else ""

    def held_out(self, tasks: Iterable[Task]) -> tuple[Task, ...]:
        """Return the held-out tasks that the run evaluates: the first ones of each source, as many as it says."""
        left = {name: own.evaluation.tasks for name, own in self.by_source().items()}
        chosen = []
        for task in tasks:
            if left[self.source_of(task)] > 0:
                left[self.source_of(task)] -= 1
                chosen.append(task)
        return tuple(chosen)


def a_model_is_named(config: RunConfig) -> str | None:
    if config.engines.is_simulated or config.model.path != Path():
        return None
    return "model.path is missing; set it"


def simulated_parts_go_together(config: RunConfig) -> str | None:
    """Refuse a real learner or agent on simulated engines, which have no weights and generate no text. Simulated
    learners and agents may use real engines."""
    parts = {
        'learner.kind = "simulated"': config.learner.kind == "simulated",
        'agent.kind = "simulated"': config.agent.kind is AgentKind.SIMULATED,
    }
    missing = [setting for setting, is_set in parts.items() if not is_set]
    if not missing or not config.engines.is_simulated:
        return None
    return f'engines.backend = "simulated" requires {" and ".join(missing)}; add what is missing'


def rows_fit_a_micro_batch(config: RunConfig) -> str | None:
    budget, context = config.learner.token_budget, config.sampling.max_context_tokens
    if budget >= context:
        return None
    return (
        f"learner.token_budget {budget} is below sampling.max_context_tokens {context}: one row would not fit in a "
        "micro-batch; raise learner.token_budget"
    )


def batches_fit_the_ranks(config: RunConfig) -> str | None:
    ranks, batch_size = config.learner.ranks, config.buffer.batch_size
    if config.learner.kind != "megatron" or ranks <= batch_size:
        return None
    return (
        f"buffer.batch_size {batch_size} is below learner.ranks {ranks}: some ranks would have nothing to train; raise "
        "buffer.batch_size or lower learner.ranks"
    )


def turns_fit_the_engines(config: RunConfig) -> str | None:
    limit = config.engines.max_context_tokens
    contexts = {
        "sampling": config.sampling.max_context_tokens,
        "evaluation.sampling": config.evaluation.sampling.max_context_tokens,
    }
    for table, context in contexts.items():
        if limit is not None and context is not None and limit < context:
            return (
                f"engines.max_context_tokens {limit} is below {table}.max_context_tokens {context}; raise "
                "engines.max_context_tokens"
            )
    return None


def weights_fit_the_devices(config: RunConfig) -> str | None:
    """Refuse NCCL for engines without GPUs, because NCCL transfers weights only between GPUs."""
    key = "push.transport" if config.push.transport == "nccl" else "push.backend"
    if "nccl" not in (config.push.backend, config.push.transport) or config.engines.device == "cuda":
        return None
    return None if config.engines.is_simulated else f"{key} nccl needs engines on GPUs; set engines.device to cuda"


def weights_have_a_way(config: RunConfig) -> str | None:
    """Refuse slime's ways of pushing for other learners, and ways that engines do not have."""
    transport = config.push.transport
    if transport in ("group", "nccl") and config.engines.data_parallel > 1:
        return (
            f"push.transport {transport} with engines.data_parallel {config.engines.data_parallel}: SGLang takes no "
            'weights by process groups with more than 1; set push.transport to "disk", or "delta" with slime'
        )
    if transport not in ("nccl", "delta"):
        return None
    if config.learner.kind != "slime":
        return (
            f'push.transport {transport} is slime\'s, and learner.kind is "{config.learner.kind}": set it to "group", '
            'with push.backend = "nccl" for engines on GPUs, or to "disk"'
        )
    if transport == "delta" and config.engines.backend == "cpu":
        return 'push.transport delta needs slime\'s SGLang, and engines.backend is "cpu": set either'
    return None


def engines_are_where_ray_places_them(config: RunConfig) -> str | None:
    engines = config.engines
    if engines.is_simulated or not engines.count:
        return None
    if engines.placement is Placement.RAY and config.cluster.is_local:
        return (
            "engines.placement ray spreads engines over the nodes of a cluster, and cluster.address is local; set "
            "engines.placement to local, or cluster.address to a cluster"
        )
    if engines.placement is Placement.LOCAL and not config.cluster.is_local and engines.gpus:
        return (
            f"engines.placement local would reserve {engines.gpus} GPUs on the control node, for the engine group; "
            "set engines.placement to ray, or leave it unset"
        )
    return None


def other_hosts_reach_the_sender(config: RunConfig) -> str | None:
    engines, host = config.engines, config.push.host
    if not is_loopback(host):
        return None
    for url in (*engines.attach, *([engines.router] if engines.router else [])):
        if not is_loopback(address(url)[0]):
            return (
                f"push.host {host} is not reachable from {url}; set push.host to an address of this host that the "
                "engine can reach"
            )
    return None


def rollouts_fit_the_sandboxes(config: RunConfig) -> str | None:
    slots = config.dispatcher.slots_per_worker * config.service.workers + config.dispatcher.evaluation_slots
    room = config.sandbox.pool.max_live - config.sandbox.pool.evaluation_reserve
    if slots <= room:
        return None
    return (
        f"{slots} rollouts at once (dispatcher.slots_per_worker x service.workers + evaluation_slots) do not fit in "
        f"{room} sandboxes (sandbox.pool.max_live - evaluation_reserve); raise max_live or lower the number of slots"
    )


def all_nodes_reach_the_sandboxes(config: RunConfig) -> str | None:
    if config.cluster.is_local:
        return None
    if config.sandbox.provider is SandboxKind.LOCAL:
        return (
            "sandbox.provider local has its sandboxes on one host, which the other nodes of a cluster do not reach; "
            "set sandbox.provider to remote"
        )
    key_file = config.sandbox.remote.key_file
    if key_file is not None and not key_file.is_absolute() and not str(key_file).startswith(SECRET):
        return f"sandbox.remote.key_file {key_file} is relative; on a cluster, write a path that all nodes have"
    return None


def remote_hosts_are_named(config: RunConfig) -> str | None:
    if config.sandbox.provider is not SandboxKind.REMOTE or config.sandbox.remote.urls:
        return None
    return "sandbox.provider is remote, but sandbox.remote.urls is empty; list the URLs of the exec servers"


def programs_fit_the_sandboxes(config: RunConfig) -> str | None:
    agent, provider = config.agent, config.sandbox.provider
    if agent.is_program and provider not in (SandboxKind.LOCAL, SandboxKind.REMOTE):
        return (
            f"agent.kind {agent.kind} must reach the gateway from inside its sandbox, which sandbox.provider "
            f"{provider} does not support; set sandbox.provider to local or remote"
        )
    if agent.is_program and provider is SandboxKind.REMOTE and not agent.program.in_image:
        return (
            "agent.program.in_image is empty, but sandbox.provider remote cannot mount folders of this host; set it to "
            "the program's path in the tasks' images"
        )
    return None


def enough_held_out_tasks(config: RunConfig) -> str | None:
    if config.tasks.heldout is not None or config.evaluation.tasks <= config.tasks.heldout_count:
        return None
    return (
        f"evaluation.tasks {config.evaluation.tasks} is above tasks.heldout_count {config.tasks.heldout_count}; "
        "generate more held-out tasks or evaluate on fewer of them"
    )


def external_trainers_reach_the_run(config: RunConfig) -> str | None:
    if config.learner.kind != "external" or not config.cluster.is_local:
        return None
    return (
        'learner.kind "external" takes batches over the control API, which only a cluster has; submit the recipe with '
        "--address or to the API"
    )


def observations_reach_the_learner(config: RunConfig) -> str | None:
    if not config.learner.needs_kinds:
        return None
    if config.learner.kind == "external":
        return (
            f"learner.observation_coef {config.learner.observation_coef:g} has no effect with learner.kind external, "
            "whose loss is your own; remove it"
        )
    if config.buffer.zero_variance == "filter":
        return (
            f"learner.observation_coef {config.learner.observation_coef:g} also trains on groups with equal rewards, "
            "which buffer.zero_variance filter leaves out of batches; set buffer.zero_variance to keep"
        )
    return None


def slime_trains_the_recipe(config: RunConfig) -> str | None:
    return slime.problem(slime_terms(config)) if config.learner.kind == "slime" else None


def services_end_before_the_agent(config: RunConfig) -> str | None:
    agent_s = config.rollout.agent_timeout_s
    for name, service in config.services.items():
        if service.retry.total_s >= agent_s:
            return (
                f"services.{name}.retry.total_s {service.retry.total_s:g} is not below rollout.agent_timeout_s "
                f"{agent_s:g}: an outage would look like an agent that used up its time; lower it, or raise "
                "rollout.agent_timeout_s"
            )
    return None


def all_nodes_reach_the_services(config: RunConfig) -> str | None:
    for name, service in config.services.items():
        if service.is_started and not config.cluster.is_local:
            key, command = ("corpus", "retriever") if service.corpus is not None else ("path", "model")
            return (
                f"services.{name}.{key} is served on one host, which the other nodes of a cluster do not reach; start "
                f"one with `headrace {command} serve` and set services.{name}.url"
            )
    return None


def credit_of_steps_fits_the_run(config: RunConfig) -> str | None:
    """Refuse advantages of single turns where the parts of the run would not use them as they are defined."""
    if config.agent.kind is not AgentKind.LOOP or config.agent.loop.judge.credit is not Credit.STEPS:
        return None
    key = "agent.loop.judge.credit is steps"
    if config.buffer.rule != "all":
        return f"{key}, which compares the steps of complete groups, but buffer.rule is {config.buffer.rule}; set all"
    if config.learner.objective == PPO:
        return f"{key}, but learner.objective {PPO} takes its advantages from the critic; set credit to reward"
    if config.learner.kind == "slime":
        if (function := "--custom-advantage-function-path") in slime.flag_names(config.learner.slime.arguments):
            return f"{key}, but {function} in learner.slime.arguments replaces all advantages; remove it"
        if config.learner.objective == "gspo":
            return f"{key}, but slime's gspo has one gradient for all tokens of a row; set learner.objective to grpo"
    return None


CHECKS = (
    a_model_is_named,
    simulated_parts_go_together,
    rows_fit_a_micro_batch,
    batches_fit_the_ranks,
    turns_fit_the_engines,
    weights_fit_the_devices,
    weights_have_a_way,
    engines_are_where_ray_places_them,
    other_hosts_reach_the_sender,
    lambda config: clocks.problem(Terms.of(config)),
    rollouts_fit_the_sandboxes,
    all_nodes_reach_the_sandboxes,
    remote_hosts_are_named,
    programs_fit_the_sandboxes,
    enough_held_out_tasks,
    credit_of_steps_fits_the_run,
    slime_trains_the_recipe,
    observations_reach_the_learner,
    external_trainers_reach_the_run,
    services_end_before_the_agent,
    all_nodes_reach_the_services,
)
"""Checks for combinations that cannot work. Each returns the problem with the key to change, or None."""


def slime_terms(config: RunConfig) -> slime.SlimeTerms:
    """Return what the recipe decides for a slime learner."""
    return slime.SlimeTerms(
        learner=config.learner,
        batch_size=config.buffer.batch_size,
        temperature=config.sampling.temperature,
        steps=config.training.steps,
        transport=own_transport(config),
        node_label=None if config.cluster.is_local else config.cluster.roles.learner,
    )


def own_transport(config: RunConfig) -> str:
    """Return slime's part in pushes: nccl, delta or disk."""
    transport = config.push.transport
    if transport == "auto":
        # SGLang with data parallelism takes no weights by process groups.
        shared = "nccl" if config.engines.data_parallel == 1 else "delta"
        return shared if config.engines.device == "cuda" else "disk"
    return "disk" if transport == "group" else transport


def load_recipe(recipe: Path, overrides: Sequence[str], run_dir: Path) -> RunConfig:
    """Read a recipe with `key.sub=value` overrides for a run in `run_dir`. Raises ConfigError."""
    return resolve(read_recipe(recipe, overrides), recipe, run_dir)


def read_recipe(recipe: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the document of a recipe with `key.sub=value` overrides, unchecked, without what is published. Raises
    ConfigError."""
    document = read_file(recipe)
    document.pop(PUBLISHED, None)
    for override in overrides:
        apply_override(document, override)
    return document


def read_file(path: Path) -> dict[str, Any]:
    """Return the document of a recipe or machine file, unchecked. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "name a recipe, e.g. one that `headrace init` wrote"
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); {hint}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


Tell: TypeAlias = Callable[[Iterable[Derived]], object]
"""Gets the values that were derived, without timeouts, which follow from other timeouts."""


def resolve(document: dict[str, Any], recipe: Path, run_dir: Path, tell: Tell = lambda _: None) -> RunConfig:
    """Validate a document and make its paths absolute. Raises ConfigError."""
    return validated(absolute_paths(document, recipe), recipe, run_dir, tell)


def validated(
    document: dict[str, Any], recipe: Path, run_dir: Path, tell: Tell = lambda _: None, *, reads: bool = True
) -> RunConfig:
    """Derive what a document leaves unset, and validate it. Its paths are not changed. Unless `reads`, the model is not
    looked at. Raises ConfigError."""
    learner = document.setdefault("learner", {})
    for key in ("model_dir", "checkpoint_dir", "snapshot_dir", "seed"):
        if isinstance(learner, dict) and key in learner:
            fix = {"model_dir": "set model.path instead", "seed": "set service.seed instead"}.get(
                key, "remove it (the folder is always in the run directory)"
            )
            raise ConfigError(f"{recipe}: learner.{key} cannot be set; {fix}")
    telemetry = document.setdefault("telemetry", {})
    if recipe.suffix and isinstance(telemetry, dict):
        telemetry.setdefault("recipe", recipe.stem)
    tell(one for one in derive(document, RunConfig, reads=reads) if one.key not in clocks.DERIVED)
    model_path = document["model"].get("path", "") if isinstance(document.get("model"), dict) else ""
    service = document.get("service")
    seed = service.get("seed", 0) if isinstance(service, dict) else 0
    if isinstance(learner, dict):
        learner |= {
            "model_dir": model_path,
            "checkpoint_dir": str(run_dir / "checkpoints"),
            "snapshot_dir": str(run_dir / "weights"),
            "seed": seed,
        }
    try:
        config = RunConfig.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"{recipe}: {explain(error, RunConfig)}") from error
    if infinite := list(_infinite_keys(config.model_dump())):
        # JSON has no infinity: the run's config.json would have null, and no command could read the run again.
        raise ConfigError(f"{recipe}: {infinite[0]} is infinite; set a finite number, or leave it out for its default")
    return config


def absolute_paths(document: dict[str, Any], recipe: Path) -> dict[str, Any]:
    """Make the paths in a recipe absolute, which are relative to its folder; return the document."""
    base = recipe.resolve().parent
    for name, table, key in named_paths(document):
        table[key] = str(_absolute(table[key], base, name))
    return document


def named_paths(document: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the paths that a recipe's document sets, as `named_values` does, but not the names of secrets."""
    return (found for found in named_values(document, RECIPE_PATHS) if not found[1][found[2]].startswith(SECRET))


def named_values(
    document: Mapping[str, Any], keys: Iterable[Sequence[str]]
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the texts that a recipe's document sets for `keys`, with `ANY_NAME` for each table at a place: the dotted
    key, the table that has it, and its last part."""

    def below(tables: Mapping[str, Any], parts: Sequence[str], above: str) -> Iterator[tuple[str, dict[str, Any], str]]:
        first, *rest = parts
        for name in tables if first == ANY_NAME else (first,):
            value = tables.get(name)
            if not rest and isinstance(value, str) and isinstance(tables, dict):
                yield f"{above}{name}", tables, name
            elif rest and isinstance(value, list):
                # An array of tables, whose names are its positions.
                yield from below({str(place): each for place, each in enumerate(value)}, rest, f"{above}{name}.")
            elif rest and isinstance(value, dict):
                yield from below(value, rest, f"{above}{name}.")

    for parts in keys:
        yield from below(document, parts, "")


def _absolute(path: str, base: Path, key: str) -> Path:
    """Return the absolute path of a file that a recipe in `base` names. Raises ConfigError."""
    if not path.startswith(miniatures.PREFIX):
        return (base / path).resolve()
    try:
        return miniatures.resolved(path)
    except miniatures.MiniatureUnknown as error:
        raise ConfigError(f"{key}: {error}") from error


ANY_NAME: Final = "*"
SECRET: Final = "secret:"
"""Beginning of a key file that is a secret of the run's owner on a cluster (guide 'Control API of a cluster')."""
RECIPE_PATHS = (
    ("model", "path"),
    ("tasks", "train"),
    ("tasks", "heldout"),
    *(("tasks", "sources", ANY_NAME, key) for key in ("train", "heldout")),
    *(("tasks", "sources", ANY_NAME, "environment", "retail", key) for key in ("data", "policy", "tools")),
    ("environment", "retail", "data"),
    ("environment", "retail", "policy"),
    ("environment", "retail", "tools"),
    ("engines", "key_file"),
    ("learner", "slime", "slime_dir"),
    ("learner", "slime", "megatron_dir"),
    ("services", ANY_NAME, "corpus"),
    ("services", ANY_NAME, "path"),
    ("services", ANY_NAME, "engine", "python"),
    ("services", ANY_NAME, "key_file"),
)
"""Keys whose values are paths relative to the recipe. `ANY_NAME` stands for each table at that place."""


def _infinite_keys(value: object, key: str = "") -> Iterator[str]:
    """Yield the dotted keys of all numbers that are not finite."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from _infinite_keys(below, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for below in value:
            yield from _infinite_keys(below, key)
    elif isinstance(value, float) and not math.isfinite(value):
        yield key


_FIXED: Final = "it is no longer a key, since its value suits every run: remove it"
_OF_WEIGHTS: Final = "it is no longer a key: it follows from the size of the weights; remove it"
MOVED: Final[Mapping[str, str]] = {
    "dispatcher.pacing.enabled": "it is now dispatcher.pacing = true",
    "retention": "it is no longer a table: all limits follow from telemetry.keep_bytes; set that",
    "rollout.guard_s": "it is no longer a key: it is the sum of the rollout's other timeouts; remove it",
    "push.read_timeout_s": _OF_WEIGHTS,
    "push.load_timeout_s": _OF_WEIGHTS,
    "gateway.gate_wait_s": "it is no longer a key: it follows from engines.start_timeout_s; remove it",
    "push.gate_lease_s": "it is no longer a key: it follows from service.hang_s; remove it",
    **dict.fromkeys(
        (
            *(f"dispatcher.pacing.{key}" for key in ("increase", "interval_s", "decrease", "engine_queue")),
            *("dispatcher.pacing.latency_ratio", "dispatcher.evaluation_attempts"),
            *("push.phase_timeout_s", "push.transfer_timeout_s", "push.bucket_bytes"),
            *(f"gateway.{key}" for key in ("render_processes", "render_cpu_s", "header_timeout_s", "body_timeout_s")),
            *(f"gateway.{key}" for key in ("send_timeout_s", "max_session_body_bytes", "max_total_body_bytes")),
            *("telemetry.max_queue_spans", "telemetry.flush_interval_s"),
        ),
        _FIXED,
    ),
}
"""Keys that recipes or guides once showed, and what became of them."""


def explain(error: ValidationError, model: type[BaseModel], *, page: str = "the guide 'Configuration'") -> str:
    """Describe the first problem in a validation error for `model`: key, reason and, for an unknown key, the fix."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    reason = first["msg"].removeprefix("Value error, ")
    below = first["input"] if isinstance(first["input"], Mapping) else ()
    if (
        moved := next((name for name in (key, *(f"{key}.{name}" for name in below)) if name in MOVED), None)
    ) is not None:
        return f"unknown key {moved}; {MOVED[moved]}"
    if first["type"] == "extra_forbidden":
        meant = _suggestion(model, [str(part) for part in first["loc"]])
        advice = f"did you mean {meant}?" if meant else "remove it or check its spelling"
        return f"unknown key {key}; {advice} ({page} lists the keys)"
    if first["type"] == "missing":
        return f"{key} is missing; set it"
    given = "" if first["type"] == "value_error" else f" (given: {first['input']!r})"
    return f"{key}: {reason}{given}" if key else reason


def _suggestion(model: type[BaseModel], path: Sequence[str]) -> str | None:
    """Return the dotted key of `model` that is nearest to the unknown one, or None if no key is similar. Similar keys
    of the same table come first, then keys of the same name, then similar keys of other tables."""
    *table, name = path
    keys = list(_keys(model, path))
    beside = [key for key in keys if key[:-1] == tuple(table)]
    for among in (beside, keys):
        # The same name in another table is better than a similar name: `steps` means `training.steps`.
        if named := [key for key in among if key[-1] == name]:
            return ".".join(named[0]) if len(named) == 1 else None
        names = {key[-1]: key for key in reversed(among)}
        if near := get_close_matches(name, names, n=1, cutoff=0.75):
            return ".".join(names[near[0]])
    return None


def _keys(model: type[BaseModel], path: Sequence[str], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all keys, tables included. Tables with names of the user's have the name that they have in
    `path`, and are left out if it does not lead there."""
    for name, field in model.model_fields.items():
        yield (*above, name)
        here = (*above, name)
        if get_origin(field.annotation) is dict:
            if tuple(path[: len(here)]) != here or len(path) <= len(here):
                continue
            here = (*here, path[len(here)])
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _keys(kind, path, here)


def recorded(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document as a run directory stores it, with the number of its format."""
    return {_RECORDED: {"format": FORMAT}, **document}


def of_record(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document that a run directory or a checkpoint stores. Raises ValueError if it has another format."""
    document = dict(stored)
    if document.pop(_RECORDED, None) != {"format": FORMAT}:
        raise ValueError("it is of an unreleased version of headrace: start a new run")
    return document


def apply_override(document: dict[str, Any], override: str) -> None:
    """Set one dotted key, e.g. `buffer.max_staleness=2`. A value that is not valid TOML is taken as a string. Raises
    ConfigError."""
    key, separator, text = override.partition("=")
    path = key.strip().split(".")
    if not separator or not all(path) or len(path) < 2:
        raise ConfigError(f"--set {override}: write table.key=value, e.g. --set buffer.max_staleness=2")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    table = document
    for part in path[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override}: {part} is a value, not a table")
    table[path[-1]] = value
