"""Parts that a run waits for, in a file of its state folder that `headrace status` reads.

Invariants:
- The file has exactly the parts that are missing at present; without any there is no file.
- Only one process writes a file, and it begins with an empty list.
- A file that cannot be written or read is reported in the log, and stops nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import orjson

from headrace.buffer.primitives.durable_files import replace_file

OF_ACTORS: Final = "absent.json"
"""File with the actors and bundles that the service waits for."""
OF_THE_DRIVER: Final = "absent-service.json"
"""File with the service, if the driver waits for it."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """A part that is waited for since `since_s` (Unix time). `role` is that of its node, empty if it has none;
    `waits_for` names resources that are not free yet, for a part that was never placed."""

    name: str
    since_s: float
    role: str = ""
    waits_for: str = ""

    def line(self, now_s: float) -> str:
        told = [f"since {max(0.0, now_s - self.since_s):.0f} s", self.role and f"on a {self.role} node"]
        told.append(self.waits_for and f"it needs {self.waits_for}")
        return f"{self.name} ({', '.join(part for part in told if part)})"


class Absences:
    """List of absent parts; without a path it is kept in memory only."""

    def __init__(self, path: Path | None, *, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._absent: dict[str, Absent] = {}

    def begin(self) -> None:
        """Remove what an earlier process left."""
        self._absent.clear()
        self._write()

    def lost(self, name: str, *, role: str = "", waits_for: str = "") -> None:
        """Record that a part is absent. Idempotent."""
        if name not in self._absent:
            self._absent[name] = Absent(name=name, since_s=self._clock(), role=role, waits_for=waits_for)
            self._write()

    def back(self, name: str) -> None:
        """Record that a part is there. Idempotent."""
        if self._absent.pop(name, None) is not None:
            self._write()

    def all(self) -> tuple[Absent, ...]:
        return tuple(self._absent.values())

    def lines(self, now_s: float) -> list[str]:
        """Describe the absent parts at this time, in Unix seconds."""
        return [absent.line(now_s) for absent in self.all()]

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            if self._absent:
                replace_file(self._path, orjson.dumps([asdict(one) for one in self._absent.values()]))
            else:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._path, error)


def read_absences(folder: Path) -> tuple[Absent, ...]:
    """Return the parts that a live run waits for; `folder` is its state folder."""
    found: list[Absent] = []
    for path in (folder / OF_THE_DRIVER, folder / OF_ACTORS):
        try:
            found += [Absent(**entry) for entry in orjson.loads(path.read_bytes())]
        except FileNotFoundError:
            continue
        except (OSError, TypeError, ValueError) as error:
            logger.warning("%s cannot be read: %s", path, error)
    return tuple(found)
