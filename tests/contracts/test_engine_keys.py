"""An engine with a key: every route but the health check refuses requests without it, and the key is not visible."""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import psutil
import pytest
import pytest_asyncio

from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.cpu_engine.program import CpuEngineConfig, build
from headrace.policies.engine import EngineId, GenerateRequest, RequestId
from headrace.policies.errors import EngineRefused, EngineStartFailed
from headrace.policies.processes.server_process import EngineProcess, EngineProcessConfig, ServerProcess
from headrace.policies.sglang.client import SGLangConfig, SGLangEngine
from headrace.sandboxes.host.key_files import make_key, read_key
from support.engine_kinds import engine_process

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
ROUTES = (
    *(("POST", path) for path in ("/generate", "/abort_request", "/pause_generation", "/update_weights_from_disk")),
    *(("POST", path) for path in ("/begin_weight_update", "/init_weights_update_group", "/weights_checker")),
    *(("GET", path) for path in ("/model_info", "/server_info", "/v1/loads")),
)
"""Routes of both kinds of engine that a push or a turn uses."""
CLIENT = SGLangConfig(vocab_size=258)


class Keyed:
    """A running engine, its key and calls of it."""

    def __init__(self, process: ServerProcess, key: str, session: aiohttp.ClientSession) -> None:
        self.process, self.key, self.session = process, key, session

    async def status(self, method: str, path: str, header: str | None) -> tuple[int, str]:
        headers = {} if header is None else {"Authorization": header}
        async with self.session.request(method, self.process.url + path, headers=headers) as response:
            return response.status, await response.text()

    def client(self, key: str | None) -> SGLangEngine:
        return SGLangEngine(EngineId("e"), self.process.url, self.session, CLIENT, key=key)


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["cpu", pytest.param("sglang", marks=pytest.mark.sglang)]
)
async def keyed(
    request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Keyed]:
    folder = tmp_path_factory.mktemp("keyed")
    make_key(folder / "key")
    async with (
        engine_process(request.param, tiny_model_dir, folder / "engine", key_file=folder / "key") as process,
        aiohttp.ClientSession() as session,
    ):
        yield Keyed(process, read_key(folder / "key", "key"), session)


async def test_requests_without_the_key_are_refused_and_have_no_effect(keyed: Keyed) -> None:
    headers = (None, "", "Bearer", "Bearer wrong", f"Bearer {keyed.key}0", f"Bearer {keyed.key[:-1]}", keyed.key)
    for method, path in ROUTES:
        for header in headers:
            status, text = await keyed.status(method, path, header)
            assert status == 401, (path, header, text)
            assert text.startswith("{")
            assert keyed.key not in text
    load = await keyed.client(keyed.key).load()
    assert (load.running, load.waiting) == (0, 0)
    assert not (await keyed.client(keyed.key).info()).paused


async def test_the_health_check_needs_no_key(keyed: Keyed) -> None:
    assert (await keyed.status("GET", "/health", None))[0] == 200


async def test_the_client_sends_the_key_with_every_call(keyed: Keyed) -> None:
    client = keyed.client(keyed.key)
    request = GenerateRequest(request_id=RequestId("r"), input_ids=(1, 2), max_new_tokens=3)
    assert (await client.generate(request)).output_ids
    await client.relabel(PolicyVersion(1, 4))
    assert (await client.info()).version == PolicyVersion(1, 4)


@pytest.mark.parametrize("key", [None, "0123456789abcdef"])
async def test_the_error_of_a_wrong_key_names_the_setting_and_not_the_key(keyed: Keyed, key: str | None) -> None:
    with pytest.raises(EngineRefused, match=r"set engines\.key_file .*--engine-key-file") as refused:
        await keyed.client(key).load()
    assert refused.value.status == 401
    assert "0123456789abcdef" not in str(refused.value)


