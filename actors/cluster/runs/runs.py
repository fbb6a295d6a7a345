"""The actor that supervises all runs of a cluster.

Invariants:
- What users asked for is durable before they get an answer; a restarted actor reads its table and drives on.
- The drivers of runs (`drivers`) and everything that they start survive this actor.
- No question changes a run, except those about its engines, which the run's engine group answers. A service that does
  not answer in time is a result, not an error.
- Calls are answered from the table and from files. Only those about nodes wait for nodes, and none for a head that does
  not answer.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Self

from headrace.actors.cluster.nodes.head_watch import HeadWatch
from headrace.actors.cluster.runs.contract import (
    LOG_BYTES,
    EngineChange,
    EventPage,
    LogPage,
    NodeDrained,
    NodeStatus,
    Readiness,
    perform,
)
from headrace.actors.cluster.runs.drivers import RunDrivers
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
from headrace.actors.cluster.runs.log_pages import read_logs
from headrace.actors.cluster.runs.quotas import refuse_oversized
from headrace.actors.cluster.runs.records import (
    RAY_USER,
    ActualState,
    ApiRole,
    Caller,
    DesiredState,
    Recipe,
    RunId,
    RunRecord,
    Submission,
)
from headrace.actors.cluster.runs.run_book import RunBook
from headrace.actors.cluster.runs.table import RunsTable
from headrace.actors.engines.members_file import EngineStatus, read_roster
from headrace.actors.engines.requests import ask_group
from headrace.actors.errors import ActorError, ActorGone, ActorLost, RunError, RunRefused
from headrace.actors.run.changes import changed_document, journal_changes
from headrace.actors.run.launch import document_of
from headrace.actors.run.report import report_of
from headrace.actors.run.run_status import status_of
from headrace.actors.run.service import Service
from headrace.actors.runtime.actors.operations import ABSENCE, CLUSTER_ABSENT_S
from headrace.actors.runtime.actors.runtime import BeginsUnasked, RayRuntime, end_actor, namespace_of
from headrace.actors.runtime.version import RUNNING, installed
from headrace.actors.telemetry.page.access import PageAnswer
from headrace.actors.telemetry.page.page_processes import MountedPages, PageRequest
from headrace.actors.training.external_loop import LEARNER, ExternalTrainerLoop
from headrace.actors.training.trainer_calls import TrainerCall, Weights
from headrace.buffer.primitives.durable_files import replace_file
from headrace.buffer.primitives.exit_stack import ResourceOwner

READY_S: Final = 10.0
"""Time limit for a service to report whether it is ready."""


class Runs(ResourceOwner, BeginsUnasked):
    """Actor with the table of runs; implements `contract.RunsApi`, where its methods are described. Without a `quotas`
    file there are no limits."""

    def __init__(self, terms: ClusterTerms, *, quotas: Path | None = None) -> None:
        super().__init__()
        self._book = RunBook(terms, quotas)
        self._drivers = RunDrivers(self._book)
        # Kept: calls over them go on while the head is away, and look-ups do not.
        self._learners: dict[RunId, ExternalTrainerLoop] = {}
        self._pages = MountedPages()

    async def __aenter__(self) -> Self:
        # A service that is lost with its node is waited for as long as its own parts would be.
        ABSENCE.seconds = CLUSTER_ABSENT_S
        self._table = self._book.table = await asyncio.to_thread(RunsTable.open, self._book.terms.state)
        self._stack.callback(self._table.close)
        self._stack.push_async_callback(self._pages.close)
        await self._stack.enter_async_context(self._drivers)
        return self

    async def perform(self, name: str, caller: Caller, arguments: Mapping[str, Any]) -> Any:
        return await perform(self, name, caller, arguments)

    # What users ask for.

    async def submit(self, caller: Caller, name: str, recipe: Recipe, idempotency_key: str) -> RunRecord:
        self._require_head()
        submission = Submission(name=name, owner=caller.owner, recipe=recipe, idempotency_key=idempotency_key)
        run_id, quotas = RunId(uuid.uuid4().hex), self._book.quotas()
        known = {record.idempotency_key for record in self._table.runs(submission.owner)}
        nodes = await rollout_nodes(self._book.terms)
        rights = Rights(owner=submission.owner, caller=caller, quotas=quotas)
        # In a thread: templates in a recipe are rendered while it is checked, which may take long.
        config = await asyncio.to_thread(
            partial(config_of, submission.recipe, self._book.terms, run_id, rights, rollout_nodes=len(nodes))
        )
        build = build_of(config)
        refuse_oversized(submission.owner, build.demands, quotas)
        if submission.idempotency_key in known:
            return self._table.submit(submission, build, run_id=run_id, now_s=time.time(), caller=caller)
        await check_cluster(config)
        directory = self._book.terms.directory(run_id)
        await asyncio.to_thread(create_run, config, directory, submission, rights)
        try:
            record = self._table.submit(submission, build, run_id=run_id, now_s=time.time(), caller=caller)
        except BaseException:
            await asyncio.to_thread(remove_run, directory)
            raise
        if record.run_id != run_id:
            # The same submission came twice at once.
            await asyncio.to_thread(remove_run, directory)
        self._drivers.plan()
        return self._table.get(record.run_id)

    async def drain(self, caller: Caller, run_id: RunId) -> RunRecord:
        return self._drivers.want(run_id, DesiredState.DRAINED, caller)

    async def stop(self, caller: Caller, run_id: RunId) -> RunRecord:
        return self._drivers.want(run_id, DesiredState.STOPPED, caller)

    async def resume(self, caller: Caller, run_id: RunId, changes: tuple[str, ...] = ()) -> RunRecord:
        record = self._table.get(run_id)
        recipe = changed_document(self._table.recipe(run_id), changes) if changes else None
        directory = self._book.directory(run_id)
        if recipe is None:
            config = await asyncio.to_thread(reopened, directory)
        else:
            before = await asyncio.to_thread(reopened, directory)
            await asyncio.to_thread(self._book.check, record, caller, before)
            rights, units = self._book.rights(record, caller), before.cluster.rollout_units
            config = await asyncio.to_thread(
                partial(config_of, recipe, self._book.terms, run_id, rights, rollout_nodes=units)
            )
            await check_cluster(config)
        build = build_of(config)
        refuse_oversized(record.owner, build.demands, self._book.quotas())
        resumed = self._table.requeue(run_id, build, now_s=time.time(), caller=caller, recipe=recipe)
        if recipe is not None:
            await asyncio.to_thread(replace_file, directory.config, document_of(config))
            await asyncio.to_thread(journal_changes, directory.path, changes)
            self._table.note(run_id, f"changed by {caller}: {', '.join(changes)}", now_s=time.time())
        self._drivers.forget_tries(run_id)
        self._drivers.plan()
        return resumed

    async def upgrade(self, caller: Caller, run_id: RunId) -> RunRecord:
        record = self._table.get(run_id)
        if not record.is_live:
            raise RunRefused(
                f"run {run_id} is {record.actual}: `headrace resume` starts it under what is installed, if it can go on"
            )
        if record.actual is not ActualState.WAITING:
            self._drivers.want(run_id, DesiredState.UPGRADED, caller)
        if installed() != RUNNING:
            # The actor itself must run what is installed. Its successor finds the wish in the table and is asked again.
            end_actor()
        if record.actual is ActualState.WAITING:
            await self._drivers.renew(run_id, record.desired)
        return self._table.get(run_id)

    async def drain_node(self, caller: Caller, node: str, deadline_s: float = 60.0) -> NodeDrained:
        self._require_head()
        drained = await self._drivers.nodes.drain(node, self._book.with_service(), deadline_s=deadline_s)
        for run_id, left in drained.runs.items():
            text = f"node {drained.address} is drained by {caller}: {left.line()}"
            self._table.note(run_id, text, now_s=time.time())
        self._book.tell()
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
        directory = self._book.terms.directory(run_id)
        submission = await asyncio.to_thread(recovered, directory, owner)
        config = await asyncio.to_thread(reopened, directory)
        await check_cluster(config)
        build = build_of(config)
        if any(record.run_id == run_id for record in self._table.runs()):
            record = self._table.requeue(run_id, build, now_s=time.time(), caller=RAY_USER)
        else:
            caller = RAY_USER if submission.names_code else replace(RAY_USER, role=ApiRole.OPERATE)
            record = self._table.submit(submission, build, run_id=run_id, now_s=time.time(), caller=caller)
        self._table.note(run_id, "recovered from the storage", now_s=time.time())
        self._drivers.plan()
        return record

    # What users ask about.

    async def runs(self, caller: Caller) -> tuple[RunRecord, ...]:
        return self._table.runs(None if caller.role is ApiRole.ADMIN else caller.owner)

    async def run(self, caller: Caller, run_id: RunId) -> RunRecord:
        return self._table.get(run_id)

    async def events(self, caller: Caller, run_id: RunId, after: int, wait_s: float) -> EventPage:
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self._table.events(run_id, after=after) and self._table.get(run_id).is_live:
                    await self._book.changed.wait()
        return EventPage(events=self._table.events(run_id, after=after), ended=not self._table.get(run_id).is_live)

    async def status(self, caller: Caller, run_id: RunId) -> dict[str, Any]:
        record, directory = self._table.get(run_id), self._book.directory(run_id)
        document = await asyncio.to_thread(lambda: status_of(reopened(directory), directory))
        return (
            document
            | {"run": record.name, "run_id": run_id, "owner": record.owner}
            | _stands(record, self._drivers.head)
        )

    async def report(self, caller: Caller, run_id: RunId) -> dict[str, Any]:
        return (await asyncio.to_thread(report_of, self._book.directory(run_id))).to_json()

    async def page(self, run_id: RunId, request: PageRequest) -> PageAnswer:
        folder = self._book.directory(run_id).path
        try:
            return await self._pages.get(folder, request)
        except RunError as error:
            raise RunRefused(str(error)) from error

    async def nodes(self, caller: Caller) -> tuple[NodeStatus, ...]:
        self._require_head()
        return await self._drivers.nodes.statuses(self._book.with_service())

    async def engines(self, caller: Caller, run_id: RunId) -> tuple[EngineStatus, ...]:
        return (await asyncio.to_thread(read_roster, self._book.directory(run_id).engines)).engines

    async def add_engine(self, caller: Caller, run_id: RunId, url: str, timeout_s: float = 120.0) -> EngineChange:
        # The new engine is sent the key of those that the recipe attaches.
        config = await asyncio.to_thread(reopened, self._book.directory(run_id))
        await asyncio.to_thread(self._book.check, self._table.get(run_id), caller, config)
        return await self._change_engines(run_id, "add", url, timeout_s, caller)

    async def remove_engine(
        self, caller: Caller, run_id: RunId, engine_id: str, timeout_s: float = 120.0
    ) -> EngineChange:
        return await self._change_engines(run_id, "remove", engine_id, timeout_s, caller)

    async def _change_engines(
        self, run_id: RunId, change: Literal["add", "remove"], engine: str, timeout_s: float, caller: Caller
    ) -> EngineChange:
        box = self._book.live(run_id).engine_requests
        name = await asyncio.to_thread(partial(ask_group, box, change, engine, timeout_s=timeout_s))
        self._table.note(run_id, f"{change} engine {name} by {caller}", now_s=time.time())
        self._book.tell()
        return EngineChange(engine_id=name, done=change)

    async def trainer(self, caller: Caller, run_id: RunId, call: TrainerCall) -> bytes:
        directory = self._book.live(run_id)
        if isinstance(call, Weights) and call.path is not None:
            self._book.rights(self._table.get(run_id), caller).check_folder("directory", call.path, directory.storage)
        if (learner := self._learners.get(run_id)) is None:
            if (await asyncio.to_thread(reopened, directory)).learner.kind != "external":
                raise RunRefused(f'run {run_id} trains by itself: only with learner.kind "external" it has a trainer')
            self._require_head()
            learner = await RayRuntime(namespace=namespace_of(run_id)).find(ExternalTrainerLoop, LEARNER)
            self._learners = {run: found for run, found in self._learners.items() if self._table.get(run).is_live}
            self._learners[run_id] = learner
        try:
            return await learner.call(call)
        except (ActorLost, ActorGone):
            self._learners.pop(run_id, None)
            raise

    async def logs(
        self,
        caller: Caller,
        run_id: RunId,
        actor: str | None = None,
        after: str = "",
        limit_bytes: int = LOG_BYTES,
    ) -> LogPage:
        folder = self._book.directory(run_id).logs
        return await asyncio.to_thread(read_logs, folder, actor, after=after, limit_bytes=limit_bytes)

    async def ready(self, caller: Caller, run_id: RunId) -> Readiness:
        record = self._table.get(run_id)
        try:
            runtime = RayRuntime(namespace=namespace_of(run_id))
            async with asyncio.timeout(READY_S):
                found = await (await runtime.find(Service, "service")).readiness()
        except (ActorError, TimeoutError):
            return Readiness(
                ledger_writable=False,
                engine_serving=False,
                learner_in_time=False,
                problems=(f"the service does not answer; the run is {record.actual}",),
            )
        return Readiness(**found)

    def _require_head(self) -> None:
        """Raise ActorLost while calls of the head would block."""
        if self._drivers.head.problem:
            raise ActorLost(f"{self._drivers.head.problem}: try again when it is back")


def _stands(record: RunRecord, head: HeadWatch) -> dict[str, Any]:
    """Return the state of a run for its status: that of the table, which knows more than its folder."""
    return {
        "state": record.actual.value,
        "desired": record.desired.value,
        "reason": record.reason,
        "head": head.problem,
        "exit_code": record.exit_code,
        "restarts_left": record.restarts_left,
        "demands": asdict(record.demands),
    }
