"""GPUs are reserved with Ray: nobody sees the device of another, and a run that needs too many is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.actors.run.exit_codes import EXIT_BAD_INPUT
from support import run_rig as rig

GUARD_S = 110


def test_actors_see_only_the_gpus_that_they_reserved(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "support.reserved_gpus", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["offered"] == 4
    for moment in ("before", "after"):
        learner, engines, replay = (set(seen[moment][name]) for name in ("learner", "engines", "replay"))
        assert (len(learner), len(engines), replay) == (1, 3, set())
        assert learner | engines == {"0", "1", "2", "3"}
    # A node that Ray started by default shows all of its GPUs, and is refused for it.
    assert seen["hides_gpus"] == [True, False]


@pytest.mark.namespaces
def test_a_run_that_needs_more_gpus_than_there_are_is_refused(tmp_path: Path) -> None:
    arguments = ("--runs-dir", str(tmp_path), "--name", "run", "--quiet", "--set", "learner.device=cuda")
    driver = rig.start_driver("run", str(rig.RECIPE), *arguments)
    _, errors = driver.communicate(timeout=GUARD_S)
    assert driver.returncode == EXIT_BAD_INPUT
    assert b"needs 1 GPUs of its own (1 for learner.device = cuda), but Ray offers 0 here" in errors
