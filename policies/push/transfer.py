"""Transfer of a snapshot from its sender to engines: loading, process groups, and broadcasts.

Invariants:
- One sender holds all files of a snapshot, because a module of a layer may be in two of them. The buckets are sent one
  after another, the last one with the version.
- A group that failed is never reused. Every group is left at both ends before the next one is formed, and at the end of
  the push; an engine that does not leave costs only a short wait.
- A sender that died or was killed has lost its snapshot and group: the push that used it ends (`SenderFailed`), and the
  next one starts another.
- A collective that an engine left fails for all members: the sender, which cannot be interrupted, is killed shortly
  after, which frees the other engines. The failure of an engine excuses the sender; engines failing later are victims.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId
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
from headrace.policies.learner import WeightsSnapshot
from headrace.policies.push.contract import PushConfig
from headrace.policies.push.fitting import single_experts
from headrace.policies.push.machine import Blame, Failure
from headrace.policies.push.sender import SenderProcess
from headrace.policies.sglang.client import SGLangEngine
from headrace.policies.tensors import Bucket, TensorSpec

logger = logging.getLogger(__name__)

SENDER_GRACE_S = 2.0
"""Margin added to a sender's deadline so that the group times out first, which loses only the group and not the sender.
"""
LEAVE_TIMEOUT_S = 3.0
"""Time limit for leaving a group; short, because other engines of the wave may be paused in the meantime."""


@dataclass(slots=True, kw_only=True)
class Failures:
    """Failures of one step, collected from concurrent calls."""

    found: dict[EngineId, Failure] = field(default_factory=dict)
    refused: set[EngineId] = field(default_factory=set)
    """Engines that replied with a refusal."""

    @asynccontextmanager
    async def of(self, engine_id: EngineId, timeout_s: float) -> AsyncIterator[None]:
        """Record errors and timeouts of calls to an engine inside the context."""
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
        """Mark the consequences of another engine's failure as such: refusals that came after it, or all refusals if
        some engine was unreachable."""
        unreachable = self.found.keys() - self.refused
        for engine_id in self.refused:
            if unreachable or engine_id not in culprits:
                self.found[engine_id] = Failure(blame=Blame.VICTIM, message=self.found[engine_id].message)


@dataclass(slots=True, kw_only=True)
class Loaded:
    """Buckets that the sender of this incarnation holds, and their checksums by parameter."""

    incarnation: int
    buckets: tuple[Bucket, ...]
    checksums: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Process group of the sender, with the engines that were asked to join."""

    name: str
    engines: tuple[SGLangEngine, ...]


