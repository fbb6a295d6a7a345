"""Output of `headrace doctor`, which is complete when standard output is a pipe."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.sandboxes import doctor
from headrace.sandboxes.errors import NamespacesUnavailable
from headrace.sandboxes.linux.host_limits import read_host

pytestmark = pytest.mark.namespaces


def test_doctor_prints_a_complete_table_to_standard_output() -> None:
    try:
        doctor.require_namespaces()
    except NamespacesUnavailable as error:
        pytest.skip(str(error))
    command = [str(Path(sys.executable).with_name("headrace")), "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = {line[:30].split("  ")[0].strip(): line for line in done.stdout.splitlines()}
    assert {"guarantee", "cgroup memory", "all memory"} <= rows.keys()
    found = re.search(r"(\d+) sandboxes x \((\d+) \+ 33\) = (\d+) of (\d+)", rows["all processes"])
    assert found is not None
    sandboxes, each, processes, allowed = map(int, found.groups())
    assert sandboxes * (each + 33) == processes <= allowed < read_host().processes
    assert f"{processes} processes x" in rows["all descriptors"]
    assert f"(fs.file-max {read_host().open_files})" in rows["all descriptors"]
    assert "[Errno" not in done.stdout
