"""A user's way to the runs of a cluster, from one of its nodes.

Invariants:
- The actor that supervises runs is started by the first run that is submitted, and is found by all others.
- A submission contains absolute paths only: the recipe is read here, and its model and tasks on the control node.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from headrace.actors.cluster.nodes.checks import refuse_absent_roles
from headrace.actors.cluster.nodes.probe import living_nodes
from headrace.actors.cluster.runs.contract import ACTOR_NAME, LogPage, NodeDrained, NodeStatus, Readiness, RunsApi
from headrace.actors.cluster.runs.layout import ClusterTerms
from headrace.actors.cluster.runs.records import RAY_USER, Recipe, RunEvent, RunId, RunRecord, Submission
from headrace.actors.cluster.runs.runs import Runs
from headrace.actors.engines.members_file import EngineStatus
from headrace.actors.errors import ActorLost, RunsMissing, RunUnknown
from headrace.actors.run.config import absolute_paths, read_recipe
from headrace.actors.run.placement import CLUSTER_ABSENT_S, ClusterSection
from headrace.actors.runtime.actors.nodes import NAMESPACE, Role
from headrace.actors.runtime.actors.operations import until_back
from headrace.actors.runtime.actors.runtime import RayRuntime
from headrace.actors.runtime.version import RUNNING

T = TypeVar("T")

PATIENCE_S: Final = 120.0
"""Time limit for the actor to come back, for example after the head of the cluster was lost."""
EVENTS_S: Final = 20.0
"""Longest wait of one call for the next events."""
LOG_BYTES: Final = 1 << 20


async def start_runs(section: ClusterSection, *, quotas: Path | None = None) -> Runs:
    """Return the actor that supervises the runs of the cluster to which this process is connected; start it on the
    control node if there is none, and let it start again if it runs another version of headrace than is installed
    there. Raises CannotBePlaced, StartFailed, RunRefused if this process has another version than the control node, and
    errors of its table."""
    terms = ClusterTerms.of(section)
    refuse_absent_roles(await living_nodes(), {Role.CONTROL: terms.roles.control})
    runtime = RayRuntime(
        namespace=NAMESPACE, roles=terms.roles.labels(), absent_s=CLUSTER_ABSENT_S, logs=terms.log_terms()
    )
    runs = await runtime.spawn(Runs, terms, quotas=quotas, name=ACTOR_NAME, resources=section.on(Role.CONTROL))
    # An actor of another version ends its process, and its successor answers.
    await until_back(lambda: runs.renew(RUNNING), deadline_s=PATIENCE_S)
    return runs


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
    return absolute_paths(read_recipe(recipe, overrides), recipe)


class RunsClient(Protocol):
    """Client of a user's runs, over Ray (`ClusterClient`) or over HTTP (`control.client.ControlClient`)."""

    async def submit(self, name: str, recipe: Recipe, idempotency_key: str) -> RunRecord: ...
    async def runs(self) -> tuple[RunRecord, ...]: ...
    async def run(self, run_id: str) -> RunRecord: ...
    async def status(self, run_id: str) -> dict[str, Any]: ...
    async def report(self, run_id: str) -> dict[str, Any]: ...
    async def drain(self, run_id: str) -> RunRecord: ...
    async def stop(self, run_id: str) -> RunRecord: ...
    async def resume(self, run_id: str, changes: tuple[str, ...] = ()) -> RunRecord: ...
    async def upgrade(self, run_id: str) -> RunRecord: ...
    async def nodes(self) -> tuple[NodeStatus, ...]: ...
    async def drain_node(self, node: str, deadline_s: float) -> NodeDrained: ...
    async def engines(self, run_id: str) -> tuple[EngineStatus, ...]: ...
    async def add_engine(self, run_id: str, url: str, timeout_s: float) -> str: ...
    async def remove_engine(self, run_id: str, engine_id: str, timeout_s: float) -> str: ...
    async def logs(self, run_id: str, *, actor: str | None = None, after: str = "") -> LogPage: ...
    async def ready(self, run_id: str) -> Readiness: ...
    def events(self, run_id: str, *, after: int = 0) -> AsyncGenerator[RunEvent, None]: ...


