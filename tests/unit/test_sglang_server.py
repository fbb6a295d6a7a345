"""The life of a server process, with a small program in the place of SGLang's python."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from headrace.policies.errors import EngineStartFailed
from headrace.policies.sglang.server import SGLangProcess, SGLangServerConfig, server_environment, shares_of
from headrace.sandboxes.host.key_files import make_key, read_key
from support.sglang_sources import write_sglang_sources

PROGRAM = """#!{python}
import http.server, json, os, signal, subprocess, sys, time
from pathlib import Path

folder, arguments = Path({folder!r}), sys.argv[1:]
if arguments[:2] == ["-I", "-c"]:
    print("0.5.23", folder / "sglang", sep="\\n")
    sys.exit()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
starts = folder / "starts"
with starts.open("a") as file:
    file.write("x")
partial = folder / "seen.partial"
partial.write_text(json.dumps(dict(pids=[os.getpid(), child.pid], arguments=arguments, environment=dict(os.environ))))
partial.rename(folder / "seen.json")
options = dict(zip(arguments, arguments[1:]))
behaviour = options.get("--behaviour")
if behaviour == "lose-port" and starts.stat().st_size == 1:
    sys.exit("[Errno 98] error while attempting to bind: address already in use")
if behaviour == "crash":
    sys.exit("the model is too large")
if behaviour == "silent":
    time.sleep(600)
if behaviour == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()


http.server.HTTPServer((options["--host"], int(options["--port"])), Handler).serve_forever()
"""
PARENT = """
import asyncio, sys
from pathlib import Path
from headrace.policies.sglang.server import SGLangProcess, SGLangServerConfig

async def main():
    async with SGLangProcess(SGLangServerConfig.model_validate_json(sys.argv[1])):
        await asyncio.Event().wait()

asyncio.run(main())
"""


class Rig:
    """Configs of servers in one folder, and what the program saw."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "python"
        program.write_text(PROGRAM.format(python=sys.executable, folder=str(folder)))
        program.chmod(0o755)
        write_sglang_sources(folder / "sglang")
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")

    def config(self, behaviour: str = "", **more: Any) -> SGLangServerConfig:
        arguments = ("--behaviour", behaviour) if behaviour else ()
        given = {"model": self.folder / "model", "directory": self.folder, "python": self.folder / "python"}
        return SGLangServerConfig.model_validate(given | {"arguments": arguments, "start_timeout_s": 30.0} | more)

    @property
    def seen(self) -> dict[str, Any]:
        seen: dict[str, Any] = json.loads((self.folder / "seen.json").read_text())
        return seen

    async def until_started(self) -> None:
        await until(lambda: (self.folder / "seen.json").exists())

    async def until_gone(self) -> None:
        """The server and its child: nobody of them is left but perhaps as a zombie of somebody else's."""
        await until(lambda: not any(map(is_running, self.seen["pids"])))


