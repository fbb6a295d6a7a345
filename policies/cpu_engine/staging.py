"""Staging memory for weights that are not live yet: a spare set of weights, and buffers for incoming buckets.

Invariants:
- The memory is allocated at the first update and reused: an engine holds two sets of weights and two buckets (one is
  received while the other is loaded). Only an abandoned transfer occupies a third set, until its collective ends.
- A bucket of fp32 tensors in storage order is received in place; all others are received into a buffer.
- A writer takes the memory out and returns it when done. Memory of an abandoned writer is never reused.
- A set becomes live only with every parameter. Parameters that a push omits are copied from the live set, but after a
  lost transfer (`torn`) a push must send all: the sender may assume that lost parameters were received.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from headrace.policies.errors import ModelInvalid
from headrace.policies.models.qwen3 import Qwen3Weights
from headrace.policies.push.weights import unflatten

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.policies.models.qwen3_config import Qwen3Config
    from headrace.policies.push.weights import Bucket


class Staging:
    """Staging memory of one engine. It has one writer at a time; the torch thread may call `recycle` meanwhile."""

    def __init__(self, config: Qwen3Config) -> None:
        self._config = config
        self._spare: Qwen3Weights | None = None
        self._exchanging = threading.Lock()
        self._buffers: list[Tensor] = []
        self._largest_bytes = 0
        self._torn = False

    def start(self) -> None:
        """Begin an update; parameters staged by an earlier one are discarded."""
        self._torn = False
        if self._spare is not None:
            self._spare.forget()

    def tear(self) -> None:
        """Discard the staged parameters after a transfer was lost."""
        self.start()
        self._torn = True

    def take_buffer(self, size_bytes: int) -> Tensor:
        """Return a buffer of at least this size."""
        self._largest_bytes = max(self._largest_bytes, size_bytes)
        if self._buffers and self._buffers[-1].numel() >= size_bytes:
            return self._buffers.pop()
        self._buffers.clear()
        return torch.empty(self._largest_bytes, dtype=torch.uint8)

    def put_buffer(self, buffer: Tensor) -> None:
        self._buffers.append(buffer)

    def take_spare(self) -> Qwen3Weights:
        with self._exchanging:
            spare, self._spare = self._spare, None
        return Qwen3Weights.allocate(self._config) if spare is None else spare

    def put_spare(self, spare: Qwen3Weights) -> None:
        with self._exchanging:
            self._spare = spare

    def recycle(self, old: Qwen3Weights) -> None:
        """Make the set that was live until now the spare one, unless a writer has allocated another meanwhile."""
        old.forget()
        with self._exchanging:
            if self._spare is None:
                self._spare = old

    def complete(self, spare: Qwen3Weights, live: Qwen3Weights) -> None:
        """Copy the parameters that a push omitted. Raises ModelInvalid if a transfer was lost."""
        missing = spare.missing()
        if missing and self._torn:
            raise ModelInvalid(
                f"parameter {missing[0]} ({len(missing)} in all) was not sent again after a transfer failed"
            )
        spare.complete(live)


def place_of(spare: Qwen3Weights, bucket: Bucket) -> Tensor | None:
    """Return the bytes in which this bucket can be received in place, if it can."""
    if set(bucket.dtypes) != {"float32"}:
        return None
    place = spare.place(bucket.names)
    return None if place is None else place.view(torch.uint8)


def load_bucket(spare: Qwen3Weights, bucket: Bucket, buffer: Tensor | None) -> None:
    """Load a received bucket into the spare set; without a buffer it was received in place. Raises ModelInvalid."""
    if buffer is None:
        for name in bucket.names:
            spare.accept(name, torch.float32)
        return
    for name, tensor in unflatten(bucket, buffer[: bucket.size_bytes]):
        spare.load(name, tensor)
