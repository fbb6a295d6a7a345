"""Machine files over the recipes of published systems: they go together, and what a learner lacks is refused by key."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.actors.cli.app import app
from headrace.actors.errors import ConfigError
from headrace.actors.run.config import own_transport
from headrace.actors.run.overlays import layered, load_layered
from headrace.actors.simulation.virtual.plan import make_plan, plan_keys
from support.machine_files import MACHINES, examples

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TINY = SCRIPTS / "models" / "tiny"
SLIME = ("8gpu", "64gpu")


def files(recipe: str, machine: str) -> tuple[Path, list[Path]]:
    return SCRIPTS / "recipes" / f"{recipe}.toml", [SCRIPTS / "machines" / f"{machine}.toml"]


@pytest.mark.parametrize("machine", SLIME)
@pytest.mark.parametrize("setting", ["objective=ppo", "correction=cap"])
def test_what_slime_cannot_train_is_refused_by_its_key(tmp_path: Path, machine: str, setting: str) -> None:
    path, on = files("tau", machine)
    key = f"learner.{setting.partition('=')[0]}"
    with pytest.raises(ConfigError, match=rf"{key} .*slime") as refusal:
        load_layered(path, on, [*examples(on[0]), f"learner.{setting}"], tmp_path)
    assert "\n" not in str(refusal.value)
    load_layered(*files("tau", "8gpu_megatron"), [f"learner.{setting}"], tmp_path)


@pytest.mark.parametrize("machine", MACHINES)
def test_machine_files_name_no_model_and_no_tasks(machine: str) -> None:
    named = {
        "[model]",
        "[tasks]",
        *(() if machine.startswith(("swe_rl", "glm")) else ("[agent]", "[sampling]", "[buffer]")),
    }
    assert not named & set(MACHINES[machine].read_text().splitlines())


def test_a_machine_file_takes_what_is_published_and_a_small_one_keeps_the_miniature(tmp_path: Path) -> None:
    for machine, values in (
        ("cpu", (70, 16, 6, 4e-4, 64)),
        ("8gpu", (1024, 4096, 20, 1e-6, 32)),
        ("swe_rl_32b_64gpu", (1024, 4096, 20, 1e-6, 64)),
    ):
        path, on = files("swe_rl", machine)
        config = load_layered(path, on, [*examples(on[0]), f"model.path={TINY}"], tmp_path)
        sampling, rate = config.sampling, config.learner.learning_rate
        found = (sampling.max_context_tokens, sampling.max_tokens_per_turn, config.agent.loop.max_turns, rate)
        assert (*found, config.buffer.batch_size) == values, machine


def test_what_is_published_wins_over_the_recipe_and_a_machine_file_over_both(tmp_path: Path) -> None:
    recipe, machine = tmp_path / "recipe.toml", tmp_path / "machine.toml"
    recipe.write_text(
        '[learner]\nlearning_rate = 5e-4\nentropy_coef = 0.1\n[buffer]\nbatch_size = 8\n[published]\nsource = "here"\n'
        'without = ["learner.entropy_coef", "no.such"]\n[published.learner]\nlearning_rate = 1e-6\nwarmup_steps = 3\n'
    )
    machine.write_text("[learner]\nwarmup_steps = 20\n")
    found = layered(recipe, [machine], ["buffer.batch_size=16"])
    assert found.document == {"learner": {"learning_rate": 1e-6, "warmup_steps": 20}, "buffer": {"batch_size": 16}}
    assert found.origins["learner.learning_rate"] == "recipe.toml [published]"
    assert layered(recipe, [], []).document["learner"] == {"learning_rate": 5e-4, "entropy_coef": 0.1}
    small = tmp_path / "small.toml"
    small.write_text("published = false\n")
    assert layered(recipe, [machine, small], []).document["learner"]["learning_rate"] == 5e-4
    small.write_text("published = 3\n")
    with pytest.raises(ConfigError, match=r"small\.toml: published is 3; write true or false"):
        layered(recipe, [small], [])


def test_all_keys_that_a_cluster_needs_are_named_at_once_with_an_example_that_works(tmp_path: Path) -> None:
    path, on = files("swe_rl", "64gpu")
    with pytest.raises(ConfigError) as refusal:
        layered(path, on, ["cluster.address=10.0.0.9:6379"])
    text = str(refusal.value)
    needed = "cluster.state, cluster.storage, sandbox.remote.urls, sandbox.remote.key_file must be set"
    assert text.startswith(f"--on 64gpu.toml: {needed}")
    words = shlex.split(text.partition("for example ")[2])
    given = [word for word in words if word != "--set"]
    config = load_layered(path, on, ["cluster.address=10.0.0.9:6379", *given], tmp_path)
    assert (config.cluster.address, len(config.sandbox.remote.urls)) == ("10.0.0.9:6379", 2)
    assert (config.sandbox.provider, config.engines.placement) == ("remote", "ray")


def test_sandboxes_are_not_asked_for_where_no_task_boots_one(tmp_path: Path) -> None:
    path, on = files("tau", "64gpu")
    known = [one for one in examples(on[0]) if one.startswith("cluster.")]
    assert load_layered(path, on, known, tmp_path).sandbox.provider == "simulated"
    # The API's cluster knows its own address and folders.
    layered(path, on, [], decided=("cluster.",))
    codex, _ = files("codex", "64gpu")
    with pytest.raises(ConfigError, match=r"sandbox\.remote\.urls, .*agent\.program\.in_image must be set"):
        layered(codex, on, known)


def test_urls_of_sandbox_hosts_come_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, on = files("swe_rl", "64gpu")
    known = [one for one in examples(on[0]) if not one.startswith("sandbox.remote.urls")]
    (tmp_path / "hosts").write_text("http://10.0.0.21:5000\nhttp://10.0.0.22:5000\n")
    monkeypatch.setenv("HOSTS_OF_SANDBOXES", "http://10.0.0.23:5000")
    for named, urls in (
        (f"file:{tmp_path / 'hosts'}", ("http://10.0.0.21:5000", "http://10.0.0.22:5000")),
        ("env:HOSTS_OF_SANDBOXES", ("http://10.0.0.23:5000",)),
    ):
        config = load_layered(path, on, [*known, f"sandbox.remote.urls={named}"], tmp_path)
        assert config.sandbox.remote.urls == urls
    for named in (f"file:{tmp_path / 'absent'}", "env:NOT_SET", "http://10.0.0.23:5000"):
        with pytest.raises(ConfigError, match=r"sandbox\.remote\.urls .* cannot be read .*: write a list of URLs"):
            layered(path, on, [*known, f"sandbox.remote.urls={named}"])


def test_a_simulation_takes_the_sizes_of_a_recipe() -> None:
    keys = plan_keys(*files("tau", "8gpu"))
    plan = make_plan("swe64", keys)
    assert (plan.batch_size, plan.group_size, plan.max_staleness, plan.slots, plan.workers) == (256, 8, 2, 64, 1)
    assert plan.learner_s == make_plan("swe64", {}).learner_s
    assert make_plan("swe64", keys | {"slots": 32}).slots == 32


def test_machine_files_of_a_simulation_need_a_recipe() -> None:
    told = CliRunner().invoke(app, ["simulate", "--on", str(files("tau", "64gpu")[1][0])])
    assert str(told.exception) == "--on: machine files are merged over a recipe; name one with --recipe"


@pytest.mark.parametrize(
    ("overrides", "transport"),
    [
        ((), "nccl"),
        (("engines.data_parallel=2", "engines.tensor_parallel=2"), "delta"),
        (("push.transport=delta",), "delta"),
        (("push.transport=disk",), "disk"),
    ],
)
def test_slime_pushes_in_the_way_that_engines_take(tmp_path: Path, overrides: tuple[str, ...], transport: str) -> None:
    path, on = files("tau", "64gpu")
    assert own_transport(load_layered(path, on, [*examples(on[0]), *overrides], tmp_path)) == transport


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("push.transport=nccl", "learner.kind=megatron"), "push.transport nccl is slime's"),
        (("push.transport=nccl", "engines.device=cpu"), "push.transport nccl needs engines on GPUs"),
        (
            ("push.transport=delta", "engines.backend=cpu", "engines.device=cpu", "engines.tensor_parallel=1"),
            "push.transport delta needs slime's SGLang",
        ),
        (
            ("push.transport=nccl", "engines.data_parallel=2", "engines.tensor_parallel=2"),
            "push.transport nccl with engines.data_parallel 2",
        ),
    ],
)
def test_a_push_that_cannot_work_is_refused(tmp_path: Path, overrides: tuple[str, ...], named: str) -> None:
    path, on = files("tau", "64gpu")
    with pytest.raises(ConfigError, match=named):
        load_layered(path, on, [*examples(on[0]), *overrides], tmp_path)