async def until(condition: Callable[[], bool]) -> None:
    """Other processes' doings: nothing here is told of them."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


async def test_a_server_starts_responds_and_leaves_nothing_behind(rig: Rig) -> None:
    async with SGLangProcess(rig.config(seed=7, max_context=64, tensor_parallel=2)) as server:
        assert server.alive
        seen = rig.seen
        assert server.pid == seen["pids"][0]
        options = dict(zip(seen["arguments"], seen["arguments"][1:], strict=False))
        assert server.url == f"http://127.0.0.1:{options['--port']}"
        assert (options["--random-seed"], options["--context-length"], options["--tp-size"]) == ("7", "64", "2")
        assert options["--device"] == "cpu"
        assert "--cuda-graph-backend-decode" in options
        assert "--max-running-requests" not in options
        assert psutil.Process(server.pid).children(recursive=True)
    assert not server.alive
    await rig.until_gone()
    await server.stop()
    await server.kill()


async def test_a_hung_interpreter_counts_as_a_failed_start(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    (rig.folder / "python").write_text("#!/bin/bash\nexec sleep 600\n")
    monkeypatch.setattr("headrace.policies.sglang.server.ASK_TIMEOUT_S", 0.1)
    with pytest.raises(EngineStartFailed, match="did not report its version"):
        await SGLangProcess(rig.config()).start()


async def test_a_server_inherits_only_the_listed_variables(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"PYTHONPATH": "/leak", "HTTP_PROXY": "http://leak", "RAY_X": "leak", "NCCL_DEBUG": "INFO"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    async with SGLangProcess(rig.config()):
        environment = rig.seen["environment"]
    assert "leak" not in json.dumps(environment)
    assert environment["NCCL_DEBUG"] == "INFO"
    assert environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"
    assert environment["PATH"] == os.environ["PATH"]
    assert environment["PYTHONPATH"].endswith("shims")
    assert "PYTHONPATH" not in server_environment(rig.config(device="cuda"))
    assert "SGLANG_CPU_OMP_THREADS_BIND" in server_environment(rig.config(tensor_parallel=2))


async def test_a_server_gets_its_key_in_a_private_file(rig: Rig) -> None:
    key_file = rig.folder / "key"
    make_key(key_file)
    key = read_key(key_file, "key")
    async with SGLangProcess(rig.config(key_file=key_file)) as server:
        seen = rig.seen
        assert key not in json.dumps(seen)
        options = dict(zip(seen["arguments"], seen["arguments"][1:], strict=False))
        config = rig.folder / "sglang.yaml"
        assert options["--config"] == str(config)
        # SGLang reads only files with this suffix, and takes each key of the document for an option.
        assert yaml.safe_load(config.read_text()) == {"api-key": key}
        # It writes all its options to the log.
        assert {stat.S_IMODE(path.stat().st_mode) for path in (config, server.log_path)} == {0o600}


@pytest.mark.parametrize("option", ["--api-key", "--config", "--admin-api-key=other"])
async def test_options_that_contradict_the_key_are_refused(rig: Rig, option: str) -> None:
    key_file = rig.folder / "key"
    make_key(key_file)
    config = rig.config(key_file=key_file).model_copy(update={"arguments": (option, "value")})
    with pytest.raises(EngineStartFailed, match=f"{option.split('=')[0]} cannot be combined with a key file"):
        await SGLangProcess(config).start()
    assert not (rig.folder / "starts").exists()


async def test_a_server_on_another_address_needs_a_key(rig: Rig) -> None:
    with pytest.raises(EngineStartFailed, match=r"--host 0\.0\.0\.0.*--key-file"):
        await SGLangProcess(rig.config(host="0.0.0.0")).start()
    assert not (rig.folder / "starts").exists()


def test_ranks_share_the_cores() -> None:
    assert shares_of({0, 1, 2, 3}, 2) == "0,2|1,3"
    assert shares_of({5}, 2) == "5|5"


async def test_a_server_that_ignores_sigterm_is_killed_with_its_children(rig: Rig) -> None:
    async with SGLangProcess(rig.config("deaf", stop_timeout_s=0.2)) as server:
        pass
    assert await server.wait() == -signal.SIGKILL
    await rig.until_gone()


async def test_children_of_a_dead_server_are_killed(rig: Rig) -> None:
    async with SGLangProcess(rig.config()) as server:
        os.kill(server.pid, signal.SIGKILL)
        assert await server.wait() == -signal.SIGKILL
        await rig.until_gone()


@pytest.mark.parametrize("behaviour", ["", "silent"])
async def test_a_server_dies_whenever_its_parent_is_killed(rig: Rig, behaviour: str) -> None:
    config = rig.config(behaviour).model_dump_json()
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, config)
    await rig.until_started()
    assert all(map(is_running, rig.seen["pids"]))
    parent.kill()
    await parent.wait()
    await rig.until_gone()


async def test_the_server_retries_on_another_port_if_its_port_was_taken(rig: Rig) -> None:
    async with SGLangProcess(rig.config("lose-port")) as server:
        assert server.alive
    assert (rig.folder / "starts").read_text() == "xx"


async def test_a_configured_port_is_not_replaced(rig: Rig) -> None:
    with pytest.raises(EngineStartFailed, match="address already in use"):
        await SGLangProcess(rig.config("lose-port", port=1)).start()
    assert (rig.folder / "starts").read_text() == "x"


async def test_a_server_that_exits_or_does_not_respond_fails_to_start(rig: Rig) -> None:
    with pytest.raises(EngineStartFailed, match=r"exited with 1.*the model is too large"):
        await SGLangProcess(rig.config("crash")).start()
    with pytest.raises(EngineStartFailed, match=r"start_timeout_s=0\.5"):
        await SGLangProcess(rig.config("silent", start_timeout_s=0.5)).start()
    await rig.until_gone()


async def test_invalid_settings_are_reported_before_the_start(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineStartFailed, match=r"no config\.json"):
        await SGLangProcess(rig.config(model=rig.folder)).start()
    with pytest.raises(EngineStartFailed, match="is not executable"):
        await SGLangProcess(rig.config(python=rig.folder / "nothing")).start()
    with pytest.raises(EngineStartFailed, match="has no SGLang"):
        await SGLangProcess(rig.config(python=sys.executable)).start()
    monkeypatch.setenv("XDG_CACHE_HOME", str(rig.folder))
    with pytest.raises(EngineStartFailed, match=r"python -m headrace\.policies\.sglang\.installation"):
        await SGLangProcess(rig.config(python=None)).start()
    assert not (rig.folder / "starts").exists()
