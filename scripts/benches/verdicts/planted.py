"""Small simulated runs with one planted cause of slowness, or with none. Causes that lie in time are planted in the
times of a run without one (`moments`).

Invariants:
- A run follows from its seed and its cause alone; what differs between runs (sizes, durations, magnitude) is drawn.
- Every run has stragglers of a heavy tail, and harmless variation of possible causes: several hosts, images, engines
  and tools, pauses for pushes, and evaluations beside training in half of the runs.
- A cause makes a part of the affected rollouts longer by 0.6 to 2 times the median rollout; an evaluation beside
  training, whose effect depends on the queue, by up to about 0.9 times.
- No rollout exceeds the staleness bound, which would be a second cause.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from headrace.actors.runtime.simulated.tasks import task_name
from headrace.actors.simulation.virtual.plan import SimulationPlan, make_plan
from headrace.actors.telemetry.slow.factors import Factor
from headrace.buffer.trajectories.breakdown import BOOT, ENGINE_DECODE, EVALUATE_CHECK, GATE, QUEUE, TOOL

TOOLS: Final = ("bash", "edit", "search")
SLOTS, GROUP, STEPS = 64, 8, 8
EXCESS: Final = (0.6, 2.0)
"""Range of a cause's excess, in times of the median rollout."""


EXCESS_OF_EVALUATION: Final = 0.7
"""The same of an evaluation beside training, on average; it follows from the queue."""


EARLIER_ATTEMPTS: Final = "earlier_attempts"
"""Name of the time before a rollout's last attempt."""


class Cause(StrEnum):
    """What is planted in a run."""

    NONE = "none"
    HOST = "host"
    IMAGE = "image"
    ENGINE = "engine"
    TOOL = "tool"
    EVALUATOR = "evaluator"
    EVALUATION = "evaluation"
    GATE = "gate"
    RETRIES = "retries"
    CPU = "cpu"
    RETRACTION = "retraction"
    WHOLE_IMAGE = "whole_image"
    """All boots of an image, so also all rollouts of some tasks."""
    ENGINE_WINDOW = "engine_window"
    GATEWAY = "gateway"
    GATEWAY_STOP = "gateway_stop"
    STOP = "stop"
    LEDGER_WINDOW = "ledger_window"
    LEVEL = "level"
    WINDOW = "window"
    """The last seven lie in time, or at a gateway: see `moments`."""


CAUSES: Final = tuple(cause for cause in Cause if cause is not Cause.NONE)
STEPS_OF_MOMENTS: Final = 2 * STEPS
"""Steps of a run with a cause that lies in time, which takes a part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A run to simulate, and the right answers: `parts` (prefixes of names) and `factors` (label, value) of which one
    has to be named. Both are empty without a cause."""

    seed: int
    cause: Cause
    plan: SimulationPlan
    excess_s: float = 0.0
    """Seconds by which the cause makes the part of a typical affected rollout longer."""
    parts: tuple[str, ...] = ()
    factors: tuple[tuple[str, str], ...] = ()

    def is_part(self, part: str) -> bool:
        """Return whether the cause prolongs this part."""
        return any(part == name or (name.endswith(".") and part.startswith(name)) for name in self.parts)

    def is_factor(self, factor: Factor) -> bool:
        """Return whether this factor is the planted one."""
        return (factor.kind, factor.value) in self.factors


def planted_run(seed: int, cause: Cause, draw: int = 0, *, steps: int = STEPS) -> Planted:
    """Draw a run with this cause; `draw` counts the runs of the same seed that the cause did not affect. Nothing is
    planted for a cause that lies in time."""
    chance = random.Random(f"planted {seed} {cause}" + (f" {draw}" if draw else ""))
    sizes = {
        "hosts": chance.randint(3, 6),
        "images": chance.randint(2, 4),
        "engines": chance.randint(2, 5),
        "tasks": chance.randint(4, 6),
        "turns": chance.randint(4, 8),
    }
    tools = list(TOOLS[: chance.randint(2, 3)])
    agent_s, boot_s, evaluate_s = chance.uniform(60, 120), chance.uniform(4, 12), chance.uniform(4, 12)
    keys: dict[str, Any] = {
        **sizes,
        "slots": SLOTS,
        "batch_size": chance.choice((32, 36, 40)),
        "group_size": GROUP,
        "steps": steps,
        "learner_s": chance.uniform(10, 30),
        "push": chance.choice(("overlap", "pause")),
        "push_s": chance.uniform(1, 4),
        "boot_s": boot_s,
        "evaluate_s": evaluate_s,
        "max_staleness": STEPS,
        "seed": seed,
        "tools": tools,
        "buffer": {"max_attempts": 20, "park_after": 20},
        "durations": {
            "median_s": agent_s,
            "mean_s": agent_s * chance.uniform(1.03, 1.1),
            "cap_s": 20 * agent_s,
            "task_share": 0.3,
            "stragglers": chance.uniform(0.02, 0.05),
            "straggler_factor": chance.uniform(2.0, 3.0),
        },
    }
    if chance.random() < 0.5:
        keys |= {"evaluate_every": 3, "heldout": chance.randint(8, 16)}
    excess = EXCESS_OF_EVALUATION if cause is Cause.EVALUATION else chance.uniform(*EXCESS)
    excess_s = excess * (agent_s + boot_s + evaluate_s)
    parts, factors, changes = _cause(cause, keys, excess_s, chance)
    plan = make_plan("swe64", keys | changes)
    return Planted(seed=seed, cause=cause, plan=plan, excess_s=excess_s, parts=parts, factors=factors)


