"""A user's way to the runs of a cluster, from one of its nodes.

Invariants:
- The actor that supervises runs is started by the first run that is submitted, and is found by all others.
- A submission contains absolute paths only: the recipe is read here, and its model and tasks on the control node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.actors.cluster.checks import refuse_absent_roles
from headrace.actors.cluster.probe import living_nodes
from headrace.actors.errors import ActorLost, RunsMissing
from headrace.actors.run.config import absolute_paths, read_document
from headrace.actors.runs.contract import ACTOR_NAME
from headrace.actors.runs.layout import ClusterTerms
from headrace.actors.runs.runs import CLUSTER_ABSENT_S, Runs
from headrace.actors.runtime.nodes import NAMESPACE, Role
from headrace.actors.runtime.runtime import RayRuntime

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from headrace.actors.run.cluster_section import ClusterSection


async def start_runs(section: ClusterSection, *, quotas: Path | None = None) -> Runs:
    """Return the actor that supervises the runs of the cluster to which this process is connected; start it on the
    control node if there is none. Raises CannotBePlaced, StartFailed, and errors of its table."""
    terms = ClusterTerms.of(section)
    refuse_absent_roles(await living_nodes(), {Role.CONTROL: terms.roles.control})
    runtime = RayRuntime(namespace=NAMESPACE, roles=terms.roles.labels(), absent_s=CLUSTER_ABSENT_S)
    return await runtime.spawn(Runs, terms, quotas=quotas, name=ACTOR_NAME, resources=section.on(Role.CONTROL))


async def find_runs() -> Runs:
    """Return the actor that supervises the runs. Raises RunsMissing."""
    try:
        return await RayRuntime(namespace=NAMESPACE).find(Runs, ACTOR_NAME)
    except ActorLost as error:
        raise RunsMissing(
            "no run was ever submitted to this cluster: submit one with `headrace run RECIPE --address ADDRESS`"
        ) from error


def document_of_recipe(recipe: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return a recipe as a submission contains it. Raises ConfigError."""
    return absolute_paths(read_document(recipe, overrides), recipe)
