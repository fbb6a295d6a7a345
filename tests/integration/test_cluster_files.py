"""Logs, spans and running rollouts of other nodes, as the control node of a cluster shows them, also after a loss."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.actors.telemetry.spans.store import SpanFolder
from support.cluster_rig import QUICK, STATE, WORKERS, Cluster, ClusterRun, wait_until
from support.marks import NEEDS_HOSTS

pytestmark = [
    pytest.mark.timeout(900),
    *NEEDS_HOSTS,
]


def node_of(cluster: Cluster, number: int) -> str:
    """Return the Ray id of a host's living node."""
    output = cluster.headrace("status", "--nodes", "--address", cluster.ray.address, "--json", "-")
    nodes, _ = json.JSONDecoder().raw_decode(output[output.index("[") :])
    [node] = [str(each["node"]) for each in nodes if each["address"] == cluster.hosts[number].address]
    return node


def running(cluster: Cluster, run: ClusterRun) -> list[dict[str, Any]]:
    words = ("status", str(STATE / run.run_id), "--running", "--json", "-")
    output = cluster.headrace(*words, host=cluster.control)
    rows: list[dict[str, Any]]
    rows, _ = json.JSONDecoder().raw_decode(output[output.index("[") :])
    return rows


def logged(cluster: Cluster, run: ClusterRun) -> list[dict[str, Any]]:
    output = cluster.headrace("logs", str(STATE / run.run_id), "--json", "-", host=cluster.control)
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def spans(run: ClusterRun, node: str) -> list[dict[str, Any]]:
    """Return the spans in the copies from a node."""
    return list(SpanFolder(run.directory.path / "nodes" / node[:12] / "spans").spans())


@pytest.mark.slow
def test_files_of_other_nodes_are_seen_on_the_control_node_also_after_the_loss_of_one(cluster: Cluster) -> None:
    run = cluster.submit("simulated.toml", *QUICK, "training.steps=24", name="seen")
    run.wait_for_step(1)
    lost = next(number for number in WORKERS if not cluster.has_actor(number, "LearnerLoop"))
    kept = next(number for number in WORKERS if number != lost)
    nodes = {number: node_of(cluster, number) for number in WORKERS}
    wait_until(
        lambda: {row["node"] for row in running(cluster, run)} >= set(nodes.values()), "rollouts of both nodes to run"
    )
    wait_until(lambda: all(spans(run, node) for node in nodes.values()), "spans of both nodes")
    starts = [(event["node"], event["actor"]) for event in logged(cluster, run) if "starts" in event["message"]]
    assert {node for node, _ in starts} >= set(nodes.values())
    assert len(starts) == len(set(starts))

    before = {span["span_id"] for span in spans(run, nodes[lost])}
    cluster.hosts[lost].kill()

    def interrupted() -> bool:
        return all(row["interrupted"] for row in running(cluster, run) if row["node"] == nodes[lost])

    wait_until(interrupted, "the rollouts of the lost node to count as interrupted")
    events = logged(cluster, run)
    assert any(event["node"] == nodes[lost] and event["actor"].startswith("worker") for event in events)
    found = spans(run, nodes[lost])
    assert {span["span_id"] for span in found} >= before
    assert {span["name"].partition(" ")[0] for span in found} >= {"rollout", "invoke_agent"}
    cluster.boot(lost)

    ended = run.wait_for_end()
    assert (ended["state"], ended["steps"]) == ("finished", 24)
    # What actors said last, after the run had ended, is here too, and nothing twice.
    events = logged(cluster, run)
    closed = [event["actor"] for event in events if event["node"] == nodes[kept] and "is closed" in event["message"]]
    assert any(actor.startswith("worker") for actor in closed)
    seen = [(event["node"], event["pid"], event["time"], event["message"]) for event in events]
    assert len(seen) == len(set(seen))
    ids = [span["span_id"] for node in nodes.values() for span in spans(run, node)]
    assert len(ids) == len(set(ids))
    received = json.loads((run.directory.path / "nodes" / nodes[kept][:12] / "received.json").read_bytes())
    assert received["losses"] == {"bytes": 0, "files": 0}
