"""The launcher's connections behind one selector: to clients, and to the first processes of its sandboxes.

Invariants:
- Nothing here blocks. A connection that breaks or sends invalid data is dropped without disturbing the others. A
  message handler never sees a channel again once it has been dropped.
- The key and the digest that authenticate requests are stored in one page of memory that the kernel clears in a forked
  child (MADV_WIPEONFORK, madvise(2)): the first process of a sandbox, and code that runs in a fork of it, cannot
  authenticate to the launcher.
- A sandbox's secret is derived from its id and is not stored anywhere.
"""

from __future__ import annotations

import mmap
import os
import selectors
import socket
from _blake2 import blake2s
from _operator import _compare_digest as compare_digest
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from headrace.sandboxes.launcher.wire import Channel, ChannelClosed, Message, close_all

_LONGEST_WAIT_S: Final = 86400.0
"""epoll_wait(2) takes a 31-bit number of milliseconds."""


class Waiter(NamedTuple):
    """Client that is waiting for the answer to a request."""

    client: Channel
    request_id: int


class Connections:
    """Selector loop over channels and watched descriptors. `handle(channel, owner, message, descriptors)` gets every
    message; `owner` is the object with which the channel was added. `gone(channel)` is called for every client that
    disconnects."""

    def __init__(
        self,
        listener: socket.socket,
        handle: Callable[[Channel, Any, Message, list[int]], None],
        gone: Callable[[Channel], None],
    ) -> None:
        self._listener = listener
        self._handle = handle
        self._gone = gone
        self._selector = selectors.EpollSelector()
        self._owners: dict[Channel, Any] = {}
        self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self.watch(listener.fileno(), self._accept)

    def watch(self, descriptor: int, action: Callable[[], None]) -> None:
        """Call `action` whenever `descriptor` is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, action)

    def unwatch(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)

    def add(self, channel: Channel, owner: object) -> None:
        self._owners[channel] = owner
        self._selector.register(channel, selectors.EVENT_READ, channel)

    def poll(self, timeout_s: float | None) -> None:
        """Wait for events, at most `timeout_s` and `_LONGEST_WAIT_S`, and handle them."""
        for key, events in self._selector.select(None if timeout_s is None else min(timeout_s, _LONGEST_WAIT_S)):
            channel = key.data
            if not isinstance(channel, Channel):
                channel()
                continue
            if channel not in self._owners:
                continue
            try:
                if events & selectors.EVENT_WRITE:
                    channel.flush()
                    self._expect_writes(channel)
            except ChannelClosed:
                self.drop(channel)
                continue
            if events & selectors.EVENT_READ:
                self._read(channel)

    def _accept(self) -> None:
        try:
            stream, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # No descriptor is free: the spare one serves to accept the client and close its connection at once, so
            # that it does not wait for ever.
            os.close(self._spare)
            with suppress(OSError):
                self._listener.accept()[0].close()
            self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        else:
            self.add(Channel(stream), None)

    def _read(self, channel: Channel) -> None:
        try:
            messages = channel.receive()
        except ChannelClosed:
            self.drop(channel)
            return
        for message, descriptors in messages:
            self._handle(channel, self._owners.get(channel), message, descriptors)

    def read_to_end(self, channel: Channel) -> None:
        """Handle the messages that a dead process sent before its death, then drop its channel."""
        while channel in self._owners:
            self._read(channel)

    def send(self, channel: Channel, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message and take ownership of `descriptors`. Does nothing for a dropped channel; drops a channel that
        fails."""
        try:
            channel.send(message, descriptors)
        except ChannelClosed:
            self.drop(channel)
            return
        if channel.backlog:
            self._expect_writes(channel)

    def answer(self, waiter: Waiter, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Answer a request unless its client has disconnected; takes ownership of `descriptors`."""
        if waiter.client in self._owners:
            self.send(waiter.client, {**message, "id": waiter.request_id}, descriptors)
        else:
            close_all(descriptors)

    @property
    def clients(self) -> int:
        return sum(owner is None for owner in self._owners.values())

    def is_connected(self, client: Channel) -> bool:
        return client in self._owners

    def _expect_writes(self, channel: Channel) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.backlog else 0)
        self._selector.modify(channel, events, channel)

    def drop(self, channel: Channel) -> None:
        if channel not in self._owners:
            return
        owner = self._owners.pop(channel)
        self._selector.unregister(channel)
        channel.close()
        if owner is None:
            self._gone(channel)


_MADV_WIPEONFORK = 18
"""From linux/mman.h; Python defines it from 3.13 on."""
_KEY_BYTES, _DIGEST_BYTES = 32, 16


class Secrets:
    """Secrets of one launcher. The admin secret itself is not stored, only its digest."""

    def __init__(self, admin: str) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._page.madvise(_MADV_WIPEONFORK)
        self._page[:_KEY_BYTES] = os.urandom(_KEY_BYTES)
        self._page[_KEY_BYTES : _KEY_BYTES + _DIGEST_BYTES] = self._digest(b"admin " + admin.encode())

    def of(self, sandbox_id: str) -> str:
        """Return the secret of a sandbox."""
        return self._digest(b"sandbox " + sandbox_id.encode()).hex()

    def is_admin(self, given: str) -> bool:
        known = self._page[_KEY_BYTES : _KEY_BYTES + _DIGEST_BYTES]
        return compare_digest(self._digest(b"admin " + given.encode()), known)

    def fits(self, sandbox_id: str, given: str) -> bool:
        return compare_digest(given.encode(), self.of(sandbox_id).encode())

    def _digest(self, data: bytes) -> bytes:
        return blake2s(data, key=self._page[:_KEY_BYTES], digest_size=_DIGEST_BYTES).digest()
