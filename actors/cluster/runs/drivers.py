"""What the actor of runs does on its own: it starts runs whose turn it is, drives them to their ends, and keeps nodes.

Invariants:
- A run has at most one driver.
- A failure is followed by another try only if its exit code says that one may succeed, after a wait that doubles.
- Every node with a role has an agent. Actors and bundles of runs that are not live are removed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from functools import partial
from typing import Final, NoReturn, Self

from headrace.actors.cluster.nodes.head_watch import HeadWatch
from headrace.actors.cluster.runs.cluster_nodes import ClusterNodes
from headrace.actors.cluster.runs.driver import RunDriver, TryOutcome, Wishes, ended_by
from headrace.actors.cluster.runs.file_collection import EVERY_S, FileCollection
from headrace.actors.cluster.runs.layout import build_of, reopened
from headrace.actors.cluster.runs.quotas import next_to_start
from headrace.actors.cluster.runs.records import (
    TRANSITIONS,
    ActualState,
    ApiRole,
    Caller,
    DesiredState,
    RunId,
    RunRecord,
)
from headrace.actors.cluster.runs.run_book import RunBook
from headrace.actors.cluster.runs.sweep import sweep_unowned
from headrace.actors.errors import ConfigError
from headrace.actors.record.files.absences import read_absences
from headrace.actors.run.restarts import RestartPolicy, saved_step
from headrace.buffer.primitives.exit_stack import ResourceOwner

TEND_S: Final = 2.0
"""Interval between two looks at the queue."""
NODES_S: Final = 10.0
"""Interval between two looks at the nodes."""
SWEEP_S: Final = 60.0
"""Interval between two removals of what no run owns."""
PLACED_S: Final = 5.0
"""A bundle that waits for longer than this is the reason why its run does not get on."""
PLACEMENT: Final = "waits for placement: "

logger = logging.getLogger(__name__)


class RunDrivers(ResourceOwner):
    """Drives the runs in `book`, which has its table when the context is entered."""

    def __init__(self, book: RunBook) -> None:
        super().__init__()
        self._book = book
        self._wishes: dict[RunId, Wishes] = {}
        self._driving: dict[RunId, asyncio.Task[None]] = {}
        self._tried: dict[RunId, RestartPolicy] = {}
        self.nodes = ClusterNodes(book.terms)
        self.head = HeadWatch(self._head_changed)

    async def __aenter__(self) -> Self:
        self._tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._files = FileCollection(self._book.terms.state, self._tasks)
        self._stack.callback(self._files.cancel)
        for record in self._book.table.runs():
            if record.is_live and record.actual is not ActualState.WAITING:
                self.drive(record)
        loops = (self._tend, self._keep_agents, self._collect_files, self._sweep, self.head.watch)
        tasks = [self._tasks.create_task(loop()) for loop in loops]
        self._stack.callback(lambda: [task.cancel() for task in (*tasks, *self._driving.values())])
        return self

    def forget_tries(self, run_id: RunId) -> None:
        """Let a run that a user resumes begin with the shortest wait again."""
        self._tried.pop(run_id, None)

    def want(self, run_id: RunId, desired: DesiredState, caller: Caller) -> RunRecord:
        record = self._book.table.want(run_id, desired, now_s=time.time(), caller=caller)
        if (wishes := self._wishes.get(run_id)) is not None:
            (wishes.stopped if desired is DesiredState.STOPPED else wishes.drained).set()
        self.plan()
        return record

    async def _tend(self) -> NoReturn:
        while True:
            await self._explain_placement()
            self.plan()
            await asyncio.sleep(TEND_S)

    async def _explain_placement(self) -> None:
        """Record which runs with a service wait for nodes that can take them, and for what."""
        for record in self._book.with_service():
            absent = await asyncio.to_thread(read_absences, self._book.directory(record.run_id).path)
            waiting = [one for one in absent if one.waits_for and time.time() - one.since_s > PLACED_S]
            needs = "; ".join(f"{one.name} needs {one.waits_for} on a {one.role} node" for one in waiting)
            if needs or record.reason.startswith(PLACEMENT):
                self._book.table.explain(record.run_id, f"{PLACEMENT}{needs}" if needs else "", now_s=time.time())

    def _head_changed(self, line: str) -> None:
        for record in self._book.table.runs():
            if record.is_live:
                self._book.table.note(record.run_id, line, now_s=time.time())
        self._book.tell()

    def plan(self) -> None:
        """Start the runs whose turn it is, and record why the others wait."""
        plan = next_to_start(self._book.table.runs(), self._book.quotas(), now_s=time.time())
        for run_id in plan.start:
            if run_id not in self._driving:
                self.drive(self._book.table.move(run_id, ActualState.STARTING, now_s=time.time()))
        for run_id, reason in plan.reasons.items():
            self._book.table.explain(run_id, reason, now_s=time.time())
        self._book.tell()

    def drive(self, record: RunRecord) -> None:
        wishes = self._wishes[record.run_id] = Wishes()
        if record.desired is not DesiredState.RUNNING:
            (wishes.stopped if record.desired is DesiredState.STOPPED else wishes.drained).set()
        self._driving[record.run_id] = self._tasks.create_task(self._drive_to_its_end(record.run_id, wishes))

    async def _drive_to_its_end(self, run_id: RunId, wishes: Wishes) -> None:
        try:
            directory, record = self._book.directory(run_id), self._book.table.get(run_id)
            config = await asyncio.to_thread(reopened, directory)
            role = ApiRole.CODE if record.names_code else ApiRole.OPERATE
            # What the operator allows may have changed since the run was submitted.
            await asyncio.to_thread(self._book.check, record, Caller(owner=record.owner, role=role), config)
            driver = RunDriver(
                run_id,
                config,
                directory,
                wishes=wishes,
                moved=partial(self._moved, run_id),
                collect=lambda: self._files.finish(self.nodes.agents, run_id),
            )
            await self._settle(run_id, await driver.drive())
        except Exception as error:
            # Such as a state folder that is gone, or whose disk is full.
            logger.exception("run %s cannot be driven", run_id)
            await self._settle(run_id, ended_by(error))
        finally:
            del self._driving[run_id]
            self._wishes.pop(run_id, None)
        self.plan()

    async def renew(self, run_id: RunId, wanted: DesiredState) -> None:
        """Give a run without a service the build of what is installed, unless users want something else meanwhile."""
        build = build_of(await asyncio.to_thread(reopened, self._book.directory(run_id)))
        if self._book.table.get(run_id).desired is wanted:
            self._book.table.renew(run_id, build, now_s=time.time())
            self._book.tell()

    async def _settle(self, run_id: RunId, ending: TryOutcome) -> None:
        """Record how a try ended, and whether there is another one."""
        if ending.is_transient or ending.state is ActualState.DRAINED:
            if self._book.table.get(run_id).desired is DesiredState.UPGRADED:
                await self.renew(run_id, DesiredState.UPGRADED)
            if self._book.table.get(run_id).actual is ActualState.WAITING:
                return
        saved = await asyncio.to_thread(saved_step, self._book.directory(run_id)) if ending.is_transient else 0
        record, now_s = self._book.table.get(run_id), time.time()
        if ending.is_transient and record.desired is DesiredState.RUNNING and record.restarts_left:
            policy = self._tried.setdefault(run_id, RestartPolicy(record.restarts_left))
            wait_s = policy.wait_after(ending.exit_code, saved_step=saved) or 0.0
            self._book.table.move(
                run_id,
                ActualState.WAITING,
                now_s=now_s,
                reason=f"{ending.reason}; next try in {wait_s:.1f} s",
                next_try_s=now_s + wait_s,
                uses_restart=True,
            )
        else:
            self._book.table.move(run_id, ending.state, now_s=now_s, reason=ending.reason, exit_code=ending.exit_code)
        self._book.tell()

    def _moved(self, run_id: RunId, state: ActualState, reason: str) -> None:
        if state in TRANSITIONS[self._book.table.get(run_id).actual]:
            self._book.table.move(run_id, state, now_s=time.time(), reason=reason)
        elif reason:
            self._book.table.explain(run_id, reason, now_s=time.time())
        self._book.tell()

    async def _keep_agents(self) -> NoReturn:
        while True:
            await self.head.answers()
            with suppress(ConfigError):
                await self.nodes.keep_agents()
            await asyncio.sleep(NODES_S)

    async def _collect_files(self) -> NoReturn:
        while True:
            self._files.begin_passes(self.nodes.agents, tuple(self._driving))
            await asyncio.sleep(EVERY_S)

    async def _sweep(self) -> NoReturn:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.head.answers()
            await self.nodes.remove_folders(self._book.table.runs())
            # Those that are being driven clean up themselves.
            live = {record.run_id for record in self._book.table.runs() if record.is_live} | set(self._driving)
            await sweep_unowned(live)
