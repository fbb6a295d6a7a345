"""Incarnations of a run: the fence that lets only the newest one act.

Invariants:
- `<storage>/incarnations/NNNNNN.json` is created exclusively and with its content; the highest number is the run's
  incarnation. Only its holder rewrites it.
- A number whose file cannot be read has a creator that has not finished (storage without hard links) or that died. No
  renewal counts while there is one above the holder's: it ends, and may be started again. A file that a creator has
  seen unreadable for `takeover_s` of its own clock fences nothing.
- A holder ends when it reads a higher number, or when it has not renewed its file for `end_after_s`. Time is that of a
  clock that runs on while the process or its machine is stopped. A renewal counts from its start.
- A new holder writes its file and waits `takeover_s`, which is longer than the old holder can go on: it then has ended
  or knows of its successor. The first incarnation need not wait, nor one whose predecessor ended in order, on whatever
  host. Only a holder that was allowed to act can end in order: until then its own predecessor may still act.
- The state folder's file `incarnation` holds the number that acted there last, and the token of a creation that has
  begun. If storage has a newer number with another token, the run has moved to another folder.
- Storage is touched only in daemon threads, one at a time: a file system that hangs is the same as one that is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, NoReturn, Self

import orjson
from pydantic import Field, model_validator

from headrace.actors.errors import RunFenced, StorageLost
from headrace.buffer.primitives.daemon_thread import start_in_thread
from headrace.buffer.primitives.durable_files import create_file, fsync, replace_file
from headrace.buffer.primitives.sections import Section

FOLDER: Final = "incarnations"
FILES_KEPT: Final = 5
_NAME: Final = re.compile(r"(\d{6,})\.json(\.(\w+\.)?partial)?")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

logger = logging.getLogger(__name__)


class FenceConfig(Section):
    """Times of the incarnation fence."""

    renew_s: float = Field(default=5.0, gt=0)
    """Time between two renewals."""
    end_after_s: float = Field(default=30.0, gt=0)
    """An incarnation that could not renew its file for this long ends."""
    takeover_s: float = Field(default=45.0, gt=0)
    """Time that a new incarnation waits before it acts."""
    margin_s: float = Field(default=5.0, ge=0)
    """Time that an ending incarnation may need to stop acting."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.end_after_s <= 2 * self.renew_s:
            raise ValueError(f"end_after_s ({self.end_after_s:g}) must exceed 2 * renew_s ({2 * self.renew_s:g})")
        least = self.end_after_s + self.renew_s + self.margin_s
        if self.takeover_s <= least:
            raise ValueError(
                f"takeover_s ({self.takeover_s:g}) must exceed end_after_s + renew_s + margin_s ({least:g}): otherwise "
                "an old incarnation may still act when a new one begins"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class IncarnationRecord:
    """Contents of an incarnation's file. `boot` is the boot id of the host; `started_s` and `renewed_s` are Unix times
    of the holder's clock, for people only. `ended` is true after an orderly end. `token` identifies its creation. The
    record of a file that cannot be read has no process."""

    number: int
    host: str
    boot: str
    process_id: int
    started_s: float
    renewed_s: float
    ended: bool = False
    token: str = ""

    @property
    def is_readable(self) -> bool:
        return self.process_id != 0


class Fence:
    """Decisions of one holder, without clock or files; times are of one monotonic clock, in seconds. `began_s` is the
    time before the holder's file was written."""

    def __init__(self, config: FenceConfig, number: int, began_s: float) -> None:
        self._config, self.number = config, number
        self._renewed_s = began_s
        self._newer: IncarnationRecord | None = None
        self.failure = ""
        """Error of the last renewal, if it failed."""

    def renewed(self, began_s: float, newest: IncarnationRecord) -> None:
        """Note a renewal that began at `began_s` and then read the newest incarnation. Raises RunFenced."""
        if newest.number > self.number and not newest.is_readable:
            # Not renewed: its creator may act soon, or is dead, and then this run must not end for good.
            self.failure = f"the file of incarnation {newest.number} cannot be read"
        elif newest.number > self.number:
            self._newer = newest
        else:
            self._renewed_s, self.failure = max(self._renewed_s, began_s), ""
        self.refuse_newer()

    def left_s(self, now_s: float) -> float:
        """Return how long the holder may still act without a renewal."""
        return self._renewed_s + self._config.end_after_s - now_s

    def check(self, now_s: float) -> None:
        """Raise RunFenced or StorageLost if the holder must not act any more."""
        self.refuse_newer()
        if self.left_s(now_s) <= 0:
            why = f" ({self.failure})" if self.failure else ", or this process was stopped"
            raise StorageLost(
                f"incarnation {self.number} of the run could not be renewed in storage for "
                f"{now_s - self._renewed_s:.0f} s{why}: check the storage, then resume the run"
            )

    def refuse_newer(self) -> None:
        """Raise RunFenced if a newer incarnation is known."""
        if self._newer is not None:
            raise fenced(self.number, self._newer)


class Incarnation:
    """One incarnation of a run, made with `take`. `acquire` returns when the holder may act; `hold` renews until the
    holder must end, and has to run from the beginning."""

    def __init__(
        self,
        folder: Path,
        record: IncarnationRecord,
        fence: Fence,
        config: FenceConfig,
        *,
        waits: bool,
        clock: Callable[[], float],
    ) -> None:
        self._folder, self.record, self._fence, self._config = folder, record, fence, config
        self._waits, self._clock = waits, clock
        self._began_s = clock()
        self._renewing: asyncio.Future[IncarnationRecord] | None = None

    @classmethod
    async def take(
        cls,
        storage: Path,
        config: FenceConfig | None = None,
        *,
        held: Path | None = None,
        sole_on_host: bool = False,
        clock: Callable[[], float] | None = None,
    ) -> Self:
        """Write the file of a new incarnation, which must still be acquired. The file `held` says what the caller's
        state folder held before: if there is a newer one, the run has moved. With `sole_on_host` the caller knows, by a
        lock of the kernel, that no other holder of this host is alive. Raises RunFenced, StorageLost, and OSError for
        `held`."""
        config, clock = config or FenceConfig(), clock or running_time
        folder, unreadable, since_s, void = storage / FOLDER, 0, 0.0, 0
        after, token = await asyncio.to_thread(_begin, held)
        while True:
            began_s = clock()
            creating = start_in_thread(partial(_create, storage, token, after=after, void=void), name="incarnation")
            try:
                async with asyncio.timeout(config.end_after_s):
                    record, previous = await creating
            except (OSError, TimeoutError) as error:
                reason = str(error) or f"no answer within {config.end_after_s:g} s"
                raise StorageLost(
                    f"{folder} cannot be written ({reason}): check the storage, then start the run again"
                ) from error
            if record is not None:
                break
            assert previous is not None
            if previous.number != unreadable:
                unreadable, since_s = previous.number, clock()
                logger.warning(
                    "%s cannot be read: its creator is given %g s", _path(folder, unreadable), config.takeover_s
                )
            elif clock() - since_s >= config.takeover_s:
                void = unreadable
            await asyncio.sleep(config.renew_s)
        if held is not None:
            replace_file(held, str(record.number).encode())
        here = previous is not None and (previous.host, previous.boot) == (record.host, record.boot)
        clean = (previous is not None and previous.ended) or (here and sole_on_host)
        waits = void > 0 or (previous is not None and not clean)
        return cls(folder, record, Fence(config, record.number, began_s), config, waits=waits, clock=clock)

    @property
    def number(self) -> int:
        return self.record.number

    @property
    def failure(self) -> str:
        """Error of the last renewal; empty if it succeeded."""
        return self._fence.failure

    async def acquire(self) -> None:
        """Return when every earlier incarnation has ended. Raises RunFenced, StorageLost."""
        # Also without a wait: a creator that was stopped until now counts for nothing any more.
        self.check()
        while self._waits:
            left_s = self._began_s + self._config.takeover_s - self._clock()
            self.check()
            if left_s <= 0:
                self._waits = False
                return
            await asyncio.sleep(min(left_s, self._config.renew_s))

    def check(self) -> None:
        """Raise RunFenced or StorageLost if this incarnation must not act any more; reads only memory."""
        self._fence.check(self._clock())

    async def hold(self) -> NoReturn:
        """Renew until this incarnation must end. Raises RunFenced, StorageLost."""
        try:
            while True:
                now_s = self._clock()
                # Not longer than until the next look at the clock, which a renewal that hangs must not outlast.
                await self._renew(within_s=self._config.renew_s)
                self.check()
                await asyncio.sleep(max(0.0, now_s + self._config.renew_s - self._clock()))
                self.check()
        except StorageLost:
            # A process that was stopped for long has probably been replaced, and must not take the run back.
            await self._renew(within_s=self._config.margin_s)
            raise

    async def end(self) -> None:
        """Record that nothing acts for this incarnation any more, so that its successor need not wait. Does nothing if
        it never acted, was fenced, or storage is away."""
        with suppress(RunFenced, StorageLost):
            self.check()
            if self._waits:
                return
            self.record = replace(self.record, ended=True)
            if self._renewing is not None:
                # It writes what was true before.
                await self._renew(within_s=self._config.margin_s)
            await self._renew(within_s=self._config.margin_s)

    async def _renew(self, *, within_s: float) -> None:
        """Rewrite the file and look for newer ones, for at most `within_s`. A renewal that hangs goes on, and is waited
        for next time. Raises RunFenced."""
        if self._renewing is None:
            self._started_s = self._clock()
            self.record = replace(self.record, renewed_s=time.time())
            folder, record = self._folder, self.record
            self._renewing = start_in_thread(lambda: _rewrite(folder, record), name="incarnation")
        renewing = self._renewing
        if not (await asyncio.wait([renewing], timeout=within_s))[0]:
            self._fence.failure = f"{self._folder} does not answer"
            return
        self._renewing = None
        try:
            newest = renewing.result()
        except OSError as error:
            self._fence.failure = str(error)
        else:
            self._fence.renewed(self._started_s, newest)


def fenced(number: int, newer: IncarnationRecord) -> RunFenced:
    """Return the error for a holder that read a newer incarnation."""
    return RunFenced(
        f"incarnation {newer.number} on {newer.host} has taken over the run: incarnation {number} ends; follow the run "
        "there"
    )


def running_time() -> float:
    """Return seconds of a clock that also runs while the machine is suspended, where there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


def _numbers(folder: Path) -> list[int]:
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(name[1]) for name in found if name and not name[2])


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.json"


def _newest(folder: Path, void: int = 0) -> IncarnationRecord | None:
    """Return the newest incarnation, without files up to number `void` that cannot be read."""
    for number in reversed(_numbers(folder) if folder.is_dir() else []):
        try:
            return replace(IncarnationRecord(**orjson.loads(_path(folder, number).read_bytes())), number=number)
        except (FileNotFoundError, TypeError, ValueError):
            if number > void:
                # It is just being created, or its creator died.
                return IncarnationRecord(
                    number=number, host="an unknown host", boot="", process_id=0, started_s=0.0, renewed_s=0.0
                )
    return None


def _begin(held: Path | None) -> tuple[int | None, str]:
    """Return the number that a state folder held before, if any, and the token of the creation that now begins: that of
    one that was not finished, which may have left a number. Raises OSError."""
    if held is None or not held.exists():
        return None, uuid.uuid4().hex
    number, _, token = held.read_text().partition(" ")
    token = token or uuid.uuid4().hex
    replace_file(held, f"{number} {token}".encode())
    return int(number), token


def _create(
    storage: Path, token: str, *, after: int | None, void: int
) -> tuple[IncarnationRecord | None, IncarnationRecord | None]:
    """Create the file of the next incarnation. Return its record and that of the one before it; no record if a file
    after `after` cannot be read, which then comes second. Raises RunFenced, OSError."""
    folder = storage / FOLDER
    # Not `parents`: a storage folder that is absent must not be created on a local disk in its place.
    folder.mkdir(exist_ok=True)
    fsync(storage)
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    while True:
        # Before the look at the newest: one that comes in between has this number.
        number = max(_numbers(folder), default=0) + 1
        previous, now_s = _newest(folder, void), time.time()
        if after is not None and previous is not None and previous.number > after and previous.token != token:
            if previous.is_readable:
                raise fenced(after, previous)
            return None, previous
        record = IncarnationRecord(
            number=number,
            host=socket.gethostname(),
            boot=boot,
            process_id=os.getpid(),
            started_s=now_s,
            renewed_s=now_s,
            token=token,
        )
        try:
            create_file(_path(folder, record.number), orjson.dumps(asdict(record)) + b"\n")
        except FileExistsError:
            continue
        for path in folder.iterdir():
            # The creator of an older number comes too late to use its staged file.
            name = _NAME.fullmatch(path.name)
            if name and int(name[1]) <= record.number - (1 if name[2] else FILES_KEPT):
                path.unlink(missing_ok=True)
        return record, previous


def _rewrite(folder: Path, record: IncarnationRecord) -> IncarnationRecord:
    """Rewrite the file of an incarnation, then return the newest one. Raises OSError."""
    newest = _newest(folder)
    if newest is not None and newest.number > record.number and newest.is_readable:
        # A holder that has been replaced learns it by reading alone: its last look must not wait for a busy disk.
        return newest
    replace_file(_path(folder, record.number), orjson.dumps(asdict(record)) + b"\n")
    return _newest(folder) or record
