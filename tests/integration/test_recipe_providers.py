"""Parts that a recipe names: the E2B provider, and providers and objectives of other packages."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.actors.errors import ConfigError
from headrace.actors.evaluation.graders.evaluator import Evaluator
from headrace.actors.evaluation.graders.verdict import EvaluationRequest
from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.checks import check_objective
from headrace.actors.runtime.pools.config import SandboxKind, SandboxSection
from headrace.actors.runtime.pools.leases import SandboxConnections
from headrace.actors.runtime.pools.providers import check_provider
from headrace.actors.runtime.pools.sandbox_pool import SandboxPool
from headrace.buffer.core.task_catalog import TaskCatalog
from headrace.buffer.tasks.evaluators import StateEvaluator, VerifierEvaluator
from headrace.buffer.tasks.task import Task, TaskId
from headrace.buffer.tasks.verifiers import VerifierForm, VerifierSpec
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.learners.objectives import registry
from headrace.policies.learners.objectives.config import ObjectiveConfig
from headrace.policies.learners.objectives.loss import weighted_loss
from headrace.policies.learners.objectives.tokens import TrainedTokens
from headrace.sandboxes.base import SandboxId, SandboxRef, SandboxSpec
from headrace.sandboxes.e2b.provider import E2bConfig
from headrace.sandboxes.errors import SpecRefused
from headrace.sandboxes.local.provider import LocalProvider
from headrace.serve.sandbox_servers.e2b.server import E2bServer
from headrace.serve.tracing.telemetry import TelemetryConfig

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.namespaces
CHECK = "import sys; sys.exit(open('/workspace/answer').read() != 'right')"
TASK = Task(
    id=TaskId("answer"),
    family="answer",
    instruction="write the answer",
    evaluator=StateEvaluator(check=CHECK),
)
MODULE = """
from headrace.sandboxes.local.provider import LocalProvider


class Logged:
    def __init__(self, log=None):
        self.inner, self.log = LocalProvider(), log
        self.features = self.inner.features

    async def create(self, spec):
        if not self.log:
            raise RuntimeError("made for attaching")
        with open(self.log, "a") as file:
            file.write("boot\\n")
        return await self.inner.create(spec)

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Half:
    features = frozenset()


def before(logprobs, micro, clip, entropies):
    "An objective in the form of headrace 0.1."