class ClusterClient:
    """The runs of one owner, over a connection of this process to the cluster; has the methods of `ControlClient`.

    Whoever has the token of a cluster can do everything there: the owner is a name that keeps users apart, and no
    protection."""

    def __init__(self, runs: Runs, owner: str) -> None:
        self._actor, self._owner = runs, owner
        self._runs: RunsApi = runs

    async def submit(self, name: str, recipe: Recipe, idempotency_key: str) -> RunRecord:
        """Submit a run."""
        submission = Submission(name=name, owner=self._owner, recipe=recipe, idempotency_key=idempotency_key)
        return await until_back(lambda: self._runs.submit(submission, RAY_USER), deadline_s=PATIENCE_S)

    async def runs(self) -> tuple[RunRecord, ...]:
        """Return the runs of the owner."""
        return await until_back(lambda: self._runs.runs(self._owner), deadline_s=PATIENCE_S)

    async def run(self, run_id: str) -> RunRecord:
        """Return a run. Raises RunUnknown if it belongs to another owner."""
        record = await until_back(lambda: self._runs.run(RunId(run_id)), deadline_s=PATIENCE_S)
        if record.owner != self._owner:
            raise RunUnknown(f"run {run_id} belongs to {record.owner}, not to {self._owner}: name its --owner")
        return record

    async def status(self, run_id: str) -> dict[str, Any]:
        """Return the document of `headrace status --json`."""
        return await self._on(run_id, self._runs.status)

    async def report(self, run_id: str) -> dict[str, Any]:
        """Return the document of `headrace report --json`."""
        return await self._on(run_id, self._runs.report)

    async def drain(self, run_id: str) -> RunRecord:
        return await self._on(run_id, self._runs.drain, RAY_USER)

    async def stop(self, run_id: str) -> RunRecord:
        return await self._on(run_id, self._runs.stop, RAY_USER)

    async def resume(self, run_id: str, changes: tuple[str, ...] = ()) -> RunRecord:
        """Queue an ended run again, with changed keys. It is asked once: after a lost answer, a second request would be
        refused."""
        return await self._runs.resume((await self.run(run_id)).run_id, changes, RAY_USER)

    async def recover(self, run_id: str) -> RunRecord:
        """Continue a run whose control node has lost its disk from its storage."""
        return await until_back(lambda: self._actor.recover(RunId(run_id), self._owner), deadline_s=PATIENCE_S)

    async def upgrade(self, run_id: str) -> RunRecord:
        """Let a live run start again under what is installed."""
        return await self._on(run_id, self._runs.upgrade, RAY_USER)

    async def nodes(self) -> tuple[NodeStatus, ...]:
        """Return the living nodes of the cluster."""
        return await until_back(self._runs.nodes, deadline_s=PATIENCE_S)

    async def drain_node(self, node: str, deadline_s: float) -> NodeDrained:
        """Let the runs of all owners leave a node."""
        return await until_back(lambda: self._runs.drain_node(node, deadline_s, RAY_USER), deadline_s=PATIENCE_S)

    async def engines(self, run_id: str) -> tuple[EngineStatus, ...]:
        """Return the engines of a run."""
        return await self._on(run_id, self._runs.engines)

    async def add_engine(self, run_id: str, url: str, timeout_s: float) -> str:
        """Attach a server to a live run, and return the name of the engine."""
        return await self._on(run_id, self._runs.add_engine, url, timeout_s, RAY_USER)

    async def remove_engine(self, run_id: str, engine_id: str, timeout_s: float) -> str:
        """Remove an engine from a live run, and return its name."""
        return await self._on(run_id, self._runs.remove_engine, engine_id, timeout_s, RAY_USER)

    async def logs(self, run_id: str, *, actor: str | None = None, after: str = "") -> LogPage:
        """Return the next lines of a run's logs, those of one actor or all."""
        return await self._on(run_id, self._runs.logs, actor, after, LOG_BYTES)

    async def ready(self, run_id: str) -> Readiness:
        """Return the checks of a run."""
        return await self._on(run_id, self._runs.ready)

    async def events(self, run_id: str, *, after: int = 0) -> AsyncGenerator[RunEvent, None]:
        """Yield the events of a run after number `after`, until the run has ended."""
        while True:
            page = await self._on(run_id, self._runs.events, after, EVENTS_S)
            for event in page.events:
                after = event.number
                yield event
            if page.ended:
                return

    async def _on(self, run_id: str, method: Callable[..., Awaitable[T]], *arguments: object) -> T:
        """Call a method of the actor for one of the owner's runs, again while the actor restarts."""
        record = await self.run(run_id)
        return await until_back(lambda: method(record.run_id, *arguments), deadline_s=PATIENCE_S)
