"""Transport of a run's weights, which a failure demotes for the rest of the run: nccl, then delta, then disk.

The state is a file of the run's storage, because a failure of nccl ends the processes that use it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import orjson

from headrace.buffer.primitives.durable_files import write_private

ORDER: Final = ("nccl", "delta", "disk")


class Transports:
    """Transport that is used now: the recipe's, or the one that a failure left."""

    def __init__(self, path: Path, wanted: str) -> None:
        self._path = path
        # A demotion counts only below what the recipe wants now.
        kept = orjson.loads(path.read_bytes())["transport"] if path.exists() else wanted
        self.current: str = max(wanted, kept, key=ORDER.index)

    def demote(self, failed: str, reason: str) -> str:
        """Use the transport after the one that failed from now on, unless that is no longer used, and return its
        name."""
        if self.current != failed:
            return self.current
        self.current = ORDER[ORDER.index(self.current) + 1]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_private(self._path, orjson.dumps({"transport": self.current, "reason": reason}))
        return self.current
