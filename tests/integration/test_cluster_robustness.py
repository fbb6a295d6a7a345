"""What one machine promises holds on a cluster too: clients that die, rotated files, evaluations that are looked up,
parts that stay away, and a ledger that is older than its checkpoints."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
import subprocess
import time
from contextlib import closing, suppress
from typing import Any, Final

import pytest

from headrace.actors.record.files.metrics import read_metrics
from support.cluster_rig import CONTROL, QUICK, ROOT, WORKERS, Cluster, ClusterRun, wait_until
from support.marks import NEEDS_HOSTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    *NEEDS_HOSTS,
]
CLUSTER_CPUS = 6

CLIENTS: Final = 5
SEED: Final = 18
STEPS: Final = "SELECT count(*) FROM commits"
LATEST_KILL_S: Final = 15.0
"""A client has submitted its run after about five seconds, and follows it from then on."""


def rows(run: ClusterRun, query: str) -> list[Any]:
    """Return rows of the run's ledger and its archive."""
    found: list[Any] = []
    for path in (run.directory.path / name for name in ("ledger.db", "archive.db")):
        if path.exists():
            with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as ledger:
                found += ledger.execute(query).fetchall()
    return found


def test_clients_killed_at_five_instants_leave_runs_that_end_with_all_steps(cluster: Cluster) -> None:
    chance = random.Random(SEED)
    recipe = str(ROOT / "scripts" / "recipes" / "simulated.toml")
    words = ("--owner", "tester", *cluster.options(*QUICK, "training.steps=4"))
    for number in range(CLIENTS):
        name, log = f"client-{number}", cluster.storage.parent / f"client-{number}.log"
        client = cluster.start("run", recipe, "--name", name, *words, log=log)
        # The instant is what the seed varies: before, during and after the submission.
        time.sleep(chance.uniform(0.5, LATEST_KILL_S))
        cluster.hosts[13].kill_program(client)
        found_or_submitted(cluster, name).check_finished(4)
    assert cluster.left_over() == []


def found_or_submitted(cluster: Cluster, name: str) -> ClusterRun:
    """Return the run of a client that was killed, or submit it if there is none yet. The submission of the client may
    arrive after its death, so that the name is taken a moment later."""
    for _ in range(3):
        with suppress(ValueError, subprocess.CalledProcessError):
            return cluster.run_named(name)
        with suppress(subprocess.CalledProcessError):
            return cluster.submit("simulated.toml", *QUICK, "training.steps=4", name=name)
    raise AssertionError(f"{name} is neither there nor can it be submitted")


def test_files_are_rotated_on_the_control_node(cluster: Cluster) -> None:
    run = cluster.submit("simulated.toml", *QUICK, "training.steps=24", "telemetry.keep_bytes=65536", name="rotated")
    run.check_finished(24)
    assert list(run.directory.path.glob("metrics-*.jsonl"))
    assert run.directory.metrics.stat().st_size < 2 * 4096
    assert {step["step"] for step in read_metrics(run.directory.metrics, ("step",))} == set(range(1, 25))


def test_answers_of_an_evaluation_are_looked_up_after_the_loss_of_the_control_node(cluster: Cluster) -> None:
    evaluation = ("evaluation.tasks=16", "evaluation.samples=4", "dispatcher.evaluation_slots=8")
    run = cluster.submit("simulated.toml", *QUICK, "training.steps=2", *evaluation, name="evaluated")
    recorded = "SELECT rollout_id FROM evaluations WHERE tag = 'base' AND reward IS NOT NULL"
    wait_until(
        lambda: (run.directory.path / "ledger.db").exists() and len(rows(run, recorded)) >= 16, "a third of the answers"
    )
    cluster.hosts[CONTROL].kill()
    before = {rollout for (rollout,) in rows(run, recorded)}
    assert len(before) < 64, "the evaluation was over already"
    cluster.boot(CONTROL)
    run.check_finished(2)
    answers = [rollout for (rollout,) in rows(run, recorded)]
    assert len(set(answers)) == 64
    assert [rollout for rollout in answers if rollout in before] == sorted(before, key=answers.index), "asked once"


def test_an_engine_host_and_a_sandbox_host_are_lost(cluster: Cluster) -> None:
    engine_hosts, sandbox_hosts = (14, 15), (16, 17)
    for number in engine_hosts:
        cluster.boot_with_role(number, "engine")
    for number in sandbox_hosts:
        cluster.boot_without_ray(number)
    urls = json.dumps([cluster.serve_sandboxes(number) for number in sandbox_hosts])
    short = (
        *("training.steps=8", "evaluation.tasks=8", "evaluation.samples=1", "buffer.batch_size=32"),
        *("engines.cpus=1", "engines.count=2", "cluster.roles.engine=engine"),
        *("sandbox.provider=remote", f"sandbox.remote.urls={urls}"),
        f"sandbox.remote.key_file={cluster.storage.parent / 'key'}",
    )
    run = cluster.submit("quickstart.toml", *short, name="lost-hosts")
    run.wait_for_step(2)
    lost = next(number for number in engine_hosts if cluster.has_program(number, "headrace.policies.cpu_engine"))
    cluster.hosts[lost].kill()
    run.wait_for_step(4)
    cluster.hosts[sandbox_hosts[0]].kill()
    run.check_finished(8)
    assert cluster.left_over() == []


def test_parts_that_stay_away_are_named_and_end_the_try_after_absent_s(cluster: Cluster) -> None:
    run = cluster.submit("simulated.toml", *QUICK, "training.steps=12", "cluster.absent_s=20", name="absent")
    run.wait_for_step(3)
    for number in WORKERS:
        cluster.hosts[number].kill()
    wait_until(lambda: {"learner", "worker-0"} <= absent(cluster, run), "the absent parts to be named")
    wait_until(lambda: "cluster.absent_s" in status(cluster, run)["reason"], "the try to end")
    for number in WORKERS:
        cluster.boot(number)
    run.check_finished(12)


def status(cluster: Cluster, run: ClusterRun) -> dict[str, Any]:
    """Return the status as the control node tells it: the other nodes may be away."""
    return run.status(host=CONTROL)


def absent(cluster: Cluster, run: ClusterRun) -> set[str]:
    return {one["name"] for one in status(cluster, run)["absent"]}


def test_a_ledger_older_than_its_checkpoints_is_refused(cluster: Cluster) -> None:
    run = cluster.submit("simulated.toml", *QUICK, "training.steps=400", name="older-ledger")
    run.wait_for_step(5)
    words = (run.run_id, "--address", cluster.ray.address, "--owner", run.owner)
    cluster.headrace("stop", *words)
    assert run.wait_for_end()["state"] == "drained"
    state = run.directory.path
    older = state.with_name("older")
    shutil.copytree(state, older, symlinks=True)
    cluster.headrace("resume", *words)
    run.wait_for_step(run.steps() + 6)
    cluster.headrace("stop", *words)
    assert run.wait_for_end()["state"] == "drained"
    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm", "archive.db"):
        (state / name).unlink(missing_ok=True)
        if (older / name).exists():
            shutil.copy(older / name, state)
    shutil.rmtree(state / "trajectories")
    shutil.copytree(older / "trajectories", state / "trajectories")
    shutil.rmtree(older)
    steps = rows(run, STEPS)
    cluster.headrace("resume", *words)
    ended = run.wait_for_end()
    assert (ended["state"], ended["exit_code"]) == ("failed", 2), ended
    assert "is newer than this ledger" in ended["reason"]
    assert rows(run, STEPS) == steps, "nothing was trained"
