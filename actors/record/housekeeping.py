"""What a run that goes on for months must not let grow: logs of engines and senders, spans, folders of evaluations.

Invariants:
- Metrics and pushes are rotated by who writes them; what is written through an open descriptor of another process, or
  by processes that are gone, is kept in bounds here, by the service.
- A log is copied and emptied, since its writer goes on with the same file (as logrotate's `copytruncate`): a line that
  is written in between may be lost. Nothing else loses a line that is within the bounds.
- Only evaluations with a summary are thinned out, the oldest first; their results and summaries stay.
"""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from headrace.serve.observing.retention import DAY_S, is_older_file, next_older_file, older_files, remove_oldest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from headrace.actors.record.run_directory import RunDirectory
    from headrace.serve.observing.retention import RetentionConfig

EVERY_S = 60.0
"""How often logs and spans are looked at."""

logger = logging.getLogger(__name__)


def keep_house(directory: RunDirectory, retention: RetentionConfig) -> None:
    """Look at logs and spans once. A file that cannot be changed is left as it is, with a line in the log."""
    for log in sorted(directory.engines.parent.glob("*.log")):
        if not is_older_file(log):
            with _tolerating(log):
                _rotate_log(log, retention)
    spans = directory.path / "spans"
    with _tolerating(spans):
        remove_oldest(by_age(spans.glob("*.jsonl*")), retention.spans_bytes, retention.days)


def thin_out_evaluations(root: Path, retention: RetentionConfig, now_s: float) -> tuple[Path, ...]:
    """Remove what was kept of the rollouts of evaluations that have ended, beyond size and age; the folders removed."""
    ended = by_age(path.parent for path in root.glob("*/summary.json"))
    left_bytes, removed = retention.evaluations_bytes, []
    for folder in reversed(ended):
        rollouts = folder / "rollouts"
        if not rollouts.is_dir():
            continue
        # Once the bound is reached, older folders need not be counted.
        left_bytes -= size_of(rollouts) if left_bytes >= 0 else 0
        if left_bytes < 0 or folder.stat().st_mtime < now_s - retention.days * DAY_S:
            shutil.rmtree(rollouts, ignore_errors=True)
            removed.append(rollouts)
    return tuple(removed)


def by_age(paths: Iterable[Path]) -> list[Path]:
    """Those that are there, the one changed longest ago first."""
    known = []
    for path in paths:
        with suppress(FileNotFoundError):
            known.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(known)]


def size_of(folder: Path) -> int:
    """Bytes of all files below it."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size  # noqa: PTH118 - a Path for each file costs more
    return total


def _rotate_log(log: Path, retention: RetentionConfig) -> None:
    if log.stat().st_size >= retention.file_bytes:
        shutil.copyfile(log, next_older_file(log))
        os.truncate(log, 0)
    remove_oldest(older_files(log), retention.log_bytes, retention.days)


@contextmanager
def _tolerating(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.warning("%s is not kept in bounds: %s", path, error)
