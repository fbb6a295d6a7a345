"""Transfer of a delta: each engine's host applies it to a copy of the model on its own disk, which the engine reads.

Invariants:
- The deltas, their checksums and the copy are slime's and its SGLang's (`/pull_weights`). A host without a copy begins
  with the newest whole model of the stream, or with the one that its engine was started with.
- The copy is brought up to date while the engine generates; paused, the engine only reads it.
- Engines share nothing but the copy of their host, which is only written while none of them reads it: a push is over
  before the next one begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headrace.policies.engine import EngineId
from headrace.policies.learner import WeightsDelta, WeightsSnapshot
from headrace.policies.push.contract import PushConfig
from headrace.policies.push.transfer import Failures
from headrace.policies.sglang.client import SGLangEngine
from headrace.policies.tensors import TensorSpec


class DeltaTransfer:
    """Transfer of one push from the stream of deltas. `copy` is the folder on each host, `specs` are the parameters of
    the model, all of which the stream began with."""

    def __init__(
        self, snapshot: WeightsSnapshot, copy: Path, specs: Mapping[str, TensorSpec], config: PushConfig
    ) -> None:
        assert snapshot.delta is not None
        self._delta: WeightsDelta = snapshot.delta
        self._version, self._copy, self._config = snapshot.version, copy, config
        self._specs = dict(specs)
        self.sent_bytes = 0

    async def load(self) -> None:
        """Return: the delta was written when the snapshot was taken."""

    def specs(self) -> dict[str, TensorSpec]:
        return self._specs

    def checksums(self) -> dict[str, str]:
        """Return none: the hosts compare slime's, and engines are compared with one another."""
        return {}

    async def pull(self, engines: Sequence[SGLangEngine], failures: Failures) -> None:
        """Bring the copies on the engines' hosts up to date."""

        async def one(engine: SGLangEngine) -> None:
            async with failures.of(engine.engine_id, self._config.read_timeout_s):
                await engine.pull(self._copy, source=self._delta.source, version=self._delta.number)

        async with asyncio.TaskGroup() as tasks:
            for engine in engines:
                tasks.create_task(one(engine))

    async def send(
        self, engines: Sequence[SGLangEngine], failures: Failures, touched: Callable[[EngineId], None]
    ) -> dict[EngineId, int]:
        """Have the engines read their copies, concurrently. Returns the bytes of the delta for each."""
        folder = self._delta.source / f"weight_v{self._delta.number:06d}"
        size = await asyncio.to_thread(lambda: sum(file.stat().st_size for file in folder.glob("*.safetensors")))
        taken: dict[EngineId, int] = {}

        async def one(engine: SGLangEngine) -> None:
            touched(engine.engine_id)
            async with failures.of(engine.engine_id, self._config.read_timeout_s):
                await engine.update_from_disk(self._copy, version=self._version)
                taken[engine.engine_id] = size
                self.sent_bytes += size

        async with asyncio.TaskGroup() as tasks:
            for engine in engines:
                tasks.create_task(one(engine))
        return taken
