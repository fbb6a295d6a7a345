"""The store of finished rollouts: either the replay buffer or the records of an evaluation without training.

Invariant: `EvaluationRecords` issues no orders and has no inventory; answers that must outlive it are in
`results.jsonl`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace.actors.record.files.metrics import UNRECORDED, MetricsLog, RecordsMetrics
from headrace.actors.training.replay import NEVER_EVALUATED, Evaluated, Issued
from headrace.buffer.trajectories.types import GroupId, Receipt, RolloutId, RolloutOrder, RolloutResult


class RolloutStore(Protocol):
    """The part of `Replay`'s interface that the dispatcher and the workers use."""

    async def issue(self, limit: int, dispatcher: str, *, timeout_s: float) -> Issued: ...

    async def cancellations(
        self, known: list[tuple[RolloutId, int]], *, timeout_s: float
    ) -> tuple[tuple[RolloutId, int], ...] | None: ...

    async def offer(self, results: list[RolloutResult]) -> tuple[Receipt, ...]: ...

    async def record(self, lines: Sequence[bytes]) -> None: ...

    async def abandon(self, attempts: list[tuple[RolloutId, int]]) -> int: ...

    async def reconcile(self, carried: list[tuple[RolloutId, int]], dispatcher: str) -> int: ...

    async def engines(self, *, serving: bool) -> None: ...

    async def record_evaluations(self, ended: Sequence[tuple[RolloutOrder, RolloutResult]]) -> None: ...

    async def evaluated(self, tag: GroupId) -> dict[RolloutId, Evaluated]: ...


class EvaluationRecords(RecordsMetrics):
    """In-memory record of one evaluation's attempts, where a restarted dispatcher finds them, and writer of its
    `metrics`."""

    def __init__(self, metrics: MetricsLog = UNRECORDED) -> None:
        super().__init__(metrics)
        self._known: dict[GroupId, dict[RolloutId, Evaluated]] = {}

    async def issue(self, limit: int, dispatcher: str, *, timeout_s: float) -> Issued:
        return Issued(orders=(), to_cancel=())

    async def cancellations(
        self, known: list[tuple[RolloutId, int]], *, timeout_s: float
    ) -> tuple[tuple[RolloutId, int], ...] | None:
        raise RuntimeError("an evaluation without training has no cancellations")

    async def offer(self, results: list[RolloutResult]) -> tuple[Receipt, ...]:
        raise RuntimeError("an evaluation without training accepts no training rollouts")

    async def abandon(self, attempts: list[tuple[RolloutId, int]]) -> int:
        return 0

    async def reconcile(self, carried: list[tuple[RolloutId, int]], dispatcher: str) -> int:
        return 0

    async def engines(self, *, serving: bool) -> None:
        """Do nothing, since there are no orders to hold."""

    async def record_evaluations(self, ended: Sequence[tuple[RolloutOrder, RolloutResult]]) -> None:
        for order, result in ended:
            known = self._known.setdefault(order.group_id, {})
            before = known.get(order.rollout_id, NEVER_EVALUATED)
            outcome = result.outcome
            known[order.rollout_id] = before.after(order.attempt, outcome.reward, solved=outcome.solved)

    async def evaluated(self, tag: GroupId) -> dict[RolloutId, Evaluated]:
        return dict(self._known.get(tag, {}))
