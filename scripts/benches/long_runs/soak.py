"""The soak test `scripts/soak --kills N`: real runs over Ray with simulated backends, whose processes are killed.

Invariants are checked after each SIGKILL. Every tenth kill is followed by another fault: engines that are unavailable
for minutes, a process that is stopped for minutes, a file that is lost or damaged, or a foreign file that appears.

Invariants:
- A process is killed by its id, and only if it is a descendant of the driver that was started here.
- The same seed chooses the same victims, pauses and faults; their effects depend on timing.
- The checks read files and the system: the ledger during the run, processes that a dead driver leaves behind, and the
  memory of live processes. A run that does not end with all its steps is a problem; one that ends with a transient
  error is resumed, as with `--restarts`.
"""

from __future__ import annotations

import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import orjson
import psutil
import typer

from benches.long_runs.soak_driver import ANSWER_S, Driver, log_of
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.exit_codes import EXIT_TRANSIENT
from headrace.actors.run.launch import RunRequest, prepare
from headrace.actors.simulation.virtual.faults import (
    FOREIGN,
    Damage,
    add_foreign_file,
    damage_checkpoint,
    damage_served,
)
from headrace.buffer.audit.evidence import has_begun
from headrace.buffer.audit.verify import verify

DRIVER: Final = "driver"
DRIVER_SHARE: Final = 0.06
"""Share of kills that hit the driver."""
AT_ONCE_SHARE: Final = 0.4
"""Share of kills that do not wait for the next step."""
WARM_S: Final = 10.0
"""Time after which a process has loaded everything it needs."""
GROWTH_BYTES: Final = 64 << 20
"""Memory growth above which a run that lasts minutes counts as leaking."""
MOST_RESTARTS: Final = 10
"""Maximum number of restarts of one run after transient failures."""
FAULT_EVERY: Final = 10
"""Number of kills between two faults of other kinds."""
OUTAGE_S: Final = (60.0, 150.0)
MAX_STALENESS: Final = 2
RECIPE: Final = Path(__file__).resolve().parents[3] / "scripts" / "recipes" / "simulated.toml"
RULES: Final = ("all", "count(3)", "fraction(0.5) & grace(0.5)", "all | expiring(1)")
QUICK: Final = (
    "agent.simulated.durations.mean_s=0.6",
    "agent.simulated.durations.median_s=0.4",
    "agent.simulated.durations.cap_s=4",
    "learner.simulated.step_s=0.2",
    "learner.simulated.save_s=0.1",
    "engines.simulated.push_s=0.05",
    "sandbox.simulated.boot_failure=0.02",
    "buffer.batch_size=16",
    "buffer.group_size=4",
    f"buffer.max_staleness={MAX_STALENESS}",
    "buffer.max_attempts=50",
    "buffer.batch_tries=1000",
    "dispatcher.slots_per_worker=16",
    "training.save_every=3",
    "evaluation.tasks=2",
    "service.workers=2",
    "service.hang_s=30",
    "service.stall_s=180",
)


class Fault(StrEnum):
    """Fault other than a kill."""

    ENGINES_AWAY = "engines away"
    STANDS_STILL = "stands still"
    """A process is stopped for minutes; its guard may kill it in the meantime."""
    SERVED_SPOILT = "served spoilt"
    CHECKPOINT_SPOILT = "checkpoint spoilt"
    FOREIGN_FILE = "foreign file"


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakPlan:
    """Plan of a soak: `kills` spread over as many runs of `steps` steps as needed, with one of `faults` after every
    `fault_every` kills."""

    folder: Path
    kills: int
    seed: int = 0
    steps: int = 60
    faults: tuple[Fault, ...] = tuple(Fault)
    fault_every: int = FAULT_EVERY


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakReport:
    """Result of a soak; `problems` is empty when all checks passed. `restarts` counts the restarts after transient
    failures. `growth_mib` is, by process name, the largest memory growth of one process after its first seconds;
    `watched_s` is the longest time for which such a process was watched."""

    seed: int
    kills: dict[str, int]
    faults: dict[str, int]
    runs: int
    drivers: int
    restarts: int
    steps: int
    steps_undone: int
    rollouts: int
    max_staleness_seen: int
    max_staleness: int
    growth_mib: dict[str, float]
    watched_s: dict[str, float]
    seconds: float
    problems: tuple[str, ...]


