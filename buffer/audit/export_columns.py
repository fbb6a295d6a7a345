"""The columns of exported tables: their Parquet types, and the conversion of the ledger's values.

Invariants:
- A column of the ledger has one type in every export, whatever its rows contain. Flags are booleans, numbers by name
  are maps, other structures are lists and structs; only documents of no fixed form stay JSON text.
- A breakdown becomes a column for its parts and one for each label (`LABELS`). A label of another type is null.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from headrace.buffer.ledger.schema import TABLES
from headrace.buffer.trajectories.breakdown import Breakdown
from headrace.buffer.trajectories.timeline import Timeline

_TYPES: Final = {"TEXT": "string", "INTEGER": "int64", "REAL": "float64", "BLOB": "binary"}
_FLAGS: Final = {
    (table.name, column) for table in TABLES.values() for column, read in table.read.items() if read is bool
}
TASK: Final = ("group_id", "task_id")
"""Columns that are added to `attempts`."""
LABELS: Final[Mapping[str, type]] = {
    "image": str,
    "sandbox": str,
    "worker": str,
    "node": str,
    "agent": str,
    "warm": bool,
    "boot_tries": int,
    "prompt_tokens": int,
    "sampled_tokens": int,
    "trained_tokens": int,
    "masked": str,
    "cached_tokens": int,
    "retractions": int,
    "memory_bytes": int,
    "cpu_s": float,
    "cpu_waited_s": float,
    "family": str,
    "gateway": str,
    "load": float,
    "engines": tuple,
    "tools": tuple,
    "versions": tuple,
}
"""Labels of a breakdown that are columns, and their types."""


MAX_WHOLE: Final = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportColumn:
    """A column of an exported table. `convert` takes a value of the ledger's column `source` that is not null (already
    parsed, for a breakdown)."""

    name: str
    source: str
    type: Any
    convert: Callable[[Any], object]


def export_columns(table: str, columns: Iterable[tuple[str, str]]) -> list[ExportColumn]:
    """Return the exported columns of a table of the ledger, whose `columns` are (name, SQL type)."""
    import pyarrow

    structures = _structures(pyarrow)
    found: list[ExportColumn] = []
    for name, sql_type in columns:
        if name == "breakdown":
            found += _of_breakdown(pyarrow)
            continue
        kind, convert = structures.get((table, name), (getattr(pyarrow, _TYPES[sql_type])(), _same))
        if (table, name) in _FLAGS:
            kind, convert = pyarrow.bool_(), bool
        found.append(ExportColumn(name=name, source=name, type=kind, convert=convert))
    return found


def converted(columns: Sequence[ExportColumn], sources: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[Any]:
    """Return a pyarrow array for each column, of rows whose values are those of the ledger's columns `sources`."""
    import pyarrow

    values: dict[str, Sequence[Any]] = dict(zip(sources, zip(*rows, strict=True), strict=True))
    if "breakdown" in values:
        values["breakdown"] = [None if text is None else Breakdown.from_json(text) for text in values["breakdown"]]
    return [
        pyarrow.array(
            [None if value is None else column.convert(value) for value in values[column.source]], type=column.type
        )
        for column in columns
    ]


def _same(value: object) -> object:
    return value


def _pairs(text: str) -> list[tuple[Any, Any]]:
    """Parse `[[key, value], ...]` or an object. Of equal keys the last counts, since a map has each once."""
    return list(dict(json.loads(text)).items())


