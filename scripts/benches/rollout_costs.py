"""The cost of a rollout: processor time of every process of a quickstart run over Ray, by purpose.

Invariants:
- Time is read from the process tree: each process and its ended children. Sandboxes are the processes below the
  launcher; their split by purpose follows the launcher's own account of the commands that it ran.
- The parts add up to the tree's total; the machine's own count (`/proc/stat`) is reported too, and is larger if
  anything else runs.
- The startup cost is reported separately.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from headrace.actors.record.files.metrics import each_metric
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.config import load_recipe
from headrace.actors.run.launch import drive, lay_out
from headrace.actors.run.service import Service
from headrace.actors.runtime.actors.runtime import RayRuntime
from headrace.actors.runtime.pools.sandbox_pool import SandboxPool
from headrace.buffer.primitives.exit_stack import ResourceOwner
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig

WARM_UP: Final = 128
MEASURED: Final = 500
STARTS: Final = 20
LOOK_S: Final = 0.1
OVERRIDES: Final = (
    "training.steps=10000",
    "training.save_every=10000",
    "evaluation.every_steps=10000",
    "evaluation.tasks=1",
    "evaluation.samples=1",
)
"""Overrides of the quickstart that leave only its first evaluation and checkpoint, because their cost depends on steps
rather than rollouts."""
LAUNCHER: Final = "headrace-launch"
PURPOSES: Final = {
    "train.write": "prepare",
    "train.exec": "agent commands",
    "evaluate.write": "hidden files",
    "evaluate.run": "check",
    "evaluate.exec": "check",
    "evaluate.read": "check",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """CPU seconds that the whole process tree has used so far; `commands` is the launcher's account."""

    time_s: float
    rollouts: float
    machine_s: float
    parts_s: Mapping[str, float]
    calls: Mapping[str, int]
    """Number of calls that each actor has received."""
    commands: Mapping[str, tuple[int, float]]

    @property
    def total_s(self) -> float:
        return sum(self.parts_s.values())


IN_SANDBOXES: Final = frozenset({"boot", "interpreter start-up", *PURPOSES.values()})
"""Parts of the report that are processes in sandboxes."""


def measure_both(folder: Path, recipe: Path, *, rollouts: int = MEASURED) -> dict[str, Any]:
    """Report the cost with tracing, as a run has it by default, and `untraced_cpu_ms_per_rollout` without."""
    traced = measure(RunDirectory(path=folder / "traced"), recipe, rollouts=rollouts)
    untraced = measure(
        RunDirectory(path=folder / "untraced"), recipe, rollouts=rollouts, overrides=("telemetry.enabled=false",)
    )
    return traced | {
        "untraced_cpu_ms_per_rollout": untraced["cpu_ms_per_rollout"],
        "service_cpu_ms_per_rollout": service_ms(traced),
        "untraced_service_cpu_ms_per_rollout": service_ms(untraced),
    }


def service_ms(figures: Mapping[str, Any]) -> float:
    """Return the milliseconds of CPU per rollout of the service's processes: all but those in sandboxes."""
    parts_ms: Mapping[str, float] = figures["parts_ms"]
    return sum(cpu_ms for part, cpu_ms in parts_ms.items() if part not in IN_SANDBOXES)


def service_ratio(figures: Mapping[str, Any]) -> float:
    """Return the same over the CPU of the processes in sandboxes. These do the same work in each run, so the ratio does
    not follow the speed of the machine, which other guests of its host change by a tenth from minute to minute."""
    parts_ms: Mapping[str, float] = figures["parts_ms"]
    return service_ms(figures) / sum(cpu_ms for part, cpu_ms in parts_ms.items() if part in IN_SANDBOXES)


