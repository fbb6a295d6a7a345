"""The bench of outages, `scripts/bench outage`: a real run over Ray that loses its engines, then its buffer.

Meanwhile, one sandbox host breaks every command; none of this may be charged to tasks.

Invariants:
- The clocks are those of `scripts/bench longagents`: the recipe of Claude Code in scaled time. Engines, sandboxes,
  agent and learner are simulated; service, dispatcher, workers, pool and buffer are real.
- The figures are read from the ledger after the run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from benches.long_agents import (
    AGENT_MINUTES,
    EVALUATE_MINUTES,
    LEAST_S,
    MODEL,
    RECIPE,
    STEP_MINUTES,
    WORKLOAD,
    scaled_clocks,
)
from headrace.actors.derivation.clocks import gate_wait_s
from headrace.actors.derivation.terms import Terms
from headrace.actors.errors import ActorLost, RunStalled
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.config import RunConfig, load_recipe, resolve
from headrace.actors.run.launch import drive, lay_out
from headrace.actors.run.service import Service
from headrace.actors.runtime.actors.operations import until_back
from headrace.actors.runtime.actors.runtime import RayRuntime
from headrace.actors.runtime.simulated.engines import SimulatedEngineGroup
from headrace.actors.training.replay import Replay
from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.audit.verify import verify
from headrace.buffer.core.records import Charge

GATE_WAITS: Final = 20
"""Length of the engines' outage, as a multiple of the time that a turn waits for an engine."""
BUFFER_AWAY_S: Final = 30.0
KILL_EVERY_S: Final = 0.5
HOSTS: Final = 4
STEPS: Final = 12
BEFORE_STEPS: Final = 3
"""Number of steps before the first outage, and between the two outages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """Result of the run. `charged` counts failed attempts by what they were charged to, `issued_while_down` counts
    attempts that began while no engine was available, of which `inventory` are allowed. Seconds are real time."""

    completed: bool
    parked: int
    lost: int
    charged_to_tasks: int
    issued_while_down: int
    inventory: int
    poison: int
    steps: int
    charged: dict[str, int]
    engines_away_s: float
    buffer_kills: int
    wall_s: float
    ended_by: str
    problems: tuple[str, ...]

    @property
    def holds(self) -> bool:
        nobody = (self.parked, self.lost, self.charged_to_tasks) == (0, 0, 0)
        return self.completed and nobody and self.issued_while_down <= self.inventory and not self.problems

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True, kw_only=True)
class Outages:
    """Causes the outages during a run. `gate_waits` and `buffer_away_s` are their lengths."""

    gate_wait_s: float
    gate_waits: float = GATE_WAITS
    buffer_away_s: float = BUFFER_AWAY_S
    down_s: list[float] = field(default_factory=list)
    """Unix times at which the engines went down and came up again."""
    kills: int = 0

    async def happen(self, service: Service) -> None:
        """Cause one outage after another, each after some steps."""
        runtime = RayRuntime()
        if not await until_back(lambda: service.reached(BEFORE_STEPS)):
            return
        engines = await runtime.find(SimulatedEngineGroup, "engines")
        await engines.go_down()
        self.down_s.append(time.time())
        await asyncio.sleep(self.gate_waits * self.gate_wait_s)
        self.down_s.append(time.time())
        await engines.come_back()
        if not await until_back(lambda: service.reached(2 * BEFORE_STEPS)):
            return
        # The buffer is killed whenever it was restarted.
        replay = await runtime.find(Replay, "replay")
        loop, killed = asyncio.get_running_loop(), 0
        until_s = loop.time() + self.buffer_away_s
        while loop.time() < until_s:
            with suppress(ActorLost, ProcessLookupError, TimeoutError):
                async with asyncio.timeout(KILL_EVERY_S):
                    process_id, _ = await runtime.stats(replay)
                if process_id != killed:
                    os.kill(process_id, signal.SIGKILL)
                    killed = process_id
                    self.kills += 1
            await asyncio.sleep(KILL_EVERY_S)


def prepare_outage(directory: RunDirectory, *, steps: int = STEPS, minute_s: float = 60.0 / WORKLOAD) -> RunConfig:
    """Prepare the run directory; return its configuration. One minute of an agent's time takes `minute_s` real
    seconds."""
    recipe = load_recipe(RECIPE, [f"model.path={MODEL}"], directory.path)
    clocks = scaled_clocks(recipe)
    durations = {"recorded_s": tuple(minutes * minute_s for minutes in AGENT_MINUTES), "cap_s": 30 * minute_s}
    document = {
        **{table: keys for table, keys in clocks.items() if table not in ("gateway", "push", "engines")},
        "agent": {"kind": "simulated", "simulated": {"durations": durations, "turns": 6}},
        "tasks": {"train_count": 256, "heldout_count": 4, "evaluate_s": EVALUATE_MINUTES * minute_s},
        "dispatcher": {"slots_per_worker": 32, "evaluation_slots": 8},
        "sandbox": {
            "provider": "simulated",
            "pool": {"max_live": 160, "boot_concurrency": 32},
            "simulated": {"hosts": HOSTS, "broken_hosts": 1},
        },
        "buffer": {"batch_size": 32, "group_size": 4, "max_staleness": 2},
        "engines": {
            "backend": "simulated",
            "simulated": {"push_s": 0.5, "gate_wait_s": max(LEAST_S, gate_wait_s(Terms.of(recipe)) / WORKLOAD)},
        },
        "learner": {"kind": "simulated", "simulated": {"step_s": STEP_MINUTES * minute_s}},
        "training": {**clocks["training"], "steps": steps, "save_every": 3},
        "evaluation": {"tasks": 4, "samples": 1, "every_steps": 0},
        "service": {**clocks["service"], "workers": 2},
    }
    config = resolve(document, RECIPE, directory.path)
    lay_out(config, directory)
    return config


def measure_outage(
    directory: RunDirectory, config: RunConfig, outages: Outages, *, quiet: bool = False, say: Callable[[str], object]
) -> Outage:
    """Drive the run through its outages to its end. A stall is reported as a figure; other errors are raised."""
    ended_by, completed, began_s = "", False, time.monotonic()
    try:
        completed = drive(config, directory, quiet=quiet, beside=outages.happen).completed
    except RunStalled as error:
        ended_by = str(error)
        say(ended_by)
    return read_outage(
        directory.path, config, outages, completed=completed, ended_by=ended_by, wall_s=time.monotonic() - began_s
    )


def read_outage(
    path: Path, config: RunConfig, outages: Outages, *, completed: bool, ended_by: str, wall_s: float
) -> Outage:
    """Read the figures of a run that has ended. Raises LedgerRefused."""
    report = verify(path)
    went_down, came_back = outages.down_s if len(outages.down_s) == 2 else (0.0, 0.0)
    evidence = read_evidence(path)
    charged = Counter(attempt.charged_to.value for attempt in evidence.attempts if attempt.charged_to is not None)
    issued = sum(went_down <= attempt.issued_at_s <= came_back for attempt in evidence.attempts)
    return Outage(
        completed=completed,
        parked=sum(task.parked for task in evidence.tasks),
        lost=report.lost,
        charged_to_tasks=charged[Charge.TASK.value],
        issued_while_down=issued,
        inventory=(config.buffer.max_staleness + 1) * config.buffer.batch_size,
        poison=report.poison,
        steps=report.steps,
        charged=dict(charged),
        engines_away_s=came_back - went_down,
        buffer_kills=outages.kills,
        wall_s=wall_s,
        ended_by=ended_by,
        problems=report.problems,
    )
