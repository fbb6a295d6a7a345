"""Output of `headrace doctor`, which is complete when standard output is a pipe, and names a way out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.actors.cli import app
from headrace.sandboxes import doctor
from headrace.sandboxes.errors import NamespacesUnavailable
from headrace.sandboxes.linux.host_limits import read_host

pytestmark = pytest.mark.core


@pytest.mark.namespaces
def test_doctor_prints_a_complete_table_to_standard_output() -> None:
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


def test_doctor_names_the_providers_of_a_machine_without_namespaces(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = doctor.Guarantee(name="user namespace", present=False, detail="denied", required=True)
    monkeypatch.setattr(doctor, "probe", lambda: (missing,))
    app.doctor()
    assert (
        "local sandboxes do not start on this machine: set sandbox.provider to remote or e2b" in capsys.readouterr().err
    )
    with pytest.raises(NamespacesUnavailable, match=r"user namespace: denied; set sandbox\.provider to remote or e2b"):
        doctor.require_namespaces()
