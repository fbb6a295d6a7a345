"""Checks of a cluster before a run is created there: each refusal is one line that names the node and the fix."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.cluster.nodes.checks import (
    Node,
    NodeFacts,
    Versions,
    refuse_absent_roles,
    refuse_open_redis,
    refuse_too_few_nodes,
    refuse_too_large,
    refuse_unfit,
)
from headrace.actors.cluster.nodes.connection import require_token
from headrace.actors.cluster.nodes.probe import clock_offset_s, open_redis_function
from headrace.actors.derivation.rules import derive
from headrace.actors.errors import CannotBePlaced, ConfigError
from headrace.actors.run.config import RunConfig
from headrace.actors.run.placement import ClusterSection, cluster_section
from headrace.actors.runtime.actors.nodes import Bundle, NodeRole
from headrace.actors.runtime.actors.operations import CLUSTER_ABSENT_S, DEFAULT_ABSENT_S

VERSIONS = Versions(ray="2.60.0", headrace="0.1.0", python="3.11.7")
LABELS = {NodeRole.CONTROL: "control", NodeRole.ROLLOUT: "work"}


def node(address: str, role: str, **resources: Any) -> Node:
    return Node(
        node=f"id-{address}", address=address, role=role, **{"cpus": 2, "gpus": 0, "memory_bytes": 8, **resources}
    )


def facts(address: str = "10.0.0.11", **found: Any) -> NodeFacts:
    return NodeFacts(
        **{
            "node": node(address, "work"),
            "has_token_auth": True,
            "ray_version": VERSIONS.ray,
            "headrace_version": VERSIONS.headrace,
            "python_version": VERSIONS.python,
            "clock_s": 0.0,
            "marker": "mark",
            "hides_gpus": False,
            **found,
        }
    )


def refuse(*found: NodeFacts) -> None:
    refuse_unfit(found, VERSIONS, marker="mark", storage="/mnt/shared")


def test_a_role_without_a_node_is_named_with_the_labels_that_exist() -> None:
    with pytest.raises(CannotBePlaced, match=r"headrace/role=work, which the role rollout needs.*have: control, none"):
        refuse_absent_roles([node("a", "control"), node("b", "")], LABELS)


def test_two_control_nodes_are_refused_with_their_addresses() -> None:
    with pytest.raises(CannotBePlaced, match=r"2 nodes have the label headrace/role=control .a, b."):
        refuse_absent_roles([node("a", "control"), node("b", "control"), node("c", "work")], LABELS)


def test_resources_that_no_node_of_the_role_has_are_refused() -> None:
    bundles = {"a rollout unit": [Bundle(role=NodeRole.ROLLOUT, cpus=3, memory_bytes=4)]}
    nodes = [node("a", "control", cpus=64), node("b", "work")]
    with pytest.raises(CannotBePlaced, match="a rollout unit needs 3 CPU"):
        refuse_too_large(nodes, LABELS, bundles)
    refuse_too_large([*nodes, node("c", "work", cpus=3)], LABELS, bundles)


def test_an_engine_on_more_nodes_than_there_are_is_refused() -> None:
    # A node without the GPUs of a part is none for it.
    nodes, part = (
        [node("a", "control"), node("b", "work", gpus=8), node("c", "work")],
        Bundle(role=NodeRole.ENGINE, cpus=0, gpus=4),
    )
    refuse_too_few_nodes(nodes, "work", part, 1)
    with pytest.raises(CannotBePlaced, match=r"engines.nodes = 2: only 1 nodes have the label headrace/role=work"):
        refuse_too_few_nodes(nodes, "work", part, 2)


def test_gpus_that_the_nodes_of_a_role_do_not_have_at_once_are_refused_with_both_sums() -> None:
    def one(gpus: float, role: NodeRole = NodeRole.ROLLOUT) -> Bundle:
        return Bundle(role=role, cpus=0, gpus=gpus)

    nodes = [node("a", "control"), node("b", "work", gpus=8), node("c", "work", gpus=8)]
    fits = {"an engine": [one(2)] * 5, "a node of slime": [one(6)], "a unit": [one(0)]}
    refuse_too_large(nodes, LABELS, fits)
    sums = r"needs 18 GPUs .*headrace/role=work \(an engine: 6 x 2, a node of slime: 1 x 6\), which have 16 \(8 \+ 8\)"
    with pytest.raises(CannotBePlaced, match=sums):
        refuse_too_large(nodes, LABELS, fits | {"an engine": [one(2)] * 6})
    # Together there are enough of them, but no node has room for the third.
    with pytest.raises(CannotBePlaced, match=r"needs 15 GPUs .*which have 16"):
        refuse_too_large(nodes, LABELS, {"an engine": [one(5)] * 3})
    with pytest.raises(CannotBePlaced, match=r"the engine group needs 1 GPU, which no node .*role=control"):
        refuse_too_large(nodes, LABELS, {"the engine group": [one(1, NodeRole.CONTROL)]})


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ({"has_token_auth": False}, "without token authentication.*RAY_AUTH_MODE=token"),
        ({"headrace_version": ""}, "headrace is not installed"),
        ({"headrace_version": "0.2.0"}, "it has headrace 0.2.0, and this process 0.1.0"),
        ({"ray_version": "2.59.0"}, "it has Ray 2.59.0"),
        ({"python_version": "3.12.1"}, "it has Python 3.12.1"),
        ({"clock_s": -6.5}, r"its clock differs by -6.5 s, above 5 s: synchronise the clocks"),
        ({"marker": ""}, "cluster.storage /mnt/shared is not the same folder there"),
        ({"marker": "another"}, "cluster.storage /mnt/shared is not the same folder there"),
        ({"missing": ("/models/qwen",)}, "/models/qwen does not exist there"),
        ({"node": node("10.0.0.12", "work", gpus=8)}, "GPUs that they have not reserved.*OVERRIDE_ON_ZERO=1"),
        ({"problem": "cluster.state: /state is on NFS"}, "/state is on NFS"),
    ],
)
def test_a_node_that_differs_is_named(found: dict[str, Any], problem: str) -> None:
    refuse(facts("10.0.0.11"), facts("10.0.0.12"))
    with pytest.raises(ConfigError, match=f"^node 10.0.0.12 .headrace/role=work.: .*{problem}") as raised:
        refuse(facts("10.0.0.11"), facts("10.0.0.12", **found))
    assert "\n" not in str(raised.value)


def test_clocks_of_two_nodes_may_differ_by_five_seconds() -> None:
    refuse(facts("a", clock_s=-2.4), facts("b", clock_s=2.5))
    with pytest.raises(ConfigError, match=r"clock of node b .* is 5.1 s ahead of that of node a"):
        refuse(facts("a", clock_s=-2.5), facts("b", clock_s=2.6))


def test_the_time_that_a_probe_takes_is_no_clock_offset() -> None:
    assert clock_offset_s(100.0, 130.0, 115.0) == 0.0
    assert clock_offset_s(100.0, 101.0, 107.5) == pytest.approx(6.5)
    assert clock_offset_s(100.0, 101.0, 90.0) == pytest.approx(-10.0)


def test_a_missing_or_readable_token_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    token = tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    with pytest.raises(ConfigError, match=r"no token for the cluster.*RAY_AUTH_TOKEN_PATH"):
        require_token()
    token.write_text("a" * 64)
    token.chmod(0o640)
    with pytest.raises(ConfigError, match=f"chmod 600 {token}"):
        require_token()
    token.chmod(0o600)
    require_token()


def test_actors_of_a_cluster_may_be_absent_for_longer() -> None:
    cluster = {"address": "10.0.0.1:6379", "state": "/state", "storage": "/storage"}
    for given, expected in ((cluster, CLUSTER_ABSENT_S), (cluster | {"absent_s": 60}, 60), ({}, DEFAULT_ABSENT_S)):
        document = {"cluster": dict(given)}
        derive(document, RunConfig)
        assert document["cluster"]["absent_s"] == expected


def test_a_cluster_needs_absolute_and_different_folders() -> None:
    given = {"address": "10.0.0.1:6379", "state": "/state", "storage": "/storage"}
    ClusterSection.model_validate(given)
    for changes, problem in (
        ({"state": None}, "state is missing"),
        ({"storage": "storage"}, "storage is missing or relative"),
        ({"storage": "/state"}, "the same folder"),
        ({"address": "head"}, 'write "local", "auto" or "HOST:PORT"'),
    ):
        with pytest.raises(ConfigError, match=f"^cluster.*{problem}"):
            cluster_section(given | changes)
    with pytest.raises(ConfigError, match="rollout_units needs a cluster"):
        cluster_section({"rollout_units": 2})


def test_facts_do_not_depend_on_the_order_of_nodes() -> None:
    late = replace(facts("b"), clock_s=9.0)
    for found in ((facts("a"), late), (late, facts("a"))):
        with pytest.raises(ConfigError, match=r"^node b"):
            refuse(*found)


def test_a_redis_without_a_password_is_refused_off_loopback() -> None:
    head = node("10.0.0.1", "head")
    for harmless in ("", "127.0.0.1", "::1", "localhost"):
        refuse_open_redis(head, harmless)
    with pytest.raises(ConfigError, match=r"^node 10\.0\.0\.1 .* Redis at 10\.0\.0\.7 without a password.*requirepass"):
        refuse_open_redis(head, "10.0.0.7")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("--redis_address=10.0.0.7", "--redis_port=6379"), "10.0.0.7"),
        (("--redis_address=10.0.0.7", "--redis_password=secret"), ""),
        ((), ""),
    ],
)
def test_the_head_s_process_shows_whether_its_redis_has_a_password(
    tmp_path: Path, options: tuple[str, ...], found: str
) -> None:
    import ray

    (tmp_path / "gcs_server").symlink_to(sys.executable)
    here = f"--node-ip-address={ray.util.get_node_ip_address()}"
    # Its arguments are those of the head's process; it waits until it is killed.
    waits = "import sys; print('ready', flush=True); sys.stdin.read()"
    command = [str(tmp_path / "gcs_server"), "-c", waits, here, *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            assert open_redis_function()() == found
        finally:
            process.kill()
