"""The unmodified e2b SDK, newest 2.x and 2.25.1, blocking and asyncio, against `headrace serve sandbox`."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.sandboxes.local.provider import LocalProvider

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = Path(__file__).with_name("e2b_scenarios.py")
OLD_VERSION = "2.25.1"
HEADRACE = str(Path(sys.executable).with_name("headrace"))
ABSENT_IN_OLD = {"one_key_makes_one_sandbox", "standard_input_is_streamed", "standard_input_is_written_and_closed"}


def scenario_names() -> list[str]:
    tree = ast.parse(SCENARIOS.read_text(encoding="utf-8"))
    marked = (node for node in tree.body if isinstance(node, ast.AsyncFunctionDef) and node.decorator_list)
    return [node.name for node in marked]


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    command = [HEADRACE, "serve", "sandbox", "--port", "0", "--json", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


@pytest.fixture(scope="session")
def old_sdk() -> Path:
    """A folder with e2b 2.25.1 and its dependencies, installed once for this checkout."""
    folder = ROOT / "build" / f"e2b-{OLD_VERSION}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(exist_ok=True)
    fresh = tempfile.mkdtemp(prefix="e2b-", dir=folder.parent)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", fresh]
    done = subprocess.run(
        [*command, f"e2b=={OLD_VERSION}"], capture_output=True, text=True, check=False, timeout=300, cwd="/"
    )
    if done.returncode != 0:
        shutil.rmtree(fresh)
        pytest.skip(f"e2b {OLD_VERSION} cannot be installed: {done.stderr[-500:]}")
    try:
        Path(fresh).rename(folder)
    except OSError:
        # Another run was quicker.
        shutil.rmtree(fresh)
    return folder


@pytest.fixture(
    scope="module",
    params=[
        "newest-sync",
        pytest.param("newest-async", marks=pytest.mark.whole),
        pytest.param("2.25.1-sync", marks=pytest.mark.whole),
        pytest.param("2.25.1-async", marks=pytest.mark.slow),
    ],
)
def results(request: pytest.FixtureRequest, server_url: str) -> tuple[str, dict[str, Any]]:
    sdk, _, mode = request.param.rpartition("-")
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    if sdk == OLD_VERSION:
        environment["PYTHONPATH"] = str(request.getfixturevalue("old_sdk"))
    features = ",".join(sorted(LocalProvider.features))
    command = [sys.executable, str(SCENARIOS), server_url, mode, features]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110, env=environment, cwd="/")
    assert done.returncode == 0, done.stderr
    return sdk, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.namespaces
@pytest.mark.parametrize("name", scenario_names())
def test_each_sdk_scenario_passes(results: tuple[str, dict[str, Any]], name: str) -> None:
    sdk, outcome = results
    wanted = "absent" if sdk == OLD_VERSION and name in ABSENT_IN_OLD else "ok"
    assert outcome[name] == wanted, outcome[name]


@pytest.mark.slow
@pytest.mark.namespaces
def test_the_provider_works_with_the_old_sdk(old_sdk: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contracts/test_e2b_provider.py"]
    # The old SDK has no call to close standard input.
    chosen = ["-k", "not spawned_commands_stream"]
    environment = {**os.environ, "PYTHONPATH": str(old_sdk), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*command, *chosen], capture_output=True, text=True, check=False, timeout=110, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
