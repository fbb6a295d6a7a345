"""Limits on data that grows during a months-long run: engine and sender logs, and evaluation folders.

Invariants:
- Metrics and pushes are rotated by their writers. This module runs in the service and limits the files that other
  processes write through an open file descriptor, and those left behind by processes that have ended.
- A log is copied and truncated, because its writer continues with the same file (like logrotate's `copytruncate`): a
  line written in between may be lost. No other line within the limits is lost.
- Only evaluations with a summary are thinned out, the oldest first; their results and summaries remain.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.actors.record.files.run_directory import RunDirectory
from headrace.serve.tracing.retention import (
    DAY_S,
    RetentionConfig,
    is_older_file,
    next_older_file,
    older_files,
    remove_oldest,
)

EVERY_S = 60.0
"""Interval between two checks."""

logger = logging.getLogger(__name__)


def keep_house(directory: RunDirectory, retention: RetentionConfig) -> None:
    """Apply the limits to logs once. A file that cannot be changed is left as it is, with a warning."""
    for log in sorted(directory.engines.parent.glob("*.log")):
        if not is_older_file(log):
            with _tolerating(log):
                if log.stat().st_size >= retention.file_bytes:
                    shutil.copyfile(log, next_older_file(log))
                    os.truncate(log, 0)
                remove_oldest(older_files(log), retention.log_bytes, retention.days)


def thin_out_evaluations(root: Path, retention: RetentionConfig, now_s: float) -> tuple[Path, ...]:
    """Remove the rollout folders of finished evaluations that exceed the size and age limits; return the removed
    folders."""
    ended = by_age(path.parent for path in root.glob("*/summary.json"))
    left_bytes, removed = retention.evaluations_bytes, []
    for folder in reversed(ended):
        rollouts = folder / "rollouts"
        if not rollouts.is_dir():
            continue
        # Beyond the limit, older folders are removed without counting their files.
        left_bytes -= size_of(rollouts) if left_bytes >= 0 else 0
        if left_bytes < 0 or folder.stat().st_mtime < now_s - retention.days * DAY_S:
            shutil.rmtree(rollouts, ignore_errors=True)
            removed.append(rollouts)
    return tuple(removed)


def by_age(paths: Iterable[Path]) -> list[Path]:
    """Return the paths that exist, the least recently changed first."""
    known = []
    for path in paths:
        with suppress(FileNotFoundError):
            known.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(known)]


def size_of(folder: Path) -> int:
    """Return the total size of all files below a folder in bytes."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size  # noqa: PTH118 - a Path for each file costs more
    return total


@contextmanager
def _tolerating(path: Path) -> Iterator[None]:
    """Log an OSError instead of raising it: a file that cannot be rotated must not end the run."""
    try:
        yield
    except OSError as error:
        logger.warning("cannot limit the size of %s (see telemetry.keep_bytes): %s", path, error)