_Answer = tuple[tuple[str, ...], tuple[tuple[str, str], ...], dict[str, Any]]


def _cause(cause: Cause, keys: dict[str, Any], excess_s: float, chance: random.Random) -> _Answer:
    """Return the right parts and factors of a cause, and the keys of the plan that plant it."""
    host, image = (f"{name}-{chance.randrange(keys[f'{name}s'])}" for name in ("host", "image"))
    engine, tool = f"engine-{chance.randrange(keys['engines'])}", chance.choice(keys["tools"])
    task = task_name(chance.randrange(keys["tasks"]))
    agent_s, few = keys["durations"]["median_s"], chance.uniform(0.2, 0.35)
    half_s, wholly = agent_s / 2, chance.uniform(0.7, 1.0)

    def slow(name: str, of_s: float, share: float, **more: str) -> dict[str, Any]:
        slowdown = {"kind": cause.value, "name": name, "factor": 1 + excess_s / of_s, "share": share, **more}
        return {"slowdowns": [slowdown]}

    tool_s = half_s / len(keys["tools"])
    # A part of a task's, image's or host's rollouts: what all of them share is typical of the task.
    match cause:
        case Cause.HOST:
            return (BOOT,), (("host", host),), slow(host, keys["boot_s"], wholly)
        case Cause.IMAGE:
            return (BOOT,), (("image", image),), slow(image, keys["boot_s"], few)
        case Cause.WHOLE_IMAGE:
            return (BOOT,), (("image", image),), slow(image, keys["boot_s"], 1.0, kind="image")
        case Cause.ENGINE:
            return (ENGINE_DECODE,), (("engines", engine),), slow(engine, 0.8 * half_s, wholly)
        case Cause.RETRACTION:
            factors = (("engines", engine), ("retractions", "above 0"))
            return (ENGINE_DECODE,), factors, slow(engine, 0.8 * half_s, chance.uniform(0.3, 1.0))
        case Cause.TOOL:
            # Attempts that hardly call the tool are not affected.
            return (f"{TOOL}{tool}",), (("task", task),), slow(task, tool_s, 1.4 * few, tool=tool)
        case Cause.CPU:
            return (TOOL,), (("host", host), ("starved", "")), slow(host, half_s, wholly)
        case Cause.EVALUATOR:
            return (EVALUATE_CHECK,), (("task", task),), slow(task, keys["evaluate_s"], few)
        case Cause.RETRIES:
            return (EARLIER_ATTEMPTS,), (("task", task),), slow(task, 1.0, few)
        case Cause.GATE:
            # Of few pushes at least one has to be slow.
            return (GATE,), (("push", ""),), slow("", keys["push_s"], 1.5 * few) | {"push": "pause"}
        case Cause.EVALUATION:
            # Training uses most of the boots, and an evaluation as many as training does in a rollout's time. There are
            # two evaluations: one would be one observation, and with more, one would run nearly always.
            boots, heldout = chance.randint(1, 2), SLOTS - 1
            boot_s = boots * keys["hosts"] * (agent_s + keys["evaluate_s"]) / (1.3 * SLOTS)
            changes = {
                "evaluate_every": STEPS,
                "steps": 3 * STEPS - 1,
                "heldout": heldout,
                "boots": boots,
                "boot_s": boot_s,
                "held_out_share": 1.0,
            }
            return (QUEUE,), (("evaluation", ""),), changes
        case _:
            return (), (), {}
