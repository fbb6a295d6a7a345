"""The questions that the actor of runs answers from its table, from files, and from the services of runs.

Invariants:
- No question changes a run, except those about its engines, which the run's engine group answers.
- A service that does not answer in time is a result, not an error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from headrace.actors.cluster.nodes.head_watch import HeadWatch
from headrace.actors.cluster.runs.cluster_nodes import ClusterNodes
from headrace.actors.cluster.runs.contract import EventPage, LogPage, NodeStatus, Readiness
from headrace.actors.cluster.runs.grants import Rights
from headrace.actors.cluster.runs.layout import ClusterTerms, reopened
from headrace.actors.cluster.runs.log_pages import read_logs
from headrace.actors.cluster.runs.quotas import Quotas, load_quotas
from headrace.actors.cluster.runs.records import ActualState, Caller, RunId, RunRecord
from headrace.actors.cluster.runs.table import RunsTable
from headrace.actors.engines.members_file import EngineStatus, read_roster
from headrace.actors.engines.requests import ask_group
from headrace.actors.errors import ActorError, ActorGone, ActorLost, ConfigError, RunError, RunRefused
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.config import RunConfig
from headrace.actors.run.report import report_of
from headrace.actors.run.run_status import status_of
from headrace.actors.run.service import Service
from headrace.actors.runtime.actors.resources import ResourceOwner
from headrace.actors.runtime.actors.runtime import RayRuntime, namespace_of
from headrace.actors.telemetry.page.page_processes import MountedPages, PageAnswer, PageRequest
from headrace.actors.training.external_loop import LEARNER, ExternalTrainerLoop
from headrace.actors.training.trainer_calls import TrainerCall, Weights
from headrace.buffer.tasks.task import load_tasks

logger = logging.getLogger(__name__)

READY_S: Final = 10.0
"""Time limit for a service to report whether it is ready."""


class RunQueries(ResourceOwner):
    """Questions about runs; the class below opens `_table` when it is entered."""

    _table: RunsTable
    _nodes: ClusterNodes
    _head: HeadWatch

    def __init__(self, terms: ClusterTerms, quotas: Path | None) -> None:
        super().__init__()
        self._terms = terms
        self._quotas_file, self._quotas_problem = quotas, ""
        # A file that is wrong from the beginning is refused.
        self._last_quotas = Quotas() if quotas is None else load_quotas(quotas)
        self._changed = asyncio.Event()
        # Kept: calls over them go on while the head is away, and look-ups do not.
        self._learners: dict[RunId, ExternalTrainerLoop] = {}
        self._pages = MountedPages()

    async def runs(self, owner: str | None) -> tuple[RunRecord, ...]:
        """See `RunsApi.runs`."""
        return self._table.runs(owner)

    async def run(self, run_id: RunId) -> RunRecord:
        """See `RunsApi.run`."""
        return self._table.get(run_id)

    async def events(self, run_id: RunId, after: int, timeout_s: float) -> EventPage:
        """See `RunsApi.events`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._table.events(run_id, after=after) and self._table.get(run_id).is_live:
                    await self._changed.wait()
        return EventPage(events=self._table.events(run_id, after=after), ended=not self._table.get(run_id).is_live)

    async def status(self, run_id: RunId) -> dict[str, Any]:
        """See `RunsApi.status`."""
        record, directory = self._table.get(run_id), self._directory(run_id)
        document = await asyncio.to_thread(lambda: status_of(reopened(directory), directory))
        return document | {"run": record.name, "run_id": run_id, "owner": record.owner} | _stands(record, self._head)

    async def report(self, run_id: RunId) -> dict[str, Any]:
        """See `RunsApi.report`."""
        return (await asyncio.to_thread(report_of, self._directory(run_id))).to_json()

    async def page(self, run_id: RunId, request: PageRequest) -> PageAnswer:
        """See `RunsApi.page`."""
        folder = self._directory(run_id).path
        try:
            return await self._pages.get(folder, request)
        except RunError as error:
            raise RunRefused(str(error)) from error

    async def nodes(self) -> tuple[NodeStatus, ...]:
        """See `RunsApi.nodes`."""
        self._require_head()
        return await self._nodes.statuses(self._with_service())

    async def engines(self, run_id: RunId) -> tuple[EngineStatus, ...]:
        """See `RunsApi.engines`."""
        return (await asyncio.to_thread(read_roster, self._directory(run_id).engines)).engines

    async def add_engine(self, run_id: RunId, url: str, timeout_s: float, caller: Caller) -> str:
        """See `RunsApi.add_engine`."""
        # The new engine is sent the key of those that the recipe attaches.
        config = await asyncio.to_thread(reopened, self._directory(run_id))
        await asyncio.to_thread(self._check, self._table.get(run_id), caller, config)
        return await self._change_engines(run_id, "add", url, timeout_s, caller)

    async def remove_engine(self, run_id: RunId, engine_id: str, timeout_s: float, caller: Caller) -> str:
        """See `RunsApi.remove_engine`."""
        return await self._change_engines(run_id, "remove", engine_id, timeout_s, caller)

    async def _change_engines(
        self, run_id: RunId, change: Literal["add", "remove"], engine: str, timeout_s: float, caller: Caller
    ) -> str:
        box = self._live(run_id).engine_requests
        name = await asyncio.to_thread(partial(ask_group, box, change, engine, timeout_s=timeout_s))
        self._table.note(run_id, f"{change} engine {name} by {caller}", now_s=time.time())
        self._tell()
        return name

    async def trainer(self, run_id: RunId, call: TrainerCall, caller: Caller) -> bytes:
        """See `RunsApi.trainer`."""
        directory = self._live(run_id)
        if isinstance(call, Weights) and call.path is not None:
            self._rights(self._table.get(run_id), caller).check_folder("directory", call.path, directory.storage)
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

    async def logs(self, run_id: RunId, actor: str | None, after: str, limit_bytes: int) -> LogPage:
        """See `RunsApi.logs`."""
        folder = self._directory(run_id).logs
        return await asyncio.to_thread(read_logs, folder, actor, after=after, limit_bytes=limit_bytes)

    async def ready(self, run_id: RunId) -> Readiness:
        """See `RunsApi.ready`."""
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

    def _quotas(self) -> Quotas:
        """Return the quotas in the file, or those that were read last while it cannot be read."""
        if self._quotas_file is not None:
            try:
                self._last_quotas = load_quotas(self._quotas_file)
            except ConfigError as error:
                if str(error) != self._quotas_problem:
                    logger.error("the quotas stay as they are: %s", error)
                self._quotas_problem = str(error)
        return self._last_quotas

    def _rights(self, record: RunRecord, caller: Caller) -> Rights:
        return Rights(owner=record.owner, caller=caller, quotas=self._quotas())

    def _check(self, record: RunRecord, caller: Caller, config: RunConfig) -> None:
        """Check that a caller could have submitted a run as it is now. Blocks. Raises RoleTooSmall."""
        rights, directory = self._rights(record, caller), self._terms.directory(record.run_id)
        rights.check_recipe(config)
        if not caller.may_name_code:
            rights.check_tasks((*load_tasks(directory.train_tasks), *load_tasks(directory.heldout_tasks)))

    def _tell(self) -> None:
        """Wake everyone who waits for events."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _with_service(self) -> list[RunRecord]:
        """Return the runs that may have actors on nodes."""
        return [record for record in self._table.runs() if record.is_live and record.actual is not ActualState.WAITING]

    def _require_head(self) -> None:
        """Raise ActorLost while calls of the head would block."""
        if self._head.problem:
            raise ActorLost(f"{self._head.problem}: try again when it is back")

    def _directory(self, run_id: RunId) -> RunDirectory:
        return self._terms.directory(self._table.get(run_id).run_id)

    def _live(self, run_id: RunId) -> RunDirectory:
        record = self._table.get(run_id)
        if not record.is_live:
            raise RunRefused(f"run {run_id} is {record.actual}: resume it first")
        return self._directory(run_id)


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
