"""Process of one check: `python -m gpu_checks.worker NAME OUTCOME_FILE PARENT_PID DEVICE SIZE FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from gpu_checks.place import Place
from gpu_checks.suite import CHECKS, OUTCOMES
from headrace.policies.processes.parent_death import die_with_parent


def main(name: str, outcome: str, parent_pid: str, *place: str) -> None:
    """Run the check, and write what it has measured."""
    die_with_parent(int(parent_pid))
    [check] = [check for check in CHECKS if check.name == name]
    Path(outcome).write_bytes(OUTCOMES.dump_json(check.run(Place.of(place))))


if __name__ == "__main__":
    main(*sys.argv[1:])
