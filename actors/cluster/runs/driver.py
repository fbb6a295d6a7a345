"""Driver of one run on a cluster: from the start or the adoption of its service to the end of its last actor.

Invariants:
- A service that outlived its driver is adopted if it has the same version and configuration. Any other is drained and
  ended first, and a new one continues in a new epoch.
- When this driver ends a run, all actors, bundles and sandboxes of the run are gone. When the driver itself is
  cancelled or killed, they stay, and the next driver adopts them.
- Only one driver holds a run's lock, which is in its state folder. Only the newest incarnation of a run acts: one that
  was replaced, or cannot renew its file in the storage, kills the run's processes on its own node and ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NoReturn

import orjson

from headrace.actors.cluster.runs.layout import TO_RESTORE
from headrace.actors.cluster.runs.records import ActualState
from headrace.actors.cluster.runs.sweep import sweep_run
from headrace.actors.errors import ActorError, DiskFull, RunFenced, StorageLost, first_cause
from headrace.actors.record.files.absences import OF_THE_DRIVER, Absences
from headrace.actors.record.files.disk_space import lacks_space, named
from headrace.actors.record.files.logs import LogTerms
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.record.storage.incarnation import Incarnation
from headrace.actors.record.storage.restore import restore_run
from headrace.actors.run.config import RunConfig
from headrace.actors.run.exit_codes import EXIT_DRAINED, EXIT_TRANSIENT, exit_code_of_run
from headrace.actors.run.launch import run_guarded, sole_driver, write_summary
from headrace.actors.run.parts import recipe_digest
from headrace.actors.run.resume import ResumePreparation
from headrace.actors.run.service import Service
from headrace.actors.runtime.actors.call_guard import keep_running
from headrace.actors.runtime.actors.nodes import NodeProcess, NodeRole, kill_here, this_process
from headrace.actors.runtime.actors.operations import until_back
from headrace.actors.runtime.actors.runtime import RayRuntime, namespace_of
from headrace.actors.runtime.version import RUNNING
from headrace.actors.telemetry.page.actor import NOT_SENT, Observer
from headrace.buffer.audit.evidence import has_begun
from headrace.buffer.primitives.durable_files import replace_file

INCARNATION: Final = "incarnation"
"""File in the state folder with the number of the incarnation that acted there last, and the token of a creation that
has begun."""
KNOW_S: Final = 5.0
SPACE_S: Final = 5.0
"""Interval between two checks for free space while a disk is full."""
SWEEP_S: Final = 60.0
"""Time limit for the removal of what an ended run left; the sweep of `runs` repeats it."""
ADOPTION_S: Final = 120.0
"""Time limit for a service that has outlived its driver to answer; it may be restarting."""
LAST_TRACES_S: Final = 30.0
"""Time limit for the last traces of a run, with the start of the actor that sends them."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TryOutcome:
    """How a try of a run ended. Only a transient failure may be followed by another try."""

    state: ActualState
    exit_code: int
    reason: str = ""
    is_transient: bool = False


@dataclass(slots=True, kw_only=True)
class Wishes:
    """What users want of a run that is being driven."""

    drained: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)


def restore_marked(directory: RunDirectory, say: Callable[[str], object]) -> None:
    """Restore the ledger of a run that is marked for it, unless an earlier try ended just before it removed the mark.
    Blocks. Raises LedgerRefused, OSError."""
    assert directory.shared is not None
    # The ledger comes last in a restoration.
    if not ((directory.path / "ledger.db").exists() and has_begun(directory.path)):
        report = restore_run(directory.path, directory.shared)
        for line in report.lines():
            say(line)
        replace_file(directory.path / "restored.json", orjson.dumps(report.to_json()))
    (directory.path / TO_RESTORE).unlink()


def ended_by(error: Exception) -> TryOutcome:
    """Return the ending of a try that failed with this error."""
    code, reason = exit_code_of_run(error), f"{type(error).__name__}: {error}"
    return TryOutcome(state=ActualState.FAILED, exit_code=code, reason=reason, is_transient=code == EXIT_TRANSIENT)


