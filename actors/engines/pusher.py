"""Weight pushes to a group's engines, and the state of each engine after a push.

Invariants:
- The caller holds the group's lock: one push runs at a time.
- An engine serves after a push only if that push reports that the engine received all of the weights. An engine leaves
  quarantine only when a push to it alone has succeeded and its checksums equal the snapshot's or those of a serving
  engine.
- A push whose sender died is repeated once, for the engines that it did not reach.
- The members file is written before the gateway gets the corresponding routing table.
- Table versions only increase: the high bits are the group's incarnation, which increases with every restart of the
  group.
- Each push has a span, and below it one for each phase of each wave, which ends when the journal is told of the next.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode

from headrace.actors.engines.fleet import Fleet
from headrace.actors.engines.gate import GatewayGate
from headrace.actors.engines.journal import PushJournal
from headrace.actors.engines.members_file import Roster
from headrace.actors.engines.registry import EngineRegistry, EngineState
from headrace.actors.engines.trainer_link import TrainerLink
from headrace.actors.record.files.metrics import MetricsWriter
from headrace.actors.record.files.push_costs import push_record
from headrace.actors.runtime.actors.recording import record
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId, EngineInfo
from headrace.policies.errors import EngineError, EngineRefused, SenderFailed
from headrace.policies.learner import WeightsSnapshot
from headrace.policies.push.contract import EnginePush, Journal, PushConfig, PushReport
from headrace.policies.push.directories import SnapshotDirectories
from headrace.policies.push.execution import push
from headrace.policies.push.machine import PushOutcome, PushStep
from headrace.policies.push.sender import SenderProcess
from headrace.serve.tracing import span_names as names

logger = logging.getLogger(__name__)


RECORD_S = 30.0
"""Time limit for the record of a push to be written; until then no other push begins."""
LOADS_S = 10.0
"""Age from which the members file is written again though nothing but the engines' loads can have changed."""
TABLE_NUMBER_BITS = 32
"""Low bits of a table's version: the number of the table. The bits above are the incarnation."""
tracer = trace.get_tracer("headrace.actors.engines.pusher")


