"""Two steps of each recipe, and on each machine file, through the launch of a run. Engines, learner, agent and
sandboxes are simulated; everything else is what recipe and machine file say."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from headrace.actors.run.launch import RunRequest, prepare
from headrace.policies.miniatures import names
from support import run_rig as rig
from support.cluster_rig import ROOT, SHARED_ROLE, STATE, Cluster
from support.machine_files import MACHINES, examples
from support.marks import NEEDS_HOSTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CLUSTER_CPUS: Final = 6
RECIPES: Final = {
    path.stem: path
    for path in sorted((ROOT / "scripts" / "recipes").glob("*.toml"))
    if names.PREFIX not in path.read_text()
}
"""Recipes whose tasks a simulated agent can have; `test_recipes` makes two real steps of the miniatures'."""
ON_A_CLUSTER: Final = [name for name, path in MACHINES.items() if examples(path)]
SIMULATED: Final = (
    "agent.kind=simulated",
    *(f"agent.simulated.durations.{key}" for key in ("mean_s=0.5", "median_s=0.4", "cap_s=2")),
    "sandbox.provider=simulated",
    "sandbox.simulated.boot_s=0.01",
    "engines.backend=simulated",
    "engines.simulated.push_s=0.1",
    "learner.kind=simulated",
    "learner.simulated.step_s=0.2",
    "training.steps=2",
    "buffer.batch_size=16",
    "buffer.group_size=4",
    "evaluation.tasks=4",
    "evaluation.every_steps=0",
)
"""What takes the place of devices, models and programs."""


@pytest.mark.parametrize("name", RECIPES)
async def test_each_recipe_makes_two_steps_with_what_is_published(ray_cluster: None, tmp_path: Path, name: str) -> None:
    request = RunRequest(
        recipe=RECIPES[name], runs_dir=tmp_path, name=name, on=(MACHINES["8gpu"],), overrides=SIMULATED
    )
    await two_steps(request)


@pytest.mark.parametrize("machine", [name for name in MACHINES if name not in ON_A_CLUSTER])
async def test_each_machine_file_of_one_host_makes_two_steps(ray_cluster: None, tmp_path: Path, machine: str) -> None:
    recipe = RECIPES["quickstart"]
    request = RunRequest(recipe=recipe, runs_dir=tmp_path, name=machine, on=(MACHINES[machine],), overrides=SIMULATED)
    await two_steps(request)


async def two_steps(request: RunRequest) -> None:
    config, directory = prepare(request)
    summary = await rig.run_prepared(config, directory)
    assert (summary.completed, summary.steps, summary.ledger_clean) == (True, 2, True)
    assert (summary.lost, summary.trained_twice, summary.sandboxes_leaked) == (0, 0, 0)


@pytest.mark.parametrize("machine", [pytest.param(name, marks=NEEDS_HOSTS) for name in ON_A_CLUSTER])
def test_each_machine_file_of_a_cluster_makes_two_steps_there(cluster: Cluster, machine: str) -> None:
    given = {one.partition("=")[0]: one for one in examples(MACHINES[machine])}
    given |= {
        "cluster.address": f"cluster.address={cluster.ray.address}",
        "cluster.state": f"cluster.state={STATE}",
        "cluster.storage": f"cluster.storage={cluster.storage}",
    }
    roles = (f"cluster.roles.{role}={SHARED_ROLE}" for role in ("rollout", "engine", "learner"))
    words = (word for one in (*given.values(), *roles, *SIMULATED) for word in ("--set", one))
    options = ("--on", str(MACHINES[machine]), "--name", machine, "--owner", "tester", "--detach")
    cluster.headrace("run", str(RECIPES["quickstart"]), *options, *words)
    cluster.run_named(machine).check_finished(2)
