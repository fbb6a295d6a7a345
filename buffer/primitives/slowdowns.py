"""Planted slowdowns of the simulated backends: what is slow, by how much, and how often.

Invariants:
- Whether something is slow depends only on the seed, the slowdown and the key of the draw, not on the order of draws.
- Without slowdowns every factor is 1 and nothing is drawn.
- Each backend accepts only the kinds that it can simulate; any other kind is refused with its configuration.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Final

from pydantic import Field

from headrace.buffer.primitives.sections import Section


class SlowKind(StrEnum):
    """Kind of a slowdown."""

    HOST = "host"
    """Boots on a sandbox host take longer."""
    IMAGE = "image"
    """Boots of an image take longer."""
    CPU = "cpu"
    """Sandboxes on a host get little CPU: tools take longer there, and wait for it."""
    ENGINE = "engine"
    """An engine decodes slowly."""
    RETRACTION = "retraction"
    """An engine retracts requests, whose decoding then takes longer."""
    GATE = "gate"
    """Pushes take longer; with push mode `pause`, the gate is closed for that time."""
    TOOL = "tool"
    """A tool of a task takes longer, since it waits for something other than a CPU."""
    RETRIES = "retries"
    """Attempts at a task fail with an infrastructure error and are repeated; the factor has no effect."""
    EVALUATOR = "evaluator"
    """The check of a task takes longer."""


WHERE: Final[Mapping[SlowKind, str]] = {
    SlowKind.HOST: "sandbox.simulated",
    SlowKind.IMAGE: "sandbox.simulated",
    SlowKind.CPU: "agent.simulated",
    SlowKind.ENGINE: "engines.simulated",
    SlowKind.RETRACTION: "engines.simulated",
    SlowKind.GATE: "engines.simulated",
    SlowKind.TOOL: "agent.simulated",
    SlowKind.RETRIES: "agent.simulated",
    SlowKind.EVALUATOR: "the expected verdicts of the tasks (guide 'Simulating a run')",
}
"""Tables of a recipe that accept a kind."""


class Slowdown(Section):
    """One planted slowdown of a simulated backend."""

    kind: SlowKind
    """What is slow: `host`, `image`, `cpu`, `engine`, `retraction`, `gate`, `tool`, `retries` or `evaluator`."""
    name: str = ""
    """Name of the slow host, image, engine or task; empty for all. A gate has no name."""
    tool: str = ""
    """Name of the slow tool, for kind `tool`; empty for all tools of the task."""
    factor: float = Field(default=4.0, gt=1)
    """Factor by which the affected part takes longer."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share that is affected: of boots, sandboxes, turns, pushes, attempts or checks, by kind."""


class Slowdowns:
    """Slowdowns of one backend, and their draws."""

    def __init__(self, slowdowns: Sequence[Slowdown], *, seed: int) -> None:
        self._by_kind: dict[SlowKind, list[Slowdown]] = {}
        for slowdown in slowdowns:
            self._by_kind.setdefault(slowdown.kind, []).append(slowdown)
        self._seed = seed

    def factor(self, kind: SlowKind, name: str, key: str, *, tool: str = "") -> float:
        """Return the product of the factors that affect `name` in the draw `key`; 1 if none does."""
        product = 1.0
        for number, slowdown in enumerate(self._by_kind.get(kind, ())):
            if slowdown.name not in ("", name) or slowdown.tool not in ("", tool):
                continue
            if random.Random(f"slowdown {self._seed} {kind} {number} {key}").random() < slowdown.share:
                product *= slowdown.factor
        return product

    def affects(self, kind: SlowKind, name: str, key: str) -> bool:
        """Return whether any slowdown of this kind affects `name` in the draw `key`."""
        return self.factor(kind, name, key) > 1


def refuse_kinds(slowdowns: Sequence[Slowdown], kinds: Collection[SlowKind]) -> None:
    """Raise ValueError for a slowdown of any other kind."""
    for slowdown in slowdowns:
        if slowdown.kind not in kinds:
            raise ValueError(f"slowdowns: {slowdown.kind} does not belong here; move it to {WHERE[slowdown.kind]}")


def refuse_names(slowdowns: Sequence[Slowdown], kind: SlowKind, names: Collection[str]) -> None:
    """Raise ValueError for a slowdown of this kind whose name is not one of `names`."""
    for slowdown in slowdowns:
        if slowdown.kind is kind and slowdown.name and slowdown.name not in names:
            raise ValueError(
                f"slowdowns: {kind} {slowdown.name!r} does not exist; name one of {', '.join(sorted(names))}, or none"
            )
