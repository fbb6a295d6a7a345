"""The export of a run's ledger to Parquet files, for notebooks and other programs.

Invariants:
- The export only reads: it works both for a run whose process was killed and for one that is still running, and
  changes neither.
- The folder appears complete or not at all. There is one file per table, with the columns of the current schema, typed
  (`export_columns`), and for attempts those of their group and task. `trajectories.parquet` has a row for each token
  sequence that can be read.
- Memory is bounded by `ROWS_AT_ONCE` trajectories and `TABLE_ROWS_AT_ONCE` rows, however long the run. Closed groups
  and covered steps are read from the ledger's archive.

Parquet: https://parquet.apache.org/docs/file-format/
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.buffer.audit.evidence import begin_with_archive, read_only, read_trajectory, reading
from headrace.buffer.audit.export_columns import TASK, converted, export_columns
from headrace.buffer.audit.joined_rows import JoinedRows
from headrace.buffer.errors import ExportRefused
from headrace.buffer.primitives.durable_files import publish_folder
from headrace.buffer.trajectories.types import Trajectory

ROWS_AT_ONCE = 64
TABLE_ROWS_AT_ONCE = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """Result of an export: the number of rows in each file, and the number of attempts whose trajectory is missing or
    damaged (`unreadable`)."""

    folder: str
    rows: dict[str, int]
    unreadable: int


def export(run_dir: Path, folder: Path) -> ExportReport:
    """Write the ledger of a run to `folder`, which must not exist. Raises ExportRefused, LedgerRefused."""
    if folder.exists():
        raise ExportRefused(f"--out {folder} already exists: choose another folder")
    staged = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        with reading(run_dir) as (database, archive):
            staged.mkdir(parents=True)
            # One read transaction, since a live buffer may continue to write.
            attached, _ = begin_with_archive(database, archive)
            tables = JoinedRows(database, attached=attached)
            found = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
            names = [name for (name,) in found if not name.startswith("sqlite_")]
            rows = {name: _write_table(database, tables, name, staged) for name in names}
            rows["trajectories"], unreadable = _write_trajectories(tables, run_dir, staged)
        publish_folder(staged, folder)
    except OSError as error:
        raise ExportRefused(f"--out {folder} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return ExportReport(folder=str(folder), rows=rows, unreadable=unreadable)


def parquet_module() -> Any:
    """Return pyarrow's Parquet module. Raises ExportRefused when it is not installed."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ExportRefused("exports need pyarrow: pip install 'headrace[parquet]'") from error
    return parquet


def _write_table(database: sqlite3.Connection, tables: JoinedRows, name: str, folder: Path) -> int:
    parquet = parquet_module()
    import pyarrow

    stored = [(column[1], column[2]) for column in database.execute(f"PRAGMA table_info({name})")]
    sources = [source for source, _ in stored]
    columns = export_columns(name, stored + [(added, "TEXT") for added in TASK] if name == "attempts" else stored)
    schema = pyarrow.schema([(column.name, column.type) for column in columns])
    cursor, count = tables.select(name, sources), 0
    with parquet.ParquetWriter(folder / f"{name}.parquet", schema, compression="zstd") as writer:
        while rows := cursor.fetchmany(TABLE_ROWS_AT_ONCE):
            if name == "attempts":
                arrays = converted(columns, [*sources, *TASK], _with_tasks(tables, rows, sources.index("rollout_id")))
            else:
                arrays = converted(columns, sources, rows)
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))
            count += len(rows)
    return count


def _with_tasks(tables: JoinedRows, attempts: Sequence[Sequence[Any]], place: int) -> list[list[Any]]:
    """Append the group and the task to rows of attempts, which have the rollout's id at `place`."""
    these = "IN (SELECT value FROM json_each(?))"
    ids = json.dumps([row[place] for row in attempts])
    groups = dict(tables.select("rollouts", ("rollout_id", "group_id"), where=f"rollout_id {these}", values=(ids,)))
    ids = json.dumps(sorted(set(groups.values())))
    tasks = dict(tables.select("groups", ("group_id", "task_id"), where=f"group_id {these}", values=(ids,)))
    found = [(row, groups.get(row[place])) for row in attempts]
    return [[*row, group, tasks.get(group)] for row, group in found]


def export_schema() -> Any:
    """Return the columns of `trajectories.parquet` as a pyarrow schema."""
    import pyarrow

    span = pyarrow.struct(
        [
            ("start", pyarrow.int32()),
            ("end", pyarrow.int32()),
            ("version", pyarrow.string()),
            ("stale_kv", pyarrow.bool_()),
        ]
    )
    return pyarrow.schema(
        [
            ("rollout_id", pyarrow.string()),
            ("attempt", pyarrow.int64()),
            ("row", pyarrow.int32()),
            ("temperature", pyarrow.float64()),
            ("tokens", pyarrow.list_(pyarrow.int32())),
            ("loss_mask", pyarrow.list_(pyarrow.bool_())),
            ("logprobs", pyarrow.list_(pyarrow.float32())),
            ("versions", pyarrow.list_(span)),
            ("kinds", pyarrow.list_(pyarrow.uint8())),
        ]
    )


def _write_trajectories(tables: JoinedRows, run_dir: Path, folder: Path) -> tuple[int, int]:
    """Write the token sequences. Return how many were written, and how many attempts could not be read."""
    parquet = parquet_module()
    schema = export_schema()
    written = unreadable = 0
    rows: list[dict[str, Any]] = []
    with parquet.ParquetWriter(folder / "trajectories.parquet", schema, compression="zstd") as writer:
        for rollout_id, attempt, trajectory in _trajectories(tables, run_dir):
            if trajectory is None:
                unreadable += 1
                continue
            rows += (
                {
                    "rollout_id": rollout_id,
                    "attempt": attempt,
                    "row": number,
                    "temperature": trajectory.temperature,
                    "tokens": row.tokens_T,
                    "loss_mask": row.loss_mask_T,
                    "logprobs": row.logprobs_T,
                    "versions": [
                        {"start": one.start, "end": one.end, "version": str(one.version), "stale_kv": one.stale_kv}
                        for one in row.versions
                    ],
                    "kinds": row.kinds_T,
                }
                for number, row in enumerate(trajectory.rows)
            )
            if len(rows) >= ROWS_AT_ONCE:
                written += _flush(writer, rows, schema)
        written += _flush(writer, rows, schema)
    return written, unreadable


def _flush(writer: Any, rows: list[dict[str, Any]], schema: Any) -> int:
    import pyarrow

    count = len(rows)
    if rows:
        writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
        rows.clear()
    return count


def _trajectories(tables: JoinedRows, run_dir: Path) -> Iterator[tuple[str, int, Trajectory | None]]:
    """Yield every attempt that has a trajectory, file by file, with None for a missing or damaged trajectory."""
    stored = tables.select("attempts", ("DISTINCT trajectory_file",), where="trajectory_file IS NOT NULL")
    for number in sorted({number for (number,) in stored}):
        order = "rollout_id, attempt"
        keys = tables.select(
            "attempts", ("rollout_id", "attempt"), where="trajectory_file = ?", order=order, values=(number,)
        )
        path = run_dir / "trajectories" / f"{number:06d}.db"
        if not path.is_file():
            yield from ((rollout_id, attempt, None) for rollout_id, attempt in keys.fetchall())
            continue
        with closing(read_only(path)) as blobs:
            for rollout_id, attempt in keys.fetchall():
                yield rollout_id, attempt, read_trajectory(blobs, rollout_id, attempt)
