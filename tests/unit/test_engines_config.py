"""Engine settings that cannot work are refused with the key, the reason and the fix; what commands tell of engines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import aiohttp
import orjson
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from headrace.actors.cli.app import app
from headrace.actors.engines.config import EnginesConfig
from headrace.actors.engines.fleet import EngineContext, Fleet
from headrace.actors.engines.host import ServerPlan, server_process
from headrace.actors.engines.members_file import EngineStatus, Roster
from headrace.actors.engines.registry import EngineRegistry, EngineState, Origin
from headrace.actors.errors import ConfigError, RunMissing
from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.run.config import load_recipe
from headrace.actors.run.launch import RunRequest, prepare
from headrace.actors.run.run_status import status_of
from headrace.policies.engine import EngineId
from headrace.policies.processes.server_process import EngineProcess
from headrace.policies.push.contract import PushConfig
from headrace.policies.sglang.server import SGLangProcess, server_arguments, server_environment
from headrace.serve.tracing.telemetry import TelemetryConfig

QUIET = ActorTelemetry(config=TelemetryConfig(), run_dir=None)
RECIPES = Path(__file__).resolve().parents[2] / "scripts" / "recipes"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"count": 0}, "nothing is attached"),
        ({"attach": ["localhost:30000"]}, "write http://host:port"),
        ({"attach": ["http://h:1/v1"]}, "write http://host:port"),
        ({"attach": ["http://h:x"]}, "write http://host:port"),
        ({"attach": ["http://localhost:1", "http://127.0.0.1:1"]}, "are the same address"),
        ({"device": "cuda"}, "set engines.backend to sglang"),
        ({"tensor_parallel": 2}, "needs SGLang"),
        ({"dtype": "float16"}, "needs SGLang"),
        ({"backend": "sglang", "expert_parallel": 4, "tensor_parallel": 6}, "expert_parallel 4 does not divide"),
        (
            {"backend": "sglang", "data_parallel": 4, "tensor_parallel": 2},
            "data_parallel 4 does not divide engines.tensor_parallel 2",
        ),
        ({"backend": "sglang", "nodes": 3, "tensor_parallel": 4, "placement": "ray"}, "nodes 3 does not divide"),
        (
            {"backend": "sglang", "nodes": 2, "tensor_parallel": 4},
            "nodes 2 needs actors on several hosts: set engines.pl",
        ),
        ({"sglang": {"environment": {"LD_PRELOAD": "x"}}}, r"LD_PRELOAD is not one of SGLANG_\*, FLASHINFER_\*"),
        ({"sglang": {"environment": {"SGLANG_TIMEOUT_KEEP_ALIVE": "5"}}}, "is set by headrace"),
        ({"backend": "simulated", "attach": ["http://h:1"]}, "set engines.backend to cpu"),
    ],
)
def test_invalid_engine_configs_are_rejected(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        EnginesConfig.model_validate(given)


@pytest.mark.parametrize(
    "given",
    [
        {"count": 0, "attach": ["http://h:1"]},
        {"count": 0, "router": "http://h:1", "device": "cuda"},
        {"backend": "sglang", "device": "cuda", "tensor_parallel": 8, "placement": "ray"},
    ],
)
def test_valid_engine_configs_are_accepted(given: dict[str, Any]) -> None:
    config = EnginesConfig.model_validate(given).model_dump(mode="json")
    assert {key: config[key] for key in given} == given


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["push.backend=nccl"], "set engines.device to cuda"),
        (
            ['engines.attach=["http://10.0.0.7:30000"]'],
            "push.host 127.0.0.1 is not reachable from http://10.0.0.7:30000",
        ),
    ],
)
def test_engine_configs_that_conflict_with_the_push_config_are_rejected(
    overrides: list[str], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_recipe(RECIPES / "quickstart.toml", overrides, tmp_path)


def plan_in(folder: Path) -> ServerPlan:
    return ServerPlan(
        name="engine-1", model_dir=folder, directory=folder, seed=7, group_timeout_s=44.0, host="10.0.0.1"
    )


def test_sglang_servers_receive_the_configured_settings(tmp_path: Path) -> None:
    given = {"backend": "sglang", "dtype": "bfloat16", "sglang": {"arguments": ["--enable-metrics"]}}
    process = server_process(EnginesConfig.model_validate(given), plan_in(tmp_path))
    assert isinstance(process, SGLangProcess)
    config = process._config
    assert (config.dtype, config.seed, config.host) == ("bfloat16", 7, "10.0.0.1")
    assert config.arguments == ("--enable-metrics",)


@pytest.mark.parametrize(
    ("version", "groups"),
    [("0.5.23", ("--attn-dp-size", "8")), ("0.5.21", ("--dp-size", "8", "--enable-dp-attention"))],
)
def test_groups_of_attention_and_experts_reach_the_server_and_add_no_devices(
    version: str, groups: tuple[str, ...], tmp_path: Path
) -> None:
    sizes = {"tensor_parallel": 8, "data_parallel": 8, "expert_parallel": 8}
    variables = {
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
        "FLASHINFER_WORKSPACE_BASE": "/tmp/f",
        "TORCHINDUCTOR_CACHE_DIR": "/c",
    }
    given = {"backend": "sglang", "device": "cuda", "count": 2, **sizes, "sglang": {"environment": variables}}
    config = EnginesConfig.model_validate(given)
    assert config.gpus == 16
    process = server_process(config, plan_in(tmp_path))
    assert isinstance(process, SGLangProcess)
    words = server_arguments(process._config, 1, version)
    start = words.index(groups[0])
    assert words[start : start + len(groups)] == groups
    assert words[words.index("--tp-size") + 1] == words[words.index("--ep-size") + 1] == "8"
    assert variables.items() <= server_environment(process._config).items()
    apart = EnginesConfig.model_validate({**given, "nodes": 2, "placement": "ray"})
    assert (apart.gpus, apart.gpus_per_node) == (16, 4)
    part = server_process(apart, replace(plan_in(tmp_path), rank=1, coordinator="10.0.0.1:20000"))
    assert isinstance(part, SGLangProcess)
    words = server_arguments(part._config, 1, version)
    start = words.index("--nnodes")
    assert words[start : start + 6] == ("--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.0.0.1:20000")
    plain = server_process(EnginesConfig.model_validate({"backend": "sglang"}), plan_in(tmp_path))
    assert isinstance(plain, SGLangProcess)
    assert not {"--attn-dp-size", "--ep-size"} & set(server_arguments(plain._config, 1, version))


def test_push_deadlines_reach_the_engines(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Else somebody's default decides: the client's before the push's, the engine's group before the sender's."""
    given = PushConfig(phase_timeout_s=100.0, transfer_timeout_s=200.0)
    context = EngineContext(
        model_dir=tiny_model_dir, directory=tmp_path, seed=1, push=given, runtime=None, observing=QUIET
    )
    # No request is sent through it.
    fleet = Fleet(EnginesConfig(), EngineRegistry(), context, http=cast("aiohttp.ClientSession", None))
    client = fleet._client(EngineId("e"), "http://127.0.0.1:9")._config
    assert client.control_timeout_s > given.phase_timeout_s
    assert client.update_timeout_s > given.transfer_timeout_s
    process = server_process(EnginesConfig(), fleet._plan(EngineId("e"), 1, ()))
    assert isinstance(process, EngineProcess)
    assert process._config.group_timeout_s > given.transfer_timeout_s
    assert str(process._config.group_timeout_s) in process._arguments()


