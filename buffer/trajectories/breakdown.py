"""The breakdown of one attempt: the seconds that each part took, where they lay, and labels that may explain them.

Invariants:
- Parts do not overlap: their seconds, `other` included, add up to `wall_s`. All are measured outside the sandbox.
- The segments of the timeline may overlap, as parallel tool calls do. It is stored in a column of its own, which
  readers of many attempts need not read.
- It is a part of the result and not of the spans, so it exists without tracing and in virtual time.
- Whatever a worker sends, what is stored is bounded: at most `MAX_PARTS` parts and `MAX_NAMES` names in a label.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Self, TypeAlias

from headrace.buffer.primitives.critical_path import Segment
from headrace.buffer.trajectories.timeline import Timeline

Label: TypeAlias = str | float | bool | tuple[str, ...]

QUEUE: Final = "queue"
"""Waiting for a slot of the pool."""
BOOT: Final = "boot"
"""Booting the agent's sandbox, retries included."""
ATTACH: Final = "attach"
"""Connecting to the booted sandbox."""
PREPARE: Final = "prepare"
"""Writing the task's files."""
GATE: Final = "gate"
"""A turn waits for an engine: all are closed for a push, or none is available."""
ENGINE: Final = "engine"
"""The time of a turn that its engine does not report: the way there and back, or all of it if it reports nothing."""
ENGINE_QUEUE: Final = "engine.queue"
"""A turn waits in the engine's queue, before it is computed."""
ENGINE_PREFILL: Final = "engine.prefill"
"""The engine computes the prompt, up to the first sampled token."""
ENGINE_DECODE: Final = "engine.decode"
"""The engine samples the tokens after the first one."""
RENDER: Final = "render"
"""The gateway parses a request and turns it into tokens."""
RECORD: Final = "record"
"""The gateway parses and records a completion, and sends the answer."""
TOOL: Final = "tool."
"""Prefix: from the last byte of an answer with tool calls to the request that continues it; the rest is their names."""
SERVICE: Final = "service."
"""Prefix: the agent waits for one of the recipe's services; the rest is its name."""
OWN: Final = "own"
"""The agent's own time: its start, its end, and between an answer without tool calls and the next request."""
EVALUATE_QUEUE: Final = "evaluate.queue"
"""Waiting for the evaluator, and for a slot of the pool for a clean sandbox."""
EVALUATE_BOOT: Final = "evaluate.boot"
"""Booting clean sandboxes, and connecting to them."""
EVALUATE_FREEZE: Final = "evaluate.freeze"
"""Freezing the agent's sandbox."""
EVALUATE_COLLECT: Final = "evaluate.collect"
"""Reading what the agent left."""
EVALUATE_APPLY: Final = "evaluate.apply"
"""Writing the files of the check."""
EVALUATE_CHECK: Final = "evaluate.check"
"""Running the check."""
EVALUATE: Final = "evaluate"
"""An evaluation that did not report how it spent the time, since it failed or was cancelled."""
RELEASE: Final = "release"
"""Giving sandboxes back to the pool."""
OFFER: Final = "offer"
"""Handing the result to the buffer, including waits while it is away."""
OTHER: Final = "other"
"""The rest of the attempt's time on the worker."""

BEFORE_AGENT: Final = (QUEUE, BOOT, ATTACH, PREPARE)
OF_AGENT: Final = (GATE, ENGINE, ENGINE_QUEUE, ENGINE_PREFILL, ENGINE_DECODE, RENDER, RECORD, OWN)
OF_EVALUATION: Final = (
    EVALUATE_QUEUE,
    EVALUATE_BOOT,
    EVALUATE_FREEZE,
    EVALUATE_COLLECT,
    EVALUATE_APPLY,
    EVALUATE_CHECK,
    EVALUATE,
)
PARTS: Final = (*BEFORE_AGENT, *OF_AGENT, *OF_EVALUATION, RELEASE, OFFER, OTHER)
"""The parts with a fixed name, in the order of a rollout. Those of tools and services come after the agent's."""

MAX_PARTS: Final = 64
MAX_NAMES: Final = 32
MAX_NAME_CHARACTERS: Final = 80


def is_of_agent(part: str) -> bool:
    """Return whether a part belongs to the time between the agent's start and its end."""
    return part in OF_AGENT or part.startswith((TOOL, SERVICE))


def place_of(part: str) -> tuple[int, str]:
    """Return a key that sorts parts in the order of a rollout."""
    if part.startswith((TOOL, SERVICE)):
        return PARTS.index(EVALUATE_QUEUE), f" {part}"
    return PARTS.index(part) if part in PARTS else len(PARTS), part


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Breakdown of an attempt, on its worker's clock. `wall_s` is the time from its start on the worker to its offer,
    `parts_s` are seconds by part, and `within_s` the begin of its first second and the end of its last one, in seconds
    since the attempt began. `labels` by name, where known: `image`, `sandbox`, `warm`, `boot_tries`, `worker`,
    `node`, `agent`, `engines`, `tools`, `versions`, `turns`, `prompt_tokens`, `sampled_tokens`, `trained_tokens`,
    `masked` (the reason that masks most of the others), `cached_tokens`, `retractions`, `family` (of the task),
    `gateway`, `load` (one-minute load of the worker's host per CPU, when the attempt began), `cpu_s`, `cpu_waited_s`
    and `memory_bytes` (CPU seconds, seconds without a CPU though there was work, and peak memory of the agent's
    sandbox)."""

    wall_s: float = 0.0
    parts_s: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, Label] = field(default_factory=dict)
    within_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)

    def to_json(self) -> str:
        """Return the form in which the ledger stores a breakdown without its timeline; times to a tenth of a
        millisecond."""
        document = {
            "wall_s": round(self.wall_s, 4),
            "parts_s": {part: round(seconds, 4) for part, seconds in self.parts_s.items()},
            "within_s": {part: [round(begin, 4), round(end, 4)] for part, (begin, end) in self.within_s.items()},
            "labels": self.labels,
        }
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the result of `to_json`. Raises KeyError, TypeError, ValueError."""
        document = json.loads(text)
        labels = {
            name: tuple(value) if isinstance(value, list) else value for name, value in document["labels"].items()
        }
        within_s = {part: (begin, end) for part, (begin, end) in document["within_s"].items()}
        return cls(wall_s=document["wall_s"], parts_s=document["parts_s"], labels=labels, within_s=within_s)


def spread(path: Iterable[Segment]) -> dict[str, tuple[float, float]]:
    """Return the begin of the first segment of each part, and the end of its last one."""
    found: dict[str, tuple[float, float]] = {}
    for part, start_s, end_s, *_ in path:
        begin_s, until_s = found.get(part, (start_s, end_s))
        found[part] = (min(begin_s, start_s), max(until_s, end_s))
    return found


def summed(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the total seconds of each part, in the order of a rollout."""
    totals: defaultdict[str, float] = defaultdict(float)
    for part, seconds in parts:
        totals[part] += seconds
    return {part: totals[part] for part in sorted(totals, key=place_of)}
