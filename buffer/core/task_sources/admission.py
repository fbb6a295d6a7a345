"""Admission: how many groups each source may open, and which source opens the next one.

Invariants:
- In mode `async` the stock of a source never exceeds its share of the rollouts that can still be trained within the
  bound; in mode `sync`, only as many rollouts are started as its part of the current batch still needs. So a fast
  source cannot fill the stock with rollouts that grow stale while a slow one is waited for.
- The next group is of the source that is provided for the shortest way ahead, counted in batches. Rollouts in progress
  count by the share of a source's rollouts that were trained so far (its yield), so that a source that loses rollouts
  starts more of them.
- All of this is computed from the ledger's records: a resumed run continues as the original one would have.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Final

from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.curriculum import TaskCursor
from headrace.buffer.core.records import FINAL, RolloutState
from headrace.buffer.core.state import ReplayState
from headrace.buffer.core.task_sources.shares import Mix, Source

LEAST_YIELD: Final = 0.25
"""Lower limit of a yield: a source starts at most four rollouts for each one that it needs."""
YIELD_PRIOR: Final = 16
"""Number of trained rollouts with which the yield of each source begins, so that the first few ends decide little."""
BATCHES_READY: Final = 2
"""Number of batches for which a source may have sealed rollouts ready; beyond that, they would only grow stale."""
_RUNNING: Final = (RolloutState.PENDING, RolloutState.IN_FLIGHT, RolloutState.WAITING)


class GroupAdmission:
    """Room for new groups, by source. `cursors` are the positions in the sources' tasks, by name."""

    def __init__(self, state: ReplayState, config: BufferConfig, mix: Mix, cursors: Mapping[str, TaskCursor]) -> None:
        self._state, self._config, self._mix, self._cursors = state, config, mix, cursors

    def room(self, unknown: int = 0) -> int:
        """Return how many rollouts the new groups may have for which there is room, over all sources. `unknown` is the
        number of rollouts in flight that the ledger does not know of; they count for every source."""
        return sum(self.groups_to_open(source, unknown) * source.config.group_size for source in self._mix.sources)

    def next_source(self, held: Collection[str]) -> Source | None:
        """Return the source to open a group of, None if there is no room. Sources in `held` are passed over."""
        able = [source for source in self._mix.sources if source.name not in held and self.groups_to_open(source)]
        return min(able, key=self._batches_ahead, default=None)

    def groups_to_open(self, source: Source, unknown: int = 0) -> int:
        """Return the number of whole groups of a source for which there is room.

        async: `floor((share * bound.stock(batch_size) - inventory) / group_size)`;
        sync: `ceil((quota - inventory) / group_size)`, so that a batch can always be filled.
        """
        stock, group_size = self._state.stock[source.name], source.config.group_size
        secured = stock[RolloutState.SEALED] + stock[RolloutState.LEASED]
        running = self._running(source) + unknown
        if self._config.mode == "async":
            allowed = source.share * self._config.bound.stock(self._config.batch_size)
            # A hair below a whole number is a float's error.
            room = math.floor((allowed - secured - self.yield_of(source) * running + 1e-9) / group_size)
            most_ready = BATCHES_READY * source.share * self._config.batch_size
            if self._mix.is_named and self._state.free[source.name] >= most_ready:
                room = 0
        else:
            # In mode one-step-off the batch that is being trained need not be filled.
            ahead = stock[RolloutState.LEASED] if self._config.mode == "one-step-off" else 0
            quota = self._mix.quotas(self._state.given(), self._config.batch_size)[source.name]
            room = -(-(quota - secured - running + ahead) // group_size)
        left = self._cursors[source.name].left()
        return max(0, room) if left is None else min(max(0, room), left)

    def yield_of(self, source: Source) -> float:
        """Return the share of a source's rollouts that were trained, among those that ended. 1 for the only source of a
        run without sources, whose stock counts every rollout in full."""
        if not self._mix.is_named:
            return 1.0
        ended = sum(self._state.ended(source.name, state) for state in FINAL)
        trained = self._state.ended(source.name, RolloutState.TRAINED)
        return max(LEAST_YIELD, (trained + YIELD_PRIOR) / (ended + YIELD_PRIOR))

    def _running(self, source: Source) -> int:
        return sum(self._state.stock[source.name][state] for state in _RUNNING)

    def _batches_ahead(self, source: Source) -> float:
        """Return up to which rollout of the run, over all sources, a source is provided for."""
        stock = self._state.stock[source.name]
        secured = self._state.ended(source.name, RolloutState.TRAINED)
        secured += stock[RolloutState.SEALED] + stock[RolloutState.LEASED]
        return (secured + self.yield_of(source) * self._running(source)) / source.share
