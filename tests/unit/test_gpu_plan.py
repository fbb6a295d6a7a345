"""Which GPU belongs to whom, and the configurations that would share one unnoticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from headrace.actors.engines.config import EnginesConfig
from headrace.actors.engines.devices import (
    DevicePlan,
    local_gpus,
    needed_gpus,
    plan_devices,
    refuse_missing_gpus,
    refuse_shared_gpus,
)
from headrace.actors.engines.host import ServerPlan, server_process
from headrace.actors.errors import ConfigError
from headrace.actors.run.checks import reserved_gpus
from headrace.actors.run.config import RunConfig, load_recipe
from headrace.policies.errors import EngineSettingsInvalid
from headrace.policies.push.contract import PushConfig
from headrace.policies.sglang.server import SGLangProcess, SGLangServerConfig, server_environment

RECIPE = Path(__file__).resolve().parents[2] / "scripts" / "recipes" / "quickstart.toml"
GLOO, NCCL = PushConfig(), PushConfig(backend="nccl")


def sglang(**changes: Any) -> EnginesConfig:
    return EnginesConfig.model_validate({"backend": "sglang", "device": "cuda", "tensor_parallel": 2} | changes)


def run_config(*overrides: str) -> RunConfig:
    return load_recipe(RECIPE, overrides, Path("runs/run"))


CUDA = ("engines.backend=sglang", "engines.device=cuda", "engines.tensor_parallel=2", "learner.device=cuda")


def test_local_engines_and_the_sender_have_devices_of_their_own() -> None:
    plan = plan_devices(sglang(count=2), NCCL, ("4", "5", "6", "7", "GPU-8"))
    assert plan == DevicePlan(engines={"place-1": ("4", "5"), "place-2": ("6", "7")}, sender=("GPU-8",))
    assert plan_devices(sglang(count=1), GLOO, ("0", "1", "2")) == DevicePlan(engines={"place-1": ("0", "1")})


def test_engines_placed_by_ray_reserve_their_own_devices() -> None:
    placed = sglang(placement="ray")
    assert (local_gpus(placed, GLOO), local_gpus(placed, NCCL)) == (0, 1)
    assert plan_devices(placed, NCCL, ("3",)) == DevicePlan(sender=("3",))


def test_a_push_by_disk_needs_no_device_for_a_sender() -> None:
    disk = PushConfig(backend="nccl", transport="disk")
    assert local_gpus(sglang(count=2), disk) == 4
    assert plan_devices(sglang(count=2), disk, ("0", "1", "2", "3")).sender == ()
    assert "the sender of push.backend nccl" not in needed_gpus(sglang(), disk, learner={})


def test_without_cuda_nothing_is_reserved() -> None:
    assert plan_devices(EnginesConfig(), GLOO, ()) == DevicePlan()
    assert reserved_gpus(run_config()) == {}


@pytest.mark.parametrize("visible", [(), ("0", "1", "2"), ("0", "1", "2", "2")])
def test_too_few_devices_are_refused(visible: tuple[str, ...]) -> None:
    with pytest.raises(EngineSettingsInvalid, match=r"need 4 GPUs.*lower engines.count or engines.tensor_parallel"):
        plan_devices(sglang(count=2), GLOO, visible)


def environment_of(devices: tuple[str, ...]) -> dict[str, str]:
    plan = ServerPlan(
        name="engine-1", model_dir=Path("m"), directory=Path("d"), seed=0, group_timeout_s=1.0, devices=devices
    )
    process = server_process(sglang(), plan)
    assert isinstance(process, SGLangProcess)
    config: SGLangServerConfig = process._config
    return server_environment(config)


def test_an_engine_sees_only_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert environment_of(("6", "7"))["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert environment_of(())["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_a_run_names_every_part_that_reserves_gpus() -> None:
    config = run_config(*CUDA, "push.backend=nccl", "engines.count=3")
    parts = reserved_gpus(config)
    assert sum(parts.values()) == 1 + 3 * 2 + 1
    assert sum(needed_gpus(config.engines, config.push, learner={}).values()) == 3 * 2 + 1
    refuse_missing_gpus(parts, 8)
    with pytest.raises(ConfigError, match=r"needs 8 GPUs.*6 for engines.count 3 x .* but Ray offers 7"):
        refuse_missing_gpus(parts, 7)


def test_each_rank_of_a_learner_reserves_a_gpu_of_its_own() -> None:
    several = run_config(*CUDA, "learner.ranks=3")
    assert reserved_gpus(several)["learner.device = cuda x learner.ranks 3"] == 3
    assert (several.learner.gpus, run_config(*CUDA).learner.gpus) == (0, 1), "only a single rank is the learner itself"
    assert sum(run_config("learner.ranks=3").learner.reserved_gpus.values()) == 0


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        *(("--base-gpu-id", "device"), ("--tp-size=4", "tensor_parallel"), ("--tp", "tensor_parallel")),
        *(("--dp", "data_parallel"), ("--attn-dp-size=2", "data_parallel"), ("--ep", "expert_parallel")),
        *(("--pp-size", "tensor_parallel"), ("--nnodes", "nodes"), ("--dist-init-addr", "nodes")),
    ],
)
def test_options_of_sglang_that_select_devices_are_refused(argument: str, key: str) -> None:
    with pytest.raises(ValidationError, match=rf"{argument.split('=')[0]}.*set engines.{key}"):
        sglang(sglang={"arguments": [argument, "1"]})
    assert sglang(count=0, attach=["http://h:1"], sglang={"arguments": [argument]}).gpus == 0
    assert sglang(sglang={"arguments": ["--mem-fraction-static", "0.7"]}).gpus == 4


def test_an_attached_server_on_this_host_needs_a_named_share_of_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    attach = 'engines.attach=["http://127.0.0.1:30000"]'
    config = run_config(*CUDA, attach)
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:30000 runs on this host.*set CUDA_VISIBLE_DEVICES"):
        refuse_shared_gpus(config.engines, reserved_gpus(config))
    for other in (run_config(*CUDA), run_config(attach)):
        refuse_shared_gpus(other.engines, reserved_gpus(other))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    refuse_shared_gpus(config.engines, reserved_gpus(config))
