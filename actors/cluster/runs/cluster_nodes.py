"""The nodes of a cluster, for the actor that supervises runs: their agents, what is on them, and their drain.

Invariants:
- Every living node with a role has an agent; one that died is started again.
- No node delays another: each is asked at the same time as the others, for a bounded time.
- Folders are removed from the disks of other nodes only. On the control node they have the ledgers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from headrace.actors.cluster.nodes.checks import Node
from headrace.actors.cluster.nodes.probe import living_nodes
from headrace.actors.cluster.runs.contract import LEAVE_S, NodeDrained, NodeStatus
from headrace.actors.cluster.runs.layout import ClusterTerms
from headrace.actors.cluster.runs.records import ActualState, RunRecord
from headrace.actors.errors import ActorError, ActorLost, ConfigError
from headrace.actors.run.node_drain import RunLeft
from headrace.actors.run.service import Service
from headrace.actors.runtime.actors.nodes import NAMESPACE, NodeAgent, NodeReport, agent_name
from headrace.actors.runtime.actors.operations import until_back
from headrace.actors.runtime.actors.runtime import RayRuntime, Resources, namespace_of

START_S: Final = 60.0
"""Time limit for an agent to start: its process imports Ray and headrace."""
ASK_S: Final = 5.0
"""Time limit for an agent or a service to answer a question about a node."""
LOGS: Final = ("logs",)
"""What a failed run keeps on the nodes."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Agent:
    node: Node
    agent: NodeAgent


class ClusterNodes:
    """Nodes of the cluster of this process."""

    def __init__(self, terms: ClusterTerms) -> None:
        self._terms = terms
        self._runtime = RayRuntime(namespace=NAMESPACE, roles=terms.roles.labels(), logs=terms.log_terms())
        self._agents: dict[str, _Agent] = {}
        """Agents by the ids of their nodes."""

    @property
    def agents(self) -> dict[str, NodeAgent]:
        """The agents that are known to be alive, by the ids of their nodes."""
        return {node: known.agent for node, known in self._agents.items()}

    async def keep_agents(self) -> None:
        """Start the agents that are missing, and forget those of nodes that are gone. Raises ConfigError if the head
        does not answer."""
        labels = set(self._terms.roles.labels().values())
        nodes = {node.node: node for node in await living_nodes() if node.role in labels}
        self._agents = {node: agent for node, agent in self._agents.items() if node in nodes}
        await asyncio.gather(*(self._keep_agent(node) for node in nodes.values()))

    async def _keep_agent(self, node: Node) -> None:
        try:
            async with asyncio.timeout(START_S):
                # An agent that is alive is found, and one that is dead is replaced.
                agent = await self._runtime.spawn(
                    NodeAgent, self._terms.state, name=agent_name(node.node), resources=Resources(node=node.node)
                )
        except (ActorError, TimeoutError) as error:
            self._agents.pop(node.node, None)
            logger.warning("%s has no agent at present: %r", node.named, error)
        else:
            self._agents[node.node] = _Agent(node=node, agent=agent)

    async def remove_folders(self, records: Iterable[RunRecord]) -> None:
        """Remove the folders of finished runs from the disks of all nodes but the control node's, and those of failed
        runs except their logs. Runs that were drained or stopped keep theirs: they are about to be resumed."""
        keep: dict[str, tuple[str, ...]] = {
            record.run_id: () if record.actual is ActualState.FINISHED else LOGS
            for record in records
            if record.actual in (ActualState.FINISHED, ActualState.FAILED)
        }
        others = [one for one in self._agents.values() if one.node.role != self._terms.roles.control]
        await asyncio.gather(*(_remove(one.agent, keep) for one in others))

    async def statuses(self, live: Sequence[RunRecord]) -> tuple[NodeStatus, ...]:
        """Return the living nodes, with the live runs that have actors there. Raises ConfigError."""
        nodes = await living_nodes()
        reports = asyncio.gather(*(self._report(node) for node in nodes))
        places = await asyncio.gather(*(_nodes_of(record.run_id) for record in live))
        return tuple(
            NodeStatus(
                node=node.node,
                address=node.address,
                role=node.role,
                cpus=node.cpus,
                gpus=node.gpus,
                memory_bytes=node.memory_bytes,
                free_disk_bytes=None if report is None else report.free_disk_bytes,
                free_memory_bytes=None if report is None else report.free_memory_bytes,
                runs=tuple(record.run_id for record, place in zip(live, places, strict=True) if node.node in place),
            )
            for node, report in zip(nodes, await reports, strict=True)
        )

    async def drain(self, name: str, live: Sequence[RunRecord], *, deadline_s: float) -> NodeDrained:
        """Let runs with a service leave the node with this address or id. Raises ConfigError if there is none or it is
        the control node, and ActorError if a run did not leave it."""
        found = [node for node in await living_nodes() if name in (node.node, node.address)]
        if not found:
            raise ConfigError(f"no living node has the address or id {name!r}: `headrace status --nodes` shows them")
        if len(found) > 1:
            raise ConfigError(f"{len(found)} nodes have the address {name}: name an id (`headrace status --nodes`)")
        [node] = found
        if node.role == self._terms.roles.control:
            raise ConfigError(
                f"{node.named} has the state of all runs, which cannot move: drain the runs instead (`headrace stop`)"
            )
        left = await asyncio.gather(*(_leave(record.run_id, node, deadline_s) for record in live))
        return NodeDrained(
            node=node.node,
            address=node.address,
            runs={record.run_id: one for record, one in zip(live, left, strict=True) if not one.is_nothing},
        )

    async def _report(self, node: Node) -> NodeReport | None:
        if (known := self._agents.get(node.node)) is not None:
            with suppress(ActorError, TimeoutError, OSError):
                async with asyncio.timeout(ASK_S):
                    return await known.agent.report()
        return None


async def _remove(agent: NodeAgent, keep: dict[str, tuple[str, ...]]) -> None:
    with suppress(ActorError, TimeoutError, OSError, ValueError):
        async with asyncio.timeout(START_S):
            for folder in await agent.folders():
                if folder in keep:
                    await agent.remove(folder, keep[folder])


async def _nodes_of(run_id: str) -> set[str]:
    """Return the ids of the nodes on which a run has actors; none if its service does not answer."""
    with suppress(ActorError, TimeoutError):
        async with asyncio.timeout(ASK_S):
            service = await RayRuntime(namespace=namespace_of(run_id)).find(Service, "service")
            return {process.node for process in await service.processes()}
    return set()


async def _leave(run_id: str, node: Node, deadline_s: float) -> RunLeft:
    try:
        async with asyncio.timeout(deadline_s + LEAVE_S):
            service = await RayRuntime(namespace=namespace_of(run_id)).find(Service, "service")
            return await until_back(lambda: service.leave_node(node.node, node.address, deadline_s=deadline_s))
    except TimeoutError as error:
        raise ActorLost(f"run {run_id} has not left {node.named} {LEAVE_S:g} s after the deadline") from error
