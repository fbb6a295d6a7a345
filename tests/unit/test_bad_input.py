"""Bad input: one clear line that names the key or file and the fix, an exit code, no half-made run directory."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.cli import app as cli
from headrace.actors.cli.held_out.command import EvalRequest, prepare_evaluation
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.checks import check_parts
from headrace.actors.run.config import load_recipe
from headrace.actors.run.launch import RunRequest, prepare, sole_driver
from headrace.buffer.primitives.file_lock import FileLock
from headrace.buffer.tasks.task import TaskId, load_tasks, write_tasks
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.checkpoint_retention import begin_evaluation, end_evaluation
from headrace.policies.learners.checkpoints import Manifest, publish, stage, write_manifest
from headrace.sandboxes.host.key_files import make_key

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "scripts" / "models" / "tiny"


def headrace(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of the command line, run in this process."""
    monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
    with pytest.raises(SystemExit) as leave:
        cli.main()
    return int(leave.value.code or 0)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(f'[model]\npath = "{MODEL}"\n')
    return path


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path, *options: str) -> str:
    """The one line of a refused run, which left nothing behind."""
    runs = recipe.parent / "runs"
    assert headrace(monkeypatch, "run", str(recipe), "--runs-dir", str(runs), *options) == cli.EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) == 1, error
    assert not runs.exists()
    return error


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[model\n", "not valid TOML"),
        ("", "model.path is missing"),
        ('[engines]\nbackend = "simulated"\n', 'requires learner.kind = "simulated" and agent.kind = "simulated"'),
        (
            '[model]\npath = "x"\n[buffer]\nmax_stalenes = 2\n',
            "unknown key buffer.max_stalenes; did you mean buffer.max_staleness?",
        ),
        ('[model]\npath = "x"\n[evaluation.samplin]\n', "did you mean evaluation.sampling?"),
        ('[model]\npath = "x"\n[service]\nslots_per_worker = 4\n', "did you mean dispatcher.slots_per_worker?"),
        ('[model]\npath = "x"\n[bufer]\nbatch_size = 4\n', "did you mean buffer?"),
        ('[model]\npath = "x"\n[service]\nxyzzy = 4\n', "service.xyzzy; remove it or check its spelling"),
        ('[model]\npath = "x"\n[buffer]\nbatch_size = "many"\n', "buffer.batch_size"),
        ('[model]\npath = "x"\n[buffer]\nmax_staleness = 0\n', "set buffer.mode, or raise buffer.max_staleness"),
        ('[model]\npath = "x"\n[buffer]\ngroup_size = 2\nmin_members = 4\n', "exceeds group_size"),
        ('[model]\npath = "x"\n[learner]\ntoken_budget = 100\n', "learner.token_budget 100 is below"),
        ('[model]\npath = "x"\n[learner]\nmodel_dir = "y"\n', "learner.model_dir cannot be set; set model.path"),
        ('[model]\npath = "x"\n[learner]\nlearning_rate = -1\n', "learner.learning_rate"),
        (
            '[model]\npath = "x"\n[buffer]\nbatch_size = 2\ngroup_size = 2\n[learner]\nranks = 3\n',
            "buffer.batch_size 2 is below learner.ranks 3",
        ),
        (
            '[model]\npath = "x"\n[learner]\ntensor_parallel = 2\n',
            "tensor_parallel belongs to slime, because each of the megatron learner's ranks has the whole model",
        ),
        ('[model]\npath = "x"\n[learner]\nexpert_parallel = 1\n', "set learner.kind to slime and learner.slime.exp"),
        ('[model]\npath = "x"\n[learner]\nkind = "slime"\nranks = 2\n', "ranks 2 has no effect with kind slime"),
        ('[model]\npath = "x"\n[tasks]\ntrain = "a.jsonl"\n', "tasks.train and tasks.heldout go together"),
        ('[model]\npath = "x"\n[evaluation]\ntasks = 65\n', "is above tasks.heldout_count"),
        ('[model]\npath = "x"\n[gateway]\nturn_timeout_s = 600\n', "gateway.turn_timeout_s 600 is not below"),
        ('[model]\npath = "x"\n[dispatcher]\nslots_per_worker = 500\n', "raise max_live or lower the number of slots"),
        ('[model]\npath = "x"\n[engines]\nmax_context_tokens = 64\n', "engines.max_context_tokens 64 is below"),
        ('[model]\npath = "x"\n', "has no config.json"),
    ],
)
def test_an_invalid_recipe_is_a_one_line_error_naming_the_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path, text: str, says: str
) -> None:
    recipe.write_text(text)
    assert says in refused(monkeypatch, capsys, recipe)


