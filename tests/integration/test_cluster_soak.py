"""Soak of a run on a cluster of a head and three nodes: after each fault it makes steps again, and its ledger is
clean."""

from __future__ import annotations

import pytest
from benches.cluster.faults import FaultKind
from benches.cluster.soak import CPUS, ClusterSoak, ClusterSoakPlan

from support.cluster_rig import Cluster
from support.marks import NEEDS_HOSTS

pytestmark = [
    *NEEDS_HOSTS,
]
CLUSTER_CPUS = CPUS


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_goes_on_after_a_killed_redis_and_a_killed_actor(cluster: Cluster) -> None:
    kinds = (FaultKind.REDIS_KILLED, FaultKind.ACTOR)
    report = ClusterSoak(cluster, ClusterSoakPlan(kills=2, seed=1, kinds=kinds), print).run()
    assert report.problems == ()
    assert {fault.kind for fault in report.faults} == set(kinds)
    assert (report.trained_twice, report.lost, report.left_over) == (0, 0, ())
    assert report.max_staleness is not None
    assert report.max_staleness_seen <= report.max_staleness


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_goes_on_after_twenty_faults_of_all_kinds(cluster: Cluster) -> None:
    report = ClusterSoak(cluster, ClusterSoakPlan(kills=20, seed=2, kinds=tuple(FaultKind)), print).run()
    assert report.problems == ()
    assert {fault.kind for fault in report.faults} == set(FaultKind)
    assert (report.trained_twice, report.lost, report.left_over) == (0, 0, ())
    assert report.max_staleness is not None
    assert report.max_staleness_seen <= report.max_staleness
