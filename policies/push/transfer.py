"""The senders' side of one push: the shards they hold, the groups they share with engines, the buckets on their way.

Invariants:
- Each shard of a snapshot has a sender and a process group of its own: that is how several trainer ranks send. Their
  buckets travel one after another, the version with the last one.
- A group that failed is never used again. Every group is left at both ends before the next one is formed, and at the
  end, whatever became of it; an engine that does not leave costs a short wait and nothing else.
- A sender that died, or had to be killed, took its shard and groups along: the push that used it ends (`SenderFailed`),
  and the next one starts another.
- A collective that an engine leaves is over for all: the sender, which nothing can call back, is killed a moment later,
  and its end frees the other engines. An engine that failed excuses the sender; those that fail after it are victims.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.policies.errors import (
    EngineError,
    EngineRefused,
    EngineTimeout,
    GroupFailed,
    PushError,
    SenderFailed,
    SenderTimeout,
    UnknownGroup,
)
from headrace.policies.push.machine import Blame, Failure
from headrace.policies.push.tensors import Bucket, TensorSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from headrace.buffer.versions import PolicyVersion
    from headrace.policies.engine import EngineId
    from headrace.policies.learner import WeightsShard, WeightsSnapshot
    from headrace.policies.push.contract import EngineControl, PushConfig
    from headrace.policies.push.layout import GroupLayout
    from headrace.policies.push.sender import SenderProcess

logger = logging.getLogger(__name__)

# The group times out by itself first: that costs the group only, a missed deadline the whole sender.
SENDER_GRACE_S = 2.0
# Others of the wave may be paused meanwhile.
LEAVE_TIMEOUT_S = 3.0


@dataclass(slots=True, kw_only=True)
class Failures:
    """Collects the failures of one step from concurrent calls."""

    found: dict[EngineId, Failure] = field(default_factory=dict)
    refused: set[EngineId] = field(default_factory=set)
    """Those that answered, and said no."""

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

    def spare_victims(self, culprits: AbstractSet[EngineId]) -> None:
        """A refusal that came after the failure of another one in the group is its consequence; so is one where
        somebody else was unreachable, whoever was heard of first."""
        unreachable = self.found.keys() - self.refused
        for engine_id in self.refused:
            if unreachable or engine_id not in culprits:
                self.found[engine_id] = Failure(blame=Blame.VICTIM, message=self.found[engine_id].message)


@dataclass(slots=True, kw_only=True)
class Loaded:
    """What a sender of this incarnation holds: buckets, and checksums by parameter."""

    incarnation: int
    buckets: tuple[Bucket, ...]
    checksums: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group of a sender, and the engines that were asked to join."""

    name: str
    engines: tuple[EngineControl, ...]


