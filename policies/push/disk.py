"""Transfer of a snapshot by disk: each engine reads the snapshot's directory itself.

Invariants:
- The directory is verified by a sender process before any engine is changed. After that the sender is not needed, and
  engines share nothing: a reader that dies or hangs affects only itself.
- No engine is told to read a directory whose files have changed since they were verified: the push ends, and the
  engines that have not read it keep their old weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId
from headrace.policies.errors import SenderFailed
from headrace.policies.learner import WeightsDirectory
from headrace.policies.push.contract import PushConfig
from headrace.policies.push.directories import DirectoryReaders
from headrace.policies.push.inspection import Stamp, stamp_of
from headrace.policies.push.sender import SenderProcess
from headrace.policies.push.transfer import Failures
from headrace.policies.sglang.client import SGLangEngine
from headrace.policies.tensors import TensorSpec


class DiskTransfer:
    """Transfer of one push by disk. Methods raise SenderFailed when the directory cannot be used any more."""

    def __init__(
        self,
        version: PolicyVersion,
        directory: WeightsDirectory,
        sender: SenderProcess,
        readers: DirectoryReaders,
        config: PushConfig,
    ) -> None:
        self._version = version
        self._directory = directory
        self._sender = sender
        self._readers = readers
        self._config = config
        self._specs: dict[str, TensorSpec] = {}
        self._checksums: dict[str, str] = {}
        self._stamps: dict[str, Stamp] = {}
        self.sent_bytes = 0

    async def load(self) -> None:
        """Verify the directory. Raises ModelInvalid for damaged or missing files."""
        arguments = {
            "path": str(self._directory.path),
            "digests": dict(self._directory.digests),
            "checksums": self._config.verify != "off",
        }
        reply = await self._sender.call("inspect", arguments, timeout_s=self._config.load_timeout_s)
        self._specs = {
            name: TensorSpec(dtype=spec["dtype"], shape=tuple(spec["shape"])) for name, spec in reply["specs"].items()
        }
        self._checksums = reply["checksums"]
        self._stamps = {name: (stamp[0], stamp[1], stamp[2]) for name, stamp in reply["stamps"].items()}

    def specs(self) -> dict[str, TensorSpec]:
        """Return all parameters of the snapshot."""
        return self._specs

    def checksums(self) -> dict[str, str]:
        """Return the checksum of each parameter, by name; empty if none are compared."""
        return self._checksums

    async def send(
        self, engines: Sequence[SGLangEngine], failures: Failures, touched: Callable[[EngineId], None]
    ) -> dict[EngineId, int]:
        """Have the engines read the directory, concurrently. Returns the bytes that each engine read."""
        if changed := await asyncio.to_thread(changed_file, self._directory.path, self._stamps):
            raise SenderFailed(f"{changed} was changed or removed after it had been verified")
        taken: dict[EngineId, int] = dict.fromkeys((engine.engine_id for engine in engines), 0)
        size_bytes = sum(spec.size_bytes for spec in self._specs.values())

        async def read(engine: SGLangEngine) -> None:
            touched(engine.engine_id)
            async with failures.of(engine.engine_id, self._config.read_timeout_s):
                async with self._readers.reading(engine.engine_id, self._directory.path):
                    await engine.update_from_disk(self._directory.path, version=self._version)
                taken[engine.engine_id] = size_bytes
                self.sent_bytes += size_bytes

        async with asyncio.TaskGroup() as tasks:
            for engine in engines:
                tasks.create_task(read(engine))
        return taken


def changed_file(directory: Path, stamps: Mapping[str, Stamp]) -> Path | None:
    """Return the first file that is not as it was when it was verified, or None."""
    for name, stamp in stamps.items():
        try:
            if stamp_of((directory / name).stat()) == stamp:
                continue
        except OSError:
            pass
        return directory / name
    return None
