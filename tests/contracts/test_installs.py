"""The wheel with each extra in an empty environment: the servers work there, without Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support import agent_rig as rigs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.namespaces]
ROOT = Path(__file__).resolve().parents[2]
INSTALL_S = 600
HEAVY = ("ray", "torch", "safetensors", "grpcio")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # What an earlier build left in the checkout would be packed too.
    (folder / "extra.cfg").write_text(f"[build]\nbuild_base = {folder / 'build'}\n")
    command = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, ROOT)
    environment = os.environ | {"DIST_EXTRA_CONFIG": str(folder / "extra.cfg")}
    subprocess.run(command, check=True, cwd=folder, timeout=INSTALL_S, env=environment)
    [path] = folder.glob("*.whl")
    return path


def installed(wheel: Path, extra: str, folder: Path) -> Path:
    """Install the wheel into an environment of its own, and return the folder of its programs."""
    venv.create(folder, with_pip=True)
    pip = (folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
    subprocess.run((*pip, "install", "--quiet", f"{wheel}[{extra}]"), check=True, timeout=INSTALL_S)
    listed = subprocess.run((*pip, "list", "--format", "json"), check=True, timeout=60, capture_output=True).stdout
    names = {row["name"].lower() for row in json.loads(listed)}
    assert names & set(HEAVY) == set()
    return folder / "bin"


@contextmanager
def serving(*command: str | Path, address: Path) -> Iterator[str]:
    process = subprocess.Popen((*command, "--json", address), stdout=subprocess.DEVNULL)
    try:
        while not address.exists() or not address.read_text():
            assert process.poll() is None, process.returncode
        yield json.loads(address.read_text())["url"]
    finally:
        process.terminate()
        process.wait(60)


def refusal(headrace: Path, *words: str | Path, status: int = 2) -> str:
    """What a command prints that ends with this status."""
    done = subprocess.run((headrace, *words), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stderr
    return done.stderr.strip()


async def answer(method: str, url: str, **more: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as client, client.request(method, url, **more) as response:
        return response.status, await response.json(content_type=None)


async def test_the_sandbox_server_is_installed_without_ray(wheel: Path, tmp_path: Path) -> None:
    programs = installed(wheel, "sandbox", tmp_path / "env")
    headrace = programs / "headrace"
    with serving(headrace, "serve", "sandbox", address=tmp_path / "address.json") as url:
        status, box = await answer(
            "POST", f"{url}/v2/sandboxes", json={"templateID": "base"}, headers={"X-API-KEY": "x"}
        )
        assert (status, box["templateID"]) == (201, "base")
    recipe = ROOT / "scripts" / "recipes" / "quickstart.toml"
    assert "pip install 'headrace[run]'" in refusal(headrace, "run", recipe)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    words = ("serve", "gateway", "--engine", "http://127.0.0.1:1", "--tokenizer", folder)
    assert "pip install 'headrace[gateway]'" in refusal(headrace, *words)


async def test_the_gateway_is_installed_without_ray(wheel: Path, tmp_path: Path) -> None:
    headrace = installed(wheel, "gateway", tmp_path / "env") / "headrace"
    folder = rigs.write_tokenizer(tmp_path / "tokenizer")
    words = (
        "serve",
        "gateway",
        "--engine",
        "http://127.0.0.1:1",
        "--tokenizer",
        folder,
        "--admin-token-file",
        tmp_path / "token",
    )
    # It has loaded the tokenizer and everything else when it finds that no engine answers.
    assert "127.0.0.1:1" in refusal(headrace, *words, status=75)
    assert "pip install 'headrace[sandbox]'" in refusal(headrace, "serve", "sandbox")