"""


@pytest.fixture(autouse=True)
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_providers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_providers", raising=False)


@asynccontextmanager
async def opened(section: SandboxSection, folder: Path) -> AsyncIterator[tuple[SandboxPool, Evaluator]]:
    directory = RunDirectory(path=folder / "run")
    directory.path.mkdir()
    telemetry = ActorTelemetry(config=TelemetryConfig(enabled=False), run_dir=None)
    tasks = TaskCatalog(train=[TASK, LIVE])
    async with SandboxPool(section, directory=directory) as pool, Evaluator(pool, telemetry, tasks) as evaluator:
        yield pool, evaluator


LIVE = Task(
    id=TaskId("live"),
    family="answer",
    instruction="write the answer",
    evaluator=VerifierEvaluator(
        verifier=VerifierSpec(form=VerifierForm.HARBOR, live=True, allow_root=True),
        hidden_files={
            "/tests/test.sh": "[ $(cat /workspace/answer) = right ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n"
        },
    ),
)


async def verdicts(pool: SandboxPool, evaluator: Evaluator, *answers: str, task: Task = TASK) -> list[Any]:
    """The rewards of agents that leave these answers, in sandboxes of a pool."""
    requests = {}
    async with SandboxConnections() as connections:
        for answer in answers:
            [ref] = await pool.lease([SandboxSpec()])
            sandbox = await connections.attach(ref)
            await sandbox.exec(f"printf {answer} > /workspace/answer", timeout_s=20)
            requests[answer] = EvaluationRequest(key=answer, task_id=task.id, sandbox=ref)
        ended = (await evaluator.begin(requests)).ready
        while len(ended) < len(answers):
            ended |= (await evaluator.fetch([key for key in requests if key not in ended])).ready
    return [ended[answer].reward for answer in answers]


async def test_a_recipe_evaluates_rollouts_in_e2b_sandboxes(tmp_path: Path) -> None:
    async with LocalProvider() as local, E2bServer(local) as server:
        (tmp_path / "key").write_text("e2b_0000")
        config = E2bConfig(api_url=server.url, api_key_file=tmp_path / "key")
        section = SandboxSection(provider="e2b", e2b=config)
        check_provider(section)
        async with opened(section, tmp_path) as (pool, evaluator):
            assert await verdicts(pool, evaluator, "right", "wrong") == [1.0, 0.0]
            assert await verdicts(pool, evaluator, "right", "wrong", task=LIVE) == [1.0, 0.0]


async def test_a_recipe_can_use_a_provider_from_another_package(tmp_path: Path) -> None:
    log = tmp_path / "log"
    section = SandboxSection(provider="their_providers:Logged", settings={"log": str(log)})
    check_provider(section)
    async with opened(section, tmp_path) as (pool, evaluator):
        assert await verdicts(pool, evaluator, "right", "wrong") == [1.0, 0.0]
    assert log.read_text().count("boot") == 4, "two agents, and a clean sandbox for each"


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"provider": "docker"}, "there is no sandbox provider 'docker'; available: local, remote, e2b"),
        ({"provider": "their_providers:Absent"}, "has no attribute 'Absent'"),
        ({"provider": "no_such_package:Provider"}, "No module named 'no_such_package'"),
        ({"provider": "their_providers:Half"}, "'create' is missing"),
        ({"provider": "their_providers:Logged", "settings": {"colour": "red"}}, "does not accept them"),
        ({"provider": "local", "settings": {"log": "x"}}, "sandbox.settings"),
    ],
)
def test_a_missing_or_unsuitable_provider_is_refused_at_startup(section: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_provider(SandboxSection.model_validate(section))


async def test_a_ref_of_an_unknown_provider_is_refused() -> None:
    ref = SandboxRef(provider="docker", id=SandboxId("x"), endpoint="", secret="")
    async with SandboxConnections() as connections:
        with pytest.raises(SpecRefused, match="'docker' cannot be attached to"):
            await connections.attach(ref)


def test_builtin_providers_keep_their_kind() -> None:
    assert SandboxSection.model_validate({"provider": "e2b"}).provider is SandboxKind.E2B


def example(folder: Path, name: str) -> None:
    """Write a Python example of docs/extending.md as a module."""
    page = (ROOT / "docs" / "extending.md").read_text()
    [block] = [text.split("```")[0] for text in page.split("```python\n")[1:] if text.startswith(f"# {name}.py\n")]
    (folder / f"{name}.py").write_text(block)


async def test_the_documented_provider_boots_and_attaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example(tmp_path, "providers")
    monkeypatch.delitem(sys.modules, "providers", raising=False)
    log = tmp_path / "boots.log"
    section = SandboxSection(provider="providers:Logged", settings={"log": str(log)})
    async with opened(section, tmp_path) as (pool, evaluator):
        assert await verdicts(pool, evaluator, "right") == [1.0]
    assert [line.split()[1] for line in log.read_text().splitlines()] == ["host", "host"]


@pytest.mark.parametrize(
    ("name", "settings", "metric"),
    [("importance_sampled", {}, "weight"), ("plain", {"correction": "weights"}, "mean_ratio")],
)
def test_the_documented_objective_has_the_reinforce_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, Any], metric: str
) -> None:
    example(tmp_path, "objectives")
    monkeypatch.delitem(sys.modules, "objectives", raising=False)
    config = ObjectiveConfig(objective=f"objectives:{name}", **settings)
    registry.check_objective(config)
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    tokens = TrainedTokens(
        logprobs_N=logprobs,
        entropies_N=torch.zeros(3),
        behaviour_logprobs_N=torch.tensor([-1.0, -2.0, -9.0]),
        reference_logprobs_N=None,
        advantages_N=torch.tensor([1.0, -1.0, 0.5]),
        rows_N=torch.tensor([0, 0, 1]),
        trajectories_N=torch.tensor([0, 0, 1]),
    )
    weights = torch.tensor([0.5, 0.5, 1.0])
    loss, sums = weighted_loss(tokens, weights, registry.OBJECTIVES.find(config.objective)(), config)
    loss.backward()
    # On policy the weight is 1; the last token's ratio is e^6, capped at 2.
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.5, 0.5, -1.0])
    assert sums.tokens == 3
    assert metric in sums.means()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a2c", "there is no objective 'a2c'; available: grpo, gspo, cispo, ppo"),
        ("math:pi", "neither an Objective nor a function"),
        ("their_providers:before", r"cannot be called with \(tokens, config\): missing a required argument"),
        ("no_such_package:loss", "No module named 'no_such_package'"),
    ],
)
def test_an_unknown_objective_is_refused_at_startup(tmp_path: Path, name: str, reason: str) -> None:
    learner = LearnerConfig(model_dir=tmp_path, checkpoint_dir=tmp_path, snapshot_dir=tmp_path, objective=name)
    with pytest.raises(ConfigError, match=reason):
        check_objective(learner)
