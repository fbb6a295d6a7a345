"""The push of one snapshot into engines, wave by wave, while rollouts go on.

Invariants:
- machine.py decides what is next; this file does it: every await has a deadline, the journal is written before
  each phase.
- An engine's failure is data in the report. Only a broken snapshot, a failing journal or cancellation leave `push` as
  an exception, and even then every engine that got no bucket is resumed and its gate opened first.
- The sender is restarted when it had to be killed; a group that failed is never used again.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.policies.errors import (
    EngineError,
    EngineRefused,
    EngineTimeout,
    GroupFailed,
    PushError,
    SenderFailed,
    SenderTimeout,
)
from headrace.policies.push.contract import BucketSpec, EngineControl, EnginePush, Gate, PushConfig, PushReport
from headrace.policies.push.machine import Blame, Failure, Phase, PushMachine, Step

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence

    from headrace.buffer.versions import PolicyVersion
    from headrace.policies.engine import EngineId
    from headrace.policies.learner import WeightsSnapshot
    from headrace.policies.push.sender import SenderProcess

__all__ = ["BucketSpec", "EngineControl", "EnginePush", "Gate", "PushConfig", "PushReport", "push"]

logger = logging.getLogger(__name__)
# The group times out by itself first: that costs the group only, a missed deadline the whole sender.
SENDER_GRACE_S = 2.0


async def push(
    snapshot: WeightsSnapshot,
    engines: Sequence[EngineControl],
    sender: SenderProcess,
    gates: Gate,
    journal: Callable[[str, int, Phase], Awaitable[None]],
    config: PushConfig,
) -> PushReport:
    """Push one snapshot. `journal(push_id, wave, phase)` is awaited before each phase.

    Raises ModelInvalid when the snapshot is unreadable, SenderFailed when the sender cannot even load it; nothing
    was touched then."""
    execution = PushExecution(snapshot, engines, sender, gates, journal, config)
    return await execution.run()


@dataclass(slots=True, kw_only=True)
class LoadedSnapshot:
    """What the sender of this incarnation holds."""

    incarnation: int
    buckets: tuple[BucketSpec, ...]
    sizes: tuple[int, ...]
    checksums: dict[str, str]


@dataclass(slots=True, kw_only=True)
class Failures:
    """Collects the failures of one step from concurrent calls."""

    found: dict[EngineId, Failure] = field(default_factory=dict)
    refused: set[EngineId] = field(default_factory=set)

    @asynccontextmanager
    async def of(self, engine_id: EngineId, timeout_s: float) -> AsyncIterator[None]:
        """Whatever an engine does wrong inside becomes data."""
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            self.add(engine_id, EngineTimeout(f"{engine_id}: no answer within {timeout_s} s"))
        except EngineError as error:
            self.add(engine_id, error)

    def add(self, engine_id: EngineId, error: EngineError) -> None:
        self.found[engine_id] = Failure(blame=Blame.ENGINE, message=f"{type(error).__name__}: {error}")
        if isinstance(error, EngineRefused):
            self.refused.add(engine_id)

    def spare_victims(self) -> None:
        """Where somebody else in the group was unreachable, a refusal is its consequence."""
        if self.refused and len(self.refused) < len(self.found):
            for engine_id in self.refused:
                self.found[engine_id] = Failure(blame=Blame.VICTIM, message=self.found[engine_id].message)


class PushExecution:
    """One push; used once."""

    def __init__(
        self,
        snapshot: WeightsSnapshot,
        engines: Sequence[EngineControl],
        sender: SenderProcess,
        gates: Gate,
        journal: Callable[[str, int, Phase], Awaitable[None]],
        config: PushConfig,
    ) -> None:
        self.push_id = uuid.uuid4().hex[:12]
        self._snapshot = snapshot
        self._engines = {engine.engine_id: engine for engine in engines}
        self._sender = sender
        self._gates = gates
        self._journal = journal
        self._config = config
        names = list(self._engines)
        self._machine = PushMachine(
            [names[at : at + config.wave_size] for at in range(0, len(names), config.wave_size)]
        )
        self._parts = {name: EnginePush(engine_id=name) for name in names}
        self._seconds = dict.fromkeys((phase.value for phase in Phase), 0.0)
        self._paused_at_s: dict[EngineId, float] = {}
        self._group: str | None = None
        self._loaded: LoadedSnapshot | None = None
        self._reference: dict[str, str] = {}
        self._sent_bytes = 0
        self._sender_failure: SenderFailed | GroupFailed | None = None

    async def run(self) -> PushReport:
        started_s = time.perf_counter()
        await self._load()
        try:
            while step := self._machine.next():
                await self._journal(self.push_id, step.wave, step.phase)
                await self._take(step)
        except BaseException as error:
            self._machine.abandon(f"the push was broken off: {type(error).__name__}: {error}")
            await asyncio.shield(self._way_out())
            raise
        finally:
            if self._group is not None:
                await self._close_group()
        return self._report(time.perf_counter() - started_s)

    async def _way_out(self) -> None:
        """Leave sessions, pauses and gates without the journal, which may be what failed."""
        while step := self._machine.next():
            await self._take(step)

    async def _take(self, step: Step) -> None:
        handlers: dict[Phase, Callable[[Step, Failures], Coroutine[None, None, None]]] = {
            Phase.FORM: self._form,
            Phase.BROADCAST: self._broadcast,
        }
        started_s = time.perf_counter()
        failures = Failures()
        await handlers.get(step.phase, self._each)(step, failures)
        self._seconds[step.phase.value] += time.perf_counter() - started_s
        for engine_id, failure in failures.found.items():
            logger.warning("push %s: %s failed in %s: %s", self.push_id, engine_id, step.phase, failure.message)
        self._machine.done(step, failures.found)

    async def _each(self, step: Step, failures: Failures) -> None:
        """Phases that are one call to each engine."""
        calls: dict[Phase, Callable[[EngineControl], Awaitable[None]]] = {
            Phase.PROBE: self._probe,
            Phase.GATE: lambda engine: self._gates.close(engine.engine_id, self._config.gate_lease_s),
            Phase.PAUSE: self._pause,
            Phase.BEGIN: self._begin,
            Phase.END: lambda engine: engine.end_update(),
            Phase.FLUSH: lambda engine: engine.flush(),
            Phase.VERIFY: self._verify,
            Phase.RESUME: self._resume,
            Phase.OPEN: self._open,
            Phase.DISBAND: self._disband,
        }
        call = calls[step.phase]

        async def one(engine_id: EngineId) -> None:
            async with failures.of(engine_id, self._config.phase_timeout_s):
                await call(self._engines[engine_id])

        async with asyncio.TaskGroup() as tasks:
            for engine_id in step.engines:
                tasks.create_task(one(engine_id))

    async def _probe(self, engine: EngineControl) -> None:
        await engine.load()

    async def _pause(self, engine: EngineControl) -> None:
        self._paused_at_s[engine.engine_id] = time.perf_counter()
        await engine.pause(self._config.pause_mode)

    async def _begin(self, engine: EngineControl) -> None:
        load = await engine.load()
        self._parts[engine.engine_id].in_flight = load.running + load.waiting
        await engine.begin_update()

    async def _resume(self, engine: EngineControl) -> None:
        await engine.resume()
        paused_at_s = self._paused_at_s[engine.engine_id]
        self._parts[engine.engine_id].paused_s = time.perf_counter() - paused_at_s

    async def _open(self, engine: EngineControl) -> None:
        for request_id in await self._gates.open(engine.engine_id):
            await engine.abort(request_id)

    async def _disband(self, engine: EngineControl) -> None:
        if self._group is not None:
            await engine.leave_group(self._group)

    async def _verify(self, engine: EngineControl) -> None:
        if self._config.verify == "off":
            return
        assert self._loaded is not None
        got = await engine.checksums()
        expected = self._loaded.checksums if self._config.verify == "snapshot" else self._reference
        wrong = sorted(name for name in expected if got.get(name) != expected[name])
        if wrong:
            raise EngineRefused(200, f"{engine.engine_id}: checksums disagree for {wrong[:3]} ({len(wrong)} in all)")
        self._reference = self._reference or got

    async def _load(self) -> LoadedSnapshot:
        """The snapshot in the sender; again after a restart."""
        if self._loaded is not None and self._loaded.incarnation == self._sender.incarnation:
            return self._loaded
        arguments = {
            "path": str(self._snapshot.path),
            "sha256": self._snapshot.sha256,
            "bucket_bytes": self._config.bucket_bytes,
            "checksums": self._config.verify == "snapshot",
        }
        reply = await self._sender.call("load", arguments, timeout_s=self._config.transfer_timeout_s)
        specs = tuple(
            BucketSpec(
                names=tuple(bucket["names"]),
                dtypes=tuple(bucket["dtypes"]),
                shapes=tuple(map(tuple, bucket["shapes"])),
            )
            for bucket in reply["buckets"]
        )
        if not specs:
            raise PushError(f"{self._snapshot.path} holds no tensors")
        self._loaded = LoadedSnapshot(
            incarnation=self._sender.incarnation,
            buckets=specs,
            sizes=tuple(reply["sizes"]),
            checksums=reply["checksums"],
        )
        return self._loaded

    async def _form(self, step: Step, failures: Failures) -> None:
        """A new group of the sender and these engines."""
        if self._group is not None:
            await self._close_group()
        name = f"headrace-{self.push_id}-{step.wave}-{step.attempt}"
        world_size = len(step.engines) + 1
        timeout_s = self._config.transfer_timeout_s
        opening = {
            "name": name,
            "host": self._config.host,
            "world_size": world_size,
            "backend": self._config.backend,
            "timeout_s": timeout_s,
        }
        self._group = name
        try:
            await self._load()
            port = (await self._sender.call("open_group", opening, timeout_s=timeout_s))["port"]
        except (SenderFailed, GroupFailed) as error:
            self._end_early(error)
            return

        async def join(rank: int, engine_id: EngineId) -> None:
            async with failures.of(engine_id, timeout_s):
                await self._engines[engine_id].join_group(
                    name,
                    host=self._config.host,
                    port=port,
                    rank=rank,
                    world_size=world_size,
                    backend=self._config.backend,
                )

        joins = [join(rank, engine_id) for rank, engine_id in enumerate(step.engines, start=1)]
        await self._with_sender("join_group", {"name": name}, joins, failures)

    async def _broadcast(self, step: Step, failures: Failures) -> None:
        """All buckets to the engines of the group; whoever failed is left out of the following ones."""
        assert self._loaded is not None
        assert self._group is not None
        try:
            await self._sender.call("ping", {}, timeout_s=self._config.phase_timeout_s)
            if self._sender.incarnation != self._loaded.incarnation:
                raise SenderFailed("the sender was restarted and has lost the group")
        except SenderFailed as error:
            self._end_early(error)
            return
        last = len(self._loaded.buckets) - 1
        for index, bucket in enumerate(self._loaded.buckets):
            version = self._snapshot.version if index == last else None
            updates = [self._update(engine_id, bucket, version, failures) for engine_id in step.engines]
            await self._with_sender("broadcast", {"name": self._group, "bucket": index}, updates, failures)
            if failures.found or self._sender_failure is not None:
                # A group that lost a member cannot be trusted: the machine forms another for who is left.
                self._fail_the_rest(step, failures)
                return
            self._sent_bytes += self._loaded.sizes[index]

    async def _update(
        self, engine_id: EngineId, bucket: BucketSpec, version: PolicyVersion | None, failures: Failures
    ) -> None:
        assert self._group is not None
        self._machine.touched(engine_id)
        async with failures.of(engine_id, self._config.transfer_timeout_s):
            await self._engines[engine_id].update(bucket, group=self._group, version=version)

    def _fail_the_rest(self, step: Step, failures: Failures) -> None:
        """Engines that answered well still lack buckets: they count as victims of the broken group."""
        for engine_id in step.engines:
            if engine_id not in failures.found:
                failures.found[engine_id] = Failure(blame=Blame.VICTIM, message="its group broke")

    async def _with_sender(
        self,
        op: str,
        arguments: dict[str, object],
        calls: Sequence[Coroutine[None, None, None]],
        failures: Failures,
    ) -> None:
        """One collective: the sender and all engines at once, then the question whose fault a failure is."""
        failed: SenderFailed | GroupFailed | None = None

        async def send() -> None:
            nonlocal failed
            try:
                await self._sender.call(op, arguments, timeout_s=self._config.transfer_timeout_s + SENDER_GRACE_S)
            except (SenderFailed, GroupFailed) as error:
                failed = error

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send())
            for call in calls:
                tasks.create_task(call)
        # A sender that merely waited too long, or saw its peer go, is not at fault when an engine failed as well.
        excused = isinstance(failed, SenderTimeout | GroupFailed) and failures.found
        if failed is not None and not excused:
            failures.found.clear()
            self._end_early(failed)
        failures.spare_victims()

    def _end_early(self, error: SenderFailed | GroupFailed) -> None:
        self._sender_failure = error
        self._machine.abandon(f"{type(error).__name__}: {error}")

    async def _close_group(self) -> None:
        """At the sender; a sender that died took it along."""
        name, self._group = self._group, None
        if self._loaded is None or self._loaded.incarnation != self._sender.incarnation or self._sender.pid is None:
            return
        with suppress(SenderFailed, GroupFailed):
            await self._sender.call("close_group", {"name": name}, timeout_s=self._config.phase_timeout_s)

    def _report(self, total_s: float) -> PushReport:
        for engine_id, part in self._parts.items():
            part.outcome = self._machine.outcome(engine_id)
            failure = self._machine.progress[engine_id].failure
            part.failure = "" if failure is None else failure.message
        return PushReport(
            push_id=self.push_id,
            version=self._snapshot.version,
            engines=tuple(self._parts.values()),
            seconds=self._seconds,
            total_s=total_s,
            sent_bytes=self._sent_bytes,
            sender_failure=self._sender_failure,
        )