class RunDriver:
    """Driver of one try of a run. `moved` is told its states and the reasons for them. `collect` copies what the run
    has written on other nodes; it is called when its actors have ended."""

    def __init__(
        self,
        run_id: str,
        config: RunConfig,
        directory: RunDirectory,
        *,
        wishes: Wishes,
        moved: Callable[[ActualState, str], None],
        collect: Callable[[], Awaitable[None]],
    ) -> None:
        self._run_id = run_id
        self._config = config
        self._directory = directory
        self._wishes = wishes
        self._moved = moved
        self._collect = collect
        self._service: Service | None = None
        self._own: list[NodeProcess] = []
        self._absences = Absences(directory.path / OF_THE_DRIVER)
        self._runtime = RayRuntime(
            namespace=namespace_of(run_id),
            roles=config.cluster.labels(),
            absent_s=config.cluster.absent_s,
            logs=LogTerms(run_id=run_id, folder=directory.logs, retention=config.retention, json_stderr=True),
        )

    async def drive(self) -> TryOutcome:
        """Drive the run until it has ended, and remove what it had on the cluster. Errors of the run are part of the
        result."""
        began_s = time.time()
        with sole_driver(self._directory):
            self._absences.begin()
            self._directory.append_session(began_s, None)
            ending = await self._try()
            await self._collect()
            if not ending.is_transient:
                await self._send_last_traces()
            self._directory.append_session(began_s, time.time())
            if ending.state in (ActualState.FINISHED, ActualState.DRAINED):
                completed = ending.state is ActualState.FINISHED
                await asyncio.to_thread(write_summary, self._directory, completed=completed)
        return ending

    async def _send_last_traces(self) -> None:
        """Have an observer send what the run's own left, since spans of other nodes may have come only now. A try that
        follows begins with the same."""
        telemetry = self._config.telemetry
        if telemetry.otlp_endpoint is None:
            return
        without_page, control = telemetry.model_copy(update={"page": None}), self._config.cluster.on(NodeRole.CONTROL)
        try:
            async with asyncio.timeout(LAST_TRACES_S):
                observer = await self._runtime.spawn(
                    Observer, self._directory.path, without_page, name="last-traces", resources=control
                )
                try:
                    await observer.finish()
                finally:
                    await self._runtime.stop(observer)
        except (ActorError, TimeoutError):
            logger.warning(NOT_SENT, self._directory.path, telemetry.otlp_endpoint)

    async def _try(self) -> TryOutcome:
        try:
            return await self._fenced()
        except Exception as group:
            cause = first_cause(group)
            assert isinstance(cause, Exception)
            error = cause
            logger.exception("run %s failed", self._run_id, exc_info=error)
            if isinstance(error, (RunFenced, StorageLost)):
                # Another incarnation may act soon, and the cluster may be out of reach: first what a signal can end.
                for process in self._own:
                    kill_here(process)
            await self._end()
            if isinstance(error, RunFenced):
                return ended_by(error)
            error = await asyncio.to_thread(named, error, self._directory, self._config.service.min_free_bytes)
            if isinstance(error, DiskFull):
                await self._space(str(error))
            return ended_by(error)

    async def _space(self, reason: str) -> None:
        """Wait until the run has space or is not wanted any more: a try before that only uses up a restart."""
        self._moved(ActualState.STARTING, f"waits for space: {reason}")
        while not (self._wishes.drained.is_set() or self._wishes.stopped.is_set()):
            if not await asyncio.to_thread(lacks_space, self._directory, self._config.service.min_free_bytes):
                return
            await asyncio.sleep(SPACE_S)

    async def _fenced(self) -> TryOutcome:
        """Run as the newest incarnation of the run; end what it started, and then the incarnation. Raises RunFenced,
        StorageLost, and the error that ended the run."""
        held = self._directory.path / INCARNATION
        incarnation = await Incarnation.take(self._directory.storage, held=held, sole_on_host=True)
        async with asyncio.TaskGroup() as tasks:
            holding = tasks.create_task(incarnation.hold())
            knowing = tasks.create_task(self._know_own())
            await incarnation.acquire()
            ending = await self._until_stopped()
            await self._end()
            holding.cancel()
            knowing.cancel()
        await incarnation.end()
        return ending

    async def _until_stopped(self) -> TryOutcome:
        async with asyncio.TaskGroup() as tasks:
            trying = tasks.create_task(self._completed())
            stopping = tasks.create_task(self._wishes.stopped.wait())
            await asyncio.wait([trying, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not trying.done():
                trying.cancel()
        if trying.cancelled():
            return TryOutcome(state=ActualState.STOPPED, exit_code=EXIT_DRAINED)
        if trying.result():
            return TryOutcome(state=ActualState.FINISHED, exit_code=0)
        return TryOutcome(state=ActualState.DRAINED, exit_code=EXIT_DRAINED)

    async def _know_own(self) -> NoReturn:
        """Keep the list of the run's processes on this node up to date, for the day on which only signals reach
        them."""
        while True:
            if self._service is not None:
                with suppress(ActorError, TimeoutError):
                    async with asyncio.timeout(KNOW_S):
                        here = this_process().node
                        self._own = [one for one in await self._service.processes() if one.node == here]
            await asyncio.sleep(KNOW_S)

    async def _completed(self) -> bool:
        """Run the service to its end; return False if it was drained."""
        service = self._service = await self._adopted() or await self._started()
        if not self._wishes.drained.is_set():
            self._moved(ActualState.RUNNING, "")
        async with asyncio.TaskGroup() as tasks:
            draining = tasks.create_task(self._drain(service))
            completed = await run_guarded(
                self._runtime, service, self._config.service.hang_s, self._wishes.drained, self._absences
            )
            draining.cancel()
        return completed

    async def _drain(self, service: Service) -> None:
        """Drain the service once users want it; one that replaces it is drained by `run_guarded`."""
        await self._wishes.drained.wait()
        self._moved(ActualState.DRAINING, "")
        await keep_running(service.drain, service.progress)

    async def _adopted(self) -> Service | None:
        """Return the service that outlived its driver, or None if there is none with this version and configuration.
        One that is to drain is adopted in any case, since nothing will be started with it."""
        if (self._directory.path / TO_RESTORE).exists():
            # What Ray started again on this node has no ledger.
            return None
        try:
            service = await self._runtime.find(Service, "service")
            found = await until_back(service.identity, deadline_s=ADOPTION_S)
        except ActorError:
            return None
        if found == (RUNNING, recipe_digest(self._config)) or self._wishes.drained.is_set():
            logger.info("run %s: the service is adopted", self._run_id)
            return service
        reason = f"its service has another configuration or headrace ({found[0]}, now {RUNNING}) and is replaced"
        self._moved(ActualState.DRAINING, reason)
        try:
            async with asyncio.timeout(self._config.service.drain_s):
                await keep_running(service.drain, service.progress)
                await service.run()
        except Exception:
            # Whatever it is: the next service continues from the last checkpoint.
            logger.exception("run %s: the service could not save a checkpoint", self._run_id)
        await self._runtime.stop(service)
        self._moved(ActualState.STARTING, "")
        return None

    async def _started(self) -> Service:
        # What is left of an earlier service holds the ledger.
        await sweep_run(self._run_id)
        if (self._directory.path / TO_RESTORE).exists():
            await asyncio.to_thread(restore_marked, self._directory, self._say)
        resuming = ResumePreparation(self._config, self._directory, say=self._say)
        await asyncio.to_thread(resuming.prepare)
        return await self._runtime.spawn(
            Service,
            self._config,
            self._directory,
            self._runtime,
            name="service",
            resources=self._config.cluster.on(NodeRole.CONTROL),
        )

    def _say(self, line: str) -> None:
        logger.info("run %s: %s", self._run_id, line)

    async def _end(self) -> None:
        """Let the service close what it started, in order, and remove whatever is left."""
        with suppress(TimeoutError, ActorError):
            async with asyncio.timeout(self._config.service.drain_s):
                service = await self._runtime.find(Service, "service")
                await self._runtime.stop(service)
        # Ray's calls block while the head is away.
        with suppress(TimeoutError):
            async with asyncio.timeout(SWEEP_S):
                await sweep_run(self._run_id)
