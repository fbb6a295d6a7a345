"""The configuration of a run: one TOML file, composed of the config models of the parts.

Invariants:
- Everything is checked before anything is made: unknown keys, wrong types, impossible combinations and unreadable files
  are refused with the key or file, the reason and the fix, on one line.
- A resolved configuration is written into the run directory; `resume` reads that one, never the recipe.
- Clocks that the recipe leaves unset are derived (`clocks`): nobody sees their placeholder 0.
"""

from __future__ import annotations

import tomllib
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from headrace.actors import clocks
from headrace.actors.agents.claude_code import ClaudeCodeConfig
from headrace.actors.agents.cli_agent import ProgramConfig
from headrace.actors.agents.codex import CodexConfig
from headrace.actors.agents.mini_swe_agent import MiniSweAgentConfig
from headrace.actors.agents.shell import ShellAgentConfig
from headrace.actors.agents.simulated import SimulatedAgentConfig
from headrace.actors.dispatcher import DispatcherConfig
from headrace.actors.engine_group.config import EnginesConfig
from headrace.actors.engine_group.registry import address, is_loopback
from headrace.actors.errors import ConfigError
from headrace.actors.learner import LearnerLoopConfig
from headrace.actors.retry import DEFAULT_ABSENT_S
from headrace.actors.rollout import RolloutConfig
from headrace.actors.suggestions import suggestion
from headrace.buffer.replay import BufferConfig
from headrace.policies.megatron import LearnerConfig
from headrace.policies.push.contract import PushConfig
from headrace.sandboxes.local.provider import LocalSandboxConfig
from headrace.sandboxes.oci.provider import OciSandboxConfig
from headrace.sandboxes.pool.pool import PoolConfig
from headrace.sandboxes.simulated.provider import SimulationConfig
from headrace.serve.model_use import ModelUse
from headrace.serve.observing.retention import RetentionConfig
from headrace.serve.observing.telemetry import TelemetryConfig

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AgentKind(StrEnum):
    """Which agent works on the tasks."""

    SHELL = "shell"
    """The white-box shell agent: every answer of the policy is a command."""
    IMMEDIATE = "immediate"
    """Returns at once: for measuring the orchestration only."""
    SIMULATED = "simulated"
    """Takes time instead of working, over simulated engines: for replays and measuring."""
    CLAUDE_CODE = "claude-code"
    """Anthropic's program, in the sandbox; this and the following come by `scripts/install_agents`."""
    CODEX = "codex"
    """OpenAI's program, in the sandbox."""
    MINI_SWE_AGENT = "mini-swe-agent"
    """A small agent in Python with one tool or none, in the sandbox."""
    QWEN_CODE = "qwen-code"
    """Qwen's program, in the sandbox."""
    OPENCODE = "opencode"
    """A program for many providers, in the sandbox."""


class SandboxKind(StrEnum):
    """Which provider boots the sandboxes."""

    LOCAL = "local"
    """Linux namespaces on this host."""
    OCI = "oci"
    """Containers of runc or runsc on this host."""
    REMOTE = "remote"
    """Other hosts, through their exec servers (`headrace sandbox serve`)."""
    SIMULATED = "simulated"
    """None: they take time, and fail, as the settings say."""
    SUBPROCESS = "subprocess"
    """Plain processes on this host: protects nothing."""


class ModelSection(_Section):
    path: Path = Path()
    """Hugging Face directory of the policy (config.json, model.safetensors, tokenizer.json); relative to the recipe.
    Simulated engines need none."""


class TasksSection(_Section):
    train: Path | None = None
    """JSONL of training tasks (docs/tasks.md), relative to the recipe; None generates terminal tasks."""
    heldout: Path | None = None
    """JSONL of held-out tasks; must be given exactly when `train` is."""
    train_count: int = Field(default=512, ge=1)
    """Generated training tasks."""
    heldout_count: int = Field(default=64, ge=1)
    """Generated held-out tasks."""
    evaluate_s: float = Field(default=0.0, ge=0)
    """Time of evaluating a rollout of a generated task for the simulated agent."""

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.train is None) != (self.heldout is None):
            raise ValueError("tasks.train and tasks.heldout go together: set both files or neither")
        return self


