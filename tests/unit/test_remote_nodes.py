"""The commands of nodes and upgrades, over HTTP against a control API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest

from headrace.actors.cli.app import app
from headrace.actors.cluster.runs.records import ActualState
from headrace.actors.errors import ConfigError, RoleTooSmall, RunRefused
from support.control_rig import ControlRig
from support.runs_without_services import ALICE, NODE, RECIPE, serving


@pytest.fixture
def rig(tmp_path: Path) -> ControlRig:
    return ControlRig(tmp_path)


@pytest.fixture
async def url(rig: ControlRig) -> AsyncIterator[str]:
    async with serving(rig.app) as url:
        yield url


def options(url: str, folder: Path, key: str) -> tuple[str, ...]:
    """Return the options of commands with this key."""
    path = folder / f"{key}.key"
    path.touch(mode=0o600)
    path.write_text(f"{key}\n")
    return ("--url", url, "--key-file", str(path))


def command(options: tuple[str, ...], *words: str) -> None:
    app([*words, *options], standalone_mode=False)


async def test_nodes_are_listed_and_drained_by_admins(
    rig: ControlRig, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id = (await rig.runs.submit(ALICE, "a", RECIPE, "k")).run_id
    root, out = options(url, tmp_path, "root"), tmp_path / "out.json"

    def session() -> None:
        command(root, "status", "--nodes")
        command(root, "node", "drain", NODE.address, "--deadline-s", "5", "--json", str(out))
        with pytest.raises(ConfigError, match="`self` needs --address"):
            command(root, "node", "drain", "self")
        with pytest.raises(ConfigError, match="no living node"):
            command(root, "node", "drain", "10.9.9.9", "--deadline-s", "5")
        with pytest.raises(RoleTooSmall, match="admin is needed"):
            command(options(url, tmp_path, "alice"), "status", "--nodes")

    await asyncio.to_thread(session)
    printed = capsys.readouterr()
    assert NODE.address in printed.out + printed.err
    assert f"run {run_id}: 1 workers there get no orders, 2 rollouts ended, 0 are issued elsewhere" in printed.err
    assert f"node {NODE.address} can end" in printed.err
    assert orjson.loads(out.read_bytes())["runs"][run_id]["ended"] == 2


async def test_a_live_run_is_upgraded_and_an_ended_one_is_not(
    rig: ControlRig, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id = (await rig.runs.submit(ALICE, "a", RECIPE, "k")).run_id
    alice = options(url, tmp_path, "alice")
    await asyncio.to_thread(command, alice, "stop", "a", "--restart")
    assert f"run {run_id} (a): starting, should be running" in capsys.readouterr().err
    assert "starts under headrace 0" in [event.text for event in (await rig.runs.events(ALICE, run_id, 0, 0.0)).events]
    await rig.runs.go(run_id, ActualState.FINISHED)
    with pytest.raises(RunRefused, match="resume it"):
        await asyncio.to_thread(command, alice, "stop", "a", "--restart")
    with pytest.raises(ConfigError, match="--now and --restart"):
        await asyncio.to_thread(command, alice, "stop", "a", "--restart", "--now")
