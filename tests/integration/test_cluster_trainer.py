"""The trainer of docs/external_trainer.md trains the quickstart on a cluster, over the control API on Ray Serve. It is
killed once, and its learner's node is lost once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import orjson
import pytest
from benches.cluster.figures import LEAST_SUCCESS
from benches.cluster.soak import deploy_api

from headrace.actors.training.external_loop import TRAINER
from support.cluster_rig import API_PORT, WORKERS, Cluster, ClusterRun, wait_until
from support.external_trainer import trainer_of_the_docs
from support.marks import NEEDS_HOSTS
from support.ray_hosts import HEAD

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    *NEEDS_HOSTS,
]
CLUSTER_CPUS = 6

STEPS: Final = 40
END_S: Final = 1800.0


@contextmanager
def trainer(cluster: Cluster, run: ClusterRun, number: int, log: Path) -> Iterator[None]:
    """Run the trainer on a host; what it says is in the log. Its last exit code must be 0 unless it is killed."""
    shared = cluster.storage.parent
    (shared / "trainer.py").write_text(trainer_of_the_docs(), encoding="utf-8")
    (shared / "trainer-key").write_text("alice\n", encoding="utf-8")
    url = f"http://{cluster.hosts[HEAD].address}:{API_PORT}"
    words = (str(shared / "trainer.py"), url, str(shared / "trainer-key"), run.run_id)
    process = cluster.hosts[number].start(sys.executable, *words, log=log, OMP_NUM_THREADS="1")
    try:
        yield
    finally:
        if process.poll() is None:
            cluster.hosts[number].kill_program(process)


def test_the_trainer_of_the_docs_trains_the_quickstart(cluster: Cluster) -> None:
    deploy_api(cluster)
    urls = orjson.dumps([cluster.serve_sandboxes(number) for number in WORKERS]).decode()
    key = cluster.storage.parent / "key"
    given = ("sandbox.provider=remote", f"sandbox.remote.key_file={key}", f"sandbox.remote.urls={urls}")
    more = ('learner.kind="external"', f"training.steps={STEPS}", "training.save_every=5")
    run = cluster.submit("quickstart.toml", *given, *more, name="own-trainer", owner="alice")
    log = cluster.storage.parent / "trainer.log"
    with trainer(cluster, run, WORKERS[1], log):
        run.wait_for_step(7)
    wait_until(lambda: any(one["name"] == TRAINER for one in run.status()["absent"]), "the status to name the trainer")
    with trainer(cluster, run, WORKERS[1], log):
        ended = run.wait_for_end(timeout_s=END_S)
    assert (ended["state"], ended["steps"]) == ("finished", STEPS), (ended, log.read_text())
    report = run.verified()
    assert report["clean"], report["problems"]
    assert (report["trained_twice"], report["lost"], report["steps"]) == (0, 0, STEPS)
    assert report["max_staleness_seen"] <= report["max_staleness"]
    summary = orjson.loads(run.directory.summary.read_bytes())
    print({name: summary[name] for name in ("base_success", "final_success", "train_wall_s")})
    assert summary["final_success"] >= LEAST_SUCCESS, summary
