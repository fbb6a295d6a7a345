"""Timeouts of a run: defaults derived from other timeouts, and checks that they are consistent.

Invariants:
- A key that the recipe leaves unset is derived from the phases that it bounds (`DERIVED`, whose later entries see
  earlier ones, and which come after the rules of `rules`).
- A combination that cannot work is refused at startup with an error that names both keys and a value that works
  (`problem`).
- A timeout bounds one thing. Work with a timeout of its own (a learner's stage, an engine's start, a boot, a push) may
  take longer than `service.stall_s`; see `stall_detector`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from headrace.actors.derivation.terms import Terms
from headrace.actors.rollouts.rollout import ANSWER_S
from headrace.actors.runtime.actors.operations import CLUSTER_ABSENT_S, DEFAULT_ABSENT_S
from headrace.policies.push.contract import PushConfig

HEALTH_CHECK_INTERVAL_S: Final = 2.0
"""Interval between two health checks of an engine."""
TURN_TIMEOUTS_PER_AGENT: Final = 3
"""Number of turns, or waits for an engine, that may time out before the agent does."""
STALLED_PHASES: Final = 2.0
"""Multiple of the longest phase after which a run without progress counts as stalled."""
STALLED_ABSENCES: Final = 1.5
"""Multiple of `cluster.absent_s` for which the run may wait for a lost actor without making progress."""
LEAST_STAGE_S: Final = 1800.0
"""Lower bound of a stage timeout. The length of a step is unknown before the first one; steps reported in publications
are far shorter."""
PUSH_PHASES: Final = 12
"""Phases in one wave of a push, each bounded by `push.phase_timeout_s`. Forming a group and sending each bucket are
bounded by `push.transfer_timeout_s` instead, and reading a directory by `push.read_timeout_s`."""


def guard_s(t: Terms) -> float:
    """Return the duration of a rollout in which every phase takes as long as it is allowed to.

    Attaching to the sandbox, writing the task's files and closing the session each get the preparation's timeout."""
    phases = sum(t[f"rollout.{phase}_timeout_s"] for phase in ("queue", "boot", "agent", "evaluate"))
    return float(phases + ANSWER_S + 3 * t["rollout.prepare_timeout_s"])


def turn_timeout_s(t: Terms) -> float:
    return float(t["rollout.agent_timeout_s"] / TURN_TIMEOUTS_PER_AGENT)


def gate_wait_s(t: Terms) -> float:
    """Return the time needed to notice a dead engine and start another, but no more than the turn timeout."""
    return float(min(unhealthy_s(t) + t["engines.start_timeout_s"], turn_timeout_s(t)))


def unhealthy_s(t: Terms) -> float:
    """Return how long an engine may be silent before it is removed."""
    return float(t["engines.health_misses"] * (t["engines.health_timeout_s"] + HEALTH_CHECK_INTERVAL_S))


def stage_timeout_s(t: Terms) -> float:
    simulated_s = t["learner.simulated.step_s"] + t["learner.simulated.save_s"]
    known_s = 3 * simulated_s if t["learner.kind"] == "simulated" else 0.0
    return max(LEAST_STAGE_S, longest_phase(t)[1], known_s)


def stall_s(t: Terms) -> float:
    phase_s = max(longest_phase(t)[1], t["service.hang_s"], unhealthy_s(t) if _has_engines(t) else 0.0)
    return float(max(STALLED_PHASES * phase_s, STALLED_ABSENCES * t["cluster.absent_s"]))


def longest_phase(t: Terms) -> tuple[str, float]:
    """Return the key and the duration in seconds of the longest phase in which a healthy rollout may show no
    progress."""
    keys = [f"rollout.{phase}_timeout_s" for phase in ("agent", "evaluate", "prepare")]
    keys += ["gateway.turn_timeout_s", "gateway.gate_wait_s"] if _has_engines(t) else []
    phases = {key: t[key] for key in keys}
    boot_s = t["rollout.queue_timeout_s"] + t["rollout.boot_timeout_s"]
    phases["rollout.queue_timeout_s + boot_timeout_s"] = boot_s
    return max(phases.items(), key=lambda phase: phase[1])


def push_s(push: PushConfig, model_bytes: int) -> float:
    """Return the longest time that one wave of a push may take, with every phase and bucket at its limit."""
    if push.transport == "disk":
        # The sender verifies the directory, then the engines of the wave read it concurrently, perhaps twice.
        return push.load_timeout_s + 2 * push.read_timeout_s + PUSH_PHASES * push.phase_timeout_s
    buckets = max(1, -(-model_bytes // push.bucket_bytes))
    transfers_s = (1 + buckets) * push.transfer_timeout_s
    return push.load_timeout_s + PUSH_PHASES * push.phase_timeout_s + transfers_s


DERIVED: Final[Mapping[str, tuple[Callable[[Terms], float], str]]] = {
    "cluster.absent_s": (
        lambda t: DEFAULT_ABSENT_S if t["cluster.address"] == "local" else CLUSTER_ABSENT_S,
        "120; 1800 on a cluster",
    ),
    "rollout.lease_s": (lambda t: max(60.0, t["service.hang_s"]), "max(60, service.hang_s)"),
    "push.gate_lease_s": (lambda t: max(60.0, t["service.hang_s"]), "max(60, service.hang_s)"),
    "rollout.guard_s": (guard_s, "the sum of the rollout's phases"),
    "gateway.turn_timeout_s": (turn_timeout_s, "rollout.agent_timeout_s / 3"),
    "gateway.gate_wait_s": (
        gate_wait_s,
        "the time to notice a dead engine and start another, at most rollout.agent_timeout_s / 3",
    ),
    "training.stage_timeout_s": (stage_timeout_s, "the longest phase of a rollout, at least 1800"),
    "service.stall_s": (stall_s, "twice the longest phase of a rollout, at least 1.5 x cluster.absent_s"),
}
"""Rule for each derived key, and the text that docs/configuration.md shows in place of a default."""


def _has_engines(t: Terms) -> bool:
    return bool(t["engines.backend"] != "simulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """Two timeouts of which `lower` must end before `upper`; `because` is the consequence otherwise."""

    lower: str
    upper: str
    because: str
    may_be_equal: bool = False
    matters: Callable[[Terms], bool] = lambda _: True

    def problem(self, t: Terms) -> str | None:
        lower_s, upper_s = t[self.lower], t[self.upper]
        if lower_s < upper_s or (self.may_be_equal and lower_s == upper_s):
            return None
        if not self.matters(t):
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
        because="the agent would time out before a failing engine is noticed",
        matters=_has_engines,
    ),
    _Order(
        lower="gateway.turn_timeout_s",
        upper="rollout.agent_timeout_s",
        because="the agent would time out before a failing engine is noticed",
        matters=_has_engines,
    ),
    _Order(
        lower="push.transfer_timeout_s",
        upper="rollout.agent_timeout_s",
        because="one bucket of a push could use up the time of every agent that waits for it",
        matters=_has_engines,
    ),
    _Order(
        lower="push.read_timeout_s",
        upper="rollout.agent_timeout_s",
        because="reading one snapshot could use up the time of every agent that waits for that engine",
        matters=lambda t: _has_engines(t) and t["push.transport"] == "disk",
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
        because="the gate of a paused engine would open while the engine group is slow but not hung",
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
        matters=lambda t: t["learner.kind"] == "simulated",
    ),
)


def problem(t: Terms) -> str | None:
    """Describe the first two conflicting timeouts, with values that work; None if all timeouts are consistent."""
    for order in ORDERS:
        if (found := order.problem(t)) is not None:
            return found
    if t["rollout.guard_s"] < (needed_s := guard_s(t)):
        return (
            f"rollout.guard_s {t['rollout.guard_s']:g} is below the sum of its phases: queue_timeout_s, "
            "boot_timeout_s, 3 x prepare_timeout_s, agent_timeout_s and evaluate_timeout_s; rollouts of slow agents "
            f"would end as infra; leave it unset, or set rollout.guard_s to {needed_s:g}"
        )
    phases = [longest_phase(t)]
    if _has_engines(t):
        phases.append(("engines.health_misses x (health_timeout_s + 2)", unhealthy_s(t)))
    key, phase_s = max(phases, key=lambda phase: phase[1])
    if t["service.stall_s"] < phase_s:
        return (
            f"service.stall_s {t['service.stall_s']:g} is below {key} {phase_s:g}: a run whose rollouts are all in "
            f"that phase would end as stalled; leave it unset, or set service.stall_s to {STALLED_PHASES * phase_s:g}"
        )
    return None
