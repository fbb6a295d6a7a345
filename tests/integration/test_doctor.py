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
    found = re.search(r"(\d+) each, (\d+) sandboxes; all hold at most (\d+) of", rows["all processes"])
    assert found is not None
    each, sandboxes, allowed = map(int, found.groups())
    assert allowed < read_host().processes
    assert sandboxes * (each + 33) <= allowed or "the largest holder above its even share ends" in rows["all processes"]
    assert f"of fs.file-max {read_host().open_files}" in rows["all descriptors"]
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
