"""Values that follow from model, machine and agent: what each published model comes to, and what is left alone."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.actors.derivation import clocks
from headrace.actors.derivation.host import Host, this_host
from headrace.actors.derivation.rules import DERIVED, Derived, derive, memory_problem
from headrace.actors.derivation.terms import Terms
from headrace.actors.errors import ConfigError
from headrace.actors.run.config import RunConfig, read_recipe, resolve, validated
from headrace.actors.run.launch import RunRequest, dry_run, prepare, reopen
from headrace.actors.run.overlays import layered
from headrace.policies.models import tiny
from headrace.policies.models.facts import ModelFacts
from support.machine_files import examples
from support.published_models import MODELS, described_model

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TINY = SCRIPTS / "models" / "tiny"
GB = 1_000_000_000
SMALL = Host(memory_bytes=24 * GB, cores=2)
EIGHT = Host(memory_bytes=1000 * GB, cores=96, gpus=(80 * GB,) * 8)


def values(document: dict[str, Any], host: Host) -> dict[str, Any]:
    return {one.key: one.value for one in derive(copy.deepcopy(document), RunConfig, host=host)}


def reason(document: dict[str, Any], host: Host, key: str) -> str:
    return next(one.line for one in derive(copy.deepcopy(document), RunConfig, host=host) if one.key == key)


def recipe(model: Path, agent: str = "shell", machine: str = "") -> dict[str, Any]:
    text = model.parent / "recipe.toml"
    text.write_text(f'[model]\npath = "{model}"\n[agent]\nkind = "{agent}"\n')
    on = [SCRIPTS / "machines" / machine] if machine else []
    return layered(text, on, [one for path in on for one in examples(path)]).document


def test_a_dense_4b_on_the_machine_file_of_eight_gpus(tmp_path: Path) -> None:
    document = recipe(described_model(tmp_path, "Qwen3-4B"), "claude-code", "8gpu.toml")
    found = values(document, SMALL)
    assert found["sampling.max_context_tokens"] == 32_768 == found["learner.token_budget"]
    assert found["sampling.max_tokens_per_turn"] == 4096
    assert (found["agent.program.max_turns"], found["learner.learning_rate"], found["buffer.batch_size"]) == (
        64,
        1e-6,
        64,
    )
    line = reason(document, SMALL, "sampling.max_context_tokens")
    assert line == "sampling.max_context_tokens 32,768: the model's 40,960, bound by 80 GB of GPU memory"


def test_a_35b_mixture_of_experts_on_the_machine_file_of_64_gpus(tmp_path: Path) -> None:
    document = recipe(described_model(tmp_path, "Qwen3.6-35B-A3B"), "claude-code", "64gpu.toml")
    found = values(document, SMALL)
    assert found["sampling.max_context_tokens"] == 98_304 == found["learner.token_budget"]
    assert (found["agent.program.max_turns"], found["learner.learning_rate"]) == (192, 1e-6)
    line = reason(document, SMALL, "sampling.max_context_tokens")
    assert line == "sampling.max_context_tokens 98,304: the model's 262,144, at most 98,304 for claude-code"


def test_half_a_billion_parameters_on_a_small_cpu_host(tmp_path: Path) -> None:
    found = values(recipe(described_model(tmp_path, "Qwen3-0.6B"), "loop"), SMALL)
    assert (found["learner.device"], found["learner.dtype"], found["learner.recompute"]) == ("cpu", "float32", True)
    assert (found["engines.backend"], found["engines.count"], found["engines.max_running"]) == ("cpu", 1, 3)
    assert (found["sampling.max_context_tokens"], found["agent.loop.max_turns"]) == (2048, 4)
    assert found["environment.shell.max_output_bytes"] == 512


SMALL_QWEN3 = MODELS["Qwen3-0.6B"] | {"hidden_size": 128, "num_hidden_layers": 4, "max_position_embeddings": 32_768}


@pytest.mark.parametrize(
    ("agent", "context", "turns"),
    [
        ("loop", 4096, ("agent.loop.max_turns", 4)),
        ("codex", 32_768, ("agent.program.max_turns", 64)),
        ("parts:Mine", 4096, ("agent.turns", 16)),
    ],
)
def test_a_model_with_transformers_positions_asks_a_cpu_for_no_more_than_it_can_serve(
    tmp_path: Path, agent: str, context: int, turns: tuple[str, int]
) -> None:
    model = described_model(tmp_path, "Qwen3-0.6B")
    (model / "config.json").write_text(json.dumps(SMALL_QWEN3))
    document = recipe(model, agent)
    found = values(document, SMALL)
    assert found["sampling.max_context_tokens"] == context
    assert {key for key in found if key.endswith("turns")} == {turns[0]}
    assert found[turns[0]] == turns[1]
    assert " GB an engine" in reason(document, SMALL, "engines.max_running")


def test_a_host_with_gpus_gives_one_to_the_learner_and_the_others_to_sglang(tmp_path: Path) -> None:
    found = values(recipe(described_model(tmp_path, "Qwen2.5-0.5B"), "loop"), EIGHT)
    assert (found["learner.device"], found["learner.dtype"]) == ("cuda", "bfloat16")
    assert (found["engines.backend"], found["engines.device"], found["engines.count"]) == ("sglang", "cuda", 7)
    assert found["sampling.max_context_tokens"] == 32_768


@pytest.mark.parametrize("host", [SMALL, EIGHT])
def test_a_miniature_stays_on_the_cpu(host: Host, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(TINY)
    found = values(recipe(tmp_path / "model"), host)
    assert (found["learner.device"], found["engines.backend"], found["learner.learning_rate"]) == ("cpu", "cpu", 3e-4)
    assert (found["sampling.max_context_tokens"], found["sampling.max_tokens_per_turn"]) == (1024, 128)
    assert found["agent.shell.max_turns"] == 4


@given(st.integers(1, 10**12), st.integers(1, 10**12))
def test_the_rate_falls_with_the_size(one: int, other: int) -> None:
    def rate(size: int) -> float:
        facts = ModelFacts.of(MODELS["Qwen3-0.6B"], stored=size)
        given = DERIVED["learner.learning_rate"][0](Terms({}, RunConfig, facts, SMALL))
        return float(given[0])

    low, high = sorted((one, other))
    assert 1e-6 <= rate(high) <= rate(low) <= 3e-4


def test_what_is_set_is_never_derived(tmp_path: Path) -> None:
    document = recipe(described_model(tmp_path, "Qwen3-4B"))
    document |= {"sampling": {"max_context_tokens": 2000}, "learner": {"learning_rate": 3e-5}}
    found = values(document, EIGHT)
    assert not {"sampling.max_context_tokens", "learner.learning_rate"} & set(found)
    assert found["sampling.max_tokens_per_turn"] == 250


def test_a_recorded_configuration_leaves_nothing_to_derive(tmp_path: Path) -> None:
    request = RunRequest(recipe=SCRIPTS / "recipes" / "quickstart.toml", runs_dir=tmp_path, name="run")
    config, directory = prepare(request)
    assert derive(config.model_dump(), RunConfig) == ()
    assert reopen(directory.path)[0] == config


def test_every_derived_key_is_a_key_with_a_rule_that_says_why() -> None:
    terms = Terms({}, RunConfig, None, SMALL)
    for key, (_, text) in DERIVED.items():
        assert terms[key] is not None
        assert not terms.is_set(key)
        assert text


def test_each_source_has_values_for_its_own_agent(tmp_path: Path) -> None:
    document = recipe(described_model(tmp_path, "Qwen3-4B"), "loop", "64gpu.toml")
    own = {"kind": "claude-code"}
    document["tasks"] = {"sources": [{"name": "a", "share": 0.5}, {"name": "b", "share": 0.5, "agent": own}]}
    found = {one.key: one.value for one in derive(document, RunConfig, host=EIGHT)}
    first, second = document["tasks"]["sources"]
    assert set(first) == {"name", "share"}
    assert found["sampling.max_context_tokens"] == 32_768
    assert second["sampling"] == {"max_context_tokens": 40_960, "max_tokens_per_turn": 5120}
    assert second["agent"]["program"] == {"max_turns": 80}
    assert found["learner.token_budget"] == 40_960, "a row of either source must fit"


def test_the_model_is_not_looked_at_before_the_rights_are_checked(tmp_path: Path) -> None:
    document = {"model": {"path": str(TINY)}}
    before = validated(copy.deepcopy(document), Path("recipe"), tmp_path, reads=False)
    after = validated(copy.deepcopy(document), Path("recipe"), tmp_path)
    assert (before.sampling.max_context_tokens, after.sampling.max_context_tokens) == (4096, 1024)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[sampling]\nmax_context_tokens = "many"\n', "sampling.max_context_tokens: "),
        ("[buffer]\ngroup_size = -3\n", "buffer.group_size: "),
        ("engines = 3\n", "engines: "),
        ("[tasks]\nsources = 3\n", "tasks.sources: "),
        ('[[tasks.sources]]\nname = "a"\nshare = 1\nagent = 3\n', "tasks.sources.0.agent: "),
    ],
)
def test_values_of_a_wrong_type_are_refused_by_their_own_key(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f'{text}[model]\npath = "{TINY}"\n')
    with pytest.raises(ConfigError, match=says):
        resolve(read_recipe(path, ()), path, tmp_path)


@pytest.mark.parametrize(
    ("name", "machine", "host", "says"),
    [
        ("Qwen3-4B", "", SMALL, "learner 16 and engines 8: 4.0B parameters need 97 GB, this host has 24 GB"),
        ("Qwen3-4B", "", SMALL, "at most 0.75B; use learner.kind slime on GPUs"),
        ("Qwen3.6-35B-A3B", "8gpu.toml", SMALL, "34.6B parameters do not fit in 80 GB of GPU memory"),
        ("Qwen3-30B-A3B", "8gpu_megatron.toml", SMALL, "30.5B parameters do not fit in 80 GB of GPU memory"),
    ],
)
def test_a_model_that_is_too_large_is_refused_with_what_fits(
    tmp_path: Path, name: str, machine: str, host: Host, says: str
) -> None:
    model = described_model(tmp_path, name)
    document = recipe(model, machine=machine)
    derive(document, RunConfig, host=host)
    problem = memory_problem(Terms(document, RunConfig, ModelFacts.read(model), host))
    assert problem is not None
    assert says in problem
    assert "\n" not in problem


@pytest.mark.parametrize(("name", "machine"), [("Qwen3-4B", "8gpu"), ("Qwen3.6-35B-A3B", "64gpu"), ("Qwen3-0.6B", "")])
def test_a_model_that_fits_is_not_refused(tmp_path: Path, name: str, machine: str) -> None:
    model = described_model(tmp_path, name)
    document = recipe(model, machine=f"{machine}.toml" if machine else "")
    derive(document, RunConfig, host=SMALL)
    assert memory_problem(Terms(document, RunConfig, ModelFacts.read(model), SMALL)) is None


def test_a_model_without_weights_passes_a_dry_run_and_starts_nothing(tmp_path: Path) -> None:
    tiny.write_description(tmp_path / "model")
    path = SCRIPTS / "recipes" / "quickstart.toml"
    absent = dry_run(path, (), (f"model.path={tmp_path / 'model'}",)).absent
    assert f"model.path: {tmp_path / 'model'} has no weights; download the model again" in absent
    request = RunRequest(recipe=path, runs_dir=tmp_path, name="run", overrides=(f"model.path={tmp_path / 'model'}",))
    with pytest.raises(ConfigError, match="has no weights; download the model again"):
        prepare(request)
    assert not (tmp_path / "run").exists()


def test_a_quantised_model_is_refused_by_a_dry_run(tmp_path: Path) -> None:
    model = described_model(tmp_path, "Qwen3-4B")
    keys = json.loads((model / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (model / "config.json").write_text(json.dumps(keys | {"quantization_config": fp8}))
    with pytest.raises(ConfigError, match=r"model\.path: .* are quantised \(quantization_config: fp8\).*in bfloat16"):
        dry_run(SCRIPTS / "recipes" / "quickstart.toml", (), (f"model.path={model}",))


def test_contexts_beyond_the_positions_are_refused_for_sglang(tmp_path: Path) -> None:
    model, path = described_model(tmp_path, "Qwen3-4B"), SCRIPTS / "recipes" / "quickstart.toml"
    keys = (f"model.path={model}", "learner.token_budget=50000", "engines.backend=sglang")
    longer = (*keys, "sampling.max_context_tokens=50000")
    with pytest.raises(ConfigError, match="positions for 40,960 tokens, and engines would serve 50,000"):
        dry_run(path, (), longer)
    with pytest.raises(ConfigError, match=r"^engines\.max_context_tokens: .* engines would serve 60,000"):
        dry_run(path, (), (*longer, "engines.max_context_tokens=60000"))
    attached = ("engines.count=0", 'engines.attach=["http://127.0.0.1:1"]')
    assert dry_run(path, (), (*longer, *attached)).config.engine_context == 50_000
    assert dry_run(path, (), (*keys, "sampling.max_context_tokens=40960")).config.engine_context == 40_960
    allowed = 'engines.sglang.environment.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN="1"'
    assert dry_run(path, (), (*longer, allowed)).config.engine_context == 50_000


def test_the_critic_of_ppo_is_a_second_model(tmp_path: Path) -> None:
    model = ModelFacts.read(described_model(tmp_path, "Qwen3-0.6B"))
    sizes = [
        Terms({"learner": {"objective": objective, "dtype": "bfloat16"}}, RunConfig, model, SMALL).learner_bytes
        for objective in ("grpo", "ppo")
    ]
    assert sizes == [18, 36]


def test_the_facts_of_this_host_are_those_of_the_kernel() -> None:
    host = this_host()
    assert 1 << 30 < host.memory_bytes <= psutil.virtual_memory().total
    assert host.cores == len(os.sched_getaffinity(0))
    assert 8 <= host.sandboxes()[0] <= 256


@pytest.mark.parametrize(
    ("said", "visible", "gpus"),
    [
        ("printf '81559\\n81559\\n81559\\n'", None, 3),
        ("printf '81559\\n81559\\n81559\\n'", "2,GPU-8932f937", 2),
        ("printf '81559\\n81559\\n'", "-1", 0),
        ("echo '[N/A]'", None, "invalid literal"),
        ("echo 'a driver of another version' >&2; exit 18", None, "a driver of another version"),
        ("echo 'NVIDIA-SMI has failed because the driver does not answer'; exit 9", None, "the driver does not answer"),
    ],
)
def test_gpus_are_what_the_driver_tells_and_what_it_does_not_tell_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    said: str,
    visible: str | None,
    gpus: int | str,
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{said}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = this_host.__wrapped__().gpus
    assert found == (81559 << 20,) * (gpus if isinstance(gpus, int) else 0)
    assert isinstance(gpus, int) or gpus in caplog.text


def test_the_start_of_a_run_tells_the_values_that_the_run_has(tmp_path: Path) -> None:
    told: list[Derived] = []
    request = RunRequest(recipe=SCRIPTS / "recipes" / "quickstart.toml", runs_dir=tmp_path, name="run")
    _, directory = prepare(request, told.extend)
    written = json.loads(directory.config.read_bytes())
    assert "learner.token_budget 16,384: 16384 (swe-rl)" in "\n".join(one.line for one in told)
    for one in told:
        table, key = one.key.split(".")
        assert written[table][key] == one.value, one.key
    assert not {one.key for one in told} & clocks.DERIVED.keys()
