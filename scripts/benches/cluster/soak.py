"""The soak of a cluster, `scripts/soak --cluster --kills N`: one simulated run on a head and three nodes, into which
faults are injected one after another.

Invariants:
- After each fault the run must make steps again, and its ledger must be clean. A run that does not go on ends the soak.
- At the end the run is drained, and nothing of it may be left on any host.
- Recovery times are from the ledger. Wall times depend on the load of the machine, which the report names.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import orjson
import typer

from benches.cluster.faults import WITHOUT_SERVE, Fault, FaultKind, plan_faults
from benches.cluster.injection import Injector
from benches.cluster.ledger_times import Recovery, read_orders, read_steps, recovery
from benches.cluster.processes import OF_THE_CLUSTER, HostProcess, actors, grown, increase, processes_of, resident_mib
from headrace.buffer.audit.verify import verify
from support.cluster_rig import POLL_S, QUICK, WORKERS, Cluster, ClusterRun, running_cluster, wait_until
from support.control_rig import write_keys
from support.ray_hosts import HEAD, redis_folder

CPUS: Final = 6
"""CPUs of each node as Ray counts them: one node can hold everything of the run while another one is away."""
ENDLESS: Final = "training.steps=1000000"
RECIPE: Final = "simulated.toml"
OWNER: Final = "soak"
FIRST_STEP: Final = 2
GROWTH_FROM_S: Final = 600.0
"""Age of the soak at which memory is measured first."""
GROWTH_MINUTES: Final = 12.0
"""Length of a soak from which on growth is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSoakPlan:
    """Plan of a soak: `kills` faults of these kinds, spread over `minutes` if that is longer than they take."""

    kills: int
    seed: int = 0
    minutes: float = 0.0
    kinds: tuple[FaultKind, ...] = WITHOUT_SERVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """One fault, what it hit, how the run recovered, and the 1-minute load average of the machine at its end."""

    kind: FaultKind
    target: str
    recovery: Recovery
    took_s: float
    steps: int
    clean: bool
    load: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSoakReport:
    """Result of a soak; `problems` is empty when all checks passed. `worst` has the longest recovery by kind of
    fault."""

    seed: int
    faults: tuple[Injected, ...]
    worst: dict[str, dict[str, float | None]]
    steps: int
    steps_undone: int
    rollouts: int
    max_staleness_seen: int
    max_staleness: int | None
    trained_twice: int
    lost: int
    growth_mib: dict[str, float]
    left_over: tuple[str, ...]
    seconds: float
    problems: tuple[str, ...]