class Transfer:
    """Transfer of one push. Methods raise SenderFailed or GroupFailed when the sender cannot continue."""

    def __init__(self, snapshot: WeightsSnapshot, sender: SenderProcess, config: PushConfig) -> None:
        self._snapshot = snapshot
        self._sender = sender
        self._config = config
        self._held: Loaded | None = None
        self._group: Group | None = None
        self._single_experts: set[EngineId] = set()
        self.sent_bytes = 0

    def send_single_experts(self, engine_id: EngineId) -> None:
        """Describe joined experts to this engine as one tensor for each matrix."""
        self._single_experts.add(engine_id)

    async def load(self) -> None:
        """Load the snapshot into the sender. Raises ModelInvalid for an unreadable file or a parameter in two files,
        PushError for a snapshot without tensors."""
        arguments = {
            "files": {str(file.path): file.sha256 for file in self._snapshot.files},
            "bucket_bytes": self._config.bucket_bytes,
            "checksums": self._config.verify != "off",
        }
        reply = await self._sender.call("load", arguments, timeout_s=self._config.load_timeout_s)
        if not reply["buckets"]:
            raise PushError(f"snapshot {self._snapshot.version} contains no tensors")
        self._held = Loaded(
            incarnation=self._sender.incarnation,
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

    def specs(self) -> dict[str, TensorSpec]:
        """Return all parameters of the snapshot."""
        return {
            name: spec for bucket in self._loaded.buckets for name, spec in zip(bucket.names, bucket.specs, strict=True)
        }

    def checksums(self) -> dict[str, str]:
        return self._loaded.checksums

    @property
    def _loaded(self) -> Loaded:
        assert self._held is not None
        return self._held

    async def form(self, name: str, engines: Sequence[SGLangEngine], layout: GroupLayout, failures: Failures) -> None:
        """Form a new group of the sender and these engines."""
        await self.disband()
        config = self._config

        async def join(engine: SGLangEngine, port: int) -> None:
            async with failures.of(engine.engine_id, config.collective_timeout_s):
                await engine.join_group(
                    name,
                    host=config.host,
                    port=port,
                    rank=layout.offsets[engine.engine_id],
                    world_size=layout.world_size,
                    backend=config.backend,
                )

        opening = {
            "name": name,
            "host": config.host,
            "world_size": layout.world_size,
            "backend": config.backend,
            "timeout_s": config.transfer_timeout_s,
        }
        self._group = Group(name=name, engines=tuple(engines))
        port = (await self._tell("open_group", opening, config.transfer_timeout_s))["port"]
        await self._collective("join_group", {"name": name}, [join(engine, port) for engine in engines], failures)

    async def send(
        self, engines: Sequence[SGLangEngine], failures: Failures, touched: Callable[[EngineId], None]
    ) -> dict[EngineId, int]:
        """Send all buckets to the engines of the group, until one fails. Returns the bytes that each engine received.

        After a failure all engines of the group have failed: those without an error lack buckets."""
        assert self._group is not None
        await self._tell("ping", {}, self._config.phase_timeout_s)
        taken = dict.fromkeys((engine.engine_id for engine in engines), 0)
        buckets = self._loaded.buckets
        for index, bucket in enumerate(buckets):
            version = self._snapshot.version if index == len(buckets) - 1 else None
            updates = [self._update(engine, bucket, self._group.name, version, failures, touched) for engine in engines]
            await self._collective("broadcast", {"name": self._group.name, "bucket": index}, updates, failures)
            if failures.found:
                for engine in engines:
                    failures.found.setdefault(engine.engine_id, Failure(blame=Blame.VICTIM, message="its group broke"))
                return taken
            self.sent_bytes += bucket.size_bytes
            for engine_id in taken:
                taken[engine_id] += bucket.size_bytes
        return taken

    async def disband(self) -> None:
        """Leave the current group, on both sides concurrently: with some transports the two sides wait for each
        other."""
        group, self._group = self._group, None
        if group is None:
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._close(group.name))
            for engine in group.engines:
                tasks.create_task(self._leave(engine, group.name))

    async def _close(self, name: str) -> None:
        with suppress(SenderFailed, GroupFailed):
            await self._tell("close_group", {"name": name}, self._config.phase_timeout_s)

    async def _leave(self, engine: SGLangEngine, name: str) -> None:
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                # An engine whose transfer failed has left already.
                with suppress(UnknownGroup):
                    await engine.leave_group(name)
        except (EngineError, TimeoutError) as error:
            logger.warning("%s did not leave group %s: %r", engine.engine_id, name, error)

    async def _tell(self, op: str, arguments: Mapping[str, object], timeout_s: float) -> Mapping[str, Any]:
        """Send a command that requires the loaded snapshot."""
        # A dead sender is not restarted for it: that takes seconds while engines are paused, and the snapshot is lost.
        if not self._sender.alive or self._loaded.incarnation != self._sender.incarnation:
            raise SenderFailed(f"the sender died before {op}, and its snapshot and groups are lost")
        return await self._sender.call(op, arguments, timeout_s=timeout_s)

    async def _update(
        self,
        engine: SGLangEngine,
        bucket: Bucket,
        group: str,
        version: PolicyVersion | None,
        failures: Failures,
        touched: Callable[[EngineId], None],
    ) -> None:
        touched(engine.engine_id)
        described = single_experts(bucket) if engine.engine_id in self._single_experts else bucket
        async with failures.of(engine.engine_id, self._config.collective_timeout_s):
            await engine.update(described, group=group, version=version)

    async def _collective(
        self,
        op: str,
        arguments: dict[str, object],
        calls: Sequence[Coroutine[None, None, None]],
        failures: Failures,
    ) -> None:
        """Run a collective of the sender and all engines, and assign the blame for a failure. Raises SenderFailed or
        GroupFailed when the sender is to blame; in that case no engine has failed."""
        failed: SenderFailed | GroupFailed | None = None

        async def send() -> None:
            nonlocal failed
            try:
                await self._tell(op, arguments, self._config.transfer_timeout_s + SENDER_GRACE_S)
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
        # A sender that waited too long, or lost its peer, is not at fault if an engine failed as well.
        excused = isinstance(failed, SenderTimeout | GroupFailed) and failures.found
        if failed is not None and not excused:
            failures.found.clear()
            raise failed
        failures.spare_victims(culprits)


@asynccontextmanager
async def first_error() -> AsyncIterator[None]:
    """Raise the first error of a task group by itself, because callers catch errors by class."""
    try:
        yield
    except ExceptionGroup as group:
        raise group.exceptions[0] from group


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayout:
    """Ranks of a group; `offsets` is the first rank of each engine."""

    world_size: int
    offsets: Mapping[EngineId, int]


def group_name(push_id: str, wave: int, attempt: int) -> str:
    """Return the name of the group for one attempt of one wave."""
    return f"headrace-{push_id}-{wave}-{attempt}"


def lay_out(ranks: Iterable[tuple[EngineId, int]]) -> GroupLayout:
    """Return the layout of a sender and these engines; `ranks` gives each engine's number of processes."""
    offsets: dict[EngineId, int] = {}
    following = 1
    for engine_id, count in ranks:
        offsets[engine_id] = following
        following += count
    return GroupLayout(world_size=following, offsets=offsets)
