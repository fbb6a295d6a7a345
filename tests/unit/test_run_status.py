"""What `headrace status` says of a run that is new, running, drained, finished or was killed."""

from __future__ import annotations

import errno
import os
import re
import time
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from headrace.actors.cli.app import app
from headrace.actors.engines.members_file import EngineStatus, Roster
from headrace.actors.engines.registry import EngineState, Origin
from headrace.actors.record.files.absences import OF_ACTORS, Absences
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.record.files.run_state import RunState, run_state
from headrace.actors.run.launch import RunRequest, prepare, sole_driver
from headrace.policies.engine import EngineId

RECIPE = Path(__file__).resolve().parents[2] / "scripts" / "recipes" / "simulated.toml"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    request = RunRequest(recipe=RECIPE, runs_dir=tmp_path, name="run", overrides=["training.steps=60"])
    return prepare(request)[1]


def ended(run: RunDirectory, *, completed: bool, steps: int) -> None:
    run.append_session(1.0, 2.0)
    run.summary.write_bytes(orjson.dumps({"completed": completed}))
    step = {"kind": "step", "time_s": 2.0, "step": steps, "version": f"1.{steps}", "reward": 0.5}
    run.metrics.write_bytes(orjson.dumps(step) + b"\n")


def told(run: RunDirectory) -> str:
    result = CliRunner().invoke(app, ["status", str(run.path)])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_drained_run_shows_its_progress(run: RunDirectory) -> None:
    ended(run, completed=False, steps=6)
    assert "6 of 60, drained" in told(run)


def test_a_finished_run_is_shown_as_finished_with_no_engine_serving(run: RunDirectory) -> None:
    run.engines.parent.mkdir()
    engine = EngineStatus(
        engine_id=EngineId("engine-0"),
        origin=Origin.ATTACHED,
        place="h:1",
        state=EngineState.SERVING,
        url="http://h:1",
        version="1.8",
        running=0,
        waiting=0,
        reason="",
    )
    Roster(engines=(engine,)).write(run.engines)
    assert "serving" in told(run), "as the group last said"
    ended(run, completed=True, steps=60)
    said = told(run)
    assert "60 of 60, finished" in said
    assert "serving" not in said


def test_the_state_follows_from_lock_and_summary(run: RunDirectory) -> None:
    assert run_state(run) is RunState.NEW
    run.append_session(1.0, None)
    assert run_state(run) is RunState.STOPPED
    ended(run, completed=False, steps=6)
    with sole_driver(run):
        assert run_state(run) is RunState.RUNNING


@pytest.mark.parametrize("refusal", [errno.EROFS, errno.EACCES])
def test_the_state_of_a_run_that_may_only_be_read_is_shown(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    opened = os.open

    def read_only(path: str | Path, flags: int, *others: int, **named: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(refusal, os.strerror(refusal), str(path))
        return opened(path, flags, *others, **named)

    with sole_driver(run):
        monkeypatch.setattr(os, "open", read_only)
        assert run_state(run) is RunState.RUNNING
    assert run_state(run) is not RunState.RUNNING


def test_a_run_from_another_version_does_not_hide_other_runs(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text("{}")
    result = CliRunner().invoke(app, ["status", "--runs-dir", str(tmp_path)])
    assert result.exit_code == 0
    assert "0 of 60, new" in result.output
    assert "not a run configuration that this version can read" in result.output


def test_a_live_run_names_what_it_waits_for(run: RunDirectory) -> None:
    Absences(run.path / OF_ACTORS, clock=lambda: time.time() - 12).lost("worker-1", role="rollout")
    with sole_driver(run):
        assert re.search(r"run: absent: worker-1 \(since \d+ s, on a rollout node\)", " ".join(told(run).split()))
    assert "absent" not in told(run), "nobody waits any more"