LOOP = '[agent]\nkind = "loop"\n'
SEARCH = f'{LOOP}[agent.loop]\nparser = "search"\n[environment]\nkind = "search"\n'
RETAIL = f'{LOOP}[agent.loop]\nparser = "calls"\n[environment]\nkind = "retail"\n'
FILES = '[tasks]\ntrain = "a.jsonl"\nheldout = "b.jsonl"\n[evaluation]\ntasks = 1\n'
IN_SHOP = {"environment": {"kind": "retail"}, "evaluator": {"kind": "environment"}}
ASKED = {"evaluator": {"kind": "answer", "answer": {"targets": ["Elm"]}}}
IN_SUM = {"evaluator": {"kind": "sum", "parts": [{"name": "said", **ASKED}]}}
SERVED = {"evaluator": {"kind": "http", "service": "grader"}}
JUDGED = {"evaluator": {"kind": "judge", "service": "grader"}}
GRADER = '[services.grader]\nkind = "reward"\nurl = "http://127.0.0.1:9/score"\n'


@pytest.mark.parametrize(
    ("text", "row", "says"),
    [
        (
            f'{LOOP}[agent.loop]\nparser = "search"\n',
            {},
            "agent.loop.parser search produces answer, search, but the environment shell accepts bash, done, run",
        ),
        (
            f'{LOOP}[environment]\nkind = "shel"\n',
            {},
            "environment.kind: there is no environment 'shel'; available: shell",
        ),
        (
            f'{LOOP}[environment]\nkind = "collections:OrderedDict"\n',
            {},
            "environment.kind: 'collections:OrderedDict' did not return an environment: 'needs_sandbox' is missing",
        ),
        (
            f"{LOOP}{FILES}",
            {"environment": {"kind": "shop"}},
            "task a: environment.kind 'shop' is not the recipe's (shell); set environment.kind in the recipe, or leave",
        ),
        (SEARCH, {}, "services.retriever is missing; add the table"),
        (
            f'{SEARCH}{FILES}[services.retriever]\nurl = "http://127.0.0.1:9"\n',
            {"evaluator": {"kind": "state", "check": "pass"}},
            "task a: evaluator.kind state scores the files of a sandbox, and the environment search has none; choose",
        ),
        (RETAIL, {}, "environment.retail.data is missing; set it to the folder"),
        (f'{RETAIL}[environment.retail]\ndata = "shop"\n{FILES}', IN_SHOP, "shop is not a folder; give the one with"),
        (
            f'{RETAIL}[environment.retail]\ndata = "."\nsimulator = "llm"\n',
            {},
            "environment.retail: service: is needed by simulator = 'llm'; name a service with a model",
        ),
        (
            f'{RETAIL}[environment.retail]\ndata = "."\nsimulator = "llm"\nservice = "user"\n',
            {},
            "services.user is missing; add the table",
        ),
        (f'{LOOP}[agent.loop]\nfirst = "{{{{ a"\n', {}, "agent.loop.first: not a valid Jinja template (line 1): "),
        (f'{LOOP}[agent.loop]\nsystem = "{{{{ b }}}}"\n', {}, "agent.loop.system: unknown name b in the template; the"),
        (
            f'{LOOP}[agent.loop]\nfirst = "{{{{ given.n }}}}"\n{FILES}',
            {"environment": {"kind": "shell", "given": {"m": 1}}},
            "task a: agent.loop.first: the template cannot be filled: 'dict object' has no attribute 'n'; correct",
        ),
        (
            f'{LOOP}[environment]\nkind = "terminal"\nterminal.observation = "{{outpu}}"\n',
            {},
            "environment.terminal.observation: unknown field {outpu}; the fields are command, exit_code, output",
        ),
        (
            f'[agent]\nkind = "immediate"\n{FILES}',
            IN_SUM,
            "task a: evaluator.kind answer scores the record of an episode, which agent.kind immediate does not",
        ),
        (FILES, {"evaluator": {"kind": "environment"}}, "task a: evaluator.kind environment scores the record of an"),
        (
            f"{LOOP}{FILES}",
            {"evaluator": {"kind": "environment"}},
            "task a: evaluator.kind environment needs a verdict, and the environment shell returns none; choose",
        ),
        (FILES, SERVED, "services.grader is missing; task a (evaluator.kind http) needs it; add the table"),
        (
            f"{FILES}{GRADER}",
            JUDGED,
            "services.grader.kind is reward; task a (evaluator.kind judge) needs it as a model;",
        ),
        (
            f"{FILES}{GRADER}retry.total_s = 30\n[rollout]\nevaluate_timeout_s = 30\n",
            SERVED,
            "services.grader.retry.total_s 30 is not below the 30 s that the evaluation of task a (evaluator.kind",
        ),
        (f'{LOOP}[agent.loop]\ncontext = "head_tail(2)"\n', {}, "agent.loop.context: 'head_tail(2)' is not a context"),
    ],
)
def test_an_invalid_environment_is_a_one_line_error_naming_the_key_or_task(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recipe: Path,
    text: str,
    row: dict[str, Any],
    says: str,
) -> None:
    recipe.write_text(f'[model]\npath = "{MODEL}"\n[sandbox]\nprovider = "simulated"\n{text}')
    for name, more in (("a", row), ("b", {})):
        task = {"id": name, "family": "f", "instruction": f"do {name}", "evaluator": {"kind": "none"}} | more
        (recipe.parent / f"{name}.jsonl").write_text(json.dumps(task) + "\n")
    assert says in refused(monkeypatch, capsys, recipe)


