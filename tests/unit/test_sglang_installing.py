"""An environment is made whole, once, by one installer at a time; a small program stands in for python and pip."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.policies.sglang.installation import environment_directory, environment_python

# Notes what it is asked to do; `-m venv DIR` puts itself there. It fails at what $FAIL_AT names, if it was asked to.
PROGRAM = """#!/bin/bash
echo "$*" >> "{folder}/asked"
[[ -n "$FAIL_AT" && "$*" == *"$FAIL_AT"* ]] && {{ echo "no such thing" >&2; exit 1; }}
if [[ "$2" == venv ]]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
exit 0
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "python"
    program.write_text(PROGRAM.format(folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(program))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    return tmp_path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.policies.sglang.installation", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def asked(cache: Path) -> list[str]:
    return (cache / "asked").read_text().splitlines()


def test_the_installer_prints_the_python_path_and_a_second_run_does_nothing(cache: Path) -> None:
    assert environment_python() is None
    first = run()
    assert first.stdout == f"{environment_directory('0.5.23')}/bin/python\n"
    assert str(environment_python()) == first.stdout.strip()
    assert any("torch==2.13.0" in line for line in asked(cache))
    assert any("--no-deps sglang==0.5.23 torchvision==0.28.0" in line for line in asked(cache))
    before = asked(cache)
    assert run("0.5.23").stdout == first.stdout
    assert asked(cache) == before


def test_an_incomplete_environment_is_rebuilt(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL_AT", "sglang==0.5.21")
    failed = run("0.5.21")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "no such thing" in failed.stderr
    assert environment_directory("0.5.21").is_dir()
    assert environment_python("0.5.21") is None
    monkeypatch.delenv("FAIL_AT")
    left = environment_directory("0.5.21") / "left"
    left.touch()
    assert run("0.5.21").returncode == 0
    assert environment_python("0.5.21") is not None
    assert not left.exists()


def test_an_environment_with_different_pins_is_rebuilt(cache: Path) -> None:
    assert run().returncode == 0
    (environment_directory("0.5.23") / "headrace-stamp").write_text("other pins")
    assert environment_python() is None
    assert run().returncode == 0
    assert sum("-m venv" in line for line in asked(cache)) == 2


def test_an_environment_in_use_is_not_replaced(cache: Path) -> None:
    assert run().returncode == 0
    stamp = environment_directory("0.5.23") / "headrace-stamp"
    stamp.write_text("other pins")
    python = environment_directory("0.5.23") / "bin" / "python"
    python.unlink()
    python.symlink_to(sys.executable)
    with subprocess.Popen((python, "-c", "input()"), stdin=subprocess.PIPE) as server:
        refused = run()
        assert (refused.returncode, refused.stdout) == (1, "")
        assert f"processes [{server.pid}] are running from it" in refused.stderr
        assert python.exists()
        server.communicate(b"\n", timeout=60)
    assert run().returncode == 0
    assert environment_python() == python


def test_concurrent_installations_create_one_environment(cache: Path) -> None:
    with ThreadPoolExecutor() as threads:
        done = [job.result() for job in [threads.submit(run) for _ in range(2)]]
    assert [item.returncode for item in done] == [0, 0]
    assert done[0].stdout == done[1].stdout
    assert sum("-m venv" in line for line in asked(cache)) == 1


def test_an_unknown_version_is_refused(cache: Path) -> None:
    refused = run("9.9.9")
    assert refused.returncode == 2
    assert "9.9.9 is not supported; choose one of 0.5.15.post1, 0.5.21, 0.5.23" in refused.stderr
    assert not (cache / "asked").exists()
