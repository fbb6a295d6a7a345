"""The push of one snapshot into engines, wave by wave, while rollouts go on.

Invariants:
- machine.py decides what is next, transfer.py moves the bytes, this file asks the engines: every await has a deadline,
  the journal is written before each phase.
- An engine's failure is data in the report. Only a broken snapshot, a failing journal or cancellation leave `push` as
  an exception, and even then every engine that got no bucket is resumed and its gate opened first, however often the
  push is cancelled meanwhile.
- An engine that serves another model than the snapshot's is refused before anything is touched.
- Under `in_place` a gate always opens with the version that the engine has as cache namespace, flushed or not: by it
  a client tells which tokens were sampled on keys and values of other weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.policies.cancellation import outlast
from headrace.policies.engine import PauseMode
from headrace.policies.errors import EngineRefused, GroupFailed, ModelInvalid, RequestInvalid, SenderFailed
from headrace.policies.push.agreement import Agreement
from headrace.policies.push.compatibility import check_fits
from headrace.policies.push.contract import EnginePush, PushReport
from headrace.policies.push.gates import HeldGates
from headrace.policies.push.layout import group_name, lay_out
from headrace.policies.push.machine import Phase, PushMachine, PushOutcome
from headrace.policies.push.transfer import Failures, Transfer, first_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Container, Coroutine, Iterable, Mapping, Sequence

    from headrace.policies.engine import EngineId, EngineInfo
    from headrace.policies.learner import WeightsSnapshot
    from headrace.policies.push.contract import EngineControl, Gate, Journal, PushConfig
    from headrace.policies.push.machine import Step
    from headrace.policies.push.sender import SenderProcess

logger = logging.getLogger(__name__)


async def push(
    snapshot: WeightsSnapshot,
    engines: Sequence[EngineControl],
    senders: Sequence[SenderProcess],
    gates: Gate,
    journal: Journal,
    config: PushConfig,
    *,
    in_doubt: Container[EngineId] = (),
    failed: Callable[[EngineId, str], None] = lambda *_: None,
) -> PushReport:
    """Push one snapshot, each of its shards through a sender of its own. Engines `in_doubt` may hold mixed weights:
    they are not resumed without all of the new ones. `failed` is told of each engine that is quarantined, and why, as
    soon as that is known.

    Raises ModelInvalid when the snapshot is unreadable, SenderFailed when a sender cannot even load it, PushError when
    it is no snapshot; nothing was touched then."""
    held = HeldGates(gates, config.gate_lease_s)
    execution = PushExecution(snapshot, engines, senders, held, journal, config, in_doubt, failed)
    async with first_error(), asyncio.TaskGroup() as tasks:
        renewing = tasks.create_task(held.renew())
        try:
            return await execution.run()
        finally:
            renewing.cancel()


class PushExecution:
    """One push; used once."""

    def __init__(
        self,
        snapshot: WeightsSnapshot,
        engines: Sequence[EngineControl],
        senders: Sequence[SenderProcess],
        gates: HeldGates,
        journal: Journal,
        config: PushConfig,
        in_doubt: Container[EngineId],
        failed: Callable[[EngineId, str], None],
    ) -> None:
        self.push_id = uuid.uuid4().hex[:12]
        self._snapshot = snapshot
        self._engines = {engine.engine_id: engine for engine in engines}
        self._transfer = Transfer(snapshot, senders, config)
        self._gates = gates
        self._journal = journal
        self._config = config
        self._failed = failed
        self._told: set[EngineId] = set()
        names = list(self._engines)
        self._machine = PushMachine(
            [names[at : at + config.wave_size] for at in range(0, len(names), config.wave_size)], in_doubt
        )
        self._parts = {name: EnginePush(engine_id=name) for name in names}
        self._seconds = dict.fromkeys((phase.value for phase in Phase), 0.0)
        self._paused_at_s: dict[EngineId, float] = {}
        self._infos: dict[EngineId, EngineInfo] = {}
        self._modes: dict[EngineId, PauseMode] = {}
        self._fitting: set[Path] = set()
        self._agreement = Agreement()
        self._sender_failure: SenderFailed | GroupFailed | None = None

    async def run(self) -> PushReport:
        started_s = time.perf_counter()
        await self._transfer.load()
        self._specs = self._transfer.specs()
        try:
            while step := self._machine.next():
                await self._journal(self.push_id, step)
                await self._take(step)
        except BaseException as error:
            self._machine.abandon(f"the push was broken off: {type(error).__name__}: {error}")
            raise
        finally:
            await to_the_end(self._way_out())
        return self._report(time.perf_counter() - started_s)

    async def _way_out(self) -> None:
        """Leave sessions, pauses, gates and groups without the journal, which may be what failed."""
        try:
            while step := self._machine.next():
                await self._take(step)
        finally:
            await self._transfer.disband()

    async def _take(self, step: Step) -> None:
        handlers: dict[Phase, Callable[[Step, Failures], Coroutine[None, None, None]]] = {
            Phase.FORM: self._form,
            Phase.BROADCAST: self._broadcast,
            Phase.DISBAND: self._disband,
            Phase.VERIFY: self._verify,
        }
        started_s = time.perf_counter()
        failures = Failures()
        try:
            await handlers.get(step.phase, self._each)(step, failures)
        except (SenderFailed, GroupFailed) as error:
            self._sender_failure = error
            self._machine.abandon(f"{type(error).__name__}: {error}")
        self._seconds[step.phase.value] += time.perf_counter() - started_s
        for engine_id, failure in failures.found.items():
            logger.warning("push %s: %s failed in %s: %s", self.push_id, engine_id, step.phase, failure.message)
        self._machine.done(step, failures.found)
        self._tell_failed(step.engines)

    def _tell_failed(self, engines: Iterable[EngineId]) -> None:
        for engine_id in engines:
            progress = self._machine.progress[engine_id]
            quarantined = self._machine.outcome(engine_id) is PushOutcome.QUARANTINED
            if quarantined and progress.failure is not None and engine_id not in self._told:
                self._told.add(engine_id)
                self._failed(engine_id, progress.failure.message)

    async def _each(self, step: Step, failures: Failures) -> None:
        """Phases that are one call to each engine."""
        calls: dict[Phase, Callable[[EngineControl], Awaitable[None]]] = {
            Phase.PROBE: self._probe,
            Phase.GATE: self._gate,
            Phase.PAUSE: self._pause,
            Phase.BEGIN: lambda engine: engine.begin_update(),
            Phase.END: lambda engine: engine.end_update(),
            Phase.FLUSH: self._flush,
            Phase.RESUME: self._resume,
            Phase.OPEN: self._open,
        }
        await self._call_all(step, failures, calls[step.phase])

    async def _call_all(self, step: Step, failures: Failures, call: Callable[[EngineControl], Awaitable[None]]) -> None:
        async def one(engine_id: EngineId) -> None:
            async with failures.of(engine_id, self._config.phase_timeout_s):
                await call(self._engines[engine_id])

        async with asyncio.TaskGroup() as tasks:
            for engine_id in step.engines:
                tasks.create_task(one(engine_id))

    async def _probe(self, engine: EngineControl) -> None:
        """Is it there, and is this its model?"""
        info = self._infos[engine.engine_id] = await engine.info()
        self._modes[engine.engine_id] = self._mode_of(info, engine.engine_id)
        self._parts[engine.engine_id].ranks = info.ranks
        model_dir = Path(info.model_path)
        if not model_dir.is_absolute() or model_dir in self._fitting:
            return
        try:
            await asyncio.to_thread(check_fits, self._specs, model_dir)
        except ModelInvalid as error:
            raise RequestInvalid(f"{engine.engine_id} serves another model: {error}") from error
        self._fitting.add(model_dir)

    async def _gate(self, engine: EngineControl) -> None:
        """Asked for its load first: an engine in mid-step answers late, and nobody waits for that at a closed gate."""
        part, load = self._parts[engine.engine_id], await engine.load()
        part.in_flight = load.running + load.waiting
        if self._modes[engine.engine_id] is not PauseMode.IN_PLACE:
            part.retracted, part.recomputed_tokens = load.running, load.used_tokens
        await self._gates.close(engine.engine_id)

    async def _pause(self, engine: EngineControl) -> None:
        self._paused_at_s[engine.engine_id] = started_s = time.perf_counter()
        await engine.pause(self._modes[engine.engine_id])
        self._parts[engine.engine_id].pause_s = time.perf_counter() - started_s

    def _mode_of(self, info: EngineInfo, engine_id: EngineId) -> PauseMode:
        """A reply without version spans must be of one version: only aborted requests are."""
        if info.version_spans or self._config.pause_mode is PauseMode.ABORT:
            return self._config.pause_mode
        logger.warning(
            "%s (%s) does not tell which version sampled which token: paused with abort instead of %s",
            engine_id,
            info.server_version,
            self._config.pause_mode,
        )
        return PauseMode.ABORT

    async def _flush(self, engine: EngineControl) -> None:
        """Refused while requests run, which only a pause in place allows."""
        part = self._parts[engine.engine_id]
        try:
            await engine.flush()
            part.flushed = True
        except EngineRefused:
            if self._modes[engine.engine_id] is not PauseMode.IN_PLACE:
                raise

    async def _resume(self, engine: EngineControl) -> None:
        await engine.resume()
        if (paused_at_s := self._paused_at_s.get(engine.engine_id)) is not None:
            self._parts[engine.engine_id].paused_s = time.perf_counter() - paused_at_s

    async def _open(self, engine: EngineControl) -> None:
        part = self._parts[engine.engine_id]
        part.cache_namespace = self._namespace(engine.engine_id)
        aborts = await self._gates.open(engine.engine_id, part.cache_namespace)
        for request_id in aborts:
            await engine.abort(request_id)

    def _namespace(self, engine_id: EngineId) -> str | None:
        """The weights the engine has now; also of one that is paused otherwise, for its client flags by it too."""
        if self._config.pause_mode is not PauseMode.IN_PLACE:
            return None
        has_new = self._machine.progress[engine_id].complete
        return str(self._snapshot.version if has_new else self._infos[engine_id].version)

    async def _verify(self, step: Step, failures: Failures) -> None:
        """Against the snapshot's checksums where an engine makes them likewise, else against those of the other engines
        of this push. An engine of an earlier wave may turn out wrong by that: it serves already, and fails now."""
        if self._config.verify == "off":
            return
        told: dict[EngineId, dict[str, str]] = {}

        async def ask(engine: EngineControl) -> None:
            told[engine.engine_id] = await engine.checksums()

        await self._call_all(step, failures, ask)
        for engine_id, wrong in self._wrong(told).items():
            message = f"{engine_id}: checksums disagree for {wrong[:3]} ({len(wrong)} in all)"
            if engine_id in step.engines:
                failures.add(engine_id, EngineRefused(200, message))
            else:
                self._machine.condemn(engine_id, message)
                self._tell_failed([engine_id])

    def _wrong(self, told: Mapping[EngineId, Mapping[str, str]]) -> dict[EngineId, list[str]]:
        """The parameters in which engines are wrong."""
        found: dict[EngineId, list[str]] = {}
        for engine_id, got in told.items():
            if self._config.verify == "snapshot" and self._infos[engine_id].snapshot_checksums:
                expected = self._transfer.checksums()
                if wrong := sorted(name for name in expected if got.get(name) != expected[name]):
                    found[engine_id] = wrong
            else:
                self._agreement.tell(engine_id, got)
        return found | self._agreement.wrong()

    async def _form(self, step: Step, failures: Failures) -> None:
        shards = range(len(self._snapshot.shards))
        names = [group_name(self.push_id, step.wave, step.attempt, shard) for shard in shards]
        layout = lay_out((engine_id, self._infos[engine_id].ranks) for engine_id in step.engines)
        await self._transfer.form(names, self._members(step), layout, failures)

    async def _broadcast(self, step: Step, failures: Failures) -> None:
        started_s = time.perf_counter()
        taken = await self._transfer.broadcast(self._members(step), failures, self._machine.touched)
        for engine_id, size in taken.items():
            part = self._parts[engine_id]
            part.received_bytes += size
            part.transfer_s += time.perf_counter() - started_s

    async def _disband(self, _step: Step, _failures: Failures) -> None:
        """An engine that holds its weights whole fails no more."""
        await self._transfer.disband()

    def _members(self, step: Step) -> list[EngineControl]:
        return [self._engines[engine_id] for engine_id in step.engines]

    def _report(self, total_s: float) -> PushReport:
        self._tell_failed(self._parts)
        for engine_id, part in self._parts.items():
            part.gate_s = self._gates.closed_s(engine_id)
            part.outcome = self._machine.outcome(engine_id)
            failure = self._machine.progress[engine_id].failure
            part.failure = "" if failure is None else failure.message
        return PushReport(
            push_id=self.push_id,
            version=self._snapshot.version,
            engines=tuple(self._parts.values()),
            seconds=self._seconds,
            total_s=total_s,
            sent_bytes=self._transfer.sent_bytes,
            sender_failure=self._sender_failure,
        )


async def to_the_end(work: Coroutine[None, None, None]) -> None:
    """Await it, whatever is cancelled meanwhile; the cancellation is raised afterwards."""
    # No task group: that would cancel it.
    running = asyncio.ensure_future(work)
    if (cancelled := await outlast(running)) is not None:
        raise cancelled from running.exception()
    running.result()
