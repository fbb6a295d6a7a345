"""Collection of the files that runs write on other nodes, by the actor that supervises the runs.

Invariants:
- Each node is asked on its own: one that hangs or is lost delays no other. A pass of a node begins only after its last
  one has ended.
- What a node has is asked for until nothing is left, in pages of at most `PAGE_BYTES` for all runs; then again after
  `EVERY_S`. Outages cost nothing but time while the node keeps its files.
- After `finish` the copies of a run are complete, except for nodes that do not answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from headrace.actors.cluster.runs.records import RunId
from headrace.actors.errors import ActorError
from headrace.actors.record.copies.copies import NodeCopies
from headrace.actors.record.copies.pages import ReceivedFile
from headrace.actors.record.files.node_copies import NODE_DIGITS, NODES
from headrace.actors.runtime.actors.nodes import AGENT_TIMEOUT_S, NodeAgent

EVERY_S: Final = 2.0
"""Interval between two passes of a node."""
PAGE_BYTES: Final = 1 << 20
FINISH_S: Final = 60.0
"""Time limit for the last pass of a run that has ended."""

logger = logging.getLogger(__name__)


class FileCollection:
    """Copies of the files of runs, whose state folders are in `state`. `tasks` holds the passes."""

    def __init__(self, state: Path, tasks: asyncio.TaskGroup) -> None:
        self._state = state
        self._tasks = tasks
        self._copies: dict[tuple[RunId, str], NodeCopies] = {}
        self._passes: dict[str, asyncio.Task[None]] = {}
        """The last pass of each node."""
        self._failing: set[str] = set()
        """Nodes whose last pass failed, which has been logged."""
        self._finishing: set[RunId] = set()
        """Runs that only `finish` copies files of: copies have one writer."""
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One call of each node, and its pages, at a time."""

    def begin_passes(self, agents: Mapping[str, NodeAgent], runs: Collection[RunId]) -> None:
        """Begin a pass of each node whose last one has ended, for these runs, and forget all others."""
        self._copies = {key: copies for key, copies in self._copies.items() if key[0] in runs}
        self._finishing &= set(runs)
        self._passes = {node: running for node, running in self._passes.items() if not running.done()}
        if wanted := [run for run in runs if run not in self._finishing]:
            for node, agent in agents.items():
                if node not in self._passes:
                    self._passes[node] = self._tasks.create_task(self._pass(node, agent, wanted))

    async def finish(self, agents: Mapping[str, NodeAgent], run_id: RunId) -> None:
        """Copy what is left of a run whose actors have ended. A node that does not answer in time is left out."""
        self._finishing.add(run_id)
        try:
            async with asyncio.timeout(FINISH_S), asyncio.TaskGroup() as finishing:
                for node, agent in agents.items():
                    finishing.create_task(self._pass(node, agent, [run_id], finishing=True))
        except TimeoutError:
            logger.warning("run %s: the files of other nodes were not copied completely in %g s", run_id, FINISH_S)

    def cancel(self) -> None:
        """Cancel all passes."""
        for running in self._passes.values():
            running.cancel()

    async def _pass(self, node: str, agent: NodeAgent, runs: list[RunId], *, finishing: bool = False) -> None:
        """Copy what a node has until nothing is left, or it does not answer. A run that ends takes turns with the pass
        of all others, which may be a long one."""
        try:
            while runs:
                async with self._turns[node]:
                    runs = [run for run in runs if finishing or run not in self._finishing]
                    runs = await self._turn(node, agent, runs)
        except (ActorError, TimeoutError, OSError, ValueError) as error:
            if node not in self._failing:
                logger.warning("the files of node %s are not copied at present: %r", node, error)
            self._failing.add(node)
        else:
            self._failing.discard(node)

    async def _turn(self, node: str, agent: NodeAgent, runs: list[RunId]) -> list[RunId]:
        """Copy the next pages of these runs, and return those that have more. Raises ActorError, TimeoutError, OSError,
        ValueError."""
        copies: dict[RunId, NodeCopies] = {}
        for run in runs:
            copies[run] = await asyncio.to_thread(self._copies_of, run, node)
        held: dict[str, dict[str, ReceivedFile]] = {run: one.held() for run, one in copies.items()}
        async with asyncio.timeout(AGENT_TIMEOUT_S):
            pages = await agent.file_pages(held, PAGE_BYTES) if runs else {}
        for run in runs:
            if run in pages:
                await asyncio.to_thread(copies[run].apply, pages[run])
        # A page that changes nothing is asked for again later, and not at once.
        going = (run for run in runs if run in pages and not pages[run].is_end)
        return [run for run in going if copies[run].held() != held[run]]

    def _copies_of(self, run_id: RunId, node: str) -> NodeCopies:
        key = (run_id, node)
        if key not in self._copies:
            self._copies[key] = NodeCopies(self._state / run_id / NODES / node[:NODE_DIGITS])
        return self._copies[key]
