"""What the agent of a node removes from its disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.actors.runtime.actors.nodes import TABLE_FILE, NodeAgent

RUNS = ["1" * 32, "2" * 32]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    for run in RUNS:
        for name in ("logs", "sessions-1"):
            (tmp_path / run / name).mkdir(parents=True)
            (tmp_path / run / name / "file").touch()
        (tmp_path / run / "gateway-1.json").touch()
    (tmp_path / "other").mkdir()
    return tmp_path


async def test_only_folders_of_runs_are_removed(state: Path) -> None:
    agent = NodeAgent(state)
    assert await agent.folders() == tuple(RUNS)
    await agent.remove(RUNS[0])
    await agent.remove(RUNS[0])
    assert await agent.folders() == (RUNS[1],)
    for folder in ("other", "..", "", f"../{state.name}", f"{RUNS[1]}/logs"):
        with pytest.raises(ValueError, match="not the folder of a run"):
            await agent.remove(folder)
    assert (state / "other").is_dir()


async def test_logs_of_a_failed_run_stay(state: Path) -> None:
    await NodeAgent(state).remove(RUNS[0], ("logs",))
    assert [path.name for path in (state / RUNS[0]).iterdir()] == ["logs"]
    assert (state / RUNS[0] / "logs" / "file").exists()


async def test_nothing_is_removed_where_the_ledgers_are(state: Path) -> None:
    (state / TABLE_FILE).touch()
    agent = NodeAgent(state)
    assert await agent.folders() == ()
    with pytest.raises(ValueError, match="not the folder of a run"):
        await agent.remove(RUNS[0])
    assert (state / RUNS[0] / "gateway-1.json").exists()
