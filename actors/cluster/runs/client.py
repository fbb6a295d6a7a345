"""A user's way to the runs of a cluster, from one of its nodes.

Invariants:
- The actor that supervises runs is started by the first run that is submitted, and is found by all others.
- A submission contains absolute paths only: the recipe is read here, and its model and tasks on the control node.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from headrace.actors.cluster.nodes.checks import refuse_absent_roles
from headrace.actors.cluster.nodes.probe import living_nodes
from headrace.actors.cluster.runs.contract import ACTOR_NAME, EventPage, Method
from headrace.actors.cluster.runs.layout import ClusterTerms
from headrace.actors.cluster.runs.operations import operation_of
from headrace.actors.cluster.runs.records import RAY_USER, RunEvent, RunId, RunRecord
from headrace.actors.cluster.runs.runs import Runs
from headrace.actors.errors import ActorMissing, RunsMissing
from headrace.actors.run.placement import ClusterSection
from headrace.actors.runtime.actors.nodes import NAMESPACE, NodeRole
from headrace.actors.runtime.actors.operations import CLUSTER_ABSENT_S, until_back
from headrace.actors.runtime.actors.runtime import RayRuntime
from headrace.actors.runtime.version import RUNNING

P = ParamSpec("P")
R = TypeVar("R")

PATIENCE_S: Final = 120.0
"""Time limit for the actor to come back, for example after the head of the cluster was lost."""
EVENTS_S: Final = 20.0
"""Longest wait of one call for the next events."""


async def start_runs(section: ClusterSection, *, quotas: Path | None = None) -> Runs:
    """Return the actor that supervises the runs of the cluster to which this process is connected; start it on the
    control node if there is none, and let it start again if it runs another version of headrace than is installed
    there. Raises CannotBePlaced, StartFailed, RunRefused if this process has another version than the control node, and
    errors of its table."""
    terms = ClusterTerms.of(section)
    refuse_absent_roles(await living_nodes(), {NodeRole.CONTROL: terms.roles.control})
    runtime = RayRuntime(
        namespace=NAMESPACE, roles=terms.roles.labels(), absent_s=CLUSTER_ABSENT_S, logs=terms.log_terms()
    )
    runs = await runtime.spawn(Runs, terms, quotas=quotas, name=ACTOR_NAME, resources=section.on(NodeRole.CONTROL))
    # An actor of another version ends its process, and its successor answers.
    await until_back(lambda: runs.renew(RUNNING), deadline_s=PATIENCE_S)
    return runs


async def find_runs() -> Runs:
    """Return the actor that supervises the runs. Raises RunsMissing, ActorLost."""
    try:
        return await RayRuntime(namespace=NAMESPACE).find(Runs, ACTOR_NAME)
    except ActorMissing as error:
        raise RunsMissing(
            "no run was ever submitted to this cluster: submit one with `headrace run RECIPE --address ADDRESS`"
        ) from error


class ClusterClient:
    """The runs of one owner, over a connection of this process to the cluster; implements `contract.RunsClient`.

    Whoever has the token of a cluster can do everything there: the owner is a name that keeps users apart, and no
    protection."""

    def __init__(self, runs: Runs, owner: str) -> None:
        self._runs, self._caller = runs, replace(RAY_USER, owner=owner)

    async def ask(self, method: Method[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """See `RunsClient.ask`."""
        operation = operation_of(method)
        given = operation.bound(*arguments, **named)
        call: Callable[[], Awaitable[R]] = partial(self._runs.perform, operation.name, self._caller, given)
        return await (until_back(call, deadline_s=PATIENCE_S) if operation.repeatable else call())

    async def recover(self, run_id: RunId) -> RunRecord:
        """Continue a run whose control node has lost its disk from its storage."""
        return await until_back(lambda: self._runs.recover(run_id, self._caller.owner), deadline_s=PATIENCE_S)

    async def events(self, run_id: RunId, *, after: int = 0) -> AsyncGenerator[RunEvent, None]:
        """See `RunsClient.events`."""
        while True:
            arguments = {"run_id": run_id, "after": after, "wait_s": EVENTS_S}
            call = partial(self._runs.perform, "events", self._caller, arguments)
            page: EventPage = await until_back(call, deadline_s=PATIENCE_S)
            for event in page.events:
                after = event.number
                yield event
            if page.ended:
                return
