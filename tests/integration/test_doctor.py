"""Output of `headrace doctor`, which is complete when standard output is a pipe, and names a way out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from headrace.actors.cli import app
from headrace.actors.derivation.capacity import capacity
from headrace.actors.derivation.host import Host
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


def test_doctor_says_what_the_machine_can_run(capfd: pytest.CaptureFixture[str]) -> None:
    app.doctor(json=Path("-"))
    found = orjson.loads(capfd.readouterr().out)
    assert {"model on the CPU", "sandboxes at once", "provider local", "provider e2b", "SGLang"} <= found[
        "can_run"
    ].keys()
    assert {"name", "present", "detail"} == found["guarantees"][0].keys()


def test_capacity_of_a_host_with_gpus() -> None:
    host = Host(memory_bytes=32_000_000_000, cores=64, gpus=(80_000_000_000,))
    found = capacity(host, has_namespaces=True)
    assert found["model on the CPU"].startswith("up to 1B trained and served (24 bytes a parameter)")
    assert found["model on GPU 0"].startswith("up to 4B trained (18 bytes a parameter), or up to 34B served (2 bytes)")
    assert found["sandboxes at once"] == "104: 0.3 GB each of 28 GB"
    assert capacity(host, has_namespaces=False)["sandboxes at once"] == "0: no namespaces"


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