class Publisher:
    """Publisher of one group's members file and routing tables."""

    def __init__(self, path: Path, fleet: Fleet, registry: EngineRegistry, gate: GatewayGate) -> None:
        self._path = path
        self._fleet = fleet
        self._registry = registry
        self._gate = gate
        self._incarnation = self._tables = 0
        self._writing = Lock()
        self._made = self._written = 0
        self._known = Roster()
        self._known_s = 0.0
        self._has_serving_engine = False
        self._published = asyncio.Event()

    async def follow(self, roster: Roster) -> None:
        """Take the incarnation number that follows the previous group's."""
        # Either the members file or the gateway's table may have been lost, so both are read.
        stats = await self._gate.stats()
        published = 0 if stats is None else max(0, stats.table_version) >> TABLE_NUMBER_BITS
        self._incarnation = max(roster.incarnation, published) + 1

    async def publish(self) -> None:
        """Write the members file, if it has changed, and send the gateway a routing table."""
        # A disk that stalls must not stop the group's probes and gates with it.
        await asyncio.to_thread(self._write, *self._roster())
        self._tables += 1
        await self._gate.route(self._registry.table((self._incarnation << TABLE_NUMBER_BITS) + self._tables))
        self._has_serving_engine = bool(self._registry.in_state(EngineState.SERVING))
        self._published.set()
        self._published = asyncio.Event()

    def write_roster(self) -> None:
        """Write the members file, if it has changed. Raises OSError."""
        self._write(*self._roster())

    def _roster(self) -> tuple[int, Roster]:
        """Return what the members file should have now, and how many came before."""
        self._made += 1
        return self._made, Roster(
            engines=self._fleet.statuses(time.monotonic()),
            started=self._fleet.started,
            retired=frozenset(self._fleet.retired),
            incarnation=self._incarnation,
        )

    def _write(self, number: int, roster: Roster) -> None:
        with self._writing:
            now_s = time.monotonic()
            is_due = now_s - self._known_s >= LOADS_S
            if number < self._written or (not is_due and roster.without_loads() == self._known):
                return
            roster.write(self._path)
            self._written, self._known, self._known_s = number, roster.without_loads(), now_s

    async def wait_for_serving(self, *, unlike: bool, timeout_s: float) -> bool:
        """Return True if the last table had a serving engine. Waits until the result differs from `unlike`, for at most
        `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._has_serving_engine is unlike:
                    await self._published.wait()
        return self._has_serving_engine


class Pusher:
    """Pusher of weights to one group's engines. `settled` is called when an engine has failed a push, and when all
    engines' outcomes are known, before the journal records the end of the push."""

    def __init__(
        self,
        config: PushConfig,
        fleet: Fleet,
        registry: EngineRegistry,
        *,
        sender: SenderProcess,
        directories: SnapshotDirectories,
        gate: GatewayGate,
        journal: PushJournal,
        metrics: MetricsWriter,
        settled: Callable[[], None],
        trainer: TrainerLink,
        copy: Path,
    ) -> None:
        self._config = config
        self._trainer, self._copy = trainer, copy
        self._fleet = fleet
        self._registry = registry
        self._sender = sender
        self._directories = directories
        self._gate = gate
        self._journal = journal
        self._metrics = metrics
        self._settled = settled
        self._last_push_s: float | None = None
        self.pushes = 0
        """Number of times that a push has begun or ended; it is odd while a push is running."""

    @property
    def is_pushing(self) -> bool:
        return self.pushes % 2 == 1

    @contextmanager
    def pushing(self) -> Iterator[None]:
        """Mark the period in which engines may be paused, for the health checks."""
        self.pushes += 1
        try:
            yield
        finally:
            self.pushes += 1

    async def push(
        self, engines: Sequence[EngineId], snapshot: WeightsSnapshot, rollouts_in_flight: int | None = None
    ) -> None:
        """Push to the engines, wave by wave, and once more to those that a dead sender did not reach. Weights that
        somebody else has pushed are only looked for. Raises ModelInvalid, SenderFailed."""
        if not engines:
            return
        if snapshot.is_pushed:
            for engine_id in await self.holding(snapshot.version):
                self._registry.serves(engine_id, snapshot.version)
            self._settled()
            return
        report = await self._once(engines, snapshot)
        await self._record(report, rollouts_in_flight)
        behind = [item.engine_id for item in report.engines if item.outcome is PushOutcome.BEHIND]
        if behind:
            await self._record(await self._once(behind, snapshot), rollouts_in_flight)

    async def holding(self, version: PolicyVersion) -> list[EngineId]:
        """Return the engines in good standing that report this version and are not paused."""
        entries = self._registry.in_state(EngineState.WAITING, EngineState.SERVING)
        infos = await asyncio.gather(*(self._info(entry.engine_id) for entry in entries))
        return [
            entry.engine_id
            for entry, info in zip(entries, infos, strict=True)
            if info is not None
            and info.version == version
            and not info.paused
            # It may have been removed meanwhile.
            and self._registry.stands(entry.engine_id, EngineState.WAITING, EngineState.SERVING)
        ]

    async def _info(self, engine_id: EngineId) -> EngineInfo | None:
        try:
            async with asyncio.timeout(self._config.phase_timeout_s):
                return await self._fleet[engine_id].client.info()
        except (EngineError, TimeoutError):
            return None

    async def readmit(self, engine_id: EngineId, snapshot: WeightsSnapshot) -> None:
        """Push the newest weights to one engine whose weights are unknown, and record the result in the registry. It
        stays in quarantine if somebody else pushes them. Raises ModelInvalid, SenderFailed."""
        if snapshot.is_pushed:
            return
        self._registry.trying(engine_id, time.monotonic())
        try:
            await self.untangle(engine_id)
        except EngineError as error:
            self._registry.quarantine(engine_id, f"it does not answer: {error}", time.monotonic())
            return
        report = await self._through_sender([engine_id], snapshot, in_doubt=(engine_id,))
        await self._record(report, None)
        [part] = report.engines
        unproven = part.outcome is PushOutcome.UPDATED and not part.verified
        if unproven and (problem := await self._disagreement(engine_id, snapshot)):
            self._registry.quarantine(engine_id, problem, time.monotonic())
        else:
            self._note(part, snapshot)
        self._end(report)

    async def untangle(self, engine_id: EngineId, groups: Sequence[str] = ()) -> None:
        """Close the update session and the process groups of an unfinished push; the engine stays paused. Raises
        EngineError when the engine does not answer."""
        client = self._fleet[engine_id].client
        await client.load()
        # The engine refuses where no session is open.
        with suppress(EngineRefused):
            await client.end_update()
        for name in groups:
            with suppress(EngineRefused):
                await client.leave_group(name)

    async def _once(self, engines: Sequence[EngineId], snapshot: WeightsSnapshot) -> PushReport:
        report = await self._through_sender(engines, snapshot)
        for part in report.engines:
            self._note(part, snapshot)
        self._end(report)
        return report

    def _end(self, report: PushReport) -> None:
        # The states are on disk before the journal records the end: a successor must not trust an engine that failed.
        self._settled()
        self._journal.ended(report)

    def _note(self, part: EnginePush, snapshot: WeightsSnapshot) -> None:
        """Record the outcome of an engine that did not fail; `_push` records failures at once."""
        engine_id = part.engine_id
        if part.outcome is PushOutcome.UPDATED:
            self._registry.serves(engine_id, snapshot.version)
        elif part.outcome is PushOutcome.BEHIND and self._registry[engine_id].state is not EngineState.QUARANTINED:
            self._registry.left_behind(engine_id)

    async def _through_sender(
        self, engines: Sequence[EngineId], snapshot: WeightsSnapshot, *, in_doubt: Sequence[EngineId] = ()
    ) -> PushReport:
        """Push, and repeat the push once if its sender died before any engine was changed."""
        try:
            return await self._push(engines, snapshot, in_doubt)
        except SenderFailed as error:
            logger.warning("the push of %s starts again: %s", snapshot.version, error)
            return await self._push(engines, snapshot, in_doubt)

    async def _push(
        self, engines: Sequence[EngineId], snapshot: WeightsSnapshot, in_doubt: Sequence[EngineId]
    ) -> PushReport:
        self._journal.begin(snapshot)
        clients = [self._fleet[engine_id].client for engine_id in engines]

        def failed(engine_id: EngineId, why: str) -> None:
            self._registry.quarantine(engine_id, f"push of {snapshot.version}: {why}", time.monotonic())
            # The journal does not show the failure of an engine whose gate was open already, so it is written now.
            self._settled()

        try:
            transport = snapshot.transport or self._config.transport
            with push_span(snapshot.version, engines, transport=transport, journal=self._journal.step) as span:
                report = await push(
                    snapshot,
                    clients,
                    self._sender,
                    self._gate,
                    span.step,
                    self._config,
                    in_doubt=in_doubt,
                    failed=failed,
                    directories=self._directories,
                    trainer=self._trainer,
                    copy=self._copy,
                )
                span.ended(report)
                return report
        except BaseException:
            # The state of engines that were sent something is unknown.
            for entry in self._registry.in_state(EngineState.WAITING, EngineState.SERVING):
                if entry.engine_id in self._journal.sent_to:
                    self._registry.suspect(entry.engine_id, f"the push of {snapshot.version} was interrupted")
            raise

    async def _disagreement(self, engine_id: EngineId, snapshot: WeightsSnapshot) -> str | None:
        """Return the problem with the weights of an engine that was pushed to alone; None when its checksums equal
        those of a serving engine, or when no serving engine has comparable ones."""
        peers = [
            entry.engine_id
            for entry in self._registry.in_state(EngineState.SERVING)
            if entry.version == snapshot.version and entry.engine_id != engine_id
        ]
        for peer in peers:
            try:
                theirs = await self._checksums(peer)
            except (EngineError, TimeoutError):
                continue
            try:
                ours = await self._checksums(engine_id)
            except (EngineError, TimeoutError) as error:
                return f"it did not report its checksums: {error}"
            if ours.keys() != theirs.keys():
                continue
            return None if ours == theirs else f"its checksums differ from those of {peer}"
        return None

    async def _checksums(self, engine_id: EngineId) -> dict[str, str]:
        async with asyncio.timeout(self._config.phase_timeout_s):
            return await self._fleet[engine_id].client.checksums()

    async def _record(self, report: PushReport, rollouts_in_flight: int | None) -> None:
        now_s = time.monotonic()
        since_s = None if self._last_push_s is None else now_s - self._last_push_s
        self._last_push_s = now_s
        pushed = push_record(report, rollouts_in_flight=rollouts_in_flight, since_s=since_s)
        await record(self._metrics, pushed, deadline_s=RECORD_S)


