"""Faults of a cluster, and the order in which a soak injects them.

Invariants:
- The same seed gives the same faults in the same order; what they hit depends on what runs at that time.
- Each kind comes equally often: a round contains every kind once, in a random order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

T = TypeVar("T")


class FaultKind(StrEnum):
    """Kind of a fault."""

    WORKER_HOST = "worker host"
    """A node of workers, evaluators, gateways and the learner loses power."""
    CONTROL_HOST = "control host"
    """The node of the runs' state loses power, and comes back with its disk."""
    HEAD_HOST = "head host"
    """The head of the cluster loses power, and comes back without its disk."""
    GCS = "gcs_server"
    """The process of the head that knows the cluster is killed; the head ends with it."""
    REDIS_KILLED = "redis killed"
    """Redis is killed and started again; the GCS and the head end."""
    REDIS_STOPPED = "redis stopped"
    """Redis accepts connections and answers nothing (SIGSTOP)."""
    SHORT_CUT = "link cut"
    LONG_CUT = "link cut for long"
    ACTOR = "actor"
    """The process of an actor is killed."""
    CLIENT = "client"
    """A command that follows the run is killed."""
    REPLICA = "serve replica"
    """A replica of the control API is killed."""


LASTS_S: Final = {
    # Longer than Ray needs to declare the node dead, so that its actors move.
    FaultKind.WORKER_HOST: 30.0,
    FaultKind.CONTROL_HOST: 10.0,
    FaultKind.HEAD_HOST: 10.0,
    FaultKind.REDIS_KILLED: 2.0,
    FaultKind.REDIS_STOPPED: 20.0,
    FaultKind.SHORT_CUT: 20.0,
    FaultKind.LONG_CUT: 60.0,
}
"""Seconds until a fault is undone; the others are over at once."""
WITHOUT_SERVE: Final = tuple(kind for kind in FaultKind if kind is not FaultKind.REPLICA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault. `draw`, in [0, 1), chooses what it hits."""

    kind: FaultKind
    draw: float

    @property
    def lasts_s(self) -> float:
        return LASTS_S.get(self.kind, 0.0)

    def choose(self, candidates: Sequence[T]) -> T:
        """Return one of the candidates, which must be in an order that does not depend on chance."""
        return candidates[int(self.draw * len(candidates))]


def plan_faults(kinds: Sequence[FaultKind], count: int, seed: int) -> list[Fault]:
    """Return the faults of a soak."""
    chance = random.Random(f"cluster soak {seed}")
    rounds = (kind for _ in range(-(-count // len(kinds))) for kind in chance.sample(kinds, len(kinds)))
    return [Fault(kind=kind, draw=chance.random()) for _, kind in zip(range(count), rounds, strict=False)]