class AgentSection(_Section):
    kind: AgentKind = AgentKind.SHELL
    """Which agent works on the tasks: `shell`, `claude-code`, `codex`, `mini-swe-agent`, `qwen-code`, `opencode`,
    `simulated`, which takes time, or `immediate`, which does nothing."""
    shell: ShellAgentConfig = ShellAgentConfig()
    """Settings of the shell agent."""
    program: ProgramConfig = ProgramConfig()
    """Settings of an agent that is a program, whichever."""
    claude_code: ClaudeCodeConfig = ClaudeCodeConfig()
    """Further settings of Claude Code."""
    codex: CodexConfig = CodexConfig()
    """Further settings of Codex."""
    mini_swe_agent: MiniSweAgentConfig = MiniSweAgentConfig()
    """Further settings of mini-swe-agent."""
    simulated: SimulatedAgentConfig = SimulatedAgentConfig()
    """Settings of the simulated agent."""

    @property
    def is_program(self) -> bool:
        """Whether the agent is a program in the sandbox."""
        return self.kind not in (AgentKind.SHELL, AgentKind.IMMEDIATE, AgentKind.SIMULATED)

    @property
    def max_turns(self) -> int:
        """Answers of the policy in one session."""
        if self.kind is AgentKind.SIMULATED:
            return self.simulated.turns
        return self.program.max_turns if self.is_program else self.shell.max_turns


class SamplingSection(_Section):
    temperature: float = Field(default=1.0, gt=0)
    """Law for every turn of a training session, whatever the agent asks for."""
    max_tokens_per_turn: int = Field(default=48, ge=1)
    """Tokens one answer may have."""
    max_context_tokens: int = Field(default=256, ge=16)
    """Prompt and answers of one conversation together."""
    max_sampled_tokens: int | None = Field(default=None, ge=1)
    """Tokens sampled in one session, all its conversations together; None for no limit."""
    train_truncated: bool = True
    """Whether turns that the end of the context cut are trained; false masks them as `truncated`."""


class GatewaySection(_Section):
    parser: str = "auto"
    """How tool calls and reasoning are read: auto (by the chat template), hermes, qwen3_coder, none, or sglang:NAME
    with a parser of SGLang's."""
    model_policy: tuple[tuple[str, ModelUse], ...] = ()
    """Pairs of a pattern and a use, e.g. [["*haiku*", "serve"]]: what the names that agents ask for are. `train` (any
    name that no pattern fits), `serve` (sampled, masked as `side`) or `refuse`."""
    ping_s: float = Field(default=10.0, gt=0)
    """How often a stream that waits for its turn gets a ping; below 15 s, or some agents give up."""
    gate_wait_s: float = Field(default=0.0, gt=0)
    """How long a turn waits while no engine serves before the agent gets an infra error. Time in which a push has an
    engine does not count."""
    turn_timeout_s: float = Field(default=0.0, gt=0)
    """How long one engine call may take before it is aborted and tried elsewhere. Time in which a push has the engine
    does not count."""
    held_after_s: float = Field(default=5.0, gt=0)
    """A turn that is broken off after so long without one sampled token makes its rollout infra, not a spent budget."""


class RemoteSection(_Section):
    urls: tuple[str, ...] = ()
    """Base URLs of exec servers; boots are spread over them."""
    key_file: Path | None = None
    """Holds the key of all of them; relative to the working folder."""


class SandboxSection(_Section):
    provider: SandboxKind = SandboxKind.LOCAL
    """Where commands run; `subprocess` must be asked for and says what it does not protect."""
    local: LocalSandboxConfig = LocalSandboxConfig()
    """Settings of the namespaces provider."""
    oci: OciSandboxConfig = OciSandboxConfig()
    """Settings of the containers provider."""
    remote: RemoteSection = RemoteSection()
    """Where other hosts are."""
    simulated: SimulationConfig = SimulationConfig()
    """Settings of the simulated provider."""
    pool: PoolConfig = PoolConfig()
    """Admission: how many boot and live at once."""


class EvaluationSamplingSection(_Section):
    """Sampling of evaluation rollouts. Keys that are left out are those of [sampling], but top_p and top_k: training
    never cuts the distribution."""

    temperature: float | None = Field(default=None, ge=0, le=10)
    """For every turn of an evaluation session, whatever the agent asks for; 0 takes the likeliest token. None:
    sampling.temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Only the likeliest tokens with this share of the probability together; 1 for all."""
    top_k: int = Field(default=-1, ge=-1)
    """Only so many of the likeliest tokens; -1 for all."""
    max_tokens_per_turn: int | None = Field(default=None, ge=1)
    """Tokens one answer may have. None: sampling.max_tokens_per_turn."""
    max_context_tokens: int | None = Field(default=None, ge=16)
    """Prompt and answers of one conversation together. None: sampling.max_context_tokens."""
    max_sampled_tokens: int | None = Field(default=None, ge=1)
    """Tokens sampled in one session, all its conversations together. None: sampling.max_sampled_tokens."""

    @field_validator("top_k")
    @classmethod
    def _some(cls, value: int) -> int:
        if value == 0:
            raise ValueError("0 leaves no token to sample; set -1 for all tokens")
        return value


