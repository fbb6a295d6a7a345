"""All clocks of a run in one place: which follow from others, and which contradict each other.

Invariants:
- A key that the recipe leaves unset is derived from the phases that it bounds (`DERIVED`, in order: later ones see
  earlier ones). What was derived stands in the run's `config.json` like any other value.
- A combination that cannot work is refused at start with both keys and a value that works (`problem`).
- A clock bounds one thing. Work that has a clock of its own (a learner's stage, an engine's start, a boot, a push) ends
  by that one: it does not have to fit `service.stall_s`, see `stall_detector`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from headrace.actors.rollouts.rollout import ANSWER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from headrace.actors.engine_group.config import EnginesConfig
    from headrace.actors.rollouts.rollout import RolloutConfig
    from headrace.actors.run.sections import ClusterSection, ServiceSection
    from headrace.actors.training.learner import LearnerLoopConfig
    from headrace.policies.learners.config import LearnerConfig
    from headrace.policies.push.contract import PushConfig
    from headrace.serve.gateway.config import GatewaySection

HEALTH_LOOK_S: Final = 2.0
"""Between two health checks of an engine."""
TURNS_OF_AN_AGENT: Final = 3
"""An agent can meet so many turns, or waits for an engine, that use up their clocks before its own is over."""
STALLED_PHASES: Final = 2.0
"""A run is stalled when nothing moved for so many times its longest phase."""
STALLED_ABSENCES: Final = 1.5
"""Nothing may move while an actor is waited for that may come back."""
LEAST_STAGE_S: Final = 1800.0
"""A step's length is not known before the first one; half an hour is far beyond the published ones."""
PUSH_PHASES: Final = 12
"""Of one wave of a push, each bounded by `push.phase_timeout_s`; forming a group and each bucket are bounded by
`push.transfer_timeout_s` instead."""


class Clocked(Protocol):
    """The sections of a run's configuration that have clocks: `config.RunConfig`, which is built on this module."""

    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def gateway(self) -> GatewaySection: ...
    @property
    def training(self) -> LearnerLoopConfig: ...
    @property
    def learner(self) -> LearnerConfig: ...
    @property
    def engines(self) -> EnginesConfig: ...
    @property
    def push(self) -> PushConfig: ...
    @property
    def service(self) -> ServiceSection: ...
    @property
    def cluster(self) -> ClusterSection: ...


def guard_s(config: Clocked) -> float:
    """Every phase of a rollout at its limit. Three phases have the clock of the preparation: attaching to the sandbox,
    writing the task's files, closing the session."""
    rollout = config.rollout
    before_s = rollout.queue_timeout_s + rollout.boot_timeout_s + ANSWER_S
    return before_s + 3 * rollout.prepare_timeout_s + rollout.agent_timeout_s + rollout.evaluate_timeout_s


def turn_timeout_s(config: Clocked) -> float:
    return config.rollout.agent_timeout_s / TURNS_OF_AN_AGENT


def gate_wait_s(config: Clocked) -> float:
    """As long as it takes to notice a dead engine and start another, if the agent has that time."""
    replaced_s = unhealthy_s(config) + config.engines.start_timeout_s
    return min(replaced_s, config.rollout.agent_timeout_s / TURNS_OF_AN_AGENT)


def unhealthy_s(config: Clocked) -> float:
    """How long an engine is silent before it is taken out."""
    engines = config.engines
    return engines.health_misses * (engines.health_timeout_s + HEALTH_LOOK_S)


def stage_timeout_s(config: Clocked) -> float:
    simulated_s = config.learner.simulated.step_s + config.learner.simulated.save_s
    known_s = 3 * simulated_s if config.learner.kind == "simulated" else 0.0
    return max(LEAST_STAGE_S, longest_phase(config)[1], known_s)


def stall_s(config: Clocked) -> float:
    phase_s = max(longest_phase(config)[1], config.service.hang_s)
    if not config.engines.is_simulated:
        phase_s = max(phase_s, unhealthy_s(config))
    return max(STALLED_PHASES * phase_s, STALLED_ABSENCES * config.cluster.absent_s)


def longest_phase(config: Clocked) -> tuple[str, float]:
    """The key and the seconds of the longest stretch in which a healthy rollout may show no progress."""
    rollout, gateway = config.rollout, config.gateway
    phases = {
        "rollout.agent_timeout_s": rollout.agent_timeout_s,
        "rollout.evaluate_timeout_s": rollout.evaluate_timeout_s,
        "rollout.queue_timeout_s + boot_timeout_s": rollout.queue_timeout_s + rollout.boot_timeout_s,
        "rollout.prepare_timeout_s": rollout.prepare_timeout_s,
    }
    if not config.engines.is_simulated:
        phases |= {"gateway.turn_timeout_s": gateway.turn_timeout_s, "gateway.gate_wait_s": gateway.gate_wait_s}
    return max(phases.items(), key=lambda phase: phase[1])


