"""The actor of runs when another version of headrace is installed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.actors.cluster.runs import runs as runs_module
from headrace.actors.cluster.runs.layout import ClusterTerms
from headrace.actors.cluster.runs.runs import Runs
from headrace.actors.errors import RunRefused
from headrace.actors.runtime.actors.runtime import ENDING
from headrace.actors.runtime.version import RUNNING, installed


@pytest.fixture
def ended() -> list[str]:
    """What ended its process, in place of the process of the test."""
    ended: list[str] = []
    ENDING.set(lambda: ended.append("runs"))
    return ended


def runs() -> Runs:
    return Runs(ClusterTerms(state=Path("/state"), storage=Path("/storage")))


async def test_an_actor_of_the_wanted_version_goes_on(ended: list[str]) -> None:
    assert installed() == RUNNING
    await runs().renew(RUNNING)
    assert ended == []


async def test_an_actor_ends_its_process_when_another_version_is_installed(
    ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_module, "installed", lambda: "9.9")
    with pytest.raises(asyncio.CancelledError):
        await runs().renew("9.9")
    assert ended == ["runs"]


async def test_a_client_of_a_version_that_the_control_node_lacks_is_refused(ended: list[str]) -> None:
    with pytest.raises(RunRefused, match=rf"the control node has headrace {RUNNING} and this client 9\.9: install"):
        await runs().renew("9.9")
    assert ended == []
