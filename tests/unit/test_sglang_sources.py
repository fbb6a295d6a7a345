"""What headrace sends, against the classes of an installed SGLang; loaders that keep tensors."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId, GenerateRequest, Grammar, GrammarKind, PauseMode, RequestId
from headrace.policies.errors import EngineError, EngineSettingsInvalid
from headrace.policies.sglang.client import SGLangConfig, SGLangEngine
from headrace.policies.sglang.installation import environment_directory
from headrace.policies.sglang.server import SGLangServerConfig, server_environment
from headrace.policies.sglang.sources import KEEPING_LOADERS, REQUESTS, VARIABLES, check_sources, keeping_loaders
from headrace.policies.sglang.versions import DEFAULT_VERSION
from headrace.policies.tensors import Bucket, TensorSpec
from support.sglang_sources import write_sglang_sources

KEEPING = """
class NewForCausalLM:
    def load_weights(self, weights):
        params_dict = dict(self.named_parameters())
        halves = {} if self.config.q_lora_rank else None
        for name, loaded_weight in weights:
            if "q_a_proj" in name:
                halves[name] = loaded_weight
            else:
                params_dict[name].weight_loader(params_dict[name], loaded_weight)


EntryClass = [NewForCausalLM]
"""


async def test_every_field_that_the_client_sends_is_in_the_table() -> None:
    sent: dict[str, set[str]] = defaultdict(set)

    async def answer(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"version": DEFAULT_VERSION})
        sent[request.path].update(json.loads(await request.read() or b"{}"))
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    [address] = runner.addresses
    version, one = PolicyVersion(1, 1), Bucket.of({"a": TensorSpec(dtype="float32", shape=(1,))})
    request = GenerateRequest(
        request_id=RequestId("r"),
        input_ids=(1,),
        max_new_tokens=1,
        cache_namespace="1.1",
        grammar=Grammar(kind=GrammarKind.JSON_SCHEMA, text="{}"),
    )
    try:
        async with aiohttp.ClientSession() as session:
            client = SGLangEngine(EngineId("e"), f"http://127.0.0.1:{address[1]}", session, SGLangConfig(vocab_size=9))
            await client.join_group("g", host="h", port=1, rank=1, world_size=2, backend="gloo")
            for call in (
                client.generate(request),
                client.abort(RequestId("r")),
                client.pause(PauseMode.RETRACT),
                client.resume(),
                client.begin_update(),
                client.update(one, group="g", version=version),
                client.update_from_disk(Path("/model"), version=version),
                client.relabel(version),
                client.end_update(),
                client.leave_group("g"),
                client.flush(),
                client.checksums(),
            ):
                try:
                    await call
                except EngineError:
                    # Its answer is empty.
                    continue
    finally:
        await runner.cleanup()
    assert {path: fields for path, fields in sent.items() if fields} == {
        path: set(text.split()[1:]) for path, text in REQUESTS.items()
    }


def test_every_variable_of_sglang_that_servers_get_is_in_the_table() -> None:
    config = SGLangServerConfig.model_validate({"model": "/model", "directory": "/run", "tensor_parallel": 2})
    given = {name for name in server_environment(config) if name.startswith("SGLANG_")}
    assert given == set(VARIABLES)


@pytest.mark.parametrize(
    ("file", "old", "said"),
    [
        ("srt/managers/io_struct.py", "    abort_all_requests: object\n", r"\.abort_all_requests \(/update_weights"),
        ("srt/managers/io_struct.py", "    extra_key: object\n", r"GenerateReqInput\.extra_key \(/generate\)"),
        ("srt/managers/io_struct.py", "class AbortReq", r"AbortReq\.rid"),
        ("srt/environ.py", "SGLANG_TIMEOUT_KEEP_ALIVE", "SGLANG_TIMEOUT_KEEP_ALIVE"),
    ],
)
def test_an_sglang_that_would_ignore_something_is_refused(tmp_path: Path, file: str, old: str, said: str) -> None:
    package = write_sglang_sources(tmp_path / "sglang")
    text = (package / file).read_text()
    (package / file).write_text(text.replace(old, "class Other" if old.startswith("class") else "", 1))
    refused = rf"would ignore what headrace sends: .*{said}.*; set engines\.sglang\.python"
    with pytest.raises(EngineSettingsInvalid, match=refused):
        check_sources(package)


def test_inherited_fields_count(tmp_path: Path) -> None:
    package = write_sglang_sources(tmp_path / "sglang")
    structs = package / "srt" / "managers" / "io_struct.py"
    text = structs.read_text().replace("class AbortReq:\n    rid: object\n", "class AbortReq(Base):\n    pass\n")
    structs.write_text("class Base:\n    rid: object\n\n" + text)
    check_sources(package)


def test_a_package_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    package = write_sglang_sources(tmp_path / "sglang")
    (package / "srt" / "managers" / "io_struct.py").write_text("class")
    with pytest.raises(EngineSettingsInvalid, match="cannot be read"):
        check_sources(package)


def test_a_new_loader_that_keeps_tensors_is_a_warning_with_its_models(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    package = write_sglang_sources(tmp_path / "sglang")
    models = package / "srt" / "models"
    (models / "new.py").write_text(KEEPING)
    (models / "glm4_moe_lite.py").write_text(KEEPING)
    (models / "plain.py").write_text(KEEPING.replace("halves[name] = loaded_weight", "halves[name] = 1"))
    check_sources(package)
    [warning] = caplog.messages
    assert "the loader new.py of NewForCausalLM keeps tensors" in warning


@pytest.mark.sglang
def test_the_keeping_loaders_of_the_installed_version_are_known() -> None:
    packages = list(environment_directory(DEFAULT_VERSION).glob("lib/python*/site-packages/sglang"))
    if not packages:
        pytest.skip("SGLang is not installed: scripts/install sglang")
    check_sources(packages[0])
    found = keeping_loaders(packages[0] / "srt" / "models").keys()
    assert {"glm4_moe_lite.py", "deepseek_common/deepseek_weight_loader.py", "longcat_flash.py"} <= found
    assert found <= KEEPING_LOADERS
