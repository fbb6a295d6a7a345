"""Changes of a cluster while runs go on: an upgrade, the drain of a node, and a Redis that hangs."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headrace.actors.record.files.metrics import read_metrics
from support.cluster_rig import CONTROL, QUICK, STATE, WORKERS, Cluster, ClusterRun, wait_until
from support.marks import NEEDS_HOSTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    *NEEDS_HOSTS,
]

INFRA = """
import sqlite3, sys
rows = sqlite3.connect(f"file:{sys.argv[1]}/ledger.db?mode=ro", uri=True)
print(rows.execute("SELECT count(*) FROM attempts WHERE cause = 'infra'").fetchone()[0])
"""


def command(cluster: Cluster, *words: str, host: int = 13) -> Any:
    """Return the JSON that a command prints."""
    output = cluster.headrace(*words, "--address", cluster.ray.address, "--json", "-", host=host)
    return json.loads(output[min(output.index(bracket) for bracket in "[{" if bracket in output) :])


def events(run: ClusterRun) -> list[str]:
    """Return the texts of a run's events, read from the table on the control node."""
    query = "SELECT text FROM events WHERE run_id = ? ORDER BY number"
    rows = f"sqlite3.connect({str(STATE / 'runs.db')!r}).execute({query!r}, ({run.run_id!r},))"
    program = f"import sqlite3; print(*(row[0] for row in {rows}), sep=chr(10))"
    return run.cluster.ray.run(run.cluster.hosts[CONTROL], "-c", program).splitlines()


def infra(run: ClusterRun) -> int:
    """Return the number of attempts that ended as infrastructure failures."""
    state = str(STATE / run.run_id)
    return int(run.cluster.ray.run(run.cluster.hosts[CONTROL], "-c", INFRA, state).split()[-1])


def undone_and_gap(run: ClusterRun) -> tuple[int, float]:
    """Return how many steps were trained again, and the longest time between two steps."""
    steps = list(read_metrics(run.directory.metrics, ("step",)))
    times = [step["time_s"] for step in steps]
    gap_s = max(after - before for before, after in itertools.pairwise(times))
    return len(steps) - len({step["step"] for step in steps}), gap_s


def test_an_upgrade_under_load_undoes_no_step(cluster: Cluster) -> None:
    run = cluster.submit("simulated.toml", *QUICK, "training.steps=14", name="upgraded")
    run.wait_for_step(4)
    record = command(cluster, "stop", run.run_id, "--restart", "--owner", run.owner)
    assert record["desired"] == "upgraded"
    wait_until(lambda: any(text.startswith("starts under headrace") for text in events(run)), "the upgrade")
    upgraded_at = run.steps()
    run.wait_for_step(upgraded_at + 2)
    run.check_finished(14)
    undone, gap_s = undone_and_gap(run)
    versions = {step["version"].split(".")[0] for step in read_metrics(run.directory.metrics, ("step",))}
    print(f"upgrade: gap {gap_s:.1f} s, {undone} steps undone, {infra(run)} infra outcomes, epochs {versions}")
    assert (undone, infra(run)) == (0, 0)
    assert len(versions) > 1, "a new epoch"
    assert cluster.left_over() == []


def test_a_node_drained_under_load_costs_no_step_and_no_rollout(cluster: Cluster) -> None:
    run = cluster.submit("simulated.toml", *QUICK, "training.steps=30", name="drained-node")
    run.wait_for_step(3)
    with_learner = next(number for number in WORKERS if cluster.has_actor(number, "LearnerLoop"))
    [node] = [
        one for one in command(cluster, "status", "--nodes") if one["address"] == cluster.hosts[with_learner].address
    ]
    assert node["runs"] == [run.run_id]
    assert node["free_disk_bytes"] > 0
    left = command(cluster, "node", "drain", node["address"], "--deadline-s", "60", host=CONTROL)
    [found] = left["runs"].values()
    assert (found["learner"], found["cancelled"], found["workers"] > 0) == (True, 0, True), left
    before = run.steps()
    cluster.hosts[with_learner].kill()
    # Commands run on the other node.
    cluster.hosts[13] = cluster.hosts[next(number for number in WORKERS if number != with_learner)]
    wait_until(lambda: bool(run.status()["absent"]), "the parts of the run that are absent")
    print(f"node drain: absent {run.status()['absent']}")
    cluster.boot(with_learner)
    run.wait_for_step(before + 2)
    run.check_finished(30)
    undone, gap_s = undone_and_gap(run)
    print(f"node drain: {found}, gap {gap_s:.1f} s, {undone} steps undone, {infra(run)} infra outcomes")
    assert (undone, infra(run)) == (0, 0)


@contextmanager
def stopped_redis(cluster: Cluster) -> Iterator[None]:
    cluster.ray.signal_redis(signal.SIGSTOP)
    try:
        yield
    finally:
        cluster.ray.signal_redis(signal.SIGCONT)


def test_a_redis_that_hangs_is_named(cluster: Cluster) -> None:
    run = cluster.submit("simulated.toml", *QUICK, "training.steps=60", name="hung-redis")
    run.wait_for_step(2)
    with stopped_redis(cluster):
        wait_until(lambda: any("does not answer (head or Redis hang)" in text for text in events(run)), "its name")
        before = run.steps()
        run.wait_for_step(before + 2)
    wait_until(lambda: any("answers again, after" in text for text in events(run)), "its return")
    print([text for text in events(run) if "the head" in text])
    assert run.status()["head"] == ""
    cluster.headrace("stop", run.run_id, "--now", "--address", cluster.ray.address, "--owner", run.owner)
    assert run.wait_for_end()["state"] == "stopped"
    assert cluster.left_over() == []
