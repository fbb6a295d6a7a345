"""Push of one snapshot to engines, wave by wave, while rollouts continue.

Invariants:
- machine.py decides the next phase, transfer.py, updater.py, disk.py or delta.py moves the bytes, and this module calls
  the engines: every await has a deadline, and the journal is written before each phase.
- An engine's failure is data in the report. Only a corrupt snapshot, a failing journal or a cancellation makes `push`
  raise. Even then every engine that got no bucket is first resumed and its gate opened, however often the push is
  cancelled in the meantime.
- An engine that serves a different model from the snapshot's is refused before it is changed.
- An engine is resumed only if its checksums are the snapshot's, or those of the majority where they cannot be compared
  with the snapshot's. Without a majority it reads the snapshot again, and if that does not help, no side is trusted.
- With `in_place` a gate always opens with the engine's version as cache namespace, flushed or not: from it clients
  determine which tokens were sampled on keys and values of other weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from headrace.policies.cancellation import outlast
from headrace.policies.engine import EngineId, EngineInfo, PauseMode, RequestId
from headrace.policies.errors import EngineRefused, GroupFailed, ModelInvalid, PushError, RequestInvalid, SenderFailed
from headrace.policies.learner import WeightsSnapshot
from headrace.policies.push.compatibility import Agreement, differing
from headrace.policies.push.contract import EnginePush, Gate, GroupMember, Journal, PushConfig, PushReport, Trainer
from headrace.policies.push.delta import DeltaTransfer
from headrace.policies.push.directories import SnapshotDirectories
from headrace.policies.push.disk import DiskTransfer
from headrace.policies.push.fitting import check_fits, read_model_specs
from headrace.policies.push.machine import GROUP_PHASES, Phase, PushMachine, PushOutcome, PushStep
from headrace.policies.push.resuming import resume
from headrace.policies.push.sender import SenderProcess
from headrace.policies.push.transfer import Failures, Transfer, first_error, group_name, lay_out
from headrace.policies.push.updater import UpdaterTransfer
from headrace.policies.sglang.client import SGLangEngine

logger = logging.getLogger(__name__)

AnyTransfer = Transfer | UpdaterTransfer | DiskTransfer | DeltaTransfer


async def push(
    snapshot: WeightsSnapshot,
    engines: Sequence[SGLangEngine],
    sender: SenderProcess,
    gates: Gate,
    journal: Journal,
    config: PushConfig,
    *,
    in_doubt: Container[EngineId] = (),
    failed: Callable[[EngineId, str], None] = lambda *_: None,
    directories: SnapshotDirectories | None = None,
    trainer: Trainer | None = None,
    copy: Path | None = None,
) -> PushReport:
    """Push one snapshot: through the sender, or, by disk, from its directory in `directories` after the sender has
    verified it; live weights by their `trainer`, deltas by the folder `copy` of each engine's host. Engines `in_doubt`
    may hold mixed weights: they are resumed only once they have all the new weights. `failed` is called with each
    quarantined engine and the reason, as soon as it is known. Without `directories`, which all transports but that by
    the sender require, a dispute between engines whose checksums cannot be compared with the snapshot's is decided
    against all of them.

    Raises ModelInvalid when the snapshot is unreadable, SenderFailed when the sender cannot load it, PushError when it
    has no tensors. In these cases no engine has been changed."""
    held = HeldGates(gates, config.gate_lease_s)
    transfer: AnyTransfer
    if snapshot.live or snapshot.delta is not None:
        assert directories is not None
        # The trainer has loaded this model, and an engine of another one must be refused before it is changed.
        specs = await asyncio.to_thread(read_model_specs, directories.model_dir)
        if snapshot.live:
            assert trainer is not None
            transfer = UpdaterTransfer(snapshot.version, trainer, specs, config)
        else:
            assert copy is not None
            transfer = DeltaTransfer(snapshot, copy, specs, config)
    elif config.transport == "group":
        transfer = Transfer(snapshot, sender, config)
    elif directories is None:
        raise PushError('push.transport "disk" needs a folder for the directories that engines read')
    else:
        directory = await directories.of(snapshot)
        transfer = DiskTransfer(snapshot.version, directory, sender, directories.readers, config)
    execution = PushExecution(
        snapshot, engines, transfer, held, journal, config, in_doubt=in_doubt, failed=failed, directories=directories
    )
    async with first_error(), asyncio.TaskGroup() as tasks:
        renewing = tasks.create_task(held.renew())
        try:
            return await execution.run()
        finally:
            renewing.cancel()


class PushExecution:
    """Execution of one push; an instance is used only once."""

    def __init__(
        self,
        snapshot: WeightsSnapshot,
        engines: Sequence[SGLangEngine],
        transfer: AnyTransfer,
        gates: HeldGates,
        journal: Journal,
        config: PushConfig,
        *,
        in_doubt: Container[EngineId],
        failed: Callable[[EngineId, str], None],
        directories: SnapshotDirectories | None,
    ) -> None:
        self.push_id = uuid.uuid4().hex[:12]
        self._snapshot = snapshot
        self._engines = {engine.engine_id: engine for engine in engines}
        self._transfer = transfer
        self._groups = transfer if isinstance(transfer, Transfer | UpdaterTransfer) else None
        self._directories = directories
        self._gates = gates
        self._journal = journal
        self._config = config
        self._failed = failed
        self._reported: set[EngineId] = set()
        names = list(self._engines)
        # A trainer's processes send to all engines at once.
        size = len(names) or 1 if snapshot.live else config.wave_size
        self._machine = PushMachine(
            [names[at : at + size] for at in range(0, len(names), size)],
            in_doubt,
            skipped=(GROUP_PHASES if self._groups is None else frozenset())
            | (frozenset() if isinstance(transfer, DeltaTransfer) else {Phase.PULL}),
        )
        self._parts = {name: EnginePush(engine_id=name) for name in names}
        self._seconds = dict.fromkeys((phase.value for phase in Phase), 0.0)
        self._paused_at_s: dict[EngineId, float] = {}
        self._infos: dict[EngineId, EngineInfo] = {}
        self._modes: dict[EngineId, PauseMode] = {}
        self._fitting: dict[Path, bool] = {}
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
            self._machine.abandon(f"the push was interrupted: {type(error).__name__}: {error}")
            raise
        finally:
            await to_the_end(self._clean_up())
        total_s = time.perf_counter() - started_s
        self._report_failed(self._parts)
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

    async def _clean_up(self) -> None:
        """Leave sessions, pauses, gates and groups, without using the journal, which may have failed."""
        try:
            while step := self._machine.next():
                await self._take(step)
        finally:
            if self._groups is not None:
                await self._groups.disband()

    async def _take(self, step: PushStep) -> None:
        handlers: dict[Phase, Callable[[PushStep, Failures], Coroutine[None, None, None]]] = {
            Phase.PROBE: self._probe,
            Phase.PULL: self._pull,
            Phase.FORM: self._form,
            Phase.BROADCAST: self._send,
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
        self._report_failed(step.engines)

    def _report_failed(self, engines: Iterable[EngineId]) -> None:
        for engine_id in engines:
            progress = self._machine.progress[engine_id]
            quarantined = self._machine.outcome(engine_id) is PushOutcome.QUARANTINED
            if quarantined and progress.failure is not None and engine_id not in self._reported:
                self._reported.add(engine_id)
                self._failed(engine_id, progress.failure.message)

    async def _each(self, step: PushStep, failures: Failures) -> None:
        """Run a phase that consists of one call to each engine."""
        calls: dict[Phase, Callable[[SGLangEngine], Awaitable[None]]] = {
            Phase.GATE: self._gate,
            Phase.PAUSE: self._pause,
            Phase.BEGIN: lambda engine: engine.begin_update(),
            Phase.END: lambda engine: engine.end_update(),
            Phase.FLUSH: self._flush,
            Phase.RESUME: self._resume,
            Phase.OPEN: self._open,
        }
        await self._call_all(step, failures, calls[step.phase])

    async def _call_all(
        self,
        step: PushStep,
        failures: Failures,
        call: Callable[[SGLangEngine], Awaitable[None]],
        limit_s: float | None = None,
    ) -> None:
        async def one(engine_id: EngineId) -> None:
            async with failures.of(engine_id, limit_s or self._config.phase_timeout_s):
                await call(self._engines[engine_id])

        async with asyncio.TaskGroup() as tasks:
            for engine_id in step.engines:
                tasks.create_task(one(engine_id))

    async def _probe(self, step: PushStep, failures: Failures) -> None:
        """Read the engines' infos, and check that they serve the snapshot's model."""
        await self._call_all(step, failures, self._read_info)
        for engine_id in [name for name in step.engines if name not in failures.found]:
            # Not within the limit of a phase, which is that of one call: this reads the headers of all files.
            async with failures.of(engine_id, self._config.load_timeout_s):
                await self._check_fits(engine_id)

    async def _read_info(self, engine: SGLangEngine) -> None:
        info = self._infos[engine.engine_id] = await engine.info()
        mode = self._config.pause_mode
        if not info.version_spans and mode is not PauseMode.ABORT:
            # A reply without version spans must be of one version, and only an aborted request's reply is.
            logger.warning(
                "%s (%s) does not report the version of each token: paused with abort instead of %s",
                engine.engine_id,
                info.server_version,
                mode,
            )
            mode = PauseMode.ABORT
        self._modes[engine.engine_id] = mode
        self._parts[engine.engine_id].ranks = info.ranks

    async def _check_fits(self, engine_id: EngineId) -> None:
        model_dir = Path(self._infos[engine_id].model_path)
        if not model_dir.is_absolute():
            return
        if model_dir not in self._fitting:
            try:
                self._fitting[model_dir] = await asyncio.to_thread(
                    check_fits, self._specs, model_dir, untrained=self._snapshot.untrained
                )
            except ModelInvalid as error:
                raise RequestInvalid(f"{engine_id} serves another model: {error}") from error
        if self._fitting[model_dir]:
            if not isinstance(self._transfer, Transfer):
                raise RequestInvalid(
                    f"{engine_id} would skip the experts of the snapshot: the files of its model {model_dir} have one "
                    "tensor for each expert, the snapshot has all experts of a layer in one; set push.transport = "
                    '"group", which sends them one by one, or let the learner export the names of the model\'s files'
                )
            self._transfer.send_single_experts(engine_id)

    async def _pull(self, step: PushStep, failures: Failures) -> None:
        assert isinstance(self._transfer, DeltaTransfer)
        await self._transfer.pull(self._members(step), failures)

    async def _gate(self, engine: SGLangEngine) -> None:
        # The load is read first: an engine in the middle of a step answers late, and the gate is not closed meanwhile.
        part, load = self._parts[engine.engine_id], await engine.load()
        part.in_flight = load.running + load.waiting
        if self._modes[engine.engine_id] is not PauseMode.IN_PLACE:
            part.retracted, part.recomputed_tokens = load.running, load.used_tokens
        await self._gates.close(engine.engine_id)

    async def _pause(self, engine: SGLangEngine) -> None:
        self._paused_at_s[engine.engine_id] = started_s = time.perf_counter()
        await engine.pause(self._modes[engine.engine_id])
        self._parts[engine.engine_id].pause_s = time.perf_counter() - started_s

    async def _flush(self, engine: SGLangEngine) -> None:
        part = self._parts[engine.engine_id]
        try:
            await engine.flush()
            part.flushed = True
        except EngineRefused:
            # An engine refuses while requests hold its cache, which only a pause in place allows.
            if self._modes[engine.engine_id] is not PauseMode.IN_PLACE:
                raise

    async def _resume(self, engine: SGLangEngine) -> None:
        await resume(engine)
        if (paused_at_s := self._paused_at_s.get(engine.engine_id)) is not None:
            self._parts[engine.engine_id].paused_s = time.perf_counter() - paused_at_s

    async def _open(self, engine: SGLangEngine) -> None:
        part = self._parts[engine.engine_id]
        # By the config and not by the engine's own mode: its client marks stale tokens by it in any case.
        if self._config.pause_mode is PauseMode.IN_PLACE:
            has_new = self._machine.progress[engine.engine_id].complete
            part.cache_namespace = str(self._snapshot.version if has_new else self._infos[engine.engine_id].version)
        aborts = await self._gates.open(engine.engine_id, part.cache_namespace)
        for request_id in aborts:
            await engine.abort(request_id)

    async def _verify(self, step: PushStep, failures: Failures) -> None:
        """Compare checksums with the snapshot's if the engine computes them in the same way, else with those of the
        other engines of this push."""
        # Asked of live weights even so: an engine may answer a bucket before a collective of NCCL has brought it, but
        # reads its weights after that.
        if self._config.verify == "off" and not self._snapshot.live:
            return
        checksums: dict[EngineId, dict[str, str]] = {}

        async def ask(engine: SGLangEngine) -> None:
            checksums[engine.engine_id] = await engine.checksums()

        # What is still on its way has the time of a transfer.
        await self._call_all(step, failures, ask, self._config.read_timeout_s if self._snapshot.live else None)
        if self._config.verify == "off":
            return
        expected = self._transfer.checksums()
        wrong_of: dict[EngineId, list[str]] = {}
        for engine_id, got in checksums.items():
            if not expected or not self._infos[engine_id].snapshot_checksums:
                self._agreement.add(engine_id, got)
            elif wrong := differing(expected, got):
                wrong_of[engine_id] = wrong
            else:
                self._parts[engine_id].verified = True
        for engine_id in checksums:
            if self._agreement.is_disputed(engine_id):
                await self._read_again(engine_id, failures)
        for engine_id, wrong in (wrong_of | self._agreement.wrong()).items():
            message = f"{engine_id}: checksums disagree for {wrong[:3]} ({len(wrong)} in all)"
            if engine_id in step.engines:
                failures.add(engine_id, EngineRefused(200, message))
            else:
                # An engine of an earlier wave, which serves already: the majority changed, or there is none.
                self._machine.condemn(engine_id, message)
                self._report_failed([engine_id])

    async def _read_again(self, engine_id: EngineId, failures: Failures) -> None:
        """Have an engine, which is still paused, read the snapshot's directory, and count its checksums as a further
        vote."""
        # An engine that got joined experts one by one would skip them in a directory.
        if (
            self._directories is None
            or not self._snapshot.files
            or self._fitting.get(Path(self._infos[engine_id].model_path))
        ):
            return
        try:
            path = (await self._directories.of(self._snapshot)).path
        except (PushError, ModelInvalid) as error:
            logger.warning("push %s: a dispute between engines stays undecided: %s", self.push_id, error)
            return
        engine = self._engines[engine_id]
        async with failures.of(engine_id, self._config.read_timeout_s):
            async with self._directories.readers.reading(engine_id, path):
                await engine.update_from_disk(path, version=self._snapshot.version)
            self._agreement.add(engine_id, await engine.checksums())
        if engine_id in failures.found:
            self._agreement.withdraw(engine_id)

    async def _form(self, step: PushStep, failures: Failures) -> None:
        assert self._groups is not None
        infos = {engine_id: self._infos[engine_id] for engine_id in step.engines}
        if isinstance(self._groups, UpdaterTransfer):
            ranks = [GroupMember(engine_id=name, ranks=info.ranks, holds=info.version) for name, info in infos.items()]
            await self._groups.form(self._members(step), ranks, failures)
            return
        name = group_name(self.push_id, step.wave, step.attempt)
        layout = lay_out((engine_id, info.ranks) for engine_id, info in infos.items())
        await self._groups.form(name, self._members(step), layout, failures)

    async def _send(self, step: PushStep, failures: Failures) -> None:
        started_s = time.perf_counter()
        taken = await self._transfer.send(self._members(step), failures, self._machine.touched)
        for engine_id, size in taken.items():
            part = self._parts[engine_id]
            part.received_bytes += size
            part.transfer_s += time.perf_counter() - started_s

    async def _disband(self, _step: PushStep, _failures: Failures) -> None:
        # No failures: an engine that has all weights can no longer fail.
        assert self._groups is not None
        await self._groups.disband()

    def _members(self, step: PushStep) -> list[SGLangEngine]:
        return [self._engines[engine_id] for engine_id in step.engines]


async def to_the_end(work: Coroutine[None, None, None]) -> None:
    """Await `work` despite cancellations, which are re-raised afterwards."""
    # Without a task group, which would cancel it.
    running = asyncio.ensure_future(work)
    if (cancelled := await outlast(running)) is not None:
        raise cancelled from running.exception()
    running.result()


@dataclass(slots=True, kw_only=True)
class _Held:
    """Gate that has been closed. `turn` is held during calls to the gateway."""

    closed_at_s: float
    opened_at_s: float | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class HeldGates:
    """Gates that one push has closed. The lease of each is renewed until it opens, or the push ends. Renewal and
    opening of one gate exclude each other, so that a late renewal never closes a gate that was opened."""

    def __init__(self, gates: Gate, lease_s: float) -> None:
        self._gates = gates
        self._lease_s = lease_s
        self._held: dict[EngineId, _Held] = {}

    async def close(self, engine_id: EngineId) -> None:
        held = self._held[engine_id] = _Held(closed_at_s=time.perf_counter())
        await self._renew(engine_id, held)

    async def open(self, engine_id: EngineId, cache_namespace: str | None) -> Sequence[RequestId]:
        """Open a gate, and return the requests that must be aborted again."""
        held = self._held.get(engine_id)
        if held is None:
            return await self._gates.open(engine_id, cache_namespace=cache_namespace)
        async with held.turn:
            # Before the call: even if it is cancelled, the gate must not be closed again.
            held.opened_at_s = time.perf_counter()
            return await self._gates.open(engine_id, cache_namespace=cache_namespace)

    def closed_s(self, engine_id: EngineId) -> float:
        """Return how long a gate was closed, or has been closed so far; 0 if it was never closed."""
        held = self._held.get(engine_id)
        if held is None:
            return 0.0
        return (held.opened_at_s or time.perf_counter()) - held.closed_at_s

    async def renew(self) -> NoReturn:
        """Renew the closed gates periodically, until cancelled."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            async with asyncio.TaskGroup() as tasks:
                for engine_id, held in self._held.items():
                    tasks.create_task(self._renew(engine_id, held))

    async def _renew(self, engine_id: EngineId, held: _Held) -> None:
        async with held.turn:
            if held.opened_at_s is None:
                await self._gates.close(engine_id, self._lease_s)
