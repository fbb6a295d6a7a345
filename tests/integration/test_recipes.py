"""The recipes of published systems: two real optimizer steps of each, a check of every recipe with every machine file,
and the learning of the miniatures (slow)."""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections import defaultdict
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from benches.recipe import measure
from rich.console import Console

from headrace.actors.derivation.host import this_host
from headrace.actors.errors import ConfigError
from headrace.actors.record.files.metrics import read_metrics
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.launch import RunRequest, dry_run, prepare
from headrace.actors.run.report import report_of
from headrace.actors.run.run_status import status_of
from headrace.actors.telemetry.spans.store import SpanFolder
from headrace.buffer.audit.evidence import read_evidence, read_trajectories
from headrace.policies.miniatures import names
from headrace.policies.miniatures.building import write
from headrace.policies.miniatures.fitting import FitConfig
from support import run_rig as rig
from support.machine_files import MACHINES, MODELS, examples
from support.published_models import described_model
from support.scripted_service import ScriptedService, completion

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
RECIPES = {path.stem: path for path in sorted((SCRIPTS / "recipes").glob("*.toml"))}
MINIATURE = [name for name, path in RECIPES.items() if names.PREFIX in path.read_text()]
"""Recipes whose model is a miniature, which has the recipe's name."""
SHORT = FitConfig(steps=40, batch_size=8, learning_rate=4e-3)
"""A warm start of seconds: its answers often have the right form, and are seldom right."""
TWO_STEPS = (
    "training.steps=2",
    "buffer.batch_size=8",
    "buffer.group_size=4",
    "dispatcher.slots_per_worker=12",
    "dispatcher.evaluation_slots=4",
    "evaluation.tasks=4",
    "evaluation.samples=1",
    "evaluation.every_steps=0",
    "engines.count=1",
)


@pytest.fixture(scope="module")
def short_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with miniatures whose policies are hardly trained."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        for name in MINIATURE:
            write(name, names.resolved(f"{names.PREFIX}{name}"), SHORT)
    return cache


@pytest.fixture
def miniatures(short_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use these miniatures in place of the user's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(short_cache))


def spans_of(directory: RunDirectory) -> dict[str, list[dict[str, Any]]]:
    """All spans of all processes, by name, without the names of agents and tools."""
    spans = defaultdict(list)
    for span in SpanFolder.of_run(directory.path).spans():
        spans[span["name"].partition(" ")[0]].append(span)
    return spans


def tokens(span: dict[str, Any], what: str) -> int:
    """The number of `sampled_tokens`, `trained_tokens` or `masked_tokens` (for all reasons) of a session."""
    found = re.compile(rf"headrace\.session\.{what}\b")
    return sum(value for name, value in span["attributes"].items() if found.match(name))


def check_tokens(directory: RunDirectory, spans: dict[str, list[dict[str, Any]]]) -> None:
    """Every token that an engine sampled is trained or masked, and the stored rows agree with the sessions."""
    # The end of the run cancels the sessions that are being finished; their spans have no numbers.
    sessions = [span for span in spans["session.finish"] if "headrace.session.sampled_tokens" in span["attributes"]]
    assert sum(tokens(span, "sampled_tokens") for span in sessions) > 0
    for span in sessions:
        assert tokens(span, "sampled_tokens") == tokens(span, "trained_tokens") + tokens(span, "masked_tokens"), span
    sampled: dict[str, int] = defaultdict(int)
    for turn in spans["chat"]:
        sampled[turn["trace_id"]] += turn["attributes"].get("gen_ai.usage.output_tokens", 0)
    trained = {span["trace_id"]: tokens(span, "trained_tokens") for span in sessions}
    evidence = read_evidence(directory.path)
    members = [member.rollout_id for batch in evidence.batches for member in batch.members]
    assert len(members) == len(set(members)) == 16, "two batches of eight, nothing in both"
    wanted = {
        attempt.key: attempt for attempt in evidence.attempts if attempt.rollout_id in members and attempt.offered
    }
    for key, trajectory in read_trajectories(evidence, set(wanted)):
        assert trajectory is not None, key
        in_loss = sum(int(row.loss_mask_T.sum()) for row in trajectory.rows)
        assert in_loss == trained[wanted[key].trace_id] <= sampled[wanted[key].trace_id], key
        assert in_loss == sum(part.tokens for part in wanted[key].trained), key
    for span in sessions:
        assert tokens(span, "sampled_tokens") == sampled[span["trace_id"]], span


@pytest.mark.slow(but_first=True)
@pytest.mark.namespaces
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MINIATURE)
async def test_two_steps_of_a_recipe_train_every_sampled_token_once(
    ray_cluster: None, miniatures: None, tmp_path: Path, name: str
) -> None:
    request = RunRequest(recipe=RECIPES[name], runs_dir=tmp_path, name=name, overrides=TWO_STEPS, on=(MACHINES["cpu"],))
    config, directory = prepare(request)
    summary = await rig.run_prepared(config, directory)
    assert (summary.completed, summary.ledger_clean, summary.problems) == (True, True, ())
    assert (summary.steps, summary.lost, summary.trained_twice, summary.sandboxes_leaked) == (2, 0, 0, 0)
    assert (summary.evaluation_answers, summary.evaluation_infra) == (4, 0)
    spans = spans_of(directory)
    check_tokens(directory, spans)
    assert spans["execute_tool"], "no action was performed"
    boots = name not in ("search_r1", "tau")
    assert bool(spans["sandbox.boot"]) == boots
    assert summary.in_flight_at_push_min is not None


