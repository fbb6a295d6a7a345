"""Weights into the engines of a group: rolling pushes, catch-ups in waves of their own, and what became of each engine.

Invariants:
- Whoever calls holds the group's lock: one push at a time.
- An engine serves after a push only if that push says it took the weights whole. One that comes out of quarantine is
  pushed to alone, and its checksums agreed, with the snapshot's or with those of an engine that serves.
- A push whose sender died begins again once, for the engines that it did not reach.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from headrace.actors.engine_group.registry import EngineState
from headrace.actors.record.push_costs import push_record
from headrace.policies.errors import EngineError, EngineRefused, SenderFailed
from headrace.policies.push.execution import push
from headrace.policies.push.machine import PushOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.actors.engine_group.fleet import Fleet
    from headrace.actors.engine_group.gate import GatewayGate
    from headrace.actors.engine_group.journal import PushJournal
    from headrace.actors.engine_group.registry import EngineRegistry
    from headrace.actors.record.metrics import MetricsLog
    from headrace.policies.engine import EngineId
    from headrace.policies.learner import WeightsSnapshot
    from headrace.policies.push.contract import EnginePush, PushConfig, PushReport
    from headrace.policies.push.sender import Senders

logger = logging.getLogger(__name__)


class Pusher:
    """Pushes for one group. `settled` is called when it is known what became of an engine, and of all of a push before
    the journal says that it ended."""

    def __init__(
        self,
        config: PushConfig,
        fleet: Fleet,
        registry: EngineRegistry,
        *,
        senders: Senders,
        gate: GatewayGate,
        journal: PushJournal,
        metrics: MetricsLog,
        settled: Callable[[], None],
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._registry = registry
        self._senders = senders
        self._gate = gate
        self._journal = journal
        self._metrics = metrics
        self._settled = settled
        self._last_push_s: float | None = None

    async def push(
        self, engines: Sequence[EngineId], snapshot: WeightsSnapshot, rollouts_in_flight: int | None = None
    ) -> None:
        """To all of them, wave by wave, and once more to those a dying sender left behind. Raises ModelInvalid,
        SenderFailed."""
        if not engines:
            return
        report = await self._once(engines, snapshot)
        self._record(report, rollouts_in_flight)
        behind = [item.engine_id for item in report.engines if item.outcome is PushOutcome.BEHIND]
        if behind:
            self._record(await self._once(behind, snapshot), rollouts_in_flight)

    async def readmit(self, engine_id: EngineId, snapshot: WeightsSnapshot) -> None:
        """Bring an engine of which nobody knows what it holds to the newest weights, alone. Whether that worked is in
        the registry. Raises ModelInvalid, SenderFailed."""
        self._registry.trying(engine_id, time.monotonic())
        try:
            await self.untangle(engine_id)
        except EngineError as error:
            self._registry.quarantine(engine_id, f"it does not answer: {error}", time.monotonic())
            return
        report = await self._through_sender([engine_id], snapshot, in_doubt=(engine_id,))
        self._record(report, None)
        [part] = report.engines
        if part.outcome is PushOutcome.UPDATED and (problem := await self._disagreement(engine_id, snapshot)):
            self._registry.quarantine(engine_id, problem, time.monotonic())
        else:
            self._note(part, snapshot)
        self._end(report)

    async def untangle(self, engine_id: EngineId, groups: Sequence[str] = ()) -> None:
        """Leave the session and the process groups of a push that nobody ended; the pause stays. Raises EngineError
        when the engine does not answer."""
        client = self._fleet[engine_id].client
        await client.load()
        # Refused where none is open.
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
        """What is known is on disk before the journal forgets the push: who takes over must not believe a tainted
        engine."""
        self._settled()
        self._journal.ended(report)

    def _note(self, part: EnginePush, snapshot: WeightsSnapshot) -> None:
        """What became of an engine that did not fail: the push itself told of those that did."""
        engine_id = part.engine_id
        if part.outcome is PushOutcome.UPDATED:
            self._registry.serves(engine_id, snapshot.version)
        elif part.outcome is PushOutcome.BEHIND and self._registry[engine_id].state is not EngineState.QUARANTINED:
            self._registry.left_behind(engine_id)

    def _take_out(self, engine_id: EngineId, reason: str) -> None:
        """On disk, too: of an engine that failed after it was opened the journal tells nothing bad."""
        self._registry.quarantine(engine_id, reason, time.monotonic())
        self._settled()

    async def _through_sender(
        self, engines: Sequence[EngineId], snapshot: WeightsSnapshot, *, in_doubt: Sequence[EngineId] = ()
    ) -> PushReport:
        """A push whose sender died before anything was touched is begun again, once."""
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
        senders = self._senders.take(len(snapshot.shards))
        try:
            return await push(
                snapshot,
                clients,
                senders,
                self._gate,
                self._journal.step,
                self._config,
                in_doubt=in_doubt,
                failed=lambda engine_id, why: self._take_out(engine_id, f"push of {snapshot.version}: {why}"),
            )
        except BaseException:
            # Nobody says what became of those that were sent something.
            for entry in self._registry.in_state(EngineState.WAITING, EngineState.SERVING):
                if entry.engine_id in self._journal.sent_to:
                    self._registry.suspect(entry.engine_id, f"the push of {snapshot.version} was broken off")
            raise

    async def _disagreement(self, engine_id: EngineId, snapshot: WeightsSnapshot) -> str | None:
        """What is wrong with the weights of an engine that was pushed to alone; None when its checksums agree with
        those of an engine that serves, or when there is none of its kind."""
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
                return f"it told no checksums: {error}"
            if ours.keys() != theirs.keys():
                continue
            return None if ours == theirs else f"its checksums are not those of {peer}"
        return None

    async def _checksums(self, engine_id: EngineId) -> dict[str, str]:
        async with asyncio.timeout(self._config.phase_timeout_s):
            return await self._fleet[engine_id].client.checksums()

    def _record(self, report: PushReport, rollouts_in_flight: int | None) -> None:
        now_s = time.monotonic()
        since_s = None if self._last_push_s is None else now_s - self._last_push_s
        self._last_push_s = now_s
        self._metrics.append(push_record(report, rollouts_in_flight=rollouts_in_flight, since_s=since_s))