@pytest.mark.parametrize("provider", ["oci", "subprocess"])
def test_an_unknown_sandbox_provider_is_refused_with_those_that_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path, provider: str
) -> None:
    says = f"sandbox.provider: there is no sandbox provider '{provider}'; available: local, remote, e2b, simulated"
    assert says in refused(monkeypatch, capsys, recipe, "--sandbox", provider)
    recipe.write_text(f'[model]\npath = "{MODEL}"\n[sandbox]\nprovider = "{provider}"\n')
    assert says in refused(monkeypatch, capsys, recipe)


def test_machine_files_that_contradict_each_other_are_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path, tmp_path: Path
) -> None:
    for count in (2, 3):
        (tmp_path / f"{count}.toml").write_text(f"[engines]\ncount = {count}\n")
    options = ("--on", str(tmp_path / "2.toml"), "--on", str(tmp_path / "3.toml"))
    error = refused(monkeypatch, capsys, recipe, *options)
    assert "3.toml: engines.count is 3" in error
    assert "decide with --set engines.count=VALUE" in error


def test_a_missing_recipe_is_reported_with_an_existing_alternative(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "`headrace init`" in refused(monkeypatch, capsys, tmp_path / "none.toml")


def test_a_key_file_that_others_can_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path
) -> None:
    key_file = recipe.parent / "engine-key"
    recipe.write_text(recipe.read_text() + '[engines]\nattach = ["http://127.0.0.1:9"]\nkey_file = "engine-key"\n')
    assert f"engines.key_file {key_file}: No such file" in refused(monkeypatch, capsys, recipe)
    make_key(key_file)
    key_file.chmod(0o640)
    assert f"chmod 600 {key_file}" in refused(monkeypatch, capsys, recipe)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("buffer.max_staleness", "table.key=value"),
        ("max_staleness=2", "table.key=value"),
        ("telemetry.otlp_endpoint=localhost:4317", '"http://localhost:4318/v1/traces"'),
        ("telemetry.otlp_endpoint=http://collector:4318", '"http://collector:4318/v1/traces"'),
        ("model.path.x=2", "path is a value"),
        ("sandbox.provider=chroot", "sandbox.provider"),
        ("engines.backend=vllm", "engines.backend"),
        ("sandbox.provider=remote", "sandbox.remote.urls is empty"),
        ('engines.sglang.arguments=["--api-key", "k"]', "engines.sglang.arguments has --api-key"),
        ("learner.threads=100000", "learner.threads: Input should be less than or equal to 1024"),
        ("learner.weight_cap=inf", "learner.weight_cap is infinite; set a finite number"),
        ("learner.betas=[0.9, 1.0]", "learner.betas.1: Input should be less than 1"),
        ("dispatcher.pacing.enabled=true", "unknown key dispatcher.pacing.enabled; it is now dispatcher.pacing = true"),
        ("dispatcher.pacing={increase = 4}", "unknown key dispatcher.pacing.increase; it is no longer a key, since"),
        ("retention.days=3", "unknown key retention; it is no longer a table: all limits follow from telemetry.keep_"),
        ("push.read_timeout_s=300", "unknown key push.read_timeout_s; it is no longer a key: it follows from the size"),
        ("rollout.queue_timeout_s=inf", "rollout.queue_timeout_s is infinite; set a finite number"),
    ],
)
def test_an_invalid_override_is_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path, option: str, says: str
) -> None:
    assert says in refused(monkeypatch, capsys, recipe, "--set", option)