def measure(
    directory: RunDirectory,
    recipe: Path,
    *,
    rollouts: int = MEASURED,
    warm_up: int = WARM_UP,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Run the recipe until `rollouts` rollouts have ended after `warm_up` others, and report their cost."""
    config = load_recipe(recipe, (*OVERRIDES, *overrides), directory.path)
    lay_out(config, directory)
    readings: list[Reading] = []

    async def beside(service: Service) -> None:
        runtime = RayRuntime()
        pool = await runtime.find(SandboxPool, "sandbox-pool")
        names = {process_id: name for name, process_id in (await service.process_ids()).items()}
        actors = {name: await runtime.find(ResourceOwner, name) for name in names.values()}
        for wanted in (0, warm_up, warm_up + rollouts):
            # Read from the metrics file, since a call to an actor would cost CPU that is measured.
            while _ended(directory) < wanted:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
            calls = {name: (await runtime.stats(actor))[1] for name, actor in actors.items()}
            readings.append(read(names, calls, await pool.command_costs(), _ended(directory)))
        await service.drain()

    drive(config, directory, quiet=True, beside=beside)
    start, warm, end = readings
    return report(start, warm, end, interpreter_s=asyncio.run(interpreter_start()))


def _ended(directory: RunDirectory) -> float:
    if not directory.metrics.exists():
        return 0
    return sum(float(record["rollouts"]) for record in each_metric(directory.metrics, ("rollout_phases",)))


def read(
    names: Mapping[int, str], calls: Mapping[str, int], commands: Mapping[str, tuple[int, float]], rollouts: float
) -> Reading:
    """Read the process tree; `names` are those of actors, by process id."""
    parts: defaultdict[str, float] = defaultdict(float)
    for part, seconds in _parts_of(psutil.Process(), names, ""):
        parts[part] += seconds
    machine = psutil.cpu_times()
    return Reading(
        time_s=time.monotonic(),
        rollouts=rollouts,
        machine_s=machine.user + machine.nice + machine.system + machine.irq + machine.softirq,
        parts_s=parts,
        calls=calls,
        commands=commands,
    )


def _parts_of(process: psutil.Process, names: Mapping[int, str], below: str) -> Iterator[tuple[str, float]]:
    """Yield (part, CPU seconds) of a process, its ended children and all its descendants."""
    with suppress(psutil.NoSuchProcess):
        name, times, children = process.name(), process.cpu_times(), process.children()
        part = below or _part(process, name, names)
        inside = "sandboxes" if below or part == "launcher" else ""
        yield part, times.user + times.system
        yield inside or part, times.children_user + times.children_system
        for child in children:
            yield from _parts_of(child, names, inside or below)


def _part(process: psutil.Process, name: str, names: Mapping[int, str]) -> str:
    if process.pid in names:
        return f"actor {names[process.pid]}"
    if name.startswith(LAUNCHER):
        return "launcher"
    if process.pid == psutil.Process().pid:
        return "driver"
    line = " ".join(process.cmdline())
    for module, part in (("cpu_engine", "engine"), ("push.sender", "push"), ("headrace", "other of headrace")):
        if module in line and "ray/" not in line:
            return part
    return "ray"


def report(start: Reading, warm: Reading, end: Reading, *, interpreter_s: float) -> dict[str, Any]:
    """Return the milliseconds of CPU per rollout between the last two readings; `interpreter_s` is the cost of one
    start of the interpreter."""
    rollouts, seconds = end.rollouts - warm.rollouts, end.time_s - warm.time_s
    per_rollout = 1000 / rollouts

    def since(name: str) -> tuple[int, float]:
        count, cpu_s = end.commands[name]
        before = warm.commands.get(name, (0, 0.0))
        return count - before[0], cpu_s - before[1]

    parts = {name: cpu_s - warm.parts_s.get(name, 0.0) for name, cpu_s in end.parts_s.items()}
    commands = {name: since(name) for name in end.commands}
    inside: defaultdict[str, float] = defaultdict(float)
    for name, (_, cpu_s) in commands.items():
        inside[PURPOSES.get(name, name)] += cpu_s
    started = commands.get("evaluate.exec", (0, 0.0))[0] * interpreter_s
    inside["interpreter start-up"] = started
    inside["check"] -= started
    parts["boot"] = parts.pop("sandboxes") - sum(inside.values())
    parts |= inside
    total_s = end.total_s - warm.total_s
    return {
        "cpu_ms_per_rollout": total_s * per_rollout,
        "machine_cpu_ms_per_rollout": (end.machine_s - warm.machine_s) * per_rollout,
        "parts_ms": {name: cpu_s * per_rollout for name, cpu_s in sorted(parts.items(), key=lambda row: -row[1])},
        "commands_per_rollout": {name: count / rollouts for name, (count, _) in commands.items()},
        "calls_per_rollout": {name: (count - warm.calls[name]) / rollouts for name, count in end.calls.items()},
        "rollouts": rollouts,
        "rollouts_per_s": rollouts / seconds,
        "start_cpu_s": start.total_s,
        "start_parts_s": dict(start.parts_s),
    }


async def interpreter_start() -> float:
    """Return the CPU seconds that a sandbox needs to start the check's interpreter with nothing to run."""
    async with LocalProvider(LocalSandboxConfig()) as provider:
        sandbox = await provider.attach(await provider.create(SandboxSpec(labels={"purpose": "start"})))
        for _ in range(STARTS):
            await sandbox.exec("exec python3 -I -S -c ''", timeout_s=30.0)
        count, cpu_s = (await provider.command_costs())["start.exec"]
        return cpu_s / count
