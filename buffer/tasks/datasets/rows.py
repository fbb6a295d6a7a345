"""The rows of data files, one at a time: JSON lines, lists in JSON, Parquet.

Invariants:
- At most one row (a batch of rows of Parquet) is in memory, except for lists in JSON, whose size is bounded.
- A row that cannot be read is yielded as a refusal with the reason; the rows after it are still read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from headrace.buffer.tasks.task import Task

MAX_ROW_BYTES: Final = 64 << 20
MAX_LIST_BYTES: Final = 256 << 20
_PARQUET_ROWS: Final = 64
_PARQUET_MAGIC: Final = b"PAR1"


class RowRefused(ValueError):
    """A row cannot become a task; the message says why."""


class SourceRefused(ValueError):
    """A file cannot be read as rows or as task folders; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A row that cannot become a task. `line` is its number from 1."""

    line: int
    reason: str


Row: TypeAlias = "tuple[int, object]"
Item: TypeAlias = "tuple[int, Task | RowRefused]"


def read_rows(source: Path) -> Iterator[Row]:
    """Yield the rows of a file with their numbers from 1 (of lines, for JSON lines); a RowRefused stands for a row that
    cannot be read. Raises OSError, SourceRefused."""
    with source.open("rb") as file:
        head = file.read(4096)
        if head.startswith(_PARQUET_MAGIC):
            yield from parquet_rows(source)
            return
        if head.lstrip().startswith(b"["):
            yield from listed_rows(source)
            return
        file.seek(0)
        number = 0
        while line := file.readline(MAX_ROW_BYTES + 1):
            number += 1
            if len(line) > MAX_ROW_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_ROW_BYTES)
                yield number, RowRefused(f"is longer than {MAX_ROW_BYTES >> 20} MiB")
            elif line.strip():
                yield number, _parsed(line)


def _parsed(line: bytes) -> object:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError:
        return RowRefused("is not UTF-8 text")
    except ValueError as error:
        return RowRefused(f"not valid JSON: {error}")
    except RecursionError:
        return RowRefused("not valid JSON: nested too deeply")


def listed_rows(source: Path) -> Iterator[Row]:
    """Yield the elements of a file with one list in JSON. Raises OSError, SourceRefused."""
    if source.stat().st_size > MAX_LIST_BYTES:
        raise SourceRefused(f"{source}: a list in JSON may have {MAX_LIST_BYTES >> 20} MiB; write JSON lines instead")
    found = _parsed(source.read_bytes())
    if not isinstance(found, list):
        raise SourceRefused(f"{source}: {found}; write one list, or JSON lines")
    yield from enumerate(found, start=1)


def parquet_rows(source: Path) -> Iterator[Row]:
    """Yield the rows of a Parquet file. Raises OSError, SourceRefused."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise SourceRefused(f"{source}: reading Parquet needs pyarrow: pip install 'headrace[parquet]'") from error
    number = 0
    try:
        with parquet.ParquetFile(source) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (ArrowException, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise SourceRefused(f"{source}: damaged Parquet after row {number}: {reason}") from error
