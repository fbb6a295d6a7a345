"""`headrace serve gateway` as its users start it: one line with its address, one line for an error, a clean
shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import sys
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headrace.actors.run.exit_codes import EXIT_BAD_INPUT, EXIT_TRANSIENT
from headrace.policies.processes.server_process import EngineProcess, EngineProcessConfig
from headrace.sandboxes.host.key_files import make_key
from support.gateway_rig import GUARD_S, Engine, Lines, serving
from support.group_rig import TINY

pytestmark = pytest.mark.core

HEADRACE = str(Path(sys.executable).with_name("headrace"))
START_S = 60.0
ASKED = {"model": "any", "max_tokens": 100, "messages": [{"role": "user", "content": "go"}]}


async def start(*options: str) -> Process:
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        HEADRACE, "serve", "gateway", *options, env=environment, stdout=pipe, stderr=pipe
    )


async def refusal(*options: str) -> tuple[int | None, str]:
    process = await start(*options)
    async with asyncio.timeout(START_S):
        _, said = await process.communicate()
    return process.returncode, said.decode()


async def test_the_standalone_gateway_serves_from_its_first_output_line_until_shutdown(
    model_dir: Path, tmp_path: Path
) -> None:
    token_file = tmp_path / "secrets" / "token"
    async with serving(Engine.of(model_dir, "<|im_end|>", Lines("Hello."))) as engine, aiohttp.ClientSession() as http:
        process = await start(
            *("--engine", engine.url, "--tokenizer", str(model_dir), "--json", "-"),
            *("--admin-token-file", str(token_file), "--advertise-url", "http://gateway.example:80"),
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(START_S):
                url = json.loads(await process.stdout.readline())["url"]
            assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
            admin = {"Authorization": f"Bearer {token_file.read_text().strip()}"}

            async def post(path: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, Any]:
                async with http.post(url + path, json=body, headers=headers) as response:
                    return response.status, await response.json()

            status, opened = await post("/sessions", {"session_id": "mine"}, admin)
            assert status == 200
            assert opened["base_url"].startswith("http://gateway.example:80/s/"), "for agents on another host"
            assert (await post("/sessions", {"session_id": "mine"}, admin))[0] == 409
            assert (await post("/sessions", {}, {"Authorization": "Bearer wrong"}))[0] == 401
            path = opened["base_url"].removeprefix("http://gateway.example:80")
            status, answer = await post(f"{path}/v1/messages", ASKED, {})
            assert (status, answer["content"][0]["text"]) == (200, "Hello.")
            status, report = await post("/sessions/mine/finish", {"tree": True}, admin)
            [row], [sampled] = report["rows"], engine.sampled
            assert row["tokens"] == [*sampled.prompt_ids, *sampled.output_ids]
            assert sum(row["loss_mask"]) == report["trained_tokens"] == report["sampled_tokens"]
            assert report["tree"]
            assert (await post(f"{path}/v1/messages", ASKED, {}))[0] == 400, "a closed session"
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(GUARD_S):
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.whole
async def test_a_startup_error_is_reported_in_one_line(model_dir: Path, tmp_path: Path) -> None:
    token = str(tmp_path / "token")
    async with serving(Engine.of(model_dir, "<|im_end|>", Lines("Hello."))) as engine:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            common = ("--tokenizer", str(model_dir), "--admin-token-file", token)
            port = str(taken.getsockname()[1])
            code, said = await refusal("--engine", engine.url, *common, "--port", port)
        assert (code, len(said.splitlines())) == (EXIT_BAD_INPUT, 1), said
        assert f"--port {port}" in said
        assert "address already in use" in said
        (tmp_path / "file").touch()
        state = ("--state", str(tmp_path / "file" / "sessions"))
        code, said = await refusal("--engine", engine.url, *common, *state)
        assert (code, len(said.splitlines())) == (EXIT_BAD_INPUT, 1), said
        assert "--state" in said
        export = tmp_path / "file" / "exports"
        code, said = await refusal("--engine", engine.url, *common, "--export", str(export))
        assert (code, len(said.splitlines())) == (EXIT_BAD_INPUT, 1), said
        assert f"--export {export}: " in said
        code, said = await refusal("--engine", engine.url, *common, "--export-form", "parquet")
        assert code == EXIT_BAD_INPUT
        assert "'parquet' is not one of 'rows', 'atif', 'rollout-details'" in said
        code, said = await refusal("--engine", "http://127.0.0.1:9", *common)
        assert (code, len(said.splitlines())) == (EXIT_TRANSIENT, 1), said
        assert "nothing is listening at http://127.0.0.1:9" in said
        assert "ClientConnectorError" not in said
        code, said = await refusal("--engine", engine.url, "--tokenizer", str(tmp_path), "--admin-token-file", token)
        assert code != 0
        assert "tokenizer.json" in said
        assert "Traceback" not in said
        (tmp_path / "token").chmod(0o644)
        code, said = await refusal("--engine", engine.url, *common)
        assert (code, len(said.splitlines())) == (EXIT_BAD_INPUT, 1), said
        assert f"--admin-token-file {token}: other users can read it (mode 644); chmod 600 {token}" in said


async def test_the_gateway_sends_the_key_of_its_engines(tmp_path: Path) -> None:
    make_key(key_file := tmp_path / "key")
    common = ("--tokenizer", str(TINY), "--admin-token-file", str(tmp_path / "token"), "--json", "-")
    config = EngineProcessConfig(model=TINY, directory=tmp_path, key_file=key_file)
    async with EngineProcess(config) as engine, aiohttp.ClientSession() as http:
        code, said = await refusal("--engine", engine.url, *common)
        assert (code != 0, len(said.splitlines())) == (True, 1), said
        assert "--engine-key-file" in said
        process = await start("--engine", engine.url, *common, "--engine-key-file", str(key_file))
        try:
            assert process.stdout is not None
            async with asyncio.timeout(START_S):
                url = json.loads(await process.stdout.readline())["url"]
            admin = {"Authorization": f"Bearer {(tmp_path / 'token').read_text().strip()}"}
            opening = {"session_id": "mine", "budgets": {"max_tokens_per_turn": 4}}
            async with http.post(f"{url}/sessions", json=opening, headers=admin) as response:
                assert response.status == 200, await response.text()
                base = (await response.json())["base_url"]
            async with http.post(f"{base}/v1/messages", json=ASKED | {"max_tokens": 4}) as response:
                assert response.status == 200, await response.text()
        finally:
            process.terminate()
            await process.wait()


async def test_an_engine_key_file_that_others_can_read_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    make_key(key_file := tmp_path / "key")
    key_file.chmod(0o644)
    common = ("--tokenizer", str(tiny_model_dir), "--admin-token-file", str(tmp_path / "token"))
    code, said = await refusal("--engine", "http://127.0.0.1:9", *common, "--engine-key-file", str(key_file))
    assert (code, len(said.splitlines())) == (EXIT_BAD_INPUT, 1), said
    assert f"--engine-key-file {key_file}: other users can read it" in said
