"""Runs on a cluster of a head and three nodes: what they outlive, and what they leave."""

from __future__ import annotations

import json

import pytest

from support.cluster_rig import CONTROL, LIMITED, QUICK, ROOT, WORKERS, Cluster, wait_until
from support.marks import NEEDS_HOSTS

pytestmark = [
    pytest.mark.timeout(900),
    *NEEDS_HOSTS,
]


def test_a_run_outlives_its_user_and_the_head_and_a_worker_node(cluster: Cluster) -> None:
    log = cluster.storage.parent / "client.log"
    recipe = str(ROOT / "scripts" / "recipes" / "simulated.toml")
    options = cluster.options(*QUICK, "training.steps=40")
    client = cluster.start("run", recipe, "--name", "survivor", "--owner", "tester", *options, log=log)
    try:
        wait_until(lambda: b"running" in log.read_bytes() or client.poll() is not None, "the client to report the run")
    except TimeoutError as error:
        error.add_note(log.read_text())
        raise
    assert client.poll() is None, log.read_text()
    run = cluster.run_named("survivor")
    run.wait_for_step(2)
    cluster.hosts[13].kill_program(client)

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


@pytest.mark.slow
def test_owners_do_not_touch_each_other_and_wait_for_their_own_quota(cluster: Cluster) -> None:
    urls = [cluster.serve_sandboxes(number) for number in WORKERS]
    short = (
        *("training.steps=2", "evaluation.tasks=4", "evaluation.samples=1", "buffer.batch_size=16"),
        *("engines.cpus=0.2", "engines.count=1", "cluster.unit_cpus=0.2", "cluster.learner_cpus=0.2"),
        *("sandbox.provider=remote", f"sandbox.remote.urls={json.dumps(urls)}"),
        f"sandbox.remote.key_file={cluster.storage.parent / 'key'}",
    )
    others = cluster.submit("quickstart.toml", *short, name="same", owner="other")
    first = cluster.submit("quickstart.toml", *short, name="same", owner=LIMITED)
    second = cluster.submit("simulated.toml", *QUICK, "training.steps=2", name="next", owner=LIMITED)
    waiting = second.status()
    assert waiting["state"] == "waiting"
    assert first.run_id[:8] in waiting["reason"], "the reason names the run that holds the quota"
    for run in (others, first, second):
        ended = run.wait_for_end()
        assert (ended["state"], ended["steps"]) == ("finished", 2)
        report = run.verified()
        assert report["clean"], report["problems"]
        assert (report["trained_twice"], report["lost"], report["infra"]) == (0, 0, 0)
    assert cluster.left_over() == []


@pytest.mark.slow
def test_a_run_continues_from_its_storage_when_the_control_node_loses_its_disk(cluster: Cluster) -> None:
    run = cluster.submit("simulated.toml", *QUICK, "training.steps=24", name="lost-disk")
    run.wait_for_step(10)
    steps = run.steps()
    cluster.hosts[cluster.control].kill()
    cluster.boot(CONTROL, with_disk=False)
    run.recover()
    ended = run.wait_for_end()
    assert (ended["state"], ended["steps"]) == ("finished", 24)
    restored = json.loads((run.directory.path / "restored.json").read_bytes())
    assert restored["steps_lost"] <= steps - 8 + 1, "at most the steps since the last checkpoint"
    report = run.verified()
    assert report["clean"], report["problems"]
    assert (report["trained_twice"], report["lost"]) == (0, 0)
    assert cluster.left_over() == []


@pytest.mark.slow
def test_a_control_node_that_is_cut_off_ends_its_run_before_another_continues_it(cluster: Cluster) -> None:
    run = cluster.submit("simulated.toml", *QUICK, "training.steps=24", name="cut-off")
    run.wait_for_step(6)
    old, elsewhere = cluster.control, 14
    cut = cluster.hosts[old]
    cut.cut()
    cluster.boot(elsewhere, control=True)
    run.recover()
    # The old incarnation reads the newer one, and ends what it has, though nobody can reach it.
    wait_until(lambda: not cluster.has_actor(old, "Replay"), "the cut-off replay buffer to end")
    assert run.steps() == 0, "the new incarnation waits until the old one has ended"
    ended = run.wait_for_end()
    assert (ended["state"], ended["steps"]) == ("finished", 24)
    report = run.verified()
    assert report["clean"], report["problems"]
    assert (report["trained_twice"], report["lost"]) == (0, 0)
    cut.join()
    assert cluster.left_over() == []
