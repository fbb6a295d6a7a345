"""Fault injection for `headrace simulate --faults SEED`: a run in virtual time under a storm of faults, followed by
checks.

The ordinary actors run over simulated backends, with a real ledger, real checkpoints and a real sandbox ledger in a
folder. Actors and drivers are killed; calls are delayed, lost, repeated and reordered; actors are cut off or slowed
down; hosts and engines go down, the disk fills up, the wall clock jumps, and files are lost, damaged or added by
others.

Invariants:
- The same seed gives the same history: randomness comes only from the seed, time from the event loop.
- Every storm ends. The run must then finish with all its steps in the ledger; otherwise the report lists a problem.
- The checks read files and the simulated host, not the actors' reports.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import random
import sqlite3
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Final

from headrace.actors.errors import ActorError, RunError, first_cause
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.rollouts.dispatcher import Dispatcher
from headrace.actors.run.config import RunConfig
from headrace.actors.run.exit_codes import EXIT_TRANSIENT, exit_code_of_run
from headrace.actors.run.launch import run_guarded
from headrace.actors.run.parts import Externals
from headrace.actors.run.service import Service
from headrace.actors.runtime.actors.operations import until_back
from headrace.actors.runtime.pools.sandbox_pool import SandboxPool
from headrace.actors.runtime.simulated.durations import DurationsConfig
from headrace.actors.runtime.simulated.engines import SimulatedEngineGroup
from headrace.actors.runtime.simulated.tasks import simulated_tasks
from headrace.actors.simulation.virtual.faulty_environment import FaultyLoop, NetworkModel, WallClock
from headrace.actors.simulation.virtual.faulty_runtime import CallFaults, FaultyRuntime
from headrace.actors.simulation.virtual.plan import LEASE_S, SimulationPlan
from headrace.actors.simulation.virtual.plan_service import plan_config
from headrace.actors.simulation.virtual.run_statistics import history_digest
from headrace.actors.training.replay import Replay
from headrace.buffer.audit.verify import verify
from headrace.buffer.errors import ReplayError
from headrace.buffer.tasks.task import write_tasks
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.checkpoints import MANIFEST, list_checkpoints
from headrace.sandboxes.simulated.provider import SimulatedProvider, SimulationConfig

PATIENCE_S: Final = 6 * 3600.0
"""Maximum time that the run may take after the storm; a run of a few steps needs minutes."""
LEASES_S: Final = 3 * LEASE_S
"""Time after which every sandbox lease has expired and a sweep has run."""
SETTLE_S: Final = 600.0
"""Time beyond all deadlines of rollouts that are being cancelled."""
OUTAGE_S: Final = 900.0
"""Longest outage of an actor, a host or the engines."""
RESTARTED_S: Final = 5.0
"""Time between the failure of a run and the start of its next driver."""
MOST_RESTARTS: Final = 30
"""Maximum number of drivers that are started after transient failures."""
RUN_ERRORS: Final = (ActorError, RunError, ReplayError, OSError, sqlite3.Error)
"""Errors that may end a run in a storm; any other error is a defect."""
HELD_OUT: Final = 2
"""Number of held-out tasks."""
MEMORY: Final = Path("/dev/shm")
FOREIGN: Final = ("notes.txt", "checkpoints/7.x", "checkpoints/.unfinished", "trajectories/9.old")
CUT_BYTES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    """Plan of one run and the faults injected into it. Times are in seconds, probabilities from 0 to 1."""

    plan: SimulationPlan
    calls: CallFaults
    host: SimulationConfig
    lasts_s: float
    between_s: float
    """Mean time between two faults."""
    driver_deaths: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultReport:
    """Result of one history. `problems` is empty when all checks passed; `digest` covers the events and every row of
    the ledger; `strikes` counts the injected faults by kind."""

    seed: int
    digest: str
    problems: tuple[str, ...]
    steps: int
    strikes: dict[str, int]
    virtual_s: float

    @property
    def replay(self) -> str:
        """Command that repeats this history."""
        return f"headrace simulate --faults {self.seed}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"clean": not self.problems, "replay": self.replay}

    def lines(self) -> list[str]:
        """Render the report for the terminal."""
        faults = ", ".join(f"{kind} {times}" for kind, times in self.strikes.items())
        verdict = [f"PROBLEM  {problem}" for problem in self.problems] or ["all checks passed"]
        return [
            f"history {self.seed}: {self.steps} steps in {self.virtual_s / 60:.0f} simulated minutes",
            f"faults: {faults}",
            f"digest {self.digest}",
            *verdict,
            f"repeat with: {self.replay}",
        ]


def draw_storm(seed: int) -> Storm:
    """Draw a small run and its faults from the seed."""
    chance = random.Random(f"storm {seed}")
    group, bound = chance.choice((2, 4)), chance.choice((1, 2, 4))
    rules = ["all", "all", f"count({group - 1})", "fraction(0.5) & grace(20)"]
    rules += ["all | expiring(1)"] if bound > 1 else []
    plan = SimulationPlan(
        seed=seed,
        batch_size=group * chance.choice((1, 2, 3)),
        group_size=group,
        slots=chance.choice((4, 8, 16)),
        workers=chance.choice((1, 2)),
        max_staleness=bound,
        rule=chance.choice(rules),
        steps=chance.randint(6, 16),
        save_every=chance.choice((1, 2, 3)),
        durations=DurationsConfig(mean_s=40.0, median_s=30.0, cap_s=150.0),
        learner_s=chance.choice((5.0, 20.0)),
        push_s=chance.choice((0.5, 5.0)),
        boot_s=1.0,
        evaluate_s=1.0,
        tasks=24,
        turns=3,
        buffer={"unfinished": chance.choice(("carry", "abort")), "max_attempts": 50, "batch_tries": 1000},
    )
    harsh = chance.choice((0.0, 0.5, 1.0, 2.0))
    calls = CallFaults(
        delay_s=0.01,
        slow=0.02 * harsh,
        slow_s=chance.choice((2.0, 30.0)),
        lost=0.004 * harsh,
        answer_lost=0.004 * harsh,
        repeated=0.004 * harsh,
        restart_s=chance.choice((1.0, 8.0)),
    )
    host = SimulationConfig(
        seed=seed,
        capacity=64,
        boot_s=1.0,
        boot_failure=0.02 * harsh,
        ambiguous=0.02 * harsh,
        lost_create=0.01 * harsh,
        kill_failure=0.02 * harsh,
        ends_leases=chance.random() < 0.7,
    )
    return Storm(
        plan=plan,
        calls=calls,
        host=host,
        lasts_s=chance.uniform(0.6, 1.5) * plan.steps * plan.ideal_s,
        between_s=chance.choice((15.0, 40.0, 120.0)),
        driver_deaths=chance.choice((0, 0, 1, 2)),
    )


def simulate_faults(seed: int) -> FaultReport:
    """Run one history. Failures of the run are problems in the report, not exceptions."""
    with tempfile.TemporaryDirectory(prefix="headrace-faults-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        storm = draw_storm(seed)
        directory = prepare_storm(Path(folder) / "run", storm.plan)
        history = History(seed=seed, storm=storm, directory=directory)
        history.play()
        return history.report()


def prepare_storm(path: Path, plan: SimulationPlan) -> RunDirectory:
    """Create the run directory of a history."""
    directory = RunDirectory(path=path)
    directory.write_beginning(plan.task_set(), "faults")
    heldout = simulated_tasks(plan.seed, HELD_OUT, evaluate_s=plan.evaluate_s, family="heldout")
    write_tasks(directory.heldout_tasks, heldout)
    return directory


def storm_config(plan: SimulationPlan, directory: RunDirectory) -> RunConfig:
    """Return a configuration with evaluations during training and with timeouts short enough to be reached: a run
    without progress ends and is resumed."""
    rollout = {
        "queue_timeout_s": OUTAGE_S,
        "boot_timeout_s": OUTAGE_S,
        "agent_timeout_s": OUTAGE_S,
        "evaluate_timeout_s": OUTAGE_S,
        "lease_s": LEASE_S,
    }
    evaluation = {"tasks": HELD_OUT, "samples": 1, "every_steps": 3}
    tasks = {"heldout_count": HELD_OUT}
    return plan_config(plan, directory.path, rollout=rollout, evaluation=evaluation, tasks=tasks)


class DriverDied(Exception):
    """Internal error that ends all tasks of one driver."""


class History:
    """History of one run from its first driver to its end."""

    def __init__(self, *, seed: int, storm: Storm, directory: RunDirectory) -> None:
        self.seed, self.storm, self.directory = seed, storm, directory
        self.config = storm_config(storm.plan, directory)
        self.events: list[str] = []
        self.strikes: dict[str, int] = {}
        self.problems: list[str] = []
        self.ended_s = 0.0
        self.restarts = 0
        self.clock = WallClock()
        self.chance = random.Random(f"strikes {seed}")

    def note(self, kind: str, who: str, what: str) -> None:
        """Record an event: its kind, the affected actor and details."""
        self.events.append(f"{asyncio.get_running_loop().time():.6f} {kind} {who} {what}")
        self.strikes[kind] = self.strikes.get(kind, 0) + 1

    def play(self) -> None:
        """Run the history in virtual time."""
        before = random.getstate()
        random.seed(self.seed)
        try:
            # Cleanup code of killed actors creates coroutines in task groups that have ended; nothing awaits them.
            with warnings.catch_warnings(), asyncio.Runner(loop_factory=FaultyLoop) as runner:
                warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
                runner.run(self.run())
                gc.collect()
        finally:
            random.setstate(before)

    async def run(self) -> None:
        """Start one driver after another until the run is done; then check for leaked sandboxes and tasks."""
        loop = asyncio.get_running_loop()
        self.cloud = SimulatedProvider(self.storm.host)
        lives = self.storm.driver_deaths
        try:
            async with asyncio.timeout(self.storm.lasts_s + PATIENCE_S):
                while not await self._run_driver(dies=lives > 0 and self._in_storm()):
                    lives -= 1
        except TimeoutError:
            self.problems.append(f"the run did not end within {PATIENCE_S / 3600:g} h after the storm")
        except RUN_ERRORS as error:
            self.problems.append(f"the run ended with {type(error).__name__}: {error}")
        self.ended_s = loop.time()
        # The pool of a next run on this directory must remove all sandboxes.
        async with SandboxPool(
            self.storm.plan.sandbox_section(),
            directory=self.directory,
            clock=self.clock.time,
            provider=NetworkModel(self.cloud),
        ):
            await asyncio.sleep(LEASES_S)
        if self.cloud.living:
            self.problems.append(f"{len(self.cloud.living)} sandboxes are left")
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if left:
            self.problems.append(f"{len(left)} tasks of dead actors are still running: {left[0]}")

    def report(self) -> FaultReport:
        """Verify the ledger and return the report."""
        checked = verify(self.directory.path)
        problems = [*self.problems, *checked.problems]
        if not self.problems and checked.steps < self.storm.plan.steps:
            problems.append(f"{checked.steps} of {self.storm.plan.steps} steps are in the ledger")
        digest = hashlib.sha256("\n".join(self.events).encode() + history_digest(self.directory.path).encode())
        return FaultReport(
            seed=self.seed,
            digest=digest.hexdigest(),
            problems=tuple(problems),
            steps=checked.steps,
            strikes=dict(sorted(self.strikes.items())),
            virtual_s=self.ended_s,
        )

    async def _run_driver(self, *, dies: bool) -> bool:
        """Run one driver; return whether the run is done. A transient failure of the run is followed by another driver,
        as with `--restarts`."""
        runtime = FaultyRuntime(self.storm.calls, self.chance, self.note)
        try:
            try:
                async with runtime, asyncio.TaskGroup() as tasks:
                    injecting = tasks.create_task(self._inject_faults(runtime))
                    if dies:
                        tasks.create_task(self._die(runtime, self.chance.uniform(20.0, self.storm.lasts_s)))
                    await self._drive(runtime)
                    injecting.cancel()
                    raise DriverDied
            except BaseExceptionGroup as group:
                if not isinstance(first_cause(group), DriverDied):
                    raise first_cause(group) from group
        except RUN_ERRORS as error:
            self.restarts += 1
            if exit_code_of_run(error) != EXIT_TRANSIENT or self.restarts > MOST_RESTARTS:
                raise
            self.note("run failed", "driver", f"{type(error).__name__}: {error}")
            await asyncio.sleep(RESTARTED_S)
            return False
        return not runtime.is_dead

    async def _die(self, runtime: FaultyRuntime, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self.note("driver died", "driver", "")
        await runtime.kill_all()
        raise DriverDied

    async def _drive(self, runtime: FaultyRuntime) -> None:
        """Run the service as `launch` does, over the faulty runtime."""
        externals = Externals(clock=self.clock.time, provider=NetworkModel(self.cloud))
        service = await runtime.spawn(
            Service, self.config, self.directory, runtime, externals=externals, name="service"
        )
        await run_guarded(runtime, service, self.config.service.hang_s)
        if not self._in_storm():
            # Once the cancelled rollouts have ended, no worker runs anything and the ledger must have none in flight.
            dispatcher, replay = runtime.actor("dispatcher", Dispatcher), runtime.actor("replay", Replay)
            try:
                async with asyncio.timeout(SETTLE_S):
                    while (await until_back(dispatcher.status)).in_flight:  # noqa: ASYNC110 - virtual time
                        await asyncio.sleep(1.0)
            except TimeoutError:
                self.problems.append(f"{SETTLE_S:g} s after the end the dispatcher still has rollouts in flight")
            in_flight = (await until_back(replay.status)).inventory.in_flight
            if in_flight:
                self.problems.append(f"{in_flight} attempts are in flight in the ledger, but no worker runs them")
        await runtime.stop(service)

    def _in_storm(self) -> bool:
        return asyncio.get_running_loop().time() < self.storm.lasts_s

    async def _inject_faults(self, runtime: FaultyRuntime) -> None:
        """Inject faults until the storm ends; from then on, deliver all calls normally."""
        while self._in_storm():
            await asyncio.sleep(self.chance.expovariate(1 / self.storm.between_s))
            inject = self.chance.choice(FAULTS)
            await inject(self, runtime)
        runtime.calm()
        self.cloud.come_back()
        self.note("calm", "storm", "")


async def _undo_later(history: History, least_s: float, most_s: float, undo: Callable[[], object]) -> None:
    """Undo a fault after a random time, even if the storm is cancelled."""
    try:
        await asyncio.sleep(history.chance.uniform(least_s, most_s))
    finally:
        undo()


def _longest_s(history: History) -> float:
    """Draw the maximum duration of an outage: usually one minute, sometimes `OUTAGE_S`."""
    return 60.0 if history.chance.random() < 0.7 else OUTAGE_S


async def _kill(history: History, runtime: FaultyRuntime) -> None:
    if runtime.cells:
        runtime.cells[history.chance.choice(sorted(runtime.cells))].kill("struck")


async def _cut_off(history: History, runtime: FaultyRuntime) -> None:
    if not runtime.cells:
        return
    name = history.chance.choice(sorted(runtime.cells))
    history.note("cut off", name, "")
    runtime.cut_off.add(name)
    await _undo_later(history, 1.0, _longest_s(history), lambda: runtime.cut_off.discard(name))


async def _slow_down(history: History, runtime: FaultyRuntime) -> None:
    if not runtime.cells:
        return
    name = history.chance.choice(sorted(runtime.cells))
    history.note("slowed", name, "")
    runtime.slowed[name] = history.chance.choice((20.0, 200.0))
    await _undo_later(history, 1.0, 60.0, lambda: runtime.slowed.pop(name, None))


async def _host_down(history: History, runtime: FaultyRuntime) -> None:
    lose, silent = history.chance.random() < 0.5, history.chance.random() < 0.3
    history.note("host down", "host", f"loses sandboxes: {lose}, silent: {silent}")
    history.cloud.go_down(lose_sandboxes=lose, silent=silent)
    await _undo_later(history, 1.0, _longest_s(history), history.cloud.come_back)


async def _engines_down(history: History, runtime: FaultyRuntime) -> None:
    if "engines" not in runtime.cells:
        return
    engines = runtime.actor("engines", SimulatedEngineGroup)
    history.note("engines down", "engines", "")
    with suppress(ActorError):
        await engines.go_down()
    try:
        await asyncio.sleep(history.chance.uniform(1.0, _longest_s(history)))
    finally:
        # A restarted group has no outage; a group that is still alive must end it.
        with suppress(ActorError):
            await until_back(engines.come_back)
    # A repeated call of `go_down` may arrive after `come_back`.
    await asyncio.sleep(history.storm.calls.slow_s)
    with suppress(ActorError):
        await until_back(engines.come_back)


async def _disk_full(history: History, runtime: FaultyRuntime) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, FaultyLoop)
    history.note("disk full", "disk", "")
    loop.disk_full = True
    await _undo_later(history, 0.1, 40.0, lambda: setattr(loop, "disk_full", False))


async def _clock_jump(history: History, runtime: FaultyRuntime) -> None:
    by_s = history.chance.uniform(-7200.0, 7200.0)
    history.note("clock jump", "clock", f"{by_s:.0f} s")
    history.clock.jump(by_s)


async def _add_foreign_file(history: History, runtime: FaultyRuntime) -> None:
    """Write a file that does not belong to headrace."""
    name = history.chance.choice(FOREIGN)
    history.note("file appeared", name, "")
    add_foreign_file(history.directory.path, name)


async def _damage_served(history: History, runtime: FaultyRuntime) -> None:
    """Damage the journal of the served version, and kill its readers."""
    # Engines without a version wait for a push; a run that stalls because of that is resumed, and its learner pushes.
    _damage(history, runtime, "served", damage_served, ("engines", "learner"))


async def _damage_checkpoint(history: History, runtime: FaultyRuntime) -> None:
    """Damage the newest checkpoint, and kill the learner."""
    damage_newest = partial(damage_checkpoint, steps=history.storm.plan.steps)
    _damage(history, runtime, "checkpoint", damage_newest, ("learner",))


def _damage(
    history: History,
    runtime: FaultyRuntime,
    what: str,
    damage_file: Callable[[Path, Damage], Path | None],
    readers: tuple[str, ...],
) -> None:
    damage = history.chance.choice(tuple(Damage))
    # A file is damaged only if its readers exist and can be killed.
    if not runtime.cells.keys() >= set(readers) or not damage_file(history.directory.path, damage):
        return
    history.note(f"{what} spoilt", damage, "")
    for name in readers:
        runtime.cells[name].kill("a file is spoilt")


FAULTS: Final = (
    *(_kill, _kill, _kill),
    *(_cut_off, _slow_down, _host_down, _engines_down, _disk_full, _clock_jump),
    *(_add_foreign_file, _damage_served, _damage_checkpoint),
)


class Damage(StrEnum):
    """Kind of damage to a file. Only files that a run can do without are damaged: the journal of the served version,
    and a checkpoint that has a predecessor."""

    LOST = "lost"
    EMPTY = "empty"
    TORN = "torn"
    """The last bytes are missing."""


def add_foreign_file(run: Path, name: str) -> None:
    """Write a file that does not belong to headrace into a run directory."""
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_bytes(b"not ours")


def damage_served(run: Path, damage: Damage) -> Path | None:
    """Damage the journal of the served version; return its path, or None if there is none yet."""
    return _damage_file(run / "served.json", damage)


def damage_checkpoint(run: Path, damage: Damage, *, steps: int) -> Path | None:
    """Damage the newest checkpoint of a run of `steps` steps and return its path. Return None if the learner has no
    earlier checkpoint to fall back on, or if the run has made its last step, so that no learner would read a checkpoint
    again."""
    checkpoints = list_checkpoints(run / "checkpoints")
    if len(checkpoints) < 2 or PolicyVersion.parse(checkpoints[-1].name).step >= steps:
        return None
    return _damage_file(checkpoints[-1] / MANIFEST, damage)


def _damage_file(path: Path, damage: Damage) -> Path | None:
    if not path.exists():
        return None
    if damage is Damage.LOST:
        path.unlink()
    else:
        path.write_bytes(b"" if damage is Damage.EMPTY else path.read_bytes()[:-CUT_BYTES])
    return path