class EvaluationSection(_Section):
    tasks: int = Field(default=64, ge=1)
    """Held-out tasks per evaluation (the first of the held-out file)."""
    samples: int = Field(default=4, ge=1)
    """Sampled answers per task for the base and the final evaluation."""
    every_steps: int = Field(default=10, ge=0)
    """Optimizer updates between evaluations on the way; 0 for none."""
    samples_on_the_way: int = Field(default=1, ge=1)
    """Sampled answers per task of those."""
    sampling: EvaluationSamplingSection = EvaluationSamplingSection()
    """How evaluation rollouts are sampled."""


class ServiceSection(_Section):
    seed: int = Field(default=0, ge=0)
    """Of task order, sampling and learner."""
    workers: int = Field(default=1, ge=1)
    """Rollout workers."""
    stall_s: float = Field(default=0.0, gt=0)
    """No progress anywhere for so long ends the run with a diagnosis. A learner's stage, an engine's start, a boot and
    a push have clocks of their own."""
    hang_s: float = Field(default=60.0, gt=0)
    """An actor that does not answer for so long is killed and started again."""
    min_free_bytes: int = Field(default=64 << 20, ge=0)
    """Less room than this on the disk of the run directory ends the run, resumable, before writes fail half-way."""
    drain_s: float = Field(default=30.0, gt=0)
    """How long an interrupted run may take to save and close."""
    object_store_bytes: int = Field(default=128 << 20, ge=80 << 20)
    """Ray's shared-memory store; trajectories are far below 1 MB each."""


class ClusterSection(_Section):
    absent_s: float = Field(default=DEFAULT_ABSENT_S, gt=0)
    """How long an actor may be away (its process or its host died) while everything else goes on; then the run ends,
    and may be resumed (exit code 75)."""


class RunConfig(_Section):
    """All of it. The tables of the TOML file are the fields."""

    model: ModelSection = ModelSection()
    tasks: TasksSection = TasksSection()
    agent: AgentSection = AgentSection()
    sampling: SamplingSection = SamplingSection()
    gateway: GatewaySection = GatewaySection()
    rollout: RolloutConfig = RolloutConfig()
    dispatcher: DispatcherConfig = DispatcherConfig()
    sandbox: SandboxSection = SandboxSection()
    buffer: BufferConfig = BufferConfig()
    training: LearnerLoopConfig = LearnerLoopConfig()
    learner: LearnerConfig
    engines: EnginesConfig = EnginesConfig()
    push: PushConfig = PushConfig()
    evaluation: EvaluationSection = EvaluationSection()
    telemetry: TelemetryConfig = TelemetryConfig()
    retention: RetentionConfig = RetentionConfig()
    service: ServiceSection = ServiceSection()
    cluster: ClusterSection = ClusterSection()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        clocks.derive(self)
        for check in CHECKS:
            if (problem := check(self)) is not None:
                raise ValueError(problem)
        return self


def a_model_is_named(config: RunConfig) -> str | None:
    if config.engines.is_simulated or config.model.path != Path():
        return None
    return "model.path is missing; set it"


def simulated_parts_go_together(config: RunConfig) -> str | None:
    """Simulated engines have no weights to push, and nothing to say. Simulated learners and agents may have real
    ones."""
    parts = {
        'learner.kind = "simulated"': config.learner.kind == "simulated",
        'agent.kind = "simulated"': config.agent.kind is AgentKind.SIMULATED,
    }
    missing = [setting for setting, is_set in parts.items() if not is_set]
    if not missing or not config.engines.is_simulated:
        return None
    return f'engines.backend = "simulated" goes with {" and ".join(missing)}: set that too'


def rows_fit_a_micro_batch(config: RunConfig) -> str | None:
    budget, context = config.learner.token_budget, config.sampling.max_context_tokens
    if budget >= context:
        return None
    return (
        f"learner.token_budget {budget} is below sampling.max_context_tokens {context}: one row would not fit a "
        "micro-batch; raise the budget"
    )


def turns_fit_the_engines(config: RunConfig) -> str | None:
    limit = config.engines.max_context_tokens
    contexts = {
        "sampling": config.sampling.max_context_tokens,
        "evaluation.sampling": config.evaluation.sampling.max_context_tokens,
    }
    for table, context in contexts.items():
        if limit is not None and context is not None and limit < context:
            return f"engines.max_context_tokens {limit} is below {table}.max_context_tokens {context}: raise the first"
    return None


def weights_fit_the_devices(config: RunConfig) -> str | None:
    """NCCL moves weights between GPUs only."""
    if config.push.backend != "nccl" or config.engines.device == "cuda" or config.engines.is_simulated:
        return None
    return "push.backend nccl needs engines on GPUs; set engines.device to cuda, or push.backend to gloo"


def other_hosts_reach_the_sender(config: RunConfig) -> str | None:
    engines, host = config.engines, config.push.host
    if not is_loopback(host):
        return None
    for url in (*engines.attach, *([engines.router] if engines.router else [])):
        if not is_loopback(address(url)[0]):
            return (
                f"push.host {host} is not reachable from {url}; set it to this host's address, as those engines see it"
            )
    return None