class PushSpan:
    """Span of a push that is running. `step` is the push's journal, and passes each step on to `journal`."""

    def __init__(self, span: Span, journal: Journal) -> None:
        self._span = span
        self._journal = journal
        self._phase: Span | None = None

    async def step(self, push_id: str, step: PushStep) -> None:
        """Begin the span of a phase, after the end of the one before."""
        self.end_phase()
        await self._journal(push_id, step)
        attributes = {
            names.PHASE: step.phase.value,
            names.WAVE: step.wave,
            names.PUSH_ENGINES: [str(engine_id) for engine_id in step.engines],
        }
        self._phase = tracer.start_span(names.PUSH_PHASE, attributes=attributes)

    def end_phase(self) -> None:
        """End the span of the last phase. Idempotent."""
        phase, self._phase = self._phase, None
        if phase is not None:
            phase.end()

    def ended(self, report: PushReport) -> None:
        """Add what became of each engine, in the order of the engines."""
        self._span.set_attributes(
            {
                names.PUSH_ID: report.push_id,
                names.PUSH_BYTES: report.sent_bytes,
                names.PUSH_ENGINES: [str(part.engine_id) for part in report.engines],
                names.PUSH_OUTCOMES: [part.outcome.value for part in report.engines],
            }
        )
        failures = [part.failure for part in report.engines if part.failure]
        if failures:
            self._span.set_attribute(names.ERROR_TYPE, "quarantined" if report.quarantined else "failed")
            self._span.set_status(Status(StatusCode.ERROR, "; ".join(failures)))


@contextmanager
def push_span(
    version: PolicyVersion, engines: Sequence[EngineId], *, transport: str, journal: Journal
) -> Iterator[PushSpan]:
    """Record the block as a push of `version`, in a trace of its own. An error is recorded, and raised again."""
    attributes = {
        names.PUSH_VERSION: str(version),
        names.PUSH_TRANSPORT: transport,
        names.PUSH_ENGINES: [str(engine_id) for engine_id in engines],
    }
    with tracer.start_as_current_span(names.PUSH, Context(), attributes=attributes) as span:
        pushing = PushSpan(span, journal)
        try:
            yield pushing
        except BaseException as error:
            span.set_attribute(names.ERROR_TYPE, type(error).__name__)
            raise
        finally:
            pushing.end_phase()
