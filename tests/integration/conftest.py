"""Fixtures shared by the integration tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from headrace.sandboxes.local.provider import LocalProvider
from support.cluster_rig import Cluster, running_cluster
from support.ray_hosts import redis_folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider() -> AsyncIterator[LocalProvider]:
    """Provider of local sandboxes for all tests of a module, which run in the module's event loop."""
    async with LocalProvider() as provider:
        yield provider


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Cluster of a head and three nodes, each with the module's CLUSTER_CPUS, as Ray counts them, or 2."""
    if (redis := redis_folder()) is None:
        pytest.skip("scripts/install redis could not install Redis here")
    cpus = getattr(request.module, "CLUSTER_CPUS", 2)
    with running_cluster(tmp_path_factory.mktemp("c") / "shared", redis, cpus=cpus) as cluster:
        yield cluster