def push_s(config: Clocked, model_bytes: int) -> float:
    """Longest push of one wave: every phase, the formation of the group and every bucket at its limit."""
    push = config.push
    buckets = max(1, -(-model_bytes // push.bucket_bytes))
    transfers_s = (1 + buckets) * push.transfer_timeout_s
    return push.load_timeout_s + PUSH_PHASES * push.phase_timeout_s + transfers_s


DERIVED: Final[Mapping[str, tuple[Callable[[Clocked], float], str]]] = {
    "rollout.lease_s": (lambda config: max(60.0, config.service.hang_s), "max(60, service.hang_s)"),
    "push.gate_lease_s": (lambda config: max(60.0, config.service.hang_s), "max(60, service.hang_s)"),
    "rollout.guard_s": (guard_s, "the sum of the rollout's phases"),
    "gateway.turn_timeout_s": (turn_timeout_s, "rollout.agent_timeout_s / 3"),
    "gateway.gate_wait_s": (
        gate_wait_s,
        "the time to notice a dead engine and start another, at most rollout.agent_timeout_s / 3",
    ),
    "training.stage_timeout_s": (stage_timeout_s, "the longest phase of a rollout, at least 1800"),
    "service.stall_s": (stall_s, "twice the longest phase of a rollout, at least 1.5 x cluster.absent_s"),
}
"""By key: the rule, and what docs/configuration.md says in place of a default."""


def derive(config: Clocked) -> None:
    """Fill in the clocks that the recipe left unset."""
    for name, (rule, _) in DERIVED.items():
        table, key = name.split(".")
        section = getattr(config, table)
        if key not in section.model_fields_set:
            # Frozen sections are never changed, only replaced, and only here, before anybody has seen the config.
            object.__setattr__(config, table, section.model_copy(update={key: rule(config)}))


def _has_engines(config: Clocked) -> bool:
    return not config.engines.is_simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """Two clocks of which one must end before the other. `because` says what goes wrong otherwise."""

    lower: str
    upper: str
    because: str
    may_be_equal: bool = False
    matters: Callable[[Clocked], bool] = lambda _: True

    def problem(self, config: Clocked) -> str | None:
        lower_s, upper_s = _value(config, self.lower), _value(config, self.upper)
        if lower_s < upper_s or (self.may_be_equal and lower_s == upper_s):
            return None
        if not self.matters(config):
            return None
        relation = "above" if self.may_be_equal else "not below"
        works_s = lower_s if self.may_be_equal else 2 * lower_s
        return (
            f"{self.lower} {lower_s:g} is {relation} {self.upper} {upper_s:g}: {self.because}; "
            f"set {self.upper} to {works_s:g}, or {self.lower} to {upper_s if self.may_be_equal else upper_s / 2:g}"
        )


ORDERS: Final = (
    _Order(
        lower="gateway.gate_wait_s",
        upper="rollout.agent_timeout_s",
        because="the agent's clock would end before a failing engine is noticed",
        matters=_has_engines,
    ),
    _Order(
        lower="gateway.turn_timeout_s",
        upper="rollout.agent_timeout_s",
        because="the agent's clock would end before a failing engine is noticed",
        matters=_has_engines,
    ),
    _Order(
        lower="push.transfer_timeout_s",
        upper="rollout.agent_timeout_s",
        because="one bucket of a push could use up the time of every agent that waits for it",
        matters=_has_engines,
    ),
    _Order(
        lower="service.hang_s",
        upper="rollout.lease_s",
        because="a worker that is slow but not hung would lose its sandboxes",
        may_be_equal=True,
    ),
    _Order(
        lower="service.hang_s",
        upper="push.gate_lease_s",
        because="the gate of an engine that is paused would open while the engine group is slow but not hung",
        may_be_equal=True,
        matters=_has_engines,
    ),
    _Order(
        lower="service.hang_s",
        upper="service.stall_s",
        because="the run would end before a hung actor is replaced",
    ),
    _Order(
        lower="cluster.absent_s",
        upper="service.stall_s",
        because="the run would end as stalled while it waits for an actor",
    ),
    _Order(
        lower="learner.simulated.step_s",
        upper="training.stage_timeout_s",
        because="every step would count as hung",
        matters=lambda config: config.learner.kind == "simulated",
    ),
)


def problem(config: Clocked) -> str | None:
    """The first two clocks that contradict each other, with values that work; None when all fit."""
    for order in ORDERS:
        if (found := order.problem(config)) is not None:
            return found
    return _guard_problem(config) or _stall_problem(config)


def _guard_problem(config: Clocked) -> str | None:
    needed_s = guard_s(config)
    if config.rollout.guard_s >= needed_s:
        return None
    return (
        f"rollout.guard_s {config.rollout.guard_s:g} is below the clocks of its phases together: queue_timeout_s, "
        "boot_timeout_s, 3 x prepare_timeout_s, agent_timeout_s and evaluate_timeout_s; slow agents would end as "
        f"infra; leave it unset, or set rollout.guard_s to {needed_s:g}"
    )


def _stall_problem(config: Clocked) -> str | None:
    stall_s_given = config.service.stall_s
    phases = [longest_phase(config)]
    if not config.engines.is_simulated:
        phases.append(("engines.health_misses x (health_timeout_s + 2)", unhealthy_s(config)))
    key, phase_s = max(phases, key=lambda phase: phase[1])
    if stall_s_given >= phase_s:
        return None
    return (
        f"service.stall_s {stall_s_given:g} is below {key} {phase_s:g}: a run whose rollouts are all in that phase "
        f"would end as stalled; leave it unset, or set service.stall_s to {STALLED_PHASES * phase_s:g}"
    )


def _value(config: Clocked, name: str) -> float:
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    assert isinstance(value, int | float), name
    return float(value)
