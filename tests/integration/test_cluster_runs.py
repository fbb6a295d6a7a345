"""Runs on a cluster of a head and three nodes: what they outlive, and what they leave."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from support import hosts
from support.cluster_rig import QUICK, ROOT, WORKERS, running_cluster, wait_until
from support.ray_hosts import redis_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.cluster_rig import Cluster

pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing())]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if (redis := redis_folder()) is None:
        pytest.skip("scripts/install_redis could not install Redis here")
    with running_cluster(tmp_path_factory.mktemp("c") / "shared", redis) as cluster:
        yield cluster


def test_a_run_outlives_its_user_and_the_head_and_a_worker_node(cluster: Cluster) -> None:
    log = cluster.storage.parent / "client.log"
    recipe = str(ROOT / "scripts" / "recipes" / "simulated.toml")
    options = cluster.options(*QUICK, "training.steps=40")
    client = cluster.start("run", recipe, "--name", "survivor", "--owner", "tester", *options, log=log)
    wait_until(lambda: b"running" in log.read_bytes() or client.poll() is not None, "the client to report the run")
    assert client.poll() is None, log.read_text()
    run = cluster.run_named("survivor")
    run.wait_for_step(2)
    client.send_signal(signal.SIGKILL)

    cluster.hosts[10].kill()
    before = run.steps()
    run.wait_for_step(before + 3)
    cluster.boot_head()

    lost = next(number for number in WORKERS if not cluster.has_actor(number, "LearnerLoop"))
    cluster.hosts[lost].kill()
    before = run.steps()
    run.wait_for_step(before + 3)
    cluster.boot(lost)

    ended = run.wait_for_end()
    assert (ended["state"], ended["steps"]) == ("finished", 40)
    report = run.verified()
    assert report["clean"], report["problems"]
    assert (report["trained_twice"], report["lost"], report["steps"]) == (0, 0, 40)
    assert report["max_staleness_seen"] <= report["max_staleness"]
    assert report["checkpoints"] > 0
    assert cluster.left_over() == []