@dataclass(slots=True, kw_only=True)
class Lane:
    """One shard's way: its sender and the group of the moment."""

    shard: WeightsShard
    sender: SenderProcess
    loaded: Loaded | None = None
    group: Group | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether its sender holds it still."""
        held = self.loaded is not None and self.loaded.incarnation == self.sender.incarnation
        return held and self.sender.alive


class Transfer:
    """Used for one push. Methods raise SenderFailed or GroupFailed when it cannot go on through these senders."""

    def __init__(self, snapshot: WeightsSnapshot, senders: Sequence[SenderProcess], config: PushConfig) -> None:
        if len(senders) != len(snapshot.shards):
            raise PushError(f"{len(snapshot.shards)} shards need as many senders, not {len(senders)}")
        self._version = snapshot.version
        self._lanes = [Lane(shard=shard, sender=sender) for shard, sender in zip(snapshot.shards, senders, strict=True)]
        self._config = config
        self.sent_bytes = 0

    async def load(self) -> None:
        """Every shard into its sender, at once. Raises ModelInvalid for an unreadable one, PushError for a parameter
        that two shards hold."""
        async with first_error(), asyncio.TaskGroup() as tasks:
            for lane in self._lanes:
                tasks.create_task(self._load(lane))
        names = Counter(name for loaded in self._all_loaded() for bucket in loaded.buckets for name in bucket.names)
        name, count = names.most_common(1)[0]
        if count > 1:
            raise PushError(f"{name} is in {count} shards of the snapshot")

    def specs(self) -> dict[str, TensorSpec]:
        """Every parameter of the snapshot."""
        return {
            name: spec
            for loaded in self._all_loaded()
            for bucket in loaded.buckets
            for name, spec in zip(bucket.names, bucket.specs, strict=True)
        }

    def checksums(self) -> dict[str, str]:
        return {name: value for loaded in self._all_loaded() for name, value in loaded.checksums.items()}

    async def form(
        self, names: Sequence[str], engines: Sequence[EngineControl], layout: GroupLayout, failures: Failures
    ) -> None:
        """A new group of each sender and these engines, of these names."""
        await self.disband()
        for lane, name in zip(self._lanes, names, strict=True):
            await self._form(lane, name, engines, layout, failures)
            if failures.found:
                return

    async def broadcast(
        self, engines: Sequence[EngineControl], failures: Failures, touched: Callable[[EngineId], None]
    ) -> dict[EngineId, int]:
        """All buckets to the engines of the group, until one fails; the bytes that each engine took.

        After a failure every engine of the group has failed: those that answered well still lack buckets."""
        for lane in self._lanes:
            await self._tell(lane, "ping", {}, self._config.phase_timeout_s)
        taken = dict.fromkeys((engine.engine_id for engine in engines), 0)
        for lane, index, version in self._plan():
            assert lane.loaded is not None
            assert lane.group is not None
            updates = [self._update(engine, lane, index, version, failures, touched) for engine in engines]
            await self._collective(lane, "broadcast", {"name": lane.group.name, "bucket": index}, updates, failures)
            if failures.found:
                for engine in engines:
                    failures.found.setdefault(engine.engine_id, Failure(blame=Blame.VICTIM, message="its group broke"))
                return taken
            size_bytes = lane.loaded.buckets[index].size_bytes
            self.sent_bytes += size_bytes
            for engine_id in taken:
                taken[engine_id] += size_bytes
        return taken

    async def disband(self) -> None:
        """The groups of the moment, at both ends at once: some transports wait there for each other."""
        async with asyncio.TaskGroup() as tasks:
            for lane in self._lanes:
                group, lane.group = lane.group, None
                if group is not None:
                    tasks.create_task(self._close(lane, group.name))
                    for engine in group.engines:
                        tasks.create_task(self._leave(engine, group.name))

    async def _close(self, lane: Lane, name: str) -> None:
        with suppress(SenderFailed, GroupFailed):
            await self._tell(lane, "close_group", {"name": name}, self._config.phase_timeout_s)

    async def _leave(self, engine: EngineControl, name: str) -> None:
        """An engine whose transfer failed has left by itself."""
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                with suppress(UnknownGroup):
                    await engine.leave_group(name)
        except (EngineError, TimeoutError) as error:
            logger.warning("%s did not leave group %s: %r", engine.engine_id, name, error)

    async def _load(self, lane: Lane) -> None:
        arguments = {
            "path": str(lane.shard.path),
            "sha256": lane.shard.sha256,
            "bucket_bytes": self._config.bucket_bytes,
            "checksums": self._config.verify == "snapshot",
        }
        reply = await lane.sender.call("load", arguments, timeout_s=self._config.load_timeout_s)
        if not reply["buckets"]:
            raise PushError(f"{Path(lane.shard.path)} holds no tensors")
        lane.loaded = Loaded(
            incarnation=lane.sender.incarnation,
            buckets=tuple(
                Bucket(
                    names=tuple(bucket["names"]),
                    dtypes=tuple(bucket["dtypes"]),
                    shapes=tuple(map(tuple, bucket["shapes"])),
                )
                for bucket in reply["buckets"]
            ),
            checksums=reply["checksums"],
        )

    def _all_loaded(self) -> Iterator[Loaded]:
        for lane in self._lanes:
            assert lane.loaded is not None
            yield lane.loaded

    def _plan(self) -> Iterator[tuple[Lane, int, PolicyVersion | None]]:
        """Every bucket in its order, with the version on the last."""
        order = [(lane, index) for lane in self._lanes if lane.loaded for index in range(len(lane.loaded.buckets))]
        for at, (lane, index) in enumerate(order, start=1):
            yield lane, index, self._version if at == len(order) else None

    async def _form(
        self, lane: Lane, name: str, engines: Sequence[EngineControl], layout: GroupLayout, failures: Failures
    ) -> None:
        config, timeout_s = self._config, self._config.transfer_timeout_s
        opening = {
            "name": name,
            "host": config.host,
            "world_size": layout.world_size,
            "backend": config.backend,
            "timeout_s": timeout_s,
        }
        lane.group = Group(name=name, engines=tuple(engines))
        port = (await self._tell(lane, "open_group", opening, timeout_s))["port"]

        async def join(engine: EngineControl) -> None:
            async with failures.of(engine.engine_id, config.collective_timeout_s):
                await engine.join_group(
                    name,
                    host=config.host,
                    port=port,
                    rank=layout.offsets[engine.engine_id],
                    world_size=layout.world_size,
                    backend=config.backend,
                )

        await self._collective(lane, "join_group", {"name": name}, [join(engine) for engine in engines], failures)

    async def _tell(self, lane: Lane, op: str, arguments: Mapping[str, object], timeout_s: float) -> Mapping[str, Any]:
        """A command about what the sender holds. One that died is not started for it: that takes long where engines
        are paused, and it would hold nothing."""
        if not lane.is_loaded:
            raise SenderFailed(f"the sender died before {op}, and took its shard and groups along")
        return await lane.sender.call(op, arguments, timeout_s=timeout_s)

    async def _update(
        self,
        engine: EngineControl,
        lane: Lane,
        index: int,
        version: PolicyVersion | None,
        failures: Failures,
        touched: Callable[[EngineId], None],
    ) -> None:
        assert lane.loaded is not None
        assert lane.group is not None
        touched(engine.engine_id)
        async with failures.of(engine.engine_id, self._config.collective_timeout_s):
            await engine.update(lane.loaded.buckets[index], group=lane.group.name, version=version)

    async def _collective(
        self,
        lane: Lane,
        op: str,
        arguments: dict[str, object],
        calls: Sequence[Coroutine[None, None, None]],
        failures: Failures,
    ) -> None:
        """The sender and all engines at once, then the question whose fault a failure is. Raises SenderFailed or
        GroupFailed when it is the sender's; no engine has failed then."""
        failed: SenderFailed | GroupFailed | None = None

        async def send() -> None:
            nonlocal failed
            try:
                await self._tell(lane, op, arguments, self._config.transfer_timeout_s + SENDER_GRACE_S)
            except (SenderFailed, GroupFailed) as error:
                failed = error

        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(send())
            pending = {tasks.create_task(call) for call in calls}
            while pending and not failures.found:
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            culprits = set(failures.found)
            if culprits:
                await asyncio.wait({sending}, timeout=SENDER_GRACE_S)
                sending.cancel()
        # A sender that merely waited too long, or saw its peer go, is not at fault when an engine failed as well.
        excused = isinstance(failed, SenderTimeout | GroupFailed) and failures.found
        if failed is not None and not excused:
            failures.found.clear()
            raise failed
        failures.spare_victims(culprits)


@asynccontextmanager
async def first_error() -> AsyncIterator[None]:
    """The first error of a task group, alone: callers tell errors apart by their class."""
    try:
        yield
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