class ClusterSoak:
    """Execution of one plan on a running cluster; `say` is given a line for each fault."""

    def __init__(self, cluster: Cluster, plan: ClusterSoakPlan, say: Callable[[str], object]) -> None:
        self._cluster, self._plan, self._say = cluster, plan, say
        self._began_s = time.monotonic()
        self._injected: list[Injected] = []
        self._problems: list[str] = []
        self._first_mib: dict[HostProcess, float] = {}

    def run(self) -> ClusterSoakReport:
        """Submit a run, inject the faults, drain the run, and check what is left."""
        run = self._cluster.submit(
            RECIPE, *QUICK, ENDLESS, name=f"soak-{self._plan.seed}-{time.time_ns()}", owner=OWNER
        )
        run.wait_for_step(FIRST_STEP)
        if FaultKind.REPLICA in self._plan.kinds:
            deploy_api(self._cluster)
        self._say(f"run {run.run_id} has begun")
        injector = Injector(self._cluster, run, self._say)
        faults = plan_faults(self._plan.kinds, self._plan.kills, self._plan.seed)
        for number, fault in enumerate(faults):
            self._wait_until_s(60 * self._plan.minutes * number / len(faults))
            self._strike(run, injector, fault)
            if self._problems:
                break
        self._wait_until_s(60 * self._plan.minutes)
        growth = self._growth()
        # A head may end long after Redis stopped.
        injector.mend()
        return self._end(run, growth)

    def _strike(self, run: ClusterRun, injector: Injector, fault: Fault) -> None:
        """Inject one fault, wait until the run has gone on and the cluster is whole, and verify the ledger."""
        began_s, began, target = time.time(), time.monotonic(), ""
        try:
            target = injector.inject(fault)
            self._say(f"{len(self._injected) + 1:3} of {self._plan.kills}  {fault.kind}: {target}")
            time.sleep(max(0.0, began + fault.lasts_s - time.monotonic()))
            injector.undo()
            undone_s = time.time()
            wait_until(
                lambda: _has_gone_on(run, injector, began_s=began_s, since_s=undone_s),
                f"a step and an answered order after {fault.kind}: {target}",
            )
        except (TimeoutError, RuntimeError) as error:
            self._problem(f"{fault.kind}: {error}")
        recovered = recovery(read_orders(run.directory.path, after_s=began_s), read_steps(run.directory.path), began_s)
        report = verify(run.directory.path)
        for problem in report.problems:
            self._problem(f"after {fault.kind}, {target}: {problem}")
        injected = Injected(
            kind=fault.kind,
            target=target,
            recovery=recovered,
            took_s=time.monotonic() - began,
            steps=report.steps,
            clean=report.clean,
            load=os.getloadavg()[0],
        )
        self._injected.append(injected)
        self._say(f"    step {injected.steps}, {'clean' if injected.clean else 'NOT CLEAN'}, {_rounded(recovered)}")

    def _end(self, run: ClusterRun, growth: dict[HostProcess, float]) -> ClusterSoakReport:
        self._problems += grown(growth)
        left: tuple[str, ...] = ()
        try:
            self._cluster.headrace("stop", run.run_id, "--address", self._cluster.ray.address, "--owner", OWNER)
            ended = run.wait_for_end()
            if ended["state"] != "drained":
                self._problem(f"the run ended as {ended['state']}: {ended['reason']}")
            left = self._left(run)
            self._problems += [f"left over: {name}" for name in left]
        except Exception as error:  # noqa: BLE001 - a soak reports what it found, whatever its end is
            self._problem(f"the run did not end: {error}")
        report = verify(run.directory.path)
        self._problems += report.problems
        if (report.trained_twice, report.lost) != (0, 0):
            self._problem(f"trained twice {report.trained_twice}, lost {report.lost}")
        return ClusterSoakReport(
            seed=self._plan.seed,
            faults=tuple(self._injected),
            worst=worst_by_kind(self._injected),
            steps=report.steps,
            steps_undone=report.steps_rolled_back,
            rollouts=report.issued,
            max_staleness_seen=report.max_staleness_seen,
            max_staleness=report.max_staleness,
            trained_twice=report.trained_twice,
            lost=report.lost,
            growth_mib={f"{one.host} {one.name} {one.process_id}": mib for one, mib in growth.items()},
            left_over=left,
            seconds=time.monotonic() - self._began_s,
            problems=tuple(self._problems),
        )

    def _left(self, run: ClusterRun) -> tuple[str, ...]:
        """Return what is left of the run, a while after its end."""

        def processes() -> list[str]:
            found = actors(processes_of(self._cluster.hosts))
            return [f"{one.name} {one.process_id} on {one.host}" for one in found if one.name not in OF_THE_CLUSTER]

        with suppress(TimeoutError):
            wait_until(lambda: not processes(), "the processes of the run to end")
        of_run = [name for name in self._cluster.left_over() if run.run_id in name]
        return (*of_run, *processes())

    def _wait_until_s(self, age_s: float) -> None:
        """Wait until the soak is this old, and measure memory on the way."""
        while (age_now_s := time.monotonic() - self._began_s) < age_s:
            self._measure(age_now_s)
            time.sleep(POLL_S)
        self._measure(time.monotonic() - self._began_s)

    def _measure(self, age_s: float) -> None:
        if age_s >= GROWTH_FROM_S and not self._first_mib:
            self._first_mib = resident_mib(processes_of(self._cluster.hosts))

    def _growth(self) -> dict[HostProcess, float]:
        if self._plan.minutes < GROWTH_MINUTES:
            return {}
        return increase(self._first_mib, resident_mib(processes_of(self._cluster.hosts)))

    def _problem(self, problem: str) -> None:
        self._problems.append(problem)
        self._say(f"PROBLEM: {problem}")


def _has_gone_on(run: ClusterRun, injector: Injector, *, began_s: float, since_s: float) -> bool:
    """Mend the cluster; return whether it is whole, there is a step since one time, and an answered order since the
    beginning of the fault."""
    injector.mend()
    run_dir = run.directory.path
    return injector.is_whole and read_steps(run_dir)[-1] > since_s and bool(read_orders(run_dir, after_s=began_s))


def worst_by_kind(injected: list[Injected]) -> dict[str, dict[str, float | None]]:
    """Return the longest recovery by kind of fault; None if the run once did not go on."""
    worst: dict[str, dict[str, float | None]] = {}
    for one in injected:
        known = worst.setdefault(one.kind.value, {})
        for name, value in asdict(one.recovery).items():
            before = known.get(name, 0.0)
            known[name] = None if before is None or value is None else max(before, value)
    return worst


def deploy_api(cluster: Cluster) -> None:
    """Deploy the control API on the cluster, with its proxy on the head."""
    keys = write_keys(cluster.storage.parent / "control-keys")
    host = cluster.hosts[WORKERS[0]]
    cluster.ray.run(host, "-m", "benches.cluster.serve_control", cluster.hosts[HEAD].address, str(keys))


def soak_cluster(plan: ClusterSoakPlan, folder: Path, json: Path | None, say: Callable[[str], object]) -> None:
    """Start a cluster whose files are in a folder, soak it, and write the report. Raises typer.Exit with code 1 if
    there are problems."""
    if (redis := redis_folder()) is None:
        raise typer.BadParameter("scripts/install redis could not install Redis here", param_hint="--cluster")
    with running_cluster(folder / "shared", redis, cpus=CPUS) as cluster:
        report = ClusterSoak(cluster, plan, say).run()
    document = orjson.dumps(asdict(report), option=orjson.OPT_INDENT_2)
    if json is not None:
        json.write_bytes(document + b"\n")
    say(document.decode())
    if report.problems:
        raise typer.Exit(1)


def _rounded(recovered: Recovery) -> str:
    times = asdict(recovered).items()
    return ", ".join(f"{name} {'-' if value is None else f'{value:.1f}'}" for name, value in times)
