"""`headrace serve engine` as a program."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest

from headrace.sandboxes.host.key_files import make_key, read_key

COMMAND = (sys.executable, "-c", "from headrace.actors.cli.app import main; main()", "serve", "engine")


@asynccontextmanager
async def started(*options: object, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command; killed at the end if it still runs."""
    pipe = asyncio.subprocess.PIPE
    given = os.environ | environment
    process = await asyncio.create_subprocess_exec(*COMMAND, *map(str, options), stdout=pipe, stderr=pipe, env=given)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def ended(*options: object, **environment: str) -> tuple[int | None, str]:
    """Exit code and standard error of a command that must end."""
    async with started(*options, **environment) as process, asyncio.timeout(60):
        output, errors = await process.communicate()
    assert output == b""
    return process.returncode, errors.decode()


@pytest.mark.parametrize("backend", ["cpu", pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.slow])])
@pytest.mark.timeout(300)
async def test_the_server_prints_its_url_and_exits_on_sigterm(
    backend: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    if backend == "sglang":
        from headrace.policies.sglang.installation import environment_python

        if environment_python() is None:
            pytest.skip("SGLang is not installed: scripts/install sglang")
    announced = tmp_path / "announced.json"
    options = ("--backend", backend, "--model", tiny_model_dir, "--weight-version", "1.7", "--max-context", 512)
    async with started(*options, "--json", announced, "--directory", tmp_path) as process:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        async with aiohttp.ClientSession() as session, session.get(f"{url}/model_info") as response:
            assert (await response.json())["weight_version"] == "1.7"
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        assert json.loads(announced.read_text()) == {"url": url, "pid": process.pid}
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            output, _ = await process.communicate()
    assert (process.returncode, output) == (0, b"")
    assert not any(map(is_running, children))


def is_running(process: psutil.Process) -> bool:
    """Not gone, and no zombie of somebody else's."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_second_signal_during_shutdown_has_no_effect(tiny_model_dir: Path) -> None:
    async with started("--model", tiny_model_dir) as process:
        assert process.stdout is not None
        await process.stdout.readline()
        [engine] = psutil.Process(process.pid).children()
        # It cannot end by itself: there is time for more signals.
        engine.suspend()
        async with asyncio.timeout(60):
            while engine.status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110
                # Until it stands still it would take a SIGTERM before the signal that stops it.
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            while not is_pending(engine.pid, signal.SIGTERM):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
            _, errors = await process.communicate()
    assert process.returncode == 0
    assert "Traceback" not in errors.decode()
    assert not is_running(engine)


def is_pending(pid: int, number: signal.Signals) -> bool:
    """The signal was sent and not taken yet."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [pending] = [line.split()[1] for line in lines if line.startswith("ShdPnd")]
    return bool(int(pending, 16) >> (number - 1) & 1)


async def test_a_directory_without_a_model_is_a_one_line_error(tmp_path: Path) -> None:
    code, said = await ended("--backend", "cpu", "--model", tmp_path)
    assert (code, said.count("\n")) == (2, 1)
    assert "no config.json" in said


async def test_a_missing_environment_is_a_one_line_error(tiny_model_dir: Path, tmp_path: Path) -> None:
    options = ("--backend", "sglang", "--model", tiny_model_dir)
    code, said = await ended(*options, XDG_CACHE_HOME=str(tmp_path))
    assert (code, said.count("\n")) == (2, 1)
    assert "python -m headrace.policies.sglang.installation" in said


async def test_a_port_in_use_is_a_one_line_error(tiny_model_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = ("--backend", "sglang", "--model", tiny_model_dir, "--port", taken.getsockname()[1])
        code, said = await ended(*options)
    assert (code, said.count("\n")) == (2, 1)
    assert "is taken" in said


async def test_an_invalid_option_is_a_one_line_error(tiny_model_dir: Path) -> None:
    code, said = await ended("--backend", "sglang", "--model", tiny_model_dir, "--dtype", "int3")
    assert (code, said.count("\n")) == (2, 1)
    assert "--dtype" in said


async def test_sglang_settings_are_refused_for_the_embedded_engine(tiny_model_dir: Path) -> None:
    options = ("--device", "cuda", "--tensor-parallel", 2, "--dtype", "bfloat16", "--python", sys.executable)
    code, said = await ended("--model", tiny_model_dir, *options, "--", "--enable-metrics")
    assert (code, said.count("\n")) == (2, 1)
    for name in ("--device", "--tensor-parallel", "--dtype", "--python", "-- --enable-metrics", "--backend sglang"):
        assert name in said


async def test_an_engine_that_exits_is_reported(tiny_model_dir: Path) -> None:
    async with started("--model", tiny_model_dir) as process:
        assert process.stdout is not None
        await process.stdout.readline()
        [engine] = psutil.Process(process.pid).children()
        engine.kill()
        async with asyncio.timeout(60):
            _, errors = await process.communicate()
    assert process.returncode == 1
    assert "exited by itself with code -9" in errors.decode()


async def test_the_server_asks_for_the_key_in_its_file(tiny_model_dir: Path, tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    async with started("--model", tiny_model_dir, "--key-file", tmp_path / "key", "--host", "0.0.0.0") as process:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        header = {"Authorization": f"Bearer {read_key(tmp_path / 'key', 'key')}"}
        async with aiohttp.ClientSession() as session:
            for headers, expected in (({}, 401), (header, 200)):
                async with session.get(f"{url}/model_info", headers=headers) as response:
                    assert response.status == expected
        process.send_signal(signal.SIGTERM)
        await process.communicate()


@pytest.mark.parametrize("backend", ["cpu", "sglang"])
async def test_another_address_than_loopback_without_a_key_is_refused_in_one_line(
    tiny_model_dir: Path, backend: str
) -> None:
    code, said = await ended("--backend", backend, "--model", tiny_model_dir, "--host", "0.0.0.0")
    assert (code, said.count("\n")) == (2, 1), said
    assert "--host 0.0.0.0" in said
    assert "--key-file" in said


async def test_a_key_file_that_others_can_read_is_refused_in_one_line(tiny_model_dir: Path, tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o644)
    code, said = await ended("--model", tiny_model_dir, "--key-file", tmp_path / "key")
    assert (code, said.count("\n")) == (2, 1), said
    assert f"chmod 600 {tmp_path / 'key'}" in said


async def test_folders_of_weights_are_refused_for_sglang(tiny_model_dir: Path, tmp_path: Path) -> None:
    code, said = await ended("--backend", "sglang", "--model", tiny_model_dir, "--weights", tmp_path)
    assert (code, said.count("\n")) == (2, 1), said
    assert "--weights" in said


async def test_weights_are_loaded_from_the_folders_that_were_named(
    tiny_model_dir: Path, tmp_path: Path, write_model: Callable[..., Path]
) -> None:
    first, second, other = (write_model(tmp_path / name / "model", seed=1) for name in ("a", "b", "c"))
    async with started("--model", tiny_model_dir, "--weights", first.parent, "--weights", second.parent) as process:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        async with aiohttp.ClientSession() as session:
            for path, expected in ((first, 200), (second, 200), (other, 400)):
                body = {"model_path": str(path)}
                async with session.post(f"{url}/update_weights_from_disk", json=body) as response:
                    assert response.status == expected
