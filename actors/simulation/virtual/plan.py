"""Plan of a simulation, and the ordinary configs of the actors derived from it.

Invariants:
- A plan that cannot work is refused before anything runs, with a one-line message that names what to change.
- Only sizes and rules come from a recipe. Durations of agents, learner and push stay the preset's, or are given with
  `--set`.
- Timeouts are far longer than the plan's durations, so that no rollout of a plan fails because of a timeout.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import Field, ValidationError, model_validator

from headrace.actors.agents.programs.simulated import SimulatedAgentConfig
from headrace.actors.errors import ConfigError
from headrace.actors.rollouts.dispatcher import DispatcherConfig
from headrace.actors.rollouts.rollout import RolloutConfig
from headrace.actors.run.config import explain
from headrace.actors.run.overlays import load_layered
from headrace.actors.run.sources import KEY
from headrace.actors.runtime.pools.config import SandboxKind, SandboxSection
from headrace.actors.runtime.simulated.durations import Durations, DurationsConfig
from headrace.actors.runtime.simulated.tasks import simulated_tasks, task_name
from headrace.actors.training.learner import LearnerLoopConfig
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.primitives.sections import Section
from headrace.buffer.primitives.slowdowns import Slowdown, SlowKind, refuse_names
from headrace.buffer.tasks.task import Task
from headrace.policies.learners.simulated import PushMode, SimulatedEnginesConfig, SimulatedLearnerConfig
from headrace.sandboxes.pool.pool import PoolConfig
from headrace.sandboxes.simulated.provider import SimulationConfig

LEASE_S: Final = 3600.0
"""Lease duration of simulated sandboxes, long because the heartbeats of ten thousand sandboxes are expensive."""
PAGE: Final = "the guide 'Simulating a run'"
DEFAULT_IMAGE: Final = "host"
MOST_WARMUP_STEPS: Final = 30
UNLIMITED_PER_S: Final = 1e6
_NAMED = ("batch_size", "group_size", "max_staleness", "mode", "rule")
"""Keys of [buffer] that are keys of a plan."""


class Mode(StrEnum):
    """Order of rollouts and steps."""

    ASYNC = "async"
    """Rollouts run continuously, limited by the inventory and the staleness bound."""
    ONE_STEP_OFF = "one-step-off"
    """The rollouts of the next batch run while the learner trains the previous one, with a barrier for each batch."""
    SYNC = "sync"
    """The rollouts of one batch, its step and its push run one after the other."""


class SimulationPlan(Section):
    """Plan of one simulated run."""

    slots: int = Field(default=64, ge=1)
    """Maximum number of rollouts in flight."""
    batch_size: int = Field(default=64, ge=1)
    """Number of rollouts in a batch."""
    group_size: int = Field(default=8, ge=2)
    """Number of rollouts of one task that share a baseline."""
    max_staleness: int = Field(default=4, ge=0)
    """Hard staleness bound, in optimizer updates."""
    rule: str = "all"
    """Acceptance rule of a group."""
    mode: Mode = Mode.ASYNC
    """`async`, `one-step-off` or `sync`."""
    push: PushMode = PushMode.OVERLAP
    """`overlap`, `pause` or `drain`."""
    steps: int = Field(default=100, ge=1)
    """Number of optimizer updates. The first half of them, but at most 30, is the warm-up and is not measured."""
    seed: int = Field(default=0, ge=0)
    """Random seed for durations, rewards, task order and everything else."""
    durations: DurationsConfig = DurationsConfig()
    """Duration of an agent's work on one rollout."""
    learner_s: float = Field(default=240.0, ge=0)
    """Duration of one learner step."""
    push_s: float = Field(default=10.0, ge=0)
    """Duration of one weight push."""
    boot_s: float = Field(default=1.0, gt=0)
    """Median duration of a sandbox boot."""
    evaluate_s: float = Field(default=0.0, ge=0)
    """Duration of one evaluation."""
    tasks: int = Field(default=512, ge=1)
    """Number of tasks in the data set; each has its own probability of success."""
    chances: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    """Probabilities of success of recorded tasks, one of which is drawn for each task. Empty: uniform from 0 to 1."""
    failure: float = Field(default=0.0, ge=0, lt=1)
    """Probability that an attempt fails with an infrastructure error."""
    turns: int = Field(default=4, ge=1)
    """Number of turns in a rollout."""
    workers: int = Field(default=1, ge=1)
    """Number of rollout workers, which share the slots."""
    save_every: int = Field(default=10, ge=1)
    """Number of optimizer updates between two checkpoints."""
    hosts: int = Field(default=1, ge=1)
    """Number of sandbox hosts, `host-0`, `host-1`, ... (a single one is `host`)."""
    images: int = Field(default=1, ge=1)
    """Number of images, `image-0`, `image-1`, ..., which the tasks have in turn (a single one is the default)."""
    engines: int = Field(default=1, ge=1)
    """Number of engines, `engine-0`, `engine-1`, ..."""
    tools: tuple[str, ...] = Field(default=("bash",), min_length=1)
    """Names of tools, one of which is drawn for each turn."""
    boots: int | None = Field(default=None, ge=1)
    """Maximum number of concurrent boots on one host. None: no limit."""
    held_out_share: float = Field(default=0.5, gt=0, le=1)
    """Largest share of the boots that a held-out evaluation may take while training rollouts wait; 1: it goes first."""
    evaluate_every: int = Field(default=0, ge=0)
    """Number of optimizer updates between two held-out evaluations beside training. 0: no evaluations."""
    heldout: int = Field(default=64, ge=1)
    """Number of held-out tasks, each with one rollout in an evaluation."""
    slowdowns: tuple[Slowdown, ...] = ()
    """Planted slowdowns of any kind."""
    pacing: bool = False
    """Adaptive concurrency, which needs a caller that reports the load to the dispatcher."""
    buffer: dict[str, Any] = Field(default_factory=dict)
    """Additional keys of the recipe's [buffer], e.g. `{ zero_variance = "filter" }`."""

    @model_validator(mode="after")
    def _slowdowns_exist(self) -> Self:
        hosts, engines = self._host().host_names, SimulatedEnginesConfig(engines=self.engines).names
        tasks = {task_name(number) for number in range(self.tasks)}
        names: dict[SlowKind, Collection[str]] = {
            SlowKind.HOST: hosts,
            SlowKind.CPU: hosts,
            SlowKind.IMAGE: self.image_names or (DEFAULT_IMAGE,),
            SlowKind.ENGINE: engines,
            SlowKind.RETRACTION: engines,
            SlowKind.GATE: (),
            SlowKind.TOOL: tasks,
            SlowKind.RETRIES: tasks,
            SlowKind.EVALUATOR: tasks,
        }
        for kind, known in names.items():
            refuse_names(self.slowdowns, kind, known)
        for slowdown in self.slowdowns:
            if slowdown.tool and (slowdown.kind is not SlowKind.TOOL or slowdown.tool not in self.tools):
                raise ValueError(f"slowdowns: tool {slowdown.tool!r} is not in tools, or the kind is not tool")
        checked = [slowdown.name for slowdown in self.slowdowns if slowdown.kind is SlowKind.EVALUATOR]
        if len(checked) > 1 and ("" in checked or len(set(checked)) < len(checked)):
            raise ValueError("slowdowns: a task has two of kind evaluator; keep one")
        return self

    @property
    def image_names(self) -> tuple[str, ...]:
        """Names of the images; empty if all tasks have the default one."""
        return tuple(f"image-{number}" for number in range(self.images)) if self.images > 1 else ()

    def _slow(self, *kinds: SlowKind) -> tuple[Slowdown, ...]:
        """Return the slowdowns of these kinds."""
        return tuple(slowdown for slowdown in self.slowdowns if slowdown.kind in kinds)

    @property
    def warmup_steps(self) -> int:
        """Number of steps that are not measured; 0 in mode `sync`, whose steps are independent."""
        return 0 if self.mode is Mode.SYNC else min(MOST_WARMUP_STEPS, self.steps // 2)

    @property
    def mean_s(self) -> float:
        """Mean duration of an agent's work."""
        return Durations(self.durations, seed=self.seed).mean_s

    @property
    def ideal_s(self) -> float:
        """Lower bound of a step's time: the longer of the learner's time and a batch's time on all slots."""
        return max(self.learner_s, self.batch_size * self.mean_s / self.slots)

    @property
    def longest_s(self) -> float:
        """Longest duration of an agent's work that can be drawn."""
        factor = self.durations.straggler_factor if self.durations.stragglers else 1.0
        return min(self.durations.cap_s, factor * max(self.durations.recorded_s, default=self.durations.cap_s))

    def buffer_config(self) -> BufferConfig:
        """Return the config of the buffer. Raises ConfigError."""
        keys = {
            "batch_size": self.batch_size,
            "group_size": self.group_size,
            "max_staleness": self.max_staleness,
            "mode": self.mode.value,
            "rule": self.rule,
        }
        try:
            return BufferConfig.model_validate(keys | self.buffer)
        except ValidationError as error:
            raise ConfigError(f"simulate: buffer: {explain(error, BufferConfig)}") from error

    def dispatcher_config(self) -> DispatcherConfig:
        """Return the config of the dispatcher. All rollouts of an evaluation may run at once."""
        evaluation = {"evaluation_slots": self.heldout} if self.evaluate_every else {}
        return DispatcherConfig(slots_per_worker=-(-self.slots // self.workers), pacing=self.pacing, **evaluation)

    def rollout_config(self) -> RolloutConfig:
        """Return a rollout config whose timeouts exceed the duration of a drain or of many pauses."""
        patience_s = 100 * (self.longest_s + self.learner_s + self.push_s + self.evaluate_s + 60.0)
        return RolloutConfig(
            queue_timeout_s=patience_s,
            boot_timeout_s=patience_s,
            prepare_timeout_s=patience_s,
            agent_timeout_s=patience_s,
            evaluate_timeout_s=patience_s,
            lease_s=LEASE_S,
        )

    def sandbox_section(self) -> SandboxSection:
        """Return a sandbox section with capacity for all slots and for the sandboxes that are being torn down."""
        most = 2 * self.slots + 16
        pool = PoolConfig(
            max_live=most,
            boot_concurrency=self.boots or most,
            held_out_share=self.held_out_share,
            boots_per_s=UNLIMITED_PER_S,
            burst=most,
            max_waiting=most,
            create_timeout_s=LEASE_S,
            teardown_concurrency=most,
            sweep_every_s=LEASE_S,
        )
        return SandboxSection(provider=SandboxKind.SIMULATED, pool=pool, simulated=self._host())

    def _host(self) -> SimulationConfig:
        return SimulationConfig(
            seed=self.seed,
            hosts=self.hosts,
            capacity=2 * (2 * self.slots + 16),
            boot_s=self.boot_s,
            slowdowns=self._slow(SlowKind.HOST, SlowKind.IMAGE),
        )

    def agent_config(self) -> SimulatedAgentConfig:
        failing_turns = 1 - (1 - self.failure) ** (1 / self.turns)
        return SimulatedAgentConfig(
            durations=self.durations,
            turns=self.turns,
            failing_turns=failing_turns,
            seed=self.seed,
            tools=self.tools,
            slowdowns=self._slow(SlowKind.TOOL, SlowKind.CPU, SlowKind.RETRIES),
        )

    def engines_config(self) -> SimulatedEnginesConfig:
        slowdowns = self._slow(SlowKind.ENGINE, SlowKind.RETRACTION, SlowKind.GATE)
        return SimulatedEnginesConfig(
            push=self.push, push_s=self.push_s, engines=self.engines, slowdowns=slowdowns, seed=self.seed
        )

    def learner_config(self, checkpoint_dir: Path | None = None) -> SimulatedLearnerConfig:
        return SimulatedLearnerConfig(step_s=self.learner_s, seed=self.seed, checkpoint_dir=checkpoint_dir)

    def loop_config(self) -> LearnerLoopConfig:
        return LearnerLoopConfig(steps=self.steps, save_every=self.save_every)

    def task_set(self) -> tuple[Task, ...]:
        return simulated_tasks(
            self.seed,
            self.tasks,
            evaluate_s=self.evaluate_s,
            chances=self.chances,
            images=self.image_names,
            slowdowns=self.slowdowns,
        )

    def heldout_set(self) -> tuple[Task, ...]:
        """Return the held-out tasks; empty without evaluations."""
        if not self.evaluate_every:
            return ()
        return simulated_tasks(
            self.seed,
            self.heldout,
            evaluate_s=self.evaluate_s,
            family="heldout",
            chances=self.chances,
            images=self.image_names,
        )


MINUTE_S: Final = 60.0
PRESETS: Final[Mapping[str, SimulationPlan]] = {
    "swe64": SimulationPlan(
        durations=DurationsConfig(mean_s=9.94 * MINUTE_S, median_s=8.67 * MINUTE_S, cap_s=30 * MINUTE_S),
        learner_s=4 * MINUTE_S,
        push_s=10.0,
    )
}
"""Presets by name. `swe64` has software engineering tasks, batches of 8 x 8 rollouts that last 10 minutes on average
and at most 30 minutes, and learner steps of 4 minutes (figures published by users of other systems)."""


def make_plan(preset: str, changes: Mapping[str, Any], overrides: Sequence[str] = ()) -> SimulationPlan:
    """Return a preset with `changes` applied; `overrides` are `key=value` or `table.key=value` with TOML values. Raises
    ConfigError."""
    if preset not in PRESETS:
        raise ConfigError(f"--preset {preset}: unknown preset; choose one of: {', '.join(sorted(PRESETS))}")
    document = PRESETS[preset].model_dump()
    document |= {key: value for key, value in changes.items() if value is not None}
    for override in overrides:
        apply_setting(document, override)
    try:
        plan = SimulationPlan.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"simulate: {explain(error, SimulationPlan, page=PAGE)}") from error
    plan.buffer_config()
    return plan


def apply_setting(document: dict[str, Any], override: str) -> None:
    """Set one key of a plan: `key=value` or `table.key=value`. Raises ConfigError."""
    key, separator, text = override.partition("=")
    path = key.strip().split(".")
    if not separator or not all(path):
        raise ConfigError(f"--set {override}: write key=value, e.g. --set batch_size=2048")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    for part in path[:-1]:
        document = document.setdefault(part, {})
        if not isinstance(document, dict):
            raise ConfigError(f"--set {override}: {part} is a value, not a table")
    document[path[-1]] = value


def plan_keys(recipe: Path, on: Sequence[Path]) -> dict[str, Any]:
    """Return the keys of a plan that a recipe with machine files `on` decides. Raises ConfigError."""
    config = load_layered(recipe, on, (), Path("run"))
    if config.tasks.sources:
        raise ConfigError(f"simulate: --recipe {recipe}: a plan has no sources; leave {KEY} out of the recipe")
    buffer = config.buffer.model_dump(mode="json")
    others = config.buffer.model_dump(mode="json", exclude_unset=True, exclude=set(_NAMED))
    if config.buffer.group_size < 2:
        raise ConfigError(f"simulate: --recipe {recipe}: buffer.group_size must be at least 2 for a simulation")
    return {
        **{key: buffer[key] for key in _NAMED},
        "buffer": others,
        "slots": config.dispatcher.slots_per_worker * config.service.workers,
        "workers": config.service.workers,
        "save_every": config.training.save_every,
    }


def told(recipe: Path, preset: str, plan: SimulationPlan) -> tuple[str, str]:
    """Return what of a plan comes from a recipe, and what from the preset, as lines of text."""
    sizes = f"batch {plan.batch_size}, groups of {plan.group_size}, {plan.slots} slots, staleness {plan.max_staleness}"
    times = f"agents {plan.mean_s:.0f} s on average, learner {plan.learner_s:g} s a step, push {plan.push_s:g} s"
    return (
        f"sizes of {recipe.name}: {sizes}, mode {plan.mode}",
        f"durations of {preset}, unless --set gives others: {times}",
    )