@dataclass(slots=True)
class Memory:
    """Growth of the resident memory of processes since they warmed up, by name."""

    first: dict[psutil.Process, tuple[str, float, int]] = field(default_factory=dict)
    growth_bytes: dict[str, int] = field(default_factory=dict)
    watched_s: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, process: psutil.Process) -> None:
        with suppress(psutil.NoSuchProcess):
            now, bytes_now = time.time(), process.memory_info().rss
            if now - process.create_time() < WARM_S:
                return
            _, since, before = self.first.setdefault(process, (name, now, bytes_now))
            self.growth_bytes[name] = max(self.growth_bytes.get(name, 0), bytes_now - before)
            self.watched_s[name] = max(self.watched_s.get(name, 0.0), now - since)

    def problems(self) -> list[str]:
        return [
            f"{name} grew by {grown >> 20} MiB"
            for name, grown in sorted(self.growth_bytes.items())
            if grown > GROWTH_BYTES
        ]


class Soak:
    """Execution of one plan; `say` is called with a line for each kill and each end of a run."""

    def __init__(self, plan: SoakPlan, say: Callable[[str], object]) -> None:
        self._plan, self._say = plan, say
        self._chance = random.Random(f"soak {plan.seed}")
        self._kills: Counter[str] = Counter()
        # Faults have a random generator of their own, so that their number does not change the victims.
        self._fault_chance = random.Random(f"soak faults {plan.seed}")
        self._faults: Counter[str] = Counter()
        self._due: list[Fault] = []
        self._memory = Memory()
        self._problems: list[str] = []
        self._runs = self._drivers = self._restarts = self._highest_staleness = 0
        self._ended: Counter[str] = Counter()

    def run(self) -> SoakReport:
        """Start runs until all kills are done and the last run has ended, or a problem has been found."""
        began_s = time.monotonic()
        while self._kills.total() < self._plan.kills and not self._problems:
            self._runs += 1
            name, rule = f"soak-{self._runs}", self._chance.choice(RULES)
            sizes = (f"training.steps={self._plan.steps}", f"buffer.rule={rule}", f"service.seed={self._runs}")
            request = RunRequest(recipe=RECIPE, runs_dir=self._plan.folder, name=name, overrides=(*QUICK, *sizes))
            _, directory = prepare(request)
            self._say(f"run {name}, rule {rule}")
            code, restarts = self._life(directory), 0
            while code == EXIT_TRANSIENT and restarts < MOST_RESTARTS:
                restarts += 1
                self._say(f"resuming {name}, which ended with {code}")
                code = self._life(directory)
            self._restarts += restarts
            self._check_end(directory, code)
        return SoakReport(
            seed=self._plan.seed,
            kills=dict(sorted(self._kills.items())),
            faults=dict(sorted(self._faults.items())),
            runs=self._runs,
            drivers=self._drivers,
            restarts=self._restarts,
            steps=self._ended["steps"],
            steps_undone=self._ended["undone"],
            rollouts=self._ended["rollouts"],
            max_staleness_seen=self._highest_staleness,
            max_staleness=MAX_STALENESS,
            growth_mib={name: grown / 2**20 for name, grown in sorted(self._memory.growth_bytes.items())},
            watched_s=dict(sorted(self._memory.watched_s.items())),
            seconds=time.monotonic() - began_s,
            problems=(*self._problems, *self._memory.problems()),
        )

    def _life(self, directory: RunDirectory) -> int | None:
        """Run drivers until one is not killed; return its exit code, or None if it got stuck."""
        driver = self._start(directory)
        try:
            while self._kills.total() < self._plan.kills or self._due:
                if self._problems:
                    break
                if self._chance.random() < AT_ONCE_SHARE:
                    time.sleep(self._chance.random())
                else:
                    step = verify(directory.path).steps if has_begun(directory.path) else 0
                    if not driver.ask(f"reached {step + 1}"):
                        break
                driver = self._strike(driver, directory)
            return driver.end()
        except TimeoutError as error:
            self._problem(f"{directory.path.name}: {error}")
            return None
        finally:
            driver.kill()

    def _start(self, directory: RunDirectory) -> Driver:
        self._drivers += 1
        return Driver(directory)

    def _strike(self, driver: Driver, directory: RunDirectory) -> Driver:
        """Inject the fault that is due, or kill a process; return the driver of the run afterwards."""
        found: dict[str, int] | None = driver.ask("processes")
        if found is None:
            return driver
        for name, process_id in found.items():
            with suppress(psutil.NoSuchProcess):
                self._memory.note(name, psutil.Process(process_id))
        self._memory.note(DRIVER, driver.process())
        if self._due and self._inject(self._due[0], driver, directory, found):
            fault = self._due.pop(0)
            self._faults[fault.value] += 1
            self._check(directory, fault.value)
            return driver
        if self._kills.total() >= self._plan.kills:
            return driver
        victim = DRIVER if self._chance.random() < DRIVER_SHARE else self._chance.choice(sorted(found))
        if victim == DRIVER:
            if left := driver.kill():
                self._problem(f"a dead driver left {[process.pid for process in left]}")
            driver = self._start(directory)
        elif not _signal_ours(driver, found[victim], signal.SIGKILL):
            return driver
        self._kills[victim] += 1
        if self._kills.total() % self._plan.fault_every == 0:
            # In turn, in a random order.
            order = random.Random(f"order {self._plan.seed}").sample(self._plan.faults, len(self._plan.faults))
            self._due.append(order[self._kills.total() // self._plan.fault_every % len(order)])
        self._check(directory, victim)
        return driver

    def _inject(self, fault: Fault, driver: Driver, directory: RunDirectory, found: dict[str, int]) -> bool:
        """Cause the fault; return False when that is not possible yet."""
        chance = self._fault_chance
        match fault:
            case Fault.ENGINES_AWAY:
                if not driver.ask("engines down"):
                    return False
                time.sleep(chance.uniform(*OUTAGE_S))
                return bool(driver.ask("engines up"))
            case Fault.STANDS_STILL:
                process_id = found[chance.choice(sorted(found))]
                if not _signal_ours(driver, process_id, signal.SIGSTOP):
                    return False
                time.sleep(chance.uniform(*OUTAGE_S))
                _signal_ours(driver, process_id, signal.SIGCONT)
                return True
            case Fault.SERVED_SPOILT:
                return self._spoil(driver, directory, found, damage_served, "engines", "learner") is not None
            case Fault.CHECKPOINT_SPOILT:
                spoil = partial(damage_checkpoint, steps=self._plan.steps)
                manifest = self._spoil(driver, directory, found, spoil, "learner")
                deadline_s = time.monotonic() + ANSWER_S
                # The damage remains visible until the next learner has set the checkpoint aside.
                while manifest is not None and manifest.parent.exists():
                    if time.monotonic() > deadline_s:
                        raise TimeoutError(f"{manifest.parent} was not set aside within {ANSWER_S:g} s")
                    time.sleep(0.05)
                return manifest is not None
            case Fault.FOREIGN_FILE:
                add_foreign_file(directory.path, chance.choice(FOREIGN))
                return True

    def _spoil(
        self,
        driver: Driver,
        directory: RunDirectory,
        found: dict[str, int],
        spoil: Callable[[Path, Damage], Path | None],
        *readers: str,
    ) -> Path | None:
        """Damage a file. The processes that write it are stopped meanwhile, so that they write no newer one, and then
        killed."""
        damage, spoilt = self._fault_chance.choice(tuple(Damage)), None
        if all(name in found and _signal_ours(driver, found[name], signal.SIGSTOP) for name in readers):
            spoilt = spoil(directory.path, damage)
        for name in readers:
            if name in found:
                _signal_ours(driver, found[name], signal.SIGCONT if spoilt is None else signal.SIGKILL)
        return spoilt

    def _check(self, directory: RunDirectory, victim: str) -> None:
        """Verify the ledger while the run is in progress."""
        line = f"{self._kills.total():4} of {self._plan.kills}  {directory.path.name}  {victim:14}"
        if not has_begun(directory.path):
            self._say(f"{line} before anything was recorded")
            return
        report = verify(directory.path)
        self._highest_staleness = max(self._highest_staleness, report.max_staleness_seen)
        for problem in report.problems:
            self._problem(f"{directory.path.name} after {victim}: {problem}")
        if report.max_staleness_seen > MAX_STALENESS:
            self._problem(f"{directory.path.name} after {victim}: staleness {report.max_staleness_seen}")
        clean = "clean" if report.clean else "NOT CLEAN"
        self._say(f"{line} step {report.steps:3}, undone {report.steps_rolled_back:3}, {clean}")

    def _check_end(self, directory: RunDirectory, code: int | None) -> None:
        """Check that the run ended on its own, with all its steps."""
        name = directory.path.name
        if code != 0:
            self._problem(f"{name} ended with {code}: {log_of(directory).read_text(errors='replace').strip()[-2000:]}")
            return
        report = verify(directory.path)
        whole = (report.steps, report.trained_twice, report.lost, report.poison, report.problems)
        if whole != (self._plan.steps, 0, 0, 0, ()):
            self._problem(f"{name}: steps, trained twice, lost, poison, problems: {whole}")
        self._highest_staleness = max(self._highest_staleness, report.max_staleness_seen)
        self._ended.update(steps=report.steps, undone=report.steps_rolled_back, rollouts=report.issued)
        self._say(f"run {name} ended: {report.steps} steps, {report.steps_rolled_back} undone and repeated")

    def _problem(self, problem: str) -> None:
        self._problems.append(problem)
        self._say(f"PROBLEM: {problem}")


def _signal_ours(driver: Driver, process_id: int, number: signal.Signals) -> bool:
    """Send a signal; return False when the process is not, or no longer, a descendant of this driver."""
    for process in driver.descendants():
        if process.pid == process_id:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
                return True
    return False


def main(
    kills: Annotated[int, typer.Option(min=1, help="Number of processes to kill, one after the other.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for victims, pauses and rules.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 60,
    days: Annotated[
        int,
        typer.Option(
            min=0, help="Resume a generated run of this many days and restart each actor, instead of killing processes."
        ),
    ] = 0,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Soak a run on a cluster of namespace hosts (needs root).")
    ] = False,
    minutes: Annotated[float, typer.Option(min=0, help="With --cluster: least length of the soak.")] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
) -> None:
    """Kill actors, learner and driver of simulated runs over Ray, make engines unavailable, stop processes and damage
    files, and check the ledger after each fault. With --cluster: kill hosts, the cluster's own processes, Redis,
    clients and actors, and cut links."""
    if cluster:
        from benches.cluster.faults import FaultKind
        from benches.cluster.soak import ClusterSoakPlan, soak_cluster

        with tempfile.TemporaryDirectory(prefix="headrace-soak-") as folder:
            soaked = ClusterSoakPlan(kills=kills, seed=seed, minutes=minutes, kinds=tuple(FaultKind))
            soak_cluster(soaked, Path(folder), json, typer.echo)
        return
    if days:
        from benches.long_runs.months_bench import main as soak_months

        soak_months(days, json)
        return
    with tempfile.TemporaryDirectory(prefix="headrace-soak-") as folder:
        plan = SoakPlan(folder=Path(folder), kills=kills, seed=seed, steps=steps)
        report = Soak(plan, typer.echo).run()
    document = orjson.dumps(asdict(report), option=orjson.OPT_INDENT_2)
    if json is not None:
        json.write_bytes(document + b"\n")
    typer.echo(document)
    raise typer.Exit(1 if report.problems else 0)


if __name__ == "__main__":
    typer.run(main)
