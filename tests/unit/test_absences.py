"""The list of parts that a run waits for: its file, its lines, and who writes it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.actors.errors import StartFailed
from headrace.actors.record.files.absences import OF_ACTORS, OF_THE_DRIVER, Absences, read_absences
from headrace.actors.runtime.actors.guarded_actors import GuardedActors
from headrace.actors.runtime.actors.nodes import Bundle, NodeRole
from headrace.actors.runtime.actors.runtime import InlineRuntime

if TYPE_CHECKING:
    import pytest


def test_the_file_has_what_is_absent_at_present(tmp_path: Path) -> None:
    absences = Absences(tmp_path / OF_ACTORS, clock=lambda: 100.0)
    absences.lost("worker-1", role="rollout")
    absences.lost("learner", role="learner")
    absences.lost("worker-1", role="rollout")
    assert [one.line(112.0) for one in read_absences(tmp_path)] == [
        "worker-1 (since 12 s, on a rollout node)",
        "learner (since 12 s, on a learner node)",
    ]
    absences.back("learner")
    absences.back("learner")
    assert [one.name for one in read_absences(tmp_path)] == ["worker-1"]
    absences.back("worker-1")
    assert list(tmp_path.iterdir()) == []


def test_the_driver_and_the_service_have_a_file_each(tmp_path: Path) -> None:
    Absences(tmp_path / OF_ACTORS).lost("worker-1")
    Absences(tmp_path / OF_THE_DRIVER).lost("service")
    assert [one.name for one in read_absences(tmp_path)] == ["service", "worker-1"]


def test_a_new_process_begins_with_an_empty_list(tmp_path: Path) -> None:
    Absences(tmp_path / OF_ACTORS).lost("worker-1")
    Absences(tmp_path / OF_ACTORS).begin()
    assert read_absences(tmp_path) == ()


def test_a_damaged_file_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / OF_ACTORS).write_bytes(b"[{")
    with caplog.at_level(logging.WARNING):
        assert read_absences(tmp_path) == ()
    assert "cannot be read" in caplog.text


class FullCluster(InlineRuntime):
    """A runtime without free resources; it notes what the run says meanwhile."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.told: list[str] = []

    async def reserve(self, name: str, bundle: Bundle) -> None:
        self.told += [one.line(one.since_s) for one in read_absences(self.folder)]
        if self.told[2:]:
            raise StartFailed("no node was added")


class Unit(GuardedActors):
    async def start(self, *names: str) -> None:
        for name in names:
            await self._reserve(name, Bundle(role=NodeRole.ROLLOUT, cpus=2.0, memory_bytes=1 << 30))


async def test_a_bundle_that_waits_for_a_node_says_what_it_needs(tmp_path: Path) -> None:
    runtime: Any = FullCluster(tmp_path)
    actors = Unit(runtime, hang_s=1.0, absences=Absences(tmp_path / OF_ACTORS))
    await actors.start("unit-0", "unit-1")
    needs = "since 0 s, on a rollout node, it needs 2 CPU, 1024 MiB of memory"
    assert runtime.told == [f"unit-0 ({needs})", f"unit-1 ({needs})"]
    assert read_absences(tmp_path) == (), "it was placed"
