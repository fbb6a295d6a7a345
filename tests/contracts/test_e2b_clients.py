"""Unmodified clients of E2B against the server: the SDK for Node, langchain-e2b and the code interpreter's SDKs."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.sandboxes.images.catalog import ImageCatalog
from headrace.sandboxes.images.interpreter import add_interpreter
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
from headrace.serve.sandbox_servers.e2b.server import E2bServer, ServerSettings
from headrace.serve.sandbox_servers.e2b_state.images import ImageMap, checked
from support.installed_programs import installed

pytestmark = [pytest.mark.namespaces, pytest.mark.slow, pytest.mark.timeout(900)]
HERE = Path(__file__).parent
INSTALL_S = 600


@pytest.fixture
async def server() -> AsyncIterator[E2bServer]:
    async with LocalProvider() as provider, E2bServer(provider) as server:
        yield server
        assert await provider.list() == []


async def output(server: E2bServer, *command: str | Path, folder: Path) -> str:
    """Run a client to its end and return what it prints."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=os.environ | {"E2B_API_URL": server.url, "E2B_SANDBOX_URL": server.url, "E2B_API_KEY": "any"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(120):
        said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    return said.decode()


async def test_the_node_sdk_finds_the_account_ports_metadata_and_auto_resume(server: E2bServer, tmp_path: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("the SDK for Node needs node, and there is none here")
    folder = await asyncio.to_thread(installed, "e2b_node", timeout_s=INSTALL_S)
    (tmp_path / "checks.mjs").write_bytes((HERE / "e2b_node_features.mjs").read_bytes())
    (tmp_path / "node_modules").symlink_to(folder / "node_modules")
    said = await output(server, "node", tmp_path / "checks.mjs", folder=tmp_path)
    assert json.loads(said.splitlines()[-1]) == {
        "who": ["user", "/home/user", "0"],
        "same": True,
        "page": [200, "hello"],
        "domain": True,
        "metadata": {"author": "me"},
        "resumed": "awake",
    }


async def test_langchain_e2b_runs_unmodified(server: E2bServer, tmp_path: Path) -> None:
    python = await asyncio.to_thread(installed, "langchain_e2b", timeout_s=INSTALL_S)
    said = await output(server, python, HERE / "langchain_e2b_checks.py", folder=tmp_path)
    assert said.splitlines()[-1] == "all passed"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture
async def interpreter(store: Path) -> AsyncIterator[E2bServer]:
    """A server with the image of the code interpreter, which is built once."""
    async with LocalProvider(LocalSandboxConfig(image_folder=store)) as provider:
        if ImageCatalog(provider.store.files).find("code-interpreter-v1") is None:
            await add_interpreter(provider)
        async with E2bServer(provider, ServerSettings(images=checked(None, ImageMap(), provider.store))) as server:
            yield server
            assert await provider.list() == []


async def test_the_code_interpreter_for_python_runs_unmodified(interpreter: E2bServer, tmp_path: Path) -> None:
    clients = await asyncio.to_thread(installed, "interpreter_clients", timeout_s=INSTALL_S)
    python = clients / "python" / "bin" / "python"
    said = await output(interpreter, python, HERE / "interpreter_checks.py", folder=tmp_path)
    assert said.splitlines()[-1] == "all passed"


async def test_the_code_interpreter_for_node_runs_unmodified(interpreter: E2bServer, tmp_path: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("the SDK for Node needs node, and there is none here")
    clients = await asyncio.to_thread(installed, "interpreter_clients", timeout_s=INSTALL_S)
    (tmp_path / "checks.mjs").write_bytes((HERE / "interpreter_checks.mjs").read_bytes())
    (tmp_path / "node_modules").symlink_to(clients / "node" / "node_modules")
    said = await output(interpreter, "node", tmp_path / "checks.mjs", folder=tmp_path)
    assert json.loads(said.splitlines()[-1]) == {
        "state": "2",
        "lines": ["err\n", "out\n"],
        "text": "text",
        "error": ["ZeroDivisionError", "division by zero", True],
        "png": "PNG",
        "html": True,
        "env": "b",
        "context": "/tmp",
        "contexts": 2,
        "restarted": "NameError",
        "removed": 1,
    }
