"""The actor that supervises all runs of a cluster.

Invariants:
- What users asked for is durable before they get an answer; a restarted actor reads its table and drives on.
- A run has at most one driver. The drivers and everything that they start survive this actor.
- A failure is followed by another try only if its exit code says that one may succeed, after a wait that doubles.
- Every node with a role has an agent. Actors and bundles of runs that are not live are removed.
- Calls are answered from the table and from files. Only those about nodes wait for nodes, and none for a head that does
  not answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, NoReturn, Self

from headrace.actors.cluster.nodes.head_watch import HeadWatch
from headrace.actors.cluster.runs.cluster_nodes import ClusterNodes
from headrace.actors.cluster.runs.contract import NodeDrained
from headrace.actors.cluster.runs.driver import Ending, RunDriver, Wishes, ended_by
from headrace.actors.cluster.runs.file_collection import EVERY_S, FileCollection
from headrace.actors.cluster.runs.grants import Rights
from headrace.actors.cluster.runs.layout import (
    ClusterTerms,
    build_of,
    check_cluster,
    config_of,
    create_run,
    recovered,
    remove_run,
    reopened,
    rollout_nodes,
)
from headrace.actors.cluster.runs.queries import RunQueries
from headrace.actors.cluster.runs.quotas import next_to_start, refuse_oversized
from headrace.actors.cluster.runs.records import (
    RAY_USER,
    TRANSITIONS,
    ActualState,
    Caller,
    DesiredState,
    Role,
    RunId,
    RunRecord,
    Submission,
)
from headrace.actors.cluster.runs.sweep import sweep_unowned
from headrace.actors.cluster.runs.table import RunsTable
from headrace.actors.errors import ConfigError, RunRefused
from headrace.actors.record.files.absences import read_absences
from headrace.actors.run.changes import changed_document, journal_changes
from headrace.actors.run.launch import document_of
from headrace.actors.run.placement import CLUSTER_ABSENT_S
from headrace.actors.run.restarts import RestartPolicy, saved_step
from headrace.actors.runtime.actors.operations import ABSENCE
from headrace.actors.runtime.actors.runtime import BeginsUnasked, end_actor
from headrace.actors.runtime.version import RUNNING, installed
from headrace.buffer.primitives.durable_files import replace_file

TEND_S: Final = 2.0
"""Interval between two looks at the queue."""
NODES_S: Final = 10.0
"""Interval between two looks at the nodes."""
AGENT_START_S: Final = 60.0
"""Time limit for the agent of a node to start; the node may be lost meanwhile."""
SWEEP_S: Final = 60.0
"""Interval between two removals of what no run owns."""
PLACED_S: Final = 5.0
"""A bundle that waits for longer than this is the reason why its run does not get on."""
PLACEMENT: Final = "waits for placement: "

logger = logging.getLogger(__name__)


class Runs(RunQueries, BeginsUnasked):
    """Actor with the table of runs; implements `contract.RunsApi`. Without a `quotas` file there are no limits."""

    def __init__(self, terms: ClusterTerms, *, quotas: Path | None = None) -> None:
        super().__init__(terms, quotas)
        self._wishes: dict[RunId, Wishes] = {}
        self._driving: dict[RunId, asyncio.Task[None]] = {}
        self._tried: dict[RunId, RestartPolicy] = {}
        self._nodes = ClusterNodes(terms)
        self._head = HeadWatch(self._head_changed)

    async def __aenter__(self) -> Self:
        # A service that is lost with its node is waited for as long as its own parts would be.
        ABSENCE.seconds = CLUSTER_ABSENT_S
        self._table = await asyncio.to_thread(RunsTable.open, self._terms.state)
        self._stack.callback(self._table.close)
        self._stack.push_async_callback(self._pages.close)
        self._tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._files = FileCollection(self._terms.state, self._tasks)
        self._stack.callback(self._files.cancel)
        for record in self._table.runs():
            if record.is_live and record.actual is not ActualState.WAITING:
                self._drive(record)
        loops = (self._tend, self._keep_agents, self._collect_files, self._sweep, self._head.watch)
        tasks = [self._tasks.create_task(loop()) for loop in loops]
        self._stack.callback(lambda: [task.cancel() for task in (*tasks, *self._driving.values())])
        return self

    # What users ask for.

    async def submit(self, submission: Submission, caller: Caller) -> RunRecord:
        """See `RunsApi.submit`."""
        self._require_head()
        run_id, quotas = RunId(uuid.uuid4().hex), self._quotas()
        known = {record.idempotency_key for record in self._table.runs(submission.owner)}
        nodes = await rollout_nodes(self._terms)
        rights = Rights(owner=submission.owner, caller=caller, quotas=quotas)
        # In a thread: templates in a recipe are rendered while it is checked, which may take long.
        config = await asyncio.to_thread(
            partial(config_of, submission.recipe, self._terms, run_id, rights, rollout_nodes=len(nodes))
        )
        build = build_of(config)
        refuse_oversized(submission.owner, build.demands, quotas)
        if submission.idempotency_key in known:
            return self._table.submit(submission, build, run_id=run_id, now_s=time.time(), caller=caller)
        await check_cluster(config)
        directory = self._terms.directory(run_id)
        await asyncio.to_thread(create_run, config, directory, submission, rights)
        try:
            record = self._table.submit(submission, build, run_id=run_id, now_s=time.time(), caller=caller)
        except BaseException:
            await asyncio.to_thread(remove_run, directory)
            raise
        if record.run_id != run_id:
            # The same submission came twice at once.
            await asyncio.to_thread(remove_run, directory)
        self._plan()
        return self._table.get(record.run_id)

    async def drain(self, run_id: RunId, caller: Caller) -> RunRecord:
        """See `RunsApi.drain`."""
        return self._want(run_id, DesiredState.DRAINED, caller)

    async def stop(self, run_id: RunId, caller: Caller) -> RunRecord:
        """See `RunsApi.stop`."""
        return self._want(run_id, DesiredState.STOPPED, caller)

    async def resume(self, run_id: RunId, changes: tuple[str, ...], caller: Caller) -> RunRecord:
        """See `RunsApi.resume`."""
        record = self._table.get(run_id)
        recipe = changed_document(self._table.recipe(run_id), changes) if changes else None
        directory = self._directory(run_id)
        if recipe is None:
            config = await asyncio.to_thread(reopened, directory)
        else:
            before = await asyncio.to_thread(reopened, directory)
            await asyncio.to_thread(self._check, record, caller, before)
            rights, units = self._rights(record, caller), before.cluster.rollout_units
            config = await asyncio.to_thread(
                partial(config_of, recipe, self._terms, run_id, rights, rollout_nodes=units)
            )
            await check_cluster(config)
        build = build_of(config)
        refuse_oversized(record.owner, build.demands, self._quotas())
        resumed = self._table.requeue(run_id, build, now_s=time.time(), caller=caller, recipe=recipe)
        if recipe is not None:
            await asyncio.to_thread(replace_file, directory.config, document_of(config))
            await asyncio.to_thread(journal_changes, directory.path, changes)
            self._table.note(run_id, f"changed by {caller}: {', '.join(changes)}", now_s=time.time())
        self._tried.pop(run_id, None)
        self._plan()
        return resumed

    async def upgrade(self, run_id: RunId, caller: Caller) -> RunRecord:
        """See `RunsApi.upgrade`."""
        record = self._table.get(run_id)
        if not record.is_live:
            raise RunRefused(
                f"run {run_id} is {record.actual}: `headrace resume` starts it under what is installed, if it can go on"
            )
        if record.actual is not ActualState.WAITING:
            self._want(run_id, DesiredState.UPGRADED, caller)
        if installed() != RUNNING:
            # The actor itself must run what is installed. Its successor finds the wish in the table and is asked again.
            end_actor()
        if record.actual is ActualState.WAITING:
            await self._renew(run_id, record.desired)
        return self._table.get(run_id)

    async def drain_node(self, node: str, deadline_s: float, caller: Caller) -> NodeDrained:
        """See `RunsApi.drain_node`."""
        self._require_head()
        drained = await self._nodes.drain(node, self._with_service(), deadline_s=deadline_s)
        for run_id, left in drained.runs.items():
            text = f"node {drained.address} is drained by {caller}: {left.line()}"
            self._table.note(run_id, text, now_s=time.time())
        self._tell()
        return drained

    async def renew(self, wanted: str) -> None:
        """Return if this actor runs the `wanted` version of headrace; if that is installed, end this process, so that
        Ray starts one that does. Raises RunRefused if it is not installed."""
        if wanted == RUNNING:
            return
        if installed() != wanted:
            raise RunRefused(
                f"the control node has headrace {installed()} and this client {wanted}: install the same on all nodes"
            )
        end_actor()

    async def recover(self, run_id: RunId, owner: str) -> RunRecord:
        """Continue a run whose control node has lost its disk from its storage, in a new incarnation. Raises RunMissing
        without such a run in the storage, RunRefused if its ledger is here, and RunUnknown for another owner's."""
        directory = self._terms.directory(run_id)
        submission = await asyncio.to_thread(recovered, directory, owner)
        config = await asyncio.to_thread(reopened, directory)
        await check_cluster(config)
        build = build_of(config)
        if any(record.run_id == run_id for record in self._table.runs()):
            record = self._table.requeue(run_id, build, now_s=time.time(), caller=RAY_USER)
        else:
            caller = RAY_USER if submission.names_code else replace(RAY_USER, role=Role.OPERATE)
            record = self._table.submit(submission, build, run_id=run_id, now_s=time.time(), caller=caller)
        self._table.note(run_id, "recovered from the storage", now_s=time.time())
        self._plan()
        return record

    # What the actor does on its own.

    def _want(self, run_id: RunId, desired: DesiredState, caller: Caller) -> RunRecord:
        record = self._table.want(run_id, desired, now_s=time.time(), caller=caller)
        if (wishes := self._wishes.get(run_id)) is not None:
            (wishes.stopped if desired is DesiredState.STOPPED else wishes.drained).set()
        self._plan()
        return record

    async def _tend(self) -> NoReturn:
        while True:
            await self._explain_placement()
            self._plan()
            await asyncio.sleep(TEND_S)

    async def _explain_placement(self) -> None:
        """Record which runs with a service wait for nodes that can take them, and for what."""
        for record in self._with_service():
            absent = await asyncio.to_thread(read_absences, self._directory(record.run_id).path)
            waiting = [one for one in absent if one.waits_for and time.time() - one.since_s > PLACED_S]
            needs = "; ".join(f"{one.name} needs {one.waits_for} on a {one.role} node" for one in waiting)
            if needs or record.reason.startswith(PLACEMENT):
                self._table.explain(record.run_id, f"{PLACEMENT}{needs}" if needs else "", now_s=time.time())

    def _head_changed(self, line: str) -> None:
        for record in self._table.runs():
            if record.is_live:
                self._table.note(record.run_id, line, now_s=time.time())
        self._tell()

    def _plan(self) -> None:
        """Start the runs whose turn it is, and record why the others wait."""
        plan = next_to_start(self._table.runs(), self._quotas(), now_s=time.time())
        for run_id in plan.start:
            if run_id not in self._driving:
                self._drive(self._table.move(run_id, ActualState.STARTING, now_s=time.time()))
        for run_id, reason in plan.reasons.items():
            self._table.explain(run_id, reason, now_s=time.time())
        self._tell()

    def _drive(self, record: RunRecord) -> None:
        wishes = self._wishes[record.run_id] = Wishes()
        if record.desired is not DesiredState.RUNNING:
            (wishes.stopped if record.desired is DesiredState.STOPPED else wishes.drained).set()
        self._driving[record.run_id] = self._tasks.create_task(self._drive_to_its_end(record.run_id, wishes))

    async def _drive_to_its_end(self, run_id: RunId, wishes: Wishes) -> None:
        try:
            directory, record = self._directory(run_id), self._table.get(run_id)
            config = await asyncio.to_thread(reopened, directory)
            role = Role.CODE if record.names_code else Role.OPERATE
            # What the operator allows may have changed since the run was submitted.
            await asyncio.to_thread(self._check, record, Caller(owner=record.owner, role=role), config)
            driver = RunDriver(
                run_id,
                config,
                directory,
                wishes=wishes,
                moved=partial(self._moved, run_id),
                collect=lambda: self._files.finish(self._nodes.agents, run_id),
            )
            await self._settle(run_id, await driver.drive())
        except Exception as error:
            # Such as a state folder that is gone, or whose disk is full.
            logger.exception("run %s cannot be driven", run_id)
            await self._settle(run_id, ended_by(error))
        finally:
            del self._driving[run_id]
            self._wishes.pop(run_id, None)
        self._plan()

    async def _renew(self, run_id: RunId, wanted: DesiredState) -> None:
        """Give a run without a service the build of what is installed, unless users want something else meanwhile."""
        build = build_of(await asyncio.to_thread(reopened, self._directory(run_id)))
        if self._table.get(run_id).desired is wanted:
            self._table.renew(run_id, build, now_s=time.time())
            self._tell()

    async def _settle(self, run_id: RunId, ending: Ending) -> None:
        """Record how a try ended, and whether there is another one."""
        if ending.is_transient or ending.state is ActualState.DRAINED:
            if self._table.get(run_id).desired is DesiredState.UPGRADED:
                await self._renew(run_id, DesiredState.UPGRADED)
            if self._table.get(run_id).actual is ActualState.WAITING:
                return
        saved = await asyncio.to_thread(saved_step, self._directory(run_id)) if ending.is_transient else 0
        record, now_s = self._table.get(run_id), time.time()
        if ending.is_transient and record.desired is DesiredState.RUNNING and record.restarts_left:
            policy = self._tried.setdefault(run_id, RestartPolicy(record.restarts_left))
            wait_s = policy.wait_after(ending.exit_code, saved_step=saved) or 0.0
            self._table.move(
                run_id,
                ActualState.WAITING,
                now_s=now_s,
                reason=f"{ending.reason}; next try in {wait_s:.1f} s",
                next_try_s=now_s + wait_s,
                uses_restart=True,
            )
        else:
            self._table.move(run_id, ending.state, now_s=now_s, reason=ending.reason, exit_code=ending.exit_code)
        self._tell()

    def _moved(self, run_id: RunId, state: ActualState, reason: str) -> None:
        if state in TRANSITIONS[self._table.get(run_id).actual]:
            self._table.move(run_id, state, now_s=time.time(), reason=reason)
        elif reason:
            self._table.explain(run_id, reason, now_s=time.time())
        self._tell()

    async def _keep_agents(self) -> NoReturn:
        while True:
            await self._head.answers()
            with suppress(ConfigError):
                await self._nodes.keep_agents()
            await asyncio.sleep(NODES_S)

    async def _collect_files(self) -> NoReturn:
        while True:
            self._files.begin_passes(self._nodes.agents, tuple(self._driving))
            await asyncio.sleep(EVERY_S)

    async def _sweep(self) -> NoReturn:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self._head.answers()
            await self._nodes.remove_folders(self._table.runs())
            # Those that are being driven clean up themselves.
            live = {record.run_id for record in self._table.runs() if record.is_live} | set(self._driving)
            await sweep_unowned(live)