def test_missing_sglang_is_refused_before_the_run_folder_is_created(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path, tmp_path: Path
) -> None:
    options = ("--set", "engines.backend=sglang", "--set", f"engines.sglang.python={tmp_path / 'none'}")
    error = refused(monkeypatch, capsys, recipe, *options)
    assert f"{tmp_path / 'none'} is not executable" in error
    assert "engines.sglang.python" in error


@pytest.mark.parametrize("command", ["run", "eval", "doctor", "serve sandbox"])
@pytest.mark.parametrize(
    ("name", "says"),
    [("missing", "cannot be written: No such file"), ("x" * 90, "is too long"), ("theirs", "belongs to another user")],
)
def test_an_unusable_tmpdir_is_a_one_line_error_with_the_fix(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recipe: Path,
    command: str,
    name: str,
    says: str,
) -> None:
    folder = recipe.parent / name
    if name != "missing":
        folder.mkdir()
    if name == "theirs":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder to another user")
        os.chown(folder, 12345, 12345)
    monkeypatch.setenv("TMPDIR", str(folder))
    if command == "run":
        error = refused(monkeypatch, capsys, recipe)
    else:
        options = [str(recipe), "--runs-dir", str(recipe.parent / "runs")] if command == "eval" else []
        assert headrace(monkeypatch, *command.split(), *options) == cli.EXIT_BAD_INPUT
        error = capsys.readouterr().err
        assert len(error.strip().splitlines()) == 1, error
        assert not (recipe.parent / "runs").exists()
    assert says in error
    assert "set TMPDIR" in error