@pytest.mark.namespaces
@pytest.mark.timeout(600)
async def test_two_steps_of_a_mix_train_both_environments_in_their_shares(ray_cluster: None, tmp_path: Path) -> None:
    request = RunRequest(
        recipe=RECIPES["mix"], runs_dir=tmp_path, name="mix", overrides=TWO_STEPS, on=(MACHINES["cpu"],)
    )
    config, directory = prepare(request)
    summary = await rig.run_prepared(config, directory)
    assert (summary.completed, summary.ledger_clean, summary.problems) == (True, True, ())
    report = report_of(directory)
    assert {name: (source.trained, source.realised) for name, source in report.sources.items()} == {
        "subshell": (12, 0.75),
        "terminal": (4, 0.25),
    }
    evaluations = read_metrics(directory.metrics, ("evaluation",))
    assert [record["sources"]["terminal"]["answers"] for record in evaluations] == [16, 16]
    assert report.source_success == {name: own["success"] for name, own in evaluations[-1]["sources"].items()}
    steps = read_metrics(directory.metrics, ("step",))
    assert [step["sources"]["subshell"]["rollouts"] for step in steps] == [6, 6]
    assert all(step["sources"]["terminal"]["tokens"] > 0 for step in steps)
    shares = status_of(config, directory)["sources"]
    assert (shares["terminal"]["share"], shares["terminal"]["realised"]) == (0.25, 0.25)
    table = Console(width=200, file=StringIO(), record=True)
    table.print(report.tables())
    assert re.search(r"terminal +25\.0% +25\.0% +4 ", table.export_text())


@pytest.mark.slow
@pytest.mark.namespaces
@pytest.mark.timeout(900)
async def test_F14_the_report_of_a_run_names_a_slow_simulated_customer(
    ray_cluster: None, miniatures: None, tmp_path: Path
) -> None:
    async def slowly(request: web.Request) -> web.StreamResponse:
        if request.method == "GET":  # the check at start, which asks for the models
            return web.json_response({"data": []})
        said = (await request.json())["messages"]
        await asyncio.sleep(4.0)
        return web.json_response(completion("Cancel order #W10." if len(said) < 5 else "###STOP###"))

    async with ScriptedService(slowly).served() as url:
        service = ("services.user.kind=model", f"services.user.url={url}")
        simulator = ("environment.retail.simulator=llm", "environment.retail.service=user")
        request = RunRequest(
            recipe=RECIPES["tau"],
            runs_dir=tmp_path,
            name="tau",
            overrides=(*TWO_STEPS, *service, *simulator),
            on=(MACHINES["cpu"],),
        )
        config, directory = prepare(request)
        summary = await rig.run_prepared(config, directory)
    assert (summary.completed, summary.problems) == (True, ())
    report = report_of(directory)
    assert report.held_up_by == summary.held_up_by == "service.user"
    assert report.service_shares["user"] > 0.5
    assert report.services["user"].failures == 0


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_passes_its_dry_run_on_every_machine(
    miniatures: None, tmp_path: Path, name: str, machine: str
) -> None:
    on, published = MACHINES[machine], tomllib.loads(RECIPES[name].read_text()).get("published", {})
    given = [*examples(on), f"agent.program.folder={tmp_path}"]
    if machine != "cpu":
        model = described_model(tmp_path, MODELS.get(machine, "Qwen3-4B"))
        given.append(f"model.path={model}")
    elif name == "simulated":
        given.append(f"model.path={SCRIPTS / 'models' / 'tiny'}")
    own = tomllib.loads(on.read_text())
    kind = own["learner"]["kind"]
    if kind in published.get("refused_by", ()) and machine != "cpu":
        # A machine file with an objective of its own refuses what belongs to another.
        with pytest.raises(ConfigError, match=r"learner\..*( slime|has no effect)"):
            dry_run(RECIPES[name], (on,), given)
        return
    if name == "search_r1" and "cluster.address" in own.get("needs", {}):
        with pytest.raises(ConfigError, match=r"services\.retriever\.corpus is served on one host"):
            dry_run(RECIPES[name], (on,), given)
        return
    checked = dry_run(RECIPES[name], (on,), given)
    assert min(checked.tasks) > 0
    assert on.name in checked.origins.values()
    sampling, rate = checked.config.sampling, checked.config.learner.learning_rate
    if machine == "cpu":
        assert f"{RECIPES[name].name} [published]" not in checked.origins.values()
    elif name != "simulated":
        assert rate <= 1e-6
        # A machine file of one published system has its own.
        most = own.get("sampling", {}).get("most_context_tokens", published["sampling"]["most_context_tokens"])
        assert min(most, 16_384) <= sampling.max_context_tokens <= most
        assert {"source", "gpus"} <= published.keys()
    asked = r"is asked at the submission for \d+ GPUs"
    if checked.config.cluster.is_local:
        asked = r"needs \d GPUs of its own .* offers 0" if machine != "cpu" and not this_host().gpus else ""
    assert not asked or any(re.search(asked, reason) for reason in checked.absent)


@pytest.mark.slow
@pytest.mark.namespaces
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", MINIATURE)
def test_a_miniature_learns_from_true_rewards_only(tmp_path: Path, name: str, seed: int) -> None:
    figures = measure(name, tmp_path, seed=seed, control=True)
    assert (figures.problems, figures.misses) == ((), ())
    assert figures.infra_answers == 0
