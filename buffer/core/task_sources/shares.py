"""The sources of a run's training tasks, and how many rollouts of a batch come from each.

Invariants:
- A run without sources has a single one, whose name is empty.
- Shares are of trained rollouts, and they are held by waiting: a batch is taken once every source can fill its quota. A
  slow source slows the run down, but never loses its share.
- Quotas are computed from the number of rollouts that each source has trained so far. For every source that number
  differs from its share of all trained rollouts by less than one, as long as share x batch size is at least one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.source_names import source_name
from headrace.buffer.tasks.task import TaskId


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source of training tasks. `share` is its share of the trained rollouts; `config` has its own group size, kind
    of advantages and rule, and the run's other settings."""

    name: str
    share: float
    config: BufferConfig


class Mix:
    """The sources of a run. Without any, there is one without a name, with share 1 and the run's own config."""

    def __init__(self, config: BufferConfig, sources: Sequence[Source] = ()) -> None:
        self.is_named = bool(sources)
        self.sources = tuple(sources) or (Source(name="", share=1.0, config=config),)
        self._by_name = {source.name: source for source in self.sources}

    def source_of(self, task_id: TaskId) -> Source:
        """Return the source of a task."""
        return self._by_name[source_name(task_id) if self.is_named else ""]

    def config_of(self, task_id: TaskId) -> BufferConfig:
        """Return the config by which the groups of a task are made and sealed."""
        return self.source_of(task_id).config

    def quotas(self, given: Mapping[str, int], size: int) -> dict[str, int]:
        """Return how many of the next `size` rollouts come from each source, after `given` rollouts of each. The rest
        that whole numbers leave goes to the sources with the largest remainders."""
        after = sum(given.values()) + size
        wanted = {source.name: source.share * after - given[source.name] for source in self.sources}
        # A hair above the floor is a float's error and not a remainder.
        quotas = {name: max(0, math.floor(number + 1e-9)) for name, number in wanted.items()}
        while (missing := size - sum(quotas.values())) != 0:
            # The largest shortfall first, or, if rounding gave too many, the largest excess.
            step = 1 if missing > 0 else -1
            able = [name for name in quotas if step > 0 or quotas[name] > 0]
            name = max(able, key=lambda name: step * (wanted[name] - quotas[name]))
            quotas[name] += step
        return quotas