def model_with(folder: Path, **changes: object) -> Path:
    """A copy of the quickstart's model whose config.json has other values; a None leaves the key out."""
    model = folder / "model"
    shutil.copytree(MODEL, model)
    config = {**json.loads((model / "config.json").read_text()), **changes}
    (model / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return model


def test_a_tokenizer_model_mismatch_error_names_both_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path, tmp_path: Path
) -> None:
    model = model_with(tmp_path, vocab_size=300)
    error = refused(monkeypatch, capsys, recipe, "--set", f"model.path={model}")
    assert "300" in error


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model.safetensors", b"torn", "not a readable safetensors file"),
        ("config.json", b"{", "not valid JSON"),
        ("config.json", b"{}", "vocab_size is missing"),
        ("tokenizer.json", b"{}", "tokenizer.json"),
    ],
)
def test_a_broken_model_file_is_named_in_the_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recipe: Path,
    tmp_path: Path,
    name: str,
    content: bytes,
    says: str,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    (model / name).write_bytes(content)
    assert says in refused(monkeypatch, capsys, recipe, "--set", f"model.path={model}")


def test_weights_with_the_wrong_shape_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path, tmp_path: Path
) -> None:
    model = model_with(tmp_path, num_hidden_layers=4)
    assert "model.layers.3" in refused(monkeypatch, capsys, recipe, "--set", f"model.path={model}")


def test_a_default_that_contradicts_the_weights_is_refused_at_startup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path, tmp_path: Path
) -> None:
    model = model_with(tmp_path, head_dim=None)
    assert "self_attn.q_proj" in refused(monkeypatch, capsys, recipe, "--set", f"model.path={model}")


def test_an_architecture_is_refused_only_by_what_computes_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path, tmp_path: Path
) -> None:
    """Servers and learners elsewhere may compute what the embedded engine and the Megatron learner cannot."""
    model = model_with(tmp_path, architectures=["GlmMoeDsaForCausalLM"])
    error = refused(monkeypatch, capsys, recipe, "--set", f"model.path={model}")
    assert "GlmMoeDsaForCausalLM" in error
    assert "engines.backend sglang" in error
    elsewhere = ["engines.count=0", 'engines.attach=["http://127.0.0.1:9"]', "sandbox.provider=simulated"]
    overrides = [f"model.path={model}", "learner.kind=simulated", *elsewhere]
    check_parts(load_recipe(recipe, overrides, tmp_path / "run"))


def test_a_template_that_hides_observations_is_refused_only_if_they_are_trained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path, tmp_path: Path
) -> None:
    model = model_with(tmp_path)
    template = (model / "chat_template.jinja").read_text()
    assert "message.content" in template or "message['content']" in template
    hiding = template.replace("message.content", "(message.content | tojson(ensure_ascii=true))")
    hiding = hiding.replace("message['content']", "(message['content'] | tojson(ensure_ascii=true))")
    (model / "chat_template.jinja").write_text(hiding)
    error = refused(
        monkeypatch, capsys, recipe, "--set", f"model.path={model}", "--set", "learner.observation_coef=0.05"
    )
    assert "the chat template rewrites the bodies of messages" in error
    check_parts(load_recipe(recipe, [f"model.path={model}", "sandbox.provider=simulated"], tmp_path / "run"))


def test_a_bad_line_in_a_task_file_is_reported_by_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path, tmp_path: Path
) -> None:
    good = {"id": "a", "family": "f", "instruction": "do", "evaluator": {"kind": "none"}}
    (tmp_path / "train.jsonl").write_text(json.dumps(good) + "\n" + json.dumps({**good, "id": "b", "imag": "x"}) + "\n")
    (tmp_path / "heldout.jsonl").write_text(json.dumps({**good, "instruction": "other"}) + "\n")
    options = (
        "--set",
        "tasks.train=train.jsonl",
        "--set",
        "tasks.heldout=heldout.jsonl",
        "--set",
        "evaluation.tasks=1",
    )
    error = refused(monkeypatch, capsys, recipe, *options)
    assert "train.jsonl:2" in error
    assert "imag" in error


