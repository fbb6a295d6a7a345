"""Memory for weights that are not live yet: a spare set of the same shape, and buffers in which buckets arrive.

Invariants:
- It is allocated once, at the first update, and used again: an engine holds two sets of weights and two buckets (one
  arrives while the other is loaded), however many updates it sees. Only a transfer that was given up keeps a third set,
  until its collective ends.
- A bucket of fp32 tensors in the order of the storage arrives in its place; buffers are for all others.
- Whoever writes takes the memory out and puts it back when done; what a writer that was given up still writes to is
  never used again.
- A set becomes live only with every parameter. What a push leaves out is taken from the live set, but after a loss
  (`torn`) a push must bring all of it: nobody can say what the sender takes for received.
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
    from headrace.policies.push.tensors import Bucket


class Staging:
    """Used by one writer at a time; the torch thread may `recycle` meanwhile."""

    def __init__(self, config: Qwen3Config) -> None:
        self._config = config
        self._spare: Qwen3Weights | None = None
        self._exchanging = threading.Lock()
        self._buffers: list[Tensor] = []
        self._largest_bytes = 0
        self._torn = False

    def start(self) -> None:
        """A new update: nothing of an earlier one counts."""
        self._torn = False
        if self._spare is not None:
            self._spare.forget()

    def tear(self) -> None:
        """Something was lost on its way here: nothing that is staged counts."""
        self.start()
        self._torn = True

    def take_buffer(self, size_bytes: int) -> Tensor:
        """Room for one bucket; its first bytes are the bucket's."""
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
        """What was live until now, unless a writer that did not wait for the swap has another set already."""
        old.forget()
        with self._exchanging:
            if self._spare is None:
                self._spare = old

    def complete(self, spare: Qwen3Weights, live: Qwen3Weights) -> None:
        """Fill what a push left out. Raises ModelInvalid after a loss."""
        missing = spare.missing()
        if missing and self._torn:
            raise ModelInvalid(
                f"parameter {missing[0]} ({len(missing)} in all) was not sent again after a transfer failed"
            )
        spare.complete(live)


def place_of(spare: Qwen3Weights, bucket: Bucket) -> Tensor | None:
    """The bytes in which this bucket may arrive without another copy."""
    if set(bucket.dtypes) != {"float32"}:
        return None
    place = spare.place(bucket.names)
    return None if place is None else place.view(torch.uint8)


def load_bucket(spare: Qwen3Weights, bucket: Bucket, buffer: Tensor | None) -> None:
    """Copy a received bucket to its places; without a buffer it is there. Raises ModelInvalid."""
    if buffer is None:
        for name in bucket.names:
            spare.accept(name, torch.float32)
        return
    for name, tensor in unflatten(bucket, buffer[: bucket.size_bytes]):
        spare.load(name, tensor)
