"""What `headrace resume` says before it goes on, and keeps in the run directory as `resumes/<epoch>.json`.

Invariants:
- It is told under the run's lock and before any process starts. A run without a ledger has nothing to tell.
- A run that has lost something does not go on: what is missing would end it later, again and again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from headrace.buffer.durable_files import replace_file
from headrace.buffer.errors import LedgerRefused
from headrace.buffer.evidence import has_begun
from headrace.buffer.resume_report import resume_report

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.actors.config import RunConfig
    from headrace.actors.run_directory import RunDirectory


class Resuming:
    """One resume of one run."""

    def __init__(self, config: RunConfig, directory: RunDirectory, *, say: Callable[[str], object]) -> None:
        self._config, self._directory, self._say = config, directory, say
        self.told: dict[str, Any] | None = None
        """The report as JSON, once told."""

    def tell(self) -> None:
        """Read, say and keep the report. Raises LedgerRefused, OSError."""
        if not has_begun(self._directory.path):
            self._say("nothing was recorded yet: the run begins")
            return
        report = resume_report(self._directory.path, max_staleness=self._config.buffer.max_staleness)
        for line in report.lines():
            self._say(line)
        self.told = report.to_json()
        path = self._directory.path / "resumes" / f"{report.epoch}.json"
        path.parent.mkdir(exist_ok=True)
        replace_file(path, orjson.dumps(self.told, option=orjson.OPT_INDENT_2) + b"\n")
        if report.lost:
            path = self._directory.path
            raise LedgerRefused(
                f"{path}: {report.lost} rollouts are lost ({'; '.join(report.problems[:2])}): put back what is "
                f"missing, e.g. from a copy of the run, or issue them again with `headrace ledger retry-lost {path}`"
            )