@pytest.mark.parametrize("image", ["/no/such/image.tar", "debian:12", "debootstrap:no suite", "/"])
def test_an_image_that_can_never_boot_is_refused_at_startup(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recipe: Path,
    tmp_path: Path,
    image: str,
) -> None:
    for name, said in (("train", image), ("heldout", "host")):
        task = {"id": name, "family": "f", "instruction": name, "image": said, "evaluator": {"kind": "none"}}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(task) + "\n")
    files = ("--set", "tasks.train=train.jsonl", "--set", "tasks.heldout=heldout.jsonl")
    settings = ("--set", "evaluation.tasks=1")
    error = refused(monkeypatch, capsys, recipe, *files, *settings)
    assert f"task train: image {image!r}" in error


def test_overlapping_task_files_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path, tmp_path: Path
) -> None:
    task = json.dumps({"id": "a", "family": "f", "instruction": "do", "evaluator": {"kind": "none"}}) + "\n"
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text(task)
    options = (
        "--set",
        "tasks.train=train.jsonl",
        "--set",
        "tasks.heldout=heldout.jsonl",
        "--set",
        "evaluation.tasks=1",
    )
    assert "1 tasks are also in tasks.train" in refused(monkeypatch, capsys, recipe, *options)


def test_unknown_commands_and_runs_are_reported_as_bad_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert headrace(monkeypatch, "rum") == cli.EXIT_BAD_INPUT
    assert headrace(monkeypatch, "resume", str(tmp_path / "none")) == cli.EXIT_BAD_INPUT
    assert "not a run directory" in capsys.readouterr().err


def test_a_run_name_cannot_escape_the_runs_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path
) -> None:
    assert "--name" in refused(monkeypatch, capsys, recipe, "--name", "../elsewhere")


def test_a_runs_folder_that_cannot_be_created_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    code = headrace(monkeypatch, "run", str(recipe), "--runs-dir", str(tmp_path / "file"), "--name", "x")
    assert code == cli.EXIT_BAD_INPUT
    assert "--runs-dir" in capsys.readouterr().err


def test_an_existing_run_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    code = headrace(monkeypatch, "run", str(recipe), "--runs-dir", str(tmp_path / "runs"), "--name", "mine")
    assert code == cli.EXIT_BAD_INPUT
    assert "headrace resume" in capsys.readouterr().err
    assert list((tmp_path / "runs" / "mine").iterdir()) == []


def test_the_verbose_option_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path
) -> None:
    assert headrace(monkeypatch, "run", str(recipe), "--set", "x", "--verbose") == cli.EXIT_BAD_INPUT
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_overrides_keep_their_types(recipe: Path, tmp_path: Path) -> None:
    config = load_recipe(
        recipe, ["buffer.max_staleness=3", "engines.start_timeout_s=7.5", "agent.kind=immediate"], tmp_path
    )
    assert config.buffer.max_staleness == 3
    assert config.engines.start_timeout_s == 7.5
    assert config.agent.kind == "immediate"