def test_the_vocabulary_may_be_described_in_a_nested_text_config(tmp_path: Path, write_model) -> None:
    model = write_model(tmp_path / "model")
    keys = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({"text_config": keys}))
    context = EngineContext(
        model_dir=model, directory=tmp_path, seed=1, push=PushConfig(), runtime=None, observing=QUIET
    )
    fleet = Fleet(EnginesConfig(), EngineRegistry(), context, http=cast("aiohttp.ClientSession", None))
    assert fleet._client(EngineId("e"), "http://127.0.0.1:9")._config.vocab_size == keys["vocab_size"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that nobody drives, with one engine."""
    config, directory = prepare(RunRequest(recipe=RECIPES / "simulated.toml", runs_dir=tmp_path, name="run"))
    directory.engines.parent.mkdir()
    status = EngineStatus(
        engine_id=EngineId("h:1"),
        origin=Origin.ATTACHED,
        place="h:1",
        state=EngineState.QUARANTINED,
        url="http://h:1",
        version="1.4",
        running=2,
        waiting=1,
        reason="it hangs",
    )
    Roster(engines=(status,)).write(directory.engines)
    state = status_of(config, directory)
    assert (state["engines"][0]["state"], state["ledger_copy"]) == ("quarantined", None)
    return directory.path


@pytest.mark.parametrize("options", [["--engines"], []])
def test_status_shows_the_engines(run: Path, tmp_path: Path, options: list[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ["status", str(run), *options]
    assert CliRunner().invoke(app, [*arguments, "--json", str(out)]).exit_code == 0
    [engine] = orjson.loads(out.read_bytes())["engines"]
    assert (engine["engine_id"], engine["version"], engine["running"]) == ("h:1", "1.4", 2)
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 0
    assert all(word in told.output for word in ("quarantined", "2+1", "it hangs"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--engines"], "--engines needs a run: name its directory, or its id on a cluster"),
        (["RUN", "--engines", "--parked"], "--engines and --parked: one at a time; leave one out"),
        (["RUN", "--running", "--url", "http://h:1"], "--running reads the run's directory: name that on its control"),
        (["RUN", "--events"], "this is for runs of a cluster: name it with --address or --url"),
        (["--nodes"], "this is for runs of a cluster: name it with --address or --url"),
    ],
)
def test_options_of_status_that_cannot_be_shown_are_refused(run: Path, options: list[str], says: str) -> None:
    words = ["status", *(str(run) if option == "RUN" else option for option in options)]
    refused = CliRunner().invoke(app, words).exception
    assert isinstance(refused, ConfigError)
    assert says in str(refused)


def test_requests_to_a_run_without_a_driver_fail(run: Path) -> None:
    asked = CliRunner().invoke(app, ["engine", "add", "http://h:2", "--run", str(run)])
    assert isinstance(asked.exception, RunMissing)
