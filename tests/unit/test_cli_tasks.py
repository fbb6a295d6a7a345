"""`headrace tasks` and what `headrace status` says of outages, on ledgers as buffers leave them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest

from headrace.actors.cli import app as cli
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.config import RunConfig
from headrace.actors.run.launch import RunRequest, prepare, sole_driver
from headrace.buffer.audit.verify import verify
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.tasks.task import load_tasks
from headrace.buffer.trajectories.types import Outcome, RolloutResult

RECIPE = Path(__file__).parents[2] / "scripts" / "recipes" / "simulated.toml"
OPTIONS = ("buffer.max_attempts=1", "buffer.park_after=1", "tasks.train_count=6")


async def break_down(config: RunConfig, directory: RunDirectory) -> None:
    """The members of two tasks fail on two hosts, and then no engine serves."""
    now = 1_700_000_000.0
    async with await ReplayStore.open(
        directory.path,
        config.buffer,
        load_tasks(directory.train_tasks),
        run_id=directory.identity.read_text(),
        seed=config.service.seed,
        clock=lambda: now,
    ) as store:
        version = await store.open_epoch(None)
        orders = await store.issue(2 * config.buffer.group_size, version)
        for place, order in enumerate(orders):
            now += 100.0
            outcome = Outcome.infra("no such image")
            await store.offer_many(
                [
                    RolloutResult(
                        rollout_id=order.rollout_id,
                        attempt=order.attempt,
                        outcome=outcome,
                        trajectory=None,
                        host="ab"[place % 2],
                    )
                ]
            )
        await store.engines(serving=False)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    config, directory = prepare(RunRequest(recipe=RECIPE, runs_dir=tmp_path, name="run", overrides=OPTIONS))
    asyncio.run(break_down(config, directory))
    return directory


def headrace(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["headrace", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def parked_in(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], run: RunDirectory) -> list:
    capfdbinary.readouterr()
    assert headrace(monkeypatch, "status", run.path, "--parked", "--json", "-") == 0
    return orjson.loads(capfdbinary.readouterr().out)


def test_parked_tasks_are_listed_and_released(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], run: RunDirectory
) -> None:
    first, second = parked_in(monkeypatch, capfdbinary, run)
    assert first["hosts"] == ["a", "b"]
    assert first["last_failure"] == "no such image"
    assert first["parked_at_s"] < second["parked_at_s"]
    assert headrace(monkeypatch, "ledger", "unpark", run.path, first["task_id"]) == 0
    assert [task["task_id"] for task in parked_in(monkeypatch, capfdbinary, run)] == [second["task_id"]]
    assert headrace(monkeypatch, "ledger", "unpark", run.path, "--all") == 0
    assert parked_in(monkeypatch, capfdbinary, run) == []
    assert verify(run.path).clean


def test_invalid_releases_are_refused_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: RunDirectory
) -> None:
    assert headrace(monkeypatch, "ledger", "unpark", run.path, "nobody") == cli.EXIT_BAD_INPUT
    assert "nobody is not parked" in capsys.readouterr().err
    assert headrace(monkeypatch, "ledger", "unpark", run.path) == cli.EXIT_BAD_INPUT
    assert "--all" in capsys.readouterr().err
    with sole_driver(run):
        assert headrace(monkeypatch, "ledger", "unpark", run.path, "--all") == cli.EXIT_BAD_INPUT
    assert "is being driven by another process" in capsys.readouterr().err


def test_status_shows_why_orders_are_held(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: RunDirectory
) -> None:
    assert headrace(monkeypatch, "status", run.path) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "is holding back orders: no engine serves, since 2023-11-14 22:" in told
    assert f"has 2 parked tasks: headrace status {run.path} --parked" in told