async def test_no_argument_and_no_variable_has_the_key(keyed: Keyed) -> None:
    process = psutil.Process(keyed.process.pid)
    for member in (process, *process.children(recursive=True)):
        assert keyed.key not in " ".join(member.cmdline())
        assert keyed.key not in " ".join(member.environ().values())
    for path in keyed.process.log_path.parent.iterdir():
        if path.is_file() and keyed.key in path.read_text(errors="replace"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE(keyed.process.log_path.stat().st_mode) == 0o600


async def test_every_route_of_the_embedded_engine_checks_the_key(tiny_model_dir: Path, tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    _, server = build(CpuEngineConfig(model=tiny_model_dir, key_file=tmp_path / "key"))
    routes = [
        (route.method, route.resource.canonical) for route in server.application().router.routes() if route.resource
    ]
    assert len(routes) > 25
    config = EngineProcessConfig(model=tiny_model_dir, directory=tmp_path, key_file=tmp_path / "key")
    async with EngineProcess(config) as process, aiohttp.ClientSession() as session:
        keyed = Keyed(process, read_key(tmp_path / "key", "key"), session)
        for method, path in (*routes, ("GET", "/nothing"), ("POST", "/health/"), ("GET", "/health/../model_info")):
            status, text = await keyed.status(method, path, None)
            assert status == (200 if path == "/health" else 401), (method, path, text)


async def test_an_engine_with_an_unusable_key_file_does_not_start(tiny_model_dir: Path, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    make_key(key_file)
    key_file.chmod(0o644)
    config = EngineProcessConfig(model=tiny_model_dir, directory=tmp_path, key_file=key_file)
    with pytest.raises(EngineStartFailed, match=f"other users can read it .*chmod 600 {key_file}"):
        await EngineProcess(config).start()
    opened = EngineProcessConfig(model=tiny_model_dir, directory=tmp_path, host="0.0.0.0")
    with pytest.raises(EngineStartFailed, match=r"--host 0\.0\.0\.0.*--key-file"):
        await EngineProcess(opened).start()
    assert not (tmp_path / "engine.log").exists(), "nothing was started"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def loading(
    tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[SGLangEngine, Path]]:
    """An engine without a key, and the one folder from which it may load weights."""
    folder = tmp_path_factory.mktemp("loading")
    config = EngineProcessConfig(model=tiny_model_dir, directory=folder / "engine", weights=(folder / "snapshots",))
    async with EngineProcess(config) as process, aiohttp.ClientSession() as session:
        yield SGLangEngine(EngineId("e"), process.url, session, CLIENT), folder / "snapshots"


async def test_weights_are_loaded_from_the_named_folders(
    loading: tuple[SGLangEngine, Path], tiny_model_dir: Path, write_model: Callable[..., Path]
) -> None:
    engine, named = loading
    # The folder may appear after the engine has started.
    await engine.update_from_disk(write_model(named / "1.1", seed=1), version=PolicyVersion(1, 1))
    assert (await engine.info()).version == PolicyVersion(1, 1)
    await engine.update_from_disk(tiny_model_dir, version=PolicyVersion(1, 0))
    assert (await engine.info()).version == PolicyVersion(1, 0)


async def test_weights_of_other_folders_are_refused_also_through_links(
    loading: tuple[SGLangEngine, Path], tmp_path: Path, write_model: Callable[..., Path]
) -> None:
    engine, named = loading
    before = await engine.checksums()
    outside = write_model(tmp_path / "outside", seed=2)
    (named / "folder").parent.mkdir(exist_ok=True)
    (named / "folder").symlink_to(outside)
    files = write_model(named / "files", seed=3)
    (files / "model.safetensors").unlink()
    (files / "model.safetensors").symlink_to(outside / "model.safetensors")
    beside = write_model(named.with_name("snapshots-of-others"), seed=4)
    dotted = named / ".." / beside.name
    for path in (outside, named / "folder", files, beside, dotted, tmp_path / "nothing", named / os.pardir):
        with pytest.raises(EngineRefused, match="is in none of the folders from which this engine may load") as refused:
            await engine.update_from_disk(path, version=PolicyVersion(9, 9))
        assert refused.value.status == 400
        assert "--weights" in str(refused.value)
        assert "\n" not in str(refused.value)
    assert await engine.checksums() == before
    assert (await engine.info()).version != PolicyVersion(9, 9)