def rollouts_fit_the_sandboxes(config: RunConfig) -> str | None:
    slots = config.dispatcher.slots_per_worker * config.service.workers + config.dispatcher.evaluation_slots
    room = config.sandbox.pool.max_live - config.sandbox.pool.evaluation_reserve
    if slots <= room:
        return None
    return (
        f"{slots} rollouts at once (dispatcher.slots_per_worker x service.workers + evaluation_slots) do not fit "
        f"{room} sandboxes (sandbox.pool.max_live - evaluation_reserve); raise max_live or lower the slots"
    )


def remote_hosts_are_named(config: RunConfig) -> str | None:
    if config.sandbox.provider is not SandboxKind.REMOTE or config.sandbox.remote.urls:
        return None
    return "sandbox.remote.urls is empty, and sandbox.provider is remote; name the exec servers"


def programs_fit_the_sandboxes(config: RunConfig) -> str | None:
    agent, provider = config.agent, config.sandbox.provider
    if agent.is_program and provider not in (SandboxKind.LOCAL, SandboxKind.REMOTE):
        return (
            f"agent.kind {agent.kind.value} needs a way to the gateway from inside its sandbox, which sandbox.provider "
            f"{provider.value} does not have; set it to local or remote"
        )
    if agent.is_program and provider is SandboxKind.REMOTE and not agent.program.in_image:
        return (
            "agent.program.in_image is empty, and sandboxes of sandbox.provider remote show no folders of this host; "
            "name the program in the tasks' images"
        )
    return None


def enough_held_out_tasks(config: RunConfig) -> str | None:
    if config.tasks.heldout is not None or config.evaluation.tasks <= config.tasks.heldout_count:
        return None
    return (
        f"evaluation.tasks {config.evaluation.tasks} is above tasks.heldout_count {config.tasks.heldout_count}; "
        "generate more held-out tasks or evaluate fewer"
    )


CHECKS = (
    a_model_is_named,
    simulated_parts_go_together,
    rows_fit_a_micro_batch,
    turns_fit_the_engines,
    weights_fit_the_devices,
    other_hosts_reach_the_sender,
    clocks.problem,
    rollouts_fit_the_sandboxes,
    remote_hosts_are_named,
    programs_fit_the_sandboxes,
    enough_held_out_tasks,
)
"""Combinations that cannot work, each with the knob to turn; None when all is well."""


def load_recipe(recipe: Path, overrides: Sequence[str], run_dir: Path) -> RunConfig:
    """Read a recipe with `key.sub=value` overrides for a run in `run_dir`. Raises ConfigError."""
    try:
        document = tomllib.loads(recipe.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "name a recipe, e.g. scripts/recipes/quickstart.toml"
        raise ConfigError(f"{recipe}: cannot be read ({error.strerror}); {hint}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{recipe}: not valid TOML: {error}") from error
    for override in overrides:
        apply_override(document, override)
    return resolve(document, recipe, run_dir)


def resolve(document: dict[str, Any], recipe: Path, run_dir: Path) -> RunConfig:
    """Check a document and make its paths absolute. Raises ConfigError."""
    learner = document.setdefault("learner", {})
    for key in ("model_dir", "checkpoint_dir", "snapshot_dir", "seed"):
        if isinstance(learner, dict) and key in learner:
            fix = {"model_dir": "set model.path", "seed": "set service.seed"}.get(key, "it lies in the run directory")
            raise ConfigError(f"{recipe}: learner.{key} cannot be set; {fix}")
    base = recipe.resolve().parent
    for table, key in (("model", "path"), ("tasks", "train"), ("tasks", "heldout")):
        section = document.get(table)
        if isinstance(section, dict) and isinstance(section.get(key), str):
            section[key] = str((base / section[key]).resolve())
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
        return RunConfig.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"{recipe}: {explain(error, RunConfig)}") from error


def explain(error: ValidationError, model: type[BaseModel], *, page: str = "docs/configuration.md") -> str:
    """The first problem of a validation error of `model`: key, reason and, for an unknown key, what to do."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        meant = suggestion(model, [str(part) for part in first["loc"]])
        advice = f"did you mean {meant}?" if meant else "remove it or check its spelling"
        return f"unknown key {key}; {advice} ({page} lists the keys)"
    if first["type"] == "missing":
        return f"{key} is missing; set it"
    given = "" if first["type"] == "value_error" else f" (given: {first['input']!r})"
    return f"{key}: {reason}{given}" if key else reason


def apply_override(document: dict[str, Any], override: str) -> None:
    """Set one dotted key: `buffer.max_staleness=2`. The value is TOML, or text when it is no TOML. Raises
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