def _structures(pyarrow: Any) -> dict[tuple[str, str], tuple[Any, Callable[[Any], object]]]:
    """Return the type and the conversion of each column that is JSON in the ledger and has a fixed form."""
    text, real = pyarrow.string(), pyarrow.float64()
    whole, turn = pyarrow.int64(), pyarrow.int32()
    span = pyarrow.struct([("row", turn), ("start", turn), ("end", turn)])
    step = pyarrow.struct([("turn", turn), ("score", real), ("spans", pyarrow.list_(span))])
    scores = pyarrow.struct(
        [("credit", text), ("outcome", real), ("coefficient", real), ("steps", pyarrow.list_(step))]
    )
    member = pyarrow.struct([("rollout_id", text), ("attempt", whole), ("staleness", whole)])
    failure = pyarrow.struct([("host", text), ("first_at_s", real), ("last_at_s", real)])
    by_name, by_version = pyarrow.map_(text, real), pyarrow.map_(text, whole)
    by_turn = pyarrow.map_(turn, real)
    segment = pyarrow.struct([("part", text), ("start_s", real), ("end_s", real), ("turn", turn), ("detail", text)])
    merged = pyarrow.map_(text, pyarrow.struct([("number", whole), ("seconds", real)]))
    timeline = pyarrow.struct(
        [("began_at_s", real), ("segments", pyarrow.list_(segment)), ("merged", merged), ("left_out", whole)]
    )
    return {
        ("attempts", "trained"): (by_version, _pairs),
        ("attempts", "phases_s"): (by_name, _pairs),
        ("attempts", "scores"): (scores, _scores),
        ("attempts", "timeline"): (timeline, _timeline),
        ("evaluations", "timeline"): (timeline, _timeline),
        ("evaluations", "sampled"): (by_version, _pairs),
        ("rollouts", "first_values"): (by_turn, _pairs),
        ("rollouts", "turn_advantages"): (by_turn, _pairs),
        ("batches", "members"): (pyarrow.list_(member), _structs("rollout_id", "attempt", "staleness")),
        ("commits", "metrics"): (by_name, _pairs),
        ("checkpoints", "batch_ids"): (pyarrow.list_(text), json.loads),
        ("tasks", "failed_on"): (pyarrow.list_(failure), _structs("host", "first_at_s", "last_at_s")),
    }


def _structs(*names: str) -> Callable[[str], list[dict[str, object]]]:
    """Return a parser of a JSON list of lists, whose values have these names."""
    return lambda text: [dict(zip(names, item, strict=True)) for item in json.loads(text)]


def _timeline(text: str) -> dict[str, object]:
    timeline = Timeline.from_json(text)
    return {
        "began_at_s": timeline.began_at_s,
        "segments": [each._asdict() for each in timeline.segments],
        "merged": [(part, each._asdict()) for part, each in timeline.merged.items()],
        "left_out": timeline.left_out,
    }


def _scores(text: str) -> dict[str, object]:
    document = json.loads(text)
    steps = [
        {
            "turn": turn,
            "score": score,
            "spans": [dict(zip(("row", "start", "end"), span, strict=True)) for span in spans],
        }
        for turn, score, spans in document["steps"]
    ]
    return {**document, "steps": steps}


def _of_breakdown(pyarrow: Any) -> list[ExportColumn]:
    """Return the columns of a breakdown."""
    types = {
        str: pyarrow.string(),
        bool: pyarrow.bool_(),
        int: pyarrow.int64(),
        float: pyarrow.float64(),
        tuple: pyarrow.list_(pyarrow.string()),
    }
    parts = pyarrow.map_(pyarrow.string(), pyarrow.float64())

    def label(breakdown: Breakdown, name: str, kind: type) -> object:
        value = breakdown.labels.get(name)
        if isinstance(value, bool) or kind not in (int, float):
            return value if type(value) is kind else None
        return kind(value) if isinstance(value, int | float) and abs(value) < MAX_WHOLE else None

    return [
        ExportColumn(name="wall_s", source="breakdown", type=types[float], convert=lambda each: each.wall_s),
        ExportColumn(name="parts_s", source="breakdown", type=parts, convert=lambda each: list(each.parts_s.items())),
        *(
            ExportColumn(name=name, source="breakdown", type=types[kind], convert=partial(label, name=name, kind=kind))
            for name, kind in LABELS.items()
        ),
    ]