def eval_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a refused evaluation."""
    assert headrace(monkeypatch, "eval", *arguments) == cli.EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) == 1, error
    return error


@pytest.fixture
def run_dir(recipe: Path, tmp_path: Path) -> Path:
    """A run that was made and never driven, with a checkpoint that lacks a model."""
    prepare(RunRequest(recipe=recipe, runs_dir=tmp_path / "runs", name="one", overrides=["tasks.heldout_count=64"]))
    for version in ("1.9", "1.10"):
        (tmp_path / "runs" / "one" / "checkpoints" / version).mkdir(parents=True)
    return tmp_path / "runs" / "one"


def test_invalid_evaluation_requests_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path, tmp_path: Path
) -> None:
    assert "cannot be read" in eval_refused(monkeypatch, capsys, str(tmp_path / "none.toml"))
    assert "not a run directory" in eval_refused(monkeypatch, capsys, str(tmp_path))
    assert "is a recipe" in eval_refused(monkeypatch, capsys, str(recipe), "--checkpoint", "1.3")
    broken = tmp_path / "tasks.jsonl"
    assert "cannot be read" in eval_refused(monkeypatch, capsys, str(recipe), "--tasks", str(broken))
    broken.write_text("{}\n")
    assert "tasks.jsonl:1" in eval_refused(monkeypatch, capsys, str(recipe), "--tasks", str(broken))


def test_a_missing_checkpoint_is_reported_with_the_existing_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run_dir: Path
) -> None:
    error = eval_refused(monkeypatch, capsys, str(run_dir), "--checkpoint", "1.3")
    assert "it has 1.9, 1.10" in error
    (run_dir / "checkpoints" / "kept-1.5").mkdir()
    assert "kept-1.5 has no config.json" in eval_refused(monkeypatch, capsys, str(run_dir), "--checkpoint", "1.5")
    error = eval_refused(monkeypatch, capsys, str(run_dir), "--checkpoint", "1.3")
    assert "it has 1.5, 1.9, 1.10" in error
    assert "1.10 has no config.json" in eval_refused(monkeypatch, capsys, str(run_dir)), "the newest, by number"
    shutil.rmtree(run_dir / "checkpoints")
    assert "has no checkpoint yet" in eval_refused(monkeypatch, capsys, str(run_dir))
    assert "--set" in eval_refused(monkeypatch, capsys, str(run_dir), "--set", "buffer.batch_size=8")
    assert not (run_dir / "evaluations").exists()


def test_a_damaged_checkpoint_is_not_evaluated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run_dir: Path
) -> None:
    root, version = run_dir / "checkpoints", PolicyVersion(1, 20)
    staged = stage(root, version)
    shutil.copytree(MODEL, staged, dirs_exist_ok=True)
    write_manifest(staged, Manifest(version=version, previous_chain="", chain="", batches=()))
    weights = publish(staged, version) / "model.safetensors"
    *whole, last = weights.read_bytes()
    weights.write_bytes(bytes([*whole, last ^ 1]))
    error = eval_refused(monkeypatch, capsys, str(run_dir))
    assert "--checkpoint 1.20" in error
    assert "model.safetensors was altered after it was written: its digest is" in error
    assert "has rated a checkpoint" in eval_refused(monkeypatch, capsys, str(run_dir), "--checkpoint", "best")
    begin_evaluation(root, 20)
    end_evaluation(root, tag="step-20", success=0.5, versions={"1.20": 1})
    assert "--checkpoint 1.20" in eval_refused(monkeypatch, capsys, str(run_dir), "--checkpoint", "best")


def test_a_live_run_is_not_evaluated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run_dir: Path
) -> None:
    with sole_driver(RunDirectory(path=run_dir)):
        assert "is being driven by another process" in eval_refused(monkeypatch, capsys, str(run_dir))


def test_who_asks_whether_a_run_is_driven_keeps_no_driver_out(run_dir: Path) -> None:
    asked = FileLock(run_dir / "driver.lock", blocking=False)
    answered = threading.Timer(0.3, asked.release)
    answered.start()
    with sole_driver(RunDirectory(path=run_dir)):
        assert RunDirectory(path=run_dir).is_driven()
    answered.join()


def test_training_tasks_are_not_evaluated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path, run_dir: Path, tmp_path: Path
) -> None:
    """F24."""
    train = load_tasks(run_dir / "tasks" / "train.jsonl")[:2]
    tasks = tmp_path / "tasks.jsonl"
    write_tasks(tasks, [replace(task, id=TaskId(f"renamed-{n}")) for n, task in enumerate(train)])
    for source in (recipe, run_dir):
        error = eval_refused(monkeypatch, capsys, str(source), "--tasks", str(tasks))
        assert "2 tasks are also in tasks.train ('renamed-0', 'renamed-1')" in error


def test_tasks_that_the_run_cannot_score_are_not_evaluated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path, run_dir: Path, tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"id": "own", "family": "f", "instruction": "i", **SERVED}) + "\n")
    for source in (recipe, run_dir):
        error = eval_refused(monkeypatch, capsys, str(source), "--tasks", str(tasks))
        assert "services.grader is missing; task own (evaluator.kind http) needs it; add the table" in error


def test_an_output_folder_with_other_contents_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr("headrace.actors.run.checks.require_namespaces", lambda: None)
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    arguments = [str(recipe), "--out", str(out)]
    assert "contains files other than those" in eval_refused(monkeypatch, capsys, *arguments)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    evaluation = prepare_evaluation(EvalRequest(source=recipe, out=tmp_path / "free", runs_dir=tmp_path))
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "evaluation.json.partial").write_bytes(b"{")
    assert prepare_evaluation(EvalRequest(source=recipe, out=begun, runs_dir=tmp_path)).out == begun
    (out / "evaluation.json").write_text(json.dumps(evaluation.identity))
    assert prepare_evaluation(EvalRequest(source=recipe, out=out, runs_dir=tmp_path)).identity == evaluation.identity
    assert "contains files other than those" in eval_refused(monkeypatch, capsys, *arguments, "--samples", "9")
    (out / "summary.json").write_text("{}")
    assert "this evaluation is finished" in eval_refused(monkeypatch, capsys, *arguments)
    assert "is a file" in eval_refused(monkeypatch, capsys, str(recipe), "--out", str(recipe))
    assert not (tmp_path / "free").exists(), "a check makes nothing"


@pytest.mark.parametrize(("text", "wanted"), [("true", "true"), ('"true"', "true"), ("shuffled", "shuffled")])
def test_true_rewards_can_be_named_without_quotes(text: str, wanted: str, recipe: Path, tmp_path: Path) -> None:
    config = load_recipe(recipe, [f"training.rewards={text}"], tmp_path / "run")
    assert config.training.rewards == wanted


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["agent.loop.judge.rule=a:b", "buffer.rule=all | expiring(1)"], "buffer.rule is all | expiring(1); set all"),
        (["agent.loop.judge.rule=a:b", "learner.objective=ppo"], "takes its advantages from the critic"),
        (
            ["agent.loop.judge.rule=a:b", "learner.kind=slime", "learner.objective=gspo"],
            "slime's gspo has one gradient for all tokens of a row; set learner.objective to grpo",
        ),
        (
            [
                *("agent.loop.judge.rule=a:b", "learner.kind=slime"),
                'learner.slime.arguments=["--custom-advantage-function-path", "mine.function"]',
            ],
            "--custom-advantage-function-path in learner.slime.arguments replaces all advantages; remove it",
        ),
        ([], "credit is steps, but no scores exist without a judge; set service or rule"),
    ],
)
def test_credit_for_steps_is_refused_where_it_would_mean_something_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], overrides: list[str], reason: str
) -> None:
    recipe = Path(__file__).parents[2] / "scripts" / "recipes" / "swe_rl.toml"
    sets = ["agent.loop.judge.credit=steps", *overrides]
    error = refused(monkeypatch, capsys, recipe, *(part for one in sets for part in ("--set", one)))
    assert "agent.loop.judge" in error
    assert reason in error


@pytest.mark.parametrize(
    ("removed", "instead"),
    [
        ("buffer.advantage=centered", "'grpo', 'grpo_no_std' or 'leave_one_out'"),
        ("buffer.advantage=grpo_first_round", "'grpo', 'grpo_no_std' or 'leave_one_out'"),
        ("push.verify=engines", "'snapshot' or 'off'"),
    ],
)
def test_a_removed_value_is_refused_with_those_that_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], removed: str, instead: str
) -> None:
    recipe = Path(__file__).parents[2] / "scripts" / "recipes" / "simulated.toml"
    error = refused(monkeypatch, capsys, recipe, "--set", removed)
    assert removed.partition("=")[0] in error
    assert instead in error
