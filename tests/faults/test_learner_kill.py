"""A Megatron learner that is killed within a step or a save, again and again: the run resumes and loses nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.actors.record.files.metrics import read_metrics
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.report import report_of
from headrace.policies.learners.checkpoints import list_checkpoints, usable_checkpoint

GUARD_S = 800


def live_through(folder: Path, *, seed: int, steps: int, saves: int) -> RunDirectory:
    """Run until killed `steps` times within a step and `saves` times within a save, then to the end."""
    command = [sys.executable, "-m", "support.learner_lives", str(folder), str(seed), str(steps), str(saves)]
    done = subprocess.run(command, capture_output=True, timeout=GUARD_S, check=False, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    story = json.loads(done.stdout.splitlines()[-1])
    *struck, last = story["lives"]
    for life in story["lives"]:
        assert life["problems"] == [], life
        assert (life["twice"], life["lost"]) == (0, 0), life
    assert [life["code"] for life in struck] == [-signal.SIGKILL] * (steps + saves)
    assert sum(life["method"] == "save" for life in struck) == saves
    assert (last["code"], last["steps"]) == (0, story["last"])
    directory = RunDirectory(path=folder / "run")
    usable = usable_checkpoint(directory.checkpoints)
    assert usable.set_aside == (), "no interrupted save counts as a checkpoint"
    assert usable.checkpoint is not None
    assert (usable.checkpoint.version.epoch, usable.checkpoint.version.step) == (len(struck) + 1, story["last"])
    return directory


@pytest.mark.timeout(GUARD_S)
def test_a_learner_killed_within_steps_and_saves_resumes(tmp_path: Path) -> None:
    """F9."""
    directory = live_through(tmp_path, seed=1, steps=5, saves=5)
    epochs = {path.name.split(".")[0] for path in list_checkpoints(directory.checkpoints)}
    assert epochs == {"11"}, "three newest checkpoints are kept"
    # The tokens of this run are random: engines and learner cannot agree about them.
    alarms = read_metrics(directory.metrics, ("mismatch_alarm",))
    assert alarms
    assert all(alarm["mean"] > alarm["alarm"] for alarm in alarms)
    drift = report_of(directory).drift
    assert drift is not None
    assert (drift.alarms, drift.last_alarm) == (len(alarms), max(alarm["step"] for alarm in alarms))


@pytest.mark.slow
@pytest.mark.timeout(2 * GUARD_S)
@pytest.mark.parametrize("seed", [2])
def test_a_learner_killed_at_forty_instants_resumes(tmp_path: Path, seed: int) -> None:
    live_through(tmp_path, seed=seed, steps=20, saves=20)
